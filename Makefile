# Everything from a bare checkout: needs Python 3.10 or newer, and make.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# Hundreds of processes of the tests import the package: all but the first find it compiled, even
# where the shell asks for the opposite.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-gpu test-tf smoke check audit audit-online clean docs table

demo: $(READY)  ## four emulated hosts race dense training against compressed
	$(BIN)/gradwire demo

test: $(READY)  ## all tests
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 25

test-gpu:  ## the tests that need a GPU, with the Python that has torch for it
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu

test-tf: $(READY)  ## the tests of gradwire.keras, for which TensorFlow is installed
	$(BIN)/pip install --quiet --constraint constraints.txt --constraint constraints-tf.txt --editable '.[tf]'
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/tf

smoke: $(READY)  ## a few steps of every case of every study, with tiny models
	$(BIN)/gradwire study $$($(BIN)/gradwire study | cut -d: -f1) --smoke --minutes 60

check: $(READY)  ## format, lint, types, and the direction of imports
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_arrows.py

# Not with --quiet: warnings that nobody sees are not counted as errors either.
docs: $(READY)  ## the documentation site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

audit: $(READY)  ## what we stand on: versions and licences; fails where one is not pinned
	$(BIN)/python tests/audit.py
	$(BIN)/python -m pytest -q tests/test_dependencies.py

audit-online: $(READY)  ## asks the network which pinned versions have known vulnerabilities
	$(PYTHON) -m venv .venv/audit
	.venv/audit/bin/pip install --quiet pip-audit
	.venv/audit/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip

table: $(READY)  ## regenerates the tables of the README and docs/wire.md, and the pages of docs/results
	$(BIN)/gradwire methods --markdown README.md
	$(BIN)/python docs/_site/write_tables.py

clean:
	rm -rf build .venv .mypy_cache .pytest_cache .ruff_cache

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench,dev,docs]'
	touch $@
