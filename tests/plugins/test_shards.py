"""Ranks' parts of a weight: what they compute together is what the whole computes."""

import dataclasses

import pytest
import torch

from flyweight.errors import UnsupportedError
from flyweight.plugins.shards import inputs_of, outputs_of
from flyweight.tensors import (
    Float4,
    Float8,
    Int8Channel,
    IntGroup,
    Plain,
    Sparse24,
    VectorQuant,
)

SHAPE = (96, 512)
WEIGHTS = {
    "plain": lambda: Plain.random(SHAPE, dtype=torch.float32),
    "int4": lambda: IntGroup.random(SHAPE, group_size=64),
    "int4 symmetric": lambda: IntGroup.random(SHAPE, group_size=128, symmetric=True),
    "int3": lambda: IntGroup.random(SHAPE, bits=3, group_size=32),
    "int8, one scale a channel": lambda: IntGroup.random(SHAPE, bits=8, group_size=-1),
    "w8a8": lambda: Int8Channel.random(SHAPE),
    "fp8": lambda: Float8.random(SHAPE),
    "fp8, one scale": lambda: dataclasses.replace(
        Float8.random(SHAPE), scales=torch.tensor([[0.01]])
    ),
    "mxfp4": lambda: Float4.random(SHAPE),
    "2:4 int4": lambda: Sparse24.random(SHAPE, inner=IntGroup, group_size=64),
    "2:4 w8a8": lambda: Sparse24.random(SHAPE),
    "vptq": lambda: VectorQuant.random(SHAPE, length=8, main=64, residual=16),
    "vptq, permuted, outliers": lambda: VectorQuant.random(
        SHAPE, length=6, main=64, residual=None, outliers=16, permute=True
    ),
    "vptq, four books": lambda: VectorQuant.random(SHAPE, length=8, main=64, groups=4),
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_make_the_whole(kind, ranks):
    whole = WEIGHTS[kind]()
    expected = whole.dequantize()
    rows = [outputs_of(whole, rank, ranks, where="w") for rank in range(ranks)]
    assert torch.equal(torch.cat([part.dequantize() for part in rows]), expected)
    columns = [inputs_of(whole, rank, ranks, where="w") for rank in range(ranks)]
    assert all(part.matrix_shape == (96, 512 // ranks) for part in columns)
    assert torch.equal(torch.cat([part.dequantize() for part in columns], 1), expected)


@pytest.mark.parametrize(
    ("whole", "ranks", "words"),
    [
        (IntGroup.random((64, 384), group_size=128), 2, "group of 128 inputs crosses the border"),
        (IntGroup.random((64, 256), act_order=True), 2, "act-order"),
        (IntGroup.random((64, 256)), 3, "256 cannot be divided by 3"),
        (Float4.random((64, 96)), 2, "group of 32"),
        (
            VectorQuant.random((64, 256), length=8, main=16, groups=2, permute=True),
            4,
            "codebook of 128 inputs",
        ),
        (
            dataclasses.replace(
                Float8.random((128, 384)),
                block=128,
                scales=torch.ones(1, 3),
                activation="group",
            ),
            2,
            "block of 128",
        ),
    ],
)
def test_inputs_that_cannot_be_cut_say_why(whole, ranks, words):
    with pytest.raises(UnsupportedError, match=words) as found:
        for rank in range(ranks):
            inputs_of(whole, rank, ranks, where="model.layers.3.mlp.down_proj")
    assert "model.layers.3.mlp.down_proj" in str(found.value)


def test_outputs_that_cannot_be_cut_say_why():
    whole = VectorQuant.random((96, 64), length=32, main=16, residual=None)
    with pytest.raises(UnsupportedError, match=r"blocks of 32 rows.*--shards"):
        outputs_of(whole, 1, 4, where="q_proj")
