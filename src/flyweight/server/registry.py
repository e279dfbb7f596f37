"""Which servers run on this machine: each leaves a file while it lives, and `flyweight ps` reads
them.

The file is locked for as long as its server lives, so one that was killed is told from one that
runs, whatever became of its process number.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from flyweight.checkpoint.hub import cache_folder


def servers_folder() -> Path:
    return cache_folder() / "servers"


@contextlib.contextmanager
def registered(facts: dict[str, Any]) -> Iterator[None]:
    """`facts` can be read by others until the end; a cache that cannot be written keeps no server
    from serving.
    """
    path = servers_folder() / f"{os.getpid()}-{facts['port']}.json"
    lock = FileLock(path.with_suffix(".lock"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        path.write_text(json.dumps(facts | {"pid": os.getpid(), "started": time.time()}))
    except (OSError, Timeout):
        yield
        return
    try:
        yield
    finally:
        forget(path, lock)


def running_servers() -> list[dict[str, Any]]:
    """Those that live, oldest first; the files of the dead are swept up."""
    found = []
    for path in sorted(servers_folder().glob("*.json")):
        lock = FileLock(path.with_suffix(".lock"))
        try:
            lock.acquire(timeout=0)
        except (Timeout, OSError):
            # it has just ended, or is just beginning
            with contextlib.suppress(OSError, ValueError):
                found.append(json.loads(path.read_text(encoding="utf-8")))
            continue
        forget(path, lock)
    return sorted(found, key=lambda facts: facts.get("started", 0))


def forget(path: Path, lock: FileLock) -> None:
    path.unlink(missing_ok=True)
    lock.release()
    Path(lock.lock_file).unlink(missing_ok=True)
