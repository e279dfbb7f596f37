"""Decode steps of a whole model as CUDA graphs, one per batch size.

A step is four kernels a layer (qkv with its norm before, and rope, KV write and attention behind it; o with the residual;
gate/up with its norm and silu·mul; down with the residual), the head with its norm, and the choice of the likeliest token.
Where qkv and attention do not fit into one kernel they are two, and `Step.apart` says why. Inputs live in fixed buffers; a
captured step reads lengths and block tables from the device, so it serves any context. Launches overlap (programmatic
dependent launch): each kernel fetches its first weights while the one before it ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flyweight.engine.batch import KVStorage
from flyweight.kernels.attention import HeadShape, Workspace, choose_splits, decode_attention, rope_pairs
from flyweight.kernels.cuda_linear import CudaLinear
from flyweight.kernels.gemv import ROWS, processors
from flyweight.kernels.qkv_attention import mailbox_cycle, qkv_attention
from flyweight.kernels.qkv_attention import why_not as why_apart
from flyweight.kernels.token import Choice, embed
from flyweight.models.decoder import Block, Decoder
from flyweight.models.layers import Linear


def why_not(decoder: Decoder, page: int) -> str | None:
    """None, or why this model's decode steps cannot be fused: the first layer that does not fit, by name."""
    if decoder.device.type != "cuda":
        return "no CUDA device"
    for block in decoder.blocks:
        for name, linear in block.linears.items():
            if len(linear.segments) != 1 or not isinstance(linear.segments[0].run, CudaLinear):
                return f"{name} of layer {block.index} runs as {linear.segments[0].kernel}"
    if decoder.config.vocab_size % 8 or decoder.config.hidden_size % 8:
        return f"a vocabulary of {decoder.config.vocab_size} or a hidden size of {decoder.config.hidden_size} is no multiple of 8"
    return head_shape(decoder, decoder.blocks[0], page).supported()


def head_shape(decoder: Decoder, block: Block, page: int) -> HeadShape:
    return HeadShape(block.heads, block.kv_heads, block.head_dim, 2 * decoder.tables[0].shape[-1], page,
                     block.qk_norm is not None, block.window)


def kernel_of(linear: Linear) -> CudaLinear:
    run = linear.segments[0].run
    assert isinstance(run, CudaLinear)
    return run


class Step:
    """The buffers and the launches of one step of `sequences` sequences. `apart`: why qkv and attention are two kernels."""

    def __init__(self, decoder: Decoder, caches: Sequence[KVStorage], *, sequences: int, context: int, apart: str | None = None):
        config, device, dtype = decoder.config, decoder.device, decoder.dtype
        self.decoder, self.caches, self.sequences = decoder, caches, sequences
        page = caches[0].block_size
        self.shapes = [head_shape(decoder, block, page) for block in decoder.blocks]
        self.apart = apart or self._why_apart()
        self.splits = choose_splits(sequences, config.kv_heads, processors(device.index or 0))
        self.workspace = Workspace.make(self.shapes[0], sequences, self.splits, device)
        self.rope = rope_pairs(*decoder.tables)
        self.norms = [None if block.qk_norm is None else (block.qk_norm[0].contiguous(), block.qk_norm[-1].contiguous())
                      for block in decoder.blocks]
        self.tokens = torch.zeros(sequences, dtype=torch.int64, device=device)
        self.choice = Choice(sequences, device)
        self.lengths = torch.zeros(sequences, dtype=torch.int32, device=device)  # the new token counted; 0: padding
        self.tables = torch.zeros(sequences, -(-context // page), dtype=torch.int32, device=device)

        def buffer(width: int) -> Tensor:
            return torch.zeros(sequences, width, dtype=dtype, device=device)

        self.hidden = buffer(config.hidden_size)
        self.qkv = buffer((config.heads + 2 * config.kv_heads) * config.head_dim)
        self.mailboxes = mailbox_cycle(self.shapes[0], sequences, len(decoder.blocks), dtype=dtype, device=device)
        self.attended = buffer(config.heads * config.head_dim)
        self.gated = buffer(config.intermediate_size)
        self.logits = buffer(config.vocab_size)

    def _why_apart(self) -> str | None:
        if len(self.decoder.blocks) < 2:
            return "a single layer has nobody to empty its mailbox"
        reasons = (why_apart(kernel_of(block.qkv).weight, shape, self.sequences)
                   for block, shape in zip(self.decoder.blocks, self.shapes, strict=True))
        return next((reason for reason in reasons if reason), None)

    def launch(self) -> None:
        """embedding → blocks → head, into `logits`."""
        decoder, hidden = self.decoder, self.hidden
        embed(decoder.embedding.weight, self.tokens, hidden)
        for i, block in enumerate(decoder.blocks):
            self._attention(block, i)
            kernel_of(block.o).fused(self.attended, hidden, residual=hidden)
            kernel_of(block.gate_up).fused(hidden, self.gated, norm=block.post_norm.weight, epsilon=block.epsilon)
            kernel_of(block.down).fused(self.gated, hidden, residual=hidden)
        kernel_of(decoder.head).fused(hidden, self.logits, norm=decoder.norm.weight, epsilon=decoder.norm.epsilon)

    def _attention(self, block: Block, i: int) -> None:
        """hidden → attended, in one kernel or two."""
        qkv, norm, cache, boxes = kernel_of(block.qkv), block.input_norm.weight, self.caches[i], self.mailboxes
        common = dict(shape=self.shapes[i], norms=self.norms[i], rope=self.rope, lengths=self.lengths, tables=self.tables,
                      epsilon=block.epsilon, scale=block.scale)
        if self.apart is None:
            qkv_attention(qkv.weight, self.hidden, self.attended, cache, norm=norm, mailbox=boxes[i],
                          next_mailbox=boxes[(i + 1) % len(boxes)], **common)
        else:
            qkv.fused(self.hidden, self.qkv, norm=norm, epsilon=block.epsilon)
            decode_attention(self.qkv, self.attended, cache, workspace=self.workspace, splits=self.splits, **common)

    def advance(self) -> None:
        """Take the likeliest token of each sequence as its next input."""
        self.choice(self.logits, self.tokens, self.lengths)


class DecodeGraphs:
    """Captured steps by batch size; `forward` pads to the next one."""

    def __init__(self, decoder: Decoder, caches: Sequence[KVStorage], *, context: int, sizes: Sequence[int] = ROWS,
                 apart: str | None = None):
        self.largest = max(sizes)
        self.steps: dict[int, Step] = {}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.greedy: dict[int, torch.cuda.CUDAGraph] = {}
        pool = None
        for size in sorted(sizes, reverse=True):
            step = Step(decoder, caches, sequences=size, context=context, apart=apart)
            step.launch()  # compiles what is not compiled yet
            step.advance()
            torch.cuda.synchronize()
            for kept, parts in ((self.graphs, (step.launch,)), (self.greedy, (step.launch, step.advance))):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    for part in parts:
                        part()
                pool = pool or graph.pool()
                kept[size] = graph
            step.lengths.zero_()
            self.steps[size] = step

    def forward(self, tokens: Tensor, lengths: Tensor, tables: Tensor) -> Tensor:
        """Float32 logits [sequences, vocab] of one new token each; lengths count it, tables hold its pages."""
        count = len(tokens)
        size = min(size for size in self.steps if size >= count)
        step = self.steps[size]
        step.tokens[:count] = tokens
        step.lengths.zero_()
        step.lengths[:count] = lengths
        step.tables[:count, : tables.shape[1]] = tables
        self.graphs[size].replay()
        return step.logits[:count].float()
