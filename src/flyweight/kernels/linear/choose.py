"""The one choice: which kernel multiplies so many rows with a weight on a device, and why.

`tuned/*.toml` says from how many rows on a kernel is the fastest. The first one that takes the
weight and the device is chosen: the fastest, or else the next of NEXT. What none takes goes through
cuBLAS, written out in 16 bits for each call.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from flyweight.gpu import Gpu
from flyweight.kernels import tuned
from flyweight.kernels.linear import (
    gemm,
    gemm_mma,
    gemm_shape,
    gemm_small,
    gemv_cluster,
    gemv_plan,
    gemv_splitk,
)
from flyweight.kernels.linear.tiles import Matrix, Outline, TiledWeight
from flyweight.kernels.tuned import Route

# What each kernel is, for `flyweight info` and docs/kernels.md.
KERNELS = {
    "gemv": "gemv.cu or, inputs cut into slices, gemv_split.cu",
    "gemv_cluster": "few.cu, where no norm comes before, else batch.cu",
    "gemv_or_cluster": "few.cu where it takes the shape, else as gemv",
    "gemm_small": "batch.cu",
    "gemm_int16": "gemm.cu with integers for x, where groups have 128 inputs, else few.cu",
    "gemm": "gemm.cu",
    "gemm_mma": "gemm_mma.cu",
    "cublas": "cuBLAS, written out in 16 bits for each call",
    "gemm_dequantized": "gemm.cu, written out in 16 bits for each call",
}
# Those that are made of Hopper's warpgroup products and clusters.
HOPPER = {"gemv_cluster", "gemv_or_cluster", "gemm_int16", "gemm", "gemm_dequantized"}
# What is tried where the fastest kernel does not take a shape or a device; cuBLAS is the last of
# all.
NEXT = {
    "gemv": ("gemv", "gemm_small", "gemm", "gemm_mma"),
    "gemv_cluster": ("gemv_cluster", "gemm_int16", "gemm_small", "gemm", "gemm_mma", "gemv"),
    "gemv_or_cluster": ("gemv_cluster", "gemv", "gemm_small", "gemm", "gemm_mma"),
    "gemm_small": ("gemm_small", "gemm", "gemm_mma", "gemv"),
    "gemm_int16": ("gemm_int16", "gemv_cluster", "gemm_small", "gemm", "gemm_mma", "gemv"),
    "gemm": ("gemm", "gemm_mma", "gemm_small", "gemv"),
    "gemm_mma": ("gemm_mma", "gemm_small", "gemv"),
    "gemm_dequantized": ("gemm_dequantized",),
    "cublas": (),
}


@dataclass(frozen=True)
class Choice:
    """The kernel that runs, and why that one."""

    kernel: str
    why: str


@dataclass(frozen=True)
class Fusion:
    """What surrounds a product, as far as the choice depends on it."""

    norm: bool = False
    residual: bool = False
    beside: bool = False  # all kernels of the layer leave each other room on an SM


PLAIN = Fusion()


def scaled_rows(matrix: Matrix, rows: int, device: Gpu) -> int:
    """Rows of `route_inputs` inputs that are as much x: what few rows cost is fetching and
    converting x in every CTA.
    """
    inputs = tuned.of(device).steps.route_inputs
    return max(1, rows * min(matrix.in_features, inputs) // inputs) if rows <= 8 else rows


@functools.cache
def route(
    matrix: Matrix, rows: int, device: Gpu, *, residual: bool = False, gated: bool = False
) -> Route:
    """The fastest way by what was measured, whether or not its kernel takes the weight."""
    numbers = tuned.of(device)
    scaled = scaled_rows(matrix, rows, device)
    small = matrix.weights <= numbers.steps.small_weights
    return next(
        one
        for one in reversed(numbers.formats[matrix.format.name].routes)
        if scaled >= one.rows
        and (small or not one.small)
        and (matrix.deep or not one.deep)
        and not (residual and one.no_residual)
        and (gated or not one.gated)
    )


def within_attention(matrix: Matrix, rows: int, device: Gpu) -> bool:
    """Whether qkv's product is better a part of qkv_attention.cu."""
    return (
        scaled_rows(matrix, rows, device)
        <= tuned.of(device).formats[matrix.format.name].attention_rows
    )


def choose(weight: TiledWeight, rows: int, device: Gpu, fusion: Fusion = PLAIN) -> Choice:
    return _choose(weight.outline, rows, device, fusion)


