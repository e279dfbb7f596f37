"""A layer of experts for engines that choose the experts themselves, as one torch op.

    flyweight::experts(x [tokens, hidden], key, shares, chosen [tokens, choices]) → [tokens, hidden]

Where all experts of a layer are in one scheme that our grouped kernels know, they are one call
(kernels/linear/experts/chosen.py), which waits for nothing and can be captured. Others run one by
one (`OneByOne`). A rank has some outputs of gate and up and the same inputs of down, or some
experts whole: what it returns is its part of the sum.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flyweight.kernels import dispatch, jit
from flyweight.kernels.linear.experts.chosen import ChosenExperts
from flyweight.kernels.linear.fused import FusedLinear
from flyweight.kernels.vptq.slots import Stacked
from flyweight.plugins import ahead, op
from flyweight.tensors import QuantTensor, merge

# More tokens than an engine captures in one step: the host may wait for their counts
COUNTED_TOKENS = 512
Expert = tuple[QuantTensor, QuantTensor, QuantTensor]  # gate, up and down
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x, shares, chosen) → x
logger = logging.getLogger("vllm.flyweight")

_library = torch.library.Library("flyweight", "FRAGMENT")
_library.define("experts(Tensor x, Tensor key, Tensor shares, Tensor chosen) -> Tensor")
_layers: dict[int, Layer] = {}


def _experts(x: Tensor, key: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    if ahead.has_noted():
        op.begin()
    layer = _layers[key.data_ptr()]
    return layer(x.contiguous(), shares.float().contiguous(), chosen.int().contiguous())


def _shape_only(x: Tensor, key: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    return x.new_empty(x.shape)


_library.impl("experts", _experts, "CUDA")
_library.impl("experts", _experts, "CPU")
torch.library.register_fake("flyweight::experts", _shape_only, lib=_library)


def experts(x: Tensor, key: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    """By the layer that `hold` has given this key; an expert below 0 is another rank's."""
    found: Tensor = torch.ops.flyweight.experts(x, key, shares, chosen)
    return found


def hold(layer: Layer, device: torch.device, *, owner: Any = None) -> Tensor:
    """A key for `layer`, which is kept as long as its owner lives, or the process."""
    key = torch.zeros(1, dtype=torch.uint8, device=device)
    _layers[key.data_ptr()] = layer
    if owner is not None:
        weakref.finalize(owner, _layers.pop, key.data_ptr(), None)
    return key


def prepare(
    members: Iterable[Expert], *, activation: str, chosen: int, dtype: torch.dtype
) -> Layer:
    """Lay the experts of a layer out, one after the other as they come. `chosen`: of a token."""
    pairs = []
    kinds: dict[str, Expert] = {}  # one outline of each
    with op.timed(), op.floats_by_default():
        for expert in members:
            pairs.append(lay_out(expert, activation=activation, dtype=dtype))
            kind = " | ".join(map(ahead.name_of, expert))
            if kind not in kinds and ahead.compiles(expert[0]):
                gate, up, down = map(ahead.outline_of, expert)
                kinds[kind] = (gate, up, down)
        layer = together(pairs, activation=activation, chosen=chosen)
    for outline in kinds.values():
        ahead.note(NotedExperts(outline, len(pairs), activation, chosen, dtype))
    return layer


def lay_out(
    expert: Expert, *, activation: str, dtype: torch.dtype
) -> tuple[FusedLinear, FusedLinear]:
    """gate/up and down."""
    gate, up, down = expert
    segments = merge([gate, up])
    if len(segments) == 1:
        first = dispatch.prepare(segments[0], dtype=dtype, activation=activation)
    else:
        first = dispatch.prepare_all(segments, dtype=dtype)
    return first, dispatch.prepare(down, dtype=dtype)


def together(
    pairs: Sequence[tuple[FusedLinear, FusedLinear]], *, activation: str, chosen: int
) -> Layer:
    gate_up = [first for first, _ in pairs]
    down = [second for _, second in pairs]
    found = ChosenExperts.of(gate_up, down, chosen=chosen)
    if isinstance(found, ChosenExperts):
        return found
    tell_once(found)
    return OneByOne(gate_up, down, activation)


@functools.cache
def tell_once(why: str) -> None:
    logger.info("Flyweight runs experts one by one: %s", why)


