"""Flyweight inside vLLM: our kernels for checkpoints that vLLM reads, and formats that it does not.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). Nothing of vLLM
is imported before, and nothing is registered with a version whose inner names have not been read.
FLYWEIGHT_VLLM says what is: `off`, or some of `mp`, `int8`, `fp8`, `formats`, with commas between.
`fp8` must be asked for: vLLM rounds activations inside the kernels before, which ours repeat.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections import Counter
from typing import Any

SETTING = "FLYWEIGHT_VLLM"
VERSIONS = ("0.32", "0.33")
PARTS = ("mp", "int8", "fp8", "formats")
USUAL = ("mp", "int8", "formats")
TABLES = {  # part → (table of vLLM's kernels.linear, class of ours)
    "mp": ("_POSSIBLE_KERNELS", "FlyweightLinearKernel"),
    "int8": ("_POSSIBLE_INT8_KERNELS", "FlyweightInt8Kernel"),
    "fp8": ("_POSSIBLE_FP8_KERNELS", "FlyweightFp8Kernel"),
}
logger = logging.getLogger("vllm.flyweight")


def wanted_parts(setting: str) -> list[str]:
    """Of FLYWEIGHT_VLLM. A word that is none of PARTS is an error: it would be left out quietly."""
    words = [word.strip() for word in setting.split(",") if word.strip()]
    if words in ([], ["on"]):
        return list(USUAL)
    if words == ["off"]:
        return []
    wrong = [word for word in words if word not in PARTS]
    if wrong:
        raise ValueError(f"{SETTING}={setting}: {wrong[0]!r} is none of off, {', '.join(PARTS)}")
    return words


def unsupported_version(version: str) -> str | None:
    """None, or the line that a user of another vLLM gets."""
    if any(version == known or version.startswith(f"{known}.") for known in VERSIONS):
        return None
    return (
        f"Flyweight's plug-in is made for vLLM {' and '.join(VERSIONS)}, and this is {version}: "
        "nothing is registered, vLLM runs with its own kernels"
    )


def register() -> list[str]:
    """What vLLM calls; the parts that are registered now. May be called any number of times."""
    import vllm

    reason = unsupported_version(str(getattr(vllm, "__version__", "unknown")))
    if reason is not None:
        logger.warning(reason)
        return []
    try:
        parts = wanted_parts(os.environ.get(SETTING, ""))
    except ValueError as error:
        logger.warning("%s: nothing is registered", error)
        return []
    for part in parts:
        if part in TABLES:
            _put_first(part)
        else:
            importlib.import_module("flyweight.plugins.vllm.formats")  # registers itself
    return parts


def withdraw() -> None:
    """Kernels of ours out of vLLM's tables again, if these are loaded: for comparisons in one
    process.
    """
    linear = sys.modules.get("vllm.model_executor.kernels.linear")
    for table, name in TABLES.values():
        for listed in getattr(linear, table, {}).values():
            listed[:] = [kernel for kernel in listed if kernel.__name__ != name]


def kernels_of(model: Any) -> dict[str, int]:
    """How many linears and layers of experts of a loaded model of vLLM are run by which class, ours
    and vLLM's.
    """
    found: Counter[str] = Counter()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        scheme = getattr(module, "scheme", method)
        kernel = getattr(scheme, "kernel", None) or getattr(scheme, "fp8_linear", None)
        kernel = getattr(kernel, "other", None) or kernel or method
        linear = hasattr(module, "input_size") and hasattr(module, "skip_bias_add")
        if kernel is not None and (linear or hasattr(module, "local_num_experts")):
            found[type(kernel).__name__] += 1
    return dict(found)


def _put_first(part: str) -> None:
    """Our class at the head of vLLM's table: `register_linear_kernel` would append it."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    from flyweight.plugins.vllm import kernels

    table, name = TABLES[part]
    ours = getattr(kernels, name)
    platforms = [PlatformEnum.CUDA]
    if part == "mp" and not has_cpu_kernel():
        platforms.append(PlatformEnum.CPU)
    for platform in platforms:
        listed = getattr(linear, table).setdefault(platform, [])
        if ours not in listed:
            listed.insert(0, ours)


def has_cpu_kernel() -> bool:
    """vLLM's own product of integer weights on CPUs is not built for all processors."""
    import torch

    return hasattr(torch.ops._C, "cpu_gemm_wna16")
