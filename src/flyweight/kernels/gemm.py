"""Three rows or more times a weight in gemv's tiles: host side of cuda/pack.cu and cuda/gemm.cu (Hopper).

x is packed first, with the norm and W8A8's quantization in the same pass; bias, residual or silu·mul end the product. Where
neither is to be done, the kernel that makes x writes it packed (`Packed`): gate/up for down, decode attention for o. That kernel
may still read its own packed x, so there are two buffers; two are enough, because every kernel writes only after its wait for the
one before it, which has itself waited: nothing earlier is still reading.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.kernels import jit
from flyweight.kernels.choices import INPUTS, PRODUCTS, SMALL
from flyweight.kernels.gemv import BLOCK_BYTES, EPILOGUES, GROUPED, QUANTIZED, Gemv, format_defines, processors
from flyweight.kernels.gemv_split import mail

SHARED, SHARED_SMALL = 225 * 1024, 110 * 1024  # alone on an SM, and beside another
SHARED_CLUSTERS = 210 * 1024  # clusters, lone tiles: a CTA of decode attention fits beside, and fetches its first tokens early
STAGED_ROW = 144  # bytes of a token's 64 results in shared memory
# How much slower an SM is than PRODUCTS says with smaller tiles (tokens, warpgroups): those of all formats, those between
# them, which pad 320 rows less or leave fewer SMs idle in the last round, and those of codes in groups, of which more outputs fit
# into a stage; with 128 inputs a stage smaller tiles of these lose little. 2:4 codes are converted once for each tile: CONVERTED
# more where it has half the tokens. Handing sums over costs LINE_US where tiles are cut anywhere, SLICED_US where the inputs of
# each are cut in two, by warpgroups.
TILES = {(256, 2): 1.0, (128, 2): 1.22, (128, 1): 1.4}
TILES_BETWEEN = {(224, 2): 1.03, (192, 2): 1.06, (160, 2): 1.15, (192, 1): 1.33, (160, 1): 1.36}
TILES_GROUPED = {(256, 2): 1.0, (224, 2): 1.04, (192, 2): 0.99, (160, 2): 1.04, (128, 3): 1.04, (128, 2): 1.09, (128, 1): 1.2,
                 (192, 1): 1.15, (160, 1): 1.15, (64, 1): 1.33}
KINDS_BETWEEN = ("plain", "w8a8")
CONVERTED, LINE_US, SLICED_US = 0.2, 12.0, {2: 3.0, 3: 4.0}
# Formats whose linears of 17 to 64 rows take tiles that have an SM each (`lone_tiles`). Of others nobody knows yet.
LONE = ("plain", "int4", "int8", "w8a8", "fp8")
REGISTERS, REGISTERS_SMALL, REGISTERS_PACK = 65536, 96, 256 * 48  # of an SM; of a thread; of a CTA of pack.cu
LEAST, MOST_STAGES = 8, 12  # tokens of a tile; of a ring
PACK_WARPS = 8  # of a CTA of pack.cu that neither norms nor quantizes
SLICED_KINDS = ("plain", "int4", "int8")
# Tokens of lone tiles of 64 outputs that two teams share: codes are taken apart, or sums added up, meanwhile.
TEAMED = {"int4": range(65), "int8": range(33), "fp8": range(33, 65)}
EARLY, EARLY_PLANES, EARLY_QUANTIZED = 512, 1024, 768  # inputs whose weights are fetched early (`early_stages`)
CODES = ("int4", "int8")  # in groups, and not 2:4; x of few rows becomes integers where groups have 128 inputs (`in_planes`)
WHOLE, LINE, CLUSTERS, MAIL = range(4)
_buffers: dict[tuple[str, int, torch.device], Tensor] = {}


def buffer(name: str, size: int, device: torch.device) -> Tensor:
    """Zeroed bytes that live on: captured graphs hold their addresses, so a buffer is never freed or moved."""
    rounded = 1 << (max(size, 1024) - 1).bit_length()
    if (name, rounded, device) not in _buffers:
        _buffers[name, rounded, device] = torch.zeros(rounded, dtype=torch.uint8, device=device)
    return _buffers[name, rounded, device]


@dataclass(frozen=True)
class Order:
    """Of the inputs in packed x (cuda/packed.cuh)."""

    stage_blocks: int  # of the product that reads it
    order: int

    @property
    def defines(self) -> dict[str, int]:
        """For the kernel before that product."""
        return {"PACKED": self.stage_blocks, "ORDER": self.order}


@dataclass(frozen=True)
class Packed:
    """x of one linear, as its product reads it: the kernel before writes it so."""

    data: Tensor
    rows: int
    groups: int  # of 8 rows, up to a whole tile
    order: Order

    @property
    def defines(self) -> dict[str, int]:
        """For the kernel that writes it."""
        return self.order.defines


@dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for, the weight aside."""

    tokens: int  # columns of a tile
    warpgroups: int  # 64 outputs each
    stage_blocks: int
    stages: int
    split: int
    cluster: int  # CTAs that have a part of the inputs each
    staged: int  # tokens whose results go through shared memory at a time
    tiles: int
    shared: int
    beside: bool  # an SM has room for another kernel's CTA
    teams: int = 1  # of warpgroups, that take a tile's stages by turns
    planes: bool = False  # x as integers: cuda/gemm_planes.cuh
    apart: bool = False  # the sums of a cluster meet beside its rings, not in them
    before: int = 0  # stages whose weights are fetched before the inputs are there

    @property
    def loaders(self) -> int:
        return 2 if self.beside else 4

    @property
    def block(self) -> int:
        return (4 * self.warpgroups * self.teams + self.loaders) * 32

    @property
    def registers(self) -> int | None:
        """At most so many a thread: with few tokens a CTA of pack.cu fits beside, and weights arrive while x is packed."""
        if self.tokens > 64:
            return None
        if self.split == CLUSTERS:
            return REGISTERS_SMALL
        left = (REGISTERS - REGISTERS_PACK) // self.block // 8 * 8
        return max(REGISTERS_SMALL, left)

    def grid(self, processors: int) -> int:
        return {WHOLE: min(processors, self.tiles), LINE: processors}.get(self.split, self.tiles * self.cluster)


