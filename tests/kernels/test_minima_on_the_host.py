"""Weights with a minimum for each group instead of a zero point (GGUF's Q4_1, Q4_K, Q5_K, …) through every kernel that takes
integers in groups of 32, run on the CPU."""

import dataclasses

import host_cuda
import pytest
import torch

from flyweight.kernels import reference
from flyweight.kernels.linear import gemm, gemm_mma, gemm_small, gemv, gemv_splitk, tiles
from flyweight.kernels.linear.gemm_shape import LINE, Forced
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.kernels.linear.untile import untile
from flyweight.tensors import IntBlock, merge

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")

KVALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@pytest.fixture(autouse=True)
def host(monkeypatch, folder):
    host_cuda.pretend(monkeypatch, folder)


def make(kind, shape, seed=1):
    if kind == "table":
        return IntBlock.random(shape, seed, mins=False, table=KVALUES)
    bits, *rest = kind.split()
    tensor = IntBlock.random(shape, seed, bits=int(bits), mins="middle" not in rest, groups_of_block=5 if "K" in rest else 1)
    if tensor.mins is not None and "K" not in rest:  # some groups are constant
        tensor.scales[3::7, 2] = 0
    return tensor


def error(got, want):
    assert got.isfinite().all(), "an output was not written"
    return float((got.double() - want).norm() / want.norm())


KINDS = ["4", "4 K", "5", "5 K", "5 middle", "table"]


@pytest.mark.parametrize("kind", KINDS)
def test_few_rows(kind):
    tensor = make(kind, (40, 320))
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    assert weight.format.name == ("int4" if kind.startswith("4") else "int8")
    x = torch.randn(2, 320).bfloat16()
    assert error(gemv.multiply(weight, x), tensor.matmul_reference(x)) < 4e-3


@pytest.mark.parametrize(("multiply", "options"), [
    (gemv_splitk.multiply, dict(slices=2)), (gemm_small.multiply, dict(slices=1)), (gemm.multiply, dict(forced=Forced(split=LINE))),
    (gemm_mma.multiply, {})], ids=["splitk", "small", "gemm", "mma"])
def test_more_rows(multiply, options, kind="4"):  # five bits differ in gemv, and where a weight is written out
    tensor = make(kind, (64, 320))
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    rows = 6 if multiply is gemv_splitk.multiply else 10 if multiply is gemm_small.multiply else 20
    x = torch.randn(rows, 320).bfloat16()
    x[:, 32:64] += 2  # a sum that minima are multiplied with
    assert error(multiply(weight, x, **options), tensor.matmul_reference(x)) < 6e-3


@pytest.mark.parametrize("kind", ["4", "4 K", "5"])
def test_a_weight_is_written_out(kind):
    tensor = make(kind, (96, 320))
    gated, single = (TiledLinear(tensor, dtype=torch.bfloat16, ops=reference, activation=act).weight for act in ("silu", None))
    dense = tensor.dequantize()
    for weight in (gated, single):
        written = untile(weight).float()
        assert torch.allclose(written, dense.bfloat16().float(), rtol=1e-2, atol=float(dense.abs().max()) / 200)
    assert torch.equal(untile(gated), untile(single))


def test_bytes_of_a_tiled_q4_1_are_those_of_its_file():
    tensor = make("4", (64, 512))
    assert tiles.prepare(tensor, dtype=torch.bfloat16).nbytes == tensor.nbytes


def test_neighbours_are_merged():
    parts = [make("4", (32, 320), seed) for seed in (1, 2)]
    (joined,) = merge(parts)
    assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert dataclasses.replace(parts[0], bits=4).shape == (32, 320)
