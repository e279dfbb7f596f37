"""A GGUF file beside its config.json, read as one of the shards of a folder.

Names and the order of rows are those of Hugging Face; the numbers stay as they lie in the file,
which is mapped. `weight` gives a matrix in the bits of the file, `get_tensor` (what safetensors
call it) any tensor as floats.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flyweight.checkpoint.gguf_blocks import FLOATS, TYPES, read_blocks
from flyweight.checkpoint.gguf_families import (
    BY_TYPE,
    OUTER,
    GgufFamily,
    restored,
    shape_elsewhere,
)
from flyweight.checkpoint.gguf_header import Stored, block_size, read_table
from flyweight.checkpoint.gguf_heads import COLUMNS, ValueHeads
from flyweight.checkpoint.gguf_made import F16, take_made
from flyweight.checkpoint.gguf_settings import LONG_ROPE
from flyweight.errors import CheckpointError, UnsupportedError
from flyweight.tensors import IntBlock, IntGroup, QuantTensor

# Llama 3.1: one divisor per rope frequency, part of the config elsewhere
ROPE_FACTORS = "rope_freqs.weight"
IN_CONFIG = {ROPE_FACTORS, *LONG_ROPE.values()}  # tensors that Hugging Face has among the settings
AT_ONCE = 1 << 22  # weights that are written out as floats together


def hugging_face_name(file: Path, family: GgufFamily, name: str) -> str:
    """Of a tensor with all experts, the name of each, with {} for its number."""
    parts = family.parts | family.experts | family.some
    stem, _, kind = name.rpartition(".")
    if stem in OUTER and kind == "weight":
        return f"{OUTER[stem]}.{kind}"
    inside = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if inside and inside[2] in family.whole:
        return f"model.layers.{inside[1]}.{family.whole[inside[2]]}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if not match or match[2] not in parts or kind not in ("weight", "bias"):
        raise UnsupportedError(
            f"{file}: tensor {name!r} is not part of a plain {family.model_type} decoder"
        )
    return f"model.layers.{match[1]}.{parts[match[2]]}.{kind}"


def is_read(config: dict[str, Any], name: str) -> bool:
    """Not what Hugging Face has among the settings, and no layer that guesses further tokens."""
    layer = re.match(r"blk\.(\d+)\.", name)
    if layer and config.get("num_nextn_predict_layers"):
        return int(layer[1]) < config["num_hidden_layers"]
    return name not in IN_CONFIG


def one_by_one(name: str, stored: Stored) -> dict[str, Stored]:
    """The experts' own matrices, where one tensor holds them all."""
    if "{}" not in name:
        return {name: stored}
    count, *shape = stored.shape
    size = stored.nbytes // count
    return {
        name.format(i): Stored(tuple(shape), stored.type, stored.offset + i * size)
        for i in range(count)
    }


def heads_turned(config: dict[str, Any], name: str) -> int | None:
    """The heads whose rows llama.cpp has put into another order, None where it has left them alone.

    It rotates neighbours (0, 1), (2, 3), … of Llama models, Hugging Face halves (0, d / 2), (1, d /
    2 + 1), …
    """
    family = BY_TYPE.get(str(config.get("model_type")))
    if family is None or not family.turned:
        return None
    if ".q_proj." in name:
        return config["num_attention_heads"]
    return config["num_key_value_heads"] if ".k_proj." in name else None


def turned_back(rows: Tensor, heads: int) -> Tensor:
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def family_of(config: dict[str, Any], file: Path) -> GgufFamily:
    kind = str(config.get("model_type"))
    if kind not in BY_TYPE:
        raise UnsupportedError(
            f"{file}: its config.json says {kind!r}, which is no model that GGUF files are read of"
        )
    return BY_TYPE[kind]


