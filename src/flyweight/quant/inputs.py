"""Inputs of every group of linears, for searches that need them and not just their moments."""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor

from flyweight.models.plan import Group


class GroupInputs:
    """The first `tokens` tokens, in whole sequences."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.kept: defaultdict[str, list[Tensor]] = defaultdict(list)

    def keep(self, group: Group, x: Tensor) -> None:
        """x [sequences, tokens, hidden]"""
        have = sum(part.shape[0] * part.shape[1] for part in self.kept[group.name])
        rows = min(x.shape[0], -(-(self.tokens - have) // x.shape[1]))
        if have < self.tokens:
            self.kept[group.name].append(x[:rows].clone())

    def batches(self, group: Group) -> list[Tensor]:
        return self.kept[group.name]

    def scale(self, group: Group, scales: Tensor) -> None:
        parts = self.kept[group.name]
        parts[:] = [(part.float() / scales).to(part.dtype) for part in parts]
