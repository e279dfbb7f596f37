"""The Triton ops against the torch ops they stand for: compiled where there is a GPU, else interpreted on the CPU.

The interpreter cuts bfloat16 off where the hardware rounds, so close comparisons use float16.
"""

import pytest
import torch

from flyweight.engine.batch import KVStorage
from flyweight.kernels import reference
from flyweight.kernels.gemv import interleave_rows

ops = pytest.importorskip("flyweight.kernels.triton_ops", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.float16


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def random(*shape, dtype=HALF):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def check_codes(got, want):
    """The same codes but for sums that were added up in another order: a step of the code at most, and seldom."""
    codes, scales = got[0], got[1]
    torch.testing.assert_close(scales, want[1], rtol=1e-3, atol=0)
    off = (codes.float() - want[0].float()).abs()
    assert codes.dtype == want[0].dtype and off.max() <= 1 and (off > 0).float().mean() < 0.01


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (HALF, 2e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rows, size", [(1, 576), (5, 64), (3, 1000), (2, 1536)])
def test_norm_with_and_without_residual(rows, size, dtype, tolerance):
    x, residual, weight = random(rows, size, dtype=dtype), random(rows, size, dtype=dtype), random(size, dtype=dtype)
    want = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), want, rtol=tolerance, atol=tolerance)
    got, want = ops.add_rms_norm(x, residual, weight, epsilon=1e-5), reference.add_rms_norm(x, residual, weight, epsilon=1e-5)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_norm_takes_weights_by_head_leading_dimensions_and_strided_rows():
    x, weight = random(3, 2, 5, 24)[..., :16], random(5, 16)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), rtol=2e-3, atol=2e-3)
    rows = random(7, 96)[:, 32:64]
    torch.testing.assert_close(ops.rms_norm(rows, weight[0].repeat(2), 1e-6), reference.rms_norm(rows, weight[0].repeat(2), 1e-6),
                               rtol=2e-3, atol=2e-3)
    assert ops.rms_norm(random(0, 16), weight[0], 1e-6).shape == (0, 16)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_int8_codes_are_those_of_quantize_int8_rows(dtype):
    x = random(4, 700, dtype=dtype)
    x[1] = 0  # the smallest scale there is
    x[2] *= 1e-3
    x[3] = torch.arange(700, device=DEVICE) % 255 - 127  # scale 1: every code is exact
    x[3, :100] += 0.5  # ties go to the even code
    got, want = ops.quantize_rows(x), reference.quantize_rows(x)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=2e-7, atol=0)


@pytest.mark.parametrize("size", [24, 640])
def test_norm_and_silu_give_the_codes_of_what_they_would_return(size):
    x, residual, weight, gate_up = random(5, size), random(5, size), random(size), random(5, 2 * size)
    got, want = ops.norm_quantize(x, residual, weight, 1e-6), reference.norm_quantize(x, residual, weight, 1e-6)
    check_codes(got, want)
    assert torch.equal(got[2], want[2])
    got = ops.norm_quantize(x, None, weight, 1e-6)
    check_codes(got, reference.norm_quantize(x, None, weight, 1e-6))
    assert got[2] is x
    check_codes(ops.silu_quantize(gate_up), reference.silu_quantize(gate_up))


def test_float8_codes():
    x = random(3, 600)
    codes, scales = ops.quantize_rows(x, dtype=torch.float8_e4m3fn)
    want, want_scales = reference.quantize_rows(x, dtype=torch.float8_e4m3fn)
    torch.testing.assert_close(scales, want_scales, rtol=2e-7, atol=0)
    if DEVICE == "cuda":
        assert torch.equal(codes.view(torch.uint8), want.view(torch.uint8))
    near = torch.isclose(codes.float(), want.float(), rtol=0.125, atol=2**-9)  # a step of the code
    assert near.float().mean() > 0.95  # the interpreter loses the carry where a code rounds up to a power of two


@pytest.mark.parametrize("size", [48, 1200])
def test_silu_mul_of_halves_and_of_interleaved_rows(size):
    gate_up = random(3, 2, 2 * size)
    mixed = interleave_rows(gate_up.flatten(0, 1).T.contiguous()).T.unflatten(0, (3, 2))
    want = reference.silu_mul(gate_up)
    for got in (ops.silu_mul(gate_up), ops.silu_mul(mixed, interleaved=True), reference.silu_mul(mixed, interleaved=True)):
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
    check_codes(ops.silu_quantize(mixed, interleaved=True), reference.quantize_rows(want))


@pytest.mark.parametrize("by_table", [False, True])
@pytest.mark.parametrize("heads, kv_heads, size, rotary, normed", [
    (4, 2, 64, 64, True), (9, 3, 64, 64, False), (3, 3, 80, 32, True), (4, 1, 96, 96, False), (2, 1, 256, 64, True)])
def test_rope_norm_and_kv_write(heads, kv_heads, size, rotary, normed, by_table):
    positions = torch.tensor([3, 0, 11, 12, 7], device=DEVICE)
    slots = torch.tensor([5, 30, 2, 17, 16], device=DEVICE)
    angles = torch.rand(16, rotary // 2, device=DEVICE) * 6
    tables, rows = (angles.cos(), angles.sin()), reference.rope_rows(angles.cos(), angles.sin(), positions)
    qkv, norm = random(5, heads + 2 * kv_heads, size), random(heads + kv_heads, size) if normed else None
    caches = [KVStorage(*torch.full((2, 2, 16, kv_heads, size), 9.0, device=DEVICE, dtype=HALF)) for _ in range(2)]
    options = dict(heads=heads, norm=norm, epsilon=1e-6)
    want = reference.rope_norm_write(qkv.clone(), caches[0], slots, cos=rows[0], sin=rows[1], **options)
    cos, sin = tables if by_table else rows
    got = ops.rope_norm_write(qkv, caches[1], slots, cos=cos, sin=sin, positions=positions if by_table else None, **options)
    torch.testing.assert_close(got, want, rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(caches[1].keys, caches[0].keys, rtol=4e-3, atol=4e-3)
    assert torch.equal(caches[1].values, caches[0].values)


def test_a_negative_slot_writes_nothing_to_the_cache():
    cache = KVStorage(*torch.zeros(2, 1, 16, 2, 64, device=DEVICE, dtype=HALF))
    angles = torch.rand(2, 32, device=DEVICE)
    cos, sin = reference.rope_rows(angles.cos(), angles.sin(), torch.arange(2, device=DEVICE))
    qkv, slots = random(2, 8, 64), torch.tensor([-1, 3], device=DEVICE)
    ops.rope_norm_write(qkv, cache, slots, cos=cos, sin=sin, heads=4, norm=None, epsilon=1e-6)
    assert cache.keys.flatten(0, 1).abs().sum((1, 2)).nonzero().flatten().tolist() == [3]
    assert cache.values.flatten(0, 1).abs().sum((1, 2)).nonzero().flatten().tolist() == [3]


def test_argmax_takes_the_first_of_the_largest():
    logits = torch.randint(0, 50, (3, 9000), device=DEVICE).to(HALF)
    logits[1, [17, 8990]] = 60
    logits[2] = -float("inf")
    want = [row.tolist().index(max(row.tolist())) for row in logits]
    assert ops.argmax(logits).tolist() == want
