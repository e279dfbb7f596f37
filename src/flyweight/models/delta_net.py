"""Layers with a state in the place of keys and values: what loads them, and how prompts run them.

Their linears are groups like any others (`LayerPlan.qkv`, `LayerPlan.o`), so quantization and
formats see nothing new. The arithmetic is in `kernels/gated_delta`.
"""

from __future__ import annotations

import torch

from flyweight.kernels.gated_delta.shape import DeltaWeights
from flyweight.models.layers import Weights, load_tensor
from flyweight.models.plan import DeltaPlan, LayerPlan


def load_delta(
    weights: Weights, layer: LayerPlan, plan: DeltaPlan, device: torch.device | str
) -> DeltaWeights:
    """All in float32: they are few, and the state is."""
    conv, decay, step_bias, norm = (
        load_tensor(weights, layer.prefix + name, shape, device=device, dtype=torch.float32)
        for name, shape in plan.tensors.items()
    )
    return DeltaWeights(
        plan.shape,
        conv=conv[:, 0].t().contiguous(),
        decay=-decay.exp(),
        step_bias=step_bias,
        norm=norm + 1 if plan.norm.plus_one else norm,
        epsilon=layer.epsilon,
    )
