"""Four and eight rows with x in registers (gemv_registers.cuh), compiled for and run on the CPU."""

import functools

import host_cuda
import pytest
import torch
from test_kernels_on_the_host import error, host  # noqa: F401 (fixtures)

from flyweight.kernels.linear import gemv, gemv_plan, tiles
from flyweight.kernels.linear.fused import Norm
from flyweight.tensors import IntGroup

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")
BF16, FP16 = torch.bfloat16, torch.float16
TOLERANCE = {FP16: 2e-3, BF16: 1e-2}


def make(shape, dtype, *, bits=4, group=128, symmetric=False, scales=None):
    return IntGroup.random(
        shape, 1, dtype=scales or dtype, bits=bits, group_size=group, symmetric=symmetric
    )


def run(weight, x, **options):
    assert gemv_plan.fitting_plan(
        weight.matrix, 8, host_cuda.HOST, tiles=2, alone=True
    ).in_registers
    out = torch.full(
        (8, weight.out_features // (2 if weight.interleaved else 1)), float("nan"), dtype=x.dtype
    )
    return gemv.multiply(weight, x, out, alone=True, **options)


# Units that do not divide among warps, inputs that end inside one, groups of several units,
# symmetric codes, other scales.
CASES = [
    ((40, 1024), BF16, {}),
    ((136, 1600), BF16, {}),
    ((72, 4096), FP16, dict(bits=8)),
    ((40, 2560), BF16, dict(bits=8)),
    ((40, 1536), FP16, dict(group=256, symmetric=True, scales=BF16)),
    ((40, 2048), BF16, dict(group=2048, bits=8, symmetric=True)),
]


@pytest.mark.parametrize(("shape", "dtype", "options"), CASES)
def test_eight_rows_are_multiplied(shape, dtype, options):
    tensor, x = make(shape, dtype, **options), torch.randn(8, shape[1]).to(dtype)
    assert (
        error(run(tiles.prepare(tensor, dtype=dtype), x), tensor.matmul_reference(x.double()))
        < TOLERANCE[dtype]
    )


@pytest.mark.parametrize(
    ("columns", "dtype", "size"), [(2560, BF16, 1), (1024, FP16, 3000), (4096, FP16, 1e-3)]
)
def test_norm_residual_and_silu_are_fused_whatever_the_size_of_x(columns, dtype, size):
    """x of 3,000 times a norm's weight of 30 is no fp16."""
    tensor, norm = make((64, columns), dtype), (30 * (1 + 0.1 * torch.randn(columns))).to(dtype)
    x, residual = (size * torch.randn(8, columns)).to(dtype), torch.randn(8, 64).to(dtype)
    normed = (
        x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * norm.double()
    )
    want = tensor.matmul_reference(normed)
    got = run(tiles.prepare(tensor, dtype=dtype), x, norm=Norm(norm, 1e-6), residual=residual)
    assert error(got, want + residual.double()) < TOLERANCE[dtype]
    gate, up = want.chunk(2, -1)
    gated = tiles.prepare(tensor, dtype=dtype, activation="silu")
    assert (
        error(run(gated, x, norm=Norm(norm, 1e-6)), torch.nn.functional.silu(gate) * up)
        < 2 * TOLERANCE[dtype]
    )


@pytest.fixture
def beside(monkeypatch):
    """Plans are those of a kernel that attention follows in, beside others."""
    monkeypatch.setattr(
        gemv, "fitting_plan", functools.partial(gemv_plan.fitting_plan, attends=True)
    )


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((40, 1024), BF16, {}),
        ((136, 2944), BF16, dict(bits=8)),
        ((72, 4096), FP16, {}),
        ((40, 2560), BF16, dict(symmetric=True)),
        ((40, 1536), FP16, dict(group=256, scales=BF16)),
    ],
)
@pytest.mark.parametrize("spread", [4, 0])
def test_four_rows_are_multiplied(shape, dtype, options, spread, beside, monkeypatch):
    monkeypatch.setattr(gemv_plan, "SPREAD_ROWS", spread)
    check_four_rows(shape, dtype, options)


@pytest.mark.parametrize("columns", [5120, 6144])
def test_rows_that_share_out_their_inputs_may_be_wider(columns, beside):
    check_four_rows((40, columns), BF16, {})


def test_wider_rows_than_registers_hold_are_left_to_shared_memory():
    matrix = tiles.prepare(make((40, 7168), BF16), dtype=BF16).matrix
    plan = gemv_plan.fitting_plan(matrix, 4, host_cuda.HOST, tiles=2, attends=True)
    assert not plan.in_registers


def check_four_rows(shape, dtype, options):
    tensor, x = make(shape, dtype, **options), torch.randn(4, shape[1]).to(dtype)
    weight = tiles.prepare(tensor, dtype=dtype)
    plan = gemv_plan.fitting_plan(weight.matrix, 4, host_cuda.HOST, tiles=2, attends=True)
    assert plan.in_registers and plan.beside
    norm = (30 * (1 + 0.1 * torch.randn(shape[1]))).to(dtype)
    sizes = torch.tensor([1.0, 3000.0 if dtype == FP16 else 1.0, 1e-2, 20.0])
    x = (x.float() * sizes[:, None]).to(dtype)
    normed = (
        x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * norm.double()
    )
    out = torch.full((4, shape[0]), float("nan"), dtype=dtype)
    got = gemv.multiply(weight, x, out, norm=Norm(norm, 1e-6))
    want = tensor.matmul_reference(normed)
    for row in range(4):
        assert error(got[row], want[row]) < TOLERANCE[dtype]
