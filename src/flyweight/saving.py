"""Files that appear whole or not at all, and one line where a disk is full: which, how much it has
left and how much was wanted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from flyweight.errors import ResourceError
from flyweight.shortage import size_text

FULL = (errno.ENOSPC, errno.EDQUOT)
# in messages of what is no OSError: compilers, safetensors
FULL_TEXTS = ("No space left on device", "Disk quota exceeded")
HINT = "make room, or choose another place"


def is_full(error: BaseException) -> bool:
    number = error.errno if isinstance(error, OSError) else None
    return number in FULL or any(text in str(error) for text in FULL_TEXTS)


def reason(error: BaseException, path: Path, needed: int | None = None) -> str:
    """Why nothing could be written there; `needed`: bytes of what was to be."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if not is_full(error):
        return text
    there = next((one for one in (path.absolute(), *path.absolute().parents) if one.exists()), None)
    if there is None:
        return text
    free = shutil.disk_usage(there).free
    if needed is None:
        return f"{text}: {mount_of(there)} has {size_text(free)} free"
    if free >= needed:  # a quota, or no more files
        return text
    return f"{text}: {mount_of(there)} has {size_text(free)} free, {size_text(needed)} are needed"


def mount_of(path: Path) -> Path:
    return next(one for one in (path, *path.parents) if one.parent == one or os.path.ismount(one))


@contextlib.contextmanager
def writing(path: Path, needed: int | None = None) -> Iterator[None]:
    """A full disk names no file: this does."""
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"{path}: cannot be written ({reason(error, path, needed)}); {HINT}"
        ) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to, which takes its place at the end; where the work fails what
    was there before stays as it was.
    """
    target = path.resolve()  # what a link points to is replaced, not the link
    if target.exists() and not target.is_file():  # a device or a pipe takes what comes
        yield path
        return
    own = f"{os.getpid()}-{threading.get_ident()}"
    half = target.with_name(f".{target.stem}.{own}.partial{target.suffix}")
    try:
        yield half
        if target.exists():
            shutil.copymode(target, half)
        os.replace(half, target)
    finally:
        half.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """The whole file, or what it was before."""
    data = text.encode()
    with writing(path, len(data)):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as half:
            half.write_bytes(data)
