"""The linear that a model asks for, where the file holds it under another name or with rows to
spare.

Models ask for q_proj, k_proj, v_proj, gate_proj and up_proj; some files hold them as one qkv_proj
or gate_up_proj, and some models ask for those of a file that has the parts. config.json says how
many rows each part has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from flyweight.checkpoint.formats.base import FLOATS, Format, Source, fault, notice, type_name
from flyweight.checkpoint.names import GATED, HEAD_DIMS
from flyweight.checkpoint.stacked import read_expert
from flyweight.errors import CheckpointError
from flyweight.tensors import (
    Float4,
    Float8,
    Int8Channel,
    IntBlock,
    IntGroup,
    Plain,
    QuantTensor,
    Sparse24,
    Trellis,
    VectorQuant,
    merge,
)
from flyweight.tensors.trellis import TILE

FUSED = {  # the fused name → its parts, in the order of their rows
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def read_linear(form: Format | None, checkpoint: Source, prefix: str) -> QuantTensor:
    """The weight of the module `prefix`: quantized or plain, from its own tensors, a fused
    sibling's or its parts'.
    """
    found = _read(form, checkpoint, prefix)
    if found is None:
        found = _from_fused(form, checkpoint, prefix)
    if found is None:
        found = _from_parts(form, checkpoint, prefix)
    if found is None:
        found = _from_experts(checkpoint, prefix)
    if found is None:
        raise fault(
            checkpoint,
            f"no weight for {prefix!r}: neither '{prefix}.weight' nor a quantized form of it",
        )
    return _without_padding(checkpoint, prefix, found)


def _read(form: Format | None, checkpoint: Source, prefix: str) -> QuantTensor | None:
    quantized = None if form is None else form.read(checkpoint, prefix)
    if quantized is not None or not checkpoint.has(f"{prefix}.weight"):
        return quantized
    weight = checkpoint.tensor(f"{prefix}.weight")
    if weight.ndim != 2 or weight.dtype not in FLOATS:
        raise fault(
            checkpoint,
            f"tensor '{prefix}.weight' is {type_name(weight.dtype)} {list(weight.shape)}, no plain "
            "matrix; is its weight_scale missing, or `quantization_config` missing or wrong?",
        )
    return Plain(weight)


def _from_fused(form: Format | None, checkpoint: Source, prefix: str) -> QuantTensor | None:
    parent, _, name = prefix.rpartition(".")
    for fused, parts in FUSED.items():
        if name in parts and (whole := _read(form, checkpoint, f"{parent}.{fused}")) is not None:
            sizes = [_rows(checkpoint.config, part, f"{parent}.{part}") or 0 for part in parts]
            if sum(sizes) > whole.matrix_shape[0] or 0 in sizes:
                raise fault(
                    checkpoint,
                    f"'{parent}.{fused}' has {whole.matrix_shape[0]} rows, config.json implies "
                    f"{' + '.join(map(str, sizes))} for {', '.join(parts)}",
                )
            notice(checkpoint, f"holds {fused}; it is taken apart into {', '.join(parts)}")
            start = sum(sizes[: parts.index(name)])
            return take_rows(
                whole,
                start,
                start + sizes[parts.index(name)],
                where=f"{checkpoint.folder}: {parent}.{fused}",
            )
    return None


def _from_parts(form: Format | None, checkpoint: Source, prefix: str) -> QuantTensor | None:
    parent, _, name = prefix.rpartition(".")
    parts: Sequence[str] = FUSED.get(name, ())
    found = [_read(form, checkpoint, f"{parent}.{part}") for part in parts]
    if not found or any(part is None for part in found):
        return None
    joined = merge([part for part in found if part is not None])
    if len(joined) > 1:
        raise fault(
            checkpoint,
            f"{', '.join(parts)} of {parent!r} are quantized differently and cannot be one {name}",
        )
    notice(checkpoint, f"holds {', '.join(parts)}; they are put together as {name}")
    return joined[0]


def _from_experts(checkpoint: Source, prefix: str) -> QuantTensor | None:
    """One expert out of a tensor that holds all of a layer."""
    rows, columns = implied_shape(checkpoint.config, prefix)
    return (
        None if rows is None or columns is None else read_expert(checkpoint, prefix, rows, columns)
    )


def _without_padding(checkpoint: Source, prefix: str, tensor: QuantTensor) -> QuantTensor:
    rows = _rows(checkpoint.config, prefix.rpartition(".")[2], prefix)
    if rows is None or rows >= tensor.matrix_shape[0]:
        return tensor
    notice(
        checkpoint, "has weights with more rows than config.json implies; the padding is dropped"
    )
    return take_rows(tensor, 0, rows, where=f"{checkpoint.folder}: {prefix}")


def _rows(config: dict[str, Any], name: str, prefix: str) -> int | None:
    """The outputs of a module as config.json implies them, None where it does not say."""
    return implied_shape(config, f"{prefix.rpartition('.')[0]}.{name}")[0]


def implied_shape(config: dict[str, Any], prefix: str) -> tuple[int | None, int | None]:
    """(outputs, inputs) of a module as config.json implies them, None where it does not say."""

    def number(*keys: str) -> int | None:
        return next(
            (config[key] for key in keys if isinstance(config.get(key), int) and config[key] > 0),
            None,
        )

    def heads_of(count: int | None) -> int | None:
        return count * head if count and head else None

    hidden, heads, name = (
        number("hidden_size"),
        number("num_attention_heads"),
        prefix.rpartition(".")[2],
    )
    usual = HEAD_DIMS.get(str(config.get("model_type")))
    head = number("head_dim") or usual or (hidden // heads if hidden and heads else None)
    middle = number("intermediate_size")
    if ".experts." in prefix:
        middle = number("moe_intermediate_size", "intermediate_size")
    elif ".shared_expert." in prefix:
        middle = number("shared_expert_intermediate_size")
    elif ".shared_experts." in prefix:
        middle = None  # as many as all of them have together
    groups = heads_of(number("num_key_value_heads") or heads)
    asking = heads_of(2 * heads if heads and config.get("model_type") in GATED else heads)
    if number("kv_lora_rank"):  # latent attention: attention's own shapes are not head_dim's
        asking = groups = head = None
    return {
        "q_proj": (asking, hidden),
        "k_proj": (groups, hidden),
        "v_proj": (groups, hidden),
        "o_proj": (hidden, heads_of(heads)),
        "gate_proj": (middle, hidden),
        "up_proj": (middle, hidden),
        "down_proj": (hidden, middle),
    }.get(name, (None, None))


def take_rows(tensor: QuantTensor, start: int, stop: int, *, where: str) -> QuantTensor:
    """Outputs `start` to `stop` of a weight; what all rows share (g_idx, one scale, codebooks)
    stays whole.
    """

    def rows(part: Any, each: int = 1) -> Any:
        if part is None:
            return None
        if start % each or (stop % each and stop != tensor.matrix_shape[0]):
            raise CheckpointError(
                f"{where}: rows {start} to {stop} cut through its blocks of {each} rows"
            )
        return part[..., start // each : -(-stop // each), :].contiguous()

    if isinstance(tensor, Plain):
        return Plain(rows(tensor.weight))
    if isinstance(tensor, IntGroup):
        return dataclasses.replace(
            tensor, codes=rows(tensor.codes), scales=rows(tensor.scales), zeros=rows(tensor.zeros)
        )
    if isinstance(tensor, IntBlock | Float4):
        return tensor.map(rows)
    if isinstance(tensor, Int8Channel):
        return dataclasses.replace(tensor, codes=rows(tensor.codes), scales=rows(tensor.scales))
    if isinstance(tensor, Float8):
        shared = tensor.scales.shape[-2] == 1 and not tensor.block
        scales = tensor.scales if shared else rows(tensor.scales, tensor.block or 1)
        return dataclasses.replace(tensor, weight=rows(tensor.weight), scales=scales)
    if isinstance(tensor, VectorQuant):
        outliers = (
            None
            if tensor.outlier_codebook is None
            else rows(tensor.outlier_indices, tensor.outlier_codebook.shape[-1])
        )
        return dataclasses.replace(
            tensor,
            indices=rows(tensor.indices, tensor.length),
            outlier_indices=outliers,
            out_features=stop - start,
        )
    if isinstance(tensor, Trellis):
        rows(tensor.scales, TILE)  # or it says that a tile would be cut
        words = tensor.words[..., start // TILE : -(-stop // TILE), :, :, :].contiguous()
        return Trellis(words, rows(tensor.scales))
    assert isinstance(tensor, Sparse24)
    inner = take_rows(tensor.inner, start, stop, where=where)
    return dataclasses.replace(tensor, inner=inner, positions=rows(tensor.positions))  # type: ignore[arg-type]