class GgufShard:
    def __init__(self, file: Path, config: dict[str, Any]):
        self.file = file
        self.config = config
        self.family = family_of(config, file)
        self.table: dict[str, Stored] = {}
        for name, stored in read_table(file).items():
            if is_read(config, name):
                new = hugging_face_name(file, self.family, name)
                shape = shape_elsewhere(new, stored.shape)
                self.table |= one_by_one(new, Stored(shape, stored.type, stored.offset))
        self.made = take_made(self.table, self.family.made, config, file)
        self.heads = ValueHeads.of(config) if self.family.tiled else None
        self.across: dict[str, Stored] = {}  # matrices whose blocks reach across heads, as stored
        if self.heads is not None:
            self.across = {
                name: stored
                for name, stored in self.table.items()
                if name.endswith(COLUMNS) and self.heads.value_dim % block_size(stored.type)[0]
            }
        self.table |= {name: Stored(one.shape, F16, -1) for name, one in self.across.items()}
        self.bytes = torch.from_file(
            str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8
        )

    def type_name(self, name: str) -> str:
        number = self.table[name].type
        return TYPES[number].name if number in TYPES else f"type {number}"

    def weight(self, name: str) -> QuantTensor | None:
        """A matrix in its own bits; None for floats, and for types that we read as floats."""
        stored = self.table[name]
        kind = TYPES.get(stored.type)
        if kind is None or kind.read is None or len(stored.shape) != 2:
            return None
        weight = read_blocks(kind, self._rows(name))
        if not isinstance(weight, IntGroup | IntBlock):
            return weight
        scales = (
            weight.scales
            if isinstance(weight, IntGroup) or weight.mins is None
            else weight.scales + 0 * weight.mins
        )
        if not bool(scales.isfinite().all()):
            raise CheckpointError(
                f"{self.file}: tensor {name!r} holds NaN or infinity: the file "
                f"is damaged; get it again"
            )
        return weight

    def get_tensor(self, name: str, codes_as: torch.dtype = torch.float16) -> Tensor:
        """As floats: those of the file, or made of its codes."""
        values = self._values(self.table[name], self._rows(name), codes_as)
        return restored(self.family, name, values)

    def _values(self, stored: Stored, rows: Tensor, codes_as: torch.dtype) -> Tensor:
        kind = TYPES.get(stored.type)
        if kind is not None and (dtype := FLOATS.get(kind.name)) is not None:
            if rows.data_ptr() % dtype.itemsize:  # of a file with an odd alignment
                rows = rows.clone()
            return rows.view(dtype).view(stored.shape)
        step = max(1, AT_ONCE // stored.shape[-1])
        parts = [self._decoded(stored.type, part, codes_as) for part in rows.split(step)]
        return torch.cat(parts).view(stored.shape)

    def _decoded(self, number: int, rows: Tensor, dtype: torch.dtype) -> Tensor:
        kind = TYPES.get(number)
        if kind is not None and kind.read is not None:
            return read_blocks(kind, rows).dequantize(dtype)
        import gguf

        return torch.from_numpy(
            gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType(number))
        ).to(dtype)

    def _rows(self, name: str) -> Tensor:
        """uint8 [rows, bytes]: a view of the file, or a copy with its rows in Hugging
        Face's order.
        """
        if name in self.made:
            return self._made_rows(name)
        if self.heads is not None and "linear_attn." in name:
            return self._value_rows(name, self.heads)
        stored = self.table[name]
        heads = heads_turned(self.config, name)
        if heads is not None and len(stored.shape) == 1:  # a bias: one value a row
            _, size = block_size(stored.type)
            return turned_back(self._raw(stored).view(-1, size), heads).reshape(1, -1)
        rows = self._raw(stored)
        return rows if heads is None else turned_back(rows, heads).contiguous()

    def _value_rows(self, name: str, heads: ValueHeads) -> Tensor:
        """With value heads in Hugging Face's order."""
        if (stored := self.across.get(name)) is not None:
            values = self._values(stored, self._raw(stored), torch.float16)
            return heads.columns_together(values, heads.value_dim).contiguous().view(torch.uint8)
        stored = self.table[name]
        inputs, size = block_size(stored.type)
        rows = self._raw(stored)
        if name.endswith(COLUMNS):
            return heads.columns_together(rows, heads.value_dim // inputs * size).contiguous()
        if len(stored.shape) == 1:  # a value a head
            return heads.rows_together(name, rows.view(-1, size)).reshape(1, -1)
        return heads.rows_together(name, rows)

    def _made_rows(self, name: str) -> Tensor:
        made = self.made[name]
        parts = [self._raw(made.first), self._raw(made.second)]
        if made.keeps_bits:
            return made.build(self.config, *parts)
        dtype = FLOATS[TYPES[made.stored.type].name]
        values = [
            self._values(one, rows, dtype)
            for one, rows in zip((made.first, made.second), parts, strict=True)
        ]
        built = made.build(self.config, *(one.to(dtype) for one in values))
        return built.view(torch.uint8)

    def _raw(self, stored: Stored) -> Tensor:
        inputs, size = block_size(stored.type)
        raw = self.bytes[stored.offset : stored.offset + stored.nbytes]
        return raw.view(-1, stored.shape[-1] // inputs * size)
