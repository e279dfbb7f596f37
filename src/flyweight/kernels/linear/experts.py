"""The experts of a layer as one: host side of cuda/route.cu, experts.cu and experts_sum.cu,
and of gemm.cu or (where that has no matrix units) gemm_mma.cu over rows sorted by expert.

The weights of all experts lie stacked in tiles; the kernels find out on the device which of them a
step needs, so nothing waits for the host and a step can be captured. Few tokens (`expert_rows` of
tuned) go through experts.cu (every token meets every expert in use), more through pack.cu and the
matrix product (rows sorted by expert, in tiles of one expert each).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.gpu import KB, Gpu
from flyweight.kernels import jit, tuned, workspace
from flyweight.kernels.linear import gemm, gemm_mma, gemv
from flyweight.kernels.linear.fused import FusedLinear, Norm
from flyweight.kernels.linear.gemm_shape import WHOLE, Forced, Product, Shape
from flyweight.kernels.linear.gemm_shape import shape_for as gemm_shape_for
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.kernels.linear.tiles import Matrix, TiledWeight

STACKED = ("weights", "records", "channel_scale", "bias")
TILES = (16, 32, 64, 128, 256)  # rows
# of gemm.cu, for tiles of so many rows, where they fit; two for larger ones
WARPGROUPS = {16: 4, 32: 4}
# more are done in turns: by then every expert has enough rows, and rows cost memory
TOKENS_AT_ONCE = 8192
THREADS = 256  # of a CTA of route.cu
# how much longer the longest run of tiles may be where the choices of a token are added up at once
UNEVEN = 1.1
# from which on all warps of a thread block choose: route.cu, choose.cuh
MANY_EXPERTS = 256
# that they list at most a warp of: choose.cuh
MOST_CHOSEN = 16
# of all choices together, where they are: every CTA converts them all
MOST_INPUTS = 8192


@dataclass(frozen=True)
class Routing:
    """How many experts there are, and how a token chooses: by the softmax of all, or by each one's
    sigmoid; among all, or in the best of equal groups.
    """

    experts: int
    chosen: int
    normalize: bool
    sigmoid: bool = False
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0  # of all shares

    @property
    def defines(self) -> dict[str, int]:
        found = {"EXPERTS": self.experts, "CHOSEN": self.chosen, "NORMALIZE": int(self.normalize)}
        if self.sigmoid:
            found["SIGMOID"] = 1
        if self.groups > 1:
            found |= {"GROUPS": self.groups, "CHOSEN_GROUPS": self.chosen_groups}
        return found


@dataclass(frozen=True)
class Routed:
    """What route.cu leaves: `tiles[0]` tiles of `tile` rows, each of one expert, and where each
    (token, choice) is.
    """

    shares: Tensor  # float32 [tokens, choices]: the chosen, and the shared expert where it is one
    gates: Tensor | None  # float32 [tokens], of the shared expert
    place: Tensor  # int32 [tokens, choices]: row
    # int32 [rows]: token, -1 for rows that fill up a tile; None: row t of a tile is token t
    source: Tensor | None
    expert_of: Tensor  # int32 [most tiles]
    tiles: Tensor  # int32 [1]
    tile: int

    @property
    def rows(self) -> int:
        """The most that there can be."""
        return len(self.expert_of) * self.tile


def stack(linears: Sequence[TiledLinear]) -> TiledWeight:
    """One weight of all; the linears' own become views of it, each copy being freed as the next is
    made.
    """
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


def unsupported_reason(linears: Sequence[FusedLinear], device: Gpu) -> str | None:
    """None, or why these experts' linears (all gate/up, or all down) cannot be one."""
    scheme = set()
    for linear in linears:
        if not isinstance(linear, TiledLinear) or linear.weight.order is not None:
            return "some expert's format has no kernel for few rows"
        weight = linear.weight
        scheme.add(
            (
                weight.format,
                weight.group,
                weight.dtype,
                weight.scale_fp16,
                weight.activation,
                weight.symmetric,
                weight.bias is None,
            )
        )
        if weight.out_features % 16 or weight.static:
            return (
                "an expert has a scale of its own for the input, or outputs that are no multiple "
                "of 16"
            )
    if len(scheme) > 1:
        return "the experts of a layer have more than one scheme"
    if any(not takes_tile(weight, tile, device) for tile in TILES):
        return (
            f"{weight.in_features} inputs in groups of {weight.group} do not fit into whole stages"
        )
    return None


