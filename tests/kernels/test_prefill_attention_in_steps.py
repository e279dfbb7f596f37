"""Steps of prompts, chunks and decoding rows with prefill_attention.cu switched on: the .cu on the
CPU, the rest interpreted.
"""

import host_cuda
import pytest
import torch
from test_prefill_attention_on_the_host import host  # noqa: F401 (a fixture)

from flyweight.kernels import reference
from flyweight.kernels.attention import prefill
from flyweight.kernels.attention.prefill import BASE_2

attention = pytest.importorskip(
    "flyweight.kernels.attention.triton", reason="triton is not installed"
)
plans = pytest.importorskip("flyweight.kernels.attention.plan", reason="triton is not installed")
from test_triton_attention import make  # noqa: E402 (needs triton too)

pytestmark = [
    pytest.mark.skipif(
        host_cuda.COMPILER is None or torch.cuda.is_available(), reason="no g++, or a GPU"
    ),
    pytest.mark.usefixtures("interpreted_loops"),
]
# decoding, whole prompts, chunks, a prompt of one token
MIXED = [(1, 20), (12, 0), (70, 14), (1, 0), (40, 0), (30, 5), (5, 9)]


@pytest.mark.parametrize("window", [None, 20])
def test_a_mixed_step_gives_the_same_with_the_switch_on(window, monkeypatch):
    monkeypatch.setattr(plans, "FRESH_FROM", 10)
    # as on Hopper
    monkeypatch.setattr(prefill, "takes", lambda heads, device, scale: scale == BASE_2)
    batch, cache, query, new = make(MIXED, heads=4, kv_heads=2, size=64, page=16)
    qkv = torch.cat([query / 8, *new], 1)
    query, *new = qkv.split([4, 2, 2], 1)
    plan = plans.plan_attention(batch, cache, window)
    got = attention.paged_attention(query, cache, plan, scale=BASE_2, new=new)
    want = reference.paged_attention(
        query, cache, reference.plan_attention(batch, cache, window), scale=BASE_2
    )
    torch.testing.assert_close(got, want, rtol=4e-3, atol=4e-3)
    ((units, apart),) = plan.units.values()
    assert (
        apart == ({1, 2, 4, 5} if window is None else {1})
        and [one.page for one in units] == [0, 16][: len(units)]
    )
