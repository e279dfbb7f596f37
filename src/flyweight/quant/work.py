"""WorkBlock: one decoder block while it is being quantized.

It holds float32 weights, what has been quantized so far, and builds from both a real
`models.layer.Block`, so the activations that calibrate a layer are those that the finished model
will see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flyweight.errors import FlyweightError
from flyweight.models.attention import PromptStage
from flyweight.models.config import ModelConfig
from flyweight.models.layer import Block
from flyweight.models.plan import Group
from flyweight.models.presets import layer_shapes
from flyweight.models.standard import plan_of
from flyweight.quant.statistics import Statistics
from flyweight.quant.store import FinishedBlock
from flyweight.tensors import Float8, Int8Channel, Plain, QuantTensor, Sparse24, quantize_int8_rows


def input_quantizer(siblings: Sequence[QuantTensor | None]) -> Callable[[Tensor], Tensor]:
    """What happens to the input before the matmul: nothing, unless the siblings quantize
    activations (then all do alike).
    """
    tensor = siblings[0]
    if isinstance(tensor, Sparse24):
        tensor = tensor.inner
    if isinstance(tensor, Int8Channel) and tensor.input_scale is None:
        return lambda x: torch.mul(*quantize_int8_rows(x)).to(x.dtype)
    if isinstance(tensor, Int8Channel | Float8):
        return lambda x: tensor.quantize_input(x).to(x.dtype)
    return lambda x: x


def root_mean_square(hidden: Tensor) -> Tensor:
    """Size of each token's hidden state [..., hidden] → float32 [..., 1]."""
    return hidden.float().square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)


class Enough(Exception):
    """Raised inside a block once the input that was asked for has been seen."""


class KnownOutputs:
    """What finished groups of a block gave for each batch: a block is run once for each stage of
    its calibration, and up to that stage nothing changes.
    """

    ROOM = 256 << 20  # bytes; beyond them outputs are computed again

    def __init__(self) -> None:
        self.batch: int | None = None  # that runs now; None: nothing is kept
        self.kept: dict[tuple[str, int], Tensor] = {}

    def forget(self) -> None:
        self.kept.clear()

    def output(self, group: Group, compute: Callable[[], Tensor]) -> Tensor:
        """A copy, because a block may add to what it is given."""
        if self.batch is None or group.routed:
            return compute()
        key = (group.name, self.batch)
        if key in self.kept:
            return self.kept[key].clone()
        found = compute()
        if found.nbytes + sum(kept.nbytes for kept in self.kept.values()) <= self.ROOM:
            self.kept[key] = found.clone()
        return found


