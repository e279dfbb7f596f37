"""What LoRA adapters add to a linear, each row that of its own adapter:

    y[i] += B[s] · (A[s] · norm(x[i]))       s: the slot of row i's adapter; −1: nothing is added

Adapters lie stacked by slot, ranks filled up with zeros to the largest, and `slots` is data on the
device: one launch serves any mix of adapters and of rows without one, so captured steps need no
capture of their own. Projections that are one linear here (q/k/v, gate/up) have an A each and the
columns of B that belong to them.

One row of tiles is added to by the linear's own kernel (`AdaptedRow`, gemv_delta.cuh), so that a
step has no launch more. Of several rows the result goes into the linear as its residual
(`FusedLinear.project`), before any activation: then no kernel of a format knows of adapters. Few of
them go through delta.cu on a GPU; everything else is two products by torch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flyweight import gpu
from flyweight.kernels import jit
from flyweight.kernels.linear.fused import Norm

FEW_ROWS = 16  # of delta.cu: beyond, products by matrix units are faster than one row after another
THREADS = 256
MOST_VECTORS = 16  # of 8 inputs that a thread of delta.cu holds
MOST_PARTS = 3
MOST_RANK = 64  # of gemv_delta.cuh: one warp does all that is added to a CTA's outputs
MOST_WARPS = 16  # of a thread block that multiplies: each leaves its part of A x
MOST_HELD = 2048  # bytes of B in shared memory, which the ring of weights would have otherwise


class Delta:
    """The adapters of one linear, whose outputs are `sizes` side by side."""

    def __init__(self, a: Tensor, b: Tensor, sizes: Sequence[int], ops: ModuleType):
        self.a = a  # [slots, parts, rank, in]
        self.b = b  # [slots, rank, out], scales included
        self.ends = [0, *itertools.accumulate(sizes)]
        self.ops = ops
        self.numbers = torch.arange(len(a), dtype=torch.int32, device=a.device)
        # the one of the launch before, in a step of one row: whose words this one empties
        self.before: Delta | None = None

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    @functools.cached_property
    def words(self) -> Tensor:
        """Where the warps of one launch leave their parts of A x. All ones: nothing is there, a NaN
        that no arithmetic makes.
        """
        count = self.a.shape[1] * self.a.shape[2] * MOST_WARPS
        empty = torch.full((count,), -1, dtype=torch.int32, device=self.a.device)
        return empty.view(torch.float32)

    def in_the_linear(self, slots: Tensor) -> AdaptedRow | None:
        """What the kernel of one row needs to add this by itself; None where it cannot."""
        sizes = (self.a.shape[2], self.a.shape[3], *self.ends)
        parts = len(self.ends) - 1
        fits = self.a.shape[2] <= MOST_RANK and parts <= MOST_PARTS
        if self.before is None or self.before is self or any(size % 8 for size in sizes):
            return None
        if self.a.device.type != "cuda" or not fits:
            return None
        return AdaptedRow(self, slots)

    def add(
        self,
        x: Tensor,
        slots: Tensor,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """residual + B A norm(x): [..., in] → [..., out], into `out`, which may be `residual`."""
        outputs = self.b.shape[-1]
        if out is None:
            out = x.new_empty(*x.shape[:-1], outputs)
        if self.takes(x):
            self._launch(x, slots, out, norm=norm, residual=residual)
            return out
        if norm is not None:
            x = self.ops.normalize(x, norm)
        y = out.view(-1, outputs)
        if residual is None:
            y.zero_()
        elif residual is not out:
            out.copy_(residual)
        self._add(x.reshape(-1, x.shape[-1]), slots, y)
        return out

    def gate_and_add(
        self,
        gate_up: Tensor,
        slots: Tensor,
        activation: str,
        *,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x = act(gate) · up of [..., 2 · in], and residual + B A x."""
        inputs = self.a.shape[-1]
        x = gate_up[..., :inputs]  # as a shape
        if activation != "silu" or not self.takes(x):
            x = self.ops.gate(gate_up, activation)
            return x, self.add(x, slots, residual=residual, out=out)
        gated = gate_up.new_empty(*gate_up.shape[:-1], inputs)
        if out is None:
            out = gate_up.new_empty(*gate_up.shape[:-1], self.b.shape[-1])
        self._launch(gate_up, slots, out, residual=residual, gated=gated)
        return gated, out

    def takes(self, x: Tensor) -> bool:
        """Whether delta.cu computes it."""
        inputs = x.shape[-1]
        return (
            x.device.type == "cuda"
            and x.dtype in (torch.float16, torch.bfloat16)
            and x.numel() <= FEW_ROWS * inputs
            and inputs <= 8 * THREADS * MOST_VECTORS
            and len(self.ends) - 1 <= MOST_PARTS
            and not any(size % 8 for size in (inputs, self.a.shape[2], *self.ends))
        )

    def _launch(
        self,
        x: Tensor,
        slots: Tensor,
        out: Tensor,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        gated: Tensor | None = None,
    ) -> None:
        _, parts, rank, inputs = self.a.shape
        outputs = self.b.shape[-1]
        rows = x.numel() // x.shape[-1]
        norm = norm and norm.folded
        defines = {
            "FP16": int(x.dtype == torch.float16),
            "INPUTS": inputs,
            "OUTPUTS": outputs,
            "RANK": rank,
            "PARTS": parts,
            "END1": self.ends[1],
            "END2": self.ends[min(2, parts)],
            "NORM": int(norm is not None),
            "GATED": int(gated is not None),
            "RESIDUAL": int(residual is not None),
            "THREADS": THREADS,
        }
        low = torch.empty(rows, parts * rank, dtype=torch.float32, device=x.device)
        module = jit.load("delta.cu", defines=defines)
        weight = norm and norm.weight
        epsilon = norm.epsilon if norm else 0.0
        module.kernel("shrink").launch(
            (parts * rank, rows),
            THREADS,
            (self.a, self.b, x.contiguous(), weight, slots, low, gated, epsilon),
            pdl=True,
        )
        grid = (gpu.of(x.device).processors, rows)
        module.kernel("expand").launch(grid, 32, (self.b, low, slots, residual, out), pdl=True)

    def _add(self, x: Tensor, slots: Tensor, y: Tensor) -> None:
        """By products of all adapters, of which each row keeps its own: nothing is counted on the
        host, and ranks are small beside any weight.
        """
        count, parts, rank, _ = self.a.shape
        low = F.linear(x, self.a.flatten(0, 2)).view(len(x), count, parts, rank)
        others = (slots[:, None] != self.numbers)[..., None, None]
        low = low.masked_fill_(others, 0)
        for part, (begin, end) in enumerate(itertools.pairwise(self.ends)):
            y[:, begin:end].addmm_(low[:, :, part].flatten(1), self.b[..., begin:end].flatten(0, 1))


