"""torch's largest library, loaded by a thread while Python imports other modules.

Loading it takes a third of a second, in which `import` would keep every other thread waiting. A
foreign call does not: the system's own `dlopen` is called through ctypes, and `import torch` finds
the library loaded. Only torch without CUDA: there the order of libraries does not matter.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
from pathlib import Path

LIBRARY = "libtorch_cpu.so"
OF_CUDA = "libtorch_cuda.so"


def begin() -> threading.Thread | None:
    """Start loading; None where there is nothing to load, or another way to do it."""
    found = library()
    if not sys.platform.startswith("linux") or found is None:
        return None
    thread = threading.Thread(target=load, args=(found,), daemon=True)
    thread.start()
    return thread


def library() -> Path | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or "torch" in sys.modules:
        return None
    folder = Path(spec.origin).parent / "lib"
    if (folder / OF_CUDA).exists() or not (folder / LIBRARY).exists():
        return None
    return folder / LIBRARY


def load(path: Path) -> None:
    """Failing is no harm: `import torch` will say why it cannot be loaded."""
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype = ctypes.c_void_p
    dlopen.argtypes = [ctypes.c_char_p, ctypes.c_int]
    dlopen(os.fsencode(path), os.RTLD_NOW)
