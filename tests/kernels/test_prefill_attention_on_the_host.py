"""cuda/prefill_attention.cu, run on the CPU, against attention in float64: every index, mask and
barrier, without a GPU.
"""

import dataclasses

import host_cuda
import pytest
import torch

from flyweight.kernels.attention.prefill import BASE_2, Heads, Span, Tile, Units, attend

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")
CPU = torch.device("cpu")
PAGE = 16


@pytest.fixture(autouse=True)
def host(monkeypatch, folder):
    host_cuda.pretend(monkeypatch, folder)


def exact(query, keys, values):
    """One sequence's last tokens over all of it, in float64 and base 2."""
    new, heads, _ = query.shape
    length, kv_heads, _ = keys.shape
    q, k, v = (x.double().transpose(0, 1) for x in (query, keys, values))
    k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in (k, v))
    seen = torch.arange(length)[None] <= torch.arange(length - new, length)[:, None]
    return (
        (q @ k.transpose(1, 2) * BASE_2).masked_fill(~seen, -torch.inf).softmax(-1) @ v
    ).transpose(0, 1)


def check(spans, heads, *, paged=False, section=None, first=1.0):
    """`spans`: new tokens, and cached ones before them; `first` is how large their first keys are.
    What no token has written is no number.
    """
    tokens = sum(new for new, _ in spans)
    sizes = (heads.heads, heads.kv_heads, heads.kv_heads)
    # views of it, and rows of nobody
    qkv = torch.full((tokens + 9, sum(sizes), heads.head_dim), torch.nan, dtype=heads.dtype)
    qkv[:tokens] = 2 * torch.randn(tokens, sum(sizes), heads.head_dim)
    query, keys, values = qkv.split(sizes, 1)
    query /= 8
    keys[:3] *= first
    out = torch.full((tokens + 9, heads.heads, heads.head_dim), 7.0, dtype=heads.dtype)
    pages = [-(-(new + old) // PAGE) for new, old in spans]
    width, free = max(pages), torch.randperm(sum(pages)).tolist()
    cache = torch.full(
        (2, sum(pages), PAGE, heads.kv_heads, heads.head_dim), torch.nan, dtype=heads.dtype
    )
    tables, cut, want, start = torch.full((len(spans), width), 10**6, dtype=torch.int32), [], [], 0
    for i, (new, old) in enumerate(spans):
        own = torch.randn(2, new + old, heads.kv_heads, heads.head_dim).to(heads.dtype)
        if old == 0:
            own = torch.stack([keys[start : start + new], values[start : start + new]])
        mine = [free.pop() for _ in range(pages[i])]
        tables[i, : len(mine)] = torch.tensor(mine)
        slots = (
            torch.tensor(mine)[torch.arange(new + old) // PAGE] * PAGE
            + torch.arange(new + old) % PAGE
        )
        cache.flatten(1, 2)[:, slots] = own
        want.append(exact(query[start : start + new], *own))
        cut.append(Span(start, new, new + old, i * width if paged else start))
        start += new
    units = Units.cut(cut, heads, PAGE if paged else 0, CPU)
    units = dataclasses.replace(units, section=section or units.section)
    given = (*cache, tables) if paged else (keys[:tokens], values[:tokens], None)
    for _ in range(2):  # the second finds the counter as the first did
        attend(query, *given[:2], out, units=units, heads=heads, tables=given[2])
        error = ((out[:tokens].double() - torch.cat(want)).norm() / torch.cat(want).norm()).item()
        assert error < (2e-3 if heads.dtype == torch.float16 else 1e-2), error
        assert (out[tokens:] == 7).all(), "rows of nobody"


HALF, BRAIN = torch.float16, torch.bfloat16
WHOLE = [
    (Heads(4, 1, 128, BRAIN), [(200, 0)]),  # several tiles of keys, diagonals across two of them
    # prompts side by side, the last of a single token
    (Heads(8, 2, 128, HALF), [(129, 0), (1, 0), (32, 0)]),
    (Heads(7, 1, 64, BRAIN), [(75, 0)]),  # rows that do not fill a tile
    (Heads(2, 2, 64, HALF), [(300, 0)]),  # every head its own keys
    (Heads(4, 2, 128, BRAIN, Tile(keys=160)), [(330, 0)]),
    (Heads(4, 2, 128, BRAIN, Tile(keys=64, warpgroups=3, stages=4)), [(200, 0)]),
]


@pytest.mark.parametrize(("heads", "spans"), WHOLE)
def test_whole_prompts(heads, spans):
    check(spans, heads)


CHUNKS = [
    (Heads(4, 1, 128, BRAIN), [(70, 130)]),
    # whole tiles before it, none, one token, not a page
    (Heads(4, 2, 64, HALF), [(33, 256), (64, 0), (1, 300), (40, 15)]),
    (Heads(4, 1, 128, BRAIN, Tile(keys=64, warpgroups=3, stages=4)), [(70, 130)]),
]


@pytest.mark.parametrize(("heads", "spans"), CHUNKS)
def test_chunks_behind_a_cached_prefix(heads, spans):
    check(spans, heads, paged=True)


@pytest.mark.parametrize("section", [1, 2, 4])
def test_heads_some_at_a_time(section):
    check([(100, 0)], Heads(4, 4, 64, BRAIN), section=section)


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("first", [4.0, 20.0, 60.0])
def test_scores_far_above_all_that_were_seen_before(dtype, first):
    # of some rows: they are random
    check([(290, 0)], Heads(4, 1, 64, dtype, Tile(keys=64)), first=first)
