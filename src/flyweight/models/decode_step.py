"""One decode step of a whole model through fused CUDA kernels, into fixed places: what a CUDA graph
captures.

    embed ─► every layer (layer.py), attention by `DecodeAttention` ─► head with its norm ─► logits

All that a step reads and writes stays where it is (`StepRows`, `Buffers`); lengths and block tables
are read on the device, so one graph serves any context. Launches overlap (programmatic dependent
launch): each kernel fetches its first weights while the one before it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.batch import KVStorage
from flyweight.kernels import jit
from flyweight.kernels.attention.decode import (
    AttentionLayer,
    HeadNorms,
    HeadShape,
    Rows,
    Workspace,
    decode_attention,
    rope_pairs,
)
from flyweight.kernels.attention.qkv import (
    Mailbox,
    chunk_of,
    leaves_room,
    mailbox_cycle,
    qkv_attention,
)
from flyweight.kernels.attention.qkv import unsupported_reason as separate_reason
from flyweight.kernels.gated_delta import decode as states
from flyweight.kernels.gated_delta.decode import DeltaRows
from flyweight.kernels.gated_delta.shape import DeltaWeights
from flyweight.kernels.linear.fused import KvPrefetch, PackedInput
from flyweight.models import latent_step
from flyweight.models.attention import normed_projections
from flyweight.models.buffers import Buffers, StepRows
from flyweight.models.decoder import Decoder
from flyweight.models.latent_step import LatentDecode
from flyweight.models.layer import Block
from flyweight.models.mlp import GatedMlp
from flyweight.models.rope import RopeTables
from flyweight.models.standard import plan_of

# Rows, and inputs of all of them together, from which on kernels of a layer are asked to leave each
# other room: fewer are converted soon enough in kernels that take the inputs of a tile whole
# (`whole_layers` in benchmarks/workshop/speculation-h200.jsonl)
FEWEST_BESIDE = 3
FEWEST_INPUTS = 4096


def unsupported_reason(decoder: Decoder, page: int) -> str | None:
    """None, or why this model's decode steps cannot be captured."""
    config = decoder.config
    if decoder.device.type != "cuda":
        return "no CUDA device"
    if decoder.dtype not in (torch.float16, torch.bfloat16):
        return f"the attention kernel computes in 16 bits, not in {decoder.dtype}"
    if config.hidden_size % 8:
        return f"a hidden size of {config.hidden_size} is no multiple of 8"
    for block in decoder.blocks:
        if block.mlp.uncaptured_reason:
            return f"layer {block.index}: {block.mlp.uncaptured_reason}"
        if block.delta is not None:
            reason = states.unsupported_reason(block.delta.shape)
        elif block.latent is not None:
            reason = latent_step.unsupported_reason(block, page)
        else:
            reason = head_shape(block, decoder.ropes, page).unsupported_reason()
        if reason:
            return reason
    return None


def head_shape(block: Block, ropes: RopeTables, page: int) -> HeadShape:
    plan = block.plan.attention
    return HeadShape(
        plan.heads,
        plan.kv_heads,
        plan.head_dim,
        2 * ropes[plan.rope][0].shape[-1],
        page,
        block.head_norm is not None,
        plan.window,
        soft_cap=plan.soft_cap,
        sinks=plan.sinks is not None,
        gated=plan.gated,
    )


