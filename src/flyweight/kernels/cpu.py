"""y = x Wᵀ in float32 on a CPU, with the weight in as few bytes as give the same product.

A decode step is bound by the bytes of the weights, and most checkpoints hold 16-bit floats. Where
every weight survives the way to float16 and back (after one power of two for all, which costs no
accuracy) it stays in 16 bits: FBGEMM, part of torch on x86, widens it in registers and sums in
float32. Everything else goes through `torch.linear`, a tall weight laid down by columns, and from
two rows on through a copy that oneDNN has rearranged, made when first needed and only where memory
is plentiful; torch alone would rearrange the weight on every call.

Measured on two busy cores of a Sapphire Rapids, all linears of a 135M model in ms, rows 1 / 2 / 8 /
16 / 64 / 256: by rows 30 / 32 / 64 / 69 / 128 / 276, by columns 29 / 36 / 57 / 66 / 130 / 279,
rearranged 39 / 40 / 49 / 46 / 120 / 251, FBGEMM 29 / 30 / 30 / 42 / 117 / 272, at half the memory;
while other programs compete for the bandwidth FBGEMM leads at one row too (29 against 24 and 27
tokens/s). The price is 2 s of packing at load.

What is chosen depends on the weight, the build of torch and the processor, never on a measurement
at load: on a busy machine that would be a lottery, and the same model must give the same text
twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flyweight.kernels import cpu_integer
from flyweight.tensors import Int8Channel, IntGroup, Plain, QuantTensor, Sparse24

# From here on the rearranged copy is taken. With two and three rows it is a little slower than
# `torch.linear` where that is fast and several times as fast where it is not, as on ARM; and no
# batch is slower than a larger one.
FEW_ROWS = 2
PACKED_FOR = 8  # rows that the copy is arranged for
COMPARED = 1 << 20  # weights at a time, of those that may fit 16 bits
SMALL = 1 << 18  # weights that stay in a core's own cache gain nothing
MANY_ROWS = 256  # from here on the rearranging costs nothing next to the arithmetic


class Choice(NamedTuple):
    run: Callable[[Tensor], Tensor]
    kernel: str
    why: str
    nbytes: int


def choose(tensor: QuantTensor, *, exact: bool) -> Choice:
    """`exact` asks for x @ dequantize() in float32; without it a quantized weight may be computed
    with in 16 bits.
    """
    if isinstance(tensor, Plain):
        return choose_float(tensor.weight.float(), "plain weight", narrow=not exact)
    if isinstance(tensor, Sparse24):  # torch has no op that would skip the zeros
        return choose(tensor.to_dense(), exact=exact)
    if (
        isinstance(tensor, Int8Channel)
        and tensor.input_scale is None
        and has_integers()
        and cpu_integer.sums_exactly()
    ):
        return Choice(
            cpu_integer.BothInt8(tensor),
            "torch.int_mm",
            "int8 × int8 summed in integers, scaled in float32",
            tensor.codes.nbytes + 4 * len(tensor.codes),
        )
    floats = choose_float(
        tensor.dequantize(),
        f"{tensor.kind} dequantized once at load",
        narrow=not exact,
        rounding=True,
    )
    if not isinstance(tensor, IntGroup):
        linear = floats.run
        return floats._replace(run=lambda x: linear(tensor.quantize_input(x).float()))
    if exact or not has_integers() or not cpu_integer.has_op(tensor):
        return floats
    few = cpu_integer.FewRows(tensor, floats.run)
    why = f"up to {few.most} rows, inputs in bfloat16; beyond {floats.kernel}, {floats.why}"
    return Choice(few, f"torch.int{tensor.bits}pack", why, few.nbytes + floats.nbytes)


def choose_float(weight: Tensor, why: str, *, narrow: bool, rounding: bool = False) -> Choice:
    """In 16 bits where `narrow` and every value fits, or where `rounding` may make it fit."""
    if not narrow or not has_half():
        return Choice(CpuLinear(weight), "torch.linear", why, weight.nbytes)
    shift = half_shift(weight)
    if shift is None and not (
        rounding and float(weight.abs().max()) < torch.finfo(torch.float16).max
    ):
        return Choice(
            CpuLinear(weight),
            "torch.linear",
            f"{why}, some values need more than 16 bits",
            weight.nbytes,
        )
    half = HalfLinear(weight, shift=shift or 0)
    return Choice(
        half,
        "fbgemm.fp16",
        f"{why}, {'exact in' if shift is not None else 'rounded to'} 16 bits; sums in float32",
        half.nbytes,
    )


class HalfLinear:
    """The weight times 2^shift in float16, in FBGEMM's layout."""

    def __init__(self, weight: Tensor, *, shift: int):
        # the call that skips the tests for fake and traced tensors
        self.op = torch.ops.quantized.linear_dynamic_fp16.op
        self.packed = torch.ops.quantized.linear_prepack_fp16(
            weight * 2.0**shift if shift else weight, None
        )
        self.back = 2.0**-shift
        self.nbytes = weight.numel() * 2

    def __call__(self, x: Tensor) -> Tensor:
        if x.ndim == 1:
            return self(x[None])[0]
        out = self.op(x, self.packed)
        return out if self.back == 1 else out.mul_(self.back)


def half_shift(weight: Tensor) -> int | None:
    """The power of two that brings every weight into float16 unharmed (0 where none is needed), or
    None.

    bfloat16 has a wider range than float16 and fewer digits: its weights fit once the largest is
    near the top.
    """
    if fits_half(weight, 0):
        return 0
    low, high = weight.aminmax()
    largest = max(float(high), -float(low))
    shift = 15 - int(torch.tensor(largest).frexp().exponent)
    return shift if fits_half(weight, shift) else None


def fits_half(weight: Tensor, shift: int) -> bool:
    """Part by part, in little memory: where not every value fits, one of the first does not."""
    parts = weight.split(max(1, COMPARED // max(1, weight[:1].numel())))
    scaled = (part * 2.0**shift if shift else part for part in parts)
    return all(torch.equal(part.half().float(), part) for part in scaled)


class CpuLinear:
    def __init__(self, weight: Tensor):
        tall = weight.shape[0] > weight.shape[1] and weight.numel() >= SMALL
        self.weight = by_columns(weight) if tall else weight  # [out, in], in one order or the other
        self.packed: Tensor | None = None
        self.tried = False

    def __call__(self, x: Tensor) -> Tensor:
        if not FEW_ROWS <= x.numel() // x.shape[-1] < MANY_ROWS:
            return F.linear(x, self.weight)
        if not self.tried:
            self.tried = True
            if has_packing() and memory_available() > 4 * self.weight.nbytes:
                self.packed = pack(self.weight.contiguous())
        return F.linear(x, self.weight) if self.packed is None else run_packed(x, self.packed)


def pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)


def run_packed(x: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def by_columns(weight: Tensor) -> Tensor:
    return weight.t().contiguous().t()


def has_half() -> bool:
    """FBGEMM's ops are missing elsewhere, emulated slowly or, on ARM, made of instructions that not
    every processor has.
    """
    return "fbgemm" in torch.backends.quantized.supported_engines and has_vectors()


def has_integers() -> bool:
    """Elsewhere torch's integer ops are plain loops."""
    return has_vectors()


def has_vectors() -> bool:
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def has_packing() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(
        torch.ops.mkldnn, "_reorder_linear_weight"
    )


def memory_available() -> float:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system tells
        return float("inf")
