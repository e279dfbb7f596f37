"""The options of a run of `quantize`, and what they mean for one model on one device.

`Options` is what a user may say; `Setting` is what follows from it once the model and the device
are known.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flyweight.errors import OptionError, unknown
from flyweight.models.config import ModelConfig
from flyweight.quant import recipe as recipes
from flyweight.quant.cache import Budget
from flyweight.quant.calibration import BUILT_IN, Samples
from flyweight.quant.events import Listener, ignore
from flyweight.quant.recipe import Recipe

DTYPES = ("float32", "float16", "bfloat16")
POSITIONAL = (
    "model",
    "scheme",
    "output",
)  # of `quantize` itself, for the hint where a name is misspelled


@dataclass(frozen=True, kw_only=True)
class Options:
    recipe: Recipe | str | Path | None = (
        None  # a recipe of one's own, or its file, instead of a named scheme
    )
    calibration: str | Samples = (
        BUILT_IN  # a text (`read_text`) to draw samples from, or the samples themselves
    )
    samples: int | None = None  # windows of the text; 128 on a GPU, 16 on a CPU
    length: int | None = None  # tokens of each; 2048 on a GPU, 512 on a CPU
    seed: int = 0  # which samples are drawn, and everything else that is random
    resume: bool = False  # go on where an interrupted run with the same options stopped
    overwrite: bool = False  # replace an output folder that exists
    format: str | None = None  # of the files; the one that most engines read for this scheme
    device: str | None = None
    dtype: str | None = None  # of the activations during calibration
    batch: int | None = None  # sequences in a forward pass; 8 on a GPU, 1 on a CPU
    cache_gb: float = 4.0  # host memory for activations; the rest goes to disk
    blocks: int | None = (
        None  # stop after so many decoder blocks, to time a model; no model is written then
    )
    shards: int = 1  # GPUs that are to divide the weights: groups are chosen so that they can
    listen: Listener = ignore

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise OptionError(f"--dtype is float32, float16 or bfloat16, not {self.dtype!r}")

    def changed(self, changes: dict[str, Any]) -> Options:
        """These options with some of them replaced; an unknown name is an error that says which one
        was meant.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise OptionError(f"quantize: {unknown('option', name, [*known, *POSITIONAL])}")
        return dataclasses.replace(self, **changes)

    def chosen_recipe(self, scheme: str) -> Recipe:
        if isinstance(self.recipe, Recipe):
            return self.recipe
        return recipes.load(Path(self.recipe)) if self.recipe else recipes.find(scheme)

    def sample_count(self, device: torch.device) -> int:
        return self.samples or (128 if device.type == "cuda" else 16)

    def sample_length(self, device: torch.device) -> int:
        return self.length or (2048 if device.type == "cuda" else 512)

    def batch_size(self, device: torch.device) -> int:
        return self.batch or (8 if device.type == "cuda" else 1)

    def budget(self, device: torch.device) -> Budget:
        on_device = (3 << 30) if device.type == "cuda" else 0
        return Budget(device_bytes=on_device, host_bytes=int(self.cache_gb * 2**30))


@dataclass(frozen=True)
class Setting:
    """What stays the same for every block of a model while it is quantized."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype  # of activations, and of the weights that make them
    stored: torch.dtype  # of the model's files: what stays plain is written in it
    seed: int
    budget: Budget
    listen: Listener = ignore
