"""The small-batch linear against `matmul_reference` in float64; outputs are poisoned before each
launch.
"""

import pytest
import torch
from gpu_linears import (
    FORMATS,
    FUSED_KINDS,
    KINDS,
    TOLERANCE,
    expected,
    linear_of,
    make,
    relative_error,
    replayed,
    taken_by_gemv,
)

from flyweight import gpu
from flyweight.kernels.linear import gemv, gemv_plan, tiles
from flyweight.kernels.linear.fused import Norm

pytestmark = pytest.mark.gpu
SHAPES = [(1000, 576), (1000, 7392), (192, 1536), (11008, 576)]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.bfloat16) for kind in KINDS), *((kind, torch.float16) for kind in FORMATS)],
)
def test_rows_1_to_8_on_ragged_shapes(kind, dtype):
    thorough = kind in FORMATS and dtype == torch.bfloat16
    for seed, shape in enumerate(SHAPES if thorough else SHAPES[:2]):
        tensor = make(kind, shape, seed, dtype)
        prepared = taken_by_gemv(tiles.prepare(tensor, dtype=dtype))
        for rows in (1, 2, 4, 8) if thorough and seed == 0 else (4,) if seed == 0 else (1,):
            x = torch.randn(rows, shape[1], device="cuda").to(dtype)
            out = torch.full((rows, shape[0]), float("nan"), device="cuda", dtype=dtype)
            assert (
                relative_error(gemv.multiply(prepared, x, out), tensor.matmul_reference(x))
                < TOLERANCE[dtype]
            )


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kind", ["int4:128", "int8:128"])
def test_eight_rows_that_stay_in_registers(kind, dtype):
    for seed, shape in enumerate([(1000, 1600), (6144, 4096)]):
        tensor = make(kind, shape, seed, dtype)
        x = torch.randn(8, shape[1], device="cuda").to(dtype)
        out = torch.full((8, shape[0]), float("nan"), device="cuda", dtype=dtype)
        weight = tiles.prepare(tensor, dtype=dtype)
        here = gpu.of(0)
        if shape[1] > 4000 and here.shared_most < 100 << 10:
            assert not gemv_plan.fits(weight.matrix, 8, here), "so nobody asks for it"
            continue
        gemv.multiply(weight, x, out, alone=True)
        assert relative_error(out, tensor.matmul_reference(x)) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.bfloat16) for kind in FUSED_KINDS),
        *((kind, torch.float16) for kind in ("plain", "w8a8", "int4:128")),
    ],
)
def test_norm_bias_residual_and_silu_are_fused(kind, dtype):
    tensor = make(kind, (512, 1536), 3, dtype)
    bias = torch.randn(512, device="cuda").to(dtype)
    norm = (1 + 0.1 * torch.randn(1536, device="cuda")).to(dtype)
    for rows in (1, 4):
        x, residual = (torch.randn(rows, width, device="cuda").to(dtype) for width in (1536, 512))
        normed = (
            x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6) * norm.float()
        ).to(dtype)
        want = tensor.matmul_reference(normed) + bias.double()
        linear = taken_by_gemv(tiles.prepare(tensor, dtype=dtype, bias=bias))
        # W8A8 and float8 quantize the float32 result of the norm, the reference one that was
        # rounded to 16 bits first
        bound = (
            TOLERANCE[dtype] * (3 if kind.endswith("w8a8") else 1)
            if not kind.startswith("fp8")
            else 4e-2
        )
        got = gemv.multiply(linear, x, norm=Norm(norm, 1e-6), residual=residual)
        assert relative_error(got, want + residual.double()) < bound
        gate, up = want.chunk(2, -1)
        gated = tiles.prepare(tensor, dtype=dtype, bias=bias, activation="silu")
        assert (
            relative_error(
                gemv.multiply(gated, x, norm=Norm(norm, 1e-6)), torch.nn.functional.silu(gate) * up
            )
            < bound
        )


@pytest.mark.parametrize("kind", [*FORMATS, "int4:32", "int8:channel", "fp8-static", "w8a8-static"])
def test_many_rows_compute_the_same_function_as_few(kind):
    tensor = make(kind, (256, 1536), 1)
    bias = torch.randn(256, device="cuda").bfloat16()
    x = torch.randn(33, 1536, device="cuda").bfloat16()
    want = expected(tensor, x) + bias.double()
    for gated in (False, True):
        linear = linear_of(tensor, bias=bias, activation="silu" if gated else None)
        assert relative_error(linear(x), want) < 1e-2
    assert relative_error(linear_of(tensor, bias=bias)(x[:5]), want[:5]) < 1e-2


def test_a_dependent_chain_gives_the_same_bits_with_and_without_overlapping_launches():
    weights = [
        tiles.prepare(make("int4:128", (1024, 1024), i), dtype=torch.bfloat16) for i in range(6)
    ]
    start = torch.randn(1, 1024, device="cuda").bfloat16()
    results = replayed(gemv.multiply, weights, start, replays=500)
    assert (
        all(torch.equal(result, results[0]) for result in results) and results[0].isfinite().all()
    )
