"""Decode steps of a whole model as CUDA graphs, one for each number of rows and way of sampling.

A step is four kernels a layer (qkv with its norm before, and rope, KV write and attention behind it; o with the residual;
gate/up with its norm and silu·mul; down with the residual), the head with its norm, and the choice of the next token. In a
layer with experts the last two are those of the shared expert, and more: routing, the experts' two linears, the sum.
Where qkv and attention do not fit into one kernel they are two, and `Step.apart` says why. VPTQ's silu·mul is a part of
down: gate and up have codebooks of their own, so no thread block has both. All that a step reads and writes lives in fixed
buffers (`Rows`, and the activations here); lengths and block tables are read on the device, so it serves any context.
Launches overlap (programmatic dependent launch): each kernel fetches its first weights while the one before it ends. A graph
is captured when it is first needed, or by `warm_up`, largest first, so that the small ones live in the memory of the large
ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from flyweight.batch import KVStorage
from flyweight.engine.rows import SIZES, Rows
from flyweight.engine.sampling import GREEDY, Mode
from flyweight.kernels import choices, jit, vptq_rows
from flyweight.kernels.attention import HeadShape, Workspace, choose_splits, decode_attention, rope_pairs
from flyweight.kernels.cuda_linear import CudaLinear
from flyweight.kernels.gemm import Packed
from flyweight.kernels.gemv import processors
from flyweight.kernels.qkv_attention import mailbox_cycle, qkv_attention
from flyweight.kernels.qkv_attention import why_not as why_apart
from flyweight.kernels.token import Choice, embed
from flyweight.kernels.vptq import Vptq
from flyweight.models.decoder import Block, Decoder
from flyweight.models.layers import Linear, RMSNorm


def why_not(decoder: Decoder, page: int) -> str | None:
    """None, or why this model's decode steps cannot be captured."""
    if decoder.device.type != "cuda":
        return "no CUDA device"
    if decoder.dtype not in (torch.float16, torch.bfloat16):
        return f"the attention kernel computes in 16 bits, not in {decoder.dtype}"
    if decoder.config.vocab_size % 8 or decoder.config.hidden_size % 8:
        return f"a vocabulary of {decoder.config.vocab_size} or a hidden size of {decoder.config.hidden_size} is no multiple of 8"
    for block in decoder.blocks:
        if block.experts is not None and block.experts.grouped is None:
            return f"the tokens of each expert of layer {block.index} are counted on the host: {block.experts.why_not}"
    return head_shape(decoder, decoder.blocks[0], page).supported()


def head_shape(decoder: Decoder, block: Block, page: int) -> HeadShape:
    return HeadShape(block.heads, block.kv_heads, block.head_dim, 2 * decoder.tables[0].shape[-1], page,
                     block.qk_norm is not None, block.window)


def multiplies_late(block: Block) -> bool:
    """Whether silu(gate) · up is left to down."""
    return block.experts is None and isinstance(block.gate_up.single, Vptq) and isinstance(block.down.single, Vptq)


class Activations:
    """What flows from kernel to kernel; every size uses the first rows of the same buffers."""

    def __init__(self, decoder: Decoder, rows: int):
        config = decoder.config

        def buffer(width: int) -> Tensor:
            return torch.zeros(rows, width, dtype=decoder.dtype, device=decoder.device)

        self.hidden = buffer(config.hidden_size)
        self.qkv = buffer((config.heads + 2 * config.kv_heads) * config.head_dim)
        self.attended = buffer(config.heads * config.head_dim)
        self.gated = buffer(config.intermediate_size)
        self.gate_up = buffer(2 * config.intermediate_size if any(map(multiplies_late, decoder.blocks)) else 0)
        self.logits = buffer(config.vocab_size)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in vars(self).values())


