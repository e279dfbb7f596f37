"""The experts of a layer as one: host side of cuda/route.cu and cuda/experts.cu, and of gemm.cu over rows sorted by expert.

The weights of all experts lie stacked in gemv's tiles; the kernels find out on the device which of them a step needs, so
nothing waits for the host and a step can be captured. Few tokens (choices.EXPERT_TOKENS) go through experts.cu (every token
meets every expert in use), more through pack.cu and gemm.cu (rows sorted by expert, in tiles of one expert each).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.kernels import choices, gemm, jit
from flyweight.kernels.cuda_linear import CudaLinear
from flyweight.kernels.gemv import QUANTIZED, ROWS, Gemv, processors

STACKED = ("weights", "records", "channel_scale")
TILES = (16, 32, 64, 128, 256)  # rows
WARPGROUPS = {16: 4, 32: 4}  # of gemm.cu, for tiles of so many rows, where they fit; two for larger ones
TOKENS_AT_ONCE = 8192  # more are done in turns: by then every expert has enough rows, and rows cost memory
# Of an SM, by route and combine of few tokens, so that each has one of their CTAs, as of the linears around them.
RESERVED = 100 * 1024


@dataclass(frozen=True)
class Route:
    """What route.cu leaves: `tiles[0]` tiles of `tile` rows, each of one expert, and where each (token, choice) is."""

    shares: Tensor  # float32 [tokens, chosen]
    gates: Tensor | None  # float32 [tokens], of the shared expert
    place: Tensor  # int32 [tokens, chosen]: row
    source: Tensor | None  # int32 [rows]: token, -1 for rows that fill up a tile; None: row t of a tile is token t
    expert_of: Tensor  # int32 [most tiles]
    tiles: Tensor  # int32 [1]
    tile: int

    @property
    def rows(self) -> int:
        """The most that there can be."""
        return len(self.expert_of) * self.tile


def stack(linears: Sequence[CudaLinear]) -> Gemv:
    """One weight of all; the linears' own become views of it, each copy being freed as the next is made."""
    first = linears[0].weight
    stacked = {}
    for name in STACKED:
        if (part := getattr(first, name)) is None:
            continue
        stacked[name] = part.new_empty(len(linears), *part.shape)
        del part
        for i, linear in enumerate(linears):
            stacked[name][i].copy_(getattr(linear.weight, name))
            linear.weight = dataclasses.replace(linear.weight, **{name: stacked[name][i]})
    return dataclasses.replace(first, **stacked)


def why_not(linears: Sequence[object], device: torch.device) -> str | None:
    """None, or why these experts' linears (all gate/up, or all down) cannot be one."""
    scheme = set()
    for linear in linears:
        if not isinstance(linear, CudaLinear):
            return "some expert's format has no kernel for few rows"
        weight = linear.weight
        scheme.add((weight.kind, weight.group, weight.dtype, weight.scale_fp16, weight.interleaved, weight.symmetric))
        if weight.bias is not None or weight.out_features % 16 or weight.static:
            return "an expert has a bias, a scale of its own for the input, or outputs that are no multiple of 16"
    if len(scheme) > 1:
        return "the experts of a layer have more than one scheme"
    if gpu.capability(device)[0] != 9:
        return "needs Hopper's matrix units"
    if any(shape_for(weight, 16, tile, 1) is None for tile in TILES):
        return f"{weight.in_features} inputs in groups of {weight.group} do not fit into whole stages"
    return None


def shape_for(weight: Gemv, rows: int, tile: int, processors: int) -> gemm.Shape | None:
    shapes = (gemm.shape_for(weight.kind, weight.out_features, weight.in_features, weight.group, rows, processors, tokens=tile,
                             split=gemm.WHOLE, warpgroups=count, teams=1, planes=False) for count in (WARPGROUPS.get(tile, 2), 2))
    return next((shape for shape in shapes if shape is not None), None)


def tile_rows(pairs: int, experts: int) -> int:
    """Rows of a tile: about what an expert gets, so that few are empty and most weights are read once."""
    return next((tile for tile in TILES if tile >= pairs / experts * 1.25), TILES[-1])


