"""Integer weights on a CPU through torch's own ops: a quarter or an eighth of the bytes of float32.

W8A8 is `torch._int_mm`: activations to int8 per token, sums in integers, then the scales: what the
format means, bit for bit up to float32 rounding, at any number of rows; but only on processors with
VNNI (`sums_exactly`). Weight-only int4 (groups) and int8 (one scale per channel) are
`_weight_int4pack_mm_for_cpu` and `_weight_int8pack_mm`, which want bfloat16 inputs (their float32
versions are ten times slower than plain float32) and lose to a float matmul beyond a few rows: from
there on `many` takes over.

Measured on two busy cores of a Sapphire Rapids, the block linears of a 135M model in ms, rows 1 / 8
/ 256: float32 28 / 54 / 365, W8A8 20 / 17 / 135, int4 13 / 30 / 696, int8 16 / 41 / 757, FBGEMM in
16 bits 29 / 33 / 386.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from flyweight.tensors import Int8Channel, IntGroup

MOST_ROWS = {4: 8, 8: 4}  # by bits


@functools.cache
def sums_exactly() -> bool:
    """Whether `torch._int_mm` may be trusted: without VNNI, oneDNN adds products in pairs that are
    cut off at 16 bits.
    """
    most = torch.full((4, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(most, most.t()) == 64 * 127**2).all())


class BothInt8:
    """W8A8 with dynamic activations: y = (q_x q_wᵀ) · scale of the token · scale of the channel."""

    def __init__(self, tensor: Int8Channel):
        self.codes = tensor.codes.t()  # [in, out], as it lies
        self.scales = tensor.scales.float().flatten() / 127  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        most = torch.linalg.vector_norm(rows, float("inf"), dim=-1, keepdim=True).clamp_(
            min=127e-12
        )
        codes = rows.mul(127 / most).round_().to(torch.int8)
        out = torch._int_mm(codes, self.codes).float().mul_(most).mul_(self.scales)
        return out.view(*x.shape[:-1], -1)


class FewRows:
    """Weight-only integers with bfloat16 inputs up to `most` rows; `many` beyond."""

    def __init__(self, tensor: IntGroup, many: Callable[[Tensor], Tensor]):
        self.op, self.codes, self.scales = lay_out(tensor)
        self.many = many
        self.most = MOST_ROWS[tensor.bits]
        self.nbytes = self.codes.nbytes + self.scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        count = x.numel() // x.shape[-1]
        if count > self.most:
            return self.many(x)
        out = self.op(x.reshape(count, -1).bfloat16(), self.codes, self.scales)
        return out.view(*x.shape[:-1], -1).to(x.dtype)


def has_op(tensor: IntGroup) -> bool:
    """Whether torch has an op for this shape; on other shapes its ops read beyond the weight."""
    outputs, inputs = tensor.matrix_shape
    if tensor.experts is not None or tensor.g_idx is not None or inputs % tensor.group_size:
        return False
    if tensor.bits == 4:
        return tensor.group_size in (32, 64, 128, 256) and outputs % 16 == 0
    return tensor.bits == 8 and tensor.groups == 1 and tensor.zeros is None and inputs % 16 == 0


def lay_out(tensor: IntGroup) -> tuple[Callable[[Tensor, Tensor, Tensor], Tensor], Tensor, Tensor]:
    """The op, and codes and scales as it wants them."""
    if tensor.bits == 8:
        return (
            torch._weight_int8pack_mm,
            tensor.integers().to(torch.int8),
            tensor.scales.bfloat16().flatten(),
        )
    codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(tensor.values(), 1)
    scales = tensor.scales.float()
    zeros = (
        torch.zeros_like(scales) if tensor.zeros is None else scales * (8 - tensor.zeros.float())
    )
    # [groups, out, 2]
    pairs = torch.stack([scales, zeros], -1).transpose(0, 1).bfloat16().contiguous()
    group_size = tensor.group_size

    def run(x: Tensor, packed: Tensor, scales_and_zeros: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group_size, scales_and_zeros)

    return run, codes, pairs
