"""How gemm.cu cuts a product: tiles, warpgroups, stages, and who adds partial sums up.

    WHOLE     a CTA has all inputs of its tiles, one after the other
    LINE      the line of all work is cut evenly; a tile cut in two is added up in memory
    CLUSTERS  the CTAs of a cluster have a part of the inputs each, and add up through distributed
              shared memory
    MAILBOX   the same between CTAs that are no cluster, through memory

Everything is computed from the weight, the rows, the device and the numbers of `tuned`; `Forced`
lets a benchmark or a test ask for another cut.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from flyweight.gpu import KB, Gpu
from flyweight.kernels import tuned
from flyweight.kernels.linear.tiles import Matrix
from flyweight.kernels.tuned import FormatNumbers

WHOLE, LINE, CLUSTERS, MAILBOX = range(4)
# left of an SM: alone; a CTA of attention; a twin
RESERVED = 2 * KB
RESERVED_CLUSTERS = 17 * KB
RESERVED_BESIDE = 4 * KB
STAGED_ROW = 144  # bytes of a token's 64 results in shared memory
# of an SM; of a thread; of a CTA of pack.cu
REGISTERS = 65536
REGISTERS_SMALL = 96
REGISTERS_PACK = 256 * 48
# of a tile; of a ring
LEAST_TOKENS = 8
MOST_STAGES = 12
MOST_CLUSTER = 8
# inputs whose weights are fetched before x is there
EARLY = 512
EARLY_INT16 = 1024
EARLY_QUANTIZED = 768


@dataclass(frozen=True)
class Product:
    """What is to be multiplied."""

    matrix: Matrix
    rows: int
    residual: bool = False
    # neither a norm before nor a residual or act(gate)·up after: a linear by itself
    bare: bool = False


@dataclass(frozen=True)
class Forced:
    """Parts of a shape that somebody asks for; None: what was measured to be fastest."""

    tokens: int | None = None
    warpgroups: int | None = None
    stage_blocks: int | None = None
    cluster: int | None = None
    split: int | None = None
    staged: int | None = None
    beside: bool | None = None
    teams: int | None = None
    int16_inputs: bool | None = None
    separate_exchange: bool | None = None
    early_stages: int | None = None


FREE = Forced()


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
    int16_inputs: bool = False  # x as integers: cuda/gemm_planes.cuh
    separate_exchange: bool = False  # the sums of a cluster meet beside its rings, not in them
    early_stages: int = 0  # stages whose weights are fetched before the inputs are there

    @property
    def loaders(self) -> int:
        return 2 if self.beside else 4

    @property
    def block(self) -> int:
        return (4 * self.warpgroups * self.teams + self.loaders) * 32

    @property
    def registers(self) -> int | None:
        """At most so many a thread: with few tokens a CTA of pack.cu fits beside, and weights
        arrive while x is packed.
        """
        if self.tokens > 64:
            return None
        if self.split == CLUSTERS:
            return REGISTERS_SMALL
        left = (REGISTERS - REGISTERS_PACK) // self.block // 8 * 8
        return max(REGISTERS_SMALL, left)

    def grid(self, processors: int) -> int:
        return {WHOLE: min(processors, self.tiles), LINE: processors}.get(
            self.split, self.tiles * self.cluster
        )


@dataclass(frozen=True)
class Cut:
    """The part of a shape that is chosen before stages are counted."""

    tokens: int
    warpgroups: int
    split: int
    cluster: int
    beside: bool
    one_tile_per_sm: bool
    int16_inputs: bool

    @property
    def clustered(self) -> bool:
        return self.split in (CLUSTERS, MAILBOX)


@functools.cache
def shape_for(product: Product, device: Gpu, forced: Forced = FREE) -> Shape | None:
    """The fastest shape by what was measured: of a bare linear by itself, else in steps. None where
    no cut of the inputs into stages fits.
    """
    numbers = tuned.of(device).formats[product.matrix.format.name]
    cut = _cut(product, device, numbers, forced)
    # no registers for their sums
    if cut.warpgroups > 2 and cut.tokens >= numbers.gemm_register_tokens:
        return None
    staged = forced.staged
    if staged is None:
        plain_stores = cut.clustered or cut.tokens < 64 or product.matrix.out_features % 16
        staged = 0 if plain_stores else staged_tokens(product, cut.tokens)
    counts = (
        (forced.stage_blocks,)
        if forced.stage_blocks
        else _stage_counts(product.matrix, cut, numbers)
    )
    for count in counts:
        if found := _with_stages(product, device, cut, staged=staged, count=count, forced=forced):
            return found
    return None


# -- the cut -------------------------------------------------------------------------------


def _cut(product: Product, device: Gpu, numbers: FormatNumbers, forced: Forced) -> Cut:
    matrix = product.matrix
    rows = product.rows
    int16 = forced.int16_inputs
    if int16 is None:
        int16 = (forced.tokens is None or forced.tokens >= rows) and takes_int16(
            matrix, rows, device
        )
    tokens = forced.tokens
    warpgroups = forced.warpgroups
    split = forced.split
    cluster = forced.cluster
    beside = forced.beside
    if (tokens, warpgroups, split) == (None, None, None) and rows > 64:
        tokens, warpgroups, split, cluster = fastest_tile(matrix, rows, device)
    lone = _one_tile(product, device, numbers, int16_inputs=int16)
    if lone and (warpgroups, split, cluster) == (None, None, None):
        warpgroups, cluster = lone
        split = {1: WHOLE, 2: CLUSTERS}.get(cluster, MAILBOX)
        beside = False
    if split is None:
        large = matrix.weights > tuned.of(device).steps.small_weights
        split = CLUSTERS if rows <= numbers.gemm_cluster_rows[large] else LINE
    clustered = split in (CLUSTERS, MAILBOX)
    if warpgroups is None:
        warpgroups = 2 if not clustered or matrix.out_features >= numbers.gemm_wide_outputs else 1
    tokens = tokens or min(256, max(LEAST_TOKENS, 1 << (rows - 1).bit_length()))
    if cluster is None or not clustered:
        cluster = _cluster_size(matrix, warpgroups, device, numbers) if clustered else 1
    if beside is None:
        beside = split == CLUSTERS and warpgroups <= 2 and tokens <= 64
    return Cut(tokens, warpgroups, split, cluster, beside, lone is not None, int16)


def _cluster_size(matrix: Matrix, warpgroups: int, device: Gpu, numbers: FormatNumbers) -> int:
    tiles = math.ceil(matrix.out_features / (64 * warpgroups))
    if tiles > device.processors:
        return 1
    room = int(numbers.gemm_cluster_room * device.processors) or max(device.processors, 2 * tiles)
    return max(1, min(MOST_CLUSTER, room // tiles))


def one_tile_per_sm(outputs: int, processors: int) -> tuple[int, int] | None:
    """Warpgroups of a tile and CTAs that share its inputs: the smallest tiles that are all resident
    at once, with an SM to each CTA, and leave few SMs idle. Larger ones fetch less of x, but more
    sums have to meet.
    """
    for warpgroups in (1, 2, 3):
        tiles = math.ceil(outputs / (64 * warpgroups))
        slices = min(MOST_CLUSTER, processors // tiles)
        if tiles * slices >= 0.7 * processors:
            return warpgroups, slices
    return None


def _one_tile(
    product: Product, device: Gpu, numbers: FormatNumbers, *, int16_inputs: bool
) -> tuple[int, int] | None:
    """`one_tile_per_sm` where that is faster than clusters beside other kernels."""
    matrix = product.matrix
    rows = product.rows
    quantized = matrix.format.quantizes_input
    fewest = 0 if quantized or int16_inputs else 16
    if not numbers.gemm_one_tile_per_sm or not fewest < rows <= 64:
        return None
    lone = one_tile_per_sm(matrix.out_features, device.processors)
    crowded = rows <= 32 or lone == (1, 1) or (numbers.gemm_square_pairs_only and lone != (1, 2))
    if quantized and lone != (3, 1) and matrix.in_features <= matrix.out_features and crowded:
        # qkv and o: smaller CTAs are as fast or faster, and leave room beside for more of decode
        # attention
        return None
    if int16_inputs and lone == (1, 1) and rows <= 16:
        return None  # qkv: so are clusters
    return lone


def fastest_tile(matrix: Matrix, rows: int, device: Gpu) -> tuple[int, int, int, int]:
    """Tokens, warpgroups, split and slices by their estimated time: rounds of whole tiles, all work
    shared out evenly, or every tile's inputs in two slices.
    """
    costs = tuned.of(device).gemm
    numbers = tuned.of(device).formats[matrix.format.name]
    rate = numbers.gemm_rate
    processors = device.processors
    columns = matrix.in_features

    def tiles(tokens: int, warpgroups: int) -> int:
        return math.ceil(matrix.out_features / (64 * warpgroups)) * math.ceil(rows / tokens)

    found = []
    if tiles(256, 2) <= 2 * processors:
        found.append(
            (costs.line_us + tiles(256, 2) / processors * 512 * columns / rate, (256, 2, LINE, 1))
        )
    for tokens, warpgroups, slower in costs.tiles[numbers.gemm_tiles]:
        if matrix.format.sparse and matrix.format.grouped:
            slower *= 1 + costs.converted * (256 / tokens - 1)
        one = tokens * warpgroups * columns * slower / rate
        found.append(
            (
                math.ceil(tiles(tokens, warpgroups) / processors) * one,
                (tokens, warpgroups, WHOLE, 1),
            )
        )
        sliced = (
            numbers.gemm_halves_inputs and tokens in (128, 256) and warpgroups in costs.sliced_us
        )
        if sliced and 2 * tiles(tokens, warpgroups) <= processors:
            found.append((costs.sliced_us[warpgroups] + one / 2, (tokens, warpgroups, CLUSTERS, 2)))
    return min(found)[1]


# -- x as integers -------------------------------------------------------------------------


def takes_int16(matrix: Matrix, rows: int, device: Gpu) -> bool:
    """Whether cuda/gemm_planes.cuh is faster than 16-bit floats: up to 16 rows, and up to 32 where
    no kernel before packs x; there of int4 only gate/up gains in a step.
    """
    if "gemm_int16" not in matrix.format.kernels or matrix.group != 128 or matrix.in_features % 128:
        return False
    numbers = tuned.of(device)
    large = (
        numbers.formats[matrix.format.name].int16_small_linears
        or matrix.weights > numbers.steps.small_weights
    )
    many = matrix.out_features > matrix.in_features and large
    return rows <= (32 if many else 16)


def int16_pays(matrix: Matrix, rows: int, device: Gpu) -> bool:
    """Whether steps of 9 rows and more are faster that way than with few.cu and batch.cu: those of
    int8 not where its tiles leave SMs idle or inputs are few.
    """
    if rows <= 8 or not takes_int16(matrix, rows, device):
        return False
    numbers = tuned.of(device)
    if numbers.formats[matrix.format.name].int16_always:
        return True
    warpgroups, slices = one_tile_per_sm(matrix.out_features, device.processors) or (1, 0)
    resident = math.ceil(matrix.out_features / (64 * warpgroups)) * slices
    full = (warpgroups, slices) == (1, 1) or resident >= 0.9 * device.processors
    return full and matrix.in_features >= numbers.steps.route_inputs


# -- stages --------------------------------------------------------------------------------


def staged_tokens(product: Product, tokens: int) -> int:
    """How many tokens' results go through shared memory at a time: all where the residual waits
    there, else equal pieces.
    """
    if product.residual and not product.matrix.format.quantizes_input:
        return tokens
    return 64 if tokens % 64 == 0 else 32


def _stage_counts(matrix: Matrix, cut: Cut, numbers: FormatNumbers) -> tuple[int, ...]:
    """Blocks of 64 inputs in a stage, the best first."""
    form = matrix.format
    if cut.tokens <= 64:
        beside, alone = numbers.gemm_long_stages
        long = form.grouped or (cut.clustered and cut.tokens <= (beside if cut.beside else alone))
        return (4, 2, 1) if long else (2, 1)
    return (2, 1) if form.quantizes_input or (form.grouped and cut.tokens < 256) else (1, 2)


def _stage_bytes(matrix: Matrix, cut: Cut, count: int) -> int:
    form = matrix.format
    span = 64 * count
    groups = math.ceil(span / matrix.group) if form.grouped else 0
    records = 4 * cut.warpgroups * groups * form.record_bytes
    weights = 4 * cut.warpgroups * count * form.block_bytes
    inputs = cut.tokens * span * (1 if form.quantizes_input else 2)
    scales = cut.tokens * span // 128 * 8 if cut.int16_inputs else 0
    return weights + records + inputs + scales


def _with_stages(
    product: Product, device: Gpu, cut: Cut, *, staged: int, count: int, forced: Forced
) -> Shape | None:
    """The shape with stages of `count` blocks; None where inputs do not come out even or too few
    stages fit.
    """
    matrix = product.matrix
    form = product.matrix.format
    total = product.matrix.blocks
    span = 64 * count
    cut_group = (
        form.grouped
        and matrix.group < matrix.in_features
        and span % matrix.group
        and (cut.int16_inputs or matrix.group % span)
    )
    if total % count or cut_group or total // count < cut.cluster or matrix.cuts_units(count):
        return None
    scales = 4 * (cut.tokens + 64) if staged and form.quantizes_input else 0
    staging = (staged * STAGED_ROW + scales) * cut.warpgroups
    few = cut.tokens <= 64 and (cut.clustered or (cut.one_tile_per_sm and cut.warpgroups == 1))
    limit = device.shared_alone(RESERVED_CLUSTERS if few else RESERVED)
    if cut.beside:
        limit = device.shared_beside(RESERVED_BESIDE)
    limit -= staging
    stage = _stage_bytes(matrix, cut, count)
    share = _owned_sums(cut)
    left = limit - (cut.cluster - 1) * share  # for the ring, where these have a place of their own
    most, fewer = (min(MOST_STAGES, room // (stage + 16)) for room in (limit, left))
    separate = forced.separate_exchange
    if separate is None:
        separate = _separate_pays(product, device, cut, lost=fewer < most)
    separate = share > 0 and separate
    stages = fewer if separate else most
    if stages < (
        4
        if cut.clustered and not cut.beside and cut.tokens <= 64
        else 3
        if count == 4 or (count == 2 > form.unit_blocks and form.grouped)
        else 2
    ):
        return None
    ring = stages * stage
    exchanged = ring + (cut.cluster - 1) * share if separate else max(ring, cut.cluster * share)
    tiles = math.ceil(matrix.out_features / (64 * cut.warpgroups)) * math.ceil(
        product.rows / cut.tokens
    )
    early = forced.early_stages
    if early is None:
        early = _early_stages(product, device, cut, count, stages)
    return Shape(
        cut.tokens,
        cut.warpgroups,
        count,
        stages,
        cut.split,
        cut.cluster,
        staged,
        tiles,
        shared=exchanged + staging + 16 * stages + 512,
        beside=cut.beside,
        teams=forced.teams or _teams(matrix, device, cut, count, tiles),
        int16_inputs=cut.int16_inputs,
        separate_exchange=separate,
        early_stages=min(early, stages),
    )


def _owned_sums(cut: Cut) -> int:
    """Bytes of the sums that a CTA of a cluster ends up with from each of the others."""
    if cut.cluster == 1 or cut.split != CLUSTERS:
        return 0
    owned = cut.tokens // 8 // min(8, cut.tokens // 8, 1 << (cut.cluster.bit_length() - 1))
    return owned * cut.warpgroups * 128 * 16


def _separate_pays(product: Product, device: Gpu, cut: Cut, *, lost: bool) -> bool:
    """Whether sums that meet beside the rings make steps faster, since nobody waits for the others:
    not with few inputs, nor where decode attention wants the room, nor, with 64 tokens, for a stage
    (`lost`), nor then with W8A8, which alone is faster so.
    """
    matrix = product.matrix
    numbers = tuned.of(device)
    measured = numbers.formats[matrix.format.name]
    if cut.tokens <= 32:
        return not cut.beside or matrix.in_features >= numbers.steps.route_inputs
    if measured.gemm_exchange_alone:
        return product.bare and not lost
    return not lost and (matrix.deep or matrix.in_features >= measured.gemm_exchange_inputs)


def _teams(matrix: Matrix, device: Gpu, cut: Cut, count: int, tiles: int) -> int:
    """Two teams share a lone tile of 64 outputs where codes are taken apart, or sums added up,
    meanwhile.
    """
    first, last = tuned.of(device).formats[matrix.format.name].gemm_team_tokens
    alone = cut.warpgroups == 1 and cut.split in (WHOLE, CLUSTERS) and not cut.beside
    resident = tiles * cut.cluster <= device.processors
    enough = count > 1 and matrix.blocks // count // cut.cluster > 2
    return 2 if alone and resident and first <= cut.tokens <= last and enough else 1


def _early_stages(product: Product, device: Gpu, cut: Cut, count: int, stages: int) -> int:
    """How many stages' weights are fetched before the inputs are there: of few tokens as many as
    arrive while x is packed, which takes longest if by the row's largest. Formats that steps do not
    gain with fetch all there.
    """
    form = product.matrix.format
    gains = tuned.of(device).formats[form.name].gemm_early_in_steps or (
        product.bare and cut.tokens > 16
    )
    if cut.tokens > 64 or not gains:
        return stages
    inputs = EARLY_INT16 if cut.int16_inputs and cut.tokens <= 16 else EARLY
    if form.quantizes_input:
        inputs = EARLY_QUANTIZED
    return max(1, min(inputs // (64 * count), stages - 1))
