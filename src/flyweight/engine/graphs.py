"""Decode steps of a whole model as CUDA graphs, one per batch size.

A step is five kernels a layer (qkv with its norm, attention with rope and KV write, o with the residual, gate/up with
its norm and silu·mul, down with the residual), the head with its norm, and the choice of the likeliest token. Inputs
live in fixed buffers; a captured step reads lengths and block tables from the device, so it serves any context. Launches
overlap (programmatic dependent launch): each kernel fetches its first weights while the one before it ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flyweight.engine.batch import KVStorage
from flyweight.kernels.attention import HeadShape, Workspace, choose_splits, decode_attention, rope_pairs
from flyweight.kernels.cuda_linear import CudaLinear
from flyweight.kernels.gemv import ROWS, processors
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
    return head_shape(decoder, decoder.blocks[0], page).supported()


def head_shape(decoder: Decoder, block: Block, page: int) -> HeadShape:
    return HeadShape(block.heads, block.kv_heads, block.head_dim, 2 * decoder.tables[0].shape[-1], page,
                     block.qk_norm is not None, block.window)


def kernel_of(linear: Linear) -> CudaLinear:
    run = linear.segments[0].run
    assert isinstance(run, CudaLinear)
    return run


class Step:
    """The buffers and the launches of one step of `sequences` sequences."""

    def __init__(self, decoder: Decoder, caches: Sequence[KVStorage], *, sequences: int, context: int):
        config, device, dtype = decoder.config, decoder.device, decoder.dtype
        self.decoder, self.caches, self.sequences = decoder, caches, sequences
        page = caches[0].block_size
        self.shapes = [head_shape(decoder, block, page) for block in decoder.blocks]
        self.splits = choose_splits(sequences, config.kv_heads, context, processors(device.index or 0))
        self.workspace = Workspace.make(self.shapes[0], sequences, self.splits, device)
        self.rope = rope_pairs(*decoder.tables)
        self.norms = [None if block.qk_norm is None else (block.qk_norm[0].contiguous(), block.qk_norm[-1].contiguous())
                      for block in decoder.blocks]
        self.tokens = torch.zeros(sequences, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(sequences, dtype=torch.int32, device=device)  # the new token counted; 0: padding
        self.tables = torch.zeros(sequences, -(-context // page), dtype=torch.int32, device=device)

        def buffer(width: int) -> Tensor:
            return torch.zeros(sequences, width, dtype=dtype, device=device)

        self.hidden = buffer(config.hidden_size)
        self.qkv = buffer((config.heads + 2 * config.kv_heads) * config.head_dim)
        self.attended = buffer(config.heads * config.head_dim)
        self.gated = buffer(config.intermediate_size)
        self.logits = buffer(config.vocab_size)

    def launch(self) -> None:
        """embedding → blocks → head, into `logits`."""
        decoder, hidden = self.decoder, self.hidden
        torch.index_select(decoder.embedding.weight, 0, self.tokens, out=hidden)
        for block, cache, shape, norms in zip(decoder.blocks, self.caches, self.shapes, self.norms, strict=True):
            epsilon = block.epsilon
            kernel_of(block.qkv).fused(hidden, self.qkv, norm=block.input_norm.weight, epsilon=epsilon)
            decode_attention(self.qkv, self.attended, cache, shape=shape, norms=norms, rope=self.rope, lengths=self.lengths,
                             tables=self.tables, workspace=self.workspace, splits=self.splits, epsilon=epsilon, scale=block.scale)
            kernel_of(block.o).fused(self.attended, hidden, residual=hidden)
            kernel_of(block.gate_up).fused(hidden, self.gated, norm=block.post_norm.weight, epsilon=epsilon)
            kernel_of(block.down).fused(self.gated, hidden, residual=hidden)
        kernel_of(decoder.head).fused(hidden, self.logits, norm=decoder.norm.weight, epsilon=decoder.norm.epsilon)

    def advance(self) -> None:
        """Take the likeliest token of each sequence as its next input."""
        torch.argmax(self.logits, dim=-1, out=self.tokens)
        self.lengths += 1


class DecodeGraphs:
    """Captured steps by batch size; `forward` pads to the next one."""

    def __init__(self, decoder: Decoder, caches: Sequence[KVStorage], *, context: int, sizes: Sequence[int] = ROWS):
        self.steps: dict[int, Step] = {}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.greedy: dict[int, torch.cuda.CUDAGraph] = {}
        pool = None
        for size in sorted(sizes, reverse=True):
            step = Step(decoder, caches, sequences=size, context=context)
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
