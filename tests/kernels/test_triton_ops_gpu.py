"""The Triton ops and paged attention at real sizes, against the torch ops in float32; outputs come
from poisoned memory.
"""

import pytest
import torch

from flyweight.batch import Batch, KVStorage
from flyweight.kernels import reference
from flyweight.kernels.linear.fused import Norm

pytestmark = pytest.mark.gpu
ops = pytest.importorskip("flyweight.kernels.cuda_ops", reason="triton is not installed")
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def poisoned():
    """Freed memory is what torch.empty hands out next: an output that is not written shows."""
    torch.manual_seed(0)
    torch.full((1 << 26,), float("nan"), device="cuda")


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


def relative_error(got, want):
    assert got.isfinite().all(), "an output was not written"
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "rows, size", [(1, 4096), (64, 4096), (2048, 4096), (300, 576), (33, 20480), (16384, 2560)]
)
def test_norms(rows, size, dtype):
    x, weight = random(rows, size, dtype=dtype), random(size, dtype=dtype)
    want = reference.rms_norm(x.float(), weight.float(), 1e-6)
    assert relative_error(ops.rms_norm(x, weight, 1e-6), want) < TOLERANCE[dtype]
    assert torch.equal(ops.normalize(x, Norm(weight, 1e-6)), ops.rms_norm(x, weight, 1e-6))
    want = reference.rms_norm(x.float(), weight.float() + 1, 1e-6)
    assert (
        relative_error(ops.normalize(x, Norm(weight, 1e-6, plus_one=True)), want) < TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "rows, size", [(1, 12288), (64, 12288), (2048, 12288), (7, 29568), (100, 1536)]
)
def test_silu_mul(rows, size, dtype):
    gate_up = random(rows, 2 * size, dtype=dtype)
    assert (
        relative_error(ops.silu_mul(gate_up), reference.silu_mul(gate_up.float()))
        < TOLERANCE[dtype]
    )


def test_the_number_of_rows_compiles_nothing_anew():
    from flyweight.kernels import triton_ops

    weight, counts = random(1024), set()
    for rows in (1, 2, 15, 16, 17, 128, 1000):
        ops.rms_norm(random(rows, 1024), weight, 1e-6)
        counts.add(len(triton_ops._norm.device_caches[torch.cuda.current_device()][0]))
    assert len(counts) == 1


@pytest.mark.parametrize(
    "heads, kv_heads, size, rotary",
    [(32, 8, 128, 128), (9, 3, 64, 64), (28, 4, 128, 64), (8, 1, 256, 256), (6, 2, 80, 32)],
)
def test_rope_norm_and_kv_write(heads, kv_heads, size, rotary):
    tokens, qkv, norm = 700, random(700, heads + 2 * kv_heads, size), random(heads + kv_heads, size)
    angles = torch.rand(tokens, rotary // 2, device="cuda") * 6
    positions = torch.randperm(tokens, device="cuda")
    slots = torch.randperm(50 * 16, device="cuda")[:tokens]
    caches = [
        KVStorage(*torch.zeros(2, 50, 16, kv_heads, size, device="cuda", dtype=torch.bfloat16))
        for _ in range(2)
    ]
    cos, sin = reference.rope_rows(angles.cos(), angles.sin(), positions)
    options = dict(norm=Norm(norm, 1e-6))
    want = reference.rope_norm_write(qkv.clone(), caches[0], slots, cos=cos, sin=sin, **options)
    got = ops.rope_norm_write(qkv, caches[1], slots, cos=cos, sin=sin, **options)
    for a, b in zip(
        (*got, caches[1].keys, caches[1].values),
        (*want, caches[0].keys, caches[0].values),
        strict=True,
    ):
        assert relative_error(a, b) < 5e-3


def make(spans, *, heads, kv_heads, size, page, dtype):
    """A step of (new tokens, cached tokens before them): its pages in random order, the rest of the
    cache no numbers.
    """
    blocks = [-(-sum(span) // page) for span in spans]
    order, first, starts, slots = torch.randperm(sum(blocks) + 3), 0, [0], []
    tables = torch.zeros(len(spans), max(blocks), dtype=torch.int32)
    keys, values = torch.full(
        (2, len(order), page, kv_heads, size), float("nan"), device="cuda", dtype=dtype
    )
    for i, ((new, old), count) in enumerate(zip(spans, blocks, strict=True)):
        tables[i, :count], first = order[first : first + count], first + count
        at = torch.arange(old + new)
        place = (tables[i, at // page].long() * page + at % page).cuda()
        keys.flatten(0, 1)[place], values.flatten(0, 1)[place] = random(
            2, old + new, kv_heads, size, dtype=dtype
        )
        slots.append(place[old:])
        starts.append(starts[-1] + new)
    slot = torch.cat(slots)
    batch = Batch(slot, slot, slot, tables.cuda(), starts, [sum(span) for span in spans], slot[-1:])
    new = [pages.flatten(0, 1)[slot] for pages in (keys, values)]
    return batch, KVStorage(keys, values), random(starts[-1], heads, size, dtype=dtype), new


SPANS = {
    "whole prompts": [(1024, 0), (1024, 0), (300, 0), (2049, 0)],
    "chunks": [(512, 3000), (1024, 1024), (37, 5000)],
    "mixed": [(1, 8191), (1, 100), (777, 0), (1, 4000), (129, 1500), (1, 0), (256, 0)],
    "one long context": [(1, 30000)],
    "a short end": [(20, 16000)],
    "many decoding": [(1, 500 + 37 * i) for i in range(40)],
}


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize(
    "heads, kv_heads, size, dtype",
    [
        (32, 8, 128, torch.bfloat16),
        (28, 4, 128, torch.float16),
        (9, 3, 64, torch.bfloat16),
        (8, 4, 96, torch.bfloat16),
        (8, 1, 256, torch.bfloat16),
    ],
)
def test_paged_attention(spans, heads, kv_heads, size, dtype):
    for window, page in ((None, 16), (700, 32)):
        batch, cache, query, new = make(
            SPANS[spans], heads=heads, kv_heads=kv_heads, size=size, page=page, dtype=dtype
        )
        wide = KVStorage(cache.keys.float(), cache.values.float())
        want = reference.paged_attention(
            query.float(), wide, reference.plan_attention(batch, wide, window), scale=size**-0.5
        )
        for given in (new, None):
            got = ops.paged_attention(
                query, cache, ops.plan_attention(batch, cache, window), scale=size**-0.5, new=given
            )
            assert relative_error(got, want) < TOLERANCE[dtype]


def test_a_layer_of_a_step_never_waits_for_the_device():
    batch, cache, query, new = make(
        SPANS["mixed"], heads=32, kv_heads=8, size=128, page=16, dtype=torch.bfloat16
    )
    x, weight, gate_up = random(64, 4096), random(4096), random(64, 8192)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = ops.plan_attention(batch, cache, None)
        ops.paged_attention(query, cache, plan, scale=0.1, new=new)
        ops.normalize(x, Norm(weight, 1e-6))
        ops.silu_mul(gate_up)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_ops_are_captured_by_graphs():
    x, weight = random(16, 4096), random(4096)

    def step():
        normed = ops.normalize(x, Norm(weight, 1e-6))
        return normed, ops.gate(normed, "silu")

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
