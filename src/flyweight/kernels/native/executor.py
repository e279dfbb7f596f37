"""Whole steps of a decoder in one native call: the same `forward(batch, caches)` as
models.decoder.Decoder.

The model is handed over as `Parts`: packed weights and plain numbers, which become the C structs
of source/decoder.h. Batches are ragged, as the engine makes them: prompts, parts of prompts and
single tokens in any mix, over the paged cache in float32, float16, bfloat16 or 8-bit codes.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flyweight.batch import Batch, KVStorage
from flyweight.kernels.native import library
from flyweight.kernels.native.rows import NativeSteps, Table
from flyweight.kernels.native.weight import Weight

STORAGE = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float8_e4m3fn: 3,
    torch.int8: 4,
}
GATED = {"silu": 2, "gelu": 3}  # `Mode` of source/matrix.h
MOST_PARTS = 3


@dataclass(frozen=True, eq=False)
class Layer:
    qkv: Sequence[Weight]  # outputs one after the other
    o: Weight
    gate: Weight
    up: Weight
    down: Weight
    input_norm: Tensor  # float32 [hidden], like the other norms
    post_norm: Tensor  # before the MLP
    query_norm: Tensor | None = None  # [head_dim]
    key_norm: Tensor | None = None
    attention_out_norm: Tensor | None = None  # of what attention adds to the residual
    mlp_out_norm: Tensor | None = None
    window: int = 0  # 0 sees everything

    @property
    def weights(self) -> list[Weight]:
        return [*self.qkv, self.o, self.gate, self.up, self.down]


@dataclass(frozen=True, eq=False)
class Parts:
    """A decoder, ready to be run."""

    layers: Sequence[Layer]
    head: Weight
    # the embedding [vocabulary, hidden], as numbers or packed; None: the head is tied to it
    table: Tensor | Weight | None
    cos: Tensor  # float32 [positions, rotary / 2]
    sin: Tensor
    final_norm: Tensor
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    intermediate: int
    vocabulary: int
    epsilon: float
    scale: float
    activation: str = "silu"
    embedding_scale: float = 1.0

    @property
    def nbytes(self) -> int:
        """Of the weights."""
        table = 0 if self.table is None else self.table.nbytes
        return (
            table
            + self.head.nbytes
            + sum(weight.nbytes for layer in self.layers for weight in layer.weights)
        )


class CLayer(ctypes.Structure):
    """`Layer` of source/decoder.h; its Projection is the count and the parts."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "input_norm",
                "post_norm",
                "attention_out_norm",
                "mlp_out_norm",
                "query_norm",
                "key_norm",
            )
        ),
        ("qkv_count", ctypes.c_int32),
        ("qkv", ctypes.c_void_p * MOST_PARTS),
        *((name, ctypes.c_void_p) for name in ("o", "gate", "up", "down")),
        ("window", ctypes.c_int32),
    )


class CDecoder(ctypes.Structure):
    """`Decoder` of source/decoder.h."""

    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in (
                "layers_count",
                "hidden",
                "heads",
                "kv_heads",
                "head_dim",
                "rotary",
                "intermediate",
                "vocabulary",
                "gated",
                "storage",
                "block_size",
            )
        ),
        *((name, ctypes.c_float) for name in ("epsilon", "scale", "embedding_scale")),
        *(
            (name, ctypes.c_void_p)
            for name in ("cos", "sin", "layers", "final_norm", "embedding", "table")
        ),
        ("table_storage", ctypes.c_int32),
        ("head", ctypes.c_void_p),
    )


class CStep(ctypes.Structure):
    """`Step` of source/decoder.h."""

    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in ("tokens_count", "sequences", "outputs", "table_width")
        ),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "tokens",
                "positions",
                "slots",
                "block_tables",
                "query_starts",
                "kv_lengths",
                "output_rows",
                "keys",
                "values",
                "scales",
                "fixed_scales",
                "logits",
                "states",
            )
        ),
    )


@dataclass(eq=False)
class Pages:
    """The addresses of a cache."""

    caches: Sequence[KVStorage]
    keys: Any = field(init=False)
    values: Any = field(init=False)
    scales: Any = field(init=False)  # of codes: keys' and values' of each layer
    fixed_scales: Any = field(init=False)  # 0: found for each token

    def __post_init__(self) -> None:
        addresses = ctypes.c_void_p * len(self.caches)
        self.keys = addresses(*(cache.keys.data_ptr() for cache in self.caches))
        self.values = addresses(*(cache.values.data_ptr() for cache in self.caches))
        coded = [cache.eight for cache in self.caches if cache.eight is not None]
        sides = [side for eight in coded for side in eight.scales]
        self.scales = (ctypes.c_void_p * len(sides))(*(side.data_ptr() for side in sides))
        fixed = torch.tensor([eight.fixed or (0.0, 0.0) for eight in coded]).bfloat16()
        bits = fixed.view(torch.int16).flatten().tolist()
        self.fixed_scales = (ctypes.c_int16 * len(bits))(*bits)


@dataclass(frozen=True, eq=False)
class FinalNorm:
    weight: Tensor
    epsilon: float


