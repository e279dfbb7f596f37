"""Rows times a tiled weight on every GPU from Ampere on: host side of cuda/gemm_mma.cu, and how it
is cut.

x goes in as the rows it is where nothing is to be done to it; a norm, W8A8's and float8's codes and
the order of 2:4 weights need pack.cu first, as for gemm.cu. Bias, residual or act(gate)·up end the
product. `plan` chooses a tile of those that `tuned` has rates for by the time that all its rounds
take; what shared memory and how many thread blocks an SM has comes from the device.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.gpu import KB, Gpu
from flyweight.kernels import dependent_launch, jit, tuned, workspace
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.linear.gemm import Packing, packed_size, packing_for, padded_rows
from flyweight.kernels.linear.tiles import EPILOGUES, Matrix, TiledWeight
from flyweight.kernels.tuned import MmaNumbers, MmaTile

WHOLE, LINE = range(2)  # SPLIT of the source: whole tiles in turn, or all work cut evenly
RESERVED = KB  # of shared memory, by the driver, for each thread block
DECLARED = 128  # bytes of it that the kernel declares itself
LEAST_STAGES = 2
MOST_STAGES = 6
STAGE_BLOCKS = (4, 2, 1)
# Tiles of so many tokens are bound by memory: stages are long, and no weight is read twice.
FEW_TOKENS = 64
SHARED_COLUMNS = 8  # of a warp whose tile others have a part of: more leave no registers for it


@dataclass(frozen=True)
class Cut:
    """How a product is cut, and what it is expected to take."""

    tile: MmaTile
    stage_blocks: int
    stages: int
    split: int
    shared: int
    microseconds: float = 0.0
    working: int = 0  # thread blocks that share the line
    ahead: bool = False  # warps load what they multiply next before the barrier between stages

    def grid(self, processors: int) -> int:
        return processors * self.tile.blocks

    @property
    def sums(self) -> int:
        """Words that a thread block leaves of a tile that it shares."""
        return self.tile.outputs * self.tile.tokens


def unsupported_reason(
    matrix: Matrix, rows: int, device: Gpu, *, interleaved: bool = False
) -> str | None:
    """None, or why these rows do not go through gemm_mma.cu."""
    if matrix.out_features % (4 if interleaved else 2):
        return "outputs are written in pairs"
    if matrix.format.needs_float8 and not device.has_float8:
        return "needs matrix units for float8"
    if plan(matrix, padded_rows(rows), device) is None:
        return "no tile fits into shared memory"
    return None


@functools.cache
def plan(
    matrix: Matrix,
    rows: int,
    device: Gpu,
    *,
    tokens: int | None = None,
    split: int | None = None,
    tile: MmaTile | None = None,
) -> Cut | None:
    """The cut with the least estimated time; None where none fits. `tokens`, `split` and `tile` ask
    for one.
    """
    candidates = (tile,) if tile else tuned.of(device).mma.tiles
    formats = (matrix.format.name,)
    found = [
        cut
        for one in candidates
        if tokens in (None, one.tokens) and matrix.format.name in (one.formats or formats)
        for how in ((WHOLE, LINE) if split is None else (split,))
        if how == WHOLE or one.columns <= SHARED_COLUMNS
        if (cut := _fitted(matrix, rows, device, one, how))
    ]
    once = [cut for cut in found if cut.tile.tokens >= min(rows, FEW_TOKENS)]
    return min(once or found, key=lambda cut: cut.microseconds, default=None)


def _fitted(matrix: Matrix, rows: int, device: Gpu, tile: MmaTile, split: int) -> Cut | None:
    """A tile with as long stages and as many as fit."""
    share = device.shared_memory_per_multiprocessor // tile.ctas - RESERVED
    room = min(device.shared_most, share) - DECLARED
    wanted = STAGE_BLOCKS if tile.tokens <= FEW_TOKENS else STAGE_BLOCKS[1:]
    for least in (LEAST_STAGES + 1, LEAST_STAGES):
        for count in wanted:
            if not _whole_stages(matrix, count):
                continue
            stage = stage_bytes(matrix, tile, count)
            stages = min(MOST_STAGES, room // stage)
            if stages >= least:
                ahead = stages > LEAST_STAGES and loads_ahead(matrix, tile, count)
                cut = Cut(tile, count, stages, split, stages * stage, ahead=ahead)
                if split == LINE:
                    cut = replace(cut, working=aligned(matrix, rows, cut, device))
                return replace(cut, microseconds=estimate(matrix, rows, cut, device))
    return None


def aligned(matrix: Matrix, rows: int, cut: Cut, device: Gpu) -> int:
    """So many thread blocks that each has a part of one tile only, where the longest part is no
    longer than with all of them; else all. Fewer hand sums over for a tile, and their owner asks
    for them one after the other. Where the next kernel begins on the multiprocessors that are free
    it is all of them: it would begin on those without a part, and not spread over all.
    """
    slots = cut.grid(device.processors)
    tiles = math.ceil(matrix.out_features / cut.tile.outputs) * math.ceil(rows / cut.tile.tokens)
    each = slots // tiles  # of a tile
    if cut.tile.beside or not each:
        return slots
    stages = matrix.blocks // cut.stage_blocks
    longest = math.ceil(tiles * stages / slots)
    return each * tiles if math.ceil(stages / each) <= longest else slots


def loads_ahead(matrix: Matrix, tile: MmaTile, count: int) -> bool:
    """Whether such stages are multiplied by the loop for many tokens: of codes that go in as they
    lie, a stage being an even number of tiles and chunks of x, more than the barrier stands before.
    """
    form = matrix.format
    as_stored = not (form.grouped or form.sparse or form.needs_float8 or form.widened)
    steps = tile.per_warp * count * (1 if form.quantizes_input else 2)
    return as_stored and tile.tokens > FEW_TOKENS and steps % 2 == 0 and steps > 2


def _whole_stages(matrix: Matrix, count: int) -> bool:
    if matrix.cuts_units(count):
        return False
    inputs = 64 * count
    group = matrix.group if matrix.format.grouped and matrix.group < matrix.in_features else inputs
    return matrix.blocks % count == 0 and (inputs % group == 0 or group % inputs == 0)


def stage_bytes(matrix: Matrix, tile: MmaTile, count: int) -> int:
    form = matrix.format
    groups = math.ceil(64 * count / matrix.group) if form.grouped else 0
    weights = tile.outputs // 16 * (count * form.block_bytes + groups * form.record_bytes)
    return weights + tile.tokens * count * 64 * (1 if form.quantizes_input else 2)


def estimate(matrix: Matrix, rows: int, cut: Cut, device: Gpu) -> float:
    """Microseconds: the matrix units' time for all rounds, or that of memory, and what handing sums
    over takes.
    """
    numbers = tuned.of(device).mma
    tile = cut.tile
    slots = device.processors * tile.blocks
    tiles = math.ceil(matrix.out_features / tile.outputs) * math.ceil(rows / tile.tokens)
    rate = numbers.rates[matrix.format.name] * tile.speed / tile.blocks
    one = tile.outputs * tile.tokens * matrix.in_features / rate
    rounds = (
        _shared_rounds(tile, tiles / slots, numbers)
        if cut.split == LINE
        else math.ceil(tiles / slots)
    )
    read = matrix.tiles * matrix.blocks * matrix.format.block_bytes / numbers.bandwidth
    early = numbers.beside_us if tile.beside and dependent_launch.enabled else 0.0
    if cut.split == LINE and cut.working < slots:  # nobody hands sums over and takes some in, too
        early += numbers.aligned_us * cut.sums / 1024
    worked = max(rounds * one + numbers.tile_us * math.ceil(rounds), read)
    return worked + (_handed_over(tile, slots / tiles, numbers) if cut.split == LINE else 0) - early


def _shared_rounds(tile: MmaTile, rounds: float, numbers: MmaNumbers) -> float:
    """As many whole rounds as a line takes. Its thread blocks are at inputs far from each other,
    which come from memory; with many tokens and an SM to each nobody fills its waits.
    """
    if tile.blocks > 1 or tile.tokens <= FEW_TOKENS:
        return rounds
    whole = max(0, int(rounds) - 1)
    return whole + numbers.line_slower * (rounds - whole)


def _handed_over(tile: MmaTile, others: float, numbers: MmaNumbers) -> float:
    """Microseconds until a thread block has the sums of so many `others`: it asks for those of some
    at a time (`take_partials` of the source).
    """
    pieces = tile.per_warp * tile.columns
    at_once = 16 if tile.threads * tile.ctas <= 256 and pieces <= 16 else 8
    return numbers.line_us + numbers.trip_us * max(1.0, max(1.0, others) * pieces / at_once)


@dataclass(frozen=True)
class Ends:
    """What is compiled into the two kernels besides the product."""

    norm: bool
    epilogue: str
    experts: bool  # rows in tiles of one expert each
    packed: bool  # x goes through pack.cu


@dataclass(frozen=True)
class Call:
    """Everything about multiplying one weight with up to so many rows that does not change from
    call to call.
    """

    cut: Cut
    product: jit.Kernel
    pack: jit.Kernel | None  # None: x goes in as it is
    packing: Packing

    def padded(self, rows: int) -> int:
        return -(-rows // self.cut.tile.tokens) * self.cut.tile.tokens


def takes_rows(weight: TiledWeight, *, norm: bool) -> bool:
    """Whether x goes in as the rows it is."""
    return not (norm or weight.format.quantizes_input or weight.format.sparse)


def make_call(weight: TiledWeight, rows: int, cut: Cut, ends: Ends) -> Call:
    """Compiled kernels for a cut, kept with the weight: prompts launch them from Python, and should
    not wait for that.
    """
    key = ("mma", rows, cut, ends)
    if key not in weight.calls:
        padded = -(-rows // cut.tile.tokens) * cut.tile.tokens
        packing = packing_for(
            weight.in_features, padded, norm=ends.norm, quantized=weight.format.quantizes_input
        )
        pack = _pack_kernel(weight, cut, packing, ends) if ends.packed else None
        weight.calls[key] = Call(cut, _product_kernel(weight, rows, cut, ends), pack, packing)
    return weight.calls[key]


def _pack_kernel(weight: TiledWeight, cut: Cut, packing: Packing, ends: Ends) -> jit.Kernel:
    form = weight.format
    defines = {
        "FP16": weight.type_defines["FP16"],
        "KDIM": weight.in_features,
        "SB": cut.stage_blocks,
        "NORM": int(ends.norm),
        "QUANTIZE": form.input_codes,
        "STATIC": int(weight.static),
        "ORDER": form.input_order,
        "ROWS": packing.rows,
        "WARPS": packing.warps,
        "PARTS": packing.parts,
        "TILE": cut.tile.tokens if ends.experts else 0,
    }
    return jit.load("pack.cu", defines=defines).kernel("pack")


def _product_kernel(weight: TiledWeight, rows: int, cut: Cut, ends: Ends) -> jit.Kernel:
    tile = cut.tile
    defines = {
        **weight.format.defines(symmetric=weight.symmetric),
        **weight.type_defines,
        "KDIM": weight.in_features,
        "NDIM": weight.out_features,
        "GROUP": weight.group,
        "EPILOGUE": EPILOGUES[ends.epilogue],
        "BIAS": int(weight.bias is not None),
        "OUT_WARPS": tile.out_warps,
        "TOKEN_WARPS": tile.token_warps,
        "PER_WARP": tile.per_warp,
        "COLUMNS": tile.columns,
        "CTAS": tile.ctas,
        "SB": cut.stage_blocks,
        "STAGES": cut.stages,
        "SPLIT": cut.split,
        "X_ROWS": int(not ends.packed),
        "EXPERTS": int(ends.experts),
        **({"WORKING": cut.working} if cut.split == LINE else {}),
        **({"X_TILES": 1} if rows <= tile.tokens and not ends.experts else {}),
        **({"AHEAD": 1} if cut.ahead else {}),
    }
    return jit.load("gemm_mma.cu", defines=defines).kernel("gemm_mma")


def multiply(
    weight: TiledWeight,
    x: Tensor,
    out: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    pdl: bool = True,
    cut: Cut | None = None,
) -> Tensor:
    """x [rows, in] → [rows, out] (half of it for an interleaved gate/up: act(gate) · up)."""
    rows = x.shape[0]
    device = gpu.of(x.device)
    most = padded_rows(rows)
    cut = cut or plan(weight.matrix, most, device)
    if cut is None:
        raise ValueError(f"{weight.format} does not go through gemm_mma.cu here")
    packed = not takes_rows(weight, norm=norm is not None)
    ends = Ends(norm is not None, weight.epilogue(residual), False, packed)
    call = make_call(weight, most, cut, ends)
    out = weight.empty_result(rows, x.device) if out is None else out
    pieces = (one.data_ptr() % 16 for one in (out, residual) if one is not None)
    if weight.out_features % 16 == 0 and any(pieces):
        raise ValueError("gemm_mma.cu writes 16 bytes at a time, and its results do not lie so")
    here = workspace.current(x.device)
    data = x
    row_scale = None
    if call.pack is not None:
        padded = call.padded(most)
        data = here.bytes("packed", packed_size(weight, padded))
        row_scale = here.bytes("row scale", 4 * padded)
        _pack(weight, call, x, data, row_scale, norm=norm, pdl=pdl)
    grid = cut.grid(device.processors)
    args = _arguments(weight, data, row_scale, out, rows)
    args[RESIDUAL_ARGUMENT] = residual
    if cut.split == LINE:
        args[MAIL_ARGUMENT] = here.mailbox(grid * cut.sums)
    call.product.launch(grid, cut.tile.threads, args, shared=cut.shared, pdl=pdl)
    return out


# Places among the arguments of gemm_mma.cu.
RESIDUAL_ARGUMENT = 6
OUT_ARGUMENT = 7
MAIL_ARGUMENT = 8
EXPERT_ARGUMENTS = slice(9, 11)


def _arguments(
    weight: TiledWeight, x: Tensor, row_scale: Tensor | None, out: Tensor, rows: int
) -> list[Any]:
    """All of them, those that most calls have not being null."""
    linear = [weight.weights, weight.records, weight.channel_scale, x, row_scale, weight.bias]
    return [*linear, None, out, None, None, None, rows, 0]


def _pack(
    weight: TiledWeight,
    call: Call,
    x: Tensor,
    packed: Tensor,
    row_scale: Tensor,
    *,
    norm: Norm | None,
    pdl: bool = True,
    route: ExpertTiles | None = None,
) -> None:
    assert call.pack is not None
    rows = x.shape[0] if route is None else len(route.expert_of) * call.cut.tile.tokens
    padded = call.padded(rows)
    args = (
        x,
        norm and norm.weight,
        packed,
        row_scale,
        rows,
        padded // 8,
        norm.epsilon if norm else 0.0,
        weight.static_scale,
        route and route.source,
        route and route.count,
    )
    grid = padded // call.packing.rows * call.packing.parts
    call.pack.launch(grid, 32 * call.packing.warps, args, pdl=pdl)


@dataclass(frozen=True, eq=False)
class ExpertTiles:
    """Tiles of rows of one expert each, as route.cu has left them."""

    expert_of: Tensor  # int32 [most tiles]
    count: Tensor  # int32 [1]
    source: Tensor | None = None  # int32 [rows]: row of x, -1 for none; None: x lies in this order


def multiply_experts(
    weight: TiledWeight, x: Tensor, cut: Cut, route: ExpertTiles, *, norm: Norm | None = None
) -> Tensor:
    """x → [rows, out], a tile of `cut` after the other."""
    rows = len(route.expert_of) * cut.tile.tokens
    device = gpu.of(x.device)
    gathered = route.source is not None
    packed = gathered or not takes_rows(weight, norm=norm is not None)
    call = make_call(weight, rows, cut, Ends(norm is not None, weight.epilogue(None), True, packed))
    data = x
    row_scale = None
    if call.pack is not None:
        data = torch.empty(packed_size(weight, rows), dtype=torch.uint8, device=x.device)
        row_scale = torch.empty(rows, dtype=torch.float32, device=x.device)
        _pack(weight, call, x, data, row_scale, norm=norm, route=route)
    args = _arguments(weight, data, row_scale, weight.empty_result(rows, x.device), rows)
    args[EXPERT_ARGUMENTS] = [route.expert_of, route.count]
    grid = cut.grid(device.processors)
    call.product.launch(grid, cut.tile.threads, args, shared=cut.shared, pdl=True)
    return args[OUT_ARGUMENT]