class WorkBlock:
    def __init__(
        self,
        config: ModelConfig,
        index: int,
        *,
        weights: dict[str, Tensor],
        others: dict[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.index = index
        self.device = device
        self.dtype = dtype
        self.plan = plan_of(config).layers[index]
        self.groups = self.plan.groups
        self.weights = weights  # float32 [out, in] by name inside the block
        self.others = others  # norms, biases and routers, as they are stored
        self.quantized: dict[str, QuantTensor] = {}
        self.unpacked: dict[
            str, tuple[QuantTensor, Tensor]
        ] = {}  # what `dense` has made, and of what
        self.known = KnownOutputs()

    @classmethod
    def load(
        cls,
        source: Any,
        config: ModelConfig,
        index: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> WorkBlock:
        prefix = f"model.layers.{index}."
        # Clones: float32 weights of a checkpoint are views of its file, and folding works in place.
        plan = plan_of(config).layers[index]
        names = [name for group in plan.groups for name in group.linears]
        weights = {
            name: source.linear(prefix + name).to(device).dequantize().clone() for name in names
        }
        # What the plan has beside its linears, and every bias: GPTQ tools write some that no config
        # promises.
        kept = [name for name in layer_shapes(plan) if name.removesuffix(".weight") not in names]
        biases = [f"{name}.bias" for name in names]
        others = {
            name: source.tensor(prefix + name).to(device)
            for name in dict.fromkeys([*kept, *biases])
            if name in kept or source.has(prefix + name)
        }
        return cls(config, index, weights=weights, others=others, device=device, dtype=dtype)

    @classmethod
    def restore(
        cls,
        finished: FinishedBlock,
        config: ModelConfig,
        index: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> WorkBlock:
        others = {name: tensor.to(device) for name, tensor in finished.tensors.items()}
        block = cls(config, index, weights={}, others=others, device=device, dtype=dtype)
        block.quantized = {name: tensor.to(device) for name, tensor in finished.linears.items()}
        return block

    # -- the Weights protocol of models.layers
    # ----------------------------------------------------------------

    def has(self, name: str) -> bool:
        return self._short(name) in self.others

    def tensor(self, name: str) -> Tensor:
        return self.others[self._short(name)]

    def linear(self, prefix: str) -> QuantTensor:
        return Plain(self.dense(self._short(prefix)))

    def check_used(self) -> None:
        pass

    def _short(self, name: str) -> str:
        return name.removeprefix(f"model.layers.{self.index}.")

    # -- running
    # ----------------------------------------------------------------------------------------------

    def dense(self, name: str) -> Tensor:
        if name not in self.quantized:
            return self.weights[name].to(self.dtype)
        if name not in self.unpacked or self.unpacked[name][0] is not self.quantized[name]:
            self.unpacked[name] = self.quantized[name], self.quantized[name].dequantize(self.dtype)
        return self.unpacked[name][1]

    def build(self) -> Block:
        block = Block.load(
            self, self.config, self.index, device=self.device, dtype=self.dtype, exact=True
        )
        for group in self.groups:
            self.swap(block, group, [self.dense(name) for name in group.linears])
        return block

    def swap(self, block: Block, group: Group, weights: Iterable[Tensor]) -> None:
        """Other weights for one group. Serving may choose among kernels by their speed; the same
        bytes need one and the same.
        """
        weight = torch.cat([part.to(self.dtype) for part in weights])
        quantize_input = input_quantizer([self.quantized.get(name) for name in group.linears])
        finished = all(name in self.quantized for name in group.linears)

        def multiply(x: Tensor) -> Tensor:
            return F.linear(quantize_input(x), weight)

        block.linears[group.name].substitute(
            (lambda x: self.known.output(group, lambda: multiply(x))) if finished else multiply
        )

    def run(self, block: Block, number: int, batch: Tensor, context: PromptStage) -> Tensor:
        """The block's output for a batch, of which what is known is not computed again."""
        self.known.batch = number
        try:
            return block.forward(batch, context)
        finally:
            self.known.batch = None

    def statistics(
        self,
        batches: Iterable[Tensor],
        context: PromptStage,
        groups: Iterable[Group],
        *,
        see: Callable[[Group, Tensor], None] | None = None,
        relative: bool = False,
        products: bool = True,
    ) -> dict[str, Statistics]:
        """Statistics of the inputs of `groups` over all batches; a forward pass stops at the last
        group asked for.

        `relative` divides what adds to the hidden state by that state's size behind the block: a
        few tokens have one a hundred times as large as the others, which the next norm takes out
        again, and become so in a single MLP. Without `products` of columns with each other, which
        are most of the work, where nobody asks.
        """
        wanted = {group.name: group for group in groups}
        last = [group for group in self.groups if group.name in wanted][-1]
        found = {
            name: Statistics(
                self.weights[group.linears[0]].shape[1], self.device, products=products
            )
            for name, group in wanted.items()
        }

        def watch(group: Group, x: Tensor) -> None:
            if group.name in wanted:
                # an expert sees only some of the tokens
                if sizes is not None and not group.source.endswith("norm") and x.ndim == 3:
                    x = (x / sizes).to(x.dtype)
                found[group.name].add(x)
                if see is not None:
                    see(group, x)
            if (
                group is last and not group.routed
            ):  # the last expert need not be asked last, or at all
                raise Enough

        block = self.build()
        whole = self.build() if relative else None  # to its end, and nobody watches
        sizes: Tensor | None = None
        block.watch(watch)
        for number, batch in enumerate(batches):
            sizes = root_mean_square(whole.forward(batch, context)) if whole is not None else None
            try:
                self.run(block, number, batch, context)
            except Enough:
                continue
        for name, statistics in found.items():
            if statistics.tokens or not wanted[name].routed:
                statistics.check(f"model.layers.{self.index} ({name})")
        return found

    # -- equivalent changes
    # -----------------------------------------------------------------------------------

    def allowed(self, group: Group, scales: Tensor) -> Tensor:
        """The nearest scales that can be folded: one per channel of the source, shared by the query
        heads that read it.
        """
        if group.source != "self_attn.v_proj" or self.config.heads == self.config.kv_heads:
            return scales
        heads = self.config.heads
        kv_heads = self.config.kv_heads
        size = self.config.head_dim
        shared = scales.log().view(kv_heads, heads // kv_heads, size).mean(1, keepdim=True).exp()
        return shared.expand(kv_heads, heads // kv_heads, size).reshape(-1)

    def fold(self, group: Group, scales: Tensor) -> Tensor:
        """Divide the group's input by `scales` at its source, multiply the linears; returns the
        scales that took effect.
        """
        if group.source.endswith("norm"):
            name = f"{group.source}.weight"
            old = self.others[name]
            one = float(any(norm.plus_one for norm in self.plan.norms if norm.name == group.source))
            before = old.float() + one
            new = (before / scales - one).to(old.dtype)
            after = new.float() + one
            # A norm in half precision cannot hold every quotient: the linears take what it really
            # became.
            scales = torch.where(after == 0, torch.ones_like(scales), before / after)
            self.others[name] = torch.where(after == 0, old, new)
        else:
            rows = scales
            if group.source == "self_attn.v_proj":
                heads = self.config.heads
                kv_heads = self.config.kv_heads
                rows = scales.view(kv_heads, heads // kv_heads, -1)[:, 0].reshape(-1)
            self.weights[group.source] /= rows[:, None]
            if (bias := self.others.get(f"{group.source}.bias")) is not None:
                self.others[f"{group.source}.bias"] = (bias.float() / rows).to(bias.dtype)
        for name in group.linears:
            self.weights[name] *= scales
        return scales

    def finished(self, report: dict[str, Any]) -> FinishedBlock:
        missing = [
            name for group in self.groups for name in group.linears if name not in self.quantized
        ]
        if missing:
            raise FlyweightError(f"layer {self.index}: {', '.join(missing)} were never quantized")
        return FinishedBlock(dict(self.quantized), dict(self.others), report)
