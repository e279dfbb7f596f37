"""A model folder that appears whole or not at all.

Tensors are gathered into shards, each written beside its target in `.NAME.partial` and synced;
`finish` adds the JSON and tokenizer files and renames the folder into place. Memory is bounded by
one shard. With `resume` the finished shards of an interrupted run are kept: tensors that they hold
are skipped, and since shards fill in order of `add`, the same calls give the same bytes however
often they were interrupted. `flush` ends a shard early, at a point worth returning to.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flyweight.checkpoint.folder import INDEX, SINGLE
from flyweight.checkpoint.target import CARRIED, check_target, place_of
from flyweight.errors import OptionError, ResourceError
from flyweight.saving import HINT, reason


class CheckpointWriter:
    """`with CheckpointWriter(target) as writer: writer.add(name, tensor); writer.finish(config,
    source=folder)`

    `fingerprint` says what is being made (recipe, source): unfinished shards of something else are
    not continued. `source` is the folder that is read, which is never replaced.
    """

    def __init__(
        self,
        target: str | Path,
        max_shard_bytes: int = 4 << 30,
        *,
        overwrite: bool = False,
        resume: bool = False,
        fingerprint: str = "",
        source: Path | None = None,
    ) -> None:
        self.target = place_of(target)
        self.staging = self.target.with_name(f".{self.target.name}.partial")
        self._previous = previous_of(self.target)
        self._max_shard_bytes, self._resume = max_shard_bytes, resume
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._added: set[str] = set()
        self._shards: list[dict[str, int]] = []  # bytes by tensor name of each finished shard
        # tensors that are safe on disk; after `resume`, those of the interrupted run
        self.finished: set[str] = set()
        with self.writing("the folder"):
            recover(self.target)
            check_target(self.target, overwrite=overwrite, source=source)
            self.staging.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.staging / ".lock")
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                raise ResourceError(
                    f"{self.target}: another process is writing this folder"
                ) from None
            self._open_staging(fingerprint)

    def add(self, name: str, tensor: Tensor) -> None:
        if name in self._added:
            raise ValueError(f"tensor {name!r} is added twice")
        self._added.add(name)
        if name in self.finished:
            return
        tensor = tensor.detach().cpu().contiguous()
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_shard_bytes:
            self.flush()
        self._pending[name] = tensor
        self._pending_bytes += tensor.nbytes

    def flush(self) -> None:
        """Write what was added as a shard of its own."""
        if not self._pending:
            return
        path = self._shard_path(len(self._shards))
        half = path.with_suffix(".tmp")
        with self.writing(path.name, needed=self._pending_bytes):
            # A clone for what shares memory (tied weights, slices of one tensor): the format stores
            # each once.
            save_file(_unshared(self._pending), half, metadata={"format": "pt"})
            os.chmod(half, usual_mode(self.staging))
            _sync(half)
            os.replace(half, path)
        self._shards.append({name: tensor.nbytes for name, tensor in self._pending.items()})
        self.finished.update(self._pending)
        self._pending, self._pending_bytes = {}, 0

    def finish(self, config: dict[str, Any], *, source: str | Path | None = None) -> Path:
        """Complete the folder and move it into place. Tokenizer and generation config come from
        `source`.
        """
        self.flush()
        if not self._shards:
            raise ValueError("no tensor was added")
        with self.writing("the folder"):
            for name in ("resume.json", INDEX):
                (self.staging / name).unlink(missing_ok=True)
            for half in self.staging.glob("*.tmp"):
                half.unlink()
            self._name_shards()
            for pattern in CARRIED if source else ():
                for path in Path(str(source)).glob(pattern):
                    shutil.copyfile(path, self.staging / path.name)
            write_json(self.staging / "config.json", config)
            for path in self.staging.iterdir():
                _sync(path)
            _sync(self.staging)
            self._lock.release()
            (self.staging / ".lock").unlink(missing_ok=True)
            if self.target.exists():
                # of a run that was cut off at the next line but one
                shutil.rmtree(self._previous, ignore_errors=True)
                os.rename(self.target, self._previous)
            os.rename(self.staging, self.target)
            _sync(self.target.parent)
            shutil.rmtree(self._previous, ignore_errors=True)
        return self.target

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._lock.is_locked:  # not finished
            self._lock.release()
            if not self._resume:
                shutil.rmtree(self.staging, ignore_errors=True)

    def _open_staging(self, fingerprint: str) -> None:
        """Take over the finished shards of an interrupted run, or start empty."""
        note = self.staging / "resume.json"
        made_for = self._made_for(note)
        if self._resume and made_for not in (None, fingerprint):
            raise OptionError(
                f"{self.staging} holds the unfinished work of another recipe or model; delete it, "
                "or run without --resume to start over"
            )
        if not self._resume or made_for is None:
            for path in self.staging.iterdir():
                if path.name != ".lock":
                    path.unlink()
        write_json(note, {"fingerprint": fingerprint})
        for path in sorted(self.staging.glob("*.safetensors")):
            with safe_open(path, framework="pt") as shard:
                self._shards.append({name: shard.get_tensor(name).nbytes for name in shard.keys()})  # noqa: SIM118
            self.finished.update(self._shards[-1])
            os.replace(path, self._shard_path(len(self._shards) - 1))

    def _made_for(self, note: Path) -> str | None:
        if not note.exists():
            return None
        try:
            return json.loads(note.read_text(encoding="utf-8"))["fingerprint"]
        except (ValueError, KeyError, TypeError) as error:
            if not self._resume:  # it is thrown away
                return None
            raise OptionError(
                f"{note}: damaged ({error}), so what is beside it cannot be continued; run without "
                "--resume to start over"
            ) from error

    def _shard_path(self, number: int) -> Path:
        return self.staging / f"model-{number + 1:05}.safetensors"

    def _name_shards(self) -> None:
        """`model-00001-of-00003.safetensors` with an index, or one `model.safetensors`."""
        count = len(self._shards)
        if count == 1:
            os.replace(self._shard_path(0), self.staging / SINGLE)
            return
        names = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
        for number, name in enumerate(names):
            os.replace(self._shard_path(number), self.staging / name)
        total = sum(size for shard in self._shards for size in shard.values())
        weight_map = {
            tensor: name
            for name, shard in zip(names, self._shards, strict=True)
            for tensor in shard
        }
        write_json(
            self.staging / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map}
        )

    @contextlib.contextmanager
    def writing(self, what: str, needed: int | None = None) -> Iterator[None]:
        """A full disk and its like are the user's to solve; nothing that was there
        before is lost.
        """
        try:
            yield
        except (OSError, SafetensorError) as error:
            kept = "; finished shards are kept for --resume" if self._resume else ""
            with contextlib.suppress(OSError):
                for half in self.staging.glob("*.tmp"):
                    half.unlink()
            told = reason(error, self.target, needed)
            raise ResourceError(
                f"{self.target}: cannot write {what} ({told}){kept}; {HINT}"
            ) from error


def usual_mode(folder: Path) -> int:
    """What the user's umask gives a new file. safetensors writes for the owner alone, whatever it
    says.

    Found with a file, because asking for the umask itself means to change it for all threads.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        probe = Path(scratch) / "probe"
        probe.touch()
        return stat.S_IMODE(probe.stat().st_mode)


def previous_of(target: Path) -> Path:
    """Where the old folder is while the new one takes its place."""
    return target.with_name(f".{target.name}.previous")


def recover(target: Path) -> None:
    """Clean up after an overwrite that was cut off: between its two renames the old folder returns,
    after them it goes.

    With neither target nor staging nobody can tell which it was: then the old folder is left until
    a new one is complete.
    """
    previous = previous_of(target)
    if not previous.exists():
        return
    if target.exists():
        shutil.rmtree(previous, ignore_errors=True)
    elif target.with_name(f".{target.name}.partial").exists():
        os.rename(previous, target)


def write_json(path: Path, data: dict[str, Any]) -> None:
    half = path.with_suffix(".tmp")
    half.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(half, path)


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    seen: set[int] = set()
    unshared = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        unshared[name] = tensor.clone() if storage.data_ptr() in seen else tensor
        seen.add(storage.data_ptr())
    return unshared


def _sync(path: Path) -> None:
    """Files and folders alike; a system that cannot sync folders (Windows) does without."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
