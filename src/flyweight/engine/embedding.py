"""Vectors for texts: what the last layer makes of their tokens, normed, pooled and of unit length.

    mean   the mean over all tokens of the text
    last   its last token, which has seen all the others

Texts go through the model in passes of their own, between the engine's steps. Nothing of them is
read again, so all layers write their keys and values into one small cache that is thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flyweight.batch import Batch, fresh_states
from flyweight.engine.memory import CacheShape
from flyweight.errors import RequestError
from flyweight.models.rope import long_rows

if TYPE_CHECKING:
    from flyweight.engine.llm import LLM

BLOCK = 16  # tokens


class Embedder:
    def __init__(self, llm: LLM):
        self.decoder = llm.decoder
        self.device = llm.device
        self.dtype = llm.dtype
        self.vocabulary = llm.engine.vocabulary
        self.longest = llm.engine.max_model_len
        # in one pass, but for one text that has more
        self.most_tokens = llm.engine.scheduler.max_num_batched_tokens

    def take(self, texts: Sequence[Sequence[int]], *, most: int | None = None) -> int:
        """How many of the texts, from the first on, go into the next pass; `most` tokens, where
        fewer than else.
        """
        most = self.most_tokens if most is None else min(most, self.most_tokens)
        total = 0
        for count, text in enumerate(texts):
            total += len(text)
            if total > most and count:
                return count
        return len(texts)

    def check(self, text: Sequence[int]) -> None:
        if not text:
            raise RequestError("the input is empty; give at least one token")
        if len(text) > self.longest:
            raise RequestError(
                f"the input has {len(text)} tokens, but this model's context holds {self.longest}"
            )
        if min(text) < 0 or max(text) >= self.vocabulary:
            raise RequestError(
                f"the input has token ids outside the vocabulary of {self.vocabulary}"
            )

    @torch.inference_mode()
    def embed(self, texts: Sequence[Sequence[int]], pooling: str) -> list[list[float]]:
        """One vector for each text; they are checked already."""
        lengths = [len(text) for text in texts]
        config = self.decoder.config
        blocks = sum(-(-length // BLOCK) for length in lengths)
        caches = CacheShape.of(config, self.dtype).shared(
            blocks, BLOCK, self.device, slots=len(texts)
        )
        batch = pack(texts, self.device, [long_rows(config, length) for length in lengths])
        hidden = self.norm(self.decoder.hidden(batch, caches).float())  # [tokens, hidden]
        pooled = torch.stack([pool(part, pooling) for part in hidden.split(lengths)])
        return torch.nn.functional.normalize(pooled, dim=-1).cpu().tolist()

    def norm(self, hidden: Tensor) -> Tensor:
        """The model's last norm, which otherwise stands before the head."""
        norm = self.decoder.norm
        scale = hidden.square().mean(-1, keepdim=True).add(norm.epsilon).rsqrt()
        weight = norm.weight.float()
        return hidden * scale * (1 + weight if getattr(norm, "plus_one", False) else weight)


def pool(hidden: Tensor, pooling: str) -> Tensor:
    """[tokens, hidden] → [hidden]."""
    return hidden[-1] if pooling == "last" else hidden.mean(0)


def pack(
    texts: Sequence[Sequence[int]], device: torch.device, rope_rows: Sequence[int] = ()
) -> Batch:
    """Whole texts, one after the other, each in blocks of its own. `rope_rows`: of the rope tables,
    where each begins.
    """
    lengths = [len(text) for text in texts]
    blocks = [-(-length // BLOCK) for length in lengths]
    starts = [0]
    first_blocks = [0]
    for length, count in zip(lengths, blocks, strict=True):
        starts.append(starts[-1] + length)
        first_blocks.append(first_blocks[-1] + count)
    tables = torch.zeros(len(texts), max(blocks), dtype=torch.int32)
    for row, count in enumerate(blocks):
        tables[row, :count] = torch.arange(
            first_blocks[row], first_blocks[row] + count, dtype=torch.int32
        )
    places = rope_rows or [0] * len(texts)
    positions = torch.cat(
        [torch.arange(row, row + length) for row, length in zip(places, lengths, strict=True)]
    )
    slots = torch.cat(
        [
            torch.arange(length) + BLOCK * first
            for length, first in zip(lengths, first_blocks[:-1], strict=True)
        ]
    )
    tokens = torch.tensor([token for text in texts for token in text])
    return Batch(
        tokens=tokens.to(device),
        positions=positions.to(device),
        slots=slots.to(device),
        block_tables=tables.to(device),
        query_starts=starts,
        kv_lengths=lengths,
        output_rows=torch.tensor(starts[1:], device=device) - 1,
        states=fresh_states(lengths, device),
    )
