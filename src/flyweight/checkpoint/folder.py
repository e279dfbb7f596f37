"""The files of a model folder: which of them hold the weights, and what the JSON beside them says.

Nothing here opens weights (shard.py does) or knows what a tensor is for (reader.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flyweight.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
GGUF_SUFFIX = ".gguf"


def check_regular(folder: Path) -> None:
    """Whoever opens a pipe or a device waits for what may never come; links to files are fine."""
    for path in folder.iterdir():
        if path.exists() and not path.is_file() and not path.is_dir():
            raise CheckpointError(f"{path}: not a regular file; a model folder holds files only")


def read_json(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path}: not a regular file")
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent}: no {path.name}; a model folder holds config.json, safetensors files "
            "and a tokenizer"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: a JSON object is wanted, not a {type(data).__name__}")
    return data


def weight_files(folder: Path) -> list[Path]:
    """The shards: those that the index names, or the only safetensors file."""
    if (folder / INDEX).exists():
        return _indexed_files(folder)
    found = sorted(folder.glob("*.safetensors"))
    if (folder / SINGLE) in found:
        return [folder / SINGLE]
    if len(found) == 1 and "-of-" not in found[0].name:
        return found
    if found:
        raise CheckpointError(
            f"{folder}: {len(found)} safetensors shards but no {INDEX}; get the whole folder again"
        )
    if files := sorted(folder.glob(f"*{GGUF_SUFFIX}")):
        if lost := next((file for file in files if not file.exists()), None):
            raise CheckpointError(
                f"{lost}: the file that it leads to is gone; put it back, or delete {folder}"
            )
        return files
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        raise CheckpointError(f"{folder}: only pickle files ({pickles[0]}), {NEVER_READ}")
    raise CheckpointError(
        f"{folder}: no weights (*.safetensors or *{GGUF_SUFFIX}); copy them beside config.json, or "
        f"name the folder that has them"
    )


PICKLES = (".bin", ".pt", ".pth", ".ckpt")
NEVER_READ = (
    "which can run code when opened, so they are never read; convert them: transformers' "
    "`save_pretrained` writes safetensors"
)


def read_index(folder: Path) -> dict[str, str]:
    """Which shard each tensor is in."""
    weight_map = read_json(folder / INDEX).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise CheckpointError(f"{folder / INDEX}: no `weight_map` from tensor names to files")
    return weight_map


def _indexed_files(folder: Path) -> list[Path]:
    weight_map = read_index(folder)
    for name, file in weight_map.items():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{folder / INDEX}: tensor {name!r} is said to be in {file!r}: only safetensors "
                "files of the same folder are read"
            )
        if not (folder / file).exists():
            raise CheckpointError(
                f"{folder / INDEX}: shard {file} (of tensor {name!r}) is missing; get it again"
            )
    return [folder / file for file in sorted(set(weight_map.values()))]
