"""What the host pays for the small numbers of a decode step, the tokens and lengths of some rows:
`transfer.StagedColumns` (packed into memory that is kept) beside `transfer.upload` (arrays made,
joined and copied).

    python benchmarks/workshop/staging.py >> benchmarks/workshop/staging.jsonl

The device waits for this between two steps. It is the host's time, so a CPU can measure it; a GPU's
driver adds the launch of one copy to both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import numpy
import torch

from flyweight.device import pick_device
from flyweight.machine import device_name
from flyweight.transfer import StagedColumns, upload

ROWS = (1, 64, 256)
CALLS = 200  # timed together
ROUNDS = 50  # of which the median counts


def microseconds(call: Callable[[], None]) -> float:
    times = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - started) / CALLS)
    return round(1e6 * sorted(times[1:])[ROUNDS // 2], 2)


def measure(rows: int, device: torch.device) -> dict[str, float]:
    numbers = list(range(rows))
    place = torch.zeros(1 << 14, dtype=torch.uint8, device=device)
    columns = StagedColumns(device, rows, "qi")

    def by_upload() -> None:
        wide = numpy.array(numbers, dtype=numpy.int64)
        upload(device, wide, wide.astype(numpy.int32), into=place)

    def by_columns() -> None:
        stage = columns.begin()
        stage.write(0, numbers)
        stage.write(1, numbers)
        columns.send(stage)

    return {"upload_us": microseconds(by_upload), "columns_us": microseconds(by_columns)}


def main() -> None:
    device = pick_device(None)
    for rows in ROWS:
        row = {"bench": "staging", "device": device_name(device), "rows": rows}
        print(json.dumps(row | measure(rows, device)), flush=True)


if __name__ == "__main__":
    main()
