# Two commands do all the set-up: `make demo` and `make test`. Both work from a bare machine with Python 3.11+.
PYTHON ?= python3
BIN := .venv/bin
MODEL ?= smollm2-135m

.PHONY: demo test test-interop lint clean

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

# Formats checked with the packages that other people use; heavy, so in an environment of their own.
.venv-interop/installed: constraints.txt tests/interop/requirements.txt tests/interop/requirements-no-deps.txt
	$(PYTHON) -m venv .venv-interop
	.venv-interop/bin/pip install --quiet --upgrade pip
	.venv-interop/bin/pip install --quiet --constraint constraints.txt torch
	.venv-interop/bin/pip install --quiet "$$(grep ^torch== constraints.txt)" --requirement tests/interop/requirements.txt
	BUILD_CUDA_EXT=0 .venv-interop/bin/pip install --quiet --no-deps --requirement tests/interop/requirements-no-deps.txt
	@touch $@

test-interop: .venv-interop/installed
	PYTHONPATH=src .venv-interop/bin/python -m pytest -m interop tests/interop

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf .venv .venv-interop build dist
