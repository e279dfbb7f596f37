"""VPTQ linears of experts, stacked and taken out again."""

import dataclasses

import pytest
import torch

from flyweight.kernels import reference
from flyweight.kernels.linear.fused import Segments
from flyweight.kernels.vptq import linear, slots
from flyweight.tensors import VectorQuant


def make(seed, shape=(64, 256), **options):
    books = dict(main=256, residual=16) | options
    tensor = VectorQuant.random(shape, seed, length=8, dtype=torch.bfloat16, **books)
    return linear.prepare(tensor, dtype=torch.bfloat16, ops=reference)


def tensors(one):
    found = []
    for part in one.parts:
        values = [getattr(part, field.name) for field in dataclasses.fields(part)]
        found += [value.clone() for value in values if isinstance(value, torch.Tensor)]
    return found


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_slots_hold_the_experts_that_were_asked_for():
    members = [linear.join([make(2 * i), make(2 * i + 1)]) for i in range(4)]
    before = [tensors(one) for one in members]
    stacked = slots.stack(members)
    assert not isinstance(stacked, str), stacked
    assert all(same(tensors(one), old) for one, old in zip(members, before, strict=True))
    taken = slots.take(stacked, torch.tensor([3, 0, 3]), members[0])
    assert all(same(tensors(one), before[i]) for one, i in zip(taken, (3, 0, 3), strict=True))
    assert taken[0].shape == members[0].shape == (128, 256)


@pytest.mark.parametrize(
    ("other", "reason"),
    [(dict(residual=None), "several sizes"), (dict(shape=(72, 256)), "several sizes")],
)
def test_experts_of_several_sizes_are_told(other, reason):
    assert reason in slots.stack([make(0), make(1, **other)])


def test_lists_of_codebooks_in_slices_are_made_equally_long():
    members = [make(i, main=16384) for i in range(3)]
    before = [one.parts[0].stream.clone() for one in members]
    assert len({len(stream) for stream in before}) > 1
    stacked = slots.stack(members)
    assert not isinstance(stacked, str), stacked
    for one, stream, offsets in zip(
        slots.take(stacked, torch.arange(3), members[0]), before, stacked[0].offsets, strict=True
    ):
        assert torch.equal(one.parts[0].stream[: len(stream)], stream)
        assert int(offsets.max()) <= len(stream)


def test_parts_that_run_one_by_one_are_taken_one_by_one():
    members = [Segments([make(2 * i, main=16384), make(2 * i + 1, main=16384)]) for i in range(3)]
    stacked = slots.Stacked.of(members)
    assert not isinstance(stacked, str), stacked
    (taken,) = stacked.take(torch.tensor([2]))
    assert all(
        same(tensors(a), tensors(b)) for a, b in zip(taken.parts, members[2].parts, strict=True)
    )
    assert isinstance(slots.Stacked.of([*members, make(9)]), str)
