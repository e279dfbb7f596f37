"""Layers of experts for tests, on any device, and what they compute."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from flyweight.plugins.shards import inputs_of, outputs_of
from flyweight.tensors import Int8Channel, IntGroup, Sparse24, VectorQuant


def integers(bits, group):
    return lambda shape, seed, device, dtype: IntGroup.random(
        shape, seed, device, bits=bits, group_size=group, dtype=dtype
    )


def vectors(main, residual):
    return lambda shape, seed, device, dtype: VectorQuant.random(
        shape, seed, device, length=8, main=main, residual=residual, dtype=dtype
    )


KINDS = {
    "int4": integers(4, 64),
    "int3": integers(3, 64),
    "w8a8": lambda shape, seed, device, dtype: Int8Channel.random(shape, seed, device),
    "2:4 int4": lambda shape, seed, device, dtype: Sparse24.random(
        shape, seed, device, inner=IntGroup, group_size=64, dtype=dtype
    ),
    "2:4 w8a8": lambda shape, seed, device, dtype: Sparse24.random(shape, seed, device),
    "vptq": vectors(256, 16),
    # a recipe that gives experts several kinds, and gate another than up
    "mixed": lambda shape, seed, device, dtype: integers((4, 8, 4, 3)[seed % 4], 64)(
        shape, seed, device, dtype
    ),
}


def make(kind, count, hidden, width, *, device="cpu", dtype=torch.float32):
    """(gate, up, down) of each expert."""
    new = KINDS[kind]
    return [
        (
            new((width, hidden), 3 * i, device, dtype),
            new((width, hidden), 3 * i + 1, device, dtype),
            new((hidden, width), 3 * i + 2, device, dtype),
        )
        for i in range(count)
    ]


def cut(members, rank, ranks):
    """One rank's part of each."""
    return [
        (
            outputs_of(gate, rank, ranks, where="gate"),
            outputs_of(up, rank, ranks, where="up"),
            inputs_of(down, rank, ranks, where="down"),
        )
        for gate, up, down in members
    ]


def choose(tokens, count, chosen, device="cpu"):
    """shares and experts, [tokens, chosen] each"""
    shares, ids = torch.rand(tokens, count, device=device).topk(chosen)
    return shares, ids.int()


def expected(members, x, shares, ids):
    """In float64, rounded to the type of x between the two linears."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for number, (gate, up, down) in enumerate(members):
        tokens, choice = (ids == number).nonzero().T
        if len(tokens):
            rows = x[tokens]
            gated = silu(gate.matmul_reference(rows)) * up.matmul_reference(rows)
            product = down.matmul_reference(gated.to(x.dtype))
            out[tokens] += shares[tokens, choice, None].double() * product
    return out


def error(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()
