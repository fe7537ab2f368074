# Everything from a bare checkout: needs Python 3.10 or newer, and make.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
TF_BIN := .venv-tf/bin
TF_READY := .venv-tf/.ready

.PHONY: demo test test-gpu test-tf check clean table

demo: $(READY)  ## four emulated hosts race dense training against compressed
	$(BIN)/laconic demo

test: $(READY)  ## all tests
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-gpu:  ## the tests that need a GPU, with the Python that has torch for it
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu

test-tf: $(TF_READY)  ## the tests of laconic.keras, in an environment of their own
	$(TF_BIN)/python -m pytest tests/tf

check: $(READY)  ## format, lint, types, and the direction of imports
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_arrows.py

table: $(READY)  ## writes the generated parts of the README anew
	$(BIN)/laconic methods --markdown README.md

clean:
	rm -rf .venv .venv-tf .mypy_cache .pytest_cache .ruff_cache

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench,dev]'
	touch $@

$(TF_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-tf
	$(TF_BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench,tf]' pytest pytest-timeout
	touch $@
