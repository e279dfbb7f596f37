"""Recipes: what is done to which layer. `--scheme` names one of schemes.toml, `--recipe` a file of
the same form.

name = "mine" base = "gptq-int4"            # start from a named scheme smooth = 0.8
# keys of the whole model: smooth, scale_search, sparse, rotate, learn_*, heal_*, tune_*,
# own_text, embeddings, served_head

[[layers]]                    # the last line that fits a layer's full name wins, key by key
match = "*.mlp.down_proj"
bits = 8

[[layers]]
match = "model.layers.{last}.*"   # of the last block, however many there are

[[layers]]
match = "lm_head"             # the head stays as it is unless a line names it
solver = "rtn"
"""

from __future__ import annotations

import dataclasses
import functools
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from flyweight.errors import OptionError, unknown
from flyweight.models.narrow_head import AS_STORED, BITS
from flyweight.quant.fp8 import FP8
from flyweight.quant.gptq import GPTQ
from flyweight.quant.grid import Integers
from flyweight.quant.trellis import TrellisCode
from flyweight.quant.vptq import VPTQ
from flyweight.tensors.trellis import STATE_BITS

SOLVERS = ["rtn", "gptq", "awq", "vptq", "trellis", "fp8", "keep"]  # and those of `solve.register`
UNCALIBRATED = {"keep"}  # solvers that never look at inputs
VPTQ_NAME = re.compile(r"vptq:v(\d+)-k(\d+)(?:-(\d+))?(?:-o(\d+(?:\.\d+)?))?")


@dataclass(frozen=True)
class Layer:
    """What is done to one linear. Keys that its solver has no use for are ignored, so that lines
    can be shared.
    """

    solver: str = "gptq"
    bits: int = 4
    group_size: int = 128  # −1: one group per output channel
    symmetric: bool = True
    ranges: str = "minmax"
    activations: str = "none"  # or "int8": per token, at run time
    act_order: bool = True
    damping: float = 0.01
    sweeps: int = 0
    vector_length: int = 0  # vptq: 0 chooses the shape from `bits`
    centroids: int = 65536
    residual_centroids: int = 0
    outliers: float = 0.0
    refits: int = 2
    fp8_scales: str = "channel"
    fp8_activation: str = "token"

    def __post_init__(self) -> None:
        if self.solver not in SOLVERS:
            raise OptionError(unknown("solver", self.solver, SOLVERS))
        if self.activations not in ("none", "int8"):
            raise OptionError(unknown("activations", self.activations, ("none", "int8")))
        if self.activations == "int8" and (self.bits, self.group_size, self.symmetric) != (
            8,
            -1,
            True,
        ):
            raise OptionError("int8 activations go with symmetric 8-bit weights and group_size -1")
        if self.solver == "trellis" and self.bits not in STATE_BITS:
            raise OptionError(f"a trellis has 2 or 3 bits, not {self.bits}")
        self.integers(torch.float16), self.fp8()  # their own checks

    @property
    def needs_statistics(self) -> bool:
        plain = self.solver == "rtn" and self.ranges != "importance"
        return not (
            plain
            or self.solver in UNCALIBRATED
            or (self.solver == "fp8" and self.fp8_activation != "static")
        )

    def integers(self, dtype: torch.dtype) -> Integers:
        """`dtype` is that of the model: scales in bfloat16 for a bfloat16 model, whose engines
        would round them to it.
        """
        whole = self.activations == "int8"
        scale_dtype = (
            torch.float32 if whole else torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
        )
        return Integers(
            self.bits, self.group_size, self.symmetric, self.ranges, not whole, scale_dtype
        )

    def gptq(self) -> GPTQ:
        return GPTQ(act_order=self.act_order, damping=self.damping, sweeps=self.sweeps)

    def vptq(self, dtype: torch.dtype, seed: int) -> VPTQ:
        book = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
        shared: dict[str, Any] = dict(
            outliers=self.outliers, refits=self.refits, damping=self.damping, seed=seed, dtype=book
        )
        if not self.vector_length:
            return VPTQ(bits=self.bits, **shared)
        return VPTQ(
            length=self.vector_length,
            main=self.centroids,
            residual=self.residual_centroids,
            **shared,
        )

    def trellis(self, dtype: torch.dtype) -> TrellisCode:
        scales = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
        return TrellisCode(self.bits, self.damping, self.sweeps, dtype=scales)

    def fp8(self) -> FP8:
        return FP8(self.fp8_scales, self.fp8_activation)