class Step:
    """The launches of one step of the first `size` rows. `apart`: why qkv and attention are two kernels."""

    def __init__(self, decoder: Decoder, caches: Sequence[KVStorage], rows: Rows, *, size: int, rope: Tensor,
                 activations: Activations, apart: str | None = None):
        self.decoder, self.caches, self.rows, self.size, self.rope = decoder, caches, rows, size, rope
        device, page = decoder.device, caches[0].block_size
        self.shapes = [head_shape(decoder, block, page) for block in decoder.blocks]
        self.apart = apart or self._why_apart()
        self.splits = choose_splits(size, decoder.config.kv_heads, processors(device.index or 0))
        self.workspace = Workspace.make(self.shapes[0], size, self.splits, device)
        self.mailboxes = [] if self.apart else mailbox_cycle(self.shapes[0], size, len(decoder.blocks), dtype=decoder.dtype,
                                                             device=device)
        self.norms = [None if block.qk_norm is None else (block.qk_norm[0].contiguous(), block.qk_norm[-1].contiguous())
                      for block in decoder.blocks]
        self.tokens, self.lengths, self.tables = rows.tokens[:size], rows.lengths[:size], rows.tables[:size]
        self.choice = Choice(size, device)
        self.hidden, self.qkv, self.attended, self.gated, self.gate_up, self.logits = (
            tensor[:size] for tensor in (activations.hidden, activations.qkv, activations.attended, activations.gated,
                                         activations.gate_up, activations.logits))

    def _why_apart(self) -> str | None:
        if len(self.decoder.blocks) < 2:
            return "a single layer has nobody to empty its mailbox"
        for block, shape in zip(self.decoder.blocks, self.shapes, strict=True):
            if not isinstance(block.qkv.single, CudaLinear):
                return f"qkv of layer {block.index} runs as {block.qkv.segments[0].kernel}"
            weight = block.qkv.single.weight
            if not choices.within(weight.kind, self.size, weight.in_features):
                return f"{self.size} rows of {weight.kind} are faster through a kernel of their own"
            if reason := why_apart(weight, shape, self.size):
                return reason
        return None

    def launch(self) -> None:
        """embedding → blocks → head, into `logits`; the rows stay as they are."""
        grouped = next((block.experts.grouped for block in self.decoder.blocks if block.experts is not None), None)
        with jit.overlap(grouped is None or not grouped.few(self.size) or self.size <= choices.OVERLAPPING_TOKENS):
            self._launch()

    def _launch(self) -> None:
        decoder, hidden = self.decoder, self.hidden
        embed(decoder.embedding.weight, self.tokens, hidden)
        for i, block in enumerate(decoder.blocks):
            self.project(block.o, self._attention(block, i), hidden, residual=hidden)
            if block.experts is not None:
                block.experts.fused(hidden, hidden, norm=block.post_norm.weight, epsilon=block.epsilon, lengths=self.lengths)
                continue
            if multiplies_late(block):
                self.project(block.gate_up, hidden, self.gate_up, norm=block.post_norm)
                self.project(block.down, self.gate_up, hidden, residual=hidden, late=True)
                continue
            packed = self._packed(block.down, before=block.gate_up)
            self.project(block.gate_up, hidden, self.gated, norm=block.post_norm, gated=True, to=packed)
            self.project(block.down, packed or self.gated, hidden, residual=hidden)
        self.project(decoder.head, hidden, self.logits, norm=decoder.norm)

    def _packed(self, linear: Linear, before: Linear | None = None) -> Packed | None:
        """Where the kernel before leaves the linear's x, if in the order that its product reads."""
        own, first = linear.single, before.single if before else None
        if not isinstance(own, CudaLinear) or (before and not isinstance(first, CudaLinear)):
            return None
        return own.packed_input(self.size, self.decoder.device, before=cast(CudaLinear | None, first))

    def _attention(self, block: Block, i: int) -> Tensor | Packed | vptq_rows.Packed:
        """hidden → o's x, in one kernel or two."""
        boxes, cache = self.mailboxes, self.caches[i]
        common = dict(shape=self.shapes[i], norms=self.norms[i], rope=self.rope, lengths=self.lengths, tables=self.tables,
                      epsilon=block.epsilon, scale=block.scale)
        if self.apart is None:
            assert isinstance(block.qkv.single, CudaLinear)
            qkv_attention(block.qkv.single.weight, self.hidden, self.attended, cache, norm=block.input_norm.weight,
                          mailbox=boxes[i], next_mailbox=boxes[(i + 1) % len(boxes)], **common)
            return self.attended
        vectors = block.o.single.packed_results(self.size, self.shapes[i].kv_heads) if isinstance(block.o.single, Vptq) else None
        packed = vectors or self._packed(block.o)
        self.project(block.qkv, self.hidden, self.qkv, norm=block.input_norm,
                     coming=vptq_rows.Coming(self.lengths, self.tables, cache.keys, cache.values))
        decode_attention(self.qkv, self.attended, cache, workspace=self.workspace, splits=self.splits, to=packed, **common)
        return packed or self.attended

    def project(self, linear: Linear, x: Tensor | Packed | vptq_rows.Packed, out: Tensor, *, norm: RMSNorm | None = None,
                residual: Tensor | None = None, gated: bool = False, to: Packed | None = None, late: bool = False,
                coming: vptq_rows.Coming | None = None) -> None:
        """One kernel where the format has a fused one; else norm, product and what follows it, one by one. `late`: x is gate
        and up, not multiplied yet."""
        if isinstance(linear.single, CudaLinear):
            assert not isinstance(x, vptq_rows.Packed)
            linear.single.fused(x, out, norm=norm.weight if norm else None, epsilon=norm.epsilon if norm else 1e-6,
                                residual=residual, to=to)
            return
        assert not isinstance(x, Packed)
        if isinstance(linear.single, Vptq) and not gated:
            linear.single.fused(x, out, norm=norm.weight if norm else None, epsilon=norm.epsilon if norm else 1e-6, gated=late,
                                residual=residual, coming=coming)
            return
        assert isinstance(x, Tensor)
        ops = self.decoder.ops
        y = linear(ops.rms_norm(x, norm.weight, norm.epsilon) if norm else x)
        y = ops.silu_mul(y) if gated else y
        out.copy_(y) if residual is None else torch.add(y, residual, out=out)

    def choose(self, mode: Mode) -> Tensor:
        return self.rows.choose(self.logits, mode, slice(0, self.size), self.lengths.long())

    def advance(self, mode: Mode) -> None:
        """The rows take their next tokens."""
        if mode == GREEDY:
            self.choice(self.logits, self.tokens, self.lengths)
        else:
            self.rows.advance(self.choose(mode), mode, self.size)


