"""Where the time of a model goes: operators and kernels of each phase, by torch's profiler.

Prefill is a request for one token; decode is what follows the second token of a batch, so that
neither phase has a step of the other. Both run once before they are recorded (compilation, tuning
and graph capture lie outside), unless `cold` asks for the first run itself. Steps and passes that
are captured as CUDA graphs run without operators on the host: there the table has the kernels by
name, which the driver reports, and times by layer need `eager`.

Times of an operator are its own ("self") and with what it called ("total"); shares are of all self
time of that kind. Kernels on a device are rows of kind `device` and level `kernel`; an operator's
device time is that of its kernels again, so shares of the two levels are of the same total and are
not added up.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from flyweight.bench.rows import Row
from flyweight.bench.timing import random_prompts, warm_up
from flyweight.clock import clock
from flyweight.saving import replacing, writing

if TYPE_CHECKING:
    from flyweight.engine.llm import LLM

LAYER = "layer "  # of the ranges that mark layers
PHASES = ("prefill", "decode")
WARM_RUNS = 4


@dataclass(frozen=True)
class Workload:
    batch: int
    input: int
    output: int
    seed: int = 0


class Profiler:
    """Records one workload of a loaded model, phase by phase."""

    def __init__(self, llm: LLM, work: Workload, *, eager: bool = False):
        self.llm, self.work = llm, work
        if eager:
            llm.engine.runner.steps = llm.engine.runner.passes = None
        self.device = llm.device
        self.activities = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if llm.device.type == "cuda" else []),
        ]

    def record(self, phase: str, *, cold: bool = False) -> Any:
        """torch's profiler with the events of a phase."""
        run = self.prefill if phase == "prefill" else self.decode
        if not cold:
            warm_up(lambda: run(contextlib.nullcontext), most=WARM_RUNS)
        held: list[Any] = []

        @contextlib.contextmanager
        def recorded() -> Iterator[None]:
            with torch_profile(
                activities=self.activities, profile_memory=True, acc_events=True
            ) as profiler:
                held.append(profiler)
                yield
                self.synchronize()

        with marked_layers(self.llm.decoder.blocks):
            run(recorded)
        return held[0]

    def prefill(self, around: Callable[[], Any]) -> float:
        return self._run(1, around, after=0)

    def decode(self, around: Callable[[], Any]) -> float:
        return self._run(self.work.output, around, after=min(2, self.work.output - 1))

    def _run(self, output: int, around: Callable[[], Any], *, after: int) -> float:
        """Seconds of what runs inside `around`: everything once each request has `after` tokens."""
        from flyweight.engine.request import SamplingParams

        engine = self.llm.engine
        work = self.work
        params = SamplingParams(
            temperature=0, max_tokens=output, min_tokens=output, ignore_eos=True
        )
        prompts = random_prompts(
            work.batch, work.input, vocabulary=self.llm.config.vocab_size, seed=work.seed
        )
        prepared = [self.llm.prepare(prompt, params) for prompt in prompts]
        requests = [
            request for one in prepared for request in engine.submit(one.tokens, one.params)
        ]
        try:
            while any(request.generated < after for request in requests):
                engine.step()
            self.synchronize()
            begin = clock()
            with around():
                while not all(request.finished for request in requests):
                    engine.step()
            self.synchronize()
            return clock() - begin
        finally:
            engine.cancel(requests)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextlib.contextmanager
def marked_layers(blocks: Sequence[Any]) -> Iterator[None]:
    """Every block's step inside a range of the profile that bears its number."""

    def mark(block: Any) -> None:
        run = block.run
        name = f"{LAYER}{block.index}"

        def marked(*args: Any, **options: Any) -> Any:
            with record_function(name):
                return run(*args, **options)

        block.run = marked

    for block in blocks:
        mark(block)
    try:
        yield
    finally:
        for block in blocks:
            del block.run


