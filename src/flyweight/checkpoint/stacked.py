"""Experts that lie in one tensor a layer: single linears and biases taken out of it.

Qwen and GLM, where they are saved so: gate_up_proj [experts, 2 · width, hidden], gate above up, and
down_proj [experts, hidden, width]. gpt-oss: the same transposed, gate and up by turns, with biases;
or in MXFP4, rows of blocks of 32 inputs that share an exponent:

    gate_up_proj_blocks  uint8 [experts, 2 · width, hidden / 32, 16]: two values a byte, low first
    gate_up_proj_scales  uint8 [experts, 2 · width, hidden / 32]: exponent + 127
"""

from __future__ import annotations

import functools
import re

import torch
from torch import Tensor

from flyweight.checkpoint.formats.base import FLOATS, Source, fault, type_name
from flyweight.tensors import FLOAT4_GROUP, Float4, Plain, QuantTensor

EXPERT = re.compile(r"(?P<parent>.+\.experts)\.(?P<number>\d+)\.(?P<name>gate|up|down)_proj")
GPT_OSS = "gpt_oss"


def read_expert(checkpoint: Source, prefix: str, rows: int, columns: int) -> QuantTensor | None:
    """The weight [rows, columns] of one expert's linear; None where the file has no such tensor."""
    match = EXPERT.fullmatch(prefix)
    if match is None:
        return None
    stacked = f"{match['parent']}.{stack_of(match['name'])}"
    number = int(match["number"])
    gate_up = match["name"] != "down"
    outputs = 2 * rows if gate_up else rows
    part = functools.partial(part_of, checkpoint, name=match["name"])
    if checkpoint.has(f"{stacked}_blocks"):
        whole = mxfp4(checkpoint, stacked, number, outputs=outputs, columns=columns)
        return Float4(part(whole.codes).contiguous(), part(whole.exponents).contiguous())
    if checkpoint.has(stacked):
        weight = plain(checkpoint, stacked, number, outputs=outputs, columns=columns)
        return Plain(part(weight))
    return None


def read_bias(checkpoint: Source, name: str) -> Tensor | None:
    """`….experts.3.up_proj.bias` out of the biases of all experts."""
    match = EXPERT.fullmatch(name.removesuffix(".bias"))
    if match is None or not name.endswith(".bias"):
        return None
    stacked = f"{match['parent']}.{stack_of(match['name'])}_bias"
    if not checkpoint.has(stacked):
        return None
    biases = checkpoint.tensor(stacked)
    number = int(match["number"])
    if biases.ndim != 2 or number >= len(biases):
        raise fault(checkpoint, f"{stacked!r} has shape {list(biases.shape)}, no bias {number}")
    return part_of(checkpoint, biases[number], match["name"])


def has_bias(checkpoint: Source, name: str) -> bool:
    match = EXPERT.fullmatch(name.removesuffix(".bias"))
    if match is None or not name.endswith(".bias"):
        return False
    return checkpoint.has(f"{match['parent']}.{stack_of(match['name'])}_bias")


def stack_of(name: str) -> str:
    return "down_proj" if name == "down" else "gate_up_proj"


def part_of(checkpoint: Source, joined: Tensor, name: str) -> Tensor:
    """Gate or up of both: by turns in gpt-oss, else one above the other."""
    if name == "down":
        return joined
    if checkpoint.config.get("model_type") == GPT_OSS:
        return joined[int(name == "up") :: 2]
    return joined.chunk(2)[int(name == "up")]


def plain(checkpoint: Source, stacked: str, number: int, *, outputs: int, columns: int) -> Tensor:
    """[outputs, columns] of one expert."""
    transposed = checkpoint.config.get("model_type") == GPT_OSS
    shape = (columns, outputs) if transposed else (outputs, columns)
    found = checkpoint.shape(stacked)
    if found[1:] != shape or number >= found[0]:
        raise fault(
            checkpoint,
            f"{stacked!r} has shape {list(found)}, config.json implies {list(shape)} for expert "
            f"{number}",
        )
    weight = checkpoint.tensor(stacked)[number]
    if weight.dtype not in FLOATS:
        raise fault(
            checkpoint,
            f"tensor {stacked!r} is {type_name(weight.dtype)}: experts in one tensor are read "
            "plain or in MXFP4 only",
        )
    return weight.T if transposed else weight


def mxfp4(checkpoint: Source, stacked: str, number: int, *, outputs: int, columns: int) -> Float4:
    """[outputs, columns] of one expert, in the bytes of the file."""
    blocks = checkpoint.tensor(f"{stacked}_blocks")
    scales = checkpoint.tensor(f"{stacked}_scales")
    groups = columns // FLOAT4_GROUP
    wanted = (outputs, groups, FLOAT4_GROUP // 2)
    if (
        columns % FLOAT4_GROUP
        or blocks.dtype != torch.uint8
        or scales.dtype != torch.uint8
        or blocks.shape[1:] != wanted
        or scales.shape[1:] != wanted[:2]
        or number >= min(len(blocks), len(scales))
    ):
        raise fault(
            checkpoint,
            f"'{stacked}_blocks' has shape {list(blocks.shape)}, config.json implies bytes of "
            f"{list(wanted)} for expert {number}",
        )
    return Float4(blocks[number].flatten(1), scales[number])
