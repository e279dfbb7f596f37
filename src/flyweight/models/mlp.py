"""down(act(gate x) · up x), with the norm before and the residual after it."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from flyweight.kernels.linear.fused import Handover, Norm
from flyweight.models.buffers import Buffers
from flyweight.models.layers import Linear
from flyweight.models.plan import Group, MlpPlan


class GatedMlp:
    def __init__(self, plan: MlpPlan, linears: dict[str, Linear]):
        self.plan = plan
        self.gate_up = linears[plan.gate_up.name]
        self.down = linears[plan.down.name]

    @property
    def first_group(self) -> Group | None:
        return self.plan.gate_up

    @property
    def uncaptured_reason(self) -> str | None:
        """None: decode steps with it can be captured."""
        return None

    def use_ops(self, ops: ModuleType) -> None:
        """It has none but those of its linears."""

    def overlaps(self, rows: int) -> bool:
        """Whether the kernels of such a step may begin before those in front of them have ended."""
        return True

    def leaves_room(self, rows: int) -> bool:
        """Whether another kernel fits beside each of its own (`FusedLinear.leaves_room`)."""
        gates = self.gate_up.leaves_room(rows, norm=True, activation=self.plan.activation)
        return gates and self.down.leaves_room(rows, residual=True)

    def project(
        self,
        hidden: Tensor,
        out: Tensor | None = None,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        buffers: Buffers | None = None,
        lengths: Tensor | None = None,
        adapters: Tensor | None = None,
        beside: bool = False,
    ) -> Tensor:
        """residual + mlp(norm(hidden)). `buffers`: where what lies between the two linears goes;
        `beside`: all kernels of the layer leave each other room.
        """
        rows = hidden.numel() // hidden.shape[-1]
        adapted = adapters is not None
        activation = self.plan.activation
        handover = (
            Handover(beside=True)
            if beside
            else self.down.negotiate(self.gate_up, rows, activation, adapted=adapted)
        )
        between = None
        gates_later = self.gate_up.delta is None or (handover.late or handover.apart) is not None
        if buffers is not None and handover.to is None and gates_later:
            width = self.plan.down.in_features
            between = buffers.take(
                "gate and up" if handover.late else "gated",
                2 * width if handover.late else width,
                rows,
            )
        gated = self.gate_up.project(
            hidden,
            between,
            norm=norm,
            activation=self.plan.activation,
            handover=handover,
            adapters=adapters,
        )
        return self.down.project(
            handover.to or gated, out, residual=residual, handover=handover, adapters=adapters
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self.project(x)
