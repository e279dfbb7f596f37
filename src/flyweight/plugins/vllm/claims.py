"""Which folders our own reader reads inside vLLM, and which are vLLM's."""

from __future__ import annotations

from typing import Any

NAME = "flyweight"
OURS = ("vptq",)  # quant_methods that vLLM does not know


def claims(settings: dict[str, Any], asked: str | None) -> bool:
    """`settings`: the folder's quantization_config; `asked`: --quantization of the user.

    vLLM runs the parts of a merged projection (qkv, gate/up) in one scheme, and so all experts of
    a layer. Integers in several groups of schemes, as mixed recipes write them, are therefore read
    here.
    """
    if asked is not None:
        return asked == NAME
    method = str(settings.get("quant_method", "")).lower()
    if method in OURS:
        return True
    groups = settings.get("config_groups")
    if method != "compressed-tensors" or not isinstance(groups, dict) or len(groups) < 2:
        return False
    return all(_plain_integers(group) for group in groups.values())


def _plain_integers(group: Any) -> bool:
    """Integer weights without rounded activations: kinds that our reader and kernels know."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or group.get("input_activations"):
        return False
    return weights.get("type") == "int" and 2 <= int(weights.get("num_bits") or 0) <= 8