@dataclass(frozen=True)
class Recipe:
    name: str
    layer: Layer
    lines: tuple[tuple[str, dict[str, Any]], ...] = ()  # (pattern, changed keys of Layer)
    summary: str = ""
    engines: str = ""
    smooth: float | str | None = None  # SmoothQuant's α, "balance" or "search"
    scale_search: bool = False  # AWQ's
    sparse: bool = False  # prune 2:4 first
    rotate: bool = False  # the hidden state into another basis, where the layers allow it
    learn_steps: int = 0  # learned rounding
    learn_batch: int = 8
    learn_rate: float = 0.0  # 0: one over the number of steps
    # of a block behind each stage that is solved: weights still in floats make up for its errors
    heal_steps: int = 0
    heal_rate: float = 1e-3
    tune_steps: int = 0  # scales, books and norms of the whole model tuned on its predictions
    tune_batch: int = 8
    tune_rate: float = 1e-3
    tune_rounding: float = 0.0  # how many steps of their grid codes may travel with them
    # an error counts by its share of the hidden state that it is added to, token by token
    relative: bool = False
    own_text: float = 0.0  # samples that the original writes, for each of the calibration text
    tune_text: float = 0.0  # and so many more that only tuning sees
    embeddings: str = "keep"  # or a dtype to store embeddings and norms in
    served_head: str = "stored"  # or bits that the head is rounded to when the model is loaded

    def __post_init__(self) -> None:
        if isinstance(self.smooth, str) and self.smooth not in ("balance", "search"):
            raise OptionError(
                f'recipe {self.name!r}: smooth is a number, "balance" or "search", not '
                f"{self.smooth!r}"
            )
        if self.smooth == "search" and self.layer.activations == "int8":
            raise OptionError(
                f'recipe {self.name!r}: smooth = "search" looks at weights alone; int8 '
                'activations take "balance"'
            )
        for key, share in {"own_text": self.own_text, "tune_text": self.tune_text}.items():
            if share < 0:
                raise OptionError(f"recipe {self.name!r}: {key} is 0 or more, not {share}")
        if self.embeddings not in ("keep", "float16", "bfloat16", "float32"):
            raise OptionError(
                f"recipe {self.name!r}: "
                + unknown("embeddings", self.embeddings, ("keep", "float16", "bfloat16"))
            )
        if self.served_head not in (AS_STORED, *BITS):
            raise OptionError(
                f"recipe {self.name!r}: "
                + unknown("served_head", self.served_head, (AS_STORED, *BITS))
            )

    @property
    def follows_original(self) -> bool:
        """Whether the original model has to run beside the quantized one."""
        return max(self.learn_steps, self.heal_steps, self.tune_steps) > 0

    @property
    def calibrated(self) -> bool:
        """Whether a text is needed at all."""
        if self.smooth is not None or self.scale_search or self.sparse or self.follows_original:
            return True
        layers = [
            self.layer,
            *(dataclasses.replace(self.layer, **changes) for _, changes in self.lines),
        ]
        return any(layer.needs_statistics for layer in layers)

    @property
    def own_shares(self) -> tuple[float, float]:
        """Samples that the original is to write, for each of the calibration text: what all
        stages see, and what only tuning does.
        """
        if not self.calibrated:
            return 0.0, 0.0
        return self.own_text, self.tune_text if self.tune_steps else 0.0

    def layer_for(self, name: str) -> Layer:
        """The layer called `model.layers.3.mlp.down_proj` or `lm_head`."""
        fitting = [changes for pattern, changes in self.lines if fnmatchcase(name, pattern)]
        if not fitting and name == "lm_head":
            return dataclasses.replace(self.layer, solver="keep")
        merged: dict[str, Any] = {}
        for changes in fitting:
            merged |= changes
        return dataclasses.replace(self.layer, **merged)

    def layers_for(self, index: int, linears: Sequence[str]) -> list[Layer]:
        """Of linears named inside the decoder layer `index`."""
        return [self.layer_for(f"model.layers.{index}.{name}") for name in linears]

    def with_group_size(self, fit: Any) -> Recipe:
        """Every group size passed through `fit`: the model's widths decide."""
        lines = tuple(
            (
                pattern,
                changes | {"group_size": fit(changes["group_size"])}
                if "group_size" in changes
                else changes,
            )
            for pattern, changes in self.lines
        )
        layer = dataclasses.replace(self.layer, group_size=fit(self.layer.group_size))
        return dataclasses.replace(self, layer=layer, lines=lines)

    def with_last_block(self, index: int) -> Recipe:
        """Patterns that name the last block, with its number."""
        lines = tuple(
            (pattern.replace("{last}", str(index)), changes) for pattern, changes in self.lines
        )
        return dataclasses.replace(self, lines=lines)

    def to_dict(self) -> dict[str, Any]:
        """As a recipe file would say it; `from_dict` reads it back."""
        data = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("layer", "lines") and getattr(self, field.name) != field.default
        }
        data |= {
            key: value
            for key, value in dataclasses.asdict(self.layer).items()
            if value != getattr(Layer, key)
        }
        if self.lines:
            data["layers"] = [{"match": pattern, **changes} for pattern, changes in self.lines]
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str) -> Recipe:
        data = dict(data)
        try:
            base = find(str(data.pop("base"))) if "base" in data else cls("", Layer())
        except OptionError as error:
            raise OptionError(f"{where}: {error}") from None
        lines = data.pop("layers", [])
        known = {
            field.name: field
            for field in dataclasses.fields(cls)
            if field.name not in ("layer", "lines")
        }
        layer_keys = {field.name: field for field in dataclasses.fields(Layer)}
        own: dict[str, Any] = {}
        layer: dict[str, Any] = {}
        for key, value in data.items():
            if key not in known and key not in layer_keys:
                raise OptionError(
                    f"{where}: {unknown('key', key, [*known, *layer_keys, 'base', 'layers'])}"
                )
            (own if key in known else layer)[key] = checked(
                where, key, value, str((known | layer_keys)[key].type)
            )
        own.setdefault("name", Path(where).stem)
        try:
            return dataclasses.replace(
                base,
                **own,
                layer=dataclasses.replace(base.layer, **layer),
                lines=base.lines + tuple(parse_line(where, line, base.layer) for line in lines),
            )
        except OptionError as error:
            raise OptionError(f"{where}: {error}") from None


