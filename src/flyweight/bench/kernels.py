"""One quantized linear against torch: the kernel that runs, its peers, and the error of each.

Every row is measured in the same run as torch's own linear on the same shape, by turns. A weight is
multiplied in float64 first (`matmul_reference`, a slice of outputs at a time), and each kernel's
result is held against that before it is timed. GB/s counts what one launch must read and write: the
weight as laid out, x and y.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flyweight import gpu
from flyweight.bench import replay
from flyweight.bench.peers import PEERS, Peer
from flyweight.bench.replay import Work
from flyweight.bench.rows import Row
from flyweight.bench.timing import percentile, summarize
from flyweight.checkpoint.formats.fused import take_rows
from flyweight.clock import clock
from flyweight.errors import FlyweightError
from flyweight.gpu import Gpu
from flyweight.kernels import dispatch, jit
from flyweight.kernels.dry_run import DEVICE, dry_run
from flyweight.kernels.linear.choose import Choice
from flyweight.kernels.linear.format import FORMATS as WEIGHT_FORMATS
from flyweight.kernels.linear.fused import FusedLinear, TorchLinear
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.tensors import (
    Float8,
    Int8Channel,
    IntGroup,
    Plain,
    QuantTensor,
    Sparse24,
    Trellis,
    VectorQuant,
)
from flyweight.tensors.rounding import BY_GROUP, input_rounding, product_bound

SLICE = 4096  # outputs multiplied in float64 at a time
CALLS = 50  # for the host's time of one
Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One weight, and how many rows are multiplied with it."""

    format: str
    rows: int
    in_features: int
    out_features: int
    dtype: torch.dtype
    group_size: int = 128
    zero_points: bool = True
    vector_length: int = 8
    books: tuple[int, int] = (8192, 256)  # main and residual centroids; 0 for no residual
    name: str | None = None

    def fields(self) -> Row:
        grouped = self.format.startswith(("w2a16", "w3a16", "w4a16", "w8a16"))
        vectors = self.format == "vptq"
        return {
            "format": self.format,
            "rows": self.rows,
            "in_features": self.in_features,
            "out_features": self.out_features,
            "dtype": str(self.dtype).removeprefix("torch."),
            "group_size": self.group_size if grouped else None,
            "zero_points": self.zero_points if grouped else None,
            "vector_length": self.vector_length if vectors else None,
            "main_centroids": self.books[0] if vectors else None,
            "residual_centroids": self.books[1] if vectors else None,
            "shape": self.name,
        }


def _grouped(
    bits: int, *, sparse: bool = False
) -> Callable[[Case, tuple[int, int], torch.device], QuantTensor]:
    def make(case: Case, shape: tuple[int, int], device: torch.device) -> QuantTensor:
        options: dict[str, Any] = dict(
            bits=bits, group_size=case.group_size, symmetric=not case.zero_points, dtype=case.dtype
        )
        if sparse:
            return Sparse24.random(shape, 0, device, inner=IntGroup, **options)
        return IntGroup.random(shape, 0, device, **options)

    return make


def _trellis(bits: int) -> Callable[[Case, tuple[int, int], torch.device], QuantTensor]:
    """With a scale for each row."""
    return lambda case, shape, device: Trellis.random(shape, 0, device, bits=bits, dtype=case.dtype)


FORMATS: dict[str, Callable[[Case, tuple[int, int], torch.device], QuantTensor]] = {
    "bf16": lambda case, shape, device: Plain.random(shape, 0, device, dtype=case.dtype),
    "w2a16": _grouped(2),
    "w3a16": _grouped(3),
    "w4a16": _grouped(4),
    "w8a16": _grouped(8),
    "trellis2": _trellis(2),
    "trellis3": _trellis(3),
    "w8a8": lambda case, shape, device: Int8Channel.random(shape, 0, device, dtype=case.dtype),
    "fp8": lambda case, shape, device: Float8.random(shape, 0, device),
    "w8a8-2:4": lambda case, shape, device: Sparse24.random(shape, 0, device, dtype=case.dtype),
    "w8a16-2:4": _grouped(8, sparse=True),
    "w4a16-2:4": _grouped(4, sparse=True),
    "vptq": lambda case, shape, device: VectorQuant.random(
        shape,
        0,
        device,
        length=case.vector_length,
        main=case.books[0],
        residual=case.books[1] or None,
        dtype=case.dtype,
    ),
}


@dataclass(frozen=True)
class Candidate:
    """A kernel with its weight laid out; `again` makes another copy of both."""

    name: str
    run: Run
    nbytes: int
    again: Callable[[], Run]
    why: str | None = None