@dataclass(frozen=True, eq=False)
class Grouped:
    """silu(gate) · up and down of every expert, the router before and the weighted sum after them.

    A layer must not follow itself directly: the next `route` of few tokens could begin before `combine` has taken `ready` down.
    """

    gate_up: Gemv  # stacked
    down: Gemv
    router: Tensor  # float32 [experts, hidden], and the shared expert's gate as one row more
    ready: Tensor  # int32 [1]: 0 but between `route` and `combine` of few tokens
    experts: int
    chosen: int
    normalize: bool

    @property
    def gated(self) -> bool:
        return len(self.router) > self.experts

    def few(self, tokens: int) -> bool:
        """Whether experts.cu takes them."""
        few = tokens in ROWS and tokens <= choices.EXPERT_TOKENS[self.down.kind]
        return few and self.gate_up.fits(tokens) and self.down.fits(tokens)

    def route(self, x: Tensor, *, norm: Tensor, epsilon: float, lengths: Tensor | None = None) -> Route:
        """x [tokens, hidden], before the norm; rows whose length is 0 are padding and need no expert."""
        tokens, pairs, by_token, device = len(x), len(x) * self.chosen, self.few(len(x)), x.device
        tile = tokens if by_token else tile_rows(pairs, self.experts)
        most = min(self.experts, pairs) + (0 if by_token else pairs // tile)

        def table(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        gates = table(tokens, dtype=torch.float32) if self.gated else None
        source = None if by_token else table(most * tile)
        found = Route(table(tokens, self.chosen, dtype=torch.float32), gates, table(tokens, self.chosen), source, table(most),
                      self.ready if by_token else table(1), tile)
        rows = min(8, 1 << (tokens - 1).bit_length())
        groups, outputs, count = math.ceil(tokens / rows), len(self.router), processors(device.index or 0)
        # Few tokens: a CTA on every SM, so that the next kernel finds all alike. Many: two, each with several outputs in turn.
        each = math.ceil(outputs / max(1, 2 * count // groups))
        grid = (max(outputs, count) if groups == 1 else math.ceil(outputs / each), groups)
        logits, chosen = table(tokens, outputs, dtype=torch.float32), table(tokens, self.chosen)
        args = (x, norm, self.router, logits, chosen, found.shares, gates, found.place, source, found.expert_of, found.tiles,
                gemm.buffer("tickets", 4 * groups + 4, device), lengths, tokens, float(epsilon))
        shared = 10 * x.shape[1]  # two rows of the router and the norm
        self._kernel("route", x, rows, tile, by_token).launch(grid, 256, args, shared=max(shared, RESERVED * by_token), pdl=True)
        return found

    def combine(self, y: Tensor, route: Route, residual: Tensor, out: Tensor, *, shared: Tensor | None = None) -> None:
        """out = residual + each token's experts by their shares (+ the shared expert by its gate)."""
        count = math.ceil(residual.numel() / 512)
        args = (y, route.place, route.shares, shared, route.gates, residual, out, route.tiles, len(residual))
        grid = max(min(count, 16 * processors(y.device.index or 0)), processors(y.device.index or 0))
        self._kernel("combine", residual, 1, 16, False).launch(grid, 256, args, shared=RESERVED * (route.source is None),
                                                               pdl=True)

    def _kernel(self, name: str, x: Tensor, rows: int, tile: int, by_token: bool) -> jit.Kernel:
        defines = {"FP16": int(x.dtype == torch.float16), "KDIM": x.shape[1], "EXPERTS": self.experts, "CHOSEN": self.chosen,
                   "GATE": int(self.gated), "NORMALIZE": int(self.normalize), "ROWS": rows, "TILE": tile,
                   "BY_TOKEN": int(by_token)}
        return jit.load("route.cu", defines=defines).kernel(name)

    def multiply(self, x: Tensor, route: Route, *, norm: Tensor, epsilon: float) -> Tensor:
        """The experts' own answers [rows, hidden], in the places that the route gave them."""
        if route.source is None:
            return few_rows(self.down, few_rows(self.gate_up, x, route, norm=norm, epsilon=epsilon), route)
        gated = many_rows(self.gate_up, x, route, source=route.source, norm=norm, epsilon=epsilon)
        return many_rows(self.down, gated, route)


def few_rows(weight: Gemv, x: Tensor, route: Route, *, norm: Tensor | None = None, epsilon: float = 1e-6) -> Tensor:
    """experts.cu. x [tokens, in] for all experts, or [rows, in] with the rows of each."""
    rows, width = route.tile, weight.out_features // (2 if weight.interleaved else 1)
    plan = weight.plan(rows, tiles=16)
    assert plan is not None
    out = torch.empty(route.rows, width, dtype=x.dtype, device=x.device)
    defines = weight.defines(rows, plan, norm=norm is not None, epilogue="silu" if weight.interleaved else "store")
    kernel = jit.load("experts.cu", defines=defines | {"PER_SLOT": int(norm is None)}).kernel("experts")
    args = (weight.weights, weight.records, weight.channel_scale, x, norm, out, route.expert_of, route.tiles, float(epsilon))
    kernel.launch(processors(x.device.index or 0), 32 * (plan.warps + 1), args, shared=plan.shared, pdl=True)
    return out


def many_rows(weight: Gemv, x: Tensor, route: Route, *, source: Tensor | None = None, norm: Tensor | None = None,
              epsilon: float = 1e-6) -> Tensor:
    """pack.cu and gemm.cu. x [tokens, in] with `source`, or [rows, in] in the order of the route."""
    rows, device, count = route.rows, x.device, processors(x.device.index or 0)
    shape = shape_for(weight, rows, route.tile, count)
    assert shape is not None
    packing = gemm.pack_shape(weight.in_features, rows, norm=norm is not None, quantized=weight.kind in QUANTIZED)
    names = weight.kind, weight.out_features, weight.in_features, weight.group, weight.dtype == torch.float16, weight.scale_fp16
    pack, product = gemm.kernels(
        *names, shape, norm=norm is not None, bias=False, packing=packing, static=False, experts=True, symmetric=weight.symmetric,
        epilogue="silu" if weight.interleaved else "store")
    blocks = math.ceil(weight.in_features / 64)
    packed = torch.empty(rows * blocks * 64 * (1 if weight.kind in QUANTIZED else 2), dtype=torch.uint8, device=device)
    row_scale = torch.empty(rows, dtype=torch.float32, device=device)
    out = torch.empty(rows, weight.out_features // (2 if weight.interleaved else 1), dtype=x.dtype, device=device)
    args = (x, norm, packed, row_scale, rows, rows // 8, float(epsilon), None, source, route.tiles)
    each, warps, parts = packing
    pack.launch(rows // each * parts, 32 * warps, args, pdl=True)
    product.launch(shape.grid(count), shape.block, (
        weight.weights, weight.records, weight.channel_scale, packed, row_scale, None, None, out, None, None, route.expert_of,
        route.tiles, rows, 0), shared=shape.shared, pdl=True)
    return out
