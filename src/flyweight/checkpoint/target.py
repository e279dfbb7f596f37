"""The place of a folder that is to be written, and what may go there: an earlier model, nothing
else.

A folder is replaced as a whole, so whatever else it holds would be lost: a name that was mistyped,
or a variable of a shell that was empty, must not cost anybody their files.
"""

from __future__ import annotations

import fnmatch
from pathlib import Path

from flyweight.errors import OptionError, ResourceError

# Everything beside the weights that belongs to a model, and goes with it.
CARRIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "LICENSE*",
    "NOTICE*",
)
# What else a folder holds that is nothing but a model.
OF_A_MODEL = (
    *CARRIED,
    "*.safetensors",
    "*.json",
    "*.model",
    "*.tiktoken",
    "vocab.txt",
    "README.md",
    ".gitattributes",
)


def place_of(target: str | Path) -> Path:
    """Its absolute path; of a link the folder behind it, which can be renamed as a link cannot."""
    try:
        place = Path(target).absolute()
        here = Path.cwd()
    except FileNotFoundError:
        raise ResourceError(
            "the folder that this command runs in is gone; change to another one"
        ) from None
    if place.is_symlink():
        place = place.resolve()
    if here.resolve().is_relative_to(place.resolve()):
        raise OptionError(
            f"--output {str(target)!r}: the new folder would take the place of {place}, in which "
            "this command runs; give it a name of its own"
        )
    return place


def check_target(place: Path, *, overwrite: bool, source: Path | None = None) -> None:
    """Before the work: that what is there may go. `source` is what the new folder is made of."""
    if place.exists() and not place.is_dir():
        raise OptionError(f"{place} is a file; choose another name for the folder")
    if source is not None and source.resolve().is_relative_to(place.resolve()):
        raise OptionError(
            f"{place} holds the model that is read, and would be replaced; choose another folder"
        )
    if not place.exists() or not any(place.iterdir()):
        return
    if not overwrite:
        raise OptionError(f"{place} exists already; pass --overwrite or choose another folder")
    if (foreign := not_of_a_model(place)) is not None:
        raise OptionError(
            f"{place} holds {foreign}, and --overwrite replaces models alone: everything in the "
            "folder would be lost; choose another one, or empty it yourself"
        )


def not_of_a_model(folder: Path) -> str | None:
    """What a folder holds that no model does, or that it holds no model."""
    for path in sorted(folder.iterdir()):
        known = any(fnmatch.fnmatchcase(path.name, pattern) for pattern in OF_A_MODEL)
        if path.is_dir() or not known:
            return path.name
    return None if (folder / "config.json").exists() else "no config.json"
