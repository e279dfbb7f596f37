"""Finished blocks → a model folder in one of the file formats. The folder appears whole or not at
all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flyweight.checkpoint.formats import Format
from flyweight.checkpoint.writer import CheckpointWriter, write_json
from flyweight.models.config import ModelConfig
from flyweight.models.narrow_head import AS_STORED, SERVED
from flyweight.models.standard import plan_of
from flyweight.quant.calibrate import block_name, tuned_name
from flyweight.quant.recipe import Recipe
from flyweight.quant.store import BlockStore, FinishedBlock
from flyweight.quant.summary import bits_per_weight, layer_figures, layer_tensors

NOTE = "flyweight.json"
SHARD_BYTES = 1 << 30  # the host holds a shard twice while it is written


class Assembly:
    """One model: `finished` tells what the blocks are, `store` holds them."""

    def __init__(
        self,
        source: Any,
        config: ModelConfig,
        recipe: Recipe,
        store: BlockStore,
        finished: Sequence[FinishedBlock],
    ) -> None:
        self.source = source
        self.config = config
        self.recipe = recipe
        self.store = store
        self.finished = finished

    def write(
        self, output: Path, form: Format, fingerprint: dict[str, Any], *, overwrite: bool
    ) -> None:
        layers = layer_tensors(self.finished)
        quantized = {name: tensor for name, tensor in layers.items() if tensor.kind != "plain"}
        routers = plan_of(self.config).routers
        plain = [name for name in [*layers, *routers, "lm_head"] if name not in quantized]
        config = dict(self.source.config)
        config["quantization_config"] = form.config(quantized, ignore=dict.fromkeys(plain))
        if "lm_head" in quantized:
            config["tie_word_embeddings"] = False
        if self.recipe.embeddings != "keep":
            config.pop("torch_dtype", None)
            config["dtype"] = self.recipe.embeddings
        if self.recipe.served_head != AS_STORED and "lm_head" not in quantized:
            config[SERVED] = self.recipe.served_head
        with CheckpointWriter(output, SHARD_BYTES, overwrite=overwrite) as writer:
            for name, tensor in self.tensors(form):
                writer.add(name, tensor)
            writer.flush()
            made = {
                "written_as": form.name,
                "bits_per_weight": bits_per_weight(quantized.values()),
                "layers": layer_figures(self.finished),
                "transforms": self.transforms(),
            }
            with writer.writing(NOTE):
                write_json(writer.staging / NOTE, fingerprint | self.tuned() | made)
            writer.finish(config, source=getattr(self.source, "folder", None))

    def tuned(self) -> dict[str, Any]:
        return {"tuned": self.store.load(tuned_name(0)).report} if self.recipe.tune_steps else {}

    def transforms(self) -> dict[str, Any]:
        found = {}
        for index, part in enumerate(self.finished[:-1]):
            kept = {
                key: part.report[key]
                for key in ("scales", "learned", "healed")
                if key in part.report
            }
            found[f"model.layers.{index}"] = kept
        return found

    def tensors(self, form: Format) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in the order of the old model: embedding, blocks, final norm, head."""
        yield self.kept("model.embed_tokens.weight")
        for index in range(self.config.layers):
            block = self.store.load(
                tuned_name(index) if self.recipe.tune_steps else block_name(index)
            )
            prefix = f"model.layers.{index}."
            for name, tensor in block.linears.items():
                yield from form.write(prefix + name, tensor).items()
            for name, value in block.tensors.items():
                yield prefix + name, self.cast(value)
        yield self.kept("model.norm.weight")
        if self.finished[-1].linears:
            head = self.store.load("head").linears["lm_head"]
            yield from form.write("lm_head", head).items()
        elif not self.config.tied_embeddings:
            yield self.kept("lm_head.weight")

    def kept(self, name: str) -> tuple[str, Tensor]:
        return name, self.cast(self.source.tensor(name))

    def cast(self, tensor: Tensor) -> Tensor:
        if self.recipe.embeddings == "keep":
            return tensor
        return tensor.to(getattr(torch, self.recipe.embeddings))
