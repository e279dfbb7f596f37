#!/usr/bin/env python3
r"""Which cards of Ampere and later one row of our kernels would keep busy: reckoned, not measured.

    python benchmarks/saturation.py            # prints the table
    python benchmarks/saturation.py --write    # puts it into docs/add-a-gpu.md

A linear of one row reads its weights once. A card's memory gives so many bytes in each cycle of
each SM: bandwidth / (SMs · boost clock), all three from the vendor's datasheet. The kernels have
shown what an SM takes in on an H200 that ran code compiled for the older card, with its limits
(benchmarks/h200/older-gpus-overlap.jsonl): a chain of a layer's linears, pauses between them
included. Where that is more than a card's memory gives, memory would be the limit there.

What this leaves out: other latencies of memory, other caches, a clock below boost.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks/h200/older-gpus-overlap.jsonl"
PAGE = ROOT / "docs/add-a-gpu.md"
BEGIN, END = "<!-- saturation -->", "<!-- end of saturation -->"
FORMATS = {"bf16": "bf16", "w8a16": "w8a16", "w4a16": "int4"}  # of rows → of users


@dataclass(frozen=True)
class Card:
    """By its vendor's datasheet."""

    name: str
    code: str  # of the imitation whose limits it has
    gb_s: float
    processors: int
    mhz: int

    @property
    def bytes_a_cycle(self) -> float:
        """Of an SM."""
        return self.gb_s * 1e3 / (self.processors * self.mhz)


CARDS = (
    Card("A100 80 GB SXM", "sm_80", 2039, 108, 1410),
    Card("A100 80 GB PCIe", "sm_80", 1935, 108, 1410),
    Card("A100 40 GB", "sm_80", 1555, 108, 1410),
    Card("RTX 3090", "sm_89", 936, 82, 1695),
    Card("RTX A6000", "sm_89", 768, 84, 1800),
    Card("A10", "sm_89", 600, 72, 1695),
    Card("RTX 5090", "sm_89", 1792, 170, 2407),
    Card("RTX 4090", "sm_89", 1008, 128, 2520),
    Card("L4", "sm_89", 300, 58, 2040),
    Card("L40S", "sm_89", 864, 142, 2520),
)


@dataclass(frozen=True)
class Reached:
    """What a chain of linears took in, in each cycle of each SM."""

    name: str
    code: str
    processors: int
    bytes_a_cycle: dict[str, float]


def reached(path: Path = ROWS) -> dict[str, Reached]:
    """Of the last chains of one row, by the code that the GPU ran."""
    environments: dict[str, dict[str, Any]] = {}
    found: dict[str, Reached] = {}
    for row in map(json.loads, path.read_text().splitlines()):
        if row["bench"] == "environment":
            environments[row["id"]] = row
        elif row["bench"] == "kernel" and row.get("chain") and row["rows"] == 1:
            here = environments[row["environment"]]
            code = re.search(r"as (sm_\d+)", here["device"])
            if code is None or row["format"] not in FORMATS:
                continue
            mhz = float(here["clocks_most"].split()[0])
            one = found.get(code[1])
            if one is None or one.processors != here["processors"]:
                one = Reached(here["device"], code[1], here["processors"], {})
            found[code[1]] = one
            each = row["gb_s"] * 1e3 / (here["processors"] * mhz)
            one.bytes_a_cycle[FORMATS[row["format"]]] = each
    return found


def table() -> Iterator[str]:
    """Lines of Markdown."""
    measured = reached()
    names = list(FORMATS.values())
    yield f"| bytes in a cycle of an SM | memory gives | {' | '.join(names)} |"
    yield "|---|---|" + "---|" * len(names)
    for one in measured.values():
        values = " | ".join(f"{one.bytes_a_cycle[name]:.1f}" for name in names)
        yield f"| reached: {one.name} | | {values} |"
    for card in CARDS:
        needs = card.bytes_a_cycle
        by_format = measured[card.code].bytes_a_cycle
        values = " | ".join(f"{by_format[name] / needs:.2f} ×" for name in names)
        yield f"| {card.name} | {needs:.1f} | {values} |"


def written(page: str) -> str:
    """The page with the table of now."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n" + "\n".join(table()) + f"\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    if options.write:
        PAGE.write_text(written(PAGE.read_text()))
    else:
        print("\n".join(table()))


if __name__ == "__main__":
    main()
