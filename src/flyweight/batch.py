"""What the model sees of one step: the tokens of all sequences packed one after the other, and
where their KV lives.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Sequence i owns tokens query_starts[i] to query_starts[i + 1]; a decoding sequence owns one.

    The lists are for the host (loops over sequences on the CPU), the tensors for the device.
    """

    tokens: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens]
    slots: Tensor  # int64 [tokens]: where this token's K and V go: block · block_size + offset
    block_tables: Tensor  # int32 [sequences, most blocks]
    query_starts: list[int]  # [sequences + 1]
    kv_lengths: list[int]  # [sequences]: tokens in the cache once this step's are written
    output_rows: Tensor  # int64 [outputs]: the tokens whose logits are wanted


@dataclass(frozen=True)
class KVStorage:
    """The paged cache of one layer, as the attention op sees it."""

    keys: Tensor  # [blocks, block_size, kv_heads, head_dim]
    values: Tensor

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]
