"""Finished blocks on disk: one safetensors file each, renamed into place only when every byte is
synced.

The folder beside the output (`.NAME.work`) holds them until the model is complete. A fingerprint
says what is being made; a run continues only what it would have made itself, from the same files. A
digest beside each block tells whether it still has the bytes that were written: one that has not is
made again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flyweight.errors import OptionError, ResourceError
from flyweight.quant.identity import file_states
from flyweight.saving import reason, replacing, writing
from flyweight.tensors import KINDS, QuantTensor


@dataclass(eq=False)
class FinishedBlock:
    """What a block (or the head) has become: linears by name, other tensors by name, and figures
    about them.
    """

    linears: dict[str, QuantTensor] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)


def describe(tensor: QuantTensor) -> dict[str, Any]:
    """Everything of a QuantTensor but its tensors, for JSON."""
    data: dict[str, Any] = {"kind": tensor.kind}
    for name, value in tensor.fields().items():
        if isinstance(value, QuantTensor):
            data[name] = describe(value)
        elif not isinstance(value, Tensor):
            data[name] = value
    return data


def rebuild(data: dict[str, Any], tensors: dict[str, Tensor]) -> QuantTensor:
    """The inverse: `tensors` by field name, nested ones as `inner.codes`."""
    kind = KINDS[data["kind"]]
    values: dict[str, Any] = {name: value for name, value in data.items() if name != "kind"}
    for item in dataclasses.fields(kind):
        if isinstance(values.get(item.name), dict):
            inner = {
                name.removeprefix(f"{item.name}."): t
                for name, t in tensors.items()
                if name.startswith(f"{item.name}.")
            }
            values[item.name] = rebuild(values[item.name], inner)
        elif item.name not in values:
            values[item.name] = tensors[item.name]
    return kind(**values)


class BlockStore:
    """`files`: those that the blocks are made from. Their times belong to the work, and not to what
    it gives.
    """

    def __init__(
        self, output: Path, fingerprint: dict[str, Any], *, resume: bool, files: Iterable[Path] = ()
    ) -> None:
        self.folder = output.with_name(f".{output.name}.work")
        # blocks whose bytes are known to be those that were written
        self.verified: set[str] = set()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = FileLock(self.folder / ".lock")
            self.lock.acquire(timeout=0)
        except Timeout:
            raise ResourceError(f"{output}: another process is making this model") from None
        except OSError as error:
            told = reason(error, self.folder)
            raise ResourceError(f"{output}: cannot write there ({told})") from error
        note = self.folder / "run.json"
        fingerprint = fingerprint | {"weight files": file_states(files)}
        try:
            if resume and note.exists():
                self._check(note, fingerprint)
            else:
                for path in self.folder.iterdir():
                    if path.name != ".lock":
                        path.unlink()
            self._write_text(note, json.dumps(fingerprint, indent=1, sort_keys=True))
        except BaseException:
            self.lock.release()
            raise

    def _check(self, note: Path, fingerprint: dict[str, Any]) -> None:
        try:
            before = json.loads(note.read_text(encoding="utf-8"))
            differing = [
                key for key in {**before, **fingerprint} if fingerprint.get(key) != before.get(key)
            ]
        except (ValueError, TypeError) as error:
            raise OptionError(
                f"{note}: damaged ({error}), so what is beside it cannot be continued; run without "
                "--resume to start over"
            ) from error
        if differing:
            raise OptionError(
                f"{self.folder} holds the unfinished work of another run (another "
                f"{' and '.join(differing)}); "
                "repeat that command, or run without --resume to start over"
            )

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def has(self, name: str) -> bool:
        """Whether the block is there, as it was written; one that is not is removed, to be made
        again.
        """
        if not self.path(name).exists():
            return False
        if not self._intact(name):
            warnings.warn(f"{self.path(name)}: damaged since it was written; it is made again")
            self._discard(name)
            return False
        return True

    def save(self, name: str, block: FinishedBlock) -> None:
        tensors = {
            f"tensor|{key}": tensor.detach().cpu().contiguous()
            for key, tensor in block.tensors.items()
        }
        for linear, quantized in block.linears.items():
            tensors |= {
                f"linear|{linear}|{key}": tensor.cpu().contiguous()
                for key, tensor in quantized.tensors().items()
            }
        notes = {
            "linears": {linear: describe(quantized) for linear, quantized in block.linears.items()},
            "report": block.report,
        }
        half = self.path(name).with_suffix(".half")
        try:
            save_file(
                {key: tensor.clone() for key, tensor in tensors.items()},
                half,
                metadata={"notes": json.dumps(notes)},
            )
            with half.open("rb+") as stream:
                os.fsync(stream.fileno())
            # first: a block without one is not trusted
            self._write_text(self._digest_path(name), file_digest(half))
            os.replace(half, self.path(name))
            self.verified.add(name)
        except (OSError, SafetensorError) as error:
            half.unlink(missing_ok=True)
            needed = sum(tensor.nbytes for tensor in tensors.values())
            raise ResourceError(
                f"{self.folder}: cannot write {name} ({reason(error, half, needed)}); finished "
                "blocks are kept: free some disk and run again with --resume"
            ) from error

    def load(self, name: str) -> FinishedBlock:
        if not self._intact(name):
            self._discard(name)
            raise ResourceError(
                f"{self.path(name)}: damaged since it was written, and removed; run again with "
                "--resume to make it again"
            )
        with safe_open(self.path(name), framework="pt") as file:
            notes = json.loads(file.metadata()["notes"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        linears = {}
        for linear, data in notes["linears"].items():
            start = f"linear|{linear}|"
            linears[linear] = rebuild(
                data, {k.removeprefix(start): t for k, t in tensors.items() if k.startswith(start)}
            )
        others = {
            key.removeprefix("tensor|"): tensor
            for key, tensor in tensors.items()
            if key.startswith("tensor|")
        }
        return FinishedBlock(linears, others, notes["report"])

    def close(self, *, remove: bool) -> None:
        """`remove`: nobody goes on from here; nor does anybody where no block was finished."""
        self.lock.release()
        if remove or not any(self.folder.glob("*.safetensors")):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _digest_path(self, name: str) -> Path:
        return self.folder / f"{name}.sha256"

    def _intact(self, name: str) -> bool:
        note, block = self._digest_path(name), self.path(name)
        if name in self.verified:
            return True
        if (
            not note.exists()
            or not block.exists()
            or note.read_text(errors="replace") != file_digest(block)
        ):
            return False
        self.verified.add(name)
        return True

    def _discard(self, name: str) -> None:
        """Blocks that were tuned belong together: without one the others are made again too."""
        paths = (
            list(self.folder.glob("tuned*"))
            if name.startswith("tuned")
            else [self.path(name), self._digest_path(name)]
        )
        for path in paths:
            path.unlink(missing_ok=True)
            self.verified.discard(path.stem)

    def _write_text(self, path: Path, text: str) -> None:
        with writing(path, len(text)), replacing(path) as half:
            half.write_text(text, encoding="utf-8")
            with half.open("rb+") as stream:
                os.fsync(stream.fileno())


def file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
