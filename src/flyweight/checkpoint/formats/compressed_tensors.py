"""compressed-tensors: groups of modules, each with a scheme and a layout of its own; tensors lie as
[out, in].

    pack-quantized    weight_packed int32 [N, ceil(K·b/32)] of unsigned codes (an IntGroup's own),
                      weight_scale [N, G], weight_shape int64 [2]; asymmetric: weight_zero_point
                      int32 [ceil(N·b/32), G], packed along N
    int-quantized     weight int8 [N, K], weight_scale [N, 1]; static: input_scale [1],
                      input_zero_point [1]
    nvfp4-pack-quantized  weight_packed uint8 [N, K/2] of e2m1 codes, weight_scale float8_e4m3fn [N,
                          K/16], weight_global_scale
                      float32 [1] that divides; read only
    float-quantized   weight float8_e4m3fn, weight_scale [1], [N, 1] or one per block of 128 × 128;
                      static: input_scale
    sparse-24-bitmask compressed [N, K/2], bitmask uint8 [N, K/8], shape int64 [2]: read only, no
        engine reads it any more

A 2:4 weight is written dense with its zeros and found again when it is read. What config.json says
of groups is in `compressed_tensors_config.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from flyweight.checkpoint.formats.base import (
    FLOATS,
    INT32,
    Format,
    Layers,
    Settings,
    Source,
    fault,
    notice,
    take,
)
from flyweight.checkpoint.formats.compressed_tensors_config import Groups, Scheme, describe
from flyweight.checkpoint.formats.modelopt import read_nvfp4
from flyweight.errors import UnsupportedError
from flyweight.packing import pack, packed_words, unpack
from flyweight.tensors import (
    FLOAT8,
    Float8,
    Int8Channel,
    IntGroup,
    NvFloat4,
    Plain,
    QuantTensor,
    Sparse24,
)


@dataclass(frozen=True)
class CompressedTensors(Format):
    name: ClassVar[str] = "compressed-tensors"
    marks: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale", "compressed")
    suffixes: ClassVar[tuple[str, ...]] = (
        "weight_packed",
        "weight_scale",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
        "input_scale",
        "input_zero_point",
        "compressed",
        "bitmask",
        "shape",
        "weight_global_scale",
        "input_global_scale",
    )
    groups: Groups = field(default_factory=Groups)

    @classmethod
    def parse(cls, settings: Settings) -> CompressedTensors:
        return cls(Groups.parse(settings))

    @property
    def spare(self) -> tuple[str, ...]:
        parts = (
            "self_attn.?_scale",
            "self_attn.?_zero_point",
            "?_proj.output_scale",
            "?_proj.output_zero_point",
        )
        return tuple(f"*.{part}" for part in parts) if self.groups.quantized_cache else ()

    # -- reading -----------------------------------------------------------------------------------

    def read(self, checkpoint: Source, prefix: str) -> QuantTensor | None:
        sparse = checkpoint.has(f"{prefix}.compressed")
        if not any(
            checkpoint.has(f"{prefix}.{mark}") for mark in ("weight_packed", "weight_scale")
        ):
            return Plain(_decompress(checkpoint, prefix, dtypes=FLOATS)) if sparse else None
        scheme = self.groups.of(prefix)
        if scheme is None:
            raise fault(
                checkpoint, f"{prefix!r} is quantized, but no group of config.json targets it"
            )
        if scheme.float4:
            return _read_float4(checkpoint, prefix)
        if scheme.float8:
            return _read_float8(checkpoint, prefix, scheme)
        tensor = (
            _read_packed(checkpoint, prefix, scheme)
            if scheme.packed
            else _read_integers(checkpoint, prefix, scheme)
        )
        return Sparse24.find(tensor)

    # -- writing -----------------------------------------------------------------------------------

    def refuses(self, tensor: QuantTensor) -> str | None:
        if isinstance(tensor, Int8Channel | Float8):
            return None
        if not isinstance(tensor, IntGroup):
            return f"it has no place for {tensor.kind} weights"
        if tensor.g_idx is not None:
            return (
                "its columns are grouped in the order of activations (g_idx), which engines no "
                "longer read here; use gptq"
            )
        if tensor.in_features % tensor.group_size:
            return (
                f"{tensor.in_features} inputs are not a multiple of the group size "
                f"{tensor.group_size}"
            )
        return None

    def pack(self, tensor: Any) -> dict[str, Tensor]:
        if isinstance(tensor, IntGroup):
            parts = {
                "weight_packed": tensor.codes,
                "weight_scale": tensor.scales,
                "weight_shape": torch.tensor(tensor.matrix_shape, dtype=torch.int64),
            }
            if tensor.zeros is not None:
                parts["weight_zero_point"] = pack(tensor.zeros.T, tensor.bits).T
            return parts
        if isinstance(tensor, Int8Channel):
            parts = {"weight": tensor.codes, "weight_scale": tensor.scales}
        else:
            whole = tensor.scales.numel() == 1 and not tensor.block
            parts = {
                "weight": tensor.weight,
                "weight_scale": tensor.scales.flatten() if whole else tensor.scales,
            }
        if tensor.input_scale is not None:
            parts["input_scale"] = tensor.input_scale
        if isinstance(tensor, Int8Channel) and tensor.input_zero is not None:
            parts["input_zero_point"] = tensor.input_zero.to(torch.int8)
        return parts

    def config(
        self, layers: Layers, ignore: Iterable[str] = (), *, biased: Iterable[str] = ()
    ) -> dict[str, Any]:
        return describe(layers, ignore)


def _read_packed(checkpoint: Source, prefix: str, scheme: Scheme) -> IntGroup:
    size = take(checkpoint, f"{prefix}.weight_shape", dtypes=(torch.int64, torch.int32), shape=(2,))
    rows, columns = size.tolist()
    packed = take(checkpoint, f"{prefix}.weight_packed", dtypes=INT32, shape=(None, None))
    if not 0 < rows <= packed.shape[0] or not 0 < columns <= 32 * packed.shape[1]:
        raise fault(
            checkpoint,
            f"'{prefix}.weight_shape' is {[rows, columns]}, but weight_packed is "
            f"{list(packed.shape)}",
        )
    if packed.shape[0] > rows:
        notice(
            checkpoint,
            "weight_packed has more rows than weight_shape counts; the padding is dropped",
        )
    codes = _dense_codes(checkpoint, prefix, packed[:rows], columns=columns, scheme=scheme)
    group_size = scheme.group_size(columns)
    scales = _scales(checkpoint, prefix, shape=(packed.shape[0], -(-columns // group_size)))[:rows]
    zeros = _zero_points(checkpoint, prefix, scales, scheme=scheme)
    g_idx = None
    if checkpoint.has(f"{prefix}.weight_g_idx"):
        g_idx = take(
            checkpoint,
            f"{prefix}.weight_g_idx",
            dtypes=(torch.int32, torch.int64),
            shape=(columns,),
        ).to(torch.int32)
        in_order = torch.arange(columns, dtype=torch.int32) // group_size
        if bool((g_idx == -1).all()) or torch.equal(g_idx.cpu(), in_order):
            g_idx = None
        elif int(g_idx.min()) < 0 or int(g_idx.max()) >= scales.shape[1]:
            raise fault(
                checkpoint, f"'{prefix}.weight_g_idx' points outside the {scales.shape[1]} groups"
            )
    return IntGroup(codes, scales, zeros, scheme.bits, group_size, columns, g_idx)


def _dense_codes(
    checkpoint: Source, prefix: str, packed: Tensor, *, columns: int, scheme: Scheme
) -> Tensor:
    """Before version 0.17, 3, 5, 6 and 7 bits did not cross words: 32 // bits values to a word, the
    rest of it empty.
    """
    bits, width = scheme.bits, packed.shape[1]
    dense, padded = packed_words(columns, bits), -(-columns // (32 // bits))
    if width == dense and (dense != padded or not scheme.padded_words):
        return packed.contiguous()
    if width != padded:
        raise fault(
            checkpoint,
            f"'{prefix}.weight_packed' has {width} words to a row; {columns} inputs of {bits} bits "
            f"take {dense}",
        )
    return pack(_unpack_padded(packed, bits)[:, :columns], bits)


def _unpack_padded(words: Tensor, bits: int) -> Tensor:
    each = 32 // bits
    shifts = torch.arange(each, device=words.device) * bits
    return ((words[..., None].long() >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _scales(checkpoint: Source, prefix: str, *, shape: tuple[int, int]) -> Tensor:
    """[rows, groups]; one scale for all is spread over the rows."""
    name = f"{prefix}.weight_scale"
    if checkpoint.has(name) and checkpoint.shape(name) in ((), (1,), (1, 1)) and shape[1] == 1:
        return (
            take(checkpoint, name, dtypes=FLOATS, shape=checkpoint.shape(name))
            .reshape(1, 1)
            .expand(shape)
            .contiguous()
        )
    if checkpoint.has(name) and checkpoint.shape(name) == shape[:1] and shape[1] == 1:
        return take(checkpoint, name, dtypes=FLOATS, shape=shape[:1])[:, None]
    return take(checkpoint, name, dtypes=FLOATS, shape=shape)


def _zero_points(
    checkpoint: Source, prefix: str, scales: Tensor, *, scheme: Scheme
) -> Tensor | None:
    """uint8 [rows, groups], shifted by 2^(bits−1) like the codes. Older files keep them unpacked,
    even where they are 0.
    """
    name = f"{prefix}.weight_zero_point"
    if not checkpoint.has(name):
        if scheme.symmetric:
            return None
        raise fault(checkpoint, f"tensor {name!r} is missing, but the scheme is asymmetric")
    rows, groups = scales.shape
    if checkpoint.shape(name) == (packed_words(rows, scheme.bits), groups) and scheme.packed:
        stored = take(checkpoint, name, dtypes=(torch.int32, torch.int8), shape=(None, None))
        if stored.dtype == torch.int32:
            zeros = unpack(stored.T.contiguous(), scheme.bits, rows).T.contiguous()
            return None if scheme.symmetric else zeros.to(torch.uint8)
    shape = checkpoint.shape(name)
    if shape in ((), (1,), (1, 1)) and groups == 1:
        stored = (
            take(checkpoint, name, dtypes=(torch.int8, torch.int32), shape=shape)
            .reshape(1, 1)
            .expand(rows, 1)
        )
    else:
        stored = take(checkpoint, name, dtypes=(torch.int8, torch.int32), shape=(rows, groups))
    low, high = -(1 << (scheme.bits - 1)), (1 << (scheme.bits - 1)) - 1
    if stored.numel() and not (low <= int(stored.min()) and int(stored.max()) <= high):
        raise fault(checkpoint, f"{name!r} holds values that {scheme.bits} bits cannot")
    if scheme.symmetric and bool(stored.any()):
        raise fault(
            checkpoint, f"{name!r} holds zero points, but config.json calls the scheme symmetric"
        )
    return None if scheme.symmetric else (stored.int() - low).to(torch.uint8).contiguous()


def _read_integers(checkpoint: Source, prefix: str, scheme: Scheme) -> IntGroup | Int8Channel:
    """int8 storage: W8A8 where activations are quantized too, else the same weight as packed
    integers.
    """
    codes = _whole(checkpoint, prefix, dtypes=(torch.int8,))
    rows, columns = codes.shape
    group_size = scheme.group_size(columns)
    scales = _scales(checkpoint, prefix, shape=(rows, -(-columns // group_size)))
    if scheme.activation == "none":
        middle = 1 << (scheme.bits - 1)
        if int(codes.min()) < -middle or int(codes.max()) >= middle:
            raise fault(
                checkpoint, f"'{prefix}.weight' holds values that {scheme.bits} bits cannot"
            )
        zeros = _zero_points(checkpoint, prefix, scales, scheme=scheme)
        return IntGroup.from_values(
            codes.int() + middle, scales, zeros, bits=scheme.bits, group_size=group_size
        )
    if group_size != columns or scheme.bits != 8:
        raise UnsupportedError(
            f"{checkpoint.folder}: {prefix!r} quantizes activations with {scheme.bits}-bit weights "
            f"in groups of {group_size}; only one scale per output and 8 bits are handled"
        )
    if _zero_points(checkpoint, prefix, scales, scheme=scheme) is not None:
        raise UnsupportedError(
            f"{checkpoint.folder}: {prefix!r} has asymmetric weights for "
            f"quantized activations: not handled"
        )
    input_zero = None
    if scheme.activation == "static" and not scheme.symmetric_input:
        input_zero = _scalar(
            checkpoint, f"{prefix}.input_zero_point", (torch.int8, torch.int32, *FLOATS)
        )
    elif checkpoint.has(f"{prefix}.input_zero_point"):
        # zero, of a symmetric scheme
        _scalar(checkpoint, f"{prefix}.input_zero_point", (torch.int8, torch.int32, *FLOATS))
    return Int8Channel(codes, scales, _input_scale(checkpoint, prefix, scheme), input_zero)


def _read_float8(checkpoint: Source, prefix: str, scheme: Scheme) -> Float8:
    weight = _whole(checkpoint, prefix, dtypes=(FLOAT8,))
    rows, columns = weight.shape
    if scheme.block:
        shape = (-(-rows // scheme.block), -(-columns // scheme.block))
        scales = take(checkpoint, f"{prefix}.weight_scale", dtypes=FLOATS, shape=shape)
    elif checkpoint.has(f"{prefix}.weight_scale") and checkpoint.shape(
        f"{prefix}.weight_scale"
    ) in ((), (1,), (1, 1)):
        scales = _scalar(checkpoint, f"{prefix}.weight_scale", FLOATS).reshape(1, 1)
    else:
        scales = _scales(checkpoint, prefix, shape=(rows, 1))
    return Float8(
        weight, scales, scheme.activation, scheme.block, _input_scale(checkpoint, prefix, scheme)
    )


def _read_float4(checkpoint: Source, prefix: str) -> NvFloat4:
    if checkpoint.has(f"{prefix}.input_global_scale"):
        _scalar(checkpoint, f"{prefix}.input_global_scale", FLOATS)  # of activations in 4 bits
    whole = _scalar(checkpoint, f"{prefix}.weight_global_scale", FLOATS)
    return read_nvfp4(checkpoint, prefix, "weight_packed", 1 / whole.float())


def _input_scale(checkpoint: Source, prefix: str, scheme: Scheme) -> Tensor | None:
    return (
        _scalar(checkpoint, f"{prefix}.input_scale", FLOATS)
        if scheme.activation == "static"
        else None
    )


def _scalar(checkpoint: Source, name: str, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    shape = checkpoint.shape(name) if checkpoint.has(name) else (1,)
    return take(
        checkpoint, name, dtypes=dtypes, shape=shape if shape in ((), (1, 1)) else (1,)
    ).reshape(1)


def _whole(checkpoint: Source, prefix: str, *, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """The dense weight [rows, columns], from its 2:4 storage where it has one."""
    if checkpoint.has(f"{prefix}.compressed"):
        return _decompress(checkpoint, prefix, dtypes=dtypes)
    weight = take(checkpoint, f"{prefix}.weight", dtypes=dtypes, shape=(None, None))
    if not weight.numel():
        raise fault(checkpoint, f"tensor '{prefix}.weight' is empty")
    return weight


def _decompress(checkpoint: Source, prefix: str, *, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """sparse-24-bitmask: bit k % 8 of byte k // 8 says that column k is kept; `compressed` holds
    the kept ones in order.
    """
    kept = take(checkpoint, f"{prefix}.compressed", dtypes=dtypes, shape=(None, None))
    rows, half = kept.shape
    bitmask = take(
        checkpoint, f"{prefix}.bitmask", dtypes=(torch.uint8,), shape=(rows, -(-2 * half // 8))
    )
    size = take(
        checkpoint,
        f"{prefix}.shape",
        dtypes=(torch.int64, torch.int32),
        shape=(2, 1)
        if checkpoint.has(f"{prefix}.shape") and len(checkpoint.shape(f"{prefix}.shape")) == 2
        else (2,),
    )
    mask = (
        ((bitmask[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1)
        .flatten(1)
        .bool()[:, : 2 * half]
    )
    if (
        size.flatten().tolist() != [rows, 2 * half]
        or not half
        or not bool((mask.sum(1) == half).all())
    ):
        raise fault(
            checkpoint,
            f"'{prefix}.bitmask' and '{prefix}.shape' do not fit '{prefix}.compressed' "
            f"{list(kept.shape)}",
        )
    # float8 has no masked assignment
    raw = kept.view(torch.uint8) if kept.dtype == FLOAT8 else kept
    dense = torch.zeros(rows, 2 * half, dtype=raw.dtype)
    dense[mask] = raw.flatten()
    return dense.view(kept.dtype)
