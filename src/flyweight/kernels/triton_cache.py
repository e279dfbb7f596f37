"""Where Triton keeps what it compiles. It runs nothing that it could not write, so where its folder
has no room this process takes another one.
"""

from __future__ import annotations

import atexit
import errno
import functools
import os
import shutil
import tempfile
import warnings
from pathlib import Path

from flyweight.kernels.compiler import not_kept
from flyweight.saving import reason

ROOM = 16 << 20  # bytes: all kernels of a model are a few megabytes
SETTING = "TRITON_CACHE_DIR"


def folder() -> Path:
    """As Triton finds it."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get(SETTING) or home / ".triton" / "cache")


def fault(place: Path) -> OSError | None:
    """None where something can be written there."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            if shutil.disk_usage(place).free < ROOM:
                return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        return error
    return None


@functools.cache
def ensure_room() -> None:
    """Once, before anything is compiled."""
    usual = folder()
    found = fault(usual)
    if found is None:
        return
    for place in (None, "/dev/shm"):  # None: the system's temporary folder
        try:
            other = Path(tempfile.mkdtemp(prefix="flyweight-triton-", dir=place))
        except OSError:
            continue
        if fault(other) is None:
            atexit.register(shutil.rmtree, other, ignore_errors=True)
            os.environ[SETTING] = str(other)
            warnings.warn(not_kept(usual, reason(found, usual, ROOM), setting=SETTING))
            return
        shutil.rmtree(other, ignore_errors=True)
