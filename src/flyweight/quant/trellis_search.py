"""The states of a trellis (tensors/trellis.py) whose values are nearest to given ones, around each
circle.

Viterbi's algorithm from the last step to the first: between two steps there is one least cost for
each value of what they share, the upper bits of one state and the lower ones of the next. A circle
is closed by two such ways. The first goes over the steps around its seam and is free at both ends;
the second keeps what the first shares at the seam. `trellis_search.cu` does the same on a GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight.tensors.trellis import SPREAD, STATE_BITS, STEP, hashed

REACH = 15  # steps before and behind the seam that decide on it: 1 % less error than 8
LEAST = 1e-3  # that an input counts, by the mean: halves hold it
AT_ONCE = 1 << 23  # costs that torch holds at a time


@dataclass(frozen=True)
class Shape:
    """Bits of a state, and those of them that the state before has not."""

    state: int
    fresh: int

    @classmethod
    def of(cls, bits: int) -> Shape:
        return cls(STATE_BITS[bits], STEP * bits)

    @property
    def overlaps(self) -> int:
        return 1 << self.state - self.fresh


def search(targets: Tensor, weights: Tensor, shape: Shape) -> Tensor:
    """States int64 [circles, steps] for the least Σ weights · (targets − values)²; targets
    [circles, steps, 4] in units of the values, weights [steps, 4].
    """
    weights = weights.clamp(min=LEAST).half().contiguous()
    pulls = (targets * weights * (-2 / SPREAD)).half().contiguous()
    if targets.is_cuda:
        from flyweight.kernels import trellis

        values = table(shape.state, pulls.device)
        return trellis.search(values, pulls, weights, fresh=shape.fresh, reach=REACH)
    parts = pulls.split(max(1, AT_ONCE >> shape.state))
    return torch.cat([Ways(part, weights, shape).states() for part in parts])


class Ways:
    """Of some circles, in torch."""

    def __init__(self, pulls: Tensor, weights: Tensor, shape: Shape) -> None:
        """Float16, as the kernel takes them: both find ways for the same numbers."""
        self.pulls = pulls.float()
        self.weights = weights.float()
        self.shape = shape
        self.values = table(shape.state, pulls.device).float()

    def states(self) -> Tensor:
        steps = self.pulls.shape[1]
        reach = min(REACH, steps - 1)
        around = [(n - reach) % steps for n in range(2 * reach)]
        free = torch.zeros(len(self.pulls), self.shape.overlaps, device=self.pulls.device)
        least = self.back(around, free)
        first = self.forth(around[:reach], least, least[0].argmin(1))
        seam = first[:, -1] >> self.shape.fresh
        closed = torch.full_like(free, float("inf")).scatter_(1, seam[:, None], 0)
        return self.forth(range(steps), self.back(range(steps), closed), seam)

    def costs(self, step: int, behind: Tensor) -> Tensor:
        """[circles, branches, overlaps]: of each state with all that follows it at best."""
        own = self.values.square() @ self.weights[step]
        costs = torch.addmm(own, self.pulls[:, step], self.values.T)
        costs.view(len(costs), self.shape.overlaps, -1).add_(behind[..., None])
        return costs.view(len(costs), -1, self.shape.overlaps)

    def back(self, steps: range | list[int], end: Tensor) -> list[Tensor]:
        """The least costs before each step, and `end`."""
        least = [end]
        for step in reversed(steps):
            least.append(self.costs(step, least[-1]).amin(1))
        return least[::-1]

    def forth(self, steps: range | list[int], least: list[Tensor], shared: Tensor) -> Tensor:
        """The states [circles, steps] from the first step on, which shares `shared`."""
        circles = torch.arange(len(shared), device=shared.device)
        found = []
        for step, behind in zip(steps, least[1:], strict=False):
            branch = self.costs(step, behind)[circles, :, shared].argmin(1)
            found.append(branch * self.shape.overlaps + shared)
            shared = found[-1] >> self.shape.fresh
        return torch.stack(found, 1)


@functools.cache
def table(state_bits: int, device: torch.device) -> Tensor:
    """The values of all states by SPREAD, float16 [states, 4], which holds them exactly."""
    return (hashed(torch.arange(1 << state_bits, device=device)) / SPREAD).half().contiguous()