def measure_case(
    case: Case, *, device: torch.device, peers: Sequence[str], samples: int, bandwidth: float
) -> Iterator[Row]:
    """Fields of one row for our kernel, and one for each peer; a peer that cannot run gives its
    reason.
    """
    tensor = FORMATS[case.format](case, (case.out_features, case.in_features), device)
    x = torch.randn(case.rows, case.in_features, device=device).to(case.dtype)
    expected = reference(tensor, x)
    candidates, refused = find_candidates(case, tensor, peers)
    works = {"torch": torch_work(case, device)}
    errors = {}
    for one in candidates:
        try:
            errors[one.name] = relative_error(one.run(x), expected)
            works |= works_of(one, x, device, alone=one is candidates[0])
        except Exception as error:  # someone else's kernel, with requirements of its own
            if one is candidates[0]:
                raise
            refused[one.name] = f"{type(error).__name__}: {error}"[:300]
    times = replay.measure(works, device, samples=samples)
    facts = case.fields() | {
        "bits_per_weight": round(tensor.bits_per_weight, 4),
        "torch_dtype": torch_dtype_name(case, device),
    }
    moved = x.nbytes + case.rows * case.out_features * case.dtype.itemsize
    for one in candidates:
        if one.name not in refused:
            yield (
                facts
                | {
                    "kernel": one.name,
                    "why": one.why,
                    "host_us": host_us(one.run, x),
                }
                | judged(errors[one.name], bound_of(one, tensor, x))
                | figures(
                    times[one.name],
                    hot=times[f"{one.name}, hot"],
                    alone=times.get(f"{one.name}, alone"),
                    torch_times=times["torch"],
                    nbytes=one.nbytes + moved,
                    bandwidth=bandwidth,
                )
            )
    for name, reason in refused.items():
        yield facts | {"kernel": name, "status": "skipped", "reason": reason}


def wanted_by(cases: Sequence[Case], pretended: Gpu) -> set[jit.Wanted]:
    """What this process has asked for so far, our kernels of these cases included."""
    with dry_run(pretended):
        for case in cases:
            tensor = FORMATS[case.format](
                case, (case.out_features, case.in_features), torch.device("cpu")
            ).to(DEVICE)
            x = torch.empty(case.rows, case.in_features, dtype=case.dtype, device=DEVICE)
            dispatch.prepare(tensor, dtype=case.dtype)(x)
    return jit.wanted


def find_candidates(
    case: Case, tensor: QuantTensor, peers: Sequence[str]
) -> tuple[list[Candidate], dict[str, str]]:
    """Ours first; peers that cannot take this weight with their reason."""
    prepare = functools.partial(dispatch.prepare, tensor, dtype=case.dtype)
    own = prepare()
    choice = chosen(own, case.rows)
    first = Candidate(choice.kernel, own, own.nbytes, lambda: copied(own, prepare), choice.why)
    found = [first]
    refused = {}
    for peer in (PEERS[name] for name in peers):
        if case.format not in peer.formats:
            continue
        try:
            run = build(peer, tensor, case)
        except (
            FlyweightError,
            ImportError,
            RuntimeError,
            AttributeError,
            TypeError,
            ValueError,
            AssertionError,
        ) as error:
            refused[peer.name] = str(error)[:300]
            continue
        again = functools.partial(build, peer, tensor, case)
        found.append(Candidate(peer.name, run, sum(t.nbytes for t in tensors_of(run)), again))
    return found, refused


def build(peer: Peer, tensor: QuantTensor, case: Case) -> Run:
    return peer.build(tensor, rows=case.rows, dtype=case.dtype)


def chosen(linear: FusedLinear, rows: int, *, norm: bool = False, residual: bool = False) -> Choice:
    """The kernel that multiplies so many rows, and why that one."""
    if isinstance(linear, TiledLinear):
        return linear.choose(rows, norm=norm, residual=residual)
    return Choice(linear.kernel_for(rows), linear.why)


def copied(linear: FusedLinear, prepare: Callable[[], FusedLinear]) -> FusedLinear:
    """The same weight in memory of its own: a copy, which is faster than laying it out again.

    The weight of a torch linear is inside a function, which cannot be copied. Ops and formats are
    no part of a weight: all copies share them.
    """
    if isinstance(linear, TorchLinear):
        return prepare()
    shared = [linear.ops, *WEIGHT_FORMATS.values()]
    return copy.deepcopy(linear, {id(one): one for one in shared})


def tensors_of(thing: Any, depth: int = 4) -> list[Tensor]:
    """Every tensor a callable holds: what its weight takes in memory."""
    if isinstance(thing, Tensor):
        return [thing]
    if depth == 0:
        return []
    parts: list[Any] = []
    if isinstance(thing, functools.partial):
        parts = [thing.func, *thing.args, *thing.keywords.values()]
    elif isinstance(thing, (list, tuple)):
        parts = list(thing)
    elif hasattr(thing, "__self__"):
        parts = [thing.__self__]
    elif hasattr(thing, "__dict__") and not isinstance(thing, (FunctionType, ModuleType, type)):
        parts = list(vars(thing).values())
    return [tensor for part in parts for tensor in tensors_of(part, depth - 1)]


