"""HQQ's folders as transformers saves them: each linear is one matrix with its own description.

    W_q     codes of [N · K / group, group], a part of the rows in each field of a byte (8, 4, 2, 1
            bits) or of a word (3 bits: ten to a word), the first part highest
    scale, zero [N · K / group, 1]; shape [2]; nbits, group_size, axis, packing and others as
        tensors

W = (code − zero) · scale with a zero point that is no whole number: a minimum of zero · scale,
which is rounded to float16 once, as scales are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flyweight.checkpoint.formats.base import FLOATS, Format, Settings, Source, fault, present, take
from flyweight.errors import UnsupportedError
from flyweight.tensors import IntBlock, QuantTensor

NUMBERS = (torch.int32, torch.int64, torch.uint8, torch.bool, *FLOATS)
FIELDS = {2: 2, 3: 3, 4: 4}  # bits of a code → of its field
PARTS = {2: 4, 3: 10, 4: 2}  # of the rows, in a byte or a word


@dataclass(frozen=True)
class Hqq(Format):
    name: ClassVar[str] = "hqq"
    marks: ClassVar[tuple[str, ...]] = ("W_q",)
    suffixes: ClassVar[tuple[str, ...]] = (
        "W_q",
        "scale",
        "zero",
        "shape",
        "nbits",
        "group_size",
        "axis",
        "packing",
        "unpack_view_dtype",
        "view_as_float",
        "quant_scale",
        "quant_zero",
        "compute_dtype",
        "offload_meta",
        "encoded_state_dict",
        "stores_quant_config",
        "channel_wise",
        "optimize",
        "round_zero",
    )

    @classmethod
    def parse(cls, settings: Settings) -> Hqq:
        return cls()

    @property
    def spare(self) -> tuple[str, ...]:
        read = ("W_q", "scale", "zero", "shape", "nbits", "axis")
        return tuple(f"*.{name}" for name in self.suffixes if name not in read)

    def read(self, checkpoint: Source, prefix: str) -> QuantTensor | None:
        if not present(checkpoint, prefix, self):
            return None
        bits = _number(checkpoint, f"{prefix}.nbits")
        if bits not in PARTS:
            raise UnsupportedError(
                f"{checkpoint.folder}: {prefix!r} has {bits} bits; HQQ of 2, 3 and 4 bits is read"
            )
        if _number(checkpoint, f"{prefix}.axis") != 1:
            raise UnsupportedError(
                f"{checkpoint.folder}: {prefix!r} has groups of outputs (axis 0), for which there "
                "is no kernel; quantize with axis=1"
            )
        return self._read_blocks(checkpoint, prefix, bits)

    def _read_blocks(self, checkpoint: Source, prefix: str, bits: int) -> IntBlock:
        size = take(checkpoint, f"{prefix}.shape", dtypes=NUMBERS, shape=(2,))
        rows, columns = (int(value) for value in size)
        scale = take(checkpoint, f"{prefix}.scale", dtypes=FLOATS, shape=(None, 1))
        count = scale.shape[0]
        group = rows * columns // max(count, 1)
        if rows <= 0 or columns <= 0 or group * count != rows * columns or columns % group:
            raise fault(
                checkpoint,
                f"'{prefix}.scale' has {count} groups, no fit for {rows} × {columns} weights",
            )
        zero = take(checkpoint, f"{prefix}.zero", dtypes=FLOATS, shape=(count, 1))
        words = torch.int32 if bits == 3 else torch.uint8
        length = -(-count // PARTS[bits])
        packed = take(checkpoint, f"{prefix}.W_q", dtypes=(words,), shape=(length, group))
        codes = unpacked(packed, bits)[:count].reshape(rows, columns)
        grouped = (rows, columns // group)
        mins = (scale.float() * zero.float()).half().reshape(grouped)
        return IntBlock(
            *IntBlock.planes(codes, bits),
            scale.half().reshape(grouped),
            mins,
            None,
            None,
            bits,
            group,
        )

    def refuses(self, tensor: QuantTensor) -> str | None:
        return "HQQ's folders are read, not written"


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """uint8 [rows, group]: the first part of the rows is in the highest field."""
    parts = PARTS[bits]
    shifts = FIELDS[bits] * torch.arange(parts - 1, -1, -1, device=packed.device)
    fields = packed[None].int() >> shifts[:, None, None] & ((1 << bits) - 1)
    return fields.flatten(0, 1).to(torch.uint8)


def _number(checkpoint: Source, name: str) -> int:
    shape = checkpoint.shape(name) if checkpoint.has(name) else ()
    return int(take(checkpoint, name, dtypes=NUMBERS, shape=shape if shape == (1,) else ()).item())
