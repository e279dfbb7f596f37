"""The contract of a fused linear: all that an executor knows of a weight on a device.

    project    x → act(norm(x) Wᵀ + b) + residual, each part optional, into `out` where one is given
    negotiate  how the linear before hands x over: rows as they are, packed in the order of this
               product, or gate and up that this linear multiplies itself

CUDA tiles (tiled.py), VPTQ (vptq/linear.py) and whatever torch multiplies with (`TorchLinear`)
implement it. What one of them cannot fuse it does one after the other (`plainly`), so every linear
takes every call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flyweight.kernels.linear.prompts import FEW_ROWS


@dataclass(frozen=True, eq=False)
class Norm:
    """x / √(mean x² + ε) · weight, or · (1 + weight)."""

    weight: Tensor
    epsilon: float
    plus_one: bool = False

    @functools.cached_property
    def folded(self) -> Norm:
        """As kernels know it, whose weight is all that is multiplied with."""
        return (
            Norm((self.weight.float() + 1).to(self.weight.dtype), self.epsilon)
            if self.plus_one
            else self
        )


@dataclass(frozen=True, eq=False)
class PackedInput:
    """x of one linear in the order in which its product reads it. The kernel before, compiled with
    `defines`, writes it to `data`, of which 8 · `groups` rows are used; `arguments` are what that
    kernel is handed besides.
    """

    data: Tensor
    rows: int
    groups: int
    defines: dict[str, int] = field(default_factory=dict)
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Handover:
    """How gate/up hands its result to down: into `to`, or as gate and up, whose activation (`late`)
    down applies itself. `apart`: gate/up applies it in its own kernel, though the two are halves of
    its weight. `beside`: this linear, like all kernels of its layer, leaves room for another one on
    every SM (`leaves_room`).
    """

    to: PackedInput | None = None
    late: str | None = None
    apart: str | None = None
    beside: bool = False


@dataclass(frozen=True, eq=False)
class KvPrefetch:
    """Keys and values that decode attention reads after a linear. A kernel that leaves memory idle
    may bring them to L2.
    """

    lengths: Tensor
    tables: Tensor
    keys: Tensor  # [blocks, page, kv heads, head_dim]
    values: Tensor


class FusedLinear:
    """A weight on a device. `kernel` and `why` are what `flyweight info` shows."""

    kernel: str
    why: str
    shape: tuple[int, ...]
    nbytes: int
    ops: ModuleType  # norms and activations of the device, for what is not fused
    adds_bias: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out]"""
        raise NotImplementedError

    def project(
        self,
        x: Tensor | PackedInput,
        out: Tensor | None = None,
        *,
        norm: Norm | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        handover: Handover | None = None,
        prefetch: KvPrefetch | None = None,
    ) -> Tensor:
        """x [..., in] → [..., out]. `activation` is that of a merged gate/up: act(gate) · up. The
        `handover` is the one that this linear and its neighbour have negotiated: of gate/up where
        to write, of down what x is.
        """
        if handover is not None and handover.late:
            raise ValueError(f"{self.kernel} was not asked to multiply gate with up")
        assert isinstance(x, Tensor)
        return plainly(self, x, out, norm=norm, activation=activation, residual=residual)

    def negotiate(self, before: FusedLinear, rows: int, activation: str) -> Handover:
        """How gate/up (`before`), followed by that activation, hands so many rows to
        this linear.
        """
        return Handover()

    def packed_input(self, rows: int, items: int) -> PackedInput | None:
        """Where decode attention of so many work items a row (`HeadShape.items`) writes x for
        this linear; None: rows as they are.
        """
        return None

    def kernel_for(self, rows: int) -> str:
        """The kernel that multiplies so many rows."""
        return self.kernel

    def goes_by_row(self, rows: int) -> bool:
        """Whether so many rows run through the kernels of one, and each costs a little more."""
        return False

    @property
    def looks_up(self) -> bool:
        """Whether `look_up` gives rows of the weight: then an embedding may share it."""
        return False

    def look_up(self, rows: Tensor, out: Tensor) -> None:
        """out [n, in] = the weight's rows, int64 [n]."""
        raise NotImplementedError

    def adapts(self, rows: int, activation: str | None = None) -> bool:
        """Whether `project_row` takes so many rows, and gate and up of that activation."""
        return False

    def gates_apart(self, rows: int, activation: str) -> bool:
        """Whether `project_row` ends with act(gate) · up, of which this weight holds the halves."""
        return False

    def project_row(
        self,
        x: Tensor,
        out: Tensor | None = None,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        gated: str | None = None,
        apart: str | None = None,
        adapted: Any = None,
    ) -> Tensor:
        """`project` of one row, which has an adapter (`delta.AdaptedRow`), or is gate and up that
        the activation `gated` makes x of, or ends with the activation `apart` of gate and up.
        """
        raise NotImplementedError

    def narrow_prompts(self, kind: str) -> bool:
        """From now on many rows are multiplied in 8 bits (linear/prompts.py), where this linear can
        do so; whether it can.
        """
        return False

    def leaves_room(
        self,
        rows: int,
        *,
        norm: bool = False,
        activation: str | None = None,
        residual: bool = False,
    ) -> bool:
        """Whether this linear has a kernel beside which another one fits on every SM, which pays
        where that holds for all kernels of a layer: one that needs an SM for itself among them
        would undo it. Where an SM is free early, two CTAs of the next kernel gather there and wait
        for each other.
        """
        return False

    def fetch_early(self) -> None:
        """From now on one row's weights are asked for at once, as memory has nothing else to do."""

    @property
    def prompt_bytes(self) -> int:
        """What `keep_prompts` would take."""
        return 0

    def keep_prompts(self) -> None:
        """Hold the 8-bit codes of `narrow_prompts`, instead of writing them for each call."""

    @property
    def segments(self) -> Sequence[FusedLinear]:
        """What runs one by one: several only where projections with one input do not agree in
        scheme.
        """
        return [self]


