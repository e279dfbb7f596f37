"""A trellis' codes (cuda/trellis.cuh) against `matmul_reference` in float64; outputs are poisoned
before each launch.
"""

import pytest
import torch
from gpu_linears import relative_error

from flyweight.kernels import reference
from flyweight.kernels.linear import gemm, gemm_mma, gemv_splitk, tiles
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.kernels.linear.untile import untile
from flyweight.tensors import Trellis

pytestmark = pytest.mark.gpu


def make(shape, seed=1, **options):
    return Trellis.random(shape, seed, "cuda", **options)


# a row's last unit is a block by itself, of which no stage of many rows has a part
@pytest.mark.parametrize(
    ("bits", "groups", "dtype", "columns"),
    [
        (2, False, torch.bfloat16, 1536),
        (3, True, torch.float16, 1536),
        (3, False, torch.bfloat16, 576),
        (2, True, torch.bfloat16, 960),
    ],
)
def test_every_number_of_rows(bits, groups, dtype, columns):
    tensor = make((1000, columns), bits=bits, groups=groups, dtype=dtype)
    linear = TiledLinear(tensor, dtype=dtype, ops=reference)
    assert torch.equal(untile(linear.weight), tensor.dequantize().to(dtype))
    for rows in (1, 2, 4, 7, 8, 33, 300, 2100):
        x = torch.randn(rows, columns, device="cuda").to(dtype)
        out = torch.full((rows, 1000), float("nan"), device="cuda", dtype=dtype)
        bound = 2e-3 if dtype == torch.float16 else 6e-3
        found = relative_error(linear.multiply(x, out), tensor.matmul_reference(x))
        assert found < bound, (rows, linear.choose(rows).kernel)


@pytest.mark.parametrize(
    "multiply",
    [
        gemv_splitk.multiply,
        gemm_mma.multiply,
        pytest.param(gemm.multiply, marks=pytest.mark.hopper),
    ],
)
@pytest.mark.parametrize("bits", [2, 3])
def test_kernels_that_are_not_always_chosen(multiply, bits):
    tensor = make((1000, 4096), bits=bits)
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    x = torch.randn(6, 4096, device="cuda").bfloat16()
    assert relative_error(multiply(weight, x), tensor.matmul_reference(x)) < 6e-3


@pytest.mark.parametrize("rows", [1, 4])
def test_gate_and_up_end_together(rows):
    tensor = make((8192, 2048))
    linear = TiledLinear(tensor, dtype=torch.bfloat16, ops=reference)
    norm = Norm((1 + 0.1 * torch.randn(2048, device="cuda")).bfloat16(), 1e-6)
    x = torch.randn(rows, 2048, device="cuda").bfloat16()
    scaled = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    want = reference.gate(tensor.matmul_reference(scaled * norm.weight.double()), "silu")
    assert relative_error(linear.project(x, norm=norm, activation="silu"), want) < 1e-2


def test_repeated_launches_have_the_same_bits():
    weight = tiles.prepare(make((4096, 4096), bits=3), dtype=torch.bfloat16)
    linear = TiledLinear(make((4096, 4096), bits=3), dtype=torch.bfloat16, ops=reference)
    x = torch.randn(1, 4096, device="cuda").bfloat16()
    first = linear.multiply(x)
    assert torch.equal(linear.weight.weights, weight.weights)
    assert all(torch.equal(linear.multiply(x), first) for _ in range(20))
