# `make demo` and `make test` set everything up by themselves on a machine with Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test thorough lint types accuracy clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet 'torch>=2.11,<2.14'
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

# Modules are compiled once, and not by every process of the tests; a process has one core, as others stand beside it.
unexport PYTHONDONTWRITEBYTECODE
test thorough: export OMP_NUM_THREADS = 1

# Files of tests run side by side, one process more than there are cores, as a third of the time some only wait: memory limits how
# many. The longest begin first (tests/conftest.py).
WORKERS := $(shell $(PYTHON) -c "import os; print(min((os.cpu_count() or 1) + 1, 4))")
test: lint types
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# All cases of the tests that sweep over many: twice the time.
thorough: lint types
	$(BIN)/python -m pytest --thorough --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

accuracy: $(VENV)/.installed
	$(BIN)/python benchmarks/accuracy.py $(wildcard benchmarks/published/*_rows.csv)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache demo-out
