"""Linear and Embedding: holders of weights, without autograd.

A Linear may stand for several projections with one input (q/k/v, gate/up). Neighbours that agree in
scheme are one weight and one call, VPTQ's with their codebooks one call; the others (differing
g_idx, mixed bits) are run one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from flyweight.errors import CheckpointError
from flyweight.kernels import dispatch
from flyweight.kernels.linear.delta import AdaptedRow, Delta
from flyweight.kernels.linear.fused import (
    FusedLinear,
    Handover,
    KvPrefetch,
    Norm,
    PackedInput,
    TorchLinear,
    plainly,
)
from flyweight.kernels.token import embed
from flyweight.models.adapters import Adapters
from flyweight.models.plan import Group
from flyweight.tensors import Plain, QuantTensor, merge, reorder_rows
from flyweight.values import known

EMBEDDING = "model.embed_tokens"


class Weights(Protocol):
    """Where weights come from: a checkpoint, a preset, or what a quantizer has just made."""

    config: Any  # a Hugging Face config.json as a dict

    def has(self, name: str) -> bool: ...

    def tensor(self, name: str) -> Tensor: ...

    def linear(self, prefix: str) -> QuantTensor: ...

    def check_used(self) -> None: ...


def load_tensor(
    weights: Weights,
    name: str,
    shape: tuple[int, ...],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> Tensor:
    tensor = weights.tensor(name)
    check_shape(name, tensor.shape, shape)
    return tensor.to(device=device, dtype=dtype)


def check_shape(name: str, found: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(found) != tuple(expected):
        raise CheckpointError(
            f"{name}: shape {list(found)} does not fit config.json, which asks for {list(expected)}"
        )


class Linear:
    """y = x Wᵀ + b for the projections `names`, whose outputs of `sizes` follow each other in y."""

    def __init__(
        self,
        tensors: Sequence[QuantTensor],
        bias: Tensor | None = None,
        *,
        names: Sequence[str] = (),
        dtype: torch.dtype,
        exact: bool = False,
        activation: str | None = None,
        order: Tensor | None = None,
    ):
        # of the outputs, where it is not that of the files: `tensors` and `bias` have it already
        self.order = order
        self.names = tuple(names)
        self.sizes = tuple(tensor.shape[-2] for tensor in tensors)
        merged = merge(tensors)
        if len(merged) == 1:  # then the kernel may add the bias, and pair gate with up
            fused = dispatch.prepare(
                merged[0], dtype=dtype, exact=exact, bias=bias, activation=activation
            )
        else:
            fused = dispatch.prepare_all(merged, dtype=dtype, exact=exact, bias=bias)
        self.fused: FusedLinear = fused
        self.bias = None if fused.adds_bias else bias
        # called with every input, for calibration
        self.watch: Callable[[Tensor], None] | None = None
        self.delta: Delta | None = None  # what adapters add, where there are any

    @classmethod
    def load(
        cls,
        weights: Weights,
        prefix: str,
        group: Group,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        exact: bool = False,
        adapters: Adapters | None = None,
    ) -> Linear:
        """A bias in the file (GPTQ tools write zeros) is used whether or not the config promises
        one.
        """
        tensors = []
        begin = 0
        order = _order(group, device)
        for name, size in zip(group.linears, group.sizes, strict=True):
            tensor = weights.linear(prefix + name)
            check_shape(prefix + name, tensor.shape, (size, group.in_features))
            tensor = tensor.to(device)
            if order is not None:
                tensor = reorder_rows(tensor, order[begin : begin + size] - begin)
            tensors.append(tensor)
            begin += size
        bias = _read_bias(weights, prefix, group, device=device, dtype=dtype)
        if bias is not None and order is not None:
            bias = bias[order]
        delta = None
        if adapters is not None:
            delta = adapters.delta(prefix, group, device=device, dtype=dtype, order=order)
        linear = cls(
            tensors,
            bias,
            names=group.linears,
            dtype=dtype,
            exact=exact,
            # adapters add to gate and up, so no kernel may multiply the two at once
            activation=group.activation if delta is None else None,
            order=order,
        )
        linear.delta = delta
        return linear

    def substitute(self, multiply: Callable[[Tensor], Tensor] | None) -> None:
        """From now on `multiply` computes x Wᵀ: quantization tries weights out. The prepared ones
        are let go.

        None: nothing does, until the next call of this.
        """
        run = multiply or _nothing
        order = self.order
        if order is not None:  # these weights have the order of the files
            run = functools.partial(_in_order, run, order)
        self.fused = TorchLinear(run, ops=self.fused.ops)

    def use_ops(self, ops: ModuleType) -> None:
        """Norms and activations around the product by other ops: those that gradients pass through,
        for one.
        """
        self.fused.ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        if self.watch is not None:
            self.watch(x)
        out = self.fused(x)
        return out if self.bias is None else out.add_(self.bias)

    def project(
        self,
        x: Tensor | PackedInput,
        out: Tensor | None = None,
        *,
        adapters: Tensor | None = None,
        **fusion: Any,
    ) -> Tensor:
        """`FusedLinear.project`; one by one where somebody watches or the bias is left over.
        `adapters`: the slot of each row's adapter.
        """
        if self.delta is not None and isinstance(x, Tensor):
            alone = self._project_row(x, out, adapters, **fusion)
            if alone is not None:
                return alone
        if self.delta is not None and adapters is not None:
            assert isinstance(x, Tensor)
            return self._with_adapters(self.delta, x, out, adapters, **fusion)
        if self.watch is None and self.bias is None:
            return self.fused.project(x, out, **fusion)
        assert isinstance(x, Tensor)
        fusion.pop("handover", None)
        fusion.pop("prefetch", None)
        return plainly(self.fused, x, out, call=self, **fusion)

    def adapted_row(self, slots: Tensor | None) -> AdaptedRow | None:
        """What the kernel of one row needs to add its adapter by itself; None where it does not."""
        if self.delta is None or slots is None or slots.numel() != 1:
            return None
        return self.delta.in_the_linear(slots) if self.takes_row(1) else None

    def takes_row(self, rows: int, activation: str | None = None) -> bool:
        """Whether one launch does all of a row (`FusedLinear.project_row`)."""
        plain = self.watch is None and self.bias is None
        return plain and self.fused.adapts(rows, activation)

    def _project_row(
        self,
        x: Tensor,
        out: Tensor | None,
        slots: Tensor | None,
        *,
        norm: Norm | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        handover: Handover | None = None,
        prefetch: KvPrefetch | None = None,
    ) -> Tensor | None:
        """One row in one launch, the adapter and what gate/up has left to this linear included;
        None where that is not possible, or where `project` does the same.
        """
        late = None if handover is None else handover.late
        apart = None if handover is None else handover.apart
        adapted = self.adapted_row(slots)
        alone = adapted is not None or (slots is None and (late or apart) is not None)
        if not alone or (activation and not (late or apart)):
            return None
        gated = late if activation is None else None
        if not self.takes_row(1, gated):
            return None
        ends = apart if activation is not None else None
        return self.fused.project_row(
            x, out, norm=norm, residual=residual, gated=gated, apart=ends, adapted=adapted
        )

    def _with_adapters(
        self,
        delta: Delta,
        x: Tensor,
        out: Tensor | None,
        slots: Tensor,
        *,
        activation: str | None = None,
        residual: Tensor | None = None,
        **fusion: Any,
    ) -> Tensor:
        """What adapters add is a residual to the kernels; an activation comes after it, or is left
        to the linear that follows (`Handover.late`).
        """
        late = fusion.pop("handover", Handover()).late
        into = residual if residual is not None and residual is out else None
        if late is not None and activation is None:  # x is gate and up
            x, added = delta.gate_and_add(x, slots, late, residual=residual, out=into)
        else:
            added = delta.add(x, slots, norm=fusion.get("norm"), residual=residual, out=into)
        if activation is None or late is not None:
            return self.project(x, out, residual=added, **fusion)
        y = self.fused.ops.gate(self.project(x, residual=added, **fusion), activation)
        return y if out is None else out.copy_(y)

    def negotiate(
        self, before: Linear, rows: int, activation: str, *, adapted: bool = False
    ) -> Handover:
        """`adapted`: some rows may have an adapter."""
        if self.delta is not None and before.delta is not None:
            alone = before.takes_row(rows) and self.takes_row(rows, activation)
            if alone and before.fused.gates_apart(rows, activation):
                return Handover(apart=activation)
            if adapted or alone:
                return Handover(late=activation)
        if not (self.hands_over and before.hands_over):
            return Handover()
        return self.fused.negotiate(before.fused, rows, activation)

    def leaves_room(
        self,
        rows: int,
        *,
        norm: bool = False,
        activation: str | None = None,
        residual: bool = False,
    ) -> bool:
        """Whether nothing but one kernel multiplies, beside which another one fits on every SM."""
        return self.hands_over and self.fused.leaves_room(
            rows, norm=norm, activation=activation, residual=residual
        )

    @property
    def hands_over(self) -> bool:
        """Whether nobody but the kernels need see x and y."""
        return self.watch is None and self.bias is None and self.delta is None

    def packed_input(self, rows: int, items: int) -> PackedInput | None:
        if self.bias is not None or self.delta is not None:
            return None
        return self.fused.packed_input(rows, items)

    @property
    def segments(self) -> Sequence[FusedLinear]:
        return self.fused.segments

    @property
    def nbytes(self) -> int:
        return self.fused.nbytes


def _read_bias(
    weights: Weights, prefix: str, group: Group, *, device: torch.device | str, dtype: torch.dtype
) -> Tensor | None:
    """Of all linears of a group; None where there is none, or nothing but zeros. Mixtures ask tens
    of thousands of times, so nothing is made for those without one.
    """
    names = [f"{prefix}{name}.bias" for name in group.linears]
    there = [group.bias or weights.has(name) for name in names]
    if not any(there):
        return None
    joined = torch.cat(
        [
            load_tensor(weights, name, (size,), device=device, dtype=dtype)
            if found
            else torch.zeros(size, device=device, dtype=dtype)
            for name, size, found in zip(names, group.sizes, there, strict=True)
        ]
    )
    return joined if known(joined.any(), otherwise=True) else None


def _order(group: Group, device: torch.device | str) -> Tensor | None:
    if group.interleaved is None:
        return None
    return torch.tensor(group.interleaved.order(sum(group.sizes)), device=device)


def _in_order(run: Callable[[Tensor], Tensor], order: Tensor, x: Tensor) -> Tensor:
    return run(x)[..., order]


def _nothing(x: Tensor) -> Tensor:
    raise RuntimeError("this linear has no weight: `substitute` has taken it away")


def read_embedding(weights: Weights) -> QuantTensor:
    """In the bits of its file where rows can be looked up in those, else as floats."""
    stored = weights.linear(EMBEDDING)
    return stored if stored.by_rows else Plain(weights.tensor(f"{EMBEDDING}.weight"))


class Embedding:
    """A table of floats, or of codes whose rows are written out when they are looked up: by a
    kernel, where there is one for their format. `head`: the one that is tied to it; where rows can
    be looked up in its weight, that is the only copy.
    """

    def __init__(
        self,
        weight: Tensor | QuantTensor,
        scale: float = 1.0,
        *,
        dtype: torch.dtype | None = None,
        head: Linear | None = None,
    ):
        coded = not isinstance(weight, Tensor)
        self.shared = coded and head is not None and head.fused.looks_up
        self.table: FusedLinear | None = None  # whose rows a kernel writes out: the head's, or ours
        if self.shared and head is not None:
            self.table = head.fused
        elif not isinstance(weight, Tensor) and dtype is not None:
            self.table = dispatch.prepare_table(weight, dtype)
        self.weight = None if self.table else weight  # [vocab, hidden]
        self.width = weight.shape[-1]
        self.dtype = weight.dtype if isinstance(weight, Tensor) else dtype
        # in the rows' own type and place: a step must not bring a number to the device
        self.scale = None
        if scale != 1:
            self.scale = torch.full((), scale, dtype=self.dtype, device=weight.device)

    @property
    def nbytes(self) -> int:
        held = self.table or self.weight
        return 0 if self.shared or held is None else held.nbytes

    def __call__(self, tokens: Tensor) -> Tensor:
        rows = self.rows(tokens)
        return rows if self.scale is None else rows * self.scale

    def rows(self, tokens: Tensor) -> Tensor:
        if isinstance(self.weight, Tensor):
            return torch.nn.functional.embedding(tokens, self.weight)
        if self.table is not None:
            out = torch.empty(*tokens.shape, self.width, dtype=self.dtype, device=tokens.device)
            self.table.look_up(tokens.reshape(-1), out.view(-1, self.width))
            return out
        assert self.dtype is not None and self.weight is not None
        found = reorder_rows(self.weight, tokens.flatten()).dequantize(self.dtype)
        return found.view(*tokens.shape, -1)

    def write(self, tokens: Tensor, out: Tensor) -> None:
        """The rows of a captured step, by kernels of ours where there are any."""
        if isinstance(self.weight, Tensor):
            embed(self.weight, tokens, out)
        elif self.table is not None:
            self.table.look_up(tokens, out)
        else:
            out.copy_(self.rows(tokens))
        if self.scale is not None:
            out.mul_(self.scale)
