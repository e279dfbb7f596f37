"""Models that are on this machine: those of our cache, and those of the Hugging Face hub's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from flyweight.checkpoint import prepared
from flyweight.checkpoint.hub import converted_folder, kept_folder
from flyweight.errors import OptionError, ResourceError, unknown


@dataclass(frozen=True)
class CachedModel:
    name: str  # what `rm` calls it; the other verbs know it by this name or by its folder
    source: str  # flyweight or hub
    folder: Path
    bytes: int
    modified: float  # seconds since 1970
    delete: Callable[[], None]


def cached_models() -> list[CachedModel]:
    return sorted([*our_models(), *hub_models()], key=lambda model: model.name.lower())


def our_models() -> list[CachedModel]:
    """GGUF files with their configs, and folders that were made of such files in 16 or 32 bits."""
    kept = {folder.name: folder for folder in model_folders(kept_folder())}
    made = {folder.name: folder for folder in model_folders(converted_folder())}
    renamed = {f"{name}-float16" if name in kept else name: folder for name, folder in made.items()}
    return [our_model(name, folder) for name, folder in (kept | renamed).items()]


def model_folders(root: Path) -> list[Path]:
    folders = (
        [path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")]
        if root.is_dir()
        else []
    )
    return [folder for folder in folders if (folder / "config.json").is_file()]


def our_model(name: str, folder: Path) -> CachedModel:
    # a link, not what it leads to
    size = sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())
    return CachedModel(
        name, "flyweight", folder, size, folder.stat().st_mtime, lambda: delete_folder(folder)
    )


def delete_folder(folder: Path) -> None:
    """Under the lock that whoever makes it holds; out of the way first, so that nobody reads half
    of it.
    """
    doomed = folder.with_name(f".{folder.name}.deleted")
    lock = folder.with_name(f".{folder.name}.lock")
    try:
        with FileLock(lock, timeout=0):
            shutil.rmtree(doomed, ignore_errors=True)
            folder.rename(doomed)
            shutil.rmtree(doomed)
    except Timeout:
        raise ResourceError(
            f"{folder.name} is being made by another process; try again later"
        ) from None
    except OSError as error:
        raise ResourceError(f"{folder}: cannot be deleted ({error.strerror or error})") from error
    prepared.remove(folder)
    lock.unlink(missing_ok=True)


def hub_models() -> list[CachedModel]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        cache = scan_cache_dir()
    except (CacheNotFound, OSError):  # nothing was ever fetched
        return []
    return [hub_model(cache, repo) for repo in cache.repos if repo.repo_type == "model"]


def hub_model(cache: Any, repo: Any) -> CachedModel:
    def delete() -> None:
        for revision in repo.revisions:
            prepared.remove(revision.snapshot_path)
        cache.delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute()

    return CachedModel(
        repo.repo_id, "hub", Path(repo.repo_path), repo.size_on_disk, repo.last_modified, delete
    )


def find_cached(name: str) -> CachedModel:
    models = cached_models()
    for model in models:
        if name == model.name or Path(name).expanduser().resolve() == model.folder.resolve():
            return model
    if not models:
        raise OptionError(f"{name!r} is not in the cache, which is empty")
    raise OptionError(unknown("cached model", name, [model.name for model in models]))
