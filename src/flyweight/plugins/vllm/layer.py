"""What our kernels and our formats both do to a layer of vLLM. Needs no vLLM."""

from __future__ import annotations

import torch
from torch import Tensor

KEY = "flyweight_key"  # the parameter by which the op finds a layer's linear


def folded_bias(layer: torch.nn.Module) -> Tensor | None:
    """The bias that every call of this layer adds: of layers that are cut by inputs, one rank adds
    it, after the others' sums.
    """
    if getattr(layer, "skip_bias_add", False) or hasattr(layer, "input_is_parallel"):
        return None
    bias = getattr(layer, "bias", None)
    return bias.data if isinstance(bias, Tensor) else None
