"""A Hugging Face folder, read strictly: every tensor on demand, every fault by file and tensor
name.

Opening reads only JSON: config, index and the headers of the shards, each checked against the size
of its file, so a cut-off download or an absurd shape is found before a byte of weights is touched.
Tensors are views of the mapped file and are looked through once for NaN and infinity, which costs a
fifth of reading them. Pickle is never opened and `auto_map` (code that comes with a model) never
run.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from flyweight.checkpoint import formats, stacked, text_part
from flyweight.checkpoint.bare_tokenizer import PLAIN, Bare, read_bare
from flyweight.checkpoint.config_checks import check_config, check_generation_config
from flyweight.checkpoint.folder import (
    GGUF_SUFFIX,
    INDEX,
    SINGLE,
    check_regular,
    read_index,
    read_json,
    weight_files,
)
from flyweight.checkpoint.gguf_blocks import TYPES
from flyweight.checkpoint.gguf_shard import GgufShard
from flyweight.checkpoint.names import GATED
from flyweight.checkpoint.shard import Entry, is_finite, open_shard, read_header
from flyweight.errors import CheckpointError
from flyweight.tensors import QuantTensor

GGUF_BLOCKS = frozenset(kind.name for kind in TYPES.values() if kind.read is not None)

# What a tensor that nothing asked for probably is; the first pattern that fits.
LOOKS_LIKE = (
    (
        r"\.(qweight|qzeros|g_idx|weight_packed|weight_scale|weight_zero_point|centroids|indices|input_scale)",
        "part of a quantized layer: is `quantization_config` missing from config.json, or wrong?",
    ),
    (r"lora_[AB]|adapter", "an adapter: merge it into the model first"),
    (r"(^|\.)(visual|vision|audio)", "the vision or audio part of a model with several inputs"),
    (r"\.experts\.", "a mixture-of-experts layer in a model that config.json calls dense"),
    (r"\.bias$", "a bias that config.json does not announce"),
    (r"^lm_head\.", "an output head although config.json ties it to the embedding"),
    (
        r"\.layers\.\d+\.",
        "a layer or part that config.json does not announce: see num_hidden_layers and model_type",
    ),
)


class Checkpoint:
    """`Checkpoint(folder).tensor("model.norm.weight")`; what was never read is in `unused()`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: no such folder")
        check_regular(self.folder)
        self.config: dict[str, Any] = read_json(self.folder / "config.json")
        optional = self.folder / "generation_config.json"
        self.generation_config: dict[str, Any] = read_json(optional) if optional.exists() else {}
        check_config(self.config, self.folder / "config.json")
        check_generation_config(self.generation_config, optional)
        self.files = weight_files(self.folder)
        if (self.folder / INDEX).exists() and (self.folder / SINGLE).exists():
            self._tell_of_single()
        own = {
            file: GgufShard(file, self.config) for file in self.files if file.suffix == GGUF_SUFFIX
        }
        self.entries = _entries(self.folder, self.files, own)
        self._stored: dict[str, str] = {}  # names in the files, where they are others
        if text_part.is_wrapped(self.config):
            self._take_text()
        self._shards: dict[Path, Any] = {
            file: own.get(file) or open_shard(file) for file in self.files
        }
        self._used: set[str] = set()

    def _tell_of_single(self) -> None:
        if self.folder / SINGLE not in self.files:
            formats.notice(
                self,
                f"the shards of {INDEX} are read; transformers would read {SINGLE}, which is there "
                "too: remove what is not meant",
            )

    def _take_text(self) -> None:
        self._stored = text_part.text_names(self.entries)
        self.entries = {name: self.entries[stored] for name, stored in self._stored.items()}
        self.config = text_part.text_config(self.config, self.entries)
        check_config(self.config, self.folder / "config.json")

    # -- tensors -----------------------------------------------------------------------------------

    def names(self) -> list[str]:
        return list(self.entries)

    def has(self, name: str) -> bool:
        return name in self.entries or stacked.has_bias(self, name)

    def entry(self, name: str) -> Entry:
        if name not in self.entries:
            near = difflib.get_close_matches(name, self.entries, n=1, cutoff=0.8)
            hint = f"; the nearest there is {near[0]!r}" if near else ""
            raise CheckpointError(f"{self.folder}: tensor {name!r} is missing{hint}")
        return self.entries[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entry(name).shape

    def tensor(self, name: str) -> Tensor:
        """A view of the mapped file in its stored type, free of NaN and infinity."""
        if name not in self.entries and (bias := stacked.read_bias(self, name)) is not None:
            return bias
        file = self.entry(name).file
        try:
            tensor = self._shards[file].get_tensor(self._stored.get(name, name))
        except (SafetensorError, RuntimeError, AttributeError) as error:
            raise CheckpointError(f"{file}: tensor {name!r} cannot be read ({error})") from error
        if name not in self._used and not is_finite(tensor):
            raise CheckpointError(
                f"{file}: tensor {name!r} holds NaN or infinity: the file is damaged, or the model "
                "never fitted its dtype; get or convert it again"
            )
        self._used.add(name)
        return tensor

    def in_blocks(self, name: str) -> bool:
        """Is it a matrix of a GGUF file, in that file's bits?"""
        entry = self.entries.get(name)
        return (
            entry is not None
            and len(entry.shape) == 2
            and entry.file.suffix == GGUF_SUFFIX
            and entry.dtype in GGUF_BLOCKS
        )

    def blocks(self, name: str) -> QuantTensor | None:
        """Such a matrix as it is; None where it is no such one."""
        if not self.in_blocks(name):
            return None
        self._used.add(name)
        return self._shards[self.entries[name].file].weight(self._stored.get(name, name))

    def expect(self, name: str, shape: Sequence[int]) -> Tensor:
        """The tensor, if it has the shape that the config implies; checked before it is read."""
        entry = self.entry(name)
        if entry.shape != tuple(shape):
            raise CheckpointError(
                f"{entry.file}: tensor {name!r} has shape {list(entry.shape)}, but config.json "
                f"implies {list(shape)}"
            )
        return self.tensor(name)

    def linear(self, prefix: str) -> QuantTensor:
        """The weight of the module `prefix`, as its quantization format reads it, or plain."""
        return formats.read_linear(self.format, self, prefix)

    @functools.cached_property
    def format(self) -> formats.Format | None:
        """The on-disk format of the quantized weights, None for a plain checkpoint."""
        if any(self.in_blocks(name) for name in self.entries):
            return formats.Gguf()
        return formats.find(self.config, self)

    # -- strictness --------------------------------------------------------------------------------

    def unused(self, ignore: Iterable[str] = ()) -> list[str]:
        """Names that nothing has read, less those that fit one of the `ignore` patterns (`*` and
        `?`).
        """
        spare = self.format.spare if self.format else ()
        patterns = (
            "*.rotary_emb.inv_freq",
            "*.attn.masked_bias",
            "mtp.*",
            *self._next_token_layers(),
            *spare,
            *ignore,
        )
        return [
            name
            for name in self.entries
            if name not in self._used and not any(fnmatchcase(name, p) for p in patterns)
        ]

    def _next_token_layers(self) -> list[str]:
        """Layers behind the last one guess further tokens ahead; the model itself does not need
        them.
        """
        count, layers = (
            self.config.get("num_nextn_predict_layers"),
            self.config.get("num_hidden_layers"),
        )
        if self.config.get("model_type") in GATED:
            return ["mtp.*"]
        if type(count) is not int or type(layers) is not int:
            return []
        return [f"model.layers.{layers + index}.*" for index in range(min(count, 16))]

    def check_used(self, ignore: Iterable[str] = (), *, within: str = "") -> None:
        """Every tensor of the files must have been read, or every one whose name begins so: a model
        that loads by half gives garbage.
        """
        left = [name for name in self.unused(ignore) if name.startswith(within)]
        if not left:
            return
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        guess = next(
            (text for pattern, text in LOOKS_LIKE if re.search(pattern, left[0])),
            "not a part of this architecture",
        )
        raise CheckpointError(
            f"{self.entries[left[0]].file}: without a place in the model: "
            f"{', '.join(left[:3])}{more}; looks like {guess}"
        )

    # -- the rest of the folder --------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def has_tokenizer(self) -> bool:
        """Folders of random weights have none and take token ids only."""
        return any(
            next(self.folder.glob(pattern), None)
            for pattern in ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
        )

    def tokenizer(self) -> Any:
        if not self.has_tokenizer:  # for some models transformers makes one that knows no words
            raise CheckpointError(
                f"{self.folder}: there is no tokenizer; copy tokenizer.json and "
                "tokenizer_config.json from where the model is from"
            )
        import transformers

        settings = self.folder / "tokenizer_config.json"
        plain = settings.is_file() and read_json(settings).get("tokenizer_class") in PLAIN
        # To find out the class, AutoTokenizer imports every model's configuration: two seconds.
        kind = transformers.PreTrainedTokenizerFast if plain else transformers.AutoTokenizer
        try:
            return kind.from_pretrained(
                str(self.folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises whatever its parts raise
            reason = str(error).strip().split("\n")[0]
            raise CheckpointError(
                f"{self.folder}: the tokenizer cannot be loaded ({reason})"
            ) from error

    def bare_tokenizer(self) -> Bare | None:
        """The tokenizer without transformers; None where only that knows it."""
        settings = self.folder / "tokenizer_config.json"
        return read_bare(self.folder, read_json(settings)) if settings.is_file() else None

    def hash(self) -> str:
        """Which weights these are: the first 16 digits of a SHA-256 over every byte of the files,
        in order of their names.
        """
        return self._digest

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes with the config and with the files of weights, as far as their sizes and times
        tell.
        """
        states = [(file.resolve(), file.stat()) for file in self.files]
        listed = [f"{file}:{state.st_size}:{state.st_mtime_ns}" for file, state in states]
        return "\n".join([json.dumps(self.config, sort_keys=True, default=str), *listed])

    @functools.cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for file in self.files:
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()[:16]


def _entries(folder: Path, files: Sequence[Path], own: dict[Path, GgufShard]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for file in files:
        found = _gguf_entries(own[file]) if file in own else read_header(file)
        for name, entry in found.items():
            if name in entries:
                raise CheckpointError(
                    f"{file}: tensor {name!r} is also in "
                    f"{entries[name].file.name}; which one is meant?"
                )
            entries[name] = entry
    if (folder / INDEX).exists():
        for name, file_name in read_index(folder).items():
            if name not in entries or entries[name].file.name != file_name:
                raise CheckpointError(
                    f"{folder / INDEX}: says that tensor {name!r} is in {file_name}, but it is not"
                )
    return entries


def _gguf_entries(shard: GgufShard) -> dict[str, Entry]:
    return {
        name: Entry(shard.file, stored.shape, shard.type_name(name), stored.nbytes)
        for name, stored in shard.table.items()
    }
