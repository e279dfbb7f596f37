"""How long a scheme takes on an 8B model, and how much memory: some decoder blocks timed, the rest
extrapolated.

    python benchmarks/quantize_speed.py --out speed.jsonl --schemes gptq-int4 awq-int4
        w8a8-smooth-gptq vptq:v8-k65536-256
    # one model, from disk to disk
    python benchmarks/quantize_speed.py --out speed.jsonl --schemes --full gptq-int4
    # within these limits
    python benchmarks/quantize_speed.py --out speed.jsonl --schemes gptq-int4 --gpu-gb 24 --host-gb
        32

Weights are random in a preset's shapes; what is timed does not depend on their values. The first
block also loads and compiles kernels, so a model's time is the time before the first block
(embedding the samples), the first block, and the mean of the others for each of the rest;
assembling the output is in the full run only. With one block that is all there is, and the row says
so. Host memory is anonymous memory (mapped files are the kernel's to drop), sampled ten times a
second, less what the process had before. `--gpu-gb` and `--host-gb` are enforced: torch's allocator
refuses what is beyond the one, the kernel (RLIMIT_DATA, set when CUDA has mapped what it needs)
what is beyond the other.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# as `flyweight quantize` has it
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch

from flyweight.bench.rows import environment_row, make_row
from flyweight.checkpoint.writer import CheckpointWriter
from flyweight.models.config import ModelConfig
from flyweight.models.presets import PresetWeights
from flyweight.quant.calibration import Samples
from flyweight.quant.events import Event
from flyweight.quant.quantize import quantize

# seconds, Qwen3-8B on an H200
GOALS = {"gptq-int4": 150, "awq-int4": 240, "w8a8-smooth-gptq": 180, "vptq:v8-k65536-256": 1800}


def anonymous_gb() -> float:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024 / 1e9


@contextmanager
def watch_memory(device: torch.device) -> Iterator[dict[str, float]]:
    """Fills in the peaks when the block ends."""
    before, peak, stop, found = anonymous_gb(), 0.0, threading.Event(), {}

    def sample() -> None:
        nonlocal peak
        while not stop.wait(0.1):
            peak = max(peak, anonymous_gb())

    thread = threading.Thread(target=sample)
    thread.start()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
        found["peak_host_gb"] = round(max(peak - before, 0.0), 2)
        if device.type == "cuda":
            found |= {
                "peak_gpu_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
                "peak_gpu_reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2),
            }


def enforce(gpu_gb: float | None, host_gb: float | None, device: torch.device) -> dict[str, float]:
    """Limits of this process from here on; what a row says of them."""
    if gpu_gb is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gpu_gb * 1e9 / total))
    if host_gb is not None:
        if device.type == "cuda":
            torch.zeros(1, device=device)
        resource.setrlimit(
            resource.RLIMIT_DATA, (int(host_gb * 1e9), resource.getrlimit(resource.RLIMIT_DATA)[1])
        )
    limits = {"limit_gpu_gb": gpu_gb, "limit_host_gb": host_gb}
    return {name: limit for name, limit in limits.items() if limit is not None}


def write_model(preset: str, folder: Path, *, device: torch.device) -> Path:
    """The preset's random weights as an ordinary model folder."""
    if not folder.exists():
        source = PresetWeights(preset, device=device)
        with CheckpointWriter(folder) as writer:
            for name in source.names():
                writer.add(name, source.tensor(name).cpu())
            writer.finish(source.config)
    return folder


class Clock:
    """Seconds of each finished block, and of what came before the first."""

    def __init__(self) -> None:
        self.started, self.blocks = time.perf_counter(), []

    def listen(self, event: Event) -> None:
        if event.kind == "finished":
            self.blocks.append(event.seconds)

    def facts(self, layers: int) -> dict[str, Any]:
        seconds = time.perf_counter() - self.started
        if len(self.blocks) >= layers:
            return {"seconds": round(seconds, 1), "extrapolated": False}
        before = seconds - sum(self.blocks)
        later = statistics.fmean(self.blocks[1:] or self.blocks)
        return {
            "seconds": round(before + self.blocks[0] + (layers - 1) * later, 1),
            "extrapolated": True,
            "seconds_before": round(before, 2),
        }


def measure(
    model: str, scheme: str, options: argparse.Namespace, *, blocks: int | None
) -> dict[str, Any]:
    device, clock = torch.device(options.device), Clock()
    config = ModelConfig.from_dict(PresetWeights(options.model).config)
    tokens = torch.randint(
        config.vocab_size,
        (options.samples, options.length),
        generator=torch.Generator().manual_seed(0),
    )
    output = options.work / f"out-{scheme.replace(':', '-')}"
    shutil.rmtree(output, ignore_errors=True)
    with watch_memory(device) as memory:
        summary = quantize(
            model,
            scheme,
            output,
            calibration=Samples(tokens, "random", 0),
            device=options.device,
            blocks=blocks,
            batch=options.batch,
            overwrite=True,
            listen=clock.listen,
        )
        facts = clock.facts(config.layers)
    shutil.rmtree(output, ignore_errors=True)
    shutil.rmtree(output.with_name(f".{output.name}.work"), ignore_errors=True)
    return dict(
        facts,
        scheme=scheme,
        blocks=len(clock.blocks),
        block_seconds=[round(s, 3) for s in clock.blocks],
        calibration_tokens=tokens.numel(),
        samples=options.samples,
        length=options.length,
        device=options.device,
        bits_per_weight=round(summary.bits_per_weight, 4),
        goal_seconds=GOALS.get(scheme),
        disk=not model.startswith("preset:"),
        **memory,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-8b", help="a preset")
    parser.add_argument("--schemes", nargs="*", default=list(GOALS))
    parser.add_argument(
        "--full",
        nargs="*",
        default=[],
        help="schemes to run whole, from a folder on disk to a folder on disk",
    )
    parser.add_argument(
        "--blocks", type=int, default=4, help="decoder blocks to time (VPTQ: at most two)"
    )
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gpu-gb", type=float, help="no more GPU memory than this")
    parser.add_argument("--host-gb", type=float, help="no more host memory than this")
    parser.add_argument("--work", type=Path, default=Path("quantize-speed.work"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    environment = environment_row(options.device)
    limits = enforce(options.gpu_gb, options.host_gb, torch.device(options.device))

    def write(row: dict[str, Any]) -> None:
        with options.out.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
        print(
            json.dumps(
                {key: row[key] for key in row if key not in ("schema", "run_id", "environment")}
            ),
            flush=True,
        )

    write(environment)
    runs = [
        (scheme, min(2, options.blocks) if scheme.startswith("vptq") else options.blocks)
        for scheme in options.schemes
    ]
    for scheme, blocks in [*runs, *((scheme, None) for scheme in options.full)]:
        shared = dict(
            model=f"preset:{options.model}",
            checkpoint="random:0",
            weights="random",
            kv_dtype=None,
            **limits,
        )
        try:
            if blocks is None:
                folder = write_model(
                    options.model, options.work / options.model, device=torch.device(options.device)
                )
                found = measure(str(folder), scheme, options, blocks=None)
            else:
                found = measure(f"preset:{options.model}", scheme, options, blocks=blocks)
            write(make_row("quantize", environment["id"], **shared, **found))
        except Exception as error:
            write(
                make_row(
                    "quantize",
                    environment["id"],
                    status="failed",
                    reason=f"{type(error).__name__}: {error}"[:500],
                    scheme=scheme,
                    blocks=blocks,
                    **shared,
                )
            )
    shutil.rmtree(options.work, ignore_errors=True)


if __name__ == "__main__":
    main()