@functools.lru_cache(maxsize=1 << 16)
def _choose(weight: Outline, rows: int, device: Gpu, fusion: Fusion) -> Choice:
    if fusion.beside and _runnable("gemv_cluster", weight, rows, device, fusion):
        return Choice("gemv_cluster", "all linears of a layer leave each other room")
    wanted = route(weight.matrix, rows, device, residual=fusion.residual, gated=weight.interleaved)
    for kernel in NEXT[wanted.kernel]:
        found = _runnable(kernel, weight, rows, device, fusion)
        if found is not None:
            same = kernel == NEXT[wanted.kernel][0]
            return Choice(found, wanted.why if same else f"{wanted.kernel} does not take it here")
    same = wanted.kernel == "cublas"
    return Choice(
        "cublas",
        wanted.why if same else f"neither {' nor '.join(NEXT[wanted.kernel])} takes it here",
    )


def _runnable(kernel: str, weight: Outline, rows: int, device: Gpu, fusion: Fusion) -> str | None:
    """The name of what runs if `kernel` is asked for, or None where it takes neither the weight nor
    the device.
    """
    matrix = weight.matrix
    if kernel == "gemv":
        if "gemv" not in matrix.format.kernels:
            return None
        return whole_or_split(matrix, rows, device)
    if kernel == "gemv_cluster":
        reason = gemv_cluster.unsupported_reason(
            weight, rows, device, norm=fusion.norm, beside=fusion.beside
        )
        return kernel if reason is None else None
    if kernel == "gemm_small":
        return kernel if gemm_small.choose(matrix, rows, device) else None
    if kernel == "gemm_mma":
        reason = gemm_mma.unsupported_reason(matrix, rows, device, interleaved=weight.interleaved)
        return kernel if reason is None else None
    if kernel == "gemm_int16" and not gemm_shape.int16_pays(matrix, rows, device):
        return None
    if "gemm" not in matrix.format.kernels:
        return None
    if kernel == "gemm_dequantized":
        matrix = matrix.in_sixteen_bits
    if gemm.unsupported_reason(matrix, rows, device, interleaved=weight.interleaved) is not None:
        return None
    return kernel if kernel == "gemm_dequantized" else "gemm"


def runnable(weight: TiledWeight, rows: int, device: Gpu) -> dict[str, str]:
    """Every kernel that takes a weight and so many rows on a device, by the name that routes have
    for it: what `flyweight doctor --tune` measures.
    """
    found = {}
    for kernel in NEXT:
        if kernel in ("cublas", "gemm_dequantized", "gemm_int16", "gemv_or_cluster"):
            continue  # gemm with another x, which its own plan decides on; and one of two others
        name = _runnable(kernel, weight.outline, rows, device, PLAIN)
        if name is not None:
            found[kernel] = name
    return found | {"cublas": "cublas"}


@functools.cache
def whole_or_split(matrix: Matrix, rows: int, device: Gpu) -> str | None:
    """Of gemv and gemv_splitk the faster by estimate. A kernel that leaves no room for the next one
    is the last choice.
    """
    whole = rows in gemv_plan.ROWS and gemv_plan.fits(matrix, rows, device)
    split = gemv_splitk.choose(matrix, rows, device)
    if split is None or rows == 1:
        return "gemv" if whole else None
    at_once = gemv_splitk.estimate(matrix, rows, 1, device)
    margin = tuned.of(device).gemv.split_margin
    good = (
        whole
        and gemv_plan.fits_beside(matrix, rows, device)
        and at_once <= margin * split.microseconds
    )
    return "gemv" if good else "gemv_splitk"


def explain(matrix: Matrix, device: Gpu) -> str:
    """The routes of a format with their borders and reasons, for `flyweight info`."""
    numbers = tuned.of(device)
    routes = numbers.formats[matrix.format.name].routes
    told = [
        _told(one, device) for one in routes if device.has_warpgroups or one.kernel not in HOPPER
    ]
    if not tuned.is_measured(device):
        told.append(f"by the numbers of an {numbers.name}: this GPU has none of its own")
    return "; ".join(told)


def _told(one: Route, device: Gpu) -> str:
    conditions = [
        (one.small, f"up to {tuned.of(device).steps.small_weights:,} weights"),
        (one.deep, "with as many inputs as outputs"),
        (one.no_residual, "without a residual"),
        (one.gated, "with gate and up"),
    ]
    text = f"from {one.rows} row{'s' * (one.rows > 1)} on {KERNELS[one.kernel]}"
    return "".join([text, *(f", {words}" for holds, words in conditions if holds), f" ({one.why})"])
