"""Decode attention of more than 8 query heads a kv head and of heads of 80 and 96, on a GPU."""

from dataclasses import replace

import pytest
import torch
from decode_heads import Sequences, attend

from flyweight.kernels.attention.decode import HeadShape, Workspace

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
SHAPE = HeadShape(heads=32, kv_heads=8, head_dim=128, rotary=128, page=16, qk_norm=True)
RAGGED = [1, 2, 0, 16, 17, 65, 300, 4097, 0, 129]
MANY = [1 + 37 * i % 700 for i in range(63)] + [0]  # CTAs of 4 warps
DTYPES = [torch.bfloat16, torch.float16]


def check(shape, dtype):
    for lengths in (RAGGED, [4097], [1], MANY):
        attend(shape, lengths, None, dtype, DEVICE)


@pytest.mark.parametrize("group", range(9, 17))
def test_a_group_of_more_than_eight_query_heads(group):
    check(replace(SHAPE, heads=2 * group, kv_heads=2), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "changes",
    [
        dict(heads=32, kv_heads=2),
        dict(heads=16, kv_heads=2, head_dim=256, rotary=64, gated=True),
        dict(heads=24, kv_heads=2, head_dim=64, rotary=64, window=100),
        dict(heads=18, kv_heads=2, head_dim=64, rotary=24, page=8, qk_norm=False),
        dict(heads=71, kv_heads=1, head_dim=64, rotary=64, qk_norm=False),
        dict(heads=24, kv_heads=2, head_dim=256, rotary=64, qk_norm=False, window=1000),
    ],
    ids=str,
)
def test_groups_with_windows_pages_and_part_of_rope(changes, dtype):
    check(replace(SHAPE, **changes), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "changes",
    [
        dict(head_dim=80, rotary=80),
        dict(head_dim=80, rotary=32, qk_norm=False, heads=32, kv_heads=32),
        dict(head_dim=80, rotary=20, heads=24, kv_heads=2, page=8),
        dict(head_dim=96, rotary=96, window=300, page=32),
        dict(head_dim=96, rotary=48, qk_norm=False, heads=32, kv_heads=32),
        dict(head_dim=96, rotary=96, qk_norm=False, heads=32, kv_heads=2),
    ],
    ids=str,
)
def test_heads_of_80_and_96(changes, dtype):
    check(replace(SHAPE, **changes), dtype)


@pytest.mark.parametrize(
    "changes",
    [
        dict(heads=32, kv_heads=2),
        dict(heads=22, kv_heads=2, head_dim=80, rotary=80),
        dict(head_dim=96, rotary=96),
    ],
    ids=str,
)
def test_replays_of_a_graph_give_the_same_bits(changes):
    """Whichever item is first to arrive, and whoever stores the new key and value."""
    shape = replace(SHAPE, **changes)
    sequences = Sequences(shape, RAGGED, torch.bfloat16, DEVICE)
    workspace = Workspace.make(shape, len(RAGGED), DEVICE)
    before = [side.clone() for side in sequences.sides]
    want = sequences.attend(workspace=workspace)
    sequences.check(want, before)
    launch, out = sequences.launch(workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    used = [row for row, length in enumerate(RAGGED) if length]  # a NaN has many bit patterns
    for _ in range(200):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out[used].view(torch.int16), want[used].view(torch.int16))
    assert not workspace.tickets.any()