def plainly(
    linear: FusedLinear,
    x: Tensor,
    out: Tensor | None = None,
    *,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    call: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """One after the other: what comes before, the product (`call`, or the linear's own), what comes
    after.
    """
    ops = linear.ops
    if norm is not None:
        x = ops.normalize(x, norm)
    y = (call or linear)(x)
    if activation is not None:
        y = ops.gate(y, activation)
    if residual is not None:
        return torch.add(y, residual, out=out)
    return y if out is None else out.copy_(y)


class TorchLinear(FusedLinear):
    """Any function that multiplies; nothing is fused."""

    def __init__(
        self,
        run: Callable[[Tensor], Tensor],
        *,
        ops: ModuleType,
        kernel: str = "torch.linear",
        why: str = "",
        shape: tuple[int, ...] = (),
        nbytes: int = 0,
        in_eight_bits: Callable[[str], Callable[[Tensor], Tensor]] | None = None,
    ) -> None:
        """`in_eight_bits`: the same product of many rows, in the type of prompts that is named."""
        self.run = run
        self.run_many: Callable[[Tensor], Tensor] | None = None
        self.in_eight_bits = in_eight_bits
        self.ops = ops
        self.kernel = kernel
        self.why = why
        self.shape = shape
        self.nbytes = nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if self.run_many is not None and x.shape[:-1].numel() > FEW_ROWS:
            return self.run_many(x)
        return self.run(x)

    def narrow_prompts(self, kind: str) -> bool:
        if self.in_eight_bits is None:
            return False
        self.run_many = self.in_eight_bits(kind)
        return True


class Segments(FusedLinear):
    """Projections with one input that no kernel takes as one weight: run one by one, their results
    side by side.
    """

    def __init__(self, parts: Sequence[FusedLinear]) -> None:
        self.parts = list(parts)
        self.ops = parts[0].ops
        self.kernel = " + ".join(dict.fromkeys(part.kernel for part in parts))
        self.why = "; ".join(dict.fromkeys(part.why for part in parts))
        self.shape = (sum(part.shape[-2] for part in parts), parts[0].shape[-1])
        self.nbytes = sum(part.nbytes for part in parts)

    @property
    def segments(self) -> Sequence[FusedLinear]:
        return self.parts

    def narrow_prompts(self, kind: str) -> bool:
        taken = [part.narrow_prompts(kind) for part in self.parts]
        return any(taken)

    @property
    def prompt_bytes(self) -> int:
        return sum(part.prompt_bytes for part in self.parts)

    def keep_prompts(self) -> None:
        for part in self.parts:
            part.keep_prompts()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)
