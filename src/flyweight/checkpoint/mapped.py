"""Files of weights that are mapped into memory: what has been read can be let go.

Pages of a mapped file count as this process's memory once they were touched, and stay until the
system needs room. A loader that copies every weight into another layout would hold both to the end.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

MAPS = Path("/proc/self/maps")
SUFFIXES = (".safetensors", ".gguf")


def forget_pages() -> None:
    """Take what this process has touched of files of weights out of its memory; reading it again
    takes it from the system's file cache. Nothing happens where the system does not tell.
    """
    advice = getattr(mmap, "MADV_DONTNEED", None)
    if advice is None or not MAPS.exists():
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for begin, end in mapped_weights(MAPS.read_text(encoding="utf-8")):
        madvise(begin, end - begin, advice)


def mapped_weights(maps: str) -> Iterator[tuple[int, int]]:
    """Where the files are; of pages that were written to, the file knows nothing, so that only
    mappings of a file are taken, and nobody writes to a checkpoint's tensors.
    """
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[4] != "0" and fields[5].endswith(SUFFIXES):
            begin, end = fields[0].split("-")
            yield int(begin, 16), int(end, 16)
