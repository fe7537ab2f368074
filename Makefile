# Everything from a bare checkout: needs Python 3.10 or newer, and make.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEMO_READY := .venv/.ready-demo
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# make test-torch TORCH=2.7.1 runs the fast tests with another torch, in an environment of its own.
# TORCH_PIP are pip's options for it, such as the index of the builds for CPUs.
TORCH ?= 2.14.1
TORCH_PIP ?=
TORCH_VENV := .venv/torch-$(TORCH)

# Hundreds of processes of the tests import the package: all but the first find it compiled, even
# where the shell asks for the opposite.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-fast test-torch test-gpu test-logging test-tf test-torchft smoke check wheel audit audit-online clean docs table

demo: $(DEMO_READY)  ## four emulated hosts race dense training against compressed
	$(BIN)/gradwire demo

test: $(READY)  ## all tests
	$(PYTEST) --durations 25

test-fast: $(READY)  ## the tests that take no longer than a moment: minutes less than all of them
	$(PYTEST) -m 'not slow'

test-torch: $(TORCH_VENV)/.ready  ## the fast tests with another version of torch: TORCH=2.9.1
	$(TORCH_VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
	    -m 'not slow' -p no:cacheprovider

test-gpu:  ## the tests that need a GPU, with the Python that has torch for it
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu

test-tf: $(READY)  ## the tests of gradwire.keras, for which TensorFlow is installed
	$(BIN)/pip install --quiet --constraint constraints.txt --constraint constraints-tf.txt --editable '.[tf]'
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/tf

test-torchft: $(READY)  ## the tests of gradwire.elastic with real replicas, for which torchft is installed
	$(BIN)/pip install --quiet --constraint constraints.txt --constraint constraints-torchft.txt --editable '.[torchft]' \
	    || echo "torchft cannot be installed here: its tests are skipped"
	$(BIN)/python -m pytest tests/replicas

smoke: $(READY)  ## a few steps of every case of every study, with tiny models
	$(BIN)/gradwire study $$($(BIN)/gradwire study | cut -d: -f1) --smoke --minutes 60

check: $(READY)  ## format, lint, types, and the direction of imports
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_arrows.py

docs: $(READY)  ## the documentation site in build/site; a broken link is an error
	$(BIN)/python docs/_site/assemble.py build/docs
	$(BIN)/python -m sphinx -q -W --keep-going -j 2 -c docs/_site build/docs build/site

wheel: $(READY)  ## wheel and sdist in dist/, checked as an index of packages would
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

test-logging: $(READY)  ## the code of docs/how-to/logging.md, for which W&B, MLflow and TensorBoard are installed
	$(BIN)/pip install --quiet --constraint constraints.txt --constraint constraints-logging.txt --editable '.[logging]'
	$(BIN)/python -m pytest -n 2 tests/docs/test_logging.py

audit: $(READY)  ## what we stand on: versions and licences; fails where one is not pinned
	$(BIN)/python tests/audit.py
	$(BIN)/python -m pytest -q tests/test_dependencies.py

audit-online: $(READY)  ## asks the network which pinned versions have known vulnerabilities
	$(PYTHON) -m venv .venv/audit
	.venv/audit/bin/pip install --quiet pip-audit
	.venv/audit/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip

table: $(READY)  ## regenerates docs/reference/methods/table.md, the table of docs/reference/wire.md, and the pages of docs/results
	$(BIN)/gradwire methods --markdown docs/reference/methods/table.md
	$(BIN)/python docs/_site/write_tables.py

clean:
	rm -rf build .venv .mypy_cache .pytest_cache .ruff_cache

# What make says while it installs is pip's: it takes minutes, and silence looks like a hang.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --constraint constraints.txt --editable '.[bench,dev,docs]'
	touch $(DEMO_READY) $@

# The demo needs neither the tests' packages nor those of the documentation.
$(DEMO_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --constraint constraints.txt --editable '.[bench]'
	touch $@

# Not the pins, which are for one version of Python and torch; pip knows groups since 25.1.
$(TORCH_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/pip install --upgrade 'pip>=25.1'
	$(TORCH_VENV)/bin/pip install $(TORCH_PIP) 'torch==$(TORCH)' numpy
	$(TORCH_VENV)/bin/pip install --group test
	$(TORCH_VENV)/bin/pip install --no-deps --editable .
	touch $@
