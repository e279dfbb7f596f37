"""What a KV cache of 8-bit codes is worth: decode steps over long contexts, and tokens that fit.

    python benchmarks/kv_cache.py OUT.jsonl [--model preset:qwen3-8b:int4] [--kv model fp8 int8]
        [--case 1x16384 32x4096]

One process loads the weights once and gives them to an engine for each type of cache, so that only
the cache differs. Prompts are found in the prefix cache after the first run: a case costs one
prefill. A row has the rate of decoding, the tokens that fit beside the model, and on a GPU the time
of a step and of its attention (where qkv and attention are one kernel, of both).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
from pathlib import Path
from typing import Any

import torch

from flyweight.bench.facts import Variant, facts_of
from flyweight.bench.profile import Profiler, Workload
from flyweight.bench.rows import ResultFile, environment_row, make_row, rounded
from flyweight.bench.steps import measure_steps
from flyweight.engine.llm import LLM

OUTPUT = 34  # tokens of an answer, as in `bench step`
REPEATS = 5
MANY = 256
SHOWN = ("kv_dtype", "batch", "input", "decode_tok_s", "step_us", "attention_us", "kv_tokens")


def workload(text: str) -> Workload:
    """`32x4096`: sequences, and the tokens of each prompt."""
    batch, tokens = map(int, text.split("x"))
    return Workload(batch, tokens, OUTPUT)


def engine(model: str, kv: str, works: list[Workload], *, decoder: Any, step_tokens: int) -> LLM:
    """With as many pages as fit on a GPU; on a CPU, which only tries the script out, few."""
    longest = max(work.input + work.output for work in works)
    most = max(work.batch for work in works)
    return LLM(
        model,
        kv_dtype=kv,
        decoder=decoder,
        max_num_seqs=max(most, 64) if torch.cuda.is_available() else most,
        max_model_len=longest,
        max_num_batched_tokens=step_tokens,
        native=False,
    )


def tokens_that_fit(
    model: str, kv: str, *, decoder: Any, step_tokens: int
) -> tuple[dict[str, Any], Any]:
    """Beside the model, where nothing but memory limits them; and the decoder, for the next."""
    most = MANY if torch.cuda.is_available() else 1  # requests as long as the model allows
    llm = LLM(
        model,
        kv_dtype=kv,
        decoder=decoder,
        max_num_seqs=most,
        max_num_batched_tokens=step_tokens,
        native=False,
    )
    memory = llm.memory()
    return {"kv_tokens": memory.kv_tokens, "kv_gb": memory.kv / 1e9}, llm.decoder


def measure(llm: LLM, work: Workload) -> dict[str, Any]:
    """Tokens a second of all sequences together, the median of a few runs; on a GPU the
    microseconds of a step and of the attention in it.
    """
    profiler = Profiler(llm, work)
    seconds = [profiler.decode(contextlib.nullcontext) for _ in range(1 + REPEATS)][1:]
    latency = statistics.median(seconds)
    row = {
        "batch": work.batch,
        "input": work.input,
        "output": work.output,
        "latency_s": latency,
        "decode_tok_s": work.batch * (work.output - 2) / latency,
    }
    if llm.device.type == "cuda":
        parts = {part["operator"]: part["self_us"] for part in measure_steps(llm, work)}
        row["step_us"] = parts["step"]
        row["attention_us"] = sum(us for name, us in parts.items() if "attention" in name)
    return row


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="preset:qwen3-8b:int4")
    parser.add_argument("--kv", nargs="+", default=["model", "fp8", "int8"])
    parser.add_argument("--case", nargs="+", default=["1x16384", "32x4096"])
    parser.add_argument("--step-tokens", type=int, default=16640, help="of prompts in one step")
    options = parser.parse_args(arguments)
    works = [workload(case) for case in options.case]
    facts = facts_of(Variant(options.model)).fields() | {
        "backend": "native",
        "workload": "long_cache",
    }
    environment = environment_row("cuda" if torch.cuda.is_available() else "cpu")
    file = ResultFile(options.out)
    decoder = None
    for kv in options.kv:
        fit, decoder = tokens_that_fit(
            options.model, kv, decoder=decoder, step_tokens=options.step_tokens
        )
        gc.collect()
        torch.cuda.empty_cache()
        llm = engine(options.model, kv, works, decoder=decoder, step_tokens=options.step_tokens)
        for work in works:
            seen = {"kv_dtype": llm.kv_dtype} | fit
            fields = rounded(facts | seen | measure(llm, work))
            file.add(environment, make_row("latency", environment["id"], **fields))
            print({name: fields[name] for name in SHOWN if name in fields}, flush=True)
        del llm
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
