"""Flyweight inside SGLang: our kernels for checkpoints that SGLang reads.

SGLang calls `register` in each of its processes (entry point `sglang.srt.plugins`). It has no table
of kernels; what it has is hooks around functions (`HookRegistry`). A linear of it belongs to a
`scheme`, which prepares the loaded weight and multiplies with it: both methods are wrapped, and a
layer that we do not take goes through SGLang's own as before. FLYWEIGHT_SGLANG=off registers
nothing, and so does a version whose inner names have not been read.
"""

from __future__ import annotations

import logging
import os
from typing import Any

SETTING = "FLYWEIGHT_SGLANG"
VERSIONS = ("0.5.23",)
_SCHEMES = "sglang.srt.layers.quantization"
_COMPRESSED = f"{_SCHEMES}.compressed_tensors.schemes"
TARGETS = {  # class of SGLang → how its loaded parameters are read (`linears.READERS`)
    f"{_SCHEMES}.awq.schemes.awq_linear.AWQLinearScheme": "awq",
    f"{_SCHEMES}.awq.schemes.awq_marlin.AWQMarlinLinearScheme": "awq",
    f"{_SCHEMES}.gptq.schemes.gptq_marlin.GPTQMarlinLinearScheme": "gptq",
    f"{_COMPRESSED}.compressed_tensors_wNa16.CompressedTensorsWNA16": "wna16",
    f"{_COMPRESSED}.compressed_tensors_w8a8_int8.CompressedTensorsW8A8Int8": "w8a8",
}
logger = logging.getLogger("sglang.flyweight")
_registered: set[Any] = set()  # registries that have our hooks: a second call must not wrap twice


def unsupported_version(version: str) -> str | None:
    """None, or the line that a user of another SGLang gets."""
    if any(version == known or version.startswith(f"{known}.") for known in VERSIONS):
        return None
    return (
        f"Flyweight's plug-in is made for SGLang {' and '.join(VERSIONS)}, and this is {version}: "
        "nothing is registered, SGLang runs with its own kernels"
    )


def register() -> list[str]:
    """What SGLang calls; the classes that have our hooks now."""
    import sglang

    reason = unsupported_version(str(getattr(sglang, "__version__", "unknown")))
    if reason is not None:
        logger.warning(reason)
        return []
    setting = os.environ.get(SETTING, "on")
    if setting not in ("on", "off", ""):
        logger.warning("%s=%s is none of on, off: nothing is registered", SETTING, setting)
        return []
    if setting == "off":
        return []
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from flyweight.plugins.sglang import linears

    if HookRegistry not in _registered:
        _registered.add(HookRegistry)
        for target, kind in TARGETS.items():
            prepare = linears.preparing(linears.READERS[kind])
            HookRegistry.register(
                f"{target}.process_weights_after_loading", prepare, HookType.AROUND
            )
            HookRegistry.register(f"{target}.apply_weights", linears.apply, HookType.AROUND)
    return list(TARGETS)
