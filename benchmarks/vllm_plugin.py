"""vLLM with our kernels and without them, by turns on one GPU: how fast, and do they say the same?

    python benchmarks/vllm_plugin.py preset:qwen3-8b:int4 --out rows.jsonl           decode, batch 1, 8 and 64
    python benchmarks/vllm_plugin.py preset:qwen3-8b:w8a8 --batch 1 --out rows.jsonl
    python benchmarks/vllm_plugin.py FOLDER --agree 512 --out rows.jsonl             teacher-forced, both ways

Two processes start vLLM on the same model, one with the plug-in and one with `FLYWEIGHT_VLLM=off`; both wait for each
other, and then measure in turns. Rows name the classes that multiplied (`linear_kernels`). By default vLLM captures whole
decode steps and compiles nothing (its mode 0), which starts in a minute; `--compiled` leaves everything at its defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from flyweight.backends.base import EngineOptions, Limits, create
from flyweight.bench.cases import Case
from flyweight.bench.facts import Variant, facts_of
from flyweight.bench.rows import ResultFile, Row, environment_row, make_row, rounded
from flyweight.bench.timing import batch_figures, random_prompts

SIDES = {"on": "vllm-plugin", "off": "vllm"}  # the plug-in → backend
KEY = b"flyweight"
WARM = 24  # tokens


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    extra: dict[str, Any] = dict(gpu_memory_utilization=options.memory, kv_cache_memory_bytes=options.cache_gb << 30)
    if not options.compiled:
        graphs = dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=sorted(options.batch))
        extra |= dict(compilation_config=graphs, kernel_config=dict(enable_flashinfer_autotune=False))
    if options.agree:
        extra |= dict(enforce_eager=True, compilation_config=dict(mode=0))
    return extra | {name: json.loads(value) for name, value in (pair.split("=", 1) for pair in options.option)}


# -- one process with an engine --------------------------------------------------------------------------------


def work(address: str) -> None:
    """Starts an engine and does what it is told, until it is told to stop."""
    channel = Client(address, "AF_UNIX", authkey=KEY)
    order = channel.recv()
    begin = time.perf_counter()
    try:
        engine = create(SIDES[order["side"]], order["model"], EngineOptions(dtype=order["dtype"], extra=order["extra"]))
        engine.start(Limits(**order["limits"]))
    except BaseException as error:
        channel.send({"fault": f"{type(error).__name__}: {error}"[:800]})
        raise
    channel.send({"seconds": time.perf_counter() - begin, "kv_dtype": engine.kv_dtype,
                  "kernels": getattr(engine, "linear_kernels", None)})
    while order := channel.recv():
        try:
            channel.send(ACTIONS[order.pop("do")](engine, **order))
        except Exception as error:
            channel.send({"fault": f"{type(error).__name__}: {error}"[:800]})
    engine.stop()


def measure(engine: Any, *, batch: int, input: int, output: int, vocabulary: int, seed: int) -> Row:
    prompts = random_prompts(batch, input, vocabulary=vocabulary, seed=seed)
    return batch_figures(engine.generate(prompts, output), input=input, output=output)


def forced(engine: Any, *, ids: list[int]) -> Row:
    """By position: the likeliest token, its lead over the second, and the log-probability of the text's own."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2, detokenize=False)
    found = engine.inner.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0].prompt_logprobs[1:]
    ranked = [sorted(place.items(), key=lambda item: item[1].rank)[:2] for place in found]
    return {"best": [two[0][0] for two in ranked], "lead": [two[0][1].logprob - two[1][1].logprob for two in ranked],
            "own": [place[token].logprob for place, token in zip(found, ids[1:], strict=True)]}


ACTIONS = {"measure": measure, "forced": forced}


# -- the process that measures ---------------------------------------------------------------------------------


