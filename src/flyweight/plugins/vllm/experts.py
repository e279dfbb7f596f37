"""Routed experts of formats that vLLM cannot read, as one method of vLLM's.

vLLM's router chooses; `apply` is handed the choice and returns this rank's part of the weighted
sum, which vLLM adds up over the ranks. With tensor parallelism a rank has some outputs of every
expert's gate and up and the same inputs of its down; with expert parallelism it has some experts
whole. As for linears (formats.py) vLLM's loader fills nothing: our own reader does, when it is
done.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder

from flyweight.checkpoint.reader import Checkpoint
from flyweight.errors import UnsupportedError
from flyweight.plugins import experts
from flyweight.plugins.experts import Expert
from flyweight.plugins.layer import KEY
from flyweight.plugins.shards import inputs_of, outputs_of
from flyweight.plugins.vllm.unfilled import add_whole_name

ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_tanh"}  # vLLM's name → ours


def unsupported_reason(layer: Any, checkpoint: Checkpoint, prefix: str) -> str | None:
    """None, or what of these experts our kernels do not know."""
    activation = str(getattr(layer.activation, "value", layer.activation))
    if activation not in ACTIVATIONS:
        return f"the experts' activation {activation} (known: {', '.join(ACTIVATIONS)})"
    if getattr(layer, "swiglu_limit", None) is not None:
        return "an activation with a limit"
    if layer.apply_router_weight_on_input:
        return "shares that are multiplied with the experts' inputs"
    inside = (name for name in checkpoint.names() if name.startswith(f"{prefix}."))
    if any(name.endswith((".bias", "_proj_bias")) for name in inside):
        return "experts with biases"
    return None


class FlyweightExpertsMethod(FusedMoEMethodBase):
    """The experts `prefix`.0, `prefix`.1, … of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, layer: Any) -> None:
        super().__init__(layer.moe_config)
        reason = unsupported_reason(layer, checkpoint, prefix)
        if reason is not None:
            raise UnsupportedError(f"{prefix}: {reason}: Flyweight's own engine may run it")
        self.checkpoint = checkpoint
        self.prefix = prefix

    @property
    def mk_can_overlap_shared_experts(self) -> bool:
        """`apply` runs the shared expert itself, behind the others. vLLM would put it on a stream
        of its own, where it may be ours, too: two of our kernels that wait for their own thread
        blocks must not be on a GPU at the same time.
        """
        return True

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Of vLLM's own kernels."""
        return None

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        self.width = intermediate_size_per_partition
        self.dtype = params_dtype
        self.names = (
            layer.ckpt_gate_proj_name,
            layer.ckpt_up_proj_name,
            layer.ckpt_down_proj_name,
        )
        for name in self._parameters():
            add_whole_name(layer, name)
        self.device = torch.empty(0).device  # of the context that vLLM creates parameters in

    def _parameters(self) -> list[str]:
        """What vLLM's loader makes of the names in the files: `w13_` and what follows gate or up,
        `w2_` and what follows down.
        """
        gate, up, down = self.names
        begins = {gate: "w13_", up: "w13_", down: "w2_"}
        found = {"w13_weight": None, "w2_weight": None}  # of experts in one tensor
        for name in self.checkpoint.names():
            if not name.startswith(f"{self.prefix}."):
                continue
            _, module, *rest = name.removeprefix(f"{self.prefix}.").split(".")
            if module in begins and rest:
                found[begins[module] + ".".join(rest)] = None
        return list(found)

    def process_weights_after_loading(self, layer: Any) -> None:
        if hasattr(layer, KEY):
            return
        owned = experts.prepare(
            self._members(layer),
            activation=ACTIVATIONS[str(getattr(layer.activation, "value", layer.activation))],
            chosen=layer.top_k,
            dtype=self.dtype,
        )
        key = experts.hold(owned, self.device, owner=layer)
        layer.register_parameter(KEY, torch.nn.Parameter(key, requires_grad=False))

    def _members(self, layer: Any) -> Iterator[Expert]:
        """This rank's experts, or its part of each, in the order of vLLM's numbers."""
        rank = layer.moe_config.tp_rank
        ranks = layer.moe_config.tp_size
        places = layer.expert_map
        if places is None:
            numbers = list(range(layer.global_num_experts))
        else:
            here = [(place, number) for number, place in enumerate(places.tolist()) if place >= 0]
            numbers = [number for _, number in sorted(here)]
        for number in numbers:
            gate, up, down = (f"{self.prefix}.{number}.{name}" for name in self.names)
            parts = (
                outputs_of(self.checkpoint.linear(gate), rank, ranks, where=gate),
                outputs_of(self.checkpoint.linear(up), rank, ranks, where=up),
                inputs_of(self.checkpoint.linear(down), rank, ranks, where=down),
            )
            if parts[0].matrix_shape[0] != self.width:
                raise UnsupportedError(
                    f"{gate} has {parts[0].matrix_shape[0]} outputs for this rank, and vLLM asks "
                    f"for {self.width}"
                )
            gate_part, up_part, down_part = (part.to(self.device) for part in parts)
            yield gate_part, up_part, down_part

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        chosen = topk_ids
        if layer.expert_map is not None:
            chosen = layer.expert_map[topk_ids.long()]
        out = experts.experts(x, getattr(layer, KEY), topk_weights, chosen)
        if shared_experts is not None:
            shared_experts(shared_experts_input, SharedExpertsOrder.MK_INTERNAL_OVERLAPPED)
        return out
