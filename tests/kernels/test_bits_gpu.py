"""Codes in planes (cuda/bits.cuh) against `matmul_reference` in float64; outputs are poisoned
before each launch.
"""

import pytest
import torch
from gpu_linears import relative_error

from flyweight.kernels import reference
from flyweight.kernels.linear import gemm, gemm_mma, gemv, gemv_splitk, tiles
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.kernels.linear.untile import untile
from flyweight.tensors import IntBlock, IntGroup, NvFloat4

pytestmark = pytest.mark.gpu

KVALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
KINDS = {
    "Q4_1": dict(bits=4),
    "Q5_0": dict(bits=5, mins=False),
    "IQ4_NL": dict(mins=False, table=KVALUES),
    "Q2_K": dict(bits=2, group_size=16, groups_of_block=16, sub_bits=4),
    "Q3_K": dict(bits=3, group_size=16, groups_of_block=16, mins=False),
    "Q4_K": dict(bits=4, groups_of_block=8),
    "Q5_K": dict(bits=5, groups_of_block=8),
    "Q6_K": dict(bits=6, group_size=16, groups_of_block=16, mins=False, sub_bits=8),
}


def make(kind, shape, seed=1):
    if kind == "nvfp4":
        return NvFloat4.random(shape, seed, "cuda")
    if kind in KINDS:
        return IntBlock.random(shape, seed, "cuda", **KINDS[kind])
    bits, group = map(int, kind.rstrip("=").split(":"))
    return IntGroup.random(
        shape, seed, "cuda", bits=bits, group_size=group, symmetric=kind.endswith("=")
    )


# every plane, record and coding once; compiling takes longer than running
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("Q4_K", torch.bfloat16),
        ("Q6_K", torch.bfloat16),
        ("3:128", torch.bfloat16),
        ("IQ4_NL", torch.float16),
        ("nvfp4", torch.bfloat16),
        ("Q2_K", torch.bfloat16),
        ("8:32=", torch.float16),
        ("Q5_0", torch.float16),
        ("Q4_1", torch.bfloat16),
        ("Q3_K", torch.bfloat16),
        ("3:128=", torch.float16),
    ],
)
def test_every_number_of_rows(kind, dtype):
    tensor = make(kind, (1008, 1536))
    linear = TiledLinear(tensor, dtype=dtype, ops=reference)
    assert torch.equal(untile(linear.weight), tensor.dequantize().to(dtype))
    for rows in (1, 4, 8, 33, 2100):
        x = torch.randn(rows, 1536, device="cuda").to(dtype)
        out = torch.full((rows, 1008), float("nan"), device="cuda", dtype=dtype)
        kernel = linear.choose(rows).kernel
        bound = 2e-3 if dtype == torch.float16 else 6e-3
        assert relative_error(linear.multiply(x, out), tensor.matmul_reference(x)) < bound, (
            rows,
            kernel,
        )


@pytest.mark.parametrize(
    "multiply",
    [
        gemv_splitk.multiply,
        gemm_mma.multiply,
        pytest.param(gemm.multiply, marks=pytest.mark.hopper),
    ],
)
def test_kernels_that_are_not_always_chosen(multiply, kind="Q4_K"):
    tensor = make(kind, (1000, 4096))
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    x = torch.randn(6, 4096, device="cuda").bfloat16()
    assert relative_error(multiply(weight, x), tensor.matmul_reference(x)) < 6e-3


def test_repeated_launches_have_the_same_bits(kind="Q6_K"):
    tensor = make(kind, (4096, 4096))
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    x = torch.randn(1, 4096, device="cuda").bfloat16()
    first = gemv.multiply(weight, x)
    assert all(torch.equal(gemv.multiply(weight, x), first) for _ in range(20))


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "IQ4_NL", "8:32="])
def test_single_rows_are_looked_up(kind):
    """An embedding that is tied to a head of these bits reads its rows there."""
    tensor = make(kind, (1008, 1536))
    linear = TiledLinear(tensor, dtype=torch.bfloat16, ops=reference)
    rows = torch.tensor([0, 7, 8, 15, 16, 63, 1007, 7], device="cuda")
    out = torch.full((len(rows), 1536), float("nan"), device="cuda", dtype=torch.bfloat16)
    linear.look_up(rows, out)
    assert torch.equal(out, tensor.dequantize()[rows].bfloat16())