class DecodeAttention:
    """The stage of decode steps: norm, qkv, rope, KV write and attention of a layer, in one kernel
    or in two.

    `separate`: why they are two. `beside`: whether all kernels of its layers leave each other room,
    so that two are on an SM at a time and take turns to fetch weights.
    """

    lengths: Tensor | None

    def __init__(
        self,
        blocks: Sequence[Block],
        caches: Sequence[KVStorage],
        rows: StepRows,
        *,
        ropes: RopeTables,
        pairs: dict[str | None, Tensor],
        buffers: Buffers,
        separate: str | None = None,
        beside: bool = True,
    ):
        """`beside`: where kernels can leave each other room they do."""
        self.caches = caches
        self.lengths = rows.lengths
        self.adapters = rows.adapters
        self.buffers = buffers
        self.size = len(rows.tokens)
        device = buffers.device
        page = caches[0].block_size
        attending = [block for block in blocks if block.delta is None]
        eight = any(cache.eight is not None for cache in caches)
        self.layers = {
            id(block): attention_layer(block, ropes, page, eight_bits=eight) for block in attending
        }
        self.delta_rows: DeltaRows | None = None
        if rows.states is not None:
            self.delta_rows = DeltaRows(rows.lengths, rows.states)
        self.rows = {
            name: Rows(table, rows.lengths, rows.tables, rows.before)
            for name, table in pairs.items()
        }
        self.mailboxes: list[Mailbox] = []
        self.place = 0  # of the next layer that attends, in the cycle
        self.chunk = chunk_of(self.size, shared=rows.before is not None)
        self.separate = separate or self._separate_reason(attending, gpu.of(device))
        self.beside = beside and self._leaves_room(blocks)
        if self.beside:
            self.layers = {key: replace(one, beside=True) for key, one in self.layers.items()}
        if not attending:
            return
        first = self.layers[id(attending[0])].shape
        self.workspace = Workspace.make(first, self.size, device)
        if self.separate is None:
            self.mailboxes = mailbox_cycle(
                first,
                self.size,
                len(attending),
                dtype=buffers.dtype,
                device=device,
                chunk=self.chunk,
            )

    def _separate_reason(self, blocks: Sequence[Block], device: gpu.Gpu) -> str | None:
        if len(blocks) < 2:
            return "a single layer that attends has nobody to empty its mailbox"
        if any(block.plan.before_attention is None for block in blocks):
            return "no norm before attention"
        if self.adapters is not None and any(
            block.qkv.delta is not None and block.qkv.adapted_row(self.adapters) is None
            for block in blocks
        ):
            return "adapters add to queries, keys and values"
        if any(block.whole_norms is not None for block in blocks):
            return "queries and keys are normed over all heads together"
        reasons = (
            separate_reason(
                block.qkv.fused, self.layers[id(block)].shape, self.size, device, self.chunk
            )
            for block in blocks
        )
        return next((reason for reason in reasons if reason), None)

    def _leaves_room(self, blocks: Sequence[Block]) -> bool:
        """Whether all kernels of all layers leave room for another one (`FusedLinear.leaves_room`).
        They are asked together: in one layer that cannot, the CTAs of all others gather.
        """
        if self.separate is not None or self.adapters is not None:
            return False
        inputs = self.size * blocks[0].plan.hidden_size
        if self.size < FEWEST_BESIDE or inputs < FEWEST_INPUTS:
            return False
        device = gpu.of(self.buffers.device)
        return all(
            block.delta is None
            and block.plan.adds_plainly
            and leaves_room(
                block.qkv.fused, self.layers[id(block)].shape, self.size, device, self.chunk
            )
            and block.o.leaves_room(self.size, residual=True)
            and isinstance(block.mlp, GatedMlp)
            and block.mlp.leaves_room(self.size)
            for block in blocks
        )

    def attend(self, block: Block, hidden: Tensor) -> Tensor | PackedInput:
        cache = self.caches[block.index]
        if block.delta is not None:
            return self._move_states(block, block.delta, hidden, cache)
        place = self.place
        self.place += 1
        plan = block.plan.attention
        layer = self.layers[id(block)]
        rows = self.rows[plan.rope]
        attended = self.buffers.take("attended", plan.heads * plan.head_dim, self.size)
        norm = block.norm(block.plan.before_attention)
        if self.separate is None:
            assert norm is not None
            boxes = self.mailboxes[place], self.mailboxes[(place + 1) % len(self.mailboxes)]
            return qkv_attention(
                block.qkv.fused,
                hidden,
                attended,
                cache,
                replace(rows, adapted=block.qkv.adapted_row(self.adapters)),
                layer=layer,
                norm=norm,
                mailboxes=boxes,
            )
        qkv = self.buffers.take("qkv", layer.shape.width, self.size)
        packed = block.o.packed_input(self.size, layer.shape.items)
        prefetch = None
        if cache.eight is None:
            prefetch = KvPrefetch(rows.lengths, rows.tables, cache.keys, cache.values)
        block.qkv.project(hidden, qkv, norm=norm, prefetch=prefetch, adapters=self.adapters)
        if block.whole_norms is not None:
            _norm_projections(block, qkv)
        decode_attention(
            qkv, attended, cache, rows, layer=layer, workspace=self.workspace, to=packed
        )
        return packed or attended

    def _move_states(
        self, block: Block, weights: DeltaWeights, hidden: Tensor, cache: KVStorage
    ) -> Tensor:
        """The step of a layer with a state in place of attention."""
        shape = weights.shape
        rows = self.delta_rows
        assert cache.state is not None and rows is not None
        projected = self.buffers.take("projected", shape.projected, self.size)
        out = self.buffers.take("attended", shape.outputs, self.size)
        norm = block.norm(block.plan.before_attention)
        block.qkv.project(hidden, projected, norm=norm, adapters=self.adapters)
        return states.delta_step(projected, out, cache.state, rows, weights)


