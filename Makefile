# Two commands do all the set-up: `make demo` and `make test`. Both work from a bare machine with Python 3.11+.
PYTHON ?= python3
BIN := .venv/bin
# Where the environment says that bytecode is not to be kept, each of the processes that tests start would compile this package again.
export PYTHONDONTWRITEBYTECODE =
MODEL ?= smollm2-135m

.PHONY: demo test test-interop lint results clean

# torch goes first and pinned, so that nothing pulls another build of it. Bytecode is made when a module is first imported: of all
# that these packages hold it would take longer than the rest of the installation.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable ".[dev]"
	@touch $@

# The main job, end to end, on the default real model; `make demo TEXT=file.txt` measures on a text of your own. The
# calibration is kept small: two slow cores are enough. The default model is a GGUF of 4 to 5 bits: its weights are written out in 16
# bits first, as the original of most models is.
TEXT ?= built-in
SCHEMES ?= w8a8-smooth gptq-int4 rtn-int4
# Two schemes at a time, the longest first, each with half of the cores: much of quantizing keeps only one of them busy.
HALF := $(shell echo $$(( ($$(getconf _NPROCESSORS_ONLN) + 1) / 2 )))
quantize-%:
	$(BIN)/flyweight quantize out/original --scheme $* -o out/$* --samples 4 --length 256 --overwrite --threads $(HALF)

demo: .venv/installed
	$(BIN)/flyweight pull $(MODEL)
	$(BIN)/flyweight info $(MODEL)
	$(BIN)/flyweight generate $(MODEL) --prompt "The capital of France is" --max-tokens 32 --temperature 0
	test -d out/original || $(BIN)/flyweight pull $(MODEL) --dtype float16 --output out/original
	@echo "Quantizing by $(SCHEMES), two at a time; each is shown when it is finished"
	@$(MAKE) --no-print-directory --jobs 2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) $(SCHEMES:%=quantize-%)
	rm -f out/result.jsonl
	$(BIN)/flyweight eval out/original $(SCHEMES:%=out/%) --text $(TEXT) --tokens 1024 --served -o out/result.jsonl
	$(BIN)/flyweight bench latency out/original $(SCHEMES:%=out/%) --batch 1 --input 64 --output 32 -o out/result.jsonl
	$(BIN)/flyweight report out/result.jsonl -o out/report.html --title "$(MODEL), quantized"
	@echo "The report is in out/report.html"

# One process for each of two cores: what takes longest, kernels run by a compiler for the CPU, uses just one.
JOBS ?= 2
test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

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
	$(BIN)/ruff format --check src benchmarks tests
	$(BIN)/mypy

# Every table and picture of the rows in benchmarks/h200/.
results: .venv/installed
	$(BIN)/python benchmarks/results.py

clean:
	rm -rf .venv .venv-interop build dist
