# Everything from a bare checkout: needs Python 3.10 or newer, and make.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-gpu check audit audit-online clean table

demo: $(READY)  ## four emulated hosts race dense training against compressed
	$(BIN)/laconic demo

test: $(READY)  ## all tests
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-gpu:  ## the tests that need a GPU, with the Python that has torch for it
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu

check: $(READY)  ## format, lint, types, and the direction of imports
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_arrows.py

audit: $(READY)  ## what we stand on: versions and licences; fails where one is not pinned
	$(BIN)/python tests/audit.py
	$(BIN)/python -m pytest -q tests/test_dependencies.py

audit-online: $(READY)  ## asks the network which pinned versions have known vulnerabilities
	$(PYTHON) -m venv .venv/audit
	.venv/audit/bin/pip install --quiet pip-audit
	.venv/audit/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip

table: $(READY)  ## writes the generated parts of the README anew
	$(BIN)/laconic methods --markdown README.md

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench,dev]'
	touch $@
