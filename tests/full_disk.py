"""A folder whose disk is full after so many bytes: what is written beyond them gets ENOSPC, and
what was written before stays, as on a real one. A tiny file system of its own would need rights
that not every machine gives.
"""

import builtins
import errno
import io
import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

MESSAGE = os.strerror(errno.ENOSPC)


class FullDisk:
    """`room` can be raised later, as when somebody makes room."""

    def __init__(self, folder: Path, room: int):
        self.folder = folder.resolve()
        self.room = room
        self.refused: list[str] = []

    def holds(self, file) -> bool:
        if isinstance(file, int):
            try:
                file = os.readlink(f"/proc/self/fd/{file}")
            except OSError:
                return False
        return Path(os.fsdecode(file)).resolve().is_relative_to(self.folder)

    def take(self, count: int) -> int:
        """How many of so many bytes still fit."""
        fits = min(count, self.room)
        self.room -= fits
        return fits

    def refuse(self, name) -> OSError:
        self.refused.append(str(name))
        return OSError(errno.ENOSPC, MESSAGE)

    def save_file(self, tensors, path, metadata=None):
        """In place of safetensors', which writes by itself: half of it stays."""
        if not self.holds(path):
            return save_file(tensors, path, metadata=metadata)
        size = sum(tensor.nbytes for tensor in tensors.values())
        if (fits := self.take(size)) < size:
            self.refuse(path)
            with open_as_ever(path, "wb") as stream:
                stream.write(b"\0" * fits)
            raise SafetensorError(
                f"Error while serializing: I/O error: {MESSAGE} (os error {errno.ENOSPC})"
            )
        return save_file(tensors, path, metadata=metadata)


class Limited(io.FileIO):
    disk: FullDisk

    def write(self, data) -> int:
        view = memoryview(data).cast("B")
        fits = self.disk.take(len(view))
        if fits < len(view):
            super().write(view[:fits])
            raise self.disk.refuse(self.name)
        return super().write(view)


open_as_ever = io.open


def full_after(monkeypatch, folder: Path, room: int, *modules) -> FullDisk:
    """From now on; `modules` are those of ours that call safetensors' `save_file`."""
    disk = FullDisk(folder, room)

    def opened(
        file,
        mode="r",
        buffering=-1,
        encoding=None,
        errors=None,
        newline=None,
        closefd=True,
        opener=None,
    ):
        if not set(mode) & set("wax+") or not disk.holds(file):
            return open_as_ever(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = Limited(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        raw.disk = disk
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    monkeypatch.setattr(io, "open", opened)
    monkeypatch.setattr(builtins, "open", opened)
    for module in modules:
        monkeypatch.setattr(module, "save_file", disk.save_file)
    return disk
