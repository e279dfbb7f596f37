"""Experts of tokens that somebody else has sent to them: another engine's router has chosen.

    out[t] = Σ over j of share[t, j] · down_e(act(gate_e x[t]) · up_e x[t]),  e = chosen[t, j]

`place_chosen` (cuda/route.cu) makes of the choice the tables by which experts.cu and gemm.cu find
their rows; products and sum are those of `GroupedExperts`. x comes normed, nothing is added, and an
expert below 0 is another GPU's: its share counts nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.kernels.linear.experts.grouped import TOKENS_AT_ONCE, GroupedExperts
from flyweight.kernels.linear.experts.routing import THREADS, Routed, Routing, tile_rows
from flyweight.kernels.linear.fused import FusedLinear
from flyweight.kernels.linear.tiled import TiledLinear


@dataclass(frozen=True, eq=False)
class ChosenExperts(GroupedExperts):
    """act(gate) · up and down of every expert, and the weighted sum after them."""

    @classmethod
    def of(
        cls, gate_up: Sequence[FusedLinear], down: Sequence[FusedLinear], *, chosen: int
    ) -> ChosenExperts | str:
        """Stack the experts' weights, or say why not. `chosen`: experts of a token."""
        first = gate_up[0]
        if not isinstance(first, TiledLinear):
            return "the experts' format has no kernel that takes them all as one"
        routing = Routing(len(down), chosen, normalize=False)
        nobody = torch.empty(0, first.shape[-1], device=first.weight.weights.device)
        found = cls.make(gate_up, down, router=nobody, routing=routing)
        assert isinstance(found, ChosenExperts | str)
        return found

    def __call__(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """x [tokens, hidden], shares (float32) and chosen (int32) [tokens, choices]."""
        out = torch.empty_like(x)
        parts = (one.split(TOKENS_AT_ONCE) for one in (x, shares, chosen, out))
        for rows, share, choice, end in zip(*parts, strict=True):
            routed = self.place(rows, share, choice)
            self.combine(self.multiply(rows, routed, norm=None), routed, None, end)
        return out

    def place(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Routed:
        """Not before the kernels in front have ended: the sum before might still be at this layer's
        `ready`.
        """
        device = gpu.of(x.device)
        tokens = len(x)
        routing = self.router.routing
        pairs = tokens * routing.chosen
        few = self.few(tokens, device)
        tile = tokens if few else tile_rows(pairs, routing.experts)
        most = min(routing.experts, pairs) + (0 if few else pairs // tile)

        def table(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=x.device)

        found = Routed(
            torch.empty(shares.shape, dtype=torch.float32, device=x.device),
            None,
            table(*chosen.shape),
            None if few else table(most * tile),
            table(most),
            self.router.ready if few else table(1),
            tile,
        )
        args = (
            chosen,
            shares,
            found.shares,
            found.place,
            found.source,
            found.expert_of,
            found.tiles,
            tokens,
        )
        kernel = self.router.kernel("place_chosen", found, x, 1, 2 * few, shared=False)
        kernel.launch(1, THREADS, args, pdl=False)
        return found
