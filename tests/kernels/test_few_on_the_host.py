"""5 to 16 rows through few.cu as it stands, compiled for and run on the CPU."""

import host_cuda
import pytest
import torch
from test_kernels_on_the_host import error, folder, host, make, norm_of  # noqa: F401 (fixtures)

from flyweight.kernels import few, gemv

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for x86 here")


def multiply(weight, x, outputs, per_warp=None, **options):
    chosen = few.choose(weight.kind, weight.out_features, weight.in_features, weight.group, len(x), host_cuda.PROCESSORS, per_warp)
    out = torch.full((len(x) + 1, outputs), float("nan")).to(x.dtype)
    few.multiply(weight, x, out[:-1], chosen=chosen, **options)
    assert out[-1].isnan().all(), "nothing is written beyond the rows"
    return out[:-1]


# Tiles that do not divide among clusters, fewer and more of them than sums have places, more stages than slots, several turns of the inputs.
@pytest.mark.parametrize(("kind", "rows", "shape", "per_warp"), [
    ("int4:128", 8, (112, 2048), 1), ("int4:128", 7, (416, 4096), 1), ("int4:128", 5, (80, 6144), 1), ("int4:128", 8, (240, 2560), 2),
    ("int4:128:symmetric", 16, (432, 4096), 2), ("int4:128", 11, (80, 12288), 2), ("int8:128", 8, (144, 2048), 1), ("int8:128", 16, (80, 2048), 2)])
def test_rows_are_multiplied_as_they_lie_in_memory(kind, rows, shape, per_warp):
    tensor = make(kind, shape, 1)
    weight, x = gemv.prepare(tensor, dtype=torch.bfloat16), torch.randn(rows, shape[1]).bfloat16()
    first = multiply(weight, x, shape[0], per_warp)
    assert error(first, tensor.matmul_reference(x)) < 4e-3
    assert torch.equal(first, multiply(weight, x, shape[0], per_warp)), "the same bits every time"


@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 8), (torch.float16, 16), (torch.float16, 6)])
def test_bias_residual_and_silu_are_fused(dtype, rows):
    tensor, bias = make("int4:128", (96, 2048), 1), torch.randn(96).to(dtype)
    x, residual = torch.randn(rows, 2048).to(dtype), torch.randn(rows, 96).to(dtype)
    want = tensor.matmul_reference(x) + bias.double()
    weight = gemv.prepare(tensor, dtype=dtype, bias=bias)
    assert error(multiply(weight, x, 96, residual=residual), want + residual.double()) < 1e-2
    gate, up = want.chunk(2, -1)
    gated = gemv.prepare(tensor, dtype=dtype, bias=bias, interleave=True)
    assert error(multiply(gated, x, 48), torch.nn.functional.silu(gate) * up) < 2e-2


@pytest.mark.parametrize("rows", [8, 13])
def test_the_norm_is_fused(rows):
    tensor, norm = make("int4:128", (208, 2048), 1), (1 + 0.1 * torch.randn(2048)).bfloat16()
    x = (3 * torch.randn(rows, 2048)).bfloat16()
    got = multiply(gemv.prepare(tensor, dtype=torch.bfloat16), x, 208, norm=norm)
    assert error(got, tensor.matmul_reference(norm_of(x, norm))) < 5e-3


def test_linears_of_a_model_are_cut_such_that_two_kernels_fit():
    for outputs, columns in ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)):
        for rows in (8, 16):
            chosen = few.choose("int4", outputs, columns, 128, rows, 132)
            assert chosen is not None and chosen.shared <= gemv.SHARED_LIMIT and chosen.stages >= 4
    assert few.choose("int4", 4096, 4096, 64, 8, 132) is None and few.choose("int4", 4096, 4096, 128, 17, 132) is None
