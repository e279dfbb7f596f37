"""The Triton ops against the torch ops they stand for: compiled where there is a GPU, else
interpreted on the CPU.

The interpreter cuts bfloat16 off where the hardware rounds, so close comparisons use float16.
"""

import pytest
import torch

from flyweight.batch import KVStorage
from flyweight.kernels import reference
from flyweight.kernels.linear.fused import Norm

ops = pytest.importorskip("flyweight.kernels.triton_ops", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.float16


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def random(*shape, dtype=HALF):
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-6), (HALF, 2e-3), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("rows, size", [(1, 576), (5, 64), (3, 1000), (2, 1536)])
def test_norm(rows, size, dtype, tolerance):
    x, weight = random(rows, size, dtype=dtype), random(size, dtype=dtype)
    want = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), want, rtol=tolerance, atol=tolerance)
    for norm in (Norm(weight, 1e-5), Norm(weight, 1e-5, plus_one=True)):
        got, want = ops.normalize(x, norm), reference.normalize(x, norm)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_norm_takes_weights_by_head_leading_dimensions_and_strided_rows():
    x, weight = random(3, 2, 5, 24)[..., :16], random(5, 16)
    torch.testing.assert_close(
        ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), rtol=2e-3, atol=2e-3
    )
    rows = random(7, 96)[:, 32:64]
    torch.testing.assert_close(
        ops.rms_norm(rows, weight[0].repeat(2), 1e-6),
        reference.rms_norm(rows, weight[0].repeat(2), 1e-6),
        rtol=2e-3,
        atol=2e-3,
    )
    assert ops.rms_norm(random(0, 16), weight[0], 1e-6).shape == (0, 16)


@pytest.mark.parametrize("size", [48, 1200])
def test_silu_mul(size):
    gate_up = random(3, 2, 2 * size)
    torch.testing.assert_close(
        ops.silu_mul(gate_up), reference.silu_mul(gate_up), rtol=2e-3, atol=2e-3
    )
    assert torch.equal(ops.gate(gate_up, "silu"), ops.silu_mul(gate_up))


@pytest.mark.parametrize(
    "heads, kv_heads, size, rotary, normed",
    [
        (4, 2, 64, 64, True),
        (9, 3, 64, 64, False),
        (3, 3, 80, 32, True),
        (4, 1, 96, 96, False),
        (2, 1, 256, 64, True),
    ],
)
def test_rope_norm_and_kv_write(heads, kv_heads, size, rotary, normed):
    positions = torch.tensor([3, 0, 11, 12, 7], device=DEVICE)
    slots = torch.tensor([5, 30, 2, 17, 16], device=DEVICE)
    angles = torch.rand(16, rotary // 2, device=DEVICE) * 6
    cos, sin = reference.rope_rows(angles.cos(), angles.sin(), positions)
    qkv = random(5, heads + 2 * kv_heads, size)
    norm = Norm(random(heads + kv_heads, size), 1e-6) if normed else None
    caches = [
        KVStorage(*torch.full((2, 2, 16, kv_heads, size), 9.0, device=DEVICE, dtype=HALF))
        for _ in range(2)
    ]
    options = dict(cos=cos, sin=sin, norm=norm, query_scale=0.37)
    want = reference.rope_norm_write(qkv.clone(), caches[0], slots, **options)
    got = ops.rope_norm_write(qkv, caches[1], slots, **options)
    torch.testing.assert_close(got, want, rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(caches[1].keys, caches[0].keys, rtol=4e-3, atol=4e-3)
    assert torch.equal(caches[1].values, caches[0].values)


def test_a_negative_slot_writes_nothing_to_the_cache():
    cache = KVStorage(*torch.zeros(2, 1, 16, 2, 64, device=DEVICE, dtype=HALF))
    angles = torch.rand(2, 32, device=DEVICE)
    cos, sin = reference.rope_rows(angles.cos(), angles.sin(), torch.arange(2, device=DEVICE))
    qkv, slots = random(2, 8, 64), torch.tensor([-1, 3], device=DEVICE)
    ops.rope_norm_write(qkv, cache, slots, cos=cos, sin=sin, norm=None)
    assert cache.keys.flatten(0, 1).abs().sum((1, 2)).nonzero().flatten().tolist() == [3]
    assert cache.values.flatten(0, 1).abs().sum((1, 2)).nonzero().flatten().tolist() == [3]
