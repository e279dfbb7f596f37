"""Which device to use: the one that was asked for, if this machine has it, else the GPU, else the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyweight.errors import OptionError, unknown

if TYPE_CHECKING:
    import torch


def pick_device(name: str | torch.device | None) -> torch.device:
    import torch  # late: the command line asks before it knows whether there is work to do

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = str(name).partition(":")
    if kind not in ("cpu", "cuda") or not (index or "0").isdigit():
        raise OptionError(unknown("device", str(name), ["cpu", "cuda", "cuda:N"]))
    count = torch.cuda.device_count() if kind == "cuda" else 0
    if kind == "cuda" and int(index or 0) >= count:
        raise OptionError(f"--device {name}: torch {torch.__version__} finds {count or 'no'} CUDA GPU{'s' if count > 1 else ''} "
                          f"here; {f'cuda:0 to cuda:{count - 1}' if count else '--device cpu'} will do")
    return torch.device(name)