class NativeDecoder:
    """`forward(batch, caches)` gives float32 logits [outputs, vocabulary], as the torch decoder
    does.
    """

    config: Any = None  # whatever describes the model to those who load it

    def __init__(self, parts: Parts, *, cache_dtype: torch.dtype = torch.float32):
        self.parts = parts
        self.cache_dtype = cache_dtype
        self.norm = FinalNorm(parts.final_norm, parts.epsilon)
        self.nbytes = parts.nbytes
        self.kernels = library.load()
        self.layers = (CLayer * len(parts.layers))(*(_layer(layer) for layer in parts.layers))
        self.decoder = _decoder(parts, self.layers)
        self.pages: Pages | None = None
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.sizes: dict[tuple[int, int], int] = {}  # of that memory, by threads and tokens

    @property
    def vocabulary(self) -> int:
        return self.parts.vocabulary

    @property
    def step_nbytes(self) -> int:
        """Of the weights that a decode step of one sequence reads: all but the rows of a table."""
        table = self.parts.table
        return self.nbytes - (0 if table is None else table.nbytes)

    def forward(self, batch: Batch, caches: Sequence[KVStorage]) -> Tensor:
        logits = torch.empty(len(batch.output_rows), self.parts.vocabulary)
        if len(batch.tokens):
            self._step(batch, caches, batch.output_rows, logits=logits.data_ptr())
        return logits

    def decode_steps(self, caches: Sequence[KVStorage], table: Table) -> NativeSteps:
        """Steps of the sequences of a table, which the engine keeps up to date."""
        return NativeSteps(self, caches, table)

    def hidden(self, batch: Batch, caches: Sequence[KVStorage]) -> Tensor:
        """Float32 [tokens, hidden]: what the last layer gives for every token, before the norm."""
        states = torch.empty(len(batch.tokens), self.parts.hidden)
        if len(batch.tokens):
            rows = torch.arange(len(batch.tokens))
            self._step(batch, caches, rows, states=states.data_ptr())
        return states

    def _step(
        self, batch: Batch, caches: Sequence[KVStorage], output_rows: Tensor, **results: int
    ) -> None:
        starts = (ctypes.c_int64 * len(batch.query_starts))(*batch.query_starts)
        lengths = (ctypes.c_int64 * len(batch.kv_lengths))(*batch.kv_lengths)
        tables = batch.block_tables.contiguous()
        step = self.open_step(
            caches,
            tokens_count=len(batch.tokens),
            sequences=len(batch.kv_lengths),
            outputs=len(output_rows),
            table_width=tables.shape[1],
            tokens=batch.tokens.data_ptr(),
            positions=batch.positions.data_ptr(),
            slots=batch.slots.data_ptr(),
            block_tables=tables.data_ptr(),
            query_starts=ctypes.addressof(starts),
            kv_lengths=ctypes.addressof(lengths),
            output_rows=output_rows.data_ptr(),
            **results,
        )
        team = library.team()
        self.kernels.decoder_step(
            team,
            ctypes.byref(self.decoder),
            ctypes.byref(step),
            self.workspace(team, len(batch.tokens)),
        )

    def open_step(self, caches: Sequence[KVStorage], **fields: int) -> CStep:
        """A step over this cache."""
        if self.pages is None or self.pages.caches is not caches:
            self.pages = self._open(caches)
        return CStep(
            keys=ctypes.addressof(self.pages.keys),
            values=ctypes.addressof(self.pages.values),
            scales=ctypes.addressof(self.pages.scales),
            fixed_scales=ctypes.addressof(self.pages.fixed_scales),
            **fields,
        )

    def _open(self, caches: Sequence[KVStorage]) -> Pages:
        if len(caches) != len(self.parts.layers):  # which the kernels would read beyond
            raise ValueError(
                f"{len(caches)} KV caches for {len(self.parts.layers)} layers; give one a layer"
            )
        first = caches[0].keys
        if any(
            not pages.is_contiguous() for cache in caches for pages in (cache.keys, cache.values)
        ):
            raise ValueError("the pages of the KV cache must be contiguous")
        self.decoder.storage = STORAGE[first.dtype]
        self.decoder.block_size = first.shape[1]
        return Pages(caches)

    def workspace(self, team: int, tokens: int) -> int:
        """The address of memory for a step of so many tokens; it grows with the longest."""
        if (team, tokens) not in self.sizes:
            needed = self.kernels.decoder_workspace(team, ctypes.byref(self.decoder), tokens)
            self.sizes[team, tokens] = needed + 64
        size = self.sizes[team, tokens]
        if self.memory.numel() < size:
            self.memory = torch.empty(size, dtype=torch.uint8)
        return -(-self.memory.data_ptr() // 64) * 64


def _layer(layer: Layer) -> CLayer:
    names = [item.name for item in dataclasses.fields(Layer)]
    values = {name: getattr(layer, name) for name in names}
    pointers = {
        name: value.data_ptr() for name, value in values.items() if isinstance(value, Tensor)
    }
    matrices = {
        name: ctypes.addressof(value.matrix)
        for name, value in values.items()
        if isinstance(value, Weight)
    }
    made = CLayer(**pointers, **matrices, window=layer.window, qkv_count=len(layer.qkv))
    for i, weight in enumerate(layer.qkv):
        made.qkv[i] = ctypes.addressof(weight.matrix)
    return made


def _decoder(parts: Parts, layers: Any) -> CDecoder:
    head = ctypes.addressof(parts.head.matrix)
    made = CDecoder(
        layers_count=len(parts.layers),
        hidden=parts.hidden,
        heads=parts.heads,
        kv_heads=parts.kv_heads,
        head_dim=parts.head_dim,
        rotary=parts.rotary,
        intermediate=parts.intermediate,
        vocabulary=parts.vocabulary,
        gated=GATED[parts.activation],
        epsilon=parts.epsilon,
        scale=parts.scale,
        embedding_scale=parts.embedding_scale,
        cos=parts.cos.data_ptr(),
        sin=parts.sin.data_ptr(),
        layers=ctypes.addressof(layers),
        final_norm=parts.final_norm.data_ptr(),
        head=head,
    )
    if parts.table is None:
        made.embedding = head
    elif isinstance(parts.table, Weight):
        made.embedding = ctypes.addressof(parts.table.matrix)
    else:
        made.table = parts.table.data_ptr()
        made.table_storage = STORAGE[parts.table.dtype]
    return made
