"""Which device to use: the one that was asked for, if this machine has it, else the GPU, else the
CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyweight.errors import OptionError, unknown

if TYPE_CHECKING:
    import torch


OLDEST = (8, 0)  # compute capability of Ampere


def unsupported_gpu(index: int = 0) -> str | None:
    """None, or in one line what is wrong with a device that torch calls cuda, and what to do."""
    import torch

    needed = (
        "Flyweight's kernels need an NVIDIA GPU from Ampere on (compute capability 8.0: A100, RTX "
        "30 and later)"
    )
    if getattr(torch.version, "hip", None):
        return f"an AMD GPU, through torch for ROCm: {needed}; --device cpu works here"
    major, minor = capability(index)
    if (major, minor) < OLDEST:
        return f"a GPU of compute capability {major}.{minor}: {needed}; --device cpu works here"
    return None


def capability(index: int) -> tuple[int, int]:
    """By the driver itself where it can be asked: torch would begin to use the GPU, which others
    may be using just now.
    """
    import torch

    try:
        from cuda.bindings import driver

        driver.cuInit(0)
        names = driver.CUdevice_attribute
        wanted = (
            names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
        major, minor = (
            driver.cuDeviceGetAttribute(one, driver.cuDeviceGet(index)[1]) for one in wanted
        )
        if not int(major[0]) and not int(minor[0]):
            return int(major[1]), int(minor[1])
    except (ImportError, RuntimeError):
        pass
    return torch.cuda.get_device_capability(index)


def pick_device(name: str | torch.device | None) -> torch.device:
    import torch  # late: the command line asks before it knows whether there is work to do

    if name is None:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        if reason := unsupported_gpu():
            raise OptionError(reason)
        return torch.device("cuda")
    kind, _, index = str(name).partition(":")
    if kind not in ("cpu", "cuda") or not (index or "0").isdigit():
        raise OptionError(unknown("device", str(name), ["cpu", "cuda", "cuda:N"]))
    count = torch.cuda.device_count() if kind == "cuda" else 0
    if kind == "cuda" and int(index or 0) >= count:
        raise OptionError(
            f"--device {name}: torch {torch.__version__} finds {count or 'no'} CUDA "
            f"GPU{'s' if count > 1 else ''} here; "
            f"{f'cuda:0 to cuda:{count - 1}' if count else '--device cpu'} will do"
        )
    if kind == "cuda" and (reason := unsupported_gpu(int(index or 0))):
        raise OptionError(f"--device {name}: {reason}")
    return torch.device(name)
