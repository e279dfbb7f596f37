"""Codes in planes (cuda/bits.cuh), run on the CPU: GGUF's types, integers of 2 to 8 bits, NVFP4,
through every kernel that takes them.
"""

import host_cuda
import pytest
import torch

from flyweight import gpu
from flyweight.kernels import reference
from flyweight.kernels.linear import gemm, gemm_mma, gemv, gemv_splitk, tiles
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.linear.gemm_shape import LINE, Forced
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.kernels.linear.untile import untile
from flyweight.tensors import IntBlock, IntGroup, NvFloat4

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")

KVALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
OLDER = gpu.Gpu(8, 0, 5, 166912, 167936)  # before Hopper: each warp copies its own weights
# as IntBlock.random has them
GGUF = {
    "Q4_1": dict(bits=4),
    "Q5_0": dict(bits=5, mins=False),
    "Q5_1": dict(bits=5),
    "IQ4_NL": dict(mins=False, table=KVALUES),
    "Q2_K": dict(bits=2, group_size=16, groups_of_block=16, sub_bits=4),
    "Q3_K": dict(bits=3, group_size=16, groups_of_block=16, mins=False),
    "Q4_K": dict(bits=4, groups_of_block=8),
    "Q5_K": dict(bits=5, groups_of_block=8),
    "Q6_K": dict(bits=6, group_size=16, groups_of_block=16, mins=False, sub_bits=8),
    "IQ4_XS": dict(mins=False, groups_of_block=8, table=KVALUES),
}


@pytest.fixture(autouse=True)
def host(monkeypatch, folder):
    torch.manual_seed(0)
    host_cuda.pretend(monkeypatch, folder)


def make(kind, shape, seed=1):
    """A type of GGUF, nvfp4, or "bits:group" of integers, with "=" without zero points."""
    if kind == "nvfp4":
        return NvFloat4.random(shape, seed)
    if kind in GGUF:
        return IntBlock.random(shape, seed, **GGUF[kind])
    bits, group = map(int, kind.rstrip("=").split(":"))
    return IntGroup.random(shape, seed, bits=bits, group_size=group, symmetric=kind.endswith("="))


def width(kind):
    """Of an odd number of records."""
    return 768 if kind.endswith(("K", "XS")) else 320 if kind == "nvfp4" else 352


def error(got, want):
    assert got.isfinite().all(), "an output was not written"
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("Q4_1", 1),
        ("Q5_0", 2),
        ("IQ4_NL", 1),
        ("Q2_K", 1),
        ("Q3_K", 2),
        ("Q4_K", 1),
        ("Q6_K", 2),
        ("nvfp4", 1),
        ("4:32=", 8),
        ("2:16", 1),
        ("3:128", 2),
        ("3:128=", 8),
        ("6:16=", 4),
        ("8:16", 1),
    ],
)
def test_few_rows(kind, rows):
    shape = 72, 640 if kind.startswith(("3:128", "3:64")) else width(kind)
    tensor = make(kind, shape)
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    assert weight.format.name == "bits" and weight.format.in_planes
    x = torch.randn(rows, shape[1]).bfloat16()
    x[:, 32:64] += 2  # a sum that minima are multiplied with
    assert error(gemv.multiply(weight, x), tensor.matmul_reference(x)) < 4e-3


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("8:16", 4),
        ("Q5_0", 8),
        ("Q4_1", 4),
        ("IQ4_NL", 4),
        ("Q2_K", 8),
        ("Q3_K", 4),
        ("Q4_K", 8),
        ("Q6_K", 4),
        ("nvfp4", 8),
    ],
)
def test_few_rows_as_floats(monkeypatch, kind, rows):
    monkeypatch.setattr(gemv, "HALVES_FROM", 3)
    forget_plans()
    test_few_rows(kind, rows)


def forget_plans():
    for module in (gemv, gemv_splitk):
        for thing in vars(module).values():
            if hasattr(thing, "cache_clear"):
                thing.cache_clear()


def test_slices_as_floats(monkeypatch):
    monkeypatch.setattr(gemv, "HALVES_FROM", 3)
    forget_plans()
    test_more_rows("Q4_K", gemv_splitk.multiply, dict(slices=2))


def test_large_inputs_of_a_row_do_not_overflow(monkeypatch, kind="Q5_0"):
    """Of fp16, times the norm's weights."""
    monkeypatch.setattr(gemv, "HALVES_FROM", 3)
    forget_plans()
    tensor = make(kind, (64, 352))
    norm, x = torch.full((352,), 30.0).half(), torch.randn(4, 352).half()
    x[1, 5] = 6e4
    exact = x.double() * norm.double() * torch.rsqrt(x.double().square().mean(-1)[:, None] + 1e-6)
    weight = tiles.prepare(tensor, dtype=torch.float16)
    found = gemv.multiply(weight, x, norm=Norm(norm, 1e-6))
    assert error(found, tensor.matmul_reference(exact)) < 2e-3


