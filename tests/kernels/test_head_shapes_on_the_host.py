"""Decode attention of more than 8 query heads a kv head and of heads of 80 and 96, on the CPU."""

from dataclasses import replace

import host_cuda
import pytest
import torch
from decode_heads import Sequences, attend

from flyweight.kernels import reference
from flyweight.kernels.attention import decode
from flyweight.kernels.attention.decode import HeadShape
from flyweight.kernels.linear.fused import PackedInput
from flyweight.kernels.vptq import linear as vptq
from flyweight.kernels.vptq import staged
from flyweight.tensors import VectorQuant

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")
SHAPE = HeadShape(heads=4, kv_heads=2, head_dim=64, rotary=64, page=16, qk_norm=True)
CPU = torch.device("cpu")
LENGTHS = [1, 0, 17, 130, 65]  # a first token, padding, one behind a page border; up to three runs
NINE_LENGTHS = [1, 17, 0, 3, 66, 2, 30, 9, 70]  # more rows than the 8 that are packed together


@pytest.fixture(autouse=True)
def host(monkeypatch, folder):
    host_cuda.pretend(monkeypatch, folder)
    monkeypatch.setattr(decode, "SHORTEST", 48)


@pytest.mark.parametrize("group", range(9, 17))
def test_a_group_of_more_than_eight_query_heads(group):
    attend(replace(SHAPE, heads=group, kv_heads=1), LENGTHS, 3, torch.bfloat16)


@pytest.mark.parametrize(
    "changes",
    [
        dict(heads=24, kv_heads=2),
        dict(heads=32, kv_heads=2, head_dim=128, rotary=128, window=60),
        dict(heads=18, kv_heads=2, rotary=24, page=8, qk_norm=False),
        dict(heads=17, kv_heads=1, head_dim=256, qk_norm=False, window=20),
        dict(rotary=16, gated=True),
    ],
    ids=str,
)
def test_groups_of_several_kv_heads_with_windows_pages_and_part_of_rope(changes):
    attend(replace(SHAPE, **changes), LENGTHS, 2, torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        (dict(head_dim=80, rotary=80), torch.bfloat16),
        (dict(head_dim=80, rotary=32, qk_norm=False, window=40), torch.float16),
        (dict(head_dim=80, rotary=20, heads=12, kv_heads=1, page=8), torch.bfloat16),
        (dict(head_dim=96, rotary=96, window=70, page=32), torch.bfloat16),
        (dict(head_dim=96, rotary=48, qk_norm=False, heads=5, kv_heads=5), torch.bfloat16),
        (dict(head_dim=96, rotary=96, qk_norm=False, heads=16, kv_heads=1), torch.float16),
    ],
    ids=str,
)
def test_heads_of_80_and_96(changes, dtype):
    attend(replace(SHAPE, **changes), LENGTHS, 3, dtype)


def packed_place(row, column, groups):
    """Where packed.cuh puts x[row, column] with PACKED and ORDER 1, counted in 16-bit values."""
    pair = column % 8 // 4 * 2 + column % 2
    half = column % 8 // 2 % 2
    block = (column // 64 * groups + row // 8) * 2 + column // 32 % 2
    return (block * 32 + row % 8 + 8 * pair) * 8 + column % 32 // 8 * 2 + half


@pytest.mark.parametrize(
    "changes", [dict(heads=9, kv_heads=1), dict(head_dim=80, rotary=80)], ids=str
)
def test_results_are_written_in_the_order_of_the_next_product(changes):
    shape = replace(SHAPE, **changes)
    width, groups = shape.heads * shape.head_dim, 2
    sequences = Sequences(shape, NINE_LENGTHS, torch.bfloat16, CPU)
    want = sequences.attend(splits=2).view(torch.int16)
    data = torch.full((16 * groups * width,), 0x55, dtype=torch.uint8)
    to = PackedInput(data, len(want), groups, {"PACKED": 1, "ORDER": 1})
    sequences.attend(splits=2, to=to)
    for row, length in enumerate(NINE_LENGTHS):
        found = data.view(torch.int16)[packed_place(row, torch.arange(width), groups)]
        assert torch.equal(found, want[row]) if length else (found == 0x5555).all()


def test_results_are_the_input_of_a_vptq_linear_with_the_sums_of_its_biases(monkeypatch):
    def shuffled(banks):
        return torch.rand(banks.shape).argsort(2).to(torch.uint8)

    monkeypatch.setattr(staged, "schedule", shuffled)  # any order is right, and the best takes long
    # items of 5 and 4; as wide as 9 · 256
    shape = replace(SHAPE, heads=18, kv_heads=2, head_dim=128)
    sequences = Sequences(shape, NINE_LENGTHS, torch.float16, CPU)
    width = shape.heads * shape.head_dim
    tensor = VectorQuant.random((72, width), dtype=torch.float16, main=256, residual=256)
    o = vptq.prepare(tensor, dtype=torch.float16, ops=reference)
    x = sequences.attend(splits=2)
    packed = o.packed_input(len(x), shape.items)
    sequences.attend(splits=2, to=packed)
    used = torch.tensor(NINE_LENGTHS) > 0
    got = o.project(packed, torch.empty(len(x), 72, dtype=torch.float16))[used].double()
    want = tensor.matmul_reference(x[used])
    assert (got - want).norm() / want.norm() < 2e-3
