#!/usr/bin/env python3
"""vLLM's n-gram speculation on the prompts of speculation.py, beside vLLM without: a process for
each, since vLLM keeps a GPU.

    python benchmarks/speculation_vllm.py ./smollm2 --text book.txt --chat mt-bench-questions.jsonl
        --code scheduler.py
    python benchmarks/speculation_vllm.py ./smollm2 --ngram 7 --text book.txt --chat
        mt-bench-questions.jsonl --code scheduler.py

MODEL is a folder. Prompts go one at a time, greedy. vLLM's library tells no times of tokens, so a
prompt is asked twice, for one token and for all of them, and the rate is that of the tokens
between; the second of two rounds counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from speculation import CONTEXT, prompts_of
from vllm_plugin import turn


def rate(llm: Any, sampling: Any, prompt: Any, tokens: int) -> tuple[float, int]:
    """Tokens a second after the first, and how many there were."""

    def answer(count: int) -> tuple[float, int]:
        params = sampling(temperature=0, max_tokens=count)
        begin = time.perf_counter()
        ask = llm.generate if isinstance(prompt, str) else llm.chat
        (output,) = ask([prompt], params, use_tqdm=False)
        return time.perf_counter() - begin, len(output.outputs[0].token_ids)

    first, _ = answer(1)
    whole, count = answer(tokens)
    return (count - 1) / (whole - first), count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--ngram", type=int, default=0, help="guesses in a step; 0: no speculation")
    parser.add_argument("--text", action="append")
    parser.add_argument("--code", action="append")
    parser.add_argument("--chat")
    parser.add_argument(
        "--only",
        action="append",
        choices=("quoting", "plain", "code", "chat"),
        help="kinds; all that there are",
    )
    parser.add_argument("--prompts", type=int, default=8, help="of each kind")
    parser.add_argument("--tokens", type=int, default=192, help="of an answer, at most")
    parser.add_argument(
        "--turn",
        type=Path,
        help="a file that is locked while something is measured, as in vllm_plugin.py",
    )
    parser.add_argument("--cache-gb", type=int, default=1, help="of KV cache")
    options = parser.parse_args()

    import vllm

    guessing: dict[str, Any] = {}
    if options.ngram:
        guessing["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": options.ngram,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    llm = vllm.LLM(
        options.model,
        dtype="bfloat16",
        max_model_len=CONTEXT,
        max_num_seqs=4,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=options.cache_gb << 30,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8]},
        **guessing,
    )
    with turn(options.turn):
        measure(llm, options)


def measure(llm: Any, options: argparse.Namespace) -> None:
    import torch
    import vllm

    kinds = prompts_of(options)
    kinds.pop("novel", None)  # vLLM's answers are greedy ones
    for kind, prompts in kinds.items():
        found: list[tuple[float, int]] = []
        for _ in range(2):
            found = [rate(llm, vllm.SamplingParams, prompt, options.tokens) for prompt in prompts]
        rates = [one for one, count in found if count > 1]
        row = {
            "engine": f"vllm {vllm.__version__}",
            "model": Path(options.model).name,
            "device": torch.cuda.get_device_name(0),
            "prompts": kind,
            "drafter": f"ngram:{options.ngram}" if options.ngram else "off",
            "tok_s": round(statistics.median(rates), 1),
            "of": len(rates),
            "tokens": sum(count for _, count in found),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
