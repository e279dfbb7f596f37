"""Weights in the layout of this machine's kernels, kept in the cache so that they are laid out
once.

    prepared/<model>-<key>.weights   8 bytes of magic, length of the header, the header (JSON),
                                     tensors

`model` is a hash of the model's folder, so that `flyweight rm` finds what was made of it; `key` is
one of all that the bytes depend on: the model's files by size and time, our own code, the options.
A file that fits no key any more is never read, and goes when room is needed: all files together
stay below a limit (`FLYWEIGHT_PREPARED_GB`, 0 turns it off), the longest unused goes first.

A file is written when a model is loaded for the second time: many are loaded once, such as one that
was just quantized and is measured. An empty file `<model>-<key>.seen` remembers the first.

A file is written beside its place, flushed to the disk and renamed: a reader sees a whole file or
none. It is read into memory of its own, not mapped: mapped pages cannot be huge ones, and a file
that somebody cuts would end the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyweight.checkpoint.hub import cache_folder
from flyweight.errors import OptionError

if TYPE_CHECKING:  # `flyweight models` does not wait for torch
    from torch import Tensor

LIMIT = "FLYWEIGHT_PREPARED_GB"
DEFAULT_LIMIT = 4.0  # GB of all files together
LARGEST_SHARE = 0.5  # of the limit, for one file
LEAST_BYTES = 16 << 20  # what is smaller is laid out as fast as it is read
SPARE_BYTES = 1 << 30  # of the disk, that stay free
MAGIC = b"flyprep1"
ALIGNMENT = 128
SUFFIX = ".weights"
SEEN = ".seen"
FORGOTTEN = 30 * 24 * 3600  # seconds after which a model counts as never loaded


def folder() -> Path:
    return cache_folder() / "prepared"


def limit_bytes() -> int:
    given = os.environ.get(LIMIT) or DEFAULT_LIMIT
    try:
        return int(float(given) * 1e9)
    except (ValueError, OverflowError):
        raise OptionError(f"{LIMIT} is {given!r}; give a number of gigabytes, 0 for none") from None


def file_of(model: str | Path, parts: Iterable[str]) -> Path:
    """Where the weights of the model in this folder are kept, made under these circumstances."""
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    return folder() / f"{model_hash(model)}-{key}{SUFFIX}"


def model_hash(model: str | Path) -> str:
    return hashlib.sha256(str(Path(model).resolve()).encode()).hexdigest()[:16]


def files(model: str | Path | None = None) -> list[Path]:
    """All, or those made of one model; what another process removes meanwhile is left out."""
    pattern = f"{'*' if model is None else model_hash(model)}-*{SUFFIX}"
    return sorted(folder().glob(pattern))


def total_bytes(paths: Iterable[Path]) -> int:
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def remove(model: str | Path) -> None:
    """What was made of a model that is deleted."""
    for path in folder().glob(f"{model_hash(model)}-*"):
        path.unlink(missing_ok=True)


def is_wanted(path: Path) -> bool:
    """Was it wanted before? From now on it was."""
    mark = path.with_suffix(SEEN)
    if mark.exists():
        return True
    with contextlib.suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        for old in folder().glob(f"*{SEEN}"):
            if time.time() - old.stat().st_mtime > FORGOTTEN:
                old.unlink(missing_ok=True)
        mark.touch()
    return False


def read(path: Path) -> tuple[Any, list[Tensor]] | None:
    """What `write` was given; None where there is no such file, or not all of it."""
    import torch

    try:
        with path.open("rb") as stream:
            start = stream.read(16)
            if start[:8] != MAGIC:
                return None
            header = json.loads(stream.read(int.from_bytes(start[8:], "little")))
            size = header["bytes"]
            begin = aligned(stream.tell())
            if os.fstat(stream.fileno()).st_size != begin + size:
                return None
            stream.seek(begin)
            memory = huge_memory(size)
            if stream.readinto(memory) != size:
                return None
        os.utime(path)  # used now
    except (OSError, ValueError, KeyError):
        return None
    tensors = []
    for dtype, shape, offset in header["tensors"]:
        kind = getattr(torch, dtype)
        count = torch.Size(shape).numel()
        tensors.append(torch.frombuffer(memory, dtype=kind, count=count, offset=offset).view(shape))
    return header["value"], tensors


def huge_memory(size: int) -> mmap.mmap:
    """In huge pages where the system has them: kernels read all of it for every token."""
    memory = mmap.mmap(-1, max(1, size))
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(advice)
    return memory


def write(path: Path, value: Any, tensors: list[Tensor]) -> bool:
    """Keep a JSON value and tensors; False where there is no room for them, or nobody wanted them
    before. A cache that cannot be written is no reason to fail.
    """
    offsets = []
    size = 0
    for tensor in tensors:
        offsets.append(size)
        size = aligned(size + tensor.nbytes)
    if not LEAST_BYTES <= size <= LARGEST_SHARE * limit_bytes() or not is_wanted(path):
        return False
    described = [
        [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset]
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]
    header = json.dumps({"bytes": size, "tensors": described, "value": value}).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(path.parent).free < size + SPARE_BYTES:
            return False
        make_room(size)
        write_beside(path, header, list(zip(offsets, tensors, strict=True)), size)
    except OSError:
        return False
    return True


def write_beside(path: Path, header: bytes, tensors: list[tuple[int, Tensor]], size: int) -> None:
    import torch

    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with open(handle, "wb") as stream:
            stream.write(MAGIC + len(header).to_bytes(8, "little") + header)
            begin = aligned(stream.tell())
            for offset, tensor in tensors:
                stream.seek(begin + offset)
                if tensor.numel():
                    stream.write(tensor.flatten().view(torch.uint8).numpy().data)
            stream.truncate(begin + size)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)  # whoever shares the cache may read it
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def make_room(size: int) -> None:
    """Remove the longest unused until `size` bytes more stay below the limit."""
    found = []
    for path in files():
        with contextlib.suppress(OSError):
            state = path.stat()
            found.append((state.st_mtime, state.st_size, path))
    excess = sum(one[1] for one in found) + size - limit_bytes()
    for _, nbytes, path in sorted(found):
        if excess <= 0:
            return
        path.unlink(missing_ok=True)
        excess -= nbytes


def aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
