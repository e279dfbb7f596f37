"""First tokens of long prompts with 4-bit weights: as they are, and in 8 bits (`--prompt-dtype`).

    python benchmarks/prompt_dtype.py OUT.jsonl [--model preset:qwen3-8b:int4] [--kinds int8 fp8]
        [--input 2048 16384] [--repeats 5]

The weights are loaded once; all kinds are measured in one process, one after the other. A row is
the median time from submitting a prompt of random tokens to holding its first token.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from pathlib import Path

import torch

from flyweight.bench.facts import Variant, facts_of
from flyweight.bench.rows import ResultFile, environment_row, make_row, rounded
from flyweight.bench.timing import random_prompts
from flyweight.clock import clock
from flyweight.engine.llm import LLM

WARM_UP = 2


def first_token_ms(llm: LLM, tokens: int, repeats: int) -> list[float]:
    found = []
    count = WARM_UP + repeats
    for prompt in random_prompts(count, tokens, vocabulary=llm.config.vocab_size, seed=1):
        begin = clock()
        llm.generate([prompt], temperature=0, max_tokens=1, ignore_eos=True)
        found.append(1e3 * (clock() - begin))
    return found[WARM_UP:]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="preset:qwen3-8b:int4")
    parser.add_argument("--kinds", nargs="+", default=["int8", "fp8"])
    parser.add_argument("--input", type=int, nargs="+", default=[2048, 16384])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    facts = facts_of(Variant(options.model)).fields()
    environment = environment_row("cuda" if torch.cuda.is_available() else "cpu")
    file = ResultFile(options.out)
    decoder = None
    for kind in (None, *options.kinds):
        llm = LLM(
            options.model,
            decoder=decoder,
            prompt_dtype=kind,
            max_model_len=max(options.input) + 16,
            max_num_seqs=4,
            prefix_cache=False,
            native=False if decoder is None and not torch.cuda.is_available() else None,
        )
        decoder = llm.decoder
        for tokens in options.input:
            times = first_token_ms(llm, tokens, options.repeats)
            fields = facts | {
                "scheme": facts["scheme"] if kind is None else f"{facts['scheme']}, prompts {kind}",
                "backend": "native",
                "kv_dtype": llm.kv_dtype,
                "workload": "first_token",
                "batch": 1,
                "input": tokens,
                "output": 1,
                "latency_s": statistics.median(times) / 1e3,
                "ttft_ms_last": statistics.median(times),
            }
            file.add(environment, make_row("latency", environment["id"], **rounded(fields)))
            print(fields["scheme"], tokens, f"{fields['ttft_ms_last']:.2f} ms", flush=True)
        del llm
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
