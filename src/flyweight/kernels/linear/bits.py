"""Weights that keep the bits of their files on a GPU: host side of cuda/bits.cuh.

Codes of 2 to 8 bits lie in planes, and a record holds the scales of one or several groups of 16
inputs and more for the 16 outputs of a tile. Nothing is rounded: the numbers are those of the file
in another order. `variant` says how a weight's records look, `read_bits` takes it apart.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight.tensors import IntBlock, IntGroup, QuantTensor, Trellis
from flyweight.tensors.float4 import FLOAT4_BLOCK, NvFloat4
from flyweight.tensors.trellis import UNIT

PLANES = {2: (2,), 3: (3,), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}  # of a code, the lower first
INTEGERS = 0  # CODING of the CUDA sources
CODINGS = {"table": 1, "e2m1": 2, "trellis": 3}
# RECORD_KIND of the CUDA sources: (number, bytes of an output, more for each group of a record)
KINDS = {
    "scales": (0, 2, 0),
    "zeros": (1, 3, 0),
    "minima": (2, 4, 0),
    "subscales": (3, 2, 1),
    "subminima": (4, 4, 2),
    "subnibbles": (5, 4, 1),
    "float8": (6, 4, 1),
    "subsixes": (7, 2, 0.75),
}


@dataclass(frozen=True)
class Variant:
    """What the kernels are compiled for, besides the sizes of a weight."""

    bits: int
    kind: str
    group: int  # inputs that share a scale
    span: int  # inputs of a record: one group, or all that share a scale of scales
    middle: int = 0
    coding: int = INTEGERS

    @property
    def block_bytes(self) -> int:
        return 128 * self.bits

    @property
    def record_bytes(self) -> int:
        _, own, each = KINDS[self.kind]
        return int(16 * (own + each * max(1, self.span // self.group)))

    @property
    def defines(self) -> dict[str, int]:
        return {
            "BITS": self.bits,
            "RECORD_KIND": KINDS[self.kind][0],
            "SUBGROUP": self.group,
            "MIDDLE": self.middle,
            "CODING": self.coding,
        }


def whole_quarters(group: int, inputs: int) -> bool:
    """Whether groups are whole quarters of blocks of 64 inputs."""
    return group in (16, 32) or group % 64 == 0 or group >= inputs


def variant(tensor: QuantTensor) -> Variant | None:
    """How a weight lies in planes; None where it does not."""
    if isinstance(tensor, IntGroup):
        return _of_groups(tensor)
    if isinstance(tensor, NvFloat4) and tensor.matrix_shape[1] % 64 == 0:
        span = next(size for size in (512, 256, 128, 64) if tensor.matrix_shape[1] % size == 0)
        return Variant(4, "float8", FLOAT4_BLOCK, span, coding=CODINGS["e2m1"])
    if isinstance(tensor, Trellis):
        return _of_trellis(tensor)
    return _of_blocks(tensor) if isinstance(tensor, IntBlock) else None


def _of_trellis(tensor: Trellis) -> Variant:
    """A scale for each row is one for whole units, however many it has."""
    group = math.ceil(tensor.group_size / UNIT) * UNIT
    return Variant(tensor.bits, "scales", group, group, coding=CODINGS["trellis"])


def _of_groups(tensor: IntGroup) -> Variant | None:
    inputs = tensor.in_features
    group = min(tensor.group_size, inputs)
    if tensor.bits not in PLANES or tensor.g_idx is not None or not whole_quarters(group, inputs):
        return None
    if tensor.zeros is None:
        return Variant(tensor.bits, "scales", group, group, middle=1 << (tensor.bits - 1))
    return Variant(tensor.bits, "zeros", group, group)


def _of_blocks(tensor: IntBlock) -> Variant | None:
    group = tensor.group_size
    if tensor.bits not in PLANES or not whole_quarters(group, tensor.matrix_shape[1]):
        return None
    coding = INTEGERS if tensor.table is None else CODINGS["table"]
    if tensor.sub_scales is None:
        kind = "scales" if tensor.mins is None else "minima"
        return Variant(tensor.bits, kind, group, group, tensor.middle, coding)
    span = tensor.matrix_shape[1] // tensor.scales.shape[-1]
    if span % 64:
        return None
    whole_bytes = span // group % 4 == 0
    kind = "subsixes" if tensor.sub_bits == 6 and whole_bytes else "subscales"
    if tensor.mins is not None:
        kind = "subnibbles" if tensor.sub_bits == 4 else "subminima"
    return Variant(tensor.bits, kind, group, span, tensor.middle, coding)


def takes(tensor: QuantTensor) -> bool:
    return not isinstance(tensor, Trellis) and variant(tensor) is not None


@functools.cache
def _sixteen_bits(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float16


def codes_of(tensor: QuantTensor) -> Tensor:
    """uint8 [out, in]"""
    if isinstance(tensor, NvFloat4):
        return tensor.unpacked()
    assert isinstance(tensor, IntGroup | IntBlock)
    return tensor.values().to(torch.uint8)


def record_parts(tensor: QuantTensor, found: Variant) -> list[Tensor]:
    """uint8 [out, records, items, bytes] each: what a record has of an output, part by part."""
    if isinstance(tensor, NvFloat4):
        scales = tensor.scales.view(torch.uint8).unflatten(-1, (-1, found.span // found.group))
        whole = tensor.global_scale.expand(-1, scales.shape[1]).contiguous()
        return [whole.view(torch.uint8).unflatten(-1, (-1, 1, 4)), scales[..., None]]
    assert isinstance(tensor, IntGroup | IntBlock | Trellis)
    scales = tensor.scales.to(_sixteen_bits(tensor.scales.dtype))
    if isinstance(tensor, Trellis):
        return [_bytes(scales)]
    if isinstance(tensor, IntGroup):
        if tensor.zeros is None:
            return [_bytes(scales)]
        return [_bytes(scales), tensor.zeros[..., None, None]]
    minima = () if tensor.mins is None else (tensor.mins.to(scales.dtype),)
    shared = [_bytes(scales, *minima)]
    if tensor.sub_scales is None:
        return shared
    groups = found.span // found.group
    factors = tensor.sub_scales.view(torch.uint8).unflatten(-1, (-1, groups))[..., None]
    if found.kind == "subsixes":
        return [*shared, *_sixes(tensor.sub_scales.unflatten(-1, (-1, groups)) + 32)]
    if tensor.sub_mins is None:
        return [*shared, factors]
    own = tensor.sub_mins.unflatten(-1, (-1, groups))[..., None]
    if found.kind == "subnibbles":
        return [*shared, factors | own << 4]
    return [*shared, torch.cat([factors, own], -1)]


def _sixes(factors: Tensor) -> list[Tensor]:
    """[out, records, groups], 6 bits → bytes: the lower 4 bits of two, the upper 2 of four."""
    low = factors.to(torch.uint8) & 15
    high = factors.to(torch.uint8) >> 4
    pairs = low[..., 0::2] | low[..., 1::2] << 4
    four = high[..., 0::4] | high[..., 1::4] << 2 | high[..., 2::4] << 4 | high[..., 3::4] << 6
    return [pairs[..., None], four[..., None]]


def _bytes(*parts: Tensor) -> Tensor:
    """16-bit [out, records] each → uint8 [out, records, 1, bytes]: an output's side by side."""
    together = torch.stack(parts, -1).contiguous().view(torch.uint8)
    return together.unflatten(-1, (1, -1))


