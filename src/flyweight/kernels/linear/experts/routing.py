"""How a token chooses its experts, and the places that its rows get."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flyweight.gpu import KB, Gpu

TILES = (16, 32, 64, 128, 256)  # rows
THREADS = 256  # of a CTA of route.cu


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


def tile_rows(pairs: int, experts: int) -> int:
    """Rows of a tile: about what an expert gets, so that few are empty and most weights are read
    once.
    """
    return next((tile for tile in TILES if tile >= pairs / experts * 1.25), TILES[-1])


def reserved(device: Gpu) -> int:
    """Of an SM, by route and combine of few tokens, so that each has one of their CTAs, as of the
    linears around them.
    """
    return device.shared_least + 2 * KB
