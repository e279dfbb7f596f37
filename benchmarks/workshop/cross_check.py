"""Do two clocks agree? The vLLM backend of `bench latency` against vLLM's own `vllm bench latency`,
on one engine, by turns.

    python benchmarks/workshop/cross_check.py OUT.jsonl [--model preset:qwen3-8b:bf16] [--batch 8
        --input 256] [--rounds 5]

vLLM's command runs as it is, but is handed the engine that runs already, so that both time the same
one under the same weather; both sample at temperature 1, as it does, and turn no tokens into text.
Rows: `vllm` and `vllm bench latency`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from flyweight.backends.base import EngineOptions, Limits
from flyweight.backends.vllm import Vllm
from flyweight.bench.facts import Variant, facts_of
from flyweight.bench.rows import ResultFile, environment_row, make_row, rounded
from flyweight.bench.timing import random_prompts
from flyweight.device import pick_device

OWN, THEIRS, MOST = "vllm", "vllm bench latency", 0.05


class Ready:
    """Stands in for vLLM's class `LLM`: whoever makes one gets the one that is there."""

    def __init__(self, engine: Any):
        self.engine = engine

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.engine

    from_engine_args = __call__


def own_command(engine: Any, options: argparse.Namespace) -> float:
    """Seconds of one batch by vLLM's own benchmark."""
    import vllm
    from vllm.benchmarks import latency
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    kind = vllm.LLM
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "latency.json"
        parser = FlexibleArgumentParser()
        latency.add_cli_args(parser)
        arguments = {
            "model": engine.llm_engine.model_config.model,
            "input-len": options.input,
            "output-len": options.output,
            "batch-size": options.batch,
            "num-iters": 1,
            "num-iters-warmup": 0,
            "output-json": file,
        }
        words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
        vllm.LLM = Ready(engine)
        try:
            latency.main(parser.parse_args([*words, "--disable-detokenize"]))
        finally:
            vllm.LLM = kind
        return float(json.loads(file.read_text())["latencies"][0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="preset:qwen3-8b:bf16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--input", type=int, default=256)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype")
    parser.add_argument(
        "--option",
        nargs="*",
        default=[],
        metavar="KEY=JSON",
        help="for the engine, by its own names",
    )
    options = parser.parse_args()
    extra = {
        key: json.loads(value) for key, value in (pair.split("=", 1) for pair in options.option)
    }
    facts, device = facts_of(Variant(options.model)), pick_device(None)
    backend = Vllm(options.model, EngineOptions(dtype=options.dtype, extra=extra))
    backend.temperature = 1.0
    backend.start(Limits.of([(options.batch, options.input + options.output)]))
    environment, file = environment_row(device), ResultFile(options.out)
    file.append([environment])

    def ours(seed: int) -> float:
        prompts = random_prompts(
            options.batch, options.input, vocabulary=facts.vocabulary, seed=seed
        )
        return backend.generate(prompts, options.output).seconds

    times: dict[str, list[float]] = {OWN: [], THEIRS: []}
    for number in range(-1, options.rounds):
        pair = [(OWN, ours(number)), (THEIRS, own_command(backend.inner, options))][
            :: 1 if number % 2 else -1
        ]
        for name, seconds in pair if number >= 0 else ():  # the first round warms up
            times[name].append(seconds)
            fields = facts.fields() | {
                "backend": name,
                "kv_dtype": backend.kv_dtype,
                "batch": options.batch,
                "input": options.input,
                "output": options.output,
                "repeat": number + 1,
                "latency_s": seconds,
                "sampling": "temperature 1",
            }
            file.append([make_row("latency", environment["id"], **rounded(fields))])
    ratio = statistics.median(times[OWN]) / statistics.median(times[THEIRS])
    print(f"{OWN} ÷ {THEIRS}: {ratio:.4f} (medians of {options.rounds})")
    sys.exit(0 if abs(ratio - 1) <= MOST else f"they differ by more than {MOST:.0%}")


if __name__ == "__main__":
    main()
