"""Kernels that write and read a cache of 8-bit codes, run on the CPU against the plain ops."""

from dataclasses import replace

import host_cuda
import pytest
import torch

from flyweight import gpu
from flyweight.batch import KVStorage
from flyweight.kernels import reference
from flyweight.kernels.attention import decode, qkv, rope
from flyweight.kernels.attention.decode import (
    AttentionLayer,
    HeadNorms,
    HeadShape,
    Rows,
    Workspace,
    decode_attention,
    rope_pairs,
)
from flyweight.kernels.linear import gemv
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.kv_format import FP8, INT8
from flyweight.tensors import IntBlock, IntGroup

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")
CPU = torch.device("cpu")
SHAPE = HeadShape(heads=4, kv_heads=2, head_dim=64, rotary=64, page=16, qk_norm=True)
LENGTHS = [1, 0, 17, 130, 65]  # a first token, padding, one behind a page border; several runs


@pytest.fixture(autouse=True)
def host(monkeypatch, folder):
    host_cuda.pretend(monkeypatch, folder)
    monkeypatch.setattr(decode, "SHORTEST", 48)


def poisoned(shape, blocks, format, dtype, fixed=None):
    """A cache in which nothing is a number: neither scales nor, in float8, codes."""
    size = (blocks, shape.page, shape.kv_heads, shape.head_dim)
    cache = KVStorage.zeros(size, dtype, CPU, format, fixed)
    for pages in (cache.keys, cache.values):
        pages.view(torch.uint8).fill_(0x7F)
    cache.eight.scales.fill_(float("nan"))
    return cache


