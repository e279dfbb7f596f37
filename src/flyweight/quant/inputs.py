"""Inputs of every group of linears, for searches that need them and not just their moments."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from flyweight.models.plan import Group


class GroupInputs:
    """The first tokens in whole sequences, and one in `every` of all tokens (0: none)."""

    def __init__(self, tokens: int, *, every: int) -> None:
        self.tokens = tokens
        self.every = every
        self.kept: defaultdict[str, list[Tensor]] = defaultdict(list)
        self.some: defaultdict[str, list[Tensor]] = defaultdict(list)

    def keep(self, group: Group, x: Tensor) -> None:
        """x [sequences, tokens, hidden]"""
        have = sum(part.shape[0] * part.shape[1] for part in self.kept[group.name])
        rows = min(x.shape[0], -(-(self.tokens - have) // x.shape[1]))
        if have < self.tokens:
            self.kept[group.name].append(x[:rows].clone())
        if self.every:
            self.some[group.name].append(x.flatten(0, 1)[:: self.every].clone())

    def batches(self, group: Group) -> list[Tensor]:
        return self.kept[group.name]

    def spread(self, group: Group) -> Tensor:
        return torch.cat(self.some[group.name]).float()

    def scale(self, group: Group, scales: Tensor) -> None:
        for parts in (self.kept[group.name], self.some[group.name]):
            parts[:] = [(part.float() / scales).to(part.dtype) for part in parts]
