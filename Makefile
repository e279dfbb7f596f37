# Two commands do all the set-up: `make demo` and `make test`. Both work from a bare machine with Python 3.11+.
PYTHON ?= python3
BIN := .venv/bin
MODEL ?= smollm2-135m

.PHONY: demo test lint clean

# torch goes first and pinned, so that nothing pulls another build of it.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

# The main job, end to end, on the default real model; `make demo TEXT=file.txt` measures on a text of your own.
TEXT ?= README.md
demo: .venv/installed
	$(BIN)/flyweight pull $(MODEL)
	$(BIN)/flyweight info $(MODEL)
	$(BIN)/flyweight generate $(MODEL) --prompt "The capital of France is" --max-tokens 32 --temperature 0
	$(BIN)/flyweight eval $(MODEL) --text $(TEXT) --tokens 1024

test: .venv/installed
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf .venv build dist
