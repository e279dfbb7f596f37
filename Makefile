# Two commands do all the set-up: `make demo` and `make test`. Both work from a bare machine with Python 3.11+.
PYTHON ?= python3
BIN := .venv/bin
MODEL ?= smollm2-135m

.PHONY: demo test lint clean

# torch goes first and pinned, so that nothing pulls another build of it. A GPU machine gets cuda-core too.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@if command -v nvidia-smi >/dev/null 2>&1; then $(BIN)/pip install --quiet --constraint constraints.txt cuda-core; fi
	@touch $@

test: .venv/installed
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf .venv build dist
