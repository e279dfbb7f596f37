"""When requests arrive: Poisson, in bursts, or as a trace of real traffic says; seconds from the
start of the run.
"""

from __future__ import annotations

import csv
import datetime
import json
import random
from dataclasses import dataclass
from pathlib import Path

from flyweight.errors import OptionError

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class Arrival:
    """One line of a trace; `blocks` names the beginnings that several prompts share."""

    time: float
    input: int
    output: int
    blocks: tuple[int, ...] = ()


def bursts(count: int, rate: float, *, size: int = 1, seed: int) -> list[float]:
    """A Poisson process of groups of `size` at once: larger groups have the same mean rate and are
    much harder to serve.
    """
    draw, now, times = random.Random(seed), 0.0, []
    for index in range(count):
        if index % size == 0:
            now += draw.expovariate(rate / size)
        times.append(now)
    return times


def read_trace(path: Path, *, count: int | None = None, scale: float = 1.0) -> list[Arrival]:
    """An Azure CSV or a Mooncake JSONL file, its times divided by `scale` (2: twice as fast), from
    0 on.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
            file.seek(0)
            lines = _mooncake(file) if first.lstrip().startswith("{") else _azure(file, path)
            found = sorted(lines, key=lambda arrival: arrival.time)[:count]
    except FileNotFoundError:
        raise OptionError(f"--trace {path}: no such file") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(
            f"--trace {path}: neither an Azure CSV nor a Mooncake JSONL file ({error})"
        ) from error
    if not found:
        raise OptionError(f"--trace {path}: no arrivals in it")
    return [
        Arrival((one.time - found[0].time) / scale, one.input, one.output, one.blocks)
        for one in found
    ]


def _azure(file: object, path: Path) -> list[Arrival]:
    reader = csv.DictReader(file)  # type: ignore[call-overload]
    if not set(AZURE) <= set(reader.fieldnames or ()):
        raise ValueError(f"its columns are {', '.join(reader.fieldnames or ())}")
    return [
        Arrival(
            datetime.datetime.fromisoformat(row[AZURE[0]][:26]).timestamp(),
            max(1, int(row[AZURE[1]])),
            max(1, int(row[AZURE[2]])),
        )
        for row in reader
    ]


def _mooncake(file: object) -> list[Arrival]:
    rows = [json.loads(line) for line in file if line.strip()]  # type: ignore[attr-defined]
    return [
        Arrival(
            row["timestamp"] / 1e3,
            max(1, row["input_length"]),
            max(1, row["output_length"]),
            tuple(row.get("hash_ids") or ()),
        )
        for row in rows
    ]