def test_weights_that_each_warp_copies(monkeypatch, kind="Q4_K"):
    monkeypatch.setattr(gpu, "of", lambda _: OLDER)
    test_few_rows(kind, 2)


@pytest.mark.parametrize(
    ("kind", "multiply", "options"),
    [
        ("Q4_K", gemv_splitk.multiply, dict(slices=2)),
        ("Q6_K", gemm.multiply, dict(forced=Forced(split=LINE))),
        ("Q4_1", gemm.multiply, dict(forced=Forced(split=LINE))),
        ("8:32=", gemm.multiply, {}),
        ("IQ4_NL", gemm_mma.multiply, {}),
        ("3:64=", gemm_mma.multiply, {}),
    ],
    ids=lambda value: getattr(value, "__module__", None),
)
def test_more_rows(kind, multiply, options):
    shape = 64, 320 if kind == "3:64=" else width(kind)
    tensor = make(kind, shape)
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    x = torch.randn(6 if multiply is gemv_splitk.multiply else 20, shape[1]).bfloat16()
    x[:, 32:64] += 2
    assert error(multiply(weight, x, **options), tensor.matmul_reference(x)) < 6e-3


@pytest.mark.parametrize(
    ("kind", "activation"),
    [
        ("Q4_1", None),
        ("Q5_1", "silu"),
        ("Q2_K", None),
        ("Q4_K", "silu"),
        ("Q6_K", None),
        ("IQ4_XS", "silu"),
        ("nvfp4", None),
        ("6:16", None),
        ("3:32", None),
    ],
)
def test_a_weight_is_written_out(kind, activation):
    tensor = make(kind, (96, width(kind)))
    linear = TiledLinear(tensor, dtype=torch.bfloat16, ops=reference, activation=activation)
    assert torch.equal(untile(linear.weight), tensor.dequantize().bfloat16())


@pytest.mark.parametrize("kind", ["Q4_1", "Q2_K", "Q6_K", "IQ4_XS", "nvfp4", "8:32="])
def test_single_rows_are_looked_up(kind):
    """An embedding that is tied to a head of these bits reads its rows there."""
    tensor = make(kind, (90, width(kind)))
    linear = TiledLinear(tensor, dtype=torch.bfloat16, ops=reference)
    assert linear.looks_up
    rows = torch.tensor([0, 7, 8, 15, 16, 63, 89, 7])
    out = torch.empty(len(rows), width(kind), dtype=torch.bfloat16)
    linear.look_up(rows, out)
    assert torch.equal(out, tensor.dequantize()[rows].bfloat16())


def test_norm_bias_and_silu_are_fused(kind="Q5_K"):
    tensor, bias = make(kind, (96, 768)), torch.randn(96).bfloat16()
    norm, x = (1 + 0.1 * torch.randn(768)).bfloat16(), torch.randn(2, 768).bfloat16()
    scaled = (
        x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * norm.double()
    )
    want = reference.gate(tensor.matmul_reference(scaled) + bias.double(), "silu")
    weight = tiles.prepare(tensor, dtype=torch.bfloat16, bias=bias, activation="silu")
    assert error(gemv.multiply(weight, x, norm=Norm(norm, 1e-6)), want) < 1e-2


# bytes of a file's blocks by their inputs; sub-scales of 6 bits take bytes here where minima have
# as many
FILES = {
    "Q4_1": 20 / 32,
    "Q5_0": 22 / 32,
    "Q5_1": 24 / 32,
    "IQ4_NL": 18 / 32,
    "Q2_K": 84 / 256,
    "Q3_K": 110 / 256,
    "Q4_K": 144 / 256,
    "Q5_K": 176 / 256,
    "Q6_K": 210 / 256,
    "IQ4_XS": 136 / 256,
    "4:32=": 18 / 32,
    "8:32=": 34 / 32,
    "nvfp4": 9 / 16,
}


@pytest.mark.parametrize("kind", FILES)
def test_bytes_are_those_of_the_file(kind):
    shape = 64, 1024
    size = tiles.prepare(make(kind, shape), dtype=torch.bfloat16).nbytes
    assert FILES[kind] <= size / (shape[0] * shape[1]) <= 1.03 * FILES[kind]
