"""The order of value heads in gated DeltaNet layers of Qwen3.5.

A key head serves several value heads. Hugging Face has those of one key head together, llama.cpp
the first of every key head, then the second of every key head, and so on:

    Hugging Face   0.0 0.1  1.0 1.1  2.0 2.1        (key head . value head)
    llama.cpp      0.0 1.0 2.0  0.1 1.1 2.1

Rows only change their places, and so do columns where blocks do not reach across heads: these keep
the bits of the file. Columns of larger blocks (K-quants: 256, a head has 128) become floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# the end of a name → (rows of queries and keys come first, rows of a value head are one)
ROWS = {
    "linear_attn.in_proj_qkv.weight": (True, False),
    "linear_attn.in_proj_z.weight": (False, False),
    "linear_attn.in_proj_b.weight": (False, True),
    "linear_attn.in_proj_a.weight": (False, True),
    "linear_attn.conv1d.weight": (True, False),
    "linear_attn.A_log": (False, True),
    "linear_attn.dt_bias": (False, True),
}
COLUMNS = "linear_attn.out_proj.weight"


@dataclass(frozen=True)
class ValueHeads:
    key_heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ValueHeads:
        return cls(
            config["linear_num_key_heads"],
            config["linear_key_head_dim"],
            config["linear_value_head_dim"],
        )

    def rows_together(self, name: str, rows: Tensor) -> Tensor:
        """In Hugging Face's order; rows of other tensors are left alone."""
        kind = next((kind for end, kind in ROWS.items() if name.endswith(end)), None)
        if kind is None:
            return rows
        behind, single = kind
        begin = 2 * self.key_heads * self.key_dim if behind else 0
        size = 1 if single else self.value_dim
        values = rows[begin:].unflatten(0, (-1, self.key_heads, size)).transpose(0, 1)
        found = rows.clone()
        found[begin:] = values.flatten(0, 2)
        return found

    def columns_together(self, rows: Tensor, length: int) -> Tensor:
        """Of out_proj; `length`: elements of `rows` that a head has."""
        heads = rows.unflatten(1, (-1, self.key_heads, length))
        return heads.transpose(1, 2).flatten(1)
