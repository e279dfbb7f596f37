"""A sentence hidden in a long text, and asked for: does a KV cache of 8-bit codes still find it?

    python benchmarks/needle.py OUT.jsonl --model FOLDER --text wiki.txt
        [--length 16384 32768] [--depths 10] [--kv model fp8 int8]

The text is cut to so many tokens that the whole prompt (the chat template's parts, the text with
the needle, the question) has `length`. The needle stands at evenly spaced depths, 0 the beginning
and 1 the end, between two lines of the text, and names a number that the answer must hold. The
deepest needle comes first: the prompts after it find what they share with it in the prefix cache.

One row for each type of cache and length: the share of needles found, and which. A CPU takes
minutes for each prompt of 16,384 tokens; this is for a GPU, or for shorter texts.
"""

from __future__ import annotations

import argparse
import gc
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flyweight.bench.facts import Variant, facts_of
from flyweight.bench.rows import ResultFile, environment_row, make_row
from flyweight.clock import clock
from flyweight.engine.llm import LLM
from flyweight.engine.tokenizer import Tokenizer

NEEDLE = "\nThe secret number of the old lighthouse is {number}.\n"
BEFORE = "Read the following text. There is a secret number in it.\n\n"
QUESTION = (
    "\n\nWhat is the secret number of the old lighthouse, as the text above says? "
    "Answer with the number alone."
)
PLAIN = "\nThe secret number of the old lighthouse is"  # of models that only go on with a text
ANSWER = 24  # tokens


@dataclass(frozen=True)
class Haystack:
    """A text in tokens, line by line, so that a needle never stands within a line."""

    tokenizer: Tokenizer
    lines: list[list[int]]

    @classmethod
    def of(cls, tokenizer: Tokenizer, text: str) -> Haystack:
        lines = (tokenizer.encode(line + "\n", special=False) for line in text.splitlines())
        return cls(tokenizer, list(lines))

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, special=False)

    def ends(self) -> tuple[list[int], list[int]]:
        """What stands before and after the text: by the chat template where there is one."""
        if not getattr(self.tokenizer.inner, "chat_template", None):
            return self.tokenizer.encode(BEFORE), self.tokens(PLAIN)
        mark = "\x1d"
        message = {"role": "user", "content": BEFORE + mark + QUESTION}
        before, after = self.tokenizer.render_chat([message]).split(mark)
        return self.tokens(before), self.tokens(after)

    def prompt(self, number: int, depth: float, length: int) -> list[int]:
        """`length` tokens, or a few less."""
        before, after = self.ends()
        needle = self.tokens(NEEDLE.format(number=number))
        room = length - len(before) - len(after) - len(needle)
        kept, count = [], 0
        for line in self.lines:
            if count + len(line) > room:
                break
            kept.append(line)
            count += len(line)
        assert count > 0.9 * room, f"the text has fewer than {length} tokens, or lines too long"
        at, passed = 0, 0
        while at < len(kept) and passed + len(kept[at]) / 2 < depth * count:
            passed += len(kept[at])
            at += 1
        flat = [[token for line in part for token in line] for part in (kept[:at], kept[at:])]
        return [*before, *flat[0], *needle, *flat[1], *after]


def needles(count: int, seed: int) -> list[tuple[float, int]]:
    """(depth, number), the deepest first."""
    draw = random.Random(seed)
    depths = [i / max(count - 1, 1) for i in reversed(range(count))]
    return [(depth, draw.randrange(10_000, 100_000)) for depth in depths]


def measure(llm: LLM, haystack: Haystack, length: int, hidden: list[tuple[float, int]]) -> dict:
    found, answers = [], []
    begin = clock()
    for depth, number in hidden:
        prompt = haystack.prompt(number, depth, length)
        (output,) = llm.generate([prompt], temperature=0, max_tokens=ANSWER)
        answers.append(output.text)
        found.append(str(number) in output.text)
    return {
        "window": length,
        "tokens": len(prompt),
        "depths": [round(depth, 4) for depth, _ in hidden],
        "found": found,
        "share": sum(found) / len(found),
        "answers": answers,
        "seconds": round(clock() - begin, 3),
    }


def load(options: argparse.Namespace, kv: str) -> LLM:
    """With room for the prefixes that the prompts of each length share."""
    page = 16
    blocks = sum(2 * (length + ANSWER) // page + 2 for length in options.length)
    return LLM(
        options.model,
        device=options.device,
        kv_dtype=kv,
        max_model_len=max(options.length) + ANSWER,
        max_num_seqs=4,
        blocks=blocks,
        block_size=page,
        native=False if options.device == "cpu" or not torch.cuda.is_available() else None,
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--length", type=int, nargs="+", default=[16384, 32768])
    parser.add_argument("--depths", type=int, default=10)
    parser.add_argument("--kv", nargs="+", default=["model", "fp8", "int8"])
    parser.add_argument("--device")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    text = options.text.read_text(encoding="utf-8")
    facts = facts_of(Variant(options.model)).fields() | {
        "tool": "needle",
        "text": options.text.name,
    }
    file = ResultFile(options.out)
    environment: dict[str, Any] | None = None
    for kv in options.kv:
        llm = load(options, kv)
        environment = environment or environment_row(llm.device, measure_bandwidth=False)
        assert llm.tokenizer is not None, "the model needs a tokenizer"
        haystack = Haystack.of(llm.tokenizer, text)
        for length in options.length:
            row = measure(llm, haystack, length, needles(options.depths, options.seed))
            fields = facts | {"kv_dtype": llm.kv_dtype} | row
            file.add(environment, make_row("quality", environment["id"], **fields))
            print(llm.kv_dtype, length, f"{row['share']:.0%} found", row["seconds"], flush=True)
        del llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
