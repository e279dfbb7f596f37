"""prefill_attention.cu at real sizes against attention in float64; outputs come from poisoned
memory, the cache is full of no numbers where no token has been written.
"""

import pytest
import torch
from tuning import retune

from flyweight import gpu
from flyweight.batch import KVStorage
from flyweight.kernels import reference
from flyweight.kernels.attention.prefill import BASE_2
from flyweight.kv_format import KV_FORMATS

pytestmark = pytest.mark.gpu
attention = pytest.importorskip(
    "flyweight.kernels.attention.triton", reason="triton is not installed"
)
plans = pytest.importorskip("flyweight.kernels.attention.plan", reason="triton is not installed")
from test_triton_ops_gpu import SPANS, make, poisoned  # noqa: E402, F401 (needs triton too; a fixture)

LIMIT = {torch.float16: 1e-3, torch.bfloat16: 6e-3}
SHAPES = [
    (32, 8, 128, torch.bfloat16),
    (28, 4, 128, torch.float16),
    (9, 3, 64, torch.bfloat16),
    (8, 8, 128, torch.bfloat16),
]


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    if not gpu.of(0).has_warpgroups:
        pytest.skip("not a Hopper GPU")
    retune(monkeypatch, prefill_attention=True)


def exact(query, cache, batch):
    """In float64 and base 2, sequence by sequence."""
    out = []
    for i, length in enumerate(batch.kv_lengths):
        start, end = batch.query_starts[i : i + 2]
        at = torch.arange(length, device="cuda")
        slots = (
            batch.block_tables[i, at // cache.block_size].long() * cache.block_size
            + at % cache.block_size
        )
        keys, values = (
            pages.flatten(0, 1)[slots].double().transpose(0, 1)
            for pages in (cache.keys, cache.values)
        )
        # [kv head, group, new, head_dim]
        q = query[start:end].double().transpose(0, 1).unflatten(0, (len(keys), -1))
        seen = at[None] <= torch.arange(length - end + start, length, device="cuda")[:, None]
        scores = (q @ keys[:, None].transpose(2, 3) * BASE_2).masked_fill(~seen, -torch.inf)
        out.append((scores.softmax(-1) @ values[:, None]).flatten(0, 1).transpose(0, 1))
    return torch.cat(out)


def error(got, want):
    assert got.isfinite().all(), "an output was not written"
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("spans", ["whole prompts", "chunks", "mixed"])
@pytest.mark.parametrize("heads, kv_heads, size, dtype", SHAPES)
def test_prompts_and_chunks_beside_decoding_rows(spans, heads, kv_heads, size, dtype):
    batch, cache, query, new = make(
        SPANS[spans], heads=heads, kv_heads=kv_heads, size=size, page=16, dtype=dtype
    )
    qkv = torch.cat([query / 8, *new], 1)
    query, *new = qkv.split([heads, kv_heads, kv_heads], 1)
    plan = plans.plan_attention(batch, cache)
    want = exact(query, cache, batch)
    for _ in range(2):  # the second finds the counter as the first did
        got = attention.paged_attention(query, cache, plan, scale=BASE_2, new=new)
        assert error(got, want) < LIMIT[dtype]
    ((units, apart),) = plan.units.values()
    assert units and apart


@pytest.mark.parametrize("length", [64, 127, 1024, 4096 + 3])
def test_a_prompt_alone_is_as_exact_as_torch(length):
    batch, cache, query, new = make(
        [(length, 0)], heads=32, kv_heads=8, size=128, page=16, dtype=torch.bfloat16
    )
    query = query / 8
    want = exact(query, cache, batch)
    got = attention.paged_attention(
        query, cache, plans.plan_attention(batch, cache), scale=BASE_2, new=new
    )
    by_torch = reference.causal_attention(query[None], *(x[None] for x in new), scale=BASE_2)[0]
    # the heaviest weight of a row is 1 with torch, which 16 bits hold exactly: of short prompts
    # that shows
    assert error(got, want) < 1.3 * error(by_torch, want)


def test_it_can_be_captured():
    batch, cache, query, new = make(
        [(512, 0)], heads=32, kv_heads=8, size=128, page=16, dtype=torch.bfloat16
    )
    plan, graph = plans.plan_attention(batch, cache), torch.cuda.CUDAGraph()
    want = attention.paged_attention(query, cache, plan, scale=BASE_2, new=new)
    with torch.cuda.graph(graph):
        got = attention.paged_attention(query, cache, plan, scale=BASE_2, new=new)
    for _ in range(3):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_chunks_behind_codes_of_8_bits_are_read_first(name):
    spans = [(1, 8191), (777, 0), (1024, 3000), (1, 100), (300, 21)]
    batch, wide, query, _ = make(
        spans, heads=32, kv_heads=8, size=128, page=16, dtype=torch.bfloat16
    )
    cache = KVStorage.zeros(
        tuple(wide.keys.shape), torch.bfloat16, torch.device("cuda"), KV_FORMATS[name]
    )
    slots = torch.arange(wide.keys.shape[0] * 16, device="cuda")
    keys, values = (pages.flatten(0, 1).nan_to_num() for pages in (wide.keys, wide.values))
    cache.write(keys, values, slots)
    read = KVStorage(*(x.view_as(wide.keys) for x in cache.read(slots)))
    new = [pages.flatten(0, 1)[batch.slots] for pages in (read.keys, read.values)]
    query = query / 8
    plan = plans.plan_attention(batch, cache)
    got = attention.paged_attention(query, cache, plan, scale=BASE_2, new=new)
    assert error(got, exact(query, read, batch)) < LIMIT[torch.bfloat16]
    ((units, _),) = plan.units.values()
    assert [part.slots is not None for part in units] == [False, True]
