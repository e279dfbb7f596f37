"""A drafting head: one decoder layer that goes on from a model's hidden states.

    hidden states of the model ─► begin ─► h
    W [norm(embedding of the next token), norm(h)] ─► layer ─► h'  ─► norm ─► head ─► a guess
                      embedding of the guess, h'  ─► layer ─► h'' ─► …

The token at place i + 1 goes in with the state of place i. So the head has keys and values of its
own for every place of a sequence, in blocks of the same numbers as the model's.

EAGLE-3 has the pair where q, k and v are made, MTP in front of its layer. Both are sums of two
products (`Pair`): each has its norm fused, and nothing is put side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flyweight.batch import KVStorage
from flyweight.errors import OptionError
from flyweight.kernels.linear.fused import KvPrefetch, Norm
from flyweight.models.buffers import Buffers
from flyweight.models.config import ModelConfig
from flyweight.models.decoder import Decoder
from flyweight.models.layer import Block, Stage
from flyweight.models.layers import Embedding, Linear, Weights
from flyweight.models.narrow_head import nearest
from flyweight.models.rope import all_tables
from flyweight.tensors import Plain, QuantTensor

LAYER = "model.layers.0."  # what `Block.load` asks for


class Pair:
    """W [norm(beside), norm(x)]; stands where a `Linear` of x would."""

    delta = None
    bias = None

    def __init__(self, of_hidden: Linear, of_embedding: Linear, norm: Norm):
        self.of_hidden = of_hidden
        self.of_embedding = of_embedding
        self.norm = norm
        self.beside: Tensor | None = None  # embeddings of the same rows, set before each step

    def project(
        self,
        x: Tensor,
        out: Tensor | None = None,
        *,
        norm: Norm | None = None,
        prefetch: KvPrefetch | None = None,
        adapters: Tensor | None = None,
    ) -> Tensor:
        assert self.beside is not None
        first = self.of_embedding.project(self.beside, out, norm=self.norm)
        return self.of_hidden.project(x, out, norm=norm, residual=first, prefetch=prefetch)

    @property
    def nbytes(self) -> int:
        return self.of_hidden.nbytes + self.of_embedding.nbytes


class HeadWeights:
    """A head's tensors under the names of a model's first layer.

    rename  from those names to the names in the files
    cut     linears of the pair, of whose inputs the first half is of embeddings; `half` says which
    bits    linears are rounded to so many, unless they have fewer; None: as stored
    """

    def __init__(
        self,
        weights: Weights,
        config: dict[str, Any],
        rename: Callable[[str], str],
        *,
        cut: Collection[str] = (),
        half: int = 1,
        bits: int | None = None,
    ):
        self.weights = weights
        self.config = config
        self.rename = rename
        self.cut = cut
        self.half = half
        self.bits = bits

    def of_embeddings(self) -> HeadWeights:
        return HeadWeights(
            self.weights, self.config, self.rename, cut=self.cut, half=0, bits=self.bits
        )

    def has(self, name: str) -> bool:
        if self.half == 0 and name.endswith(".bias"):  # it is added once, by the other half
            return False
        return self.weights.has(self.rename(name))

    def tensor(self, name: str) -> Tensor:
        return self.weights.tensor(self.rename(name))

    def linear(self, prefix: str) -> QuantTensor:
        stored = self.weights.linear(self.rename(prefix))
        if prefix in self.cut:
            if not isinstance(stored, Plain):
                raise OptionError(
                    f"{self.rename(prefix)} is quantized, which heads must not be: give the head "
                    f"in 16 bits, it is rounded to the bits of the model as it is loaded"
                )
            width = stored.shape[-1] // 2
            stored = Plain(stored.weight[:, self.half * width :][:, :width].contiguous())
        if self.bits is None or not isinstance(stored, Plain):
            return stored
        return nearest(stored.weight, self.bits)

    def check_used(self) -> None:
        self.weights.check_used()


@dataclass(eq=False)
class DraftHead:
    """places  of the model's hidden states (taps.py)
    begin_with  a product or a norm that makes h of those
    pair       where embedding and h meet; `mixes`: in front of the layer, else as its q, k and v
    hidden_norm  of h where the pair is in front of the layer
    norms_residual  h is normed before anything else is done with it
    norms_result  the next h is what the final norm gives
    to_model   ids of the model's vocabulary, where the head's is smaller
    """

    config: ModelConfig
    places: tuple[int, ...]
    begin_with: Linear | Norm
    block: Block
    pair: Pair
    norm: Norm
    head: Linear
    embedding: Embedding
    device: torch.device
    dtype: torch.dtype
    mixes: bool = False
    hidden_norm: Norm | None = None
    norms_residual: bool = False
    norms_result: bool = False
    to_model: Tensor | None = None

    def __post_init__(self) -> None:
        self.ropes = all_tables(self.config, self.device)
        self.ops = self.block.ops

    @property
    def nbytes(self) -> int:
        own = [self.block.linears[group.name].nbytes for group in self.block.groups]
        first = self.begin_with.nbytes if isinstance(self.begin_with, Linear) else 0
        mixing = self.pair.nbytes if self.mixes else 0
        return sum(own) + first + mixing + self.head.nbytes

    def cache(self, blocks: int, page: int) -> KVStorage:
        config = self.config
        size = (blocks, page, config.kv_heads, config.head_dim)
        return KVStorage.zeros(size, self.dtype, self.device)

    @property
    def token_bytes(self) -> int:
        """Of one token in its cache."""
        return 2 * self.config.kv_heads * self.config.head_dim * self.dtype.itemsize

    def begin(self, states: Tensor, out: Tensor | None = None) -> Tensor:
        """The model's hidden states [tokens, places · width] → h [tokens, hidden]"""
        if isinstance(self.begin_with, Linear):
            return self.begin_with.project(states, out)
        normed = self.ops.normalize(states, self.begin_with)
        return normed if out is None else out.copy_(normed)

    def step(
        self, embedded: Tensor, hidden: Tensor, stage: Stage, buffers: Buffers | None = None
    ) -> Tensor:
        """h of the next place; `hidden` may be written over."""
        self.pair.beside = embedded
        if self.norms_residual:
            assert self.hidden_norm is not None
            hidden = self.ops.normalize(hidden, self.hidden_norm)
        if self.mixes:
            room = None
            if buffers is not None:
                room = buffers.take("mixed", self.config.hidden_size, len(hidden))
            hidden = self.pair.project(hidden, room, norm=self.hidden_norm)
        hidden = self.block.run(hidden, stage, in_place=True, buffers=buffers)
        return self.ops.normalize(hidden, self.norm) if self.norms_result else hidden

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[..., vocabulary of the head]"""
        return self.head.project(hidden, out, norm=None if self.norms_result else self.norm)

    def guess(self, hidden: Tensor) -> Tensor:
        """The likeliest tokens, in ids of the model."""
        ids = self.logits(hidden).argmax(-1)
        return ids if self.to_model is None else self.to_model[ids]


NARROW = 2048  # hidden size below which a head keeps 16 bits


def bits_of(target: Decoder) -> int | None:
    """Heads are rounded to the bits of the model that they guess for, on a GPU. Those of narrow
    models stay as they are: they are read in a few microseconds, and 4 bits beside the outliers
    among hidden values would cost them right guesses.
    """
    if target.device.type != "cuda" or target.config.hidden_size < NARROW:
        return None
    linear = target.blocks[0].o
    plan = target.blocks[0].plan.o
    bits = 8 * linear.nbytes / (sum(plan.sizes) * plan.in_features)
    return 4 if bits < 6 else 8 if bits < 12 else None
