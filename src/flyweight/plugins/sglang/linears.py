"""Layers of SGLang whose product is ours: read as loaded, laid out once, multiplied by our op.

    preparing(read)   around `scheme.process_weights_after_loading(layer)`
    apply             around `scheme.apply_weights(layer, x, bias)`

A reader gives the linear that a layer holds and the names of the parameters that it then no longer
needs. What it does not know it refuses with a reason; SGLang's own kernel gets the layer untouched,
and one line says why.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flyweight.checkpoint.formats.awq import unpack_columns
from flyweight.errors import UnsupportedError
from flyweight.plugins import layouts, limits
from flyweight.plugins.layer import let_go, take
from flyweight.plugins.limits import Wanted
from flyweight.tensors import IntGroup, QuantTensor

TAKEN = "flyweight_taken"
Read = Callable[[Any, torch.nn.Module], tuple[Wanted, QuantTensor, tuple[str, ...]]]
logger = logging.getLogger("sglang.flyweight")


def preparing(read: Read) -> Callable[..., None]:
    def prepare(original: Callable[..., Any], scheme: Any, layer: torch.nn.Module) -> None:
        try:
            wanted, tensor, names = read(scheme, layer)
            if tensor.device.type not in ("cuda", "cpu"):
                raise UnsupportedError(f"a device of type {tensor.device.type}")
            on_gpu = tensor.device.type == "cuda"
            reason = limits.unsupported_reason(wanted, limits.current_gpu() if on_gpu else None)
            if reason is not None:
                raise UnsupportedError(f"{wanted.name}: {reason}")
            taken = take(layer, [tensor], dtype=wanted.dtype, device=tensor.device)
        except Exception as error:  # whatever it is: SGLang has a kernel for this layer, too
            tell_once(f"Flyweight leaves a layer to {type(scheme).__name__}: {error}")
            original(scheme, layer)
            return
        setattr(layer, TAKEN, taken)
        let_go(layer, *names)

    return prepare


def apply(
    original: Callable[..., Tensor],
    scheme: Any,
    layer: torch.nn.Module,
    x: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    taken = getattr(layer, TAKEN, None)
    if taken is None:
        return original(scheme, layer, x, bias)
    return taken.multiply(layer, x, bias)


@functools.cache
def tell_once(text: str) -> None:
    logger.info(text)


# -- readers -----------------------------------------------------------------------------------


def read_awq(scheme: Any, layer: Any) -> tuple[Wanted, QuantTensor, tuple[str, ...]]:
    """As AWQ's files have them: words of eight outputs in their own order."""
    names = ("qweight", "qzeros", "scales")
    qweight, qzeros, scales = (getattr(layer, name).data for name in names)
    inputs = qweight.shape[0]
    group = scheme.quant_config.group_size
    tensor = IntGroup.from_values(
        unpack_columns(qweight).T,
        scales.T.contiguous(),
        unpack_columns(qzeros).T.to(torch.uint8).contiguous(),
        bits=4,
        group_size=inputs if group == -1 else group,
    )
    wanted = Wanted("int4", tensor.matrix_shape[0], inputs, group, scales.dtype)
    return wanted, tensor, names


def read_gptq(scheme: Any, layer: Any) -> tuple[Wanted, QuantTensor, tuple[str, ...]]:
    """Words along the inputs; SGLang runs the symmetric ones."""
    config = scheme.quant_config
    if config.desc_act:
        raise UnsupportedError("inputs in another order (act-order)")
    wanted, tensor = _integers(
        layer.qweight, layer.scales, None, bits=config.weight_bits, group=config.group_size
    )
    return wanted, tensor, ("qweight", "qzeros", "scales")


def read_wna16(scheme: Any, layer: Any) -> tuple[Wanted, QuantTensor, tuple[str, ...]]:
    """compressed-tensors with 4 or 8 bits, with zero points or without."""
    if scheme.has_g_idx:
        raise UnsupportedError("inputs in another order (act-order)")
    zeros = None if scheme.symmetric else layer.weight_zero_point
    wanted, tensor = _integers(
        layer.weight_packed,
        layer.weight_scale,
        zeros,
        bits=32 // scheme.pack_factor,
        group=scheme.group_size,
    )
    return wanted, tensor, ("weight_packed", "weight_scale", "weight_zero_point")


def _integers(
    codes: Any, scales: Any, zeros: Any, *, bits: int, group: int
) -> tuple[Wanted, QuantTensor]:
    packed = codes.data.shape[codes.input_dim]
    inputs = packed * 32 // bits
    tensor = layouts.integers(codes, scales, zeros, bits=bits, group=group, inputs=inputs)
    form = limits.MIXED.get(bits)
    if form is None:
        raise UnsupportedError(f"weights of {bits} bits (4 and 8)")
    return Wanted(form, tensor.matrix_shape[0], inputs, group, tensor.scales.dtype), tensor


def read_w8a8(scheme: Any, layer: Any) -> tuple[Wanted, QuantTensor, tuple[str, ...]]:
    """int8 by int8: SGLang rounds each row at run time, whatever the file says of its inputs."""
    if str(getattr(scheme.strategy, "value", scheme.strategy)) != "channel":
        raise UnsupportedError("weights with one scale for all outputs")
    if not scheme.input_symmetric:
        raise UnsupportedError("activations with a zero point")
    if layer.weight.device.type != "cuda":
        raise UnsupportedError("a GPU is needed")
    tensor = layouts.channels(layer.weight.data, layer.weight_scale.data)
    wanted = Wanted("w8a8", *tensor.matrix_shape, dtype=layer.params_dtype)
    return wanted, tensor, ("weight", "weight_scale")


READERS: dict[str, Read] = {
    "awq": read_awq,
    "gptq": read_gptq,
    "wna16": read_wna16,
    "w8a8": read_w8a8,
}
