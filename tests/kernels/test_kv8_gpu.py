"""The kernels that write and read a KV cache of 8-bit codes, at real sizes against plain ops."""

from dataclasses import replace

import pytest
import torch

from flyweight.batch import KVStorage
from flyweight.kernels import reference
from flyweight.kernels.attention.decode import (
    AttentionLayer,
    HeadNorms,
    HeadShape,
    Rows,
    Workspace,
    decode_attention,
    rope_pairs,
)
from flyweight.kernels.linear.fused import Norm
from flyweight.kv_format import FP8, INT8

pytestmark = [pytest.mark.gpu]
DEVICE = torch.device("cuda")
SHAPE = HeadShape(heads=32, kv_heads=8, head_dim=128, rotary=128, page=16, qk_norm=True)


def error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def filled(shape, lengths, format, dtype):
    """A cache that earlier steps have filled, and where each sequence's tokens lie."""
    pages = -(-max(lengths) // shape.page)
    tables = torch.randperm(len(lengths) * pages, device=DEVICE).view(len(lengths), pages).int()
    size = (len(lengths) * pages, shape.page, shape.kv_heads, shape.head_dim)
    cache = KVStorage.zeros(size, dtype, DEVICE, format)
    cache.eight.scales.fill_(float("nan"))
    for row, length in enumerate(lengths):
        at = torch.arange(length - 1, device=DEVICE)
        slots = tables[row].long()[at // shape.page] * shape.page + at % shape.page
        new = torch.randn(2, length - 1, shape.kv_heads, shape.head_dim, device=DEVICE).to(dtype)
        cache.write(*new, slots)
    return cache, tables


def exact(shape, query, cache, table, length):
    at = torch.arange(length, device=DEVICE)
    slots = table.long()[at // shape.page] * shape.page + at % shape.page
    keys, values = (
        cache.eight.read(side, pages, slots).double().repeat_interleave(shape.group, 1)
        for side, pages in enumerate((cache.keys, cache.values))
    )
    scores = torch.einsum("hd,thd->ht", query.double(), keys) * shape.head_dim**-0.5
    return torch.einsum("ht,thd->hd", scores.softmax(-1), values).flatten()


@pytest.mark.parametrize("format", [FP8, INT8], ids=lambda one: one.name)
@pytest.mark.parametrize(
    ("changes", "lengths", "dtype"),
    [
        (dict(), [16384], torch.bfloat16),
        (dict(), [1, 17, 4096, 777, 64, 2000, 3, 1024] * 4, torch.float16),
        (
            dict(heads=9, kv_heads=3, head_dim=64, rotary=64, qk_norm=False),
            [300, 5],
            torch.bfloat16,
        ),
        (dict(heads=16, kv_heads=1, head_dim=256, rotary=64), [700, 33], torch.bfloat16),
        (dict(heads=8, head_dim=80, rotary=32), [700, 33, 1], torch.bfloat16),
    ],
    ids=["one long", "many", "64", "256", "80"],
)
def test_decode_attention_over_codes(changes, lengths, dtype, format):
    shape = replace(SHAPE, **changes)
    torch.manual_seed(0)
    cache, tables = filled(shape, lengths, format, dtype)
    count = len(lengths)
    angles = torch.rand(max(lengths), shape.rotary // 2, device=DEVICE) * 6
    qkv = torch.randn(count, shape.heads + 2 * shape.kv_heads, shape.head_dim, device=DEVICE)
    qkv = qkv.to(dtype)
    weights = [torch.rand(shape.head_dim, device=DEVICE).to(dtype) + 0.5 for _ in range(2)]
    norms = HeadNorms(*weights, 1e-6) if shape.qk_norm else HeadNorms()
    rows = Rows(
        rope_pairs(angles.cos(), angles.sin()),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        tables,
    )
    out = torch.full((count, shape.heads * shape.head_dim), float("nan"), device=DEVICE).to(dtype)
    decode_attention(
        qkv.flatten(1),
        out,
        cache,
        rows,
        layer=AttentionLayer(shape, shape.head_dim**-0.5, norms),
        workspace=Workspace.make(shape, count, DEVICE),
    )
    newest = rows.lengths.long() - 1
    cos, sin = reference.rope_rows(angles.cos(), angles.sin(), newest)
    groups = (shape.heads, shape.kv_heads)
    table = torch.cat([w.expand(n, -1) for w, n in zip(weights, groups, strict=True)])
    query, *_ = reference.split_heads(
        qkv,
        cos=cos,
        sin=sin,
        heads=shape.heads,
        norm=Norm(table, 1e-6) if shape.qk_norm else None,
    )
    for row, length in enumerate(lengths):
        want = exact(shape, query[row], cache, tables[row], length)
        assert error(out[row], want) < (8e-3 if dtype == torch.bfloat16 else 2e-3), (row, length)


@pytest.mark.parametrize("format", [FP8, INT8], ids=lambda one: one.name)
def test_prompts_write_what_plain_ops_write(format):
    from flyweight.kernels.attention.rope import rope_norm_write

    tokens = 700
    qkv = torch.randn(tokens, 48, 128, device=DEVICE).bfloat16()
    angles = torch.rand(tokens, 64, device=DEVICE) * 6
    slots = torch.randperm(50 * 16, device=DEVICE)[:tokens]
    cos, sin = reference.rope_rows(angles.cos(), angles.sin(), torch.arange(tokens, device=DEVICE))
    norm = Norm(torch.rand(40, 128, device=DEVICE).bfloat16() + 0.5, 1e-6)
    caches = [KVStorage.zeros((50, 16, 8, 128), torch.bfloat16, DEVICE, format) for _ in range(2)]
    reference.rope_norm_write(qkv.clone(), caches[0], slots, cos=cos, sin=sin, norm=norm)
    _, *new = rope_norm_write(qkv, caches[1], slots, cos=cos, sin=sin, norm=norm)
    assert torch.equal(caches[0].eight.scales[1], caches[1].eight.scales[1])
    assert torch.equal(caches[0].values.view(torch.uint8), caches[1].values.view(torch.uint8))
    keys = [one.eight.read(0, one.keys, slots) for one in caches]
    assert error(*keys) < 5e-3
    assert torch.equal(new[0], keys[1]), "what attention reads beside the cache is what it holds"
    assert torch.equal(new[1], caches[1].eight.read(1, caches[1].values, slots))


@pytest.mark.parametrize("format", [FP8, INT8], ids=lambda one: one.name)
def test_chunks_and_decoding_rows_read_pages_of_codes(format):
    from test_triton_ops_gpu import make

    from flyweight.kernels.attention.plan import plan_attention
    from flyweight.kernels.attention.triton import paged_attention

    spans = [(1, 8191), (129, 1500), (300, 0), (512, 3000)]
    batch, plain, query, _ = make(
        spans, heads=32, kv_heads=8, size=128, page=16, dtype=torch.bfloat16
    )
    cache = KVStorage.zeros(tuple(plain.keys.shape), plain.dtype, DEVICE, format)
    for side, (pages, codes) in enumerate(((plain.keys, cache.keys), (plain.values, cache.values))):
        scales = format.scales(pages)
        codes.copy_(format.encode(pages, scales))
        cache.eight.scales[side].copy_(scales.transpose(1, 2))
    want = reference.paged_attention(
        query, cache, reference.plan_attention(batch, cache), scale=128**-0.5
    )
    got = paged_attention(query, cache, plan_attention(batch, cache), scale=128**-0.5)
    assert error(got, want) < 8e-3


@pytest.mark.parametrize("format", [FP8, INT8], ids=lambda one: one.name)
@pytest.mark.parametrize(
    "before",
    [[0], [0] * 8, [0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 2, 3, 0]],
    ids=["one", "eight", "four of one", "eight of one", "of four"],
)
def test_qkv_with_attention_over_codes_is_as_both_apart(before, format, monkeypatch):
    from gpu_linears import linear_of, make

    from flyweight import gpu
    from flyweight.kernels.attention import qkv as fused
    from flyweight.kernels.attention.qkv import mailbox_cycle, qkv_attention, unsupported_reason
    from flyweight.kernels.linear import gemv

    monkeypatch.setattr(fused, "TOGETHER", 99)
    rows = len(before)
    shape = replace(SHAPE, eight_bits=True)
    torch.manual_seed(0)
    lengths = [5000, 17, 64, 300, 1, 2, 500, 33][:rows]
    for row, back in enumerate(before):
        lengths[row] = lengths[row - 1] + 1 if back else lengths[row]
    linear = linear_of(
        make("int4:128", (shape.width, 512), 2, torch.bfloat16), dtype=torch.bfloat16
    )
    assert unsupported_reason(linear, shape, rows, gpu.of(DEVICE)) is None
    cache, tables = filled(shape, lengths, format, torch.bfloat16)
    for row, back in enumerate(before):
        tables[row] = tables[row - back]
    apart = KVStorage(
        cache.keys.clone(),
        cache.values.clone(),
        replace(cache.eight, scales=cache.eight.scales.clone()),
    )
    angles = torch.rand(max(lengths), shape.rotary // 2, device=DEVICE) * 6
    weights = [torch.rand(shape.head_dim, device=DEVICE).bfloat16() + 0.5 for _ in range(2)]
    layer = AttentionLayer(shape, shape.head_dim**-0.5, HeadNorms(*weights, 1e-6))
    places = Rows(
        rope_pairs(angles.cos(), angles.sin()),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        tables,
        torch.tensor(before, dtype=torch.int32, device=DEVICE) if any(before) else None,
    )
    x = torch.randn(rows, 512, device=DEVICE).bfloat16()
    norm = Norm(torch.rand(512, device=DEVICE).bfloat16() + 0.5, 1e-6)
    qkv = gemv.multiply(linear.weight, x, norm=norm)
    width = shape.heads * shape.head_dim
    want, got = torch.full((2, rows, width), float("nan"), device=DEVICE).bfloat16()
    workspace = Workspace.make(shape, rows, DEVICE)
    decode_attention(qkv, want, apart, places, layer=layer, workspace=workspace)
    boxes = mailbox_cycle(shape, rows, 2, dtype=torch.bfloat16, device=DEVICE, chunk=rows)
    qkv_attention(linear, x, got, cache, places, layer=layer, norm=norm, mailboxes=tuple(boxes))
    for row in range(rows):
        assert error(got[row], want[row]) < 8e-3, row
    assert torch.equal(cache.values.view(torch.uint8), apart.values.view(torch.uint8))
    assert torch.equal(cache.eight.scales[1].nan_to_num(), apart.eight.scales[1].nan_to_num())
    keys = [one.eight.scales[0].double() for one in (cache, apart)]
    torch.testing.assert_close(*keys, rtol=0.01, atol=0, equal_nan=True)
