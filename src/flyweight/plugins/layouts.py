"""Weights as vLLM's parameters hold them → the family of `tensors/`.

vLLM stores integers of `bits` bits in int32 words, either along the inputs (GPTQ,
compressed-tensors, and AWQ once vLLM has turned it round) or, for zero points, along the outputs.
Which axis of a parameter is which it says in `input_dim`, `output_dim` and `packed_dim`: AWQ's and
GPTQ's parameters lie [in, out], those of compressed-tensors [out, in].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flyweight.packing import unpack
from flyweight.tensors import Float8, Int8Channel, IntGroup


def outputs_first(parameter: Any) -> Tensor:
    """[out, in] (or what stands for either axis, packed), as a plain tensor."""
    data: Tensor = parameter.data
    output = getattr(parameter, "output_dim", None)
    if output is None:
        output = 1 - getattr(parameter, "input_dim", 1)
    return data.detach().t().contiguous() if output == 1 else data.detach().contiguous()


def integers(
    codes: Any,
    scales: Any,
    zeros: Any | None,
    *,
    bits: int,
    group: int,
    inputs: int,
) -> IntGroup:
    """Codes packed along the inputs, zero points along the outputs; `group` −1: all inputs."""
    scale = outputs_first(scales)  # [out, groups]
    points = None
    if zeros is not None:
        by_group = outputs_first(zeros).t()  # [groups, words of outputs]
        points = unpack(by_group.contiguous(), bits, scale.shape[0]).t().to(torch.uint8)
        points = points.contiguous()
    return IntGroup(
        codes=outputs_first(codes),
        scales=scale,
        zeros=points,
        bits=bits,
        group_size=inputs if group in (-1, 0) else group,
        in_features=inputs,
    )


def channels(codes: Tensor, scales: Tensor, input_scale: Tensor | None = None) -> Int8Channel:
    """int8 [out, in], one scale an output (or one for all)."""
    rows = codes.shape[0]
    each = scales.detach().float().reshape(-1, 1).expand(rows, 1).contiguous()
    return Int8Channel(codes.detach().contiguous(), each, input_scale)


def float8(codes: Tensor, scales: Tensor, input_scale: Tensor | None = None) -> Float8:
    """float8 [out, in], one scale an output (or one for all)."""
    rows = codes.shape[0]
    each = scales.detach().float().reshape(-1, 1).expand(rows, 1).contiguous()
    return Float8(
        codes.detach().contiguous(),
        each,
        activation="token" if input_scale is None else "static",
        input_scale=input_scale,
    )
