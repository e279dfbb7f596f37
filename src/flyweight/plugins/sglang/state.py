"""Whether SGLang will find and take the plug-in, told without importing SGLang."""

from __future__ import annotations

import os

from flyweight.plugins.sglang import SETTING, unsupported_version
from flyweight.plugins.state import State, installed_version, unseen

GROUP = "sglang.srt.plugins"
PACKAGES = ("sglang",)


def state() -> State:
    version = installed_version(PACKAGES)
    if version is None:
        return State(False, "SGLang is not installed")
    reason = unsupported_version(version) or _off() or unseen("SGLang", GROUP)
    if reason is not None:
        return State(False, reason)
    return State(True, f"active in SGLang {version}")


def _off() -> str | None:
    """What a user has set against it."""
    setting = os.environ.get(SETTING) or "on"
    if setting == "off":
        return f"turned off by {SETTING}"
    if setting != "on":
        return f"nothing is registered: {SETTING}={setting} is none of on, off"
    return None
