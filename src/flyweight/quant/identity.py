"""Which weights a run reads, told without reading all of them.

`weights_digest` goes into the result, so it depends on contents only: config, headers, sizes, and
slices of each file.
`file_states` also holds the times of the files: what a run may go on with must come from files
that nobody touched since.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ENDS = 1 << 20  # bytes read at both ends of a file
SLICE = 1 << 14  # bytes of each slice between them
SLICES = 64


def weights_digest(source: Any) -> str:
    digest = hashlib.sha256(json.dumps(source.config, sort_keys=True, default=str).encode())
    for file in getattr(source, "files", ()):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            digest.update(read_header(stream))
            for start, length in places(size):
                stream.seek(start)
                digest.update(stream.read(length))
    return digest.hexdigest()[:16]


def file_states(files: Iterable[Path]) -> dict[str, list[Any]]:
    """Of each file its size, when it was last written, and the digest of its header: names, types,
    shapes and places.
    """
    states: dict[str, list[Any]] = {}
    for file in files:
        facts = file.stat()
        with file.open("rb") as stream:
            header = hashlib.sha256(read_header(stream)).hexdigest()[:16]
        states[file.name] = [facts.st_size, facts.st_mtime_ns, header]
    return states


def newest(files: Iterable[Path]) -> int:
    """When the last of them was written, in nanoseconds."""
    return max((file.stat().st_mtime_ns for file in files), default=0)


def read_header(stream: Any) -> bytes:
    """Of a safetensors file; the reader has checked that its length fits."""
    stream.seek(0)
    return stream.read(int.from_bytes(stream.read(8), "little"))


def places(size: int) -> list[tuple[int, int]]:
    """(start, length) of what is read of a file: both ends, and slices evenly between them."""
    step = max(SLICE, size // (SLICES + 1))
    return [
        (0, ENDS),
        *((start, SLICE) for start in range(step, size, step)),
        (max(0, size - ENDS), ENDS),
    ]