class Engine:
    """One side, as the measuring process sees it."""

    channel: Connection

    def __init__(self, side: str, folder: Path):
        self.side = side
        self.log = folder / f"{side}.log"
        environment = dict(os.environ, VLLM_LOGGING_LEVEL="INFO", VLLM_USE_FLASHINFER_SAMPLER="0")
        environment["FLYWEIGHT_VLLM"] = "off" if side == "off" else os.environ.get("FLYWEIGHT_VLLM", "on")
        address = str(folder / f"{side}.socket")
        self.listener = Listener(address, "AF_UNIX", authkey=KEY)
        with self.log.open("w") as log:
            self.process = subprocess.Popen([sys.executable, __file__, "--worker", address], env=environment, stdout=log,
                                            stderr=subprocess.STDOUT)

    def begin(self, order: Row) -> None:
        self.channel = self.listener.accept()
        self.channel.send(order | {"side": self.side})

    def ask(self, **order: Any) -> Row:
        self.channel.send(order)
        return self.answer()

    def answer(self) -> Row:
        try:
            found: Row = self.channel.recv()
        except EOFError:
            found = {"fault": "the process ended"}
        if "fault" in found:
            print(f"{self.side}: {found['fault']}\n{self.log.read_text(errors='replace')[-3000:]}", flush=True)
            raise SystemExit(1)
        return found

    def stop(self) -> None:
        self.channel.send(None)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def compare_speed(engines: list[Engine], options: argparse.Namespace, write: Any, vocabulary: int) -> None:
    for batch in options.batch:
        shape = dict(batch=batch, input=options.input, output=options.output, vocabulary=vocabulary)
        for engine in engines:
            for seed in range(2):
                engine.ask(do="measure", **shape | dict(output=WARM, seed=-1 - seed))
        rates: dict[str, list[float]] = {engine.side: [] for engine in engines}
        for repeat in range(options.repeats):
            for engine in engines if repeat % 2 else engines[::-1]:
                figures = engine.ask(do="measure", **shape, seed=repeat)
                rates[engine.side].append(figures["decode_tok_s"])
                write(engine, workload=None, batch=batch, input=options.input, output=options.output, repeat=repeat + 1, **figures)
        median = {side: statistics.median(found) for side, found in rates.items()}
        ratio = f", {median['on'] / median['off']:.3f} x" if len(median) == 2 else ""
        print(f"batch {batch}: " + ", ".join(f"{side} {rate:.1f} tok/s" for side, rate in median.items()) + ratio, flush=True)


def compare_tokens(engines: list[Engine], options: argparse.Namespace, vocabulary: int) -> Row:
    ids = random_prompts(1, options.agree, vocabulary=vocabulary, seed=0)[0]
    on, off = (engine.ask(do="forced", ids=ids) for engine in engines)
    other = [i for i, (a, b) in enumerate(zip(on["best"], off["best"], strict=True)) if a != b]
    moved = [abs(a - b) for a, b in zip(on["own"], off["own"], strict=True)]
    return {"positions": len(ids), "same_argmax": len(on["best"]) - len(other),
            "largest_gap_at_difference": max((off["lead"][i] for i in other), default=0.0),
            "logprob_difference_mean": statistics.fmean(moved), "logprob_difference_max": max(moved)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a preset (random weights) or a folder")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--agree", type=int, default=0, metavar="N", help="compare N teacher-forced positions instead")
    parser.add_argument("--sides", nargs="+", default=["on", "off"], choices=list(SIDES))
    parser.add_argument("--dtype")
    parser.add_argument("--memory", type=float, default=0.3, help="vLLM's gpu_memory_utilization, of each of the two")
    parser.add_argument("--cache-gb", type=int, default=4, help="of KV cache, each")
    parser.add_argument("--compiled", action="store_true", help="vLLM's own defaults: compiles for minutes at the first start")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="more arguments of vLLM's LLM, as JSON")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = "cuda" if _has_gpu() else "cpu"
    environment, file = environment_row(device, measure_bandwidth=False), ResultFile(options.out)
    file.append([environment])
    facts = facts_of(Variant.parse(options.model))
    context = options.agree + 16 if options.agree else options.input + options.output
    limits = dict(batch=max(options.batch), context=context, tokens=None)
    order = dict(model=options.model, dtype=options.dtype, extra=engine_options(options), limits=limits)
    folder = Path(tempfile.mkdtemp(prefix="flyweight-vllm-plugin-"))
    engines = [Engine(side, folder) for side in options.sides]
    for engine in engines:
        engine.begin(order)
    started = {engine.side: engine.answer() for engine in engines}
    for side, told in started.items():
        print(f"{side}: started in {told['seconds']:.0f} s, linears by {told['kernels']}", flush=True)

    def write(engine: Engine, bench: str = "latency", **fields: Any) -> None:
        case = Case(facts, create(SIDES[engine.side], options.model, EngineOptions()), SIDES[engine.side])
        told = started[engine.side]
        row = case.fields() | {"kv_dtype": told["kv_dtype"], "linear_kernels": told["kernels"]} | fields
        file.append([make_row(bench, environment["id"], **rounded(row))])

    vocabulary = facts.vocabulary or 1000
    if options.agree:
        found = compare_tokens(engines, options, vocabulary)
        write(engines[0], "quality", check="vllm-plugin", tool="vllm", **found)
        print(json.dumps(found), flush=True)
    else:
        compare_speed(engines, options, write, vocabulary)
    for engine in engines:
        engine.stop()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2])
    else:
        main()
