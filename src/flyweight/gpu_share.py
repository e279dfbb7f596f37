"""How much of a GPU this process has: all of it, or a part that MPS or a green context leaves it.

MPS (NVIDIA's Multi-Process Service) runs kernels of several processes on one GPU at the same time,
each on all SMs or on as many as its "active thread percentage" allows. A plan that counts on an SM
for each of its thread blocks must count those, not the ones on the data sheet.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


@dataclass(frozen=True)
class Share:
    """`processors`: SMs that kernels of this process may run on, None where the driver does not
    say. `mps`: whether kernels of other processes run at the same time.
    """

    processors: int | None = None
    mps: bool = False


@functools.cache
def of(index: int) -> Share:
    """Asked of the driver; nothing is known without cuda-bindings."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return Share(mps=PERCENTAGE in os.environ)
    return ask(driver, index)


def ask(driver: Any, index: int) -> Share:
    driver.cuInit(0)
    status, device = driver.cuDeviceGet(index)
    if int(status):
        return Share()
    attributes = driver.CUdevice_attribute
    mps = _number(driver.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_MPS_ENABLED, device))
    whole = _number(
        driver.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device)
    )
    found = [whole, *(_of_context(driver, one) for one in _contexts(driver, device))]
    if mps and whole:
        found.append(whole * _percentage() // 100)
    known = [count for count in found if count]
    return Share(min(known) if known else None, bool(mps))


def _contexts(driver: Any, device: Any) -> list[Any]:
    """The one that torch uses, and the current one: a green context of the caller's, perhaps."""
    status, primary = driver.cuDevicePrimaryCtxRetain(device)
    contexts = [] if int(status) else [primary]
    status, current = driver.cuCtxGetCurrent()
    if not int(status) and int(current):
        contexts.append(current)
    return contexts


def _of_context(driver: Any, context: Any) -> int | None:
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    status, resource = driver.cuCtxGetDevResource(context, kind)
    return None if int(status) else int(resource.sm.smCount)


def _percentage() -> int:
    text = os.environ.get(PERCENTAGE, "100").split(".")[0]
    return min(100, int(text)) if text.isdigit() and int(text) else 100


def _number(answer: tuple[Any, Any]) -> int:
    status, value = answer
    return 0 if int(status) else int(value)
