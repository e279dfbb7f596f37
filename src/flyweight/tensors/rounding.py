"""How far two right computations of one product may be apart, by format: what checks allow.

Every bound of a check comes from this file. It counts the places at which a right kernel may round
otherwise than the reference, and takes the root mean square of what each costs, as a share of the
product:

    a value rounded to a type with step `eps`      UNIFORM · eps: errors are uniform between two
                                                   neighbours, whose distance doubles once a binade
    a product of a format                          √ROUNDINGS of those: its result, and its weights
                                                   where a kernel writes them out in the model's
                                                       type
    activations that the format rounds too         √2 · their own rounding, at most: an input that
                                                   differs in its last bit may fall to another code,
                                                   and in the worst case every one does

Nothing here is fitted to a kernel: a format that rounds more allows more.
"""

from __future__ import annotations

import math

import torch

UNIFORM = math.sqrt(1 / 12) * 0.736  # the second: rms of 2^e / x over a binade of normal numbers
# By `QuantTensor.kind`: roundings to the model's type on the way of one product. Plain: the result.
# Codes: also the weight, scale times code. VPTQ: also the sum of two centroids, and scale and bias.
ROUNDINGS = {"plain": 1, "vptq": 4} | dict.fromkeys(
    ("int", "blocks", "w8a8", "fp8", "sparse24", "trellis"), 2
)
MOST_ROUNDINGS = max(ROUNDINGS.values())  # for kinds registered elsewhere
ATTENTION_ROUNDINGS = 3  # the query, the shares that values are weighed by, the result
INPUTS = {"w8a8": 0.0091, "fp8": 0.0266}  # of rows of normal numbers: see `input_rounding`
BY_GROUP = 0.0048  # of int8 in groups of 32, by a CPU's kernels: the largest is 2.1 deviations
STORED = {"fp8": 0.0266, "int8": 0.0091}  # of keys and values in so many bits
MARGIN = 2.0  # between an expected rms and what fails


def rounding(dtype: torch.dtype) -> float:
    """Of one value to `dtype`, relative, rms. Kernels for float32 may take inputs in bfloat16."""
    return UNIFORM * torch.finfo(torch.bfloat16 if dtype == torch.float32 else dtype).eps


def product_noise(kind: str, dtype: torch.dtype, *, inputs: float = 0.0) -> float:
    """Relative rms difference of two right products; `inputs`: the rounding of activations, where
    theirs may differ already before they are rounded to codes.
    """
    count = ROUNDINGS.get(kind, MOST_ROUNDINGS)
    return math.sqrt(count * rounding(dtype) ** 2 + 2 * inputs**2)


def input_rounding(kind: str) -> float:
    """Of activations, for inputs spread like normal numbers (those of kernel benchmarks).

    int8: the largest of some thousand is about 4 deviations, so a step is 4 / 127 and its rms
    4 / 127 / √12. e4m3 has three bits behind the first: UNIFORM / 8.
    """
    return INPUTS.get(kind, 0.0)


def product_bound(
    kind: str, dtype: torch.dtype, *, products: int = 1, own_inputs: float = 0.0
) -> float:
    """What the relative error of a kernel may be; of several products, each of the one before.
    `own_inputs`: the rounding of activations by the kernel alone.
    """
    inputs = input_rounding(kind) if products > 1 else 0.0  # of the first both sides see the same
    noise = math.hypot(product_noise(kind, dtype, inputs=inputs), own_inputs)
    return MARGIN * math.sqrt(products) * noise


def attention_bound(dtype: torch.dtype) -> float:
    return MARGIN * math.sqrt(ATTENTION_ROUNDINGS) * rounding(dtype)
