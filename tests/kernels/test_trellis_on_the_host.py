"""A trellis' codes (cuda/trellis.cuh), run on the CPU through every kernel that takes them."""

import host_cuda
import pytest
import torch
from test_kv8_on_the_host import SHAPE, compare_with_apart

from flyweight import gpu
from flyweight.kernels import reference
from flyweight.kernels.linear import gemm, gemm_mma, gemv, gemv_splitk, tiles
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.linear.gemm_shape import LINE, Forced
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.kernels.linear.untile import untile
from flyweight.tensors import Trellis

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")


@pytest.fixture(autouse=True)
def host(monkeypatch, folder):
    torch.manual_seed(0)
    host_cuda.pretend(monkeypatch, folder)


def error(got, want):
    assert got.isfinite().all(), "an output was not written"
    return float((got.double() - want).norm() / want.norm())


# a row's last unit is a block by itself; outputs end within a tile
@pytest.mark.parametrize(
    ("bits", "groups", "shape", "rows"),
    [
        (2, False, (72, 576), 1),
        (2, True, (40, 640), 2),
        (3, False, (72, 640), 8),
        (3, True, (40, 576), 1),
        (2, False, (40, 64), 4),
    ],
)
def test_few_rows(bits, groups, shape, rows):
    tensor = Trellis.random(shape, 1, bits=bits, groups=groups)
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    assert weight.format.name == "trellis-bits" and weight.format.in_planes
    x = torch.randn(rows, shape[1]).bfloat16()
    assert error(gemv.multiply(weight, x), tensor.matmul_reference(x)) < 4e-3


def test_weights_that_each_warp_copies(monkeypatch):
    older = gpu.Gpu(8, 0, 5, 166912, 167936)  # before Hopper
    monkeypatch.setattr(gpu, "of", lambda _: older)
    test_few_rows(2, False, (72, 576), 1)
    test_few_rows(3, True, (72, 640), 2)


@pytest.mark.parametrize(
    ("bits", "groups", "multiply", "options"),
    [
        (2, False, gemv_splitk.multiply, dict(slices=2)),
        (3, True, gemv_splitk.multiply, dict(slices=2)),
        (2, True, gemm.multiply, dict(forced=Forced(split=LINE))),
        (3, False, gemm.multiply, {}),
        (2, False, gemm_mma.multiply, {}),
        (3, True, gemm_mma.multiply, {}),
    ],
    ids=lambda value: getattr(value, "__module__", None),
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_more_rows(bits, groups, multiply, options, dtype):
    tensor = Trellis.random((72, 640), 1, bits=bits, groups=groups, dtype=dtype)
    weight = tiles.prepare(tensor, dtype=dtype)
    x = torch.randn(6 if multiply is gemv_splitk.multiply else 20, 640).to(dtype)
    bound = 6e-3 if dtype == torch.bfloat16 else 1e-3
    assert error(multiply(weight, x, **options), tensor.matmul_reference(x)) < bound


def linear_of(tensor, **options):
    return TiledLinear(tensor, dtype=torch.bfloat16, ops=reference, **options)


@pytest.mark.parametrize(("bits", "groups", "columns"), [(2, False, 576), (3, True, 448)])
def test_a_weight_is_written_out(bits, groups, columns):
    tensor = Trellis.random((90, columns), 1, bits=bits, groups=groups)
    linear = linear_of(tensor)
    assert torch.equal(untile(linear.weight), tensor.dequantize().bfloat16())
    assert linear.looks_up
    rows = torch.tensor([0, 7, 8, 15, 16, 63, 89, 7])
    out = torch.empty(len(rows), columns, dtype=torch.bfloat16)
    linear.look_up(rows, out)
    assert torch.equal(out, tensor.dequantize()[rows].bfloat16())


@pytest.mark.parametrize("rows", [1, 4, 20])
def test_gate_and_up_end_together(rows):
    """Rows of a tile stay in it, so CTAs of few rows have tiles of both."""
    tensor, bias = Trellis.random((192, 640), 1), torch.randn(192).bfloat16()
    norm, x = (1 + 0.1 * torch.randn(640)).bfloat16(), torch.randn(rows, 640).bfloat16()
    scaled = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    product = tensor.matmul_reference(scaled * norm.double()) + bias.double()
    linear = linear_of(tensor, bias=bias)
    assert linear._ends_apart(rows, "silu") == (rows < 9)
    found = linear.project(x, norm=Norm(norm, 1e-6), activation="silu")
    assert error(found, reference.gate(product, "silu")) < 1e-2


def test_stages_hold_whole_circles():
    """Of 9 blocks the last is by itself, and no stage but all 9 has none that is cut."""
    whole, ragged = (
        tiles.prepare(Trellis.random((64, columns), 1), dtype=torch.bfloat16).matrix
        for columns in (640, 576)
    )
    assert not whole.cuts_units(2) and whole.cuts_units(1) and whole.cuts_units(5)
    assert ragged.cuts_units(3) and not ragged.cuts_units(9)
    assert linear_of(Trellis.random((64, 576), 1)).kernel_for(64) == "cublas"


@pytest.mark.parametrize(("bits", "size"), [(2, 2.0), (3, 3.0)])
def test_bytes_are_those_of_the_code_and_a_scale_a_row(bits, size):
    weight = tiles.prepare(Trellis.random((64, 1024), 1, bits=bits), dtype=torch.bfloat16)
    assert 8 * weight.nbytes / (64 * 1024) == size + 16 / 1024


@pytest.mark.parametrize(("lengths", "inputs"), [([17, 90], 128), ([65], 192)])
def test_attention_follows_in_the_kernel_of_qkv(lengths, inputs):
    tensor = Trellis.random((SHAPE.width, inputs), 1, bits=3)
    compare_with_apart(None, {}, lengths, None, inputs=inputs, tensor=tensor)