def joins(shared: FusedLinear, members: Sequence[FusedLinear], device: Gpu) -> bool:
    """Whether the linear of a shared expert can be stacked behind those of the others."""
    if unsupported_reason([*members, shared], device):
        return False
    shapes = {
        (one.weight.in_features, one.weight.out_features, one.weight.interleaved)
        for one in (shared, members[0])
        if isinstance(one, TiledLinear)
    }
    return len(shapes) == 1


def shape_for(
    weight: TiledWeight, rows: int, tile: int, device: Gpu, *, processors: int | None = None
) -> Shape | None:
    """Of gemm.cu over tiles of one expert each."""
    if processors is not None:
        device = dataclasses.replace(device, multi_processor_count=processors)
    for count in (WARPGROUPS.get(tile, 2), 2):
        forced = Forced(tokens=tile, split=WHOLE, warpgroups=count, teams=1, int16_inputs=False)
        if found := gemm_shape_for(Product(weight.matrix, rows), device, forced):
            return found
    return None


def takes_tile(weight: TiledWeight, tile: int, device: Gpu) -> bool:
    """Whether there is a matrix product of so many rows of one expert."""
    if device.has_warpgroups:
        return shape_for(weight, 16, tile, device, processors=1) is not None
    return mma_cut_for(weight, tile, tile, device) is not None


def mma_cut_for(weight: TiledWeight, rows: int, tile: int, device: Gpu) -> gemm_mma.Cut | None:
    """Of gemm_mma.cu over tiles of one expert each."""
    if weight.format.needs_float8 and not device.has_float8:
        return None
    return gemm_mma.plan(weight.matrix, rows, device, tokens=tile, split=gemm_mma.WHOLE)


def tile_rows(pairs: int, experts: int) -> int:
    """Rows of a tile: about what an expert gets, so that few are empty and most weights are read
    once.
    """
    return next((tile for tile in TILES if tile >= pairs / experts * 1.25), TILES[-1])


