"""Weights of every kind for the tests of the linears on a GPU."""

import torch

from flyweight.tensors import Int8Channel, IntGroup, Plain, QuantTensor

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
KINDS = ["plain", "w8a8", "int4:128", "int4:64", "int4:32", "int4:channel", "int8:128", "int8:32", "int8:channel"]


def make(kind: str, shape, seed: int = 0, dtype=torch.bfloat16) -> QuantTensor:
    columns = shape[1]
    if kind == "plain":
        return Plain.random(shape, seed, "cuda", dtype=dtype)
    if kind == "w8a8":
        return Int8Channel.random(shape, seed, "cuda")
    bits, group = kind.split(":")
    size = columns if group == "channel" else int(group) if columns % int(group) == 0 else 32
    return IntGroup.random(shape, seed, "cuda", bits=int(bits[3:]), group_size=size, dtype=dtype, symmetric=seed % 2 == 1)


def relative_error(got, want):
    assert got.isfinite().all(), "an output was not written"
    return ((got.double() - want).norm() / want.norm()).item()