def works_of(
    one: Candidate, x: Tensor, device: torch.device, *, alone: bool = False
) -> dict[str, Work]:
    """Over copies larger than the cache, and over one weight; `alone`: also over the copies with
    each launch after the end of the one before, where launches of this GPU overlap.
    """
    copies = [one.run, *(one.again() for _ in range(replay.copies_for(one.nbytes, device) - 1))]
    found = {
        one.name: Work(lambda i: copies[i](x), len(copies)),
        f"{one.name}, hot": Work(lambda _: one.run(x)),
    }
    if alone and device.type == "cuda" and gpu.of(device).has_dependent_launch:
        found[f"{one.name}, alone"] = Work(lambda i: run_alone(copies[i], x), len(copies))
    return found


def run_alone(run: Run, x: Tensor) -> None:
    with jit.overlap(False):
        run(x)


def host_us(run: Run, x: Tensor) -> float | None:
    """What a call outside a graph costs the host: few enough of them that none waits for the
    device.
    """
    if not x.is_cuda:
        return None
    torch.cuda.synchronize()
    times = []
    for _ in range(CALLS):
        begin = clock()
        run(x)
        times.append(1e6 * (clock() - begin))
    torch.cuda.synchronize()
    return percentile(times, 50)


def torch_work(case: Case, device: torch.device) -> Work:
    """`x @ Wᵀ` by torch: bf16 on a GPU, whatever was asked for on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else case.dtype
    x = torch.randn(case.rows, case.in_features, device=device).to(dtype)
    count = replay.copies_for(dtype.itemsize * case.in_features * case.out_features, device)
    weights = [
        Plain.random((case.out_features, case.in_features), i, device, dtype=dtype).weight
        for i in range(count)
    ]
    return Work(lambda i: F.linear(x, weights[i]), count)


def torch_dtype_name(case: Case, device: torch.device) -> str:
    return "bfloat16" if device.type == "cuda" else str(case.dtype).removeprefix("torch.")


def reference(tensor: QuantTensor, x: Tensor) -> Tensor:
    """Float64 [rows, out], a slice of the outputs at a time: a whole large weight in float64 would
    not fit.
    """
    outputs = tensor.matrix_shape[0]
    step = SLICE - SLICE % math.lcm(8, getattr(tensor, "length", 1))
    return torch.cat(
        [
            take_rows(
                tensor, begin, min(begin + step, outputs), where="the weight"
            ).matmul_reference(x)
            for begin in range(0, outputs, step)
        ],
        -1,
    )


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def bound_of(one: Candidate, tensor: QuantTensor, x: Tensor) -> float:
    """`own_inputs`: where only one of kernel and reference rounds activations to 8 bits. A kernel
    for the CPU does so to weights that do not ask for it; a GPU without float8 does not, though
    they do.
    """
    own_inputs = 0.0
    if one.name == dispatch.NATIVE and isinstance(tensor, IntGroup):
        own_inputs = BY_GROUP
    elif x.is_cuda and isinstance(tensor, Float8) and not gpu.of(x.device).has_float8:
        own_inputs = input_rounding(tensor.kind)
    return product_bound(tensor.kind, x.dtype, own_inputs=own_inputs)


def judged(error: float, bound: float) -> Row:
    """Fields of a result that is so far off float64; beyond the bound its time is no figure."""
    fields: Row = {"status": "ok", "relative_error": error, "error_bound": bound}
    if not error <= bound:  # NaN is wrong too
        reason = (
            f"wrong result: {error:.2g} off float64, relative; "
            f"this format's rounding explains {bound:.2g}"
        )
        fields |= {"status": "failed", "reason": reason}
    return fields


def figures(
    times: list[float],
    *,
    hot: list[float] | None,
    torch_times: list[float] | None,
    nbytes: int,
    bandwidth: float,
    alone: list[float] | None = None,
) -> Row:
    """The figures of a kernel row, under the names of docs/results.md."""
    found = summarize(times)
    rate = nbytes / found.median / 1e3
    torch_us = percentile(torch_times, 50) if torch_times else None
    return {
        "us": found.median,
        "us_p10": found.p10,
        "us_p90": found.p90,
        "us_hot": percentile(hot, 50) if hot else None,
        "us_alone": percentile(alone, 50) if alone else None,
        "torch_us": torch_us,
        "ratio": found.median / torch_us if torch_us else None,
        "gb_s": rate,
        "share_of_bandwidth": rate / bandwidth,
        "us_samples": [round(time, 3) for time in times],
    }


def cases_of(shapes: Sequence[Any], rows: Sequence[int], **options: Any) -> list[Case]:
    """One for each shape and number of rows; a grid's own codebooks win over the given ones."""
    cases = []
    for shape in shapes:
        base = Case(
            rows=1,
            in_features=shape.in_features,
            out_features=shape.out_features,
            name=shape.name,
            **options,
        )
        base = dataclasses.replace(base, books=shape.books or base.books)
        cases += [dataclasses.replace(base, rows=count) for count in rows]
    return cases
