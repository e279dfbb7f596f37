"""Decode attention, run on the CPU from its CUDA source, against float64: every index of the cache
and of the matrix units.
"""

from dataclasses import replace

import host_cuda
import pytest
import torch
from test_kernels_on_the_host import host  # noqa: F401 (fixtures)

from flyweight.batch import KVStorage
from flyweight.kernels.attention import decode
from flyweight.kernels.attention.decode import (
    AttentionLayer,
    HeadNorms,
    HeadShape,
    Rows,
    Workspace,
    decode_attention,
    rope_pairs,
)

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")
SHAPE = HeadShape(heads=4, kv_heads=2, head_dim=64, rotary=64, page=16, qk_norm=True)
CONTEXT, EPSILON = 600, 1e-6


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
    monkeypatch.setattr(decode, "SHORTEST", 48)


def normed(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight


def reference(shape, qkv, norms, angles, keys, values, length, sinks):
    """[heads, head_dim] and the new key and value, in float64; keys and values are the sequence's
    older tokens.
    """
    query, key, value = qkv.double().split([shape.heads, shape.kv_heads, shape.kv_heads])
    if norms:
        query, key = (
            normed(x, weight.double()) for x, weight in zip((query, key), norms, strict=True)
        )
    cos, sin = angles[length - 1].double().cos(), angles[length - 1].double().sin()

    def turned(x):
        a, b, rest = x.split(
            [shape.rotary // 2, shape.rotary // 2, shape.head_dim - shape.rotary], -1
        )
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(qkv.dtype).double()

    query, key = turned(query), turned(key)
    first = max(0, length - shape.window) if shape.window else 0
    keys, values = (
        torch.cat([old.double(), new[None]])[first:].repeat_interleave(shape.group, 1)
        for old, new in ((keys, key), (values, value))
    )
    scores = torch.einsum("hd,thd->ht", query, keys) * shape.head_dim**-0.5
    if shape.soft_cap is not None:
        scores = shape.soft_cap * (scores / shape.soft_cap).tanh()
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None]], -1)
    weights = scores.softmax(-1)[:, : len(keys)]
    return torch.einsum("ht,thd->hd", weights, values), key, value