def same_bits(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def attended(shape, format, dtype, *, splits=3, fixed=None, size=1.0):
    """One decode step by the kernel and by plain ops over the same codes: outputs and caches."""
    torch.manual_seed(0)
    count = len(LENGTHS)
    pages = -(-max(LENGTHS) // shape.page)
    tables = torch.randperm(count * pages).view(count, pages).int()
    cache = poisoned(shape, count * pages, format, dtype, fixed)
    angles = torch.rand(max(LENGTHS), shape.rotary // 2) * 6
    qkv = torch.randn(count, shape.heads + 2 * shape.kv_heads, shape.head_dim).to(dtype)
    qkv[:, shape.heads :] *= size
    norms = [(1 + 0.1 * torch.randn(shape.head_dim)).to(dtype) for _ in range(2)]
    for row, length in enumerate(LENGTHS):  # what earlier steps have written
        older = torch.arange(max(length - 1, 0))
        slots = tables[row].long()[older // shape.page] * shape.page + older % shape.page
        new = torch.randn(2, len(older), shape.kv_heads, shape.head_dim).to(dtype) * size
        cache.write(*new, slots)
    eight = replace(cache.eight, scales=cache.eight.scales.clone())
    plain = KVStorage(cache.keys.clone(), cache.values.clone(), eight)

    out = torch.full((count, shape.heads * shape.head_dim), float("nan")).to(dtype)
    layer = AttentionLayer(
        shape, shape.head_dim**-0.5, HeadNorms(*norms, 1e-6) if shape.qk_norm else HeadNorms()
    )
    rows = Rows(
        rope_pairs(angles.cos(), angles.sin()), torch.tensor(LENGTHS, dtype=torch.int32), tables
    )
    workspace = Workspace.make(shape, count, CPU, splits)
    decode_attention(qkv.flatten(1), out, cache, rows, layer=layer, workspace=workspace)

    used = [row for row, length in enumerate(LENGTHS) if length]
    newest = torch.tensor([LENGTHS[row] - 1 for row in used])
    pages_of = tables[used].long().gather(1, newest[:, None] // shape.page)[:, 0]
    cos, sin = reference.rope_rows(angles.cos(), angles.sin(), newest)
    groups = (shape.heads, shape.kv_heads)
    table = torch.cat([w.expand(n, -1) for w, n in zip(norms, groups, strict=True)])
    query, *_ = reference.rope_norm_write(
        qkv[used].clone(),
        plain,
        pages_of * shape.page + newest % shape.page,
        cos=cos,
        sin=sin,
        norm=Norm(table, 1e-6) if shape.qk_norm else None,
    )
    want = attention(shape, query, plain, tables[used], [LENGTHS[row] for row in used])
    return out[used], want, cache, plain, out[1]


def attention(shape, query, cache, tables, lengths):
    """float64, over what the codes of the cache stand for."""
    found = []
    for row, length in enumerate(lengths):
        tokens = torch.arange(max(0, length - shape.window) if shape.window else 0, length)
        slots = tables[row].long()[tokens // shape.page] * shape.page + tokens % shape.page
        keys, values = (
            cache.eight.read(side, pages, slots).double().repeat_interleave(shape.group, 1)
            for side, pages in enumerate((cache.keys, cache.values))
        )
        scores = torch.einsum("hd,thd->ht", query[row].double(), keys) * shape.head_dim**-0.5
        found.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values).flatten())
    return torch.stack(found)


@pytest.mark.parametrize("format", [FP8, INT8], ids=lambda one: one.name)
@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        (dict(), torch.bfloat16),
        (dict(head_dim=128, rotary=128, heads=6), torch.float16),
        (dict(head_dim=80, rotary=32, window=40, qk_norm=False), torch.bfloat16),
        (dict(head_dim=96, rotary=96, heads=12, kv_heads=1, page=8), torch.bfloat16),
    ],
    ids=str,
)
def test_decode_attention_over_codes(changes, dtype, format):
    out, want, cache, plain, padding = attended(replace(SHAPE, **changes), format, dtype)
    assert padding.isnan().all()
    for got, expected in zip(out, want, strict=True):
        # K and V are rounded to 16 bits where they are read plainly, not in the kernel
        assert error(got, expected) < (8e-3 if dtype == torch.bfloat16 else 2e-3)
    assert same_bits(cache.values, plain.values), "values are written as they come"
    assert same_bits(cache.eight.scales[1], plain.eight.scales[1])
    # norm and rope are not rounded in between here: a key may have a neighbouring scale and codes
    scales = [one.eight.scales[0].double() for one in (cache, plain)]
    torch.testing.assert_close(*scales, rtol=0.01, atol=0, equal_nan=True)
    slots = plain.eight.scales[0].transpose(1, 2).flatten(0, 1)[:, 0].isfinite().nonzero()[:, 0]
    keys = [one.eight.read(0, one.keys, slots) for one in (cache, plain)]
    assert error(*keys) < 0.01


@pytest.mark.parametrize("size", [1e-4, 300.0])
def test_values_of_any_size_keep_their_precision_in_fp16_products(size):
    shape = replace(SHAPE, qk_norm=False, heads=2, kv_heads=2, rotary=2)
    out, want, *_ = attended(shape, INT8, torch.bfloat16, size=size)
    if size < 1:
        assert error(out, want) < 8e-3
    else:  # one token takes all the weight
        assert out.isfinite().all() and error(out, want) < 0.02


def test_scales_that_a_checkpoint_fixes_are_used_for_every_token():
    out, want, cache, plain, _ = attended(SHAPE, FP8, torch.bfloat16, fixed=(0.01, 0.02))
    assert error(out, want) < 8e-3
    written = cache.eight.scales[:, ~cache.eight.scales[0].isnan().all(-1).all(-1)]
    assert set(written[1][~written[1].isnan()].tolist()) == {torch.tensor(0.02).bfloat16().item()}
    assert same_bits(cache.eight.scales, plain.eight.scales)


TWELVE = dict(heads=12, kv_heads=1)  # more query heads to a kv head than a product has columns


@pytest.mark.parametrize(
    ("format", "changes", "lengths", "before"),
    [
        (FP8, {}, [50], None),
        (INT8, dict(head_dim=128, rotary=128), [50, 1], None),
        (None, {}, [50, 1], None),
        (None, {}, [32, 33, 34, 7], [0, 1, 2, 0]),  # new tokens on both sides of a border of runs
        (INT8, {}, [1, 2, 3, 4], [0, 1, 2, 3]),  # and nothing but new ones
        (None, dict(window=64), [62, 63, 64, 65, 66, 67, 50, 0], [0, 1, 2, 3, 4, 5, 0, 0]),
        (None, dict(sinks=True, window=40), [50, 1], None),
        (None, dict(soft_cap=2.0), [50], None),
        (None, TWELVE, [50], None),
        (INT8, TWELVE | dict(sinks=True, soft_cap=3.0), [50, 3], None),
        (None, dict(gated=True, rotary=16), [50, 1], None),
    ],
    ids=[
        "fp8",
        "int8",
        "16 bits",
        "guesses",
        "first guesses, int8",
        "window",
        "sinks",
        "soft-cap",
        "twelve",
        "all",
        "gated",
    ],
)
def test_qkv_with_attention_is_as_both_apart(format, changes, lengths, before):
    """CTAs of one head that share out a sequence, odd places in a page, a first token; rows of one
    sequence.
    """
    compare_with_apart(format, changes, lengths, before)


def compare_with_apart(
    format, changes, lengths, before, inputs=128, exact=True, beside=False, tensor=None
):
    shape = replace(SHAPE, eight_bits=format is not None, **changes)
    head_dim = shape.head_dim
    torch.manual_seed(0)
    rows = len(lengths)
    if tensor is None:
        tensor = IntGroup.random(
            (shape.width, inputs), 1, dtype=torch.bfloat16, bits=4, group_size=128
        )
    linear = TiledLinear(tensor, dtype=torch.bfloat16, ops=reference)
    assert qkv.unsupported_reason(linear, shape, rows, host_cuda.HOST) is None
    tables = torch.randperm(rows * 6).view(rows, 6).int()
    known = list(lengths)
    for row, back in enumerate(before or ()):
        if back:
            tables[row] = tables[row - 1]
            known[row] = 1  # what is older was written for the first row
    caches = [filled(shape, known, tables, format) for _ in range(2)]
    angles = torch.rand(max(lengths), shape.rotary // 2) * 6
    places = Rows(
        rope_pairs(angles.cos(), angles.sin()),
        torch.tensor(lengths, dtype=torch.int32),
        tables,
        None if before is None else torch.tensor(before, dtype=torch.int32),
    )
    weights = [torch.rand(head_dim).bfloat16() + 0.5 for _ in range(2)]
    sinks = torch.randn(shape.heads).bfloat16() + 2 if shape.sinks else None
    layer = AttentionLayer(shape, head_dim**-0.5, HeadNorms(*weights, 1e-6), sinks)
    x = torch.randn(rows, inputs).bfloat16()
    norm = Norm(torch.rand(inputs).bfloat16() + 0.5, 1e-6)
    want, got = torch.full((2, rows, shape.heads * head_dim), float("nan")).bfloat16()
    apart = gemv.multiply(linear.weight, x, norm=norm)
    workspace = Workspace.make(shape, rows, CPU, 2)
    decode_attention(apart, want, caches[0], places, layer=layer, workspace=workspace)
    boxes = qkv.mailbox_cycle(shape, rows, 2, dtype=torch.bfloat16, device=CPU, chunk=rows)
    layer = replace(layer, beside=beside)
    qkv.qkv_attention(linear, x, got, caches[1], places, layer=layer, norm=norm, mailboxes=boxes)
    for row in range(rows):
        if lengths[row]:
            assert error(got[row], want[row]) < 8e-3, row
        else:
            assert got[row].isnan().all(), "padding is left alone"
    if not exact:  # x is rounded otherwise
        return
    assert same_bits(caches[0].values, caches[1].values)
    if format is not None:
        assert same_bits(caches[0].eight.scales[1], caches[1].eight.scales[1])
        keys = [one.eight.scales[0].double() for one in caches]
        torch.testing.assert_close(*keys, rtol=0.01, atol=0, equal_nan=True)


SMALL = dict(heads=6, kv_heads=2, head_dim=64, rotary=64)  # three columns a row


@pytest.mark.parametrize(
    ("format", "changes", "lengths", "before"),
    [
        (None, dict(head_dim=128, rotary=128), [50, 51], [0, 1]),
        (None, {}, [34, 35, 36, 37], [0, 1, 2, 3]),
        (INT8, {}, [47, 48, 49, 7], [0, 1, 2, 0]),  # new tokens on both sides of a border of runs
        (FP8, dict(head_dim=128, rotary=128), [1, 2, 3, 4], [0, 1, 2, 3]),
        (None, SMALL, [31, 32, 33, 50, 51, 52, 53, 0], [0, 1, 2, 0, 1, 2, 3, 0]),
        (None, SMALL, [5, 9, 17, 33, 40, 3, 50, 1], [0] * 8),
        (INT8, SMALL, [43, 44, 45, 46, 47, 48, 49, 50], [0, 1, 2, 3, 4, 5, 6, 7]),
        (None, dict(sinks=True, window=64), [78, 79, 80, 81], [0, 1, 2, 3]),
        (None, SMALL | dict(window=64), [30, 31, 63, 64, 65, 66, 67, 0], [0, 1, 0, 1, 2, 3, 4, 0]),
        (None, dict(soft_cap=2.0), [50, 51, 20, 0], [0, 1, 0, 0]),
    ],
)
def test_rows_of_a_sequence_together_are_as_both_apart(
    format, changes, lengths, before, monkeypatch
):
    """Whatever the sequences of a step are: one, several, padding behind them."""
    monkeypatch.setattr(qkv, "TOGETHER", 99)
    loaded = note_kernels(monkeypatch)
    compare_with_apart(format, changes, lengths, before)
    assert loaded[-1]["TOGETHER"] == 1


@pytest.mark.parametrize("rows", [4, 8])
def test_small_groups_of_several_rows(rows, monkeypatch):
    """Codes of a GGUF file, as 16-bit floats."""
    loaded = note_kernels(monkeypatch)
    shape = replace(SHAPE, **SMALL)
    tensor = IntBlock.random((shape.width, 576), 1, bits=4)
    lengths = [*range(33, 33 + rows)]
    compare_with_apart(None, SMALL, lengths, [*range(rows)], inputs=576, tensor=tensor)
    assert loaded[-1]["AS_HALVES"] == 1


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("format", "changes", "lengths", "before"),
    [
        (None, {}, [34, 35, 36, 37], [0, 1, 2, 3]),
        (INT8, SMALL, [43, 44, 45, 46, 47, 48, 49, 50], [0, 1, 2, 3, 4, 5, 6, 7]),
        (None, SMALL, [5, 9, 17, 33, 40, 3, 50, 1], [0] * 8),
    ],
)
def test_rows_whose_x_stays_in_registers_leave_room(
    format, changes, lengths, before, together, monkeypatch
):
    monkeypatch.setattr(qkv, "TOGETHER", 99 * together)
    loaded = note_kernels(monkeypatch)
    compare_with_apart(format, changes, lengths, before, inputs=1024, exact=False, beside=True)
    assert loaded[-1]["IN_REGISTERS"] == loaded[-1]["BESIDE"] == 1


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("format", "changes", "lengths", "before"),
    [
        (None, {}, [34, 35, 36, 37], [0, 1, 2, 3]),
        (None, {}, [5, 9, 17, 33, 40, 3, 50, 1], [0] * 8),
        (None, {}, [43, 44, 45, 46, 47, 48, 49, 50], [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_pairs_share_their_tiles(format, changes, lengths, before, together, monkeypatch):
    """Each of two CTAs has one half of the inputs, and the other's sums of its own tiles."""
    monkeypatch.setattr(qkv, "TOGETHER", 99 * together)
    loaded = note_kernels(monkeypatch)
    compare_with_apart(format, changes, lengths, before, inputs=2048, exact=False, beside=True)
    assert loaded[-1]["PAIRED"] == 1


# 5 CTAs, one of them without a head; rows of 16 and of 8 bits, first tokens, two pages and more
@pytest.mark.parametrize(
    ("format", "changes", "lengths"),
    [
        (None, {}, [50]),
        (None, {}, [1]),
        (None, dict(head_dim=128, rotary=128), [81]),
        (None, dict(page=32), [70]),
        (None, dict(window=40), [90]),
        (INT8, {}, [66]),
        (None, {}, [33, 96, 7, 0]),
    ],
)
def test_qkv_with_attention_before_hopper_is_as_both_apart(format, changes, lengths, monkeypatch):
    monkeypatch.setattr(gpu, "of", lambda _: gpu.Gpu(8, 0, 5, 166912, 167936))
    loaded = note_kernels(monkeypatch)
    compare_with_apart(format, changes, lengths, None, inputs=1280)
    assert loaded[-1].get("HELD_INPUTS", 0) == (len(lengths) == 1)


def note_kernels(monkeypatch):
    """The defines of the kernels that are loaded from here on."""
    loaded = []
    load = qkv.jit.load

    def noted(file, *, defines, **options):
        loaded.append(defines)
        return load(file, defines=defines, **options)

    monkeypatch.setattr(qkv.jit, "load", noted)
    return loaded


def filled(shape, lengths, tables, format):
    """A cache that earlier steps have filled, the same each time; the rest is no number."""
    dtype = torch.bfloat16
    if format is not None:
        cache = poisoned(shape, tables.numel(), format, dtype)
    else:
        size = (tables.numel(), shape.page, shape.kv_heads, shape.head_dim)
        cache = KVStorage(*torch.full((2, *size), float("nan"), dtype=dtype))
    generator = torch.Generator().manual_seed(1)
    for row, length in enumerate(lengths):
        older = torch.arange(max(0, length - 1))
        size = (2, len(older), shape.kv_heads, shape.head_dim)
        slots = tables[row].long()[older // shape.page] * shape.page + older % shape.page
        cache.write(*torch.randn(size, generator=generator).to(dtype), slots)
    return cache


@pytest.mark.parametrize("format", [FP8, INT8], ids=lambda one: one.name)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rotary", "normed"),
    [(3, 1, 80, 32, True), (2, 2, 256, 256, False), (14, 2, 128, 128, True), (3, 1, 64, 24, True)],
)
def test_prompts_write_codes_and_scales(monkeypatch, heads, kv_heads, size, rotary, normed, format):
    pytest.importorskip("triton", reason="the Triton twin of this op is imported beside it")
    shape = HeadShape(heads, kv_heads, size, rotary, 4, normed)
    tokens = 5
    qkv = torch.randn(tokens, heads + 2 * kv_heads, size).bfloat16()
    norm = Norm(torch.randn(heads + kv_heads, size).bfloat16(), 1e-6) if normed else None
    angles = torch.rand(tokens, rotary // 2) * 6
    slots = torch.tensor([7, 2, -1, 0, 3])
    cos, sin = reference.rope_rows(angles.cos(), angles.sin(), torch.arange(tokens))
    caches = [poisoned(shape, 2, format, torch.bfloat16) for _ in range(2)]
    plain_qkv = qkv.clone()
    kept = slots >= 0
    reference.rope_norm_write(
        plain_qkv[kept], caches[0], slots[kept], cos=cos[kept], sin=sin[kept], norm=norm
    )
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    got_heads = rope.rope_norm_write(qkv, caches[1], slots, cos=cos, sin=sin, norm=norm)
    want, got = (one.eight.scales.double() for one in caches)
    torch.testing.assert_close(got, want, rtol=0.01, atol=0, equal_nan=True)
    assert same_bits(caches[0].values, caches[1].values)
    codes = [one.keys.view(torch.uint8) for one in caches]
    assert (codes[0] != codes[1]).float().mean() < 0.01
    for side, pages in enumerate((caches[1].keys, caches[1].values)):  # and qkv has what they mean
        new = got_heads[1 + side][kept]
        assert torch.equal(new, caches[1].eight.read(side, pages, slots[kept]))


def test_tokens_of_one_sequence_in_one_launch_read_each_other_as_they_are_stored():
    """Rows of guesses: codes and scales of the step's other tokens are made from qkv, as a launch
    each would have stored them.
    """
    torch.manual_seed(0)
    shape = replace(SHAPE, eight_bits=True)
    first, count, pages = 45, 6, 4  # across a border of pages and of runs
    tables = torch.randperm(pages).int()[None]
    angles = torch.rand(pages * shape.page, shape.rotary // 2) * 6
    qkv = torch.randn(count, shape.width).bfloat16()
    layer = AttentionLayer(
        shape, shape.head_dim**-0.5, HeadNorms(*torch.ones(2, shape.head_dim).bfloat16(), 1e-6)
    )
    older = torch.arange(first - 1)
    known = torch.randn(2, first - 1, shape.kv_heads, shape.head_dim).bfloat16()
    results = []
    for together in (False, True):
        cache = KVStorage.zeros(
            (pages, shape.page, shape.kv_heads, shape.head_dim), torch.bfloat16, CPU, INT8
        )
        cache.write(*known, tables[0].long()[older // shape.page] * shape.page + older % shape.page)
        out = torch.zeros(count, shape.heads * shape.head_dim).bfloat16()
        for at in [slice(0, count)] if together else [slice(i, i + 1) for i in range(count)]:
            rows = range(count)[at]
            lengths = torch.tensor([first + i for i in rows], dtype=torch.int32)
            before = torch.tensor(list(rows), dtype=torch.int32) if together else None
            places = Rows(
                rope_pairs(angles.cos(), angles.sin()), lengths, tables.repeat(len(rows), 1), before
            )
            workspace = Workspace.make(shape, len(rows), CPU, 2)
            decode_attention(qkv[at], out[at], cache, places, layer=layer, workspace=workspace)
        results.append((out, cache))
    (want, apart), (got, shared) = results
    assert same_bits(apart.keys, shared.keys) and same_bits(apart.values, shared.values)
    assert same_bits(apart.eight.scales, shared.eight.scales)
    assert error(got, want) < 5e-3