class DecodeGraphs:
    """Captured steps; a step of n rows runs as the next larger size, padded with rows of length 0."""

    def __init__(self, decoder: Decoder, caches: Sequence[KVStorage], rows: Rows, *, sizes: Sequence[int] = SIZES,
                 apart: str | None = None):
        self.decoder, self.caches, self.rows, self.apart = decoder, caches, rows, apart
        self.sizes = [size for size in sizes if size <= rows.capacity]
        self.largest = max(self.sizes)
        self.rope = rope_pairs(*decoder.tables)
        self.activations = Activations(decoder, self.largest)
        self.steps: dict[int, Step] = {}
        self.graphs: dict[tuple[int, Mode | None], torch.cuda.CUDAGraph] = {}

    def logits(self, count: int) -> Tensor:
        return self._replay(count, None)

    def advance(self, count: int, mode: Mode) -> Tensor:
        return self._replay(count, mode)

    def _replay(self, count: int, mode: Mode | None) -> Tensor:
        size = next(size for size in self.sizes if size >= count)
        if (size, mode) not in self.graphs:
            self.capture(size, mode)
        self.graphs[size, mode].replay()
        return self.steps[size].logits[:count]

    def warm_up(self, sizes: Iterable[int] | None = None, modes: Sequence[Mode | None] = (GREEDY,)) -> None:
        """Capture ahead of the first request."""
        for size in sorted(self.sizes if sizes is None else sizes, reverse=True):
            for mode in modes:
                self.capture(size, mode)

    def step(self, size: int) -> Step:
        if size not in self.steps:
            self.steps[size] = Step(self.decoder, self.caches, self.rows, size=size, rope=self.rope,
                                    activations=self.activations, apart=self.apart)
        return self.steps[size]

    @torch.inference_mode()
    def capture(self, size: int, mode: Mode | None) -> None:
        """The step is run once before, which compiles what is not compiled yet. The rows may be in use: it writes the
        keys and values that the step itself will write, and takes no token."""
        step = self.step(size)
        step.launch()
        if mode is not None:
            step.choose(mode)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values())).pool() if self.graphs else None
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads may go on allocating
            step.launch()
            if mode is not None:
                step.advance(mode)
        self.graphs[size, mode] = graph