@functools.cache
def shape_for(kind: str, outputs: int, columns: int, group: int, rows: int, processors: int, *, residual: bool = False,
              bare: bool = False, tokens: int | None = None, warpgroups: int | None = None, stage_blocks: int | None = None,
              cluster: int | None = None, split: int | None = None, staged: int | None = None,
              beside: bool | None = None, teams: int | None = None, planes: bool | None = None,
              apart: bool | None = None, before: int | None = None) -> Shape | None:
    """What was measured to be fastest, where nothing is asked for: `bare`, with neither norm nor residual, by itself, else in
    steps. None where no cut of the inputs into stages fits."""
    large = outputs * columns > SMALL
    if planes is None:
        planes = (tokens is None or tokens >= rows) and in_planes(kind, outputs, columns, group, rows)
    if (tokens, warpgroups, split) == (None, None, None) and rows > 64:
        tokens, warpgroups, split, cluster = fastest_tile(kind, outputs, columns, rows, processors)
    lone = lone_tiles(outputs, processors) if kind in LONE and (0 if kind in QUANTIZED or planes else 16) < rows <= 64 else None
    shared_out = rows <= 32 or lone == (1, 1) or (kind == "fp8" and lone != (1, 2))
    if kind in QUANTIZED and lone != (3, 1) and columns <= outputs and shared_out:
        lone = None  # qkv and o: smaller CTAs are as fast or faster, and leave room beside for more of decode attention
    if planes and lone == (1, 1) and rows <= 16:
        lone = None  # qkv: so are clusters
    if lone and (warpgroups, split, cluster) == (None, None, None):
        warpgroups, cluster = lone
        split, beside = {1: WHOLE, 2: CLUSTERS}.get(cluster, MAIL), False
    if split is None:
        split = CLUSTERS if rows <= (64 if kind in QUANTIZED or (kind in ("plain", "int8") and not large) else 32) else LINE
    small = split in (CLUSTERS, MAIL)
    if warpgroups is None:
        warpgroups = 2 if not small or kind == "int4" or (kind in QUANTIZED and outputs > 16384) else 1
    tokens = tokens or min(256, max(LEAST, 1 << (rows - 1).bit_length()))
    if warpgroups > 2 and tokens >= (128 if kind == "fp8" else 192):  # no registers for their sums
        return None
    m_tiles, total = math.ceil(outputs / (64 * warpgroups)), math.ceil(columns / 64)
    if cluster is None or not small:
        room = 3 * processors // 2 if kind == "int4" else max(processors, 2 * m_tiles)
        cluster = max(1, min(8, room // m_tiles)) if small and m_tiles <= processors else 1
    if staged is None:
        staged = 0 if small or tokens < 64 or outputs % 16 else staged_tokens(kind, tokens, residual=residual)
    grouped = kind in GROUPED
    beside = split == CLUSTERS and warpgroups <= 2 and tokens <= 64 if beside is None else beside
    staging = (staged * STAGED_ROW + (4 * (tokens + 64) if staged and kind in QUANTIZED else 0)) * warpgroups  # and scales
    few = tokens <= 64 and (small or (lone and warpgroups == 1))
    limit = (SHARED_SMALL if beside else SHARED_CLUSTERS if few else SHARED) - staging
    if tokens <= 64:
        long = grouped or (small and (kind in ("w8a8", "fp8") if tokens <= 32 else kind == "w8a8" and not beside))
        counts = (4, 2, 1) if long else (2, 1)
    else:
        counts = (2, 1) if kind in QUANTIZED or (grouped and tokens < 256) else (1, 2)
    for count in (stage_blocks,) if stage_blocks else counts:
        span = count * 64
        cut_group = grouped and group < columns and span % group and (planes or group % span)
        if total % count or cut_group or total // count < cluster:
            continue
        records = 4 * warpgroups * math.ceil(span / group) * 64 if grouped else 0
        stage = 4 * warpgroups * count * BLOCK_BYTES[kind] + records + tokens * span * (1 if kind in QUANTIZED else 2)
        stage += tokens * span // 128 * 8 if planes else 0  # scales
        owned = tokens // 8 // min(8, tokens // 8, 1 << (cluster.bit_length() - 1))
        share = owned * warpgroups * 128 * 16 if cluster > 1 and split == CLUSTERS else 0  # of an owner's sums
        left = limit - (cluster - 1) * share  # for the ring, where these have a place of their own
        lost = min(MOST_STAGES, left // (stage + 16)) < min(MOST_STAGES, limit // (stage + 16))
        if apart is None:
            meet = share > 0 and worth_apart(kind, outputs, columns, tokens, beside, lost=lost, bare=bare)
        else:
            meet = share > 0 and apart
        stages = min(MOST_STAGES, (left if meet else limit) // (stage + 16))
        if stages >= (4 if small and not beside and tokens <= 64 else 3 if count == 4 or (count == 2 and grouped) else 2):
            exchanged = stages * stage + (cluster - 1) * share if meet else max(stages * stage, cluster * share)
            shared = exchanged + staging + 16 * stages + 512
            tiles = m_tiles * math.ceil(rows / tokens)
            if teams is None:
                alone = warpgroups == 1 and split in (WHOLE, CLUSTERS) and not beside and tiles * cluster <= processors
                teams = 2 if alone and tokens in TEAMED.get(kind, ()) and count > 1 and total // count // cluster > 2 else 1
            early = early_stages(kind, tokens, count, stages, planes=planes, bare=bare) if before is None else before
            return Shape(tokens, warpgroups, count, stages, split, cluster, staged, tiles, shared, beside, teams, planes, meet,
                         min(early, stages))
    return None


def early_stages(kind: str, tokens: int, stage_blocks: int, stages: int, *, planes: bool, bare: bool) -> int:
    """How many stages' weights are fetched before the inputs are there: of few tokens as many as arrive while x is packed, which
    takes longest if by the row's largest. Formats that steps do not gain with fetch all there."""
    if tokens > 64 or not (kind in CODES or (bare and tokens > 16)):
        return stages
    inputs = EARLY_QUANTIZED if kind in QUANTIZED else EARLY_PLANES if planes and tokens <= 16 else EARLY
    return max(1, min(inputs // (64 * stage_blocks), stages - 1))


def worth_apart(kind: str, outputs: int, columns: int, tokens: int, beside: bool, *, lost: bool, bare: bool) -> bool:
    """Whether sums that meet beside the rings make steps faster, since nobody waits for the others: not with few inputs, nor
    where decode attention wants the room, nor, with 64 tokens, for a stage (`lost`), nor then with W8A8, which alone (`bare`)
    is faster so."""
    if tokens <= 32:
        return not beside or columns >= INPUTS
    if kind == "w8a8":
        return bare and not lost
    return not lost and (columns >= outputs or (kind == "fp8" and columns >= INPUTS))


def in_planes(kind: str, outputs: int, columns: int, group: int, rows: int) -> bool:
    """Whether cuda/gemm_planes.cuh is faster than 16-bit floats: up to 16 rows, and up to 32 where no kernel before packs x;
    there of int4 only gate/up gains in a step."""
    takes = kind in CODES and group == 128 and columns % 128 == 0
    many = outputs > columns and (kind == "int8" or outputs * columns > SMALL)
    return takes and rows <= (32 if many else 16)


def worth_planes(kind: str, outputs: int, columns: int, group: int, rows: int, processors: int) -> bool:
    """Whether steps of 9 rows and more are faster that way than with few.cu and batch.cu: those of int8 not where its tiles leave
    SMs idle or inputs are few."""
    if rows <= 8 or not in_planes(kind, outputs, columns, group, rows):
        return False
    warpgroups, slices = lone_tiles(outputs, processors) or (1, 0)
    full = (warpgroups, slices) == (1, 1) or math.ceil(outputs / (64 * warpgroups)) * slices >= 0.9 * processors
    return kind == "int4" or (full and columns >= INPUTS)


def staged_tokens(kind: str, tokens: int, *, residual: bool) -> int:
    """How many tokens' results go through shared memory at a time: all where the residual waits there, else equal pieces."""
    return tokens if residual and kind not in QUANTIZED else 64 if tokens % 64 == 0 else 32


def lone_tiles(outputs: int, processors: int) -> tuple[int, int] | None:
    """Warpgroups of a tile and CTAs that share its inputs: the smallest tiles that are all resident at once, with an SM to each
    CTA, and leave few SMs idle. Larger ones fetch less of x, but more sums have to meet."""
    for warpgroups in (1, 2, 3):
        tiles = math.ceil(outputs / (64 * warpgroups))
        slices = min(8, processors // tiles)
        if tiles * slices >= 0.7 * processors:
            return warpgroups, slices
    return None


def fastest_tile(kind: str, outputs: int, columns: int, rows: int, processors: int) -> tuple[int, int, int, int]:
    """Tokens, warpgroups, split and slices by their estimated time: rounds of whole tiles, all work shared out evenly, or
    every tile's inputs in two slices."""
    rate, sparse = PRODUCTS[kind], kind.startswith("sparse")
    known = TILES_GROUPED if kind in GROUPED and not sparse else TILES | (TILES_BETWEEN if kind in KINDS_BETWEEN else {})

    def tiles(tokens: int, warpgroups: int) -> int:
        return math.ceil(outputs / (64 * warpgroups)) * math.ceil(rows / tokens)

    found = []
    if tiles(256, 2) <= 2 * processors:
        found.append((LINE_US + tiles(256, 2) / processors * 512 * columns / rate, (256, 2, LINE, 1)))
    for (tokens, warpgroups), slower in known.items():
        slower *= 1 + (CONVERTED * (256 / tokens - 1) if sparse and kind in GROUPED else 0)
        one = tokens * warpgroups * columns * slower / rate
        found.append((math.ceil(tiles(tokens, warpgroups) / processors) * one, (tokens, warpgroups, WHOLE, 1)))
        sliced = kind in SLICED_KINDS and tokens in (128, 256) and warpgroups in SLICED_US
        if sliced and 2 * tiles(tokens, warpgroups) <= processors:
            found.append((SLICED_US[warpgroups] + one / 2, (tokens, warpgroups, CLUSTERS, 2)))
    return min(found)[1]


def why_not(weight: Gemv, rows: int, device: torch.device) -> str | None:
    return _why_not(weight.kind, weight.out_features, weight.in_features, weight.group, weight.interleaved, rows, device)


@functools.cache
def _why_not(kind: str, outputs: int, columns: int, group: int, interleaved: bool, rows: int, device: torch.device) -> str | None:
    if gpu.capability(device)[0] != 9:
        return "needs Hopper's matrix units"
    if outputs % (4 if interleaved else 2):
        return "outputs are written in pairs"
    if shape_for(kind, outputs, columns, group, rows, processors(device.index or 0)) is None:
        return f"{columns} inputs in groups of {group} do not fit into whole stages"
    return None


def order_of(kind: str) -> int:
    """Of the inputs of packed x: cuda/packed.cuh."""
    return 0 if kind not in GROUPED else 2 if kind.startswith("sparse") else 1


@functools.cache
def kernels(kind: str, outputs: int, columns: int, group: int, fp16: bool, scale_fp16: bool, shape: Shape, *, norm: bool,
            epilogue: str, bias: bool, packing: tuple[int, int, int], static: bool, symmetric: bool = False,
            by_rows: bool = False, experts: bool = False, to: Order | None = None) -> tuple[jit.Kernel, jit.Kernel]:
    """`packing`: of `pack_shape`. `experts`: rows in tiles of one expert each (experts.py). `to`: results are packed x."""
    pack_rows, pack_warps, pack_parts = packing
    common = {"FP16": int(fp16), "KDIM": columns, "SB": shape.stage_blocks}
    pack = jit.load("pack.cu", defines=common | {
        "NORM": int(norm), "QUANTIZE": QUANTIZED.get(kind, 0), "STATIC": int(static), "ORDER": order_of(kind), "ROWS": pack_rows,
        "WARPS": pack_warps, "PARTS": pack_parts, "TILE": shape.tokens if experts else 0,
        **({"QUANTIZE": 3, "SYMMETRIC": int(symmetric)} if shape.planes else {})})
    gemm = jit.load("gemm.cu", registers=shape.registers, defines=common | {
        **format_defines(kind, symmetric=symmetric), "SCALE_FP16": int(scale_fp16), "NDIM": outputs, "GROUP": group,
        "EPILOGUE": EPILOGUES[epilogue], "BIAS": int(bias), "TOKENS": shape.tokens, "WGS": shape.warpgroups,
        "STAGES": shape.stages, "SPLIT": shape.split,
        "CLUSTER": shape.cluster, "STAGED": shape.staged, "LOADERS": shape.loaders, "TEAMS": shape.teams,
        "EXPERTS": int(experts), **({"IN_PLANES": 1} if shape.planes else {}),
        **({"APART": 1} if shape.apart else {}),
        **({"BEFORE": shape.before} if shape.before < shape.stages else {}), **({"BY_ROWS": 1} if by_rows else {}),
        **(to.defines if to else {})})
    return pack.kernel("pack"), gemm.kernel("gemm")


def pack_shape(columns: int, padded: int, *, norm: bool, quantized: bool, planes: bool = False) -> tuple[int, int, int]:
    """Rows and warps of a packing CTA, and how many CTAs share its rows: 8 rows that fill whole lines, fewer where there are few
    and something is to be known of whole rows. A thread that holds 16 pieces of normed x has too few registers: 11 are faster.
    Quantized, 4 or 2 rows are: then an SM has several CTAs, and one writes while another reads. For planes one row, of which
    16 lanes have a group."""
    eights = math.ceil(columns / 64) * 8
    if planes and not norm:
        warps = next((count for count in (4, 2, 1) if eights % (32 * count) == 0), 4)
        return 1, warps, 1 if eights % (32 * warps) else eights // (32 * warps)
    if not norm and not quantized:
        return 8, PACK_WARPS, 1 if eights % (4 * PACK_WARPS) else eights // (4 * PACK_WARPS)
    if padded <= 512 and norm and quantized:
        return 1, 8 if eights <= 1024 else 16, 1
    if padded <= 32:
        warps = 4 if eights <= 1024 else 8
        return 1, warps, math.ceil(eights / (32 * warps))
    if padded <= 512:
        warps = 8 if eights <= 2048 else 16
        split = 2 if norm else 3 if padded <= 64 and eights > 1024 else 1  # 64 rows are 32 CTAs
        return 2, warps, split if eights > 16 * warps else 1
    if norm and quantized and eights % 64 == 0 and 4 <= eights // 64 <= 16:
        return 2, eights // 64, 1  # four pieces a thread
    for rows, most in ((4, 16), (2, 24)) if not norm else ():
        for warps in range(4, most + 1):
            held, rest = divmod(eights * rows, 32 * warps)
            if held <= 16 and not rest:
                return rows, warps, 1
    return 8, max(8, min(24, math.ceil(eights / (64 if quantized else 43)))), 1


@dataclass(frozen=True)
class Call:
    """Everything about multiplying one weight with up to so many rows that does not change from call to call."""

    pack: jit.Kernel
    gemm: jit.Kernel
    tokens: int
    order: Order
    packing: tuple[int, int, int]
    grid: int
    block: int
    shared: int
    cluster: int
    planes: bool
    packed_bytes: int
    row_scale: Tensor
    partials: Tensor
    flags: Tensor


def _make_call(weight: Gemv, rows: int, device: torch.device, *, norm: bool, residual: bool, to: Order | None,
               choices: dict[str, int]) -> Call:
    count = processors(device.index or 0)
    shape = shape_for(weight.kind, weight.out_features, weight.in_features, weight.group, rows, count, residual=residual,
                      bare=not (norm or residual or weight.interleaved), **choices)
    assert shape is not None
    padded, blocks = math.ceil(rows / shape.tokens) * shape.tokens, math.ceil(weight.in_features / 64)
    packing = pack_shape(weight.in_features, padded, norm=norm, quantized=weight.kind in QUANTIZED, planes=shape.planes)
    sums = shape.warpgroups * 64 * shape.tokens
    pack, gemm = kernels(weight.kind, weight.out_features, weight.in_features, weight.group, weight.dtype == torch.float16,
                         weight.scale_fp16, shape, norm=norm, bias=weight.bias is not None, packing=packing,
                         static=weight.static, symmetric=weight.symmetric, by_rows=weight.by_rows, to=to,
                         epilogue="silu" if weight.interleaved else "residual" if residual else "store")
    return Call(pack, gemm, tokens=shape.tokens, order=Order(shape.stage_blocks, order_of(weight.kind)), packing=packing,
                grid=shape.grid(count), block=shape.block,
                shared=shape.shared, cluster=shape.cluster if shape.split == CLUSTERS else 1,
                planes=shape.planes,
                packed_bytes=padded * blocks * (64 if weight.kind in QUANTIZED else 132 if shape.planes else 128),
                row_scale=buffer("row scale", padded * 4, device),
                partials=mail(shape.grid(count) * sums, device) if shape.split == MAIL else
                buffer("partials", count * sums * 4, device),
                flags=buffer("flags", count * 4, device))


def _call(weight: Gemv, rows: int, device: torch.device, *, norm: bool, residual: bool, to: Order | None = None,
          choices: dict[str, int]) -> Call:
    most = padded_rows(rows)
    key = (most, norm, residual, to, *choices.items())
    call = weight.calls.get(key)
    if call is None:
        call = weight.calls[key] = _make_call(weight, most, device, norm=norm, residual=residual, to=to, choices=choices)
    return call


def padded_rows(rows: int) -> int:
    """Calls with so many rows are alike: the next power of two, or multiple of 64, 128 or the largest tile."""
    if rows <= 256:
        return max(LEAST, 1 << (rows - 1).bit_length())
    step = 64 if rows <= 384 else 128 if rows <= 1024 else 256
    return -(-rows // step) * step


def packed_input(weight: Gemv, rows: int, device: torch.device, *, residual: bool, **choices: int) -> Packed | None:
    """Where the kernel before writes x for `multiply`, which has to be called with the same residual and choices; None where
    x becomes integers, of which that kernel knows nothing."""
    call = _call(weight, rows, device, norm=False, residual=residual, choices=choices)
    if call.planes:
        return None
    return Packed(buffer("packed ahead", call.packed_bytes, device), rows, -(-rows // call.tokens) * call.tokens // 8,
                  call.order)


def multiply(weight: Gemv, x: Tensor | Packed, out: Tensor | None = None, *, norm: Tensor | None = None, epsilon: float = 1e-6,
             residual: Tensor | None = None, to: Packed | None = None, pdl: bool = True, **choices: int) -> Tensor:
    """x [rows, in] → [rows, out] (half of it for an interleaved gate/up: silu(gate) · up); `to`: into the next one's x."""
    data, rows = (x.data, x.rows) if isinstance(x, Packed) else (x, x.shape[0])
    call = _call(weight, rows, data.device, norm=norm is not None, residual=residual is not None,
                 to=to.order if to else None, choices=choices)
    if to is not None:
        out = to.data
    elif out is None:
        out = torch.empty(rows, weight.out_features // (2 if weight.interleaved else 1), dtype=weight.dtype, device=data.device)
    padded, packed = -(-rows // call.tokens) * call.tokens, data
    if isinstance(x, Packed):
        assert norm is None and (x.groups * 8, x.order) == (padded, call.order)
    else:
        packed = buffer("packed", call.packed_bytes, data.device)
        groups = padded // (4 if call.planes else 8)
        args = (x, norm, packed, call.row_scale, rows, groups, float(epsilon), weight.static_scale, None, None)
        each, warps, parts = call.packing
        call.pack.launch(padded // each * parts, 32 * warps, args, pdl=pdl)
    call.gemm.launch(call.grid, call.block, (weight.weights, weight.records, weight.channel_scale, packed, call.row_scale,
                                             weight.bias, residual, out, call.partials, call.flags, None, None, rows,
                                             to.groups if to else 0),
                     shared=call.shared, pdl=pdl, cluster=call.cluster)
    return out
