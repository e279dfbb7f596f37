"""8-bit prompts for 4-bit weights (`--prompt-dtype`): passes of many rows multiply 8-bit codes.

    y = (codes of x · scale of its row) (codes of W · scale of its output)ᵀ

Many rows of 4-bit weights are bound by the matrix units, which multiply 8-bit codes twice as fast
as 16-bit floats. So such a pass writes each weight out in 8-bit codes, the scales of its groups
folded into one for each output, and goes on as W8A8 does. Where the codes of all weights take
little of the device's memory (`fits_beside`) they are written once and kept. The codes of a weight
hardly lose by that (they are 16 times as fine as what they stand for); x does, as in any W8A8
model. Steps of up to `FEW_ROWS` rows, all decode steps among them, stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flyweight.errors import OptionError, unknown
from flyweight.tensors import FLOAT8, FLOAT8_MAX, Float8, Int8Channel, QuantTensor

FEW_ROWS = 256  # as many as the largest captured decode step has
FORMATS = {"int8": "w8a8", "fp8": "fp8"}  # of the tiles that are written
KEPT_SHARE = 0.1  # of a device's memory, that codes which are kept may take


def check_prompt_dtype(kind: str) -> str:
    if kind not in FORMATS:
        raise OptionError(unknown("prompt_dtype", kind, FORMATS))
    return kind


def fits_beside(nbytes: int, device: torch.device) -> bool:
    """Whether so many bytes of codes are kept."""
    if not nbytes or device.type != "cuda":
        return False
    return nbytes <= KEPT_SHARE * torch.cuda.get_device_properties(device).total_memory


def in_eight_bits(weight: Tensor, kind: str) -> QuantTensor:
    """A dense weight [out, in] with one scale for each output, and x quantized by its rows."""
    limit = 127 if kind == "int8" else FLOAT8_MAX
    scales = (weight.float().abs().amax(1, keepdim=True) / limit).clamp(min=1e-12)
    scaled = (weight.float() / scales).clamp(-limit, limit)
    if kind == "int8":
        return Int8Channel(scaled.round().to(torch.int8), scales)
    return Float8(scaled.to(FLOAT8), scales)