@dataclass(frozen=True, eq=False)
class GroupedExperts:
    """act(gate) · up and down of every expert, the router before and the weighted sum after them.

    A layer must not follow itself directly: the next `route` of few tokens could begin before
    `combine` has taken `ready` down.
    """

    gate_up: TiledWeight  # stacked
    down: TiledWeight
    router: Tensor  # float32 [experts, hidden], and the shared expert's gate as one row more
    ready: Tensor  # int32 [1]: 0 but between `route` and `combine` of few tokens
    routing: Routing
    # gate/up and down of the expert that sees every token
    shared: tuple[FusedLinear, FusedLinear] | None = None
    bias: Tensor | None = None  # float32 [experts]: of the logits, or of the choice by sigmoids
    joined: bool = False  # the shared expert is stacked behind the others: a choice of one token
    # float32 [logits + 2 · choices], each its own flag and all ones between steps: by which experts
    # and shares of one token go from kernel to kernel
    words: Tensor | None = None

    @classmethod
    def make(
        cls,
        gate_up: Sequence[FusedLinear],
        down: Sequence[FusedLinear],
        *,
        router: Tensor,
        routing: Routing,
        shared_gate: Tensor | None = None,
        shared: tuple[FusedLinear, FusedLinear] | None = None,
        bias: Tensor | None = None,
    ) -> GroupedExperts | str:
        """Stack the experts' weights, or say why not."""
        if router.device.type != "cuda":
            return "no CUDA device"
        device = gpu.of(router.device)
        for linear in shared or ():
            if not isinstance(linear, TiledLinear) or linear.weight.order is not None:
                return "the shared expert's format has no kernel for few rows"
        for part in (gate_up, down):
            if reason := unsupported_reason(part, device):
                return reason
        if any(isinstance(one, TiledLinear) and not one.weight.interleaved for one in gate_up):
            return "the kernels do not know the experts' activation"
        rows = [router] if shared_gate is None else [router, shared_gate.float()]
        parts = [list(gate_up), list(down)]
        joined = shared is not None and all(
            joins(one, part, device) for one, part in zip(shared, parts, strict=True)
        )
        if shared is not None and joined:
            for one, part in zip(shared, parts, strict=True):
                part.append(one)
        first, second = (
            stack([one for one in part if isinstance(one, TiledLinear)]) for part in parts
        )
        ready = torch.zeros(1, dtype=torch.int32, device=router.device)
        all_rows = torch.cat(rows)
        words = empty_words(len(all_rows), routing.chosen + joined, router.device)
        return cls(first, second, all_rows, ready, routing, shared, bias, joined, words)

    @property
    def gated(self) -> bool:
        return len(self.router) > self.routing.experts

    def few(self, tokens: int, device: Gpu) -> bool:
        """Whether experts.cu takes them."""
        most = tuned.of(device).formats[self.down.format.name].expert_rows
        if tokens not in gemv.ROWS or tokens > most:
            return False
        return gemv.fits(self.gate_up.matrix, tokens, device) and gemv.fits(
            self.down.matrix, tokens, device
        )

    @property
    def by_words(self) -> bool:
        """Whether the first linear of one token makes the choice itself."""
        return self._words_plan(gpu.of(self.router.device)) is not None

    def overlaps(self, tokens: int, device: Gpu) -> bool:
        """Whether kernels of such a step may begin early: with 8 tokens CTAs of experts.cu that
        begin early gather on some SMs, which takes longer than the overlap saves.
        """
        return (
            not self.few(tokens, device) or tokens <= tuned.of(device).steps.overlapping_expert_rows
        )

    def project(
        self, x: Tensor, out: Tensor | None = None, *, norm: Norm, lengths: Tensor | None = None
    ) -> Tensor:
        """x + experts(norm(x)), [tokens, hidden]; out may be x. Rows of length 0 are padding."""
        assert lengths is None or len(x) <= TOKENS_AT_ONCE
        norm = norm.folded
        device = gpu.of(x.device)
        out = torch.empty_like(x) if out is None else out
        if len(x) == 1 and (plan := self._words_plan(device)) is not None:
            self._project_by_words(x, out, plan, norm=norm)
            return out
        for part, end in zip(x.split(TOKENS_AT_ONCE), out.split(TOKENS_AT_ONCE), strict=True):
            routed = self.route(part, norm=norm, lengths=lengths)
            shared = None
            if self.shared is not None and not self._joined(routed):
                gate_up, down = self.shared
                gated = gate_up.project(part, norm=norm, activation=self.gate_up.activation)
                shared = down.project(gated)
            elif (plan := self._sum_plan(routed, device)) is not None:
                gated = few_rows(self.gate_up, part, routed, norm=norm)
                sum_rows(self.down, gated, routed, plan, residual=part, out=end)
                continue
            self.combine(self.multiply(part, routed, norm=norm), routed, part, end, shared=shared)
        return out

    def route(self, x: Tensor, *, norm: Norm, lengths: Tensor | None = None) -> Routed:
        """x [tokens, hidden], before the norm; rows whose length is 0 are padding and need no
        expert.
        """
        device = gpu.of(x.device)
        routing = self.routing
        tokens = len(x)
        pairs = tokens * routing.chosen
        by_token = self.few(tokens, device)
        joined = int(self.joined and by_token and tokens == 1)
        choices = routing.chosen + joined
        tile = tokens if by_token else tile_rows(pairs, routing.experts)
        most = min(routing.experts, pairs) + (joined if by_token else pairs // tile)

        def table(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=x.device)

        gates = table(tokens, dtype=torch.float32) if self.gated else None
        source = None if by_token else table(most * tile)
        found = Routed(
            table(tokens, choices, dtype=torch.float32),
            gates,
            table(tokens, choices),
            source,
            table(most),
            self.ready if by_token else table(1),
            tile,
        )
        rows = min(8, 1 << (tokens - 1).bit_length())
        groups = math.ceil(tokens / rows)
        outputs = len(self.router)
        # Few tokens: a CTA on every SM, so that the next kernel finds all alike. Many: two, each
        # with several outputs in turn.
        each = math.ceil(outputs / max(1, 2 * device.processors // groups))
        grid = (device.processors if groups == 1 else math.ceil(outputs / each), groups)
        logits = table(tokens, outputs, dtype=torch.float32)
        chosen = table(tokens, routing.chosen)
        args = (
            x,
            norm.weight,
            self.router,
            logits,
            chosen,
            found.shares,
            gates,
            found.place,
            source,
            found.expert_of,
            found.tiles,
            workspace.current(x.device).bytes("route tickets", 4 * groups + 4),
            lengths,
            self.bias,
            tokens,
            norm.epsilon,
            routing.scale,
        )
        ring = self._ring(x.shape[1], device) if by_token else 2
        # rows of the router, and the norm
        shared = max((4 * ring + 2) * x.shape[1], reserved(device) * by_token)
        kernel = self._kernel("route", found, x, rows, ring if by_token else 0, shared=False)
        kernel.launch(grid, THREADS, args, shared=shared, pdl=True)
        return found

    def _words_plan(self, device: Gpu) -> gemv.Plan | None:
        """How the second linear of one token adds its choices up, where the first one makes the
        choice itself: of many experts, since the last thread block of `route` would take long.
        """
        routing = self.routing
        each = math.ceil(len(self.router) / device.processors)
        if (
            self.words is None
            or not device.has_dependent_launch
            or routing.experts < MANY_EXPERTS
            or routing.chosen > MOST_CHOSEN
            or routing.groups > 1
            or (self.shared is not None and not self.joined)
            or self.down.bias is not None
            or not self.few(1, device)
            or self._ring(self.router.shape[1], device) < each
        ):
            return None
        return sum_plan(self.down.matrix, routing.chosen + self.joined, device)

    def _project_by_words(self, x: Tensor, out: Tensor, plan: gemv.Plan, *, norm: Norm) -> None:
        """route.cu leaves logits alone, experts.cu chooses by them and leaves its choice, and
        experts_sum.cu empties both: words go once from SM to SM, with no counter between.
        """
        assert self.words is not None
        device = gpu.of(x.device)
        outputs = len(self.router)
        choices = self.routing.chosen + self.joined
        logits = self.words[:outputs]
        chosen = self.words[outputs:]
        ring = self._ring(x.shape[1], device)
        own = {"LOGITS_ALONE": 1, "RING": ring}
        nothing = (None,) * 8  # of what `route` leaves besides
        kernel = jit.load("route.cu", defines=self._defines(x, 1, 1, 1) | own).kernel("route")
        shared = max((4 * ring + 2) * x.shape[1], reserved(device))
        given = (x, norm.weight, self.router, logits)
        args = (*given, *nothing, None, self.bias, 1, norm.epsilon, self.routing.scale)
        kernel.launch((device.processors, 1), THREADS, args, shared=shared, pdl=True)
        gated = self._choose_and_multiply(x, logits, chosen, norm=norm)
        sum_words(self.down, gated, self.words, choices, plan, residual=x, out=out)

    def _choose_and_multiply(
        self, x: Tensor, logits: Tensor, chosen: Tensor, *, norm: Norm
    ) -> Tensor:
        """experts.cu, of one token whose experts it finds out itself."""
        weight = self.gate_up
        device = gpu.of(x.device)
        parts = (self.routing.chosen, int(self.joined))  # which share tiles out by themselves
        most = sum(math.ceil(n * weight.matrix.tiles / device.processors) for n in parts)
        linear = gemv.fitting_plan(weight.matrix, 1, device, tiles=most)
        assert linear is not None
        out = weight.empty_result(len(chosen) // 2, x.device)
        defines = gemv.defines(weight, 1, linear, device, norm=True, epilogue=weight.epilogue(None))
        defines |= {"PER_SLOT": 0, "CHOOSES": 1, "JOINED": int(self.joined)}
        defines |= self.routing.defines | {"GATE": int(self.gated)}
        # inputs are there long before the choice
        defines["HELD"] = 0
        if self.bias is not None:
            defines["BIASED"] = 1
        kernel = jit.load("experts.cu", defines=defines).kernel("experts")
        args = (
            weight.weights,
            weight.records,
            weight.channel_scale,
            x,
            norm.weight,
            weight.bias,
            out,
            logits,
            chosen,
            self.bias,
            self.routing.scale,
            norm.epsilon,
        )
        kernel.launch(device.processors, linear.threads, args, shared=linear.shared, pdl=True)
        return out

    def _ring(self, hidden: int, device: Gpu) -> int:
        """Rows of the router that a CTA of few tokens fetches before its inputs are there: all that
        it has, if there is room.
        """
        each = math.ceil(len(self.router) / device.processors)
        return max(2, min(each, (reserved(device) // hidden - 2) // 4))

    def _joined(self, routed: Routed) -> bool:
        return routed.shares.shape[1] > self.routing.chosen

    def _sum_plan(self, routed: Routed, device: Gpu) -> gemv.Plan | None:
        """How the second linear adds up the choices of one token; None: `combine` does."""
        if routed.source is not None or routed.tile > 1 or self.down.bias is not None:
            return None
        return sum_plan(self.down.matrix, routed.shares.shape[1], device)

    def combine(
        self,
        y: Tensor,
        routed: Routed,
        residual: Tensor | None,
        out: Tensor,
        *,
        shared: Tensor | None = None,
    ) -> None:
        """out = residual + each token's experts by their shares (+ the shared one by its gate)."""
        device = gpu.of(y.device)
        count = math.ceil(out.numel() / 512)
        args = (
            y,
            routed.place,
            routed.shares,
            shared,
            routed.gates,
            residual,
            out,
            routed.tiles,
            len(out),
        )
        grid = max(min(count, 16 * device.processors), device.processors)
        own = {} if residual is not None else {"RESIDUAL": 0}
        kernel = self._kernel("combine", routed, out, 1, 0, shared=shared is not None, **own)
        kernel.launch(
            grid, THREADS, args, shared=reserved(device) * (routed.source is None), pdl=True
        )

    def _kernel(
        self,
        name: str,
        routed: Routed,
        x: Tensor,
        rows: int,
        ring: int,
        *,
        shared: bool,
        **own: int,
    ) -> jit.Kernel:
        """`ring`: of a route of few tokens, else 0. `own`: defines of this kernel alone."""
        tile = 16 if name == "combine" else routed.tile  # of which a sum knows nothing
        defines = own | self._defines(x, rows, tile, int(ring > 0))
        if ring > 2:
            defines["RING"] = ring
        if self._joined(routed):
            defines |= {"JOINED": 1, "SHARED": 0}
        elif shared and not self.gated:
            defines["SHARED"] = 1
        return jit.load("route.cu", defines=defines).kernel(name)

    def _defines(self, x: Tensor, rows: int, tile: int, by_token: int) -> dict[str, int]:
        """Of route.cu."""
        biased = {} if self.bias is None else {"BIASED": 1}
        return {
            **self.routing.defines,
            "FP16": int(x.dtype == torch.float16),
            "KDIM": x.shape[1],
            "GATE": int(self.gated),
            "ROWS": rows,
            "TILE": tile,
            "BY_TOKEN": by_token,
            **biased,
        }

    def multiply(self, x: Tensor, routed: Routed, *, norm: Norm | None) -> Tensor:
        """The experts' own answers [rows, hidden], in the places that the route gave them."""
        if routed.source is None:
            gated = few_rows(self.gate_up, x, routed, norm=norm)
            return few_rows(self.down, gated, routed, per_slot=True)
        gated = many_rows(self.gate_up, x, routed, source=routed.source, norm=norm)
        return many_rows(self.down, gated, routed)


def reserved(device: Gpu) -> int:
    """Of an SM, by route and combine of few tokens, so that each has one of their CTAs, as of the
    linears around them.
    """
    return device.shared_least + 2 * KB


def few_rows(
    weight: TiledWeight,
    x: Tensor,
    routed: Routed,
    *,
    norm: Norm | None = None,
    per_slot: bool = False,
) -> Tensor:
    """experts.cu. x [tokens, in] for all experts, or (`per_slot`) [rows, in], each its own."""
    rows = routed.tile
    device = gpu.of(x.device)
    plan = gemv.fitting_plan(weight.matrix, rows, device, tiles=16)
    assert plan is not None
    out = weight.empty_result(routed.rows, x.device)
    defines = gemv.defines(
        weight, rows, plan, device, norm=norm is not None, epilogue=weight.epilogue(None)
    )
    defines |= {"PER_SLOT": int(per_slot)}
    kernel = jit.load("experts.cu", defines=defines).kernel("experts")
    args = (
        weight.weights,
        weight.records,
        weight.channel_scale,
        x,
        norm and norm.weight,
        weight.bias,
        out,
        routed.expert_of,
        routed.tiles,
        norm.epsilon if norm else 0.0,
    )
    kernel.launch(device.processors, plan.threads, args, shared=plan.shared, pdl=True)
    return out


@functools.cache
def sum_plan(matrix: Matrix, choices: int, device: Gpu) -> gemv.Plan | None:
    """Of experts_sum.cu; None where it cannot do it, or would share tiles out less evenly."""
    form = matrix.format
    inner = matrix.in_features
    longest = math.ceil(matrix.tiles / device.processors)
    even = choices * matrix.tiles / device.processors
    if (
        not device.has_dependent_launch
        or not form.grouped
        or form.floats
        or inner % max(64, matrix.group)
        or choices * inner > MOST_INPUTS
        or longest * choices > UNEVEN * math.ceil(even)
    ):
        return None
    numbers = tuned.of(device)
    wanted = gemv.Wanted(
        longest,
        numbers.formats[form.name].gemv_warps,
        stage_bytes=inner // 64 * form.block_bytes,
        slots=max(1, min(longest, numbers.gemv.slots)),
    )
    joined = dataclasses.replace(matrix, in_features=choices * inner)
    found = gemv.plan_beside(joined, 1, wanted, device)
    return found if found and found.stage_blocks * 64 == inner else None


def sum_rows(
    weight: TiledWeight,
    x: Tensor,
    routed: Routed,
    plan: gemv.Plan,
    *,
    residual: Tensor,
    out: Tensor,
) -> None:
    """experts_sum.cu: x [choices, in] of one token → out = residual + the sum by shares."""
    device = gpu.of(x.device)
    inner = weight.in_features
    defines = gemv.defines(weight, 1, plan, device, norm=False, epilogue="residual")
    defines |= {"KDIM": len(x) * inner, "SLOT_BLOCKS": inner // 64}
    kernel = jit.load("experts_sum.cu", defines=defines).kernel("experts_sum")
    args = (
        weight.weights,
        weight.records,
        x,
        routed.shares,
        residual,
        out,
        routed.expert_of,
        routed.tiles,
        workspace.current(x.device).bytes("experts arrived", 4),
    )
    kernel.launch(device.processors, plan.threads, args, shared=plan.shared, pdl=True)


def sum_words(
    weight: TiledWeight,
    x: Tensor,
    words: Tensor,
    choices: int,
    plan: gemv.Plan,
    *,
    residual: Tensor,
    out: Tensor,
) -> None:
    """`sum_rows` where experts and shares are the last of `words`, and the logits the others."""
    device = gpu.of(x.device)
    inner = weight.in_features
    logits = len(words) - 2 * choices
    defines = gemv.defines(weight, 1, plan, device, norm=False, epilogue="residual")
    defines |= {"KDIM": choices * inner, "SLOT_BLOCKS": inner // 64, "CHOOSES": logits}
    kernel = jit.load("experts_sum.cu", defines=defines).kernel("experts_sum")
    arrived = workspace.current(x.device).bytes("experts arrived", 4)
    tables = (words[logits:], residual, out, None, words)
    args = (weight.weights, weight.records, x, *tables, arrived)
    kernel.launch(device.processors, plan.threads, args, shared=plan.shared, pdl=True)


def empty_words(logits: int, choices: int, device: torch.device) -> Tensor:
    return torch.full((logits + 2 * choices,), -1, dtype=torch.int32, device=device).view(
        torch.float32
    )


def many_rows(
    weight: TiledWeight,
    x: Tensor,
    routed: Routed,
    *,
    source: Tensor | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """pack.cu and the product. x [tokens, in] with `source`, or [rows, in] in the route's order."""
    rows = routed.rows
    device = gpu.of(x.device)
    if not device.has_warpgroups:
        cut = mma_cut_for(weight, rows, routed.tile, device)
        assert cut is not None
        route = gemm_mma.ExpertTiles(routed.expert_of, routed.tiles, source)
        return gemm_mma.multiply_experts(weight, x, cut, route, norm=norm)
    shape = shape_for(weight, rows, routed.tile, device)
    assert shape is not None
    packing = gemm.packing_for(
        weight.in_features, rows, norm=norm is not None, quantized=weight.format.quantizes_input
    )
    ends = gemm.Ends(norm is not None, weight.epilogue(None), experts=True)
    pack, product = gemm.kernels(weight, shape, packing, ends)
    packed = torch.empty(gemm.packed_size(weight, rows), dtype=torch.uint8, device=x.device)
    row_scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    out = weight.empty_result(rows, x.device)
    args = (
        x,
        norm and norm.weight,
        packed,
        row_scale,
        rows,
        rows // 8,
        norm.epsilon if norm else 0.0,
        None,
        source,
        routed.tiles,
    )
    pack.launch(rows // packing.rows * packing.parts, 32 * packing.warps, args, pdl=True)
    product.launch(
        shape.grid(device.processors),
        shape.block,
        (
            weight.weights,
            weight.records,
            weight.channel_scale,
            packed,
            row_scale,
            weight.bias,
            None,
            out,
            None,
            None,
            routed.expert_of,
            routed.tiles,
            rows,
            0,
        ),
        shared=shape.shared,
        pdl=True,
    )
    return out
