#!/usr/bin/env python3
"""Host memory while a model that is larger than a limit is loaded and quantized: one row with both
peaks.

    python benchmarks/workshop/streaming.py --out benchmarks/cpu/streaming.jsonl --model qwen2-7b
        --layers 8 --limit-gb 3

A folder of random weights is written shard by shard. Then it is loaded: on a GPU whole, straight
onto the device; on a CPU block by block, each dropped before the next, as calibration does it. Then
it is quantized, block by block. What is counted is anonymous memory, sampled ten times a second,
less what the process had before: pages of the mapped files come on top, and are the system's to
drop. A peak above the limit makes the row `failed` and the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from quantize_speed import watch_memory

from flyweight.bench.rows import environment_row, make_row
from flyweight.checkpoint.reader import Checkpoint
from flyweight.checkpoint.streamed import Streamed
from flyweight.checkpoint.writer import CheckpointWriter
from flyweight.models.config import ModelConfig
from flyweight.models.decoder import Block, Decoder
from flyweight.models.presets import PresetWeights, preset_config
from flyweight.quant.quantize import quantize


def write_folder(config: dict[str, Any], folder: Path, *, shard_bytes: int) -> None:
    source = PresetWeights(config)
    with CheckpointWriter(folder, shard_bytes, overwrite=True) as writer:
        for name in source.names():
            writer.add(name, source.tensor(name))
        writer.finish(source.config)


def load(folder: Path, device: torch.device) -> None:
    weights: Any = Streamed(Checkpoint(folder), device)
    if device.type == "cuda":
        Decoder.load(weights, device=device, dtype=torch.bfloat16)
        return
    config = ModelConfig.from_dict(weights.config)
    Decoder.load(weights, device=device, dtype=torch.bfloat16, layers=())
    for index in range(config.layers):
        Block.load(weights, config, index, device=device, dtype=torch.bfloat16)
    weights.check_used()


def watched(run: Any, device: torch.device) -> tuple[float, dict[str, float]]:
    begin = time.perf_counter()
    with watch_memory(device) as memory:
        run()
    return round(time.perf_counter() - begin, 1), memory


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="qwen2-7b", help="a preset, for its shapes")
    parser.add_argument("--layers", type=int, help="so many instead of the model's own")
    parser.add_argument("--scheme", default="rtn-int4")
    parser.add_argument("--limit-gb", type=float, default=3.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--work", type=Path, default=Path("streaming.work"))
    options = parser.parse_args()
    device, folder = torch.device(options.device), options.work / "model"
    config = preset_config(options.model)
    config["num_hidden_layers"] = options.layers or config["num_hidden_layers"]
    environment = environment_row(options.device)
    shutil.rmtree(options.work, ignore_errors=True)
    write_folder(config, folder, shard_bytes=1 << 30)
    size = Checkpoint(folder).nbytes / 1e9
    print(f"{size:.2f} GB in {len(Checkpoint(folder).files)} files", flush=True)

    load_seconds, loading = watched(lambda: load(folder, device), device)
    seconds, making = watched(
        lambda: quantize(folder, options.scheme, options.work / "out", device=options.device),
        device,
    )
    peak = max(loading["peak_host_gb"], making["peak_host_gb"])
    shutil.rmtree(options.work, ignore_errors=True)
    good = peak <= options.limit_gb < size
    row = make_row(
        "quantize",
        environment["id"],
        status="ok" if good else "failed",
        model=options.model,
        layers=config["num_hidden_layers"],
        checkpoint="random:0",
        weights="random",
        scheme=options.scheme,
        device=options.device,
        disk=True,
        extrapolated=False,
        size_gb=round(size, 3),
        limit_gb=options.limit_gb,
        seconds=seconds,
        load_seconds=load_seconds,
        load_peak_host_gb=loading["peak_host_gb"],
        **making,
        **(
            {}
            if good
            else {
                "reason": f"a peak of {peak:.2f} GB, a limit of {options.limit_gb} "
                f"GB, a folder of {size:.2f} GB"
            }
        ),
    )
    with options.out.open("a") as stream:
        stream.writelines(json.dumps(one) + "\n" for one in (environment, row))
    print(
        json.dumps(
            {key: row[key] for key in row if key.endswith(("_gb", "seconds", "status", "reason"))}
        )
    )
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
