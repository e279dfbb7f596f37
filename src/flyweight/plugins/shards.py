"""A rank's part of a weight: tensor parallelism cuts a linear by its outputs or by its inputs.

By outputs (qkv, gate/up) rows are taken apart; scales go with their rows, codebooks are on every
rank. By inputs (o, down) each rank has some columns, and the ranks' products are added up: a scale
or a codebook that belongs to several columns must then be one rank's alone. What cannot be cut is
refused with the reason and with what to do; `flyweight quantize --shards N` makes weights that can.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from flyweight.checkpoint.formats.fused import take_rows
from flyweight.errors import CheckpointError, UnsupportedError
from flyweight.packing import pack, unpack
from flyweight.tensors import (
    FLOAT4_GROUP,
    Float4,
    Float8,
    Int8Channel,
    IntGroup,
    Plain,
    QuantTensor,
    Sparse24,
    VectorQuant,
)

ADVICE = "quantize it again with --shards N, or take fewer ranks"


def outputs_of(tensor: QuantTensor, rank: int, ranks: int, *, where: str) -> QuantTensor:
    """Outputs of `rank`, one of `ranks` that divide them."""
    start, stop = _range(tensor.matrix_shape[0], rank, ranks, f"{where}: outputs")
    if ranks == 1:
        return tensor
    try:
        return take_rows(tensor, start, stop, where=where)
    except CheckpointError as error:
        raise UnsupportedError(f"{error}; {ADVICE}") from error


def inputs_of(tensor: QuantTensor, rank: int, ranks: int, *, where: str) -> QuantTensor:
    """Inputs of `rank`. The sum of all ranks' products is the product of the whole."""
    start, stop = _range(tensor.matrix_shape[1], rank, ranks, f"{where}: inputs")
    return tensor if ranks == 1 else take_columns(tensor, start, stop, where=where)


def _range(size: int, rank: int, ranks: int, what: str) -> tuple[int, int]:
    if size % ranks:
        raise UnsupportedError(f"{what}: {size} cannot be divided by {ranks} ranks")
    each = size // ranks
    return rank * each, (rank + 1) * each


def take_columns(tensor: QuantTensor, start: int, stop: int, *, where: str) -> QuantTensor:
    """Inputs `start` to `stop` of a weight."""
    if isinstance(tensor, Plain):
        return Plain(tensor.weight[:, start:stop].contiguous())
    if isinstance(tensor, IntGroup):
        return _integers(tensor, start, stop, where)
    if isinstance(tensor, Int8Channel):
        return dataclasses.replace(tensor, codes=tensor.codes[:, start:stop].contiguous())
    if isinstance(tensor, Float8):
        return _float8(tensor, start, stop, where)
    if isinstance(tensor, Float4):
        _whole(FLOAT4_GROUP, start, stop, where)
        return Float4(
            tensor.codes[:, start // 2 : stop // 2].contiguous(),
            tensor.exponents[:, start // FLOAT4_GROUP : stop // FLOAT4_GROUP].contiguous(),
        )
    if isinstance(tensor, Sparse24):
        return _sparse(tensor, start, stop, where)
    if isinstance(tensor, VectorQuant):
        return _vectors(tensor, start, stop, where)
    raise UnsupportedError(f"{where}: a weight of kind {tensor.kind} is not cut by inputs")


def _whole(group: int, start: int, stop: int, where: str, what: str = "group") -> None:
    if start % group or stop % group:
        raise UnsupportedError(
            f"{where}: a {what} of {group} inputs crosses the border of inputs {start} to {stop}; "
            f"{ADVICE}"
        )


def _integers(tensor: IntGroup, start: int, stop: int, where: str) -> IntGroup:
    if tensor.g_idx is not None:
        raise UnsupportedError(
            f"{where}: its groups take inputs from everywhere (act-order), so each rank would need "
            f"all scales; quantize without act_order"
        )
    codes = _packed_columns(tensor.codes, tensor.bits, tensor.in_features, start, stop)
    group = tensor.group_size
    if group >= tensor.in_features:  # one scale for all inputs: every rank has it
        return dataclasses.replace(
            tensor, codes=codes, group_size=stop - start, in_features=stop - start
        )
    _whole(group, start, stop, where)
    groups = slice(start // group, stop // group)
    zeros = None if tensor.zeros is None else tensor.zeros[:, groups].contiguous()
    return dataclasses.replace(
        tensor,
        codes=codes,
        scales=tensor.scales[:, groups].contiguous(),
        zeros=zeros,
        in_features=stop - start,
    )


def _packed_columns(words: Tensor, bits: int, count: int, start: int, stop: int) -> Tensor:
    if start * bits % 32 == 0 and stop * bits % 32 == 0:
        return words[..., start * bits // 32 : stop * bits // 32].contiguous()
    return pack(unpack(words, bits, count)[..., start:stop], bits)


def _float8(tensor: Float8, start: int, stop: int, where: str) -> Float8:
    scales = tensor.scales
    if tensor.block:
        _whole(tensor.block, start, stop, where, "block")
        scales = scales[:, start // tensor.block : stop // tensor.block].contiguous()
    weight = tensor.weight[:, start:stop].contiguous()
    return dataclasses.replace(tensor, weight=weight, scales=scales)


def _sparse(tensor: Sparse24, start: int, stop: int, where: str) -> Sparse24:
    _whole(4, start, stop, where, "pair of two in four")
    kept = tensor.inner.matrix_shape[1]
    inner = take_columns(tensor.inner, start // 2, stop // 2, where=where)
    assert isinstance(inner, IntGroup | Int8Channel)
    positions = _packed_columns(tensor.positions, 2, kept, start // 2, stop // 2)
    return Sparse24(inner, positions)


def _vectors(tensor: VectorQuant, start: int, stop: int, where: str) -> VectorQuant:
    """The stored columns whose input lies in the range. All groups keep their books; each must have
    equally many columns left, as one number says how many that is.
    """
    device = tensor.indices.device
    order = torch.arange(tensor.in_features, device=device)
    if tensor.perm is not None:
        order = tensor.perm.long()
    chosen = (order >= start) & (order < stop)  # by stored column
    outliers = chosen[: tensor.outliers]
    by_group = chosen[tensor.outliers :].view(-1, tensor.group_columns)
    counts = by_group.sum(1).tolist()
    kept = [group for group, count in enumerate(counts) if count]
    if len({counts[group] for group in kept}) > 1:
        raise UnsupportedError(
            f"{where}: a codebook of {tensor.group_columns} inputs is for inputs of several ranks "
            f"({start} to {stop} have {min(counts)} to {max(counts)} of each); {ADVICE}"
        )
    bits = sum(tensor.index_bits)
    joint = unpack(tensor.indices, bits, tensor.group_columns)
    indices = pack(torch.stack([joint[group][:, by_group[group]] for group in kept]), bits)
    outlier_indices = tensor.outlier_indices
    if outlier_indices is not None:
        found = outlier_indices[:, outliers]
        outlier_indices = found.contiguous() if found.shape[1] else None
    return dataclasses.replace(
        tensor,
        indices=indices,
        codebook=tensor.codebook[kept].contiguous(),
        residual=None if tensor.residual is None else tensor.residual[kept].contiguous(),
        in_features=stop - start,
        outlier_indices=outlier_indices,
        outlier_codebook=None if outlier_indices is None else tensor.outlier_codebook,
        perm=None if tensor.perm is None else (order[chosen] - start).to(torch.int32),
        scale=None if tensor.scale is None else tensor.scale[start:stop].contiguous(),
        bias=None if tensor.bias is None else tensor.bias[start:stop].contiguous(),
    )
