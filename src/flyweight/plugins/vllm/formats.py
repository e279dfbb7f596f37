"""Formats that vLLM cannot read: VPTQ, and recipes that give parts of one layer several kinds.

vLLM's loader walks the tensors of the files and asks a parameter of the same name to take each.
Here those parameters are empty and take nothing: when the loader is done, our own reader (strict,
memory-mapped) reads the weights of a layer by name, `shards` cuts out this rank's part, and the
layer becomes one linear of ours, or (vllm/experts.py) one layer of experts. So every format that
`flyweight` reads works, and nothing is written twice.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from flyweight.checkpoint.reader import Checkpoint
from flyweight.errors import UnsupportedError
from flyweight.plugins.layer import KEY, take
from flyweight.plugins.shards import inputs_of, outputs_of
from flyweight.plugins.vllm.claims import NAME, claims
from flyweight.plugins.vllm.experts import FlyweightExpertsMethod
from flyweight.plugins.vllm.unfilled import add_module_path
from flyweight.tensors import QuantTensor


@functools.cache
def opened(model: str) -> Checkpoint:
    if Path(model).is_dir():
        return Checkpoint(model)
    from flyweight.checkpoint.hub import resolve

    return Checkpoint(resolve(model))


def is_quantized(checkpoint: Checkpoint, prefix: str) -> bool:
    """Whether there is more of it than a weight; a tied head has nothing at all."""
    plain = (f"{prefix}.weight", f"{prefix}.bias")
    return any(name.startswith(f"{prefix}.") and name not in plain for name in checkpoint.names())


def is_plain(checkpoint: Checkpoint, prefix: str) -> bool:
    return checkpoint.has(f"{prefix}.weight") and not is_quantized(checkpoint, prefix)


def is_quantized_below(checkpoint: Checkpoint, prefix: str) -> bool:
    """Whether any module inside has more than a weight."""
    inside = (name for name in checkpoint.names() if name.startswith(f"{prefix}."))
    return any(not name.endswith((".weight", ".bias")) for name in inside)


@register_quantization_config(NAME)
class FlyweightConfig(QuantizationConfig):
    """A folder whose weights our own reader reads."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ""

    def maybe_update_config(self, model_name: str, *_: Any, **__: Any) -> None:
        """vLLM tells the folder after it has made the config, and before it makes layers."""
        self.model = model_name

    @classmethod
    def get_name(cls) -> str:
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FlyweightConfig:
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        return NAME if claims(hf_quant_cfg, user_quant) else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, LinearBase):
            parent, _, last = prefix.rpartition(".")
            parts = [
                f"{parent}.{part}".lstrip(".")
                for part in self.packed_modules_mapping.get(last, [last])
            ]
            checkpoint = opened(self.model)
            if all(is_plain(checkpoint, part) for part in parts):  # vLLM's own; often a router
                return UnquantizedLinearMethod()
            return FlyweightLinearMethod(checkpoint, parts)
        if isinstance(layer, ParallelLMHead) and is_quantized(opened(self.model), prefix):
            raise UnsupportedError(f"{prefix}: vLLM runs the head in 16 bits; leave it so (--head)")
        if isinstance(layer, RoutedExperts) and is_quantized_below(opened(self.model), prefix):
            return FlyweightExpertsMethod(opened(self.model), prefix, layer)
        return None


class FlyweightLinearMethod(LinearMethodBase):
    """One layer of vLLM, whose weights are `parts` of the checkpoint, side by side."""

    def __init__(self, checkpoint: Checkpoint, parts: Sequence[str]) -> None:
        self.checkpoint = checkpoint
        self.parts = parts

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        self.inputs = input_size_per_partition
        self.outputs = output_partition_sizes
        self.dtype = params_dtype
        for name in self._names():
            add_module_path(layer, name)
        self.device = torch.empty(0).device  # of the context that vLLM creates parameters in

    def _names(self) -> list[str]:
        """Of all tensors that the files have for this layer, but the bias, which is vLLM's own."""
        found: dict[str, None] = {}
        for part in self.parts:
            names = [
                name.removeprefix(f"{part}.")
                for name in self.checkpoint.names()
                if name.startswith(f"{part}.")
            ]
            if not names:
                raise UnsupportedError(
                    f"{self.checkpoint.folder} has no tensors of {part!r}, which vLLM asks for"
                )
            found |= dict.fromkeys(names)
        return [name for name in found if name != "bias"]

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if hasattr(layer, KEY):
            return
        rank = getattr(layer, "tp_rank", 0)
        ranks = getattr(layer, "tp_size", 1)
        parts = [part.to(self.device) for part in self._shards(rank, ranks)]
        self.taken = take(layer, parts, dtype=self.dtype, device=self.device)

    def _shards(self, rank: int, ranks: int) -> list[QuantTensor]:
        return shards_of(
            {name: self.checkpoint.linear(name) for name in self.parts},
            outputs=self.outputs,
            inputs=self.inputs,
            rank=(rank, ranks),
        )

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.taken.multiply(layer, x, bias)


def shards_of(
    wholes: dict[str, QuantTensor], *, outputs: list[int], inputs: int, rank: tuple[int, int]
) -> list[QuantTensor]:
    """This rank's part of each projection, by the sizes that vLLM gives the rank: where there are
    fewer key/value heads than ranks, several ranks have the same ones.
    """
    if len(wholes) != len(outputs):
        if rank[1] > 1:
            raise UnsupportedError(f"{next(iter(wholes))} is one tensor and cannot be cut by ranks")
        outputs = [sum(outputs)]
    found = []
    for (name, whole), local in zip(wholes.items(), outputs, strict=True):
        rows, columns = whole.matrix_shape
        if rows % local or columns % inputs:
            raise UnsupportedError(
                f"{name}: {rows} x {columns} weights are no whole number of {local} x {inputs}"
            )
        by_rows = rows // local
        by_columns = columns // inputs
        part = outputs_of(whole, rank[0] * by_rows // rank[1], by_rows, where=name)
        found.append(inputs_of(part, rank[0] * by_columns // rank[1], by_columns, where=name))
    return found