def _norm_projections(block: Block, qkv: Tensor) -> None:
    query, key = normed_projections(block, qkv)
    width = query.shape[-1]
    qkv[:, :width].copy_(query)
    qkv[:, width : width + key.shape[-1]].copy_(key)


def attention_layer(
    block: Block, ropes: RopeTables, page: int, *, eight_bits: bool
) -> AttentionLayer:
    norms = HeadNorms()
    if (norm := block.head_norm) is not None:
        query = norm.weight[0].contiguous()
        key = norm.weight[-1].contiguous()
        norms = HeadNorms(query, key, norm.epsilon)
    shape = replace(head_shape(block, ropes, page), eight_bits=eight_bits)
    return AttentionLayer(shape, block.plan.attention.scale, norms, block.sinks)


class DecodeStep:
    """The launches of one step of as many rows as `rows` has."""

    def __init__(
        self,
        decoder: Decoder,
        caches: Sequence[KVStorage],
        rows: StepRows,
        buffers: Buffers,
        *,
        pairs: dict[str | None, Tensor],
        separate: str | None = None,
        beside: bool = True,
    ):
        self.decoder = decoder
        self.rows = rows
        self.buffers = buffers
        self.size = len(rows.tokens)
        self.stage: DecodeAttention | LatentDecode
        if decoder.blocks[0].latent is not None:
            self.stage = LatentDecode(decoder.blocks, caches, rows, pairs=pairs, buffers=buffers)
        else:
            self.stage = DecodeAttention(
                decoder.blocks,
                caches,
                rows,
                ropes=decoder.ropes,
                pairs=pairs,
                buffers=buffers,
                separate=separate,
                beside=beside,
            )
        self.hidden = buffers.take("hidden", decoder.config.hidden_size, self.size)
        self.padded_logits = buffers.take("logits", sum(decoder.head.sizes), self.size)
        self.logits = self.padded_logits[:, : decoder.config.vocab_size]
        plan = plan_of(decoder.config)
        self.shapes_logits = plan.logit_scale != 1 or plan.logit_soft_cap is not None

    @property
    def separate(self) -> str | None:
        return self.stage.separate

    def launch(self) -> None:
        """embedding → blocks → head, into `logits`; the rows stay as they are."""
        decoder = self.decoder
        with jit.overlap(all(block.mlp.overlaps(self.size) for block in decoder.blocks)):
            decoder.embedding.write(self.rows.tokens, self.hidden)
            self.stage.place = 0
            if (taps := decoder.taps) is not None:
                taps.begin(self.hidden)
            for block in decoder.in_turn():
                if taps is not None:
                    taps.take(block.index, self.hidden)
                block.run(self.hidden, self.stage, in_place=True, buffers=self.buffers)
            if taps is not None:
                taps.take(len(decoder.blocks), self.hidden)
            decoder.head.project(self.hidden, self.padded_logits, norm=decoder.norm)
            if self.shapes_logits:  # of the vocabulary alone: what fills it up stays −∞
                self.logits.copy_(decoder.shape_logits(self.logits.float()))


def pairs_of(decoder: Decoder) -> dict[str | None, Tensor]:
    """Rope tables the way the kernels read them."""
    return {name: rope_pairs(*tables) for name, tables in decoder.ropes.items()}
