"""Attention over pages against the torch op it stands for: compiled where there is a GPU, else
interpreted on the CPU.

Tiles are made small, so that tiny sequences have several of them, and parts, and whole prompts next
to chunks.
"""

import pytest
import torch
from tuning import retune

from flyweight.batch import Batch, KVStorage
from flyweight.kernels import reference
from flyweight.kernels.attention.prefill import Heads
from flyweight.kv_format import FP8, INT8

attention = pytest.importorskip(
    "flyweight.kernels.attention.triton", reason="triton is not installed"
)
plans = pytest.importorskip("flyweight.kernels.attention.plan", reason="triton is not installed")
pytestmark = pytest.mark.usefixtures("interpreted_loops")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = plans.Tile(32, 16, 4, 2)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    torch.manual_seed(0)
    retune(monkeypatch, prefill_attention=False)  # or a Hopper GPU would have its own way
    monkeypatch.setattr(plans, "FRESH_FROM", 10)
    monkeypatch.setattr(plans, "SMALL_COLUMNS", 16)


def make(spans, *, heads, kv_heads, size, page=8, dtype=torch.float16, format=None):
    """A batch of (new tokens, cached tokens before them), the cache, and the step's query, keys and
    values.
    """
    starts, lengths, positions, slots, tables = [0], [], [], [], []
    blocks = [-(-(new + old) // page) for new, old in spans]
    shuffled = torch.randperm(sum(blocks)).tolist()
    for (new, old), count in zip(spans, blocks, strict=True):
        table = [shuffled.pop() for _ in range(count)]
        tables.append(table + [0] * (max(blocks) - count))
        starts.append(starts[-1] + new)
        lengths.append(old + new)
        positions += range(old, old + new)
        slots += [table[p // page] * page + p % page for p in range(old, old + new)]
    as_tensor = [torch.tensor(x, device=DEVICE) for x in (positions, slots, tables)]
    batch = Batch(
        torch.zeros(starts[-1], dtype=torch.int64, device=DEVICE),
        *as_tensor[:2],
        as_tensor[2].int(),
        starts,
        lengths,
        as_tensor[0][:1],
    )
    keys, values = torch.full(
        (2, sum(blocks), page, kv_heads, size), float("nan"), device=DEVICE, dtype=dtype
    )
    for (_, old), table in zip(spans, tables, strict=True):
        for p in range(old):
            keys[table[p // page], p % page], values[table[p // page], p % page] = torch.randn(
                2, kv_heads, size
            ).to(keys)
    query, *new = (
        torch.randn(starts[-1], count, size, device=DEVICE).to(dtype)
        for count in (heads, kv_heads, kv_heads)
    )
    cache = KVStorage(keys, values)
    if format is not None:
        cache = coded(cache, format)
    reference.write_kv(cache, *new, batch.slots)
    return batch, cache, query, new


def coded(cache, format):
    """The same in codes of 8 bits; what is no number stays none, in its scale."""
    eight = KVStorage.zeros(tuple(cache.keys.shape), cache.dtype, cache.keys.device, format)
    for side, (pages, codes) in enumerate(((cache.keys, eight.keys), (cache.values, eight.values))):
        scales = format.scales(pages)
        codes.copy_(format.encode(pages, scales))
        eight.eight.scales[side].copy_(scales.transpose(1, 2))
    return eight


def check(spans, *, window=None, give_new=True, tile=TILE, tolerance=4e-3, bend=None, **shape):
    batch, cache, query, new = make(spans, **shape)
    scale = query.shape[-1] ** -0.5
    plan = reference.plan_attention(batch, cache, window)
    want = reference.paged_attention(query, cache, plan, scale=scale, bend=bend)
    plan = plans.plan_attention(batch, cache, window)
    got = attention.paged_attention(
        query, cache, plan, scale=scale, new=new if give_new else None, tile=tile, bend=bend
    )
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    return plan


# decoding, whole prompts, chunks, a prompt of one token
MIXED = [(1, 20), (12, 0), (9, 14), (1, 0), (12, 0), (30, 5)]


@pytest.mark.parametrize("give_new", [True, False])
@pytest.mark.parametrize("heads, kv_heads, size", [(4, 2, 64), (3, 1, 96), (2, 2, 80), (7, 1, 128)])
def test_a_mixed_batch(heads, kv_heads, size, give_new):
    check(MIXED, heads=heads, kv_heads=kv_heads, size=size, give_new=give_new)


@pytest.mark.parametrize("format", [FP8, INT8], ids=lambda one: one.name)
@pytest.mark.parametrize("heads, kv_heads, size, page", [(4, 2, 64, 8), (3, 1, 96, 16)])
def test_pages_of_8_bit_codes(heads, kv_heads, size, page, format):
    check(
        MIXED, heads=heads, kv_heads=kv_heads, size=size, page=page, format=format, give_new=False
    )


@pytest.mark.parametrize("window", [1, 7, 16, 40])
def test_a_sliding_window(window):
    check(MIXED, heads=4, kv_heads=2, size=64, window=window)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_scores_are_bent(cap, monkeypatch):
    bend = reference.Bend(cap, torch.randn(4, device=DEVICE).half() + 1)
    check(MIXED, heads=4, kv_heads=2, size=64, bend=bend)
    monkeypatch.setattr(plans, "SHORTEST_PART", 16)
    monkeypatch.setattr(plans, "_processors", lambda device: 16)
    check([(1, 100), (6, 60)], heads=4, kv_heads=1, size=64, window=50, bend=bend)  # in parts


def test_float32_and_pages_larger_than_a_tile():
    check(
        MIXED, heads=2, kv_heads=1, size=64, page=32, dtype=torch.float32, tile=None, tolerance=1e-5
    )


def test_long_contexts_are_cut_into_parts_and_added_up(monkeypatch):
    monkeypatch.setattr(plans, "SHORTEST_PART", 16)
    monkeypatch.setattr(plans, "_processors", lambda device: 16)
    for window in (None, 50):
        plan = check([(1, 100), (6, 60), (1, 3)], heads=4, kv_heads=1, size=64, window=window)
        ((_, launches),) = plan.held.values()
        assert len(launches) == 2 and all(launch.parts > 2 for launch in launches)


def test_neighbouring_prompts_are_one_call_of_torch_and_nothing_else(monkeypatch):
    plan = check([(12, 0), (12, 0), (12, 0)], heads=4, kv_heads=2, size=64)
    assert list(plan.held.values()) == [([plans.Run(0, 36, 12)], [])]
    plan = check([(12, 0), (14, 0), (14, 0), (3, 0), (11, 0)], heads=4, kv_heads=2, size=64)
    (((unequal, alone), launches),) = plan.held.values()
    assert (unequal.begin, unequal.end, unequal.length, unequal.starts.tolist()) == (
        0,
        40,
        14,
        [0, 12, 26, 40],
    )
    assert alone == plans.Run(43, 54, 11) and len(launches) == 1
    monkeypatch.setattr(plans, "LONG", 13)
    plan = check([(12, 0), (14, 0), (14, 0)], heads=4, kv_heads=2, size=64)
    assert list(plan.held.values()) == [([plans.Run(0, 12, 12), plans.Run(12, 40, 14)], [])]


def test_strided_views_of_a_merged_qkv_are_read_in_place():
    batch, cache, query, new = make([(11, 4), (1, 9), (16, 0)], heads=4, kv_heads=2, size=64)
    qkv = torch.cat([query, *new], 1)
    views = qkv.split([4, 2, 2], 1)
    plan = plans.plan_attention(batch, cache)
    got = attention.paged_attention(views[0], cache, plan, scale=0.1, new=views[1:], tile=TILE)
    want = reference.paged_attention(
        query, cache, reference.plan_attention(batch, cache), scale=0.1
    )
    torch.testing.assert_close(got, want, rtol=4e-3, atol=4e-3)


def test_chunks_of_codes_are_read_one_sequence_after_the_other(monkeypatch):
    monkeypatch.setattr("flyweight.batch.READ_AT_ONCE", 7)
    batch, cache, *_ = make(
        [(20, 13), (1, 9), (30, 0), (12, 3)], heads=4, kv_heads=2, size=64, page=8, format=INT8
    )
    monkeypatch.setattr(plans, "_processors", lambda device: 1)
    heads = Heads(4, 2, 64, torch.float16)
    (whole, chunks), apart = plans.plan_attention(batch, cache).prompts(heads, 8, codes=True)
    assert apart == {0, 2, 3}
    assert whole.slots is None
    assert chunks.page == 0
    order = [
        batch.block_tables[i, p // 8].item() * 8 + p % 8
        for i, length in ((0, 33), (3, 15))
        for p in range(length)
    ]
    assert chunks.slots.tolist() == order
    # base, token, tokens, position
    assert sorted(map(tuple, chunks.records.tolist())) == [(0, 0, 20, 13), (33, 51, 12, 3)]
    for side, (found, pages) in enumerate(
        zip(cache.read(chunks.slots), (cache.keys, cache.values), strict=True)
    ):
        assert torch.equal(found, cache.eight.read(side, pages, chunks.slots))