@dataclass(frozen=True, eq=False)
class AdaptedRow:
    """What gemv_delta.cuh is compiled for and handed."""

    delta: Delta
    slots: Tensor  # int32 [1]

    @property
    def lows(self) -> int:
        return self.delta.a.shape[1] * self.delta.a.shape[2]

    def held_bytes(self, tiles: int) -> int:
        """Of B in shared memory, for all outputs of a thread block; 0: it is read from memory."""
        found = self.delta.a.shape[2] * tiles * 32
        return found if found <= MOST_HELD else 0

    def shared_bytes(self, tiles: int) -> int:
        return 4 * (self.lows + 16 * tiles) + max(16, self.held_bytes(tiles)) + 48

    def splits(self, warps: int, workers: int) -> int:
        """Thread blocks that share a rank, some warps of each; they have one rank each if that is
        possible.
        """
        found = warps
        while found > 1 and found * self.lows > workers:
            found //= 2
        return found

    def defines(self, tiles: int, warps: int, workers: int) -> dict[str, int]:
        """For thread blocks of up to so many tiles, of which so many have some."""
        ends = self.delta.ends
        parts = len(ends) - 1
        return {
            "ADAPTER_RANK": self.delta.a.shape[2],
            "ADAPTER_PARTS": parts,
            "ADAPTER_SPLITS": self.splits(warps, workers),
            "ADAPTER_END1": ends[1],
            "ADAPTER_END2": ends[min(2, parts)],
            "ADAPTER_TILES": tiles,
            "ADAPTER_HELD": int(self.held_bytes(tiles) > 0),
        }

    @property
    def arguments(self) -> tuple[Any, ...]:
        before = self.delta.before
        assert before is not None
        words = before.words
        return (self.delta.a, self.delta.b, self.slots, self.delta.words, words, words.numel())
