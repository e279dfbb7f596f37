"""The reference of a speed run's check: the logits that a model's weights mean, kernels left out.

Each product is `dequantize()` with inputs that went through `quantize_input()`, as the format says,
and everything around it is plain torch. One block at a time is in memory, and of a block's MLP so
many tokens at a time that the reference fits beside the engine that is checked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from flyweight.kernels import reference
from flyweight.models.attention import Whole
from flyweight.models.decoder import Decoder
from flyweight.models.layer import Block
from flyweight.models.layers import EMBEDDING, Weights
from flyweight.models.rope import long_rows
from flyweight.tensors import QuantTensor
from flyweight.tensors.rounding import STORED, product_noise

AT_ONCE = 8192  # tokens that go through a block's MLP, or are rounded, together
MOVED = 0.1  # share of tokens that a near tie may send to another expert, in each layer


@dataclass
class Meter:
    """What was seen of the formats: their kinds, and how much their inputs lost by rounding."""

    kinds: set[str] = field(default_factory=set)
    lost: Tensor | float = 0.0  # sum of squared relative errors of products' inputs
    products: int = 0

    def add(self, before: Tensor, after: Tensor) -> None:
        exact = before.double()
        self.lost = self.lost + (after - exact).square().sum() / exact.square().sum()
        self.products += 1

    @property
    def inputs(self) -> float:
        """Rounding of activations, relative, rms over all products."""
        return math.sqrt(float(self.lost) / self.products) if self.products else 0.0


@dataclass(frozen=True, eq=False)
class ByReference(QuantTensor):
    """A weight that no kernel knows, so that it is dequantized: `inner`, with a meter."""

    kind: ClassVar[str] = "reference"
    inner: QuantTensor
    meter: Meter

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.inner.matrix_shape

    @property
    def experts(self) -> int | None:
        return self.inner.experts

    def _dequantize(self) -> Tensor:
        return self.inner._dequantize()

    def quantize_input(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        found = torch.empty_like(rows)
        for begin in range(0, len(rows), AT_ONCE):
            part = rows[begin : begin + AT_ONCE]
            rounded = self.inner.quantize_input(part)
            if rounded is part:
                return x
            self.meter.add(part, rounded)
            found[begin : begin + AT_ONCE] = rounded
        return found.view(x.shape)

    def _merge(self, others: Sequence[Any]) -> Self | None:
        joined = self.inner._merge([other.inner for other in others])
        return None if joined is None else type(self)(joined, self.meter)


class ReferenceWeights:
    """Weights as they are, each linear handed out as `ByReference`."""

    def __init__(self, weights: Weights, meter: Meter):
        self.weights = weights
        self.config: Any = weights.config
        self.meter = meter

    def has(self, name: str) -> bool:
        return self.weights.has(name)

    def tensor(self, name: str) -> Tensor:
        return self.weights.tensor(name)

    def linear(self, prefix: str) -> QuantTensor:
        found = self.weights.linear(prefix)
        if prefix == EMBEDDING:  # rows are looked up, nothing is multiplied
            return found
        self.meter.kinds.add(found.kind)
        return ByReference(found, self.meter)

    def check_used(self) -> None:
        self.weights.check_used()


@dataclass(frozen=True)
class Attended:
    """The second half of a block: what attention gave is known."""

    value: Tensor
    lengths: Tensor | None = None
    adapters: Tensor | None = None
    beside: bool = False

    def attend(self, block: Block, hidden: Tensor) -> Tensor:
        return self.value


@dataclass(frozen=True)
class Reference:
    """A model by its weights' meaning; `dtype` is that of the engine it is compared with."""

    weights: Weights
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def open(
        cls, model: str, *, device: torch.device, dtype: str | None, head: str | None = None
    ) -> Reference:
        from flyweight.engine.loading import choose_dtype, open_model
        from flyweight.models.narrow_head import narrow_head

        weights, _ = open_model(model, device)
        return cls(narrow_head(weights, head), device, choose_dtype(dtype, weights.config, device))

    @torch.inference_mode()
    def logits(
        self, sequences: Sequence[Sequence[int]], positions: Sequence[int]
    ) -> tuple[Tensor, Meter]:
        """[sequences, positions, vocabulary] in float32; sequences of one length."""
        meter = Meter()
        weights = ReferenceWeights(self.weights, meter)
        place: dict[str, Any] = {"device": self.device, "dtype": self.dtype, "exact": True}
        decoder = Decoder.load(weights, layers=(), **place)
        decoder.ops = reference
        tokens = torch.tensor(sequences, device=self.device)
        if tokens.shape[1] > decoder.config.context_length:
            raise ValueError(f"{tokens.shape[1]} tokens are more than the model's context")
        hidden = decoder.embedding(tokens)
        first = long_rows(decoder.config, tokens.shape[1])
        stage = Whole(tokens.shape[1], decoder.ropes, reference, first=first)
        for index in range(decoder.config.layers):
            block = Block.load(weights, decoder.config, index, **place)
            block.use_ops(reference)
            run_block(block, hidden, stage)
            del block  # before the next is made
        return decoder.logits(hidden[:, list(positions)]), meter

    def noise(self, meter: Meter, kv_dtype: str | None) -> float:
        """What two right engines' logits may be apart, as a share of the logits' deviation.

        Every product adds its noise to the residual, and so do the next layers' of inputs that
        differ: √(2 · layers) is that of two sublayers a layer whose noise arrives whole. A near tie
        of the router sends a token to another of its experts, which weighs one in so many.
        """
        from flyweight.models.config import ModelConfig

        config = ModelConfig.from_dict(self.weights.config)
        squares = [
            product_noise(kind, self.dtype, inputs=meter.inputs) ** 2 for kind in meter.kinds
        ]
        stored = next((v for k, v in STORED.items() if str(kv_dtype).startswith(k)), 0.0)
        moved = 2 * MOVED / config.moe.experts_per_token**2 if config.moe else 0.0
        return math.sqrt(2 * config.layers * (max(squares) + 2 * stored**2 + moved))


def run_block(block: Block, hidden: Tensor, stage: Whole) -> None:
    """One layer of `hidden` [sequences, tokens, width], in place."""
    count, length, width = hidden.shape
    step = max(1, AT_ONCE // length)
    for first in range(0, count, step):
        part = hidden[first : first + step]
        attended = stage.attend(block, part).reshape(-1, block.plan.o.in_features)
        rows = part.view(-1, width)
        for begin in range(0, len(rows), AT_ONCE):
            some = slice(begin, begin + AT_ONCE)
            rows[some] = block.run(rows[some].clone(), Attended(attended[some]))
