"""Which heads decode attention takes, and how it shares them out; no GPU needed."""

from dataclasses import replace

import pytest
import torch

from flyweight.gpu import GPUS
from flyweight.kernels import reference
from flyweight.kernels.attention import qkv
from flyweight.kernels.attention.decode import HeadShape, Workspace
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.tensors import Plain

SHAPE = HeadShape(heads=4, kv_heads=2, head_dim=64, rotary=16, page=16, qk_norm=True)


def shared_out(group):
    shape = replace(SHAPE, heads=2 * group, kv_heads=2)
    return shape.items_of_kv_head, shape.item_heads


def test_a_group_of_up_to_eight_query_heads_stays_together():
    assert [shared_out(group) for group in (1, 5, 8)] == [(1, 1), (1, 5), (1, 8)]


def test_a_larger_group_is_shared_out_as_evenly_as_can_be():
    assert [shared_out(group) for group in (9, 12, 16, 17)] == [(2, 5), (2, 6), (2, 8), (3, 6)]
    for group in range(9, 129):
        items, heads = shared_out(group)
        assert heads <= 8 and (items - 1) * heads < group <= items * heads, "each has work"


def test_every_item_has_a_ticket_and_room_for_its_heads():
    shape = replace(SHAPE, heads=18, kv_heads=2)  # items of 5 and 4
    workspace = Workspace.make(shape, 3, torch.device("cpu"), splits=7)
    assert workspace.tickets.numel() == 3 * 2 * 2
    assert workspace.scratch.numel() == 3 * 7 * 2 * 2 * 5 * (64 + 4)


def test_shapes_that_need_one_item_are_compiled_as_before():
    assert "ITEMS" not in replace(SHAPE, heads=16, kv_heads=2).defines
    assert replace(SHAPE, heads=32, kv_heads=2).defines["ITEMS"] == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(heads=18, kv_heads=2), "9 query heads"),
        (dict(heads=22, kv_heads=2), "11 query heads"),
        (dict(head_dim=80), "head_dim 80"),
        (dict(head_dim=96), "head_dim 96"),
    ],
    ids=str,
)
def test_attention_takes_them_and_the_kernel_that_joins_it_with_qkv_says_why_not(changes, words):
    shape = replace(SHAPE, **changes)
    assert shape.unsupported_reason() is None
    weight = Plain.random((shape.width, 256))
    linear = TiledLinear(weight, dtype=torch.bfloat16, ops=reference)
    assert qkv.unsupported_reason(linear, shape, 1, GPUS["sm_90a"]).startswith(words)


@pytest.mark.parametrize("heads", [24, 32])
def test_equal_parts_of_many_query_heads_are_joined_with_qkv(heads):
    shape = replace(SHAPE, heads=heads, kv_heads=2)
    linear = TiledLinear(Plain.random((shape.width, 256)), dtype=torch.bfloat16, ops=reference)
    assert qkv.unsupported_reason(linear, shape, 1, GPUS["sm_90a"]) is None


def test_a_head_dim_without_a_kernel_is_named():
    reason = replace(SHAPE, head_dim=112).unsupported_reason()
    assert "head_dim 112 is not one of 64, 80, 96, 128, 256" in reason
