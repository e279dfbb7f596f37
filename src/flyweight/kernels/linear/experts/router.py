"""The router of a layer: host side of cuda/route.cu, which scores experts, chooses, gives every
choice its place among the rows, and at the end adds up what the experts answered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.gpu import Gpu
from flyweight.kernels import jit, workspace
from flyweight.kernels.linear.experts.routing import THREADS, Routed, Routing, reserved, tile_rows
from flyweight.kernels.linear.fused import Norm


@dataclass(frozen=True, eq=False)
class DeviceRouter:
    """A layer must not follow itself directly: the next `route` of few tokens could begin before
    `combine` has taken `ready` down.
    """

    weight: Tensor  # float32 [experts, hidden], and the shared expert's gate as one row more
    ready: Tensor  # int32 [1]: 0 but between `route` and `combine` of few tokens
    routing: Routing
    bias: Tensor | None = None  # float32 [experts]: of the logits, or of the choice by sigmoids
    joined: int = 0  # the shared expert is stacked behind the others: so many choices of one token

    @property
    def gated(self) -> bool:
        return len(self.weight) > self.routing.experts

    @property
    def choices(self) -> int:
        """Of one token."""
        return self.routing.chosen + self.joined

    def joins(self, routed: Routed) -> bool:
        """Whether the shared expert is one of these choices."""
        return routed.shares.shape[1] > self.routing.chosen

    def parts(self, routed: Routed) -> dict[str, int]:
        """What experts.cu is told of a shared expert that is several of these choices."""
        if self.joined < 2 or not self.joins(routed):
            return {}
        return {
            "JOINED": self.joined,
            "EXPERTS": self.routing.experts,
            "CHOSEN": self.routing.chosen,
        }

    def route(
        self, x: Tensor, *, norm: Norm, by_token: bool, lengths: Tensor | None = None
    ) -> Routed:
        """x [tokens, hidden], before the norm; rows whose length is 0 are padding and need no
        expert. `by_token`: row t of a tile is token t.
        """
        device = gpu.of(x.device)
        tokens = len(x)
        found = self._empty_tables(x, by_token=by_token)
        rows = min(8, 1 << (tokens - 1).bit_length())
        groups = math.ceil(tokens / rows)
        outputs = len(self.weight)
        # Few tokens: a CTA on every SM, so that the next kernel finds all alike. Many: two, each
        # with several outputs in turn.
        each = math.ceil(outputs / max(1, 2 * device.processors // groups))
        grid = (device.processors if groups == 1 else math.ceil(outputs / each), groups)
        args = (
            x,
            norm.weight,
            self.weight,
            torch.empty(tokens, outputs, dtype=torch.float32, device=x.device),  # logits
            torch.empty(tokens, self.routing.chosen, dtype=torch.int32, device=x.device),
            found.shares,
            found.gates,
            found.place,
            found.source,
            found.expert_of,
            found.tiles,
            workspace.current(x.device).bytes("route tickets", 4 * groups + 4),
            lengths,
            self.bias,
            tokens,
            norm.epsilon,
            self.routing.scale,
        )
        ring = self.ring(x.shape[1], device) if by_token else 2
        # rows of the router, and the norm
        shared = max((4 * ring + 2) * x.shape[1], reserved(device) * by_token)
        kernel = self.kernel("route", found, x, rows, ring if by_token else 0, shared=False)
        kernel.launch(grid, THREADS, args, shared=shared, pdl=True)
        return found

    def _empty_tables(self, x: Tensor, *, by_token: bool) -> Routed:
        tokens = len(x)
        routing = self.routing
        pairs = tokens * routing.chosen
        joined = self.joined if by_token and tokens == 1 else 0
        choices = routing.chosen + joined
        tile = tokens if by_token else tile_rows(pairs, routing.experts)
        most = min(routing.experts, pairs) + (joined if by_token else pairs // tile)

        def table(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=x.device)

        return Routed(
            shares=table(tokens, choices, dtype=torch.float32),
            gates=table(tokens, dtype=torch.float32) if self.gated else None,
            place=table(tokens, choices),
            source=None if by_token else table(most * tile),
            expert_of=table(most),
            tiles=self.ready if by_token else table(1),
            tile=tile,
        )

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
        kernel = self.kernel("combine", routed, out, 1, 0, shared=shared is not None, **own)
        kernel.launch(
            grid, THREADS, args, shared=reserved(device) * (routed.source is None), pdl=True
        )

    def ring(self, hidden: int, device: Gpu) -> int:
        """Rows of the router that a CTA of few tokens fetches before its inputs are there: all that
        it has, if there is room.
        """
        each = math.ceil(len(self.weight) / device.processors)
        return max(2, min(each, (reserved(device) // hidden - 2) // 4))

    def kernel(
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
        defines = own | self.defines(x, rows, tile, int(ring > 0))
        if ring > 2:
            defines["RING"] = ring
        if self.joins(routed):
            defines |= {"JOINED": self.joined, "SHARED": 0}
        elif shared and not self.gated:
            defines["SHARED"] = 1
        return jit.load("route.cu", defines=defines).kernel(name)

    def defines(self, x: Tensor, rows: int, tile: int, by_token: int) -> dict[str, int]:
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