class OneByOne:
    """Experts that no kernel takes as one: each is a pair of linears.

    How many tokens an expert has is known on the device alone, and a step that is captured must not
    ask. So few tokens (fewer choices than experts) have a slot for each choice, where experts can
    be copied into slots (VPTQ); else every expert sees all tokens, and shares of 0 take out what
    nobody asked for. Only more tokens than engines capture are counted, as is everything on a CPU.
    """

    def __init__(
        self,
        gate_up: Sequence[FusedLinear],
        down: Sequence[FusedLinear],
        activation: str,
    ) -> None:
        self.members = list(zip(gate_up, down, strict=True))
        self.activation = activation
        stacked = [Stacked.of(gate_up), Stacked.of(down)]
        self.stacked = [one for one in stacked if isinstance(one, Stacked)]

    def __call__(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        if x.device.type != "cuda":
            return self.counted(x, shares, chosen)
        if len(x) > COUNTED_TOKENS and not torch.cuda.is_current_stream_capturing():
            return self.counted(x, shares, chosen)
        if len(self.stacked) == 2 and chosen.numel() <= len(self.members):
            return self.in_slots(x, shares, chosen)
        return self.everywhere(x, shares, chosen)

    def run(self, member: tuple[FusedLinear, FusedLinear], x: Tensor) -> Tensor:
        gate_up, down = member
        handover = down.negotiate(gate_up, len(x), self.activation)
        gated = gate_up.project(x, activation=self.activation, handover=handover)
        return down.project(handover.to or gated, handover=handover)

    def counted(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Each expert that has tokens runs once with these."""
        ids = chosen.flatten().long() + 1  # 0: another rank's
        order = ids.argsort(stable=True)  # (token, choice) pairs by expert
        elsewhere, *counts = torch.bincount(ids, minlength=len(self.members) + 1).tolist()
        products = x.new_zeros(ids.numel(), x.shape[-1])
        begin = elsewhere
        for member, count in zip(self.members, counts, strict=True):
            if count:
                pairs = order[begin : begin + count]
                products[pairs] = self.run(member, x[pairs // chosen.shape[-1]])
                begin += count
        return _sum(products, shares)

    def in_slots(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """A slot for each (token, choice). Kernels fetch weights before the ones in front have
        ended, which here have just written them: none may overlap.
        """
        ids = chosen.flatten().long()
        products = x.new_empty(ids.numel(), x.shape[-1])
        taken = [stacked.take(ids.clamp(min=0)) for stacked in self.stacked]
        with jit.overlap(False):
            for pair, member in enumerate(zip(*taken, strict=True)):
                token = pair // chosen.shape[-1]
                products[pair : pair + 1] = self.run(member, x[token : token + 1])
        return _sum(products, torch.where(chosen < 0, 0, shares))

    def everywhere(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Every expert with all tokens, each weighted by its share."""
        ids = chosen.long() + 1
        count = len(self.members) + 1
        weights = shares.new_zeros(len(x), count).scatter_add_(1, ids, shares)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, member in enumerate(self.members):
            out.addcmul_(self.run(member, x).float(), weights[:, expert + 1, None])
        return out.to(x.dtype)


def _sum(products: Tensor, shares: Tensor) -> Tensor:
    """By tokens: products [tokens · choices, hidden]."""
    by_token = products.view(*shares.shape, -1)
    return (by_token.float() * shares[..., None]).sum(1).to(products.dtype)


@dataclass(frozen=True, eq=False)
class NotedExperts:
    """A layer without values, whose kernels are to be compiled (ahead.py)."""

    expert: Expert
    count: int
    activation: str
    chosen: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        parts = [ahead.name_of(part) for part in self.expert]
        facts = (self.count, self.activation, self.chosen, self.dtype)
        return " | ".join([*parts, *map(str, facts)])

    def run(self, rows: Sequence[int]) -> None:
        """In a dry run. One by one, an expert is like the other."""
        gate, up, down = (part.map(ahead.on_gpu) for part in self.expert)
        pair = lay_out((gate, up, down), activation=self.activation, dtype=self.dtype)
        pairs = [pair] * self.count
        layer = together(pairs, activation=self.activation, chosen=self.chosen)
        for count in rows:
            x = torch.empty(count, gate.matrix_shape[1], dtype=self.dtype, device=ahead.DEVICE)
            if isinstance(layer, OneByOne):
                layer.run(pair, x)
                continue
            shares = torch.empty(count, self.chosen, device=ahead.DEVICE)
            layer(x, shares, shares.int())