def attend(shape, lengths, splits, dtype):
    """One launch over a cache whose unused tokens are not numbers; checks outputs, new tokens and
    all that must stay.
    """
    sequences, width = len(lengths), -(-CONTEXT // shape.page)
    tables = torch.randperm(sequences * width).view(sequences, width).int()
    cache = KVStorage(
        *torch.randn(2, sequences * width, shape.page, shape.kv_heads, shape.head_dim).to(dtype)
    )
    qkv = torch.randn(sequences, shape.heads + 2 * shape.kv_heads, shape.head_dim).to(dtype)
    norms = (
        tuple((1 + 0.1 * torch.randn(shape.head_dim)).to(dtype) for _ in range(2))
        if shape.qk_norm
        else None
    )
    angles = torch.rand(CONTEXT, shape.rotary // 2) * 6
    tokens = torch.arange(CONTEXT)
    slots = [
        tables[row].long()[tokens // shape.page] * shape.page + tokens % shape.page
        for row in range(sequences)
    ]
    for row, length in enumerate(lengths):
        for side in (cache.keys, cache.values):
            side.flatten(0, 1)[slots[row][max(length - 1, 0) :]] = float("nan")
    before = [side.clone() for side in (cache.keys, cache.values)]
    workspace = Workspace.make(shape, sequences, torch.device("cpu"), splits)
    rows = Rows(
        rope_pairs(angles.cos(), angles.sin()), torch.tensor(lengths, dtype=torch.int32), tables
    )
    out = torch.full((sequences, shape.heads * shape.head_dim), float("nan")).to(dtype)
    sinks = torch.randn(shape.heads).to(dtype) + 2 if shape.sinks else None
    layer = AttentionLayer(
        shape, shape.head_dim**-0.5, HeadNorms(*norms or (), epsilon=EPSILON), sinks
    )
    decode_attention(qkv.flatten(1), out, cache, rows, layer=layer, workspace=workspace)
    assert not workspace.tickets.any()
    for row, length in enumerate(lengths):
        if length == 0:
            assert out[row].isnan().all(), "padding is left alone"
            continue
        older, slot = slots[row][: length - 1], slots[row][length - 1]
        want = reference(
            shape,
            qkv[row],
            norms,
            angles,
            *(side.flatten(0, 1)[older] for side in before),
            length,
            sinks,
        )
        sides = [side.flatten(0, 1) for side in (cache.keys, cache.values)]
        for got, expected in zip((out[row], sides[0][slot], sides[1][slot]), want, strict=True):
            assert got.isfinite().all()
            error = (got.double().flatten() - expected.flatten()).norm() / expected.norm()
            assert error < (8e-3 if dtype == torch.bfloat16 else 1e-3), (row, length, error)
        for side, old in zip(sides, before, strict=True):
            old.flatten(0, 1)[slot] = side[slot]
    assert all(
        torch.equal(side.view(torch.int16), old.view(torch.int16))
        for side, old in zip((cache.keys, cache.values), before, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sequences_of_ragged_lengths_cut_into_runs(dtype):
    attend(SHAPE, [1, 2, 0, 16, 17, 65, 300, 129], 3, dtype)


def test_more_runs_than_a_warp_has_lanes(monkeypatch):
    monkeypatch.setattr(decode, "SHORTEST", 8)
    attend(SHAPE, [590, 17, 300], 39, torch.bfloat16)


@pytest.mark.parametrize(
    "changes",
    [
        dict(heads=6, head_dim=128, rotary=128),
        dict(heads=8, kv_heads=1, head_dim=256, rotary=64, qk_norm=False),
        dict(heads=3, kv_heads=1, rotary=24, page=8),
        dict(window=20, page=32),
        dict(window=150, qk_norm=False),
        dict(heads=20, sinks=True, soft_cap=2.0, window=150),
    ],
    ids=str,
)
def test_head_shapes_pages_and_windows(changes):
    attend(replace(SHAPE, **changes), [1, 33, 200, 160], 2, torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "splits"),
    [({}, 3), (dict(heads=6, head_dim=128, rotary=64, qk_norm=False), 1), (dict(window=40), 2)],
    ids=str,
)
def test_tokens_of_one_sequence_in_one_launch_are_those_of_a_launch_each(changes, splits):
    """Rows that follow each other in a sequence see each other's keys and values, across the
    borders of runs and pages.
    """
    shape = replace(SHAPE, **changes)
    chunks = [(5, 4), (130, 1), (0, 1), (1, 3), (293, 8)]  # length of the first row, rows
    width = -(-CONTEXT // shape.page)
    of_sequence = torch.randperm(len(chunks) * width).view(len(chunks), width).int()
    lengths, before, tables = [], [], []
    for sequence, (length, count) in enumerate(chunks):
        lengths += [length and length + i for i in range(count)]
        before += range(count)
        tables += [of_sequence[sequence]] * count
    rows = len(lengths)
    pages = torch.randn(
        2, len(chunks) * width, shape.page, shape.kv_heads, shape.head_dim
    ).bfloat16()
    qkv = torch.randn(rows, shape.width).bfloat16()
    norms = (
        HeadNorms(*(1 + 0.1 * torch.randn(2, shape.head_dim)).bfloat16(), EPSILON)
        if shape.qk_norm
        else HeadNorms()
    )
    angles = torch.rand(CONTEXT, shape.rotary // 2) * 6
    layer = AttentionLayer(shape, shape.head_dim**-0.5, norms)
    pairs = rope_pairs(angles.cos(), angles.sin())

    def places(*, first, last, chunk):
        return Rows(
            pairs,
            torch.tensor(lengths, dtype=torch.int32)[first:last],
            torch.stack(tables)[first:last],
            torch.tensor(before, dtype=torch.int32) if chunk else None,
        )

    def run(at, cache, out, rows_of):
        workspace = Workspace.make(shape, len(out), torch.device("cpu"), splits)
        decode_attention(qkv[at], out, cache, rows_of, layer=layer, workspace=workspace)

    want, got = torch.zeros(2, rows, shape.heads * shape.head_dim).bfloat16()
    one_by_one, together = (KVStorage(*pages.clone()) for _ in range(2))
    for row in range(rows):
        run(
            slice(row, row + 1),
            one_by_one,
            want[row : row + 1],
            places(first=row, last=row + 1, chunk=False),
        )
    run(slice(0, rows), together, got, places(first=0, last=rows, chunk=True))
    assert want.any(-1).sum() == rows - 1
    # a launch of more rows may have fewer warps, which add up in another order
    assert (got.double() - want.double()).norm(dim=-1).max() < 5e-3 * want.double().norm(
        dim=-1
    ).max()
    assert torch.equal(one_by_one.keys, together.keys) and torch.equal(
        one_by_one.values, together.values
    )