def rows_of(profiler: Any, phase: str) -> list[Row]:
    """One row for each operator's time on the host, one for each operator's or kernel's on the
    device, longest first.
    """
    events = [Event.of(average) for average in profiler.key_averages()]
    host = sum(event.host_self for event in events if not event.layer) or 1.0
    device = sum(event.device_self for event in events if event.on_device) or 1.0
    rows = []
    for event in events:
        if event.name.startswith("ProfilerStep") or (event.layer and event.on_device):
            continue  # a range is told twice: its time on both sides is in the host's
        common = {"phase": phase, "operator": event.name, "calls": event.calls}
        level = "layer" if event.layer else "kernel" if event.on_device else "operator"
        if not event.on_device:
            rows.append(
                common
                | {
                    "kind": "host",
                    "level": level,
                    "self_us": event.host_self,
                    "total_us": event.host_total,
                    "share": event.host_self / host,
                    "total_share": event.host_total / host,
                    "memory_bytes": event.host_memory,
                    "self_memory_bytes": event.host_self_memory,
                }
            )
        if event.device_total > 0 or event.device_memory:
            rows.append(
                common
                | {
                    "kind": "device",
                    "level": level,
                    "self_us": event.device_self,
                    "total_us": event.device_total,
                    "share": event.device_self / device,
                    "memory_bytes": event.device_memory,
                    "self_memory_bytes": event.device_self_memory,
                }
            )
    return sorted(rows, key=lambda row: (row["kind"], -row["self_us"]))


@dataclass(frozen=True)
class Event:
    """One line of `key_averages`, in microseconds and bytes."""

    name: str
    on_device: bool
    calls: int
    host_self: float
    host_total: float
    device_self: float
    device_total: float
    host_memory: int
    host_self_memory: int
    device_memory: int
    device_self_memory: int

    @property
    def layer(self) -> bool:
        return self.name.startswith(LAYER)

    @classmethod
    def of(cls, average: Any) -> Event:
        return cls(
            average.key,
            average.device_type != torch.autograd.DeviceType.CPU,
            average.count,
            average.self_cpu_time_total,
            average.cpu_time_total,
            average.self_device_time_total,
            average.device_time_total,
            average.cpu_memory_usage,
            average.self_cpu_memory_usage,
            average.device_memory_usage,
            average.self_device_memory_usage,
        )


def profile_model(
    model: str,
    work: Workload,
    *,
    device: str | None,
    dtype: str | None,
    cold: bool,
    eager: bool,
    folder: Path | None,
) -> list[Row]:
    """Rows of both phases, and their Chrome traces in `folder`."""
    from flyweight.engine.llm import LLM

    llm = LLM(
        model,
        device=device,
        dtype=dtype,
        max_num_seqs=work.batch,
        prefix_cache=False,
        max_model_len=work.input + work.output,
        native=False,  # torch's profiler sees torch's ops
    )
    profiler = Profiler(llm, work, eager=eager)
    rows: list[Row] = []
    facts = {
        "backend": "native",
        "batch": work.batch,
        "input": work.input,
        "output": work.output,
        "kv_dtype": str(llm.dtype).removeprefix("torch."),
        "setting": "cold" if cold else "warm",
    }
    for phase in PHASES[: 1 if work.output < 2 else 2]:
        recorded = profiler.record(phase, cold=cold)
        rows += [facts | row for row in rows_of(recorded, phase)]
        if folder:
            save_trace(recorded, folder / f"{phase}.trace.json.gz")
    return rows


def save_trace(recorded: Any, path: Path) -> None:
    """A Chrome trace, with its end: torch writes it in silence, however full the disk is."""
    with writing(path), replacing(path) as half:
        recorded.export_chrome_trace(str(half))
        if not ends_as_json(half):
            place = tempfile.gettempdir()
            raise OSError(
                errno.ENOSPC, f"it was cut off: {place}, where torch puts it first, is full"
            )


def ends_as_json(path: Path) -> bool:
    end = b""
    with gzip.open(path) as stream:
        while part := stream.read(1 << 20):
            end = (end + part)[-64:]
    return end.rstrip().endswith(b"}")
