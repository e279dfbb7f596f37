"""How long from nothing to the first token: a new process, a folder of random weights in the file
cache, kernels compiled.

    python benchmarks/startup.py OUT.jsonl [--model preset:qwen3-8b:int4] [--format awq] [--folder
        FOLDER] [--repeats 2]

The folder is written once if it is not there. The first start is not counted: it fills the file
cache and compiles. Each row is one later start, from the launch of the interpreter to holding the
first token of a prompt of 128; `import_s`, `load_s` and `first_s` are its parts, and `kernels_s`
what it took of them to get its `kernels` from the cache. `compile_s` is `flyweight compile` of the
model with an empty cache: dry run and compiler, on all cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from flyweight.bench.timing import random_prompts
from flyweight.clock import clock

INPUT = 128


def worker(folder: str) -> None:
    """Prints the seconds of its parts as soon as it has the token."""
    begin = clock()
    from flyweight import LLM, SamplingParams
    from flyweight.kernels import jit

    imported, load, kernels = clock(), jit._load, []

    def timed(*wanted: object) -> object:
        asked = clock()
        module = load(*wanted)
        kernels.append(clock() - asked)
        return module

    jit._load = timed
    llm = LLM(folder)
    loaded = clock()
    (prompt,) = random_prompts(1, INPUT, vocabulary=llm.config.vocab_size, seed=0)
    llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    print(
        json.dumps(
            {
                "import_s": imported - begin,
                "load_s": loaded - imported,
                "first_s": clock() - loaded,
                "kernels": load.cache_info().currsize,
                "kernels_s": sum(kernels),
                "kv_dtype": str(llm.dtype).removeprefix("torch."),
                "memory": str(llm.memory()),
            }
        ),
        flush=True,
    )


def start(folder: Path) -> dict:
    """Seconds until a fresh process had its first token; what it does afterwards is
    nobody's wait.
    """
    begin = clock()
    process = subprocess.Popen(
        [sys.executable, __file__, "--worker", str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    seconds = clock() - begin
    if process.wait() or not line:
        sys.exit("the worker failed")
    return {"latency_s": seconds, "ttft_ms_last": 1e3 * seconds, **json.loads(line)}


def compile_cold(model: str) -> float:
    """Seconds until an empty cache holds all kernels of the model."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", "flyweight", "compile", model, "--json"],
            check=True,
            text=True,
            stdout=subprocess.PIPE,
            env=os.environ | {"FLYWEIGHT_CACHE": cache},
        )
    return float(json.loads(done.stdout)["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?", default=Path("startup.jsonl"))
    parser.add_argument("--model", default="preset:qwen3-8b:int4")
    parser.add_argument("--format", default="awq")
    parser.add_argument("--folder", type=Path, default=Path("startup.work"))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.worker)
    import torch

    from flyweight.bench.facts import Variant, facts_of
    from flyweight.bench.rows import ResultFile, environment_row, make_row, rounded
    from flyweight.models.random_folder import write_preset

    device = "cuda" if torch.cuda.is_available() else "cpu"
    environment, facts = environment_row(device), facts_of(Variant(options.model)).fields()
    if not options.folder.exists():
        write_preset(options.model, options.folder, format=options.format, device=device)
    torch.cuda.empty_cache()
    file = ResultFile(options.out)
    file.append([environment])
    compile_s = compile_cold(options.model) if device == "cuda" else None
    cold = start(options.folder)
    for repeat in range(1, options.repeats + 1):
        fields = facts | {
            "backend": "native",
            "workload": "startup",
            "batch": 1,
            "input": INPUT,
            "output": 1,
            "repeat": repeat,
            "file_format": options.format,
            "first_start_s": cold["latency_s"],
            "compile_s": compile_s,
        }
        fields |= start(options.folder)
        file.append([make_row("latency", environment["id"], **rounded(fields))])
        print({name: value for name, value in fields.items() if name.endswith("_s")}, flush=True)


if __name__ == "__main__":
    main()