def tile_records(parts: Sequence[Tensor]) -> Tensor:
    """uint8 [tiles, records, bytes]: of each part the 16 outputs of a tile side by side."""
    ordered = []
    for part in parts:
        filled = torch.nn.functional.pad(part, (0, 0, 0, 0, 0, 0, 0, -part.shape[0] % 16))
        tiles = filled.unflatten(0, (-1, 16)).permute(0, 2, 3, 1, 4)
        ordered.append(tiles.flatten(2))
    return torch.cat(ordered, -1).contiguous()


def trellis_words(tensor: Trellis) -> Tensor:
    """The streams of each block, as bytes: two words of a lane side by side, then all third ones
    (cuda/trellis.cuh).
    """
    words = tensor.words.contiguous()
    if tensor.bits == 3:
        words = torch.cat([words[..., :2].flatten(2), words[..., 2]], -1)
    return words.view(torch.uint8).flatten()


def tile_planes(words: Tensor, bits: int) -> Tensor:
    """Codes uint8 [tile, block, half, lane, word, byte] → the planes of each block, as bytes."""
    if bits == 3:
        return _three_words(words)
    planes = []
    shift = 0
    for width in PLANES[bits]:
        part = words >> shift & ((1 << width) - 1)
        planes.append(_plane(part, width).flatten(2))
        shift += width
    return torch.cat(planes, -1).flatten()


def _three_words(words: Tensor) -> Tensor:
    """Codes of 3 bits in three words a lane, as cuda/bits.cuh says: the first two side by side,
    then all third ones.
    """
    first, second = words.unbind(2)  # halves: [tile, block, lane, word, byte]
    x, y, z, w = first.unbind(3)
    x2, y2, z2, w2 = second.unbind(3)
    pair = torch.stack(
        [
            x | y << 3 | y2 >> 1 << 6,
            z | w << 3 | (y2 & 1) << 6 | (w2 & 1) << 7,
        ],
        3,
    )
    third = x2 | z2 << 3 | w2 >> 1 << 6
    return torch.cat([pair.flatten(2), third.flatten(2)], -1).flatten()


def _plane(part: Tensor, width: int) -> Tensor:
    """A byte has the same byte of 8 / width words: of both halves, of a half's four, or of all."""
    if width == 8:
        return part
    if width == 4:
        return part[:, :, 0] | part[:, :, 1] << 4
    shifts = width * torch.arange(4, dtype=torch.uint8, device=part.device)[:, None]
    four = (part << shifts).sum(-2, dtype=torch.uint8)  # [tile, block, half, lane, byte]
    if width == 2:
        return four.transpose(2, 3)
    return four[:, :, 0] | four[:, :, 1] << 4