def parse_line(where: str, line: Any, base: Layer) -> tuple[str, dict[str, Any]]:
    layer_keys = {field.name: field for field in dataclasses.fields(Layer)}
    if not isinstance(line, dict) or not isinstance(line.get("match"), str):
        raise OptionError(
            f'{where}: every [[layers]] table needs `match`, a pattern such as "*.down_proj"'
        )
    changes = {key: value for key, value in line.items() if key != "match"}
    for key, value in changes.items():
        if key not in layer_keys:
            raise OptionError(
                f"{where}: layers {line['match']!r}: {unknown('key', key, ['match', *layer_keys])}"
            )
        checked(where, key, value, str(layer_keys[key].type))
    dataclasses.replace(base, **changes)  # its own checks
    return line["match"], changes


def checked(where: str, key: str, value: Any, kind: str) -> Any:
    """TOML's types are strict, and so are ours; a whole number will do for a float."""
    kinds = {"str": str, "int": int, "float": float, "bool": bool, "None": type(None)}
    allowed = tuple(kinds[part.strip()] for part in kind.split("|"))
    if float in allowed and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise OptionError(f"{where}: {key} is {value!r}, a {kind} is wanted")
    return value


@functools.cache
def named() -> dict[str, Recipe]:
    """Every scheme by name, in the order of the file."""
    data = tomllib.loads(
        files("flyweight.quant").joinpath("schemes.toml").read_text(encoding="utf-8")
    )
    return {
        name: Recipe.from_dict({"name": name, **keys}, f"scheme {name}")
        for name, keys in data.items()
    }


def find(scheme: str) -> Recipe:
    """A named scheme, or `vptq:v8-k65536-256` (vector length, centroids, residual centroids; `-o2`
    for 2 % outlier columns).
    """
    if scheme.startswith("vptq:"):
        if not (parts := VPTQ_NAME.fullmatch(scheme)):
            raise OptionError(f"scheme {scheme!r} is not of the form vptq:v8-k65536-256")
        length, main, residual, outliers = parts.groups()
        layer = Layer(
            "vptq",
            vector_length=int(length),
            centroids=int(main),
            residual_centroids=int(residual or 0),
            outliers=float(outliers or 0) / 100,
        )
        return Recipe(
            scheme,
            layer,
            engines="Flyweight, transformers with vptq",
            summary="codebooks of a chosen shape",
        )
    if scheme not in named():
        raise OptionError(unknown("scheme", scheme, [*named(), "vptq:v8-k65536-256"]))
    return named()[scheme]


def load(path: Path) -> Recipe:
    """A recipe file."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OptionError(f"--recipe {path}: no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OptionError(f"--recipe {path}: not a readable TOML file ({error})") from error
    return Recipe.from_dict(data, str(path))
