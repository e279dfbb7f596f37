"""Looks through the header of a GGUF file before the `gguf` package reads it: every length must fit
into the file.

The package believes what a file says of itself. An array that claims 2^40 entries makes it run
until the memory is full, though the file has 94 bytes. So the header is walked here first, in the
same order: counts, strings and arrays must end inside the file, and all arrays together stay below
what a vocabulary needs. Only the table of tensors is kept, which is all that a model needs whose
metadata was looked at once.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from flyweight.checkpoint.gguf_blocks import TYPES
from flyweight.errors import CheckpointError, UnsupportedError

# value type → bytes
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
LEAST_FIELD = 8 + 4 + 1  # bytes: an empty name, a type, the smallest value
LEAST_TENSOR = 8 + 4 + 4 + 8  # an empty name, no dimensions, a type, an offset
MOST_ENTRIES = 8_000_000  # of all arrays: the largest vocabularies have three lists of 300,000
MOST_DIMENSIONS = 8
DEEPEST = 4  # arrays within arrays
LONGEST_STRING = 16 << 20  # chat templates have kilobytes
ALIGNMENT = "general.alignment"
UINT32 = 4


@dataclass(frozen=True)
class Stored:
    """One tensor as the header announces it."""

    shape: tuple[int, ...]  # outermost first, unlike in the file
    type: int  # a key of gguf_blocks.TYPES, if it is one that we know
    offset: int  # of the file

    @property
    def nbytes(self) -> int:
        inputs, size = block_size(self.type)
        return math.prod(self.shape) // inputs * size


def block_size(number: int) -> tuple[int, int]:
    """Inputs and bytes of a block of any type that can be read."""
    if number in TYPES:
        return TYPES[number].inputs, TYPES[number].nbytes
    import gguf

    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]


def read_table(path: Path) -> dict[str, Stored]:
    """Every tensor of the file; each lies inside of it."""
    table = check_header(path)
    size = path.stat().st_size
    for name, stored in table.items():
        try:
            inputs, _ = block_size(stored.type)
        except (ValueError, KeyError, ImportError):
            raise UnsupportedError(
                f"{path}: tensor {name!r} is of type {stored.type}, which cannot be read"
            ) from None
        if stored.shape and stored.shape[-1] % inputs:
            raise CheckpointError(
                f"{path}: tensor {name!r} has rows of {stored.shape[-1]} "
                f"values, but its blocks have {inputs}"
            )
        if stored.offset + stored.nbytes > size:
            raise CheckpointError(
                f"{path}: truncated: tensor {name!r} ends at byte "
                f"{stored.offset + stored.nbytes:,}, but the file at {size:,}; get it again"
            )
    return table


def check_header(path: Path) -> dict[str, Stored]:
    if not path.is_file():
        raise CheckpointError(f"{path}: not a regular file")
    if path.stat().st_size < 24:
        raise CheckpointError(
            f"{path}: not a GGUF file, or truncated ({path.stat().st_size} bytes); get it again"
        )
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise CheckpointError(f"{path}: not a GGUF file")
        return Header(path, data).walk()


class Header:
    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data = path, data
        self.size = len(data)
        self.at = 4
        self.entries = 0  # of arrays, so far
        self.alignment = 32
        self.order = "<"
        if self.number(4) & 0xFFFF == 0:  # the version, in the other order of bytes
            self.order = ">"

    def walk(self) -> dict[str, Stored]:
        tensors = self.number(8)
        fields = self.number(8)
        self.room(fields, LEAST_FIELD, "metadata fields")
        for _ in range(fields):
            name = self.string()
            kind = self.number(4)
            self.value(kind)
            if name == ALIGNMENT and kind == UINT32:
                self.alignment = struct.unpack_from(self.order + "I", self.data, self.at - 4)[0]
        self.room(tensors, LEAST_TENSOR, "tensors")
        table = dict(self.tensor() for _ in range(tensors))
        start = -(-self.at // max(1, self.alignment)) * max(1, self.alignment)
        return {
            name: Stored(one.shape, one.type, start + one.offset) for name, one in table.items()
        }

    def tensor(self) -> tuple[str, Stored]:
        name = self.string()
        dimensions = self.number(4)
        if dimensions > MOST_DIMENSIONS:
            raise self.damaged(f"a tensor of {dimensions} dimensions")
        shape = [self.number(8) for _ in range(dimensions)]
        kind = self.number(4)
        return name, Stored(tuple(reversed(shape)), kind, self.number(8))

    def value(self, kind: int, depth: int = 0) -> None:
        if kind in SCALARS:
            self.skip(SCALARS[kind])
        elif kind == STRING:
            self.string()
        elif kind == ARRAY:
            self.array(depth)
        else:
            raise self.damaged(f"a value of unknown type {kind}")

    def array(self, depth: int) -> None:
        kind = self.number(4)
        count = self.number(8)
        self.entries += count
        if self.entries > MOST_ENTRIES:
            raise self.damaged(f"arrays of {self.entries:,} entries")
        if depth >= DEEPEST:
            raise self.damaged(f"arrays within arrays, more than {DEEPEST} deep")
        if kind in SCALARS:
            self.skip(count * SCALARS[kind])
            return
        self.room(count, 8, "array entries")  # each has at least a length
        if kind == STRING:
            self.skip_strings(count)
            return
        for _ in range(count):
            self.value(kind, depth + 1)

    def skip_strings(self, count: int) -> None:
        """A vocabulary has a hundred thousand, and every start walks over them: no call
        for each.
        """
        length_of = struct.Struct(self.order + "Q").unpack_from
        last = self.size - 8
        at = self.at
        for _ in range(count):
            if at > last:
                self.at = at
                raise self.damaged(f"a string at byte {at:,}")
            (length,) = length_of(self.data, at)
            at += 8 + length
            if length > LONGEST_STRING or at > self.size:
                raise self.damaged(f"a string of {length:,} bytes")
        self.at = at

    def string(self) -> str:
        length = self.number(8)
        if length > LONGEST_STRING:
            raise self.damaged(f"a string of {length:,} bytes")
        self.skip(length)
        return self.data[self.at - length : self.at].decode("utf-8", "replace")

    def number(self, size: int) -> int:
        self.skip(size)
        return struct.unpack_from(
            self.order + ("I" if size == 4 else "Q"), self.data, self.at - size
        )[0]

    def skip(self, size: int) -> None:
        if size > self.size - self.at:
            raise self.damaged(f"something of {size:,} bytes at byte {self.at:,}")
        self.at += size

    def room(self, count: int, least: int, what: str) -> None:
        if count > (self.size - self.at) // least:
            raise self.damaged(f"{count:,} {what}")

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: truncated or damaged GGUF file: its header claims {what}, but the file "
            f"has {self.size:,} bytes; get it again"
        )
