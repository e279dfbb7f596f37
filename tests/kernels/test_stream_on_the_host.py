"""5 to 32 rows through stream.cu as it stands, compiled for and run on the CPU."""

import host_cuda
import pytest
import torch
from test_kernels_on_the_host import error, folder, host, make, norm_of  # noqa: F401 (fixtures)

from flyweight.kernels import gemv, stream

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for x86 here")


def poisoned(rows, outputs):
    return torch.full((rows, outputs), float("nan")).bfloat16()


def multiply(weight, x, out, cluster, **options):
    chosen = stream.choose(weight.kind, weight.out_features, weight.in_features, weight.group, len(x), host_cuda.PROCESSORS,
                           cluster)
    return stream.multiply(weight, x, out, chosen=chosen, **options)


# Inputs that end inside a block and inside a step, tiles that do not divide among CTAs, warps and clusters, rows that fill a
# kernel and that do not, more steps than slots and fewer than warps, groups of several steps, codes of 8 bits.
CASES = [("int4:128", 8, (136, 640), 1), ("int4:128", 7, (152, 1600), 2), ("int4:128", 16, (1304, 1352), 1),
         ("int4:128", 9, (40, 2880), 2), ("int4:128", 32, (136, 1160), 1), ("int4:128", 20, (200, 896), 2),
         ("int4:256", 8, (24, 1536), 2), ("int4:128:symmetric", 16, (264, 6400), 2), ("int8:128", 8, (136, 1352), 2),
         ("int8:128", 32, (72, 640), 1)]


@pytest.mark.parametrize(("kind", "rows", "shape", "cluster"), CASES)
def test_rows_are_multiplied_as_they_lie_in_memory(kind, rows, shape, cluster):
    tensor = make(kind, shape, 1)
    weight, x = gemv.prepare(tensor, dtype=torch.bfloat16), torch.randn(rows, shape[1]).bfloat16()
    first = multiply(weight, x, poisoned(rows, shape[0]), cluster)
    assert error(first, tensor.matmul_reference(x)) < (1e-2 if rows > 16 else 4e-3)
    assert torch.equal(first, multiply(weight, x, poisoned(rows, shape[0]), cluster)), "the same bits every time"


@pytest.mark.parametrize(("dtype", "rows", "cluster"), [(torch.bfloat16, 8, 2), (torch.float16, 16, 1), (torch.float16, 32, 2)])
def test_bias_residual_and_silu_are_fused(dtype, rows, cluster):
    tensor, bias = make("int4:128", (96, 896), 1), torch.randn(96).to(dtype)
    x, residual = torch.randn(rows, 896).to(dtype), torch.randn(rows, 96).to(dtype)
    want = tensor.matmul_reference(x) + bias.double()
    weight = gemv.prepare(tensor, dtype=dtype, bias=bias)
    got = multiply(weight, x, poisoned(rows, 96).to(dtype), cluster, residual=residual)
    assert error(got, want + residual.double()) < 1e-2
    gate, up = want.chunk(2, -1)
    gated = gemv.prepare(tensor, dtype=dtype, bias=bias, interleave=True)
    got = multiply(gated, x, poisoned(rows, 48).to(dtype), cluster)
    assert error(got, torch.nn.functional.silu(gate) * up) < 2e-2


@pytest.mark.parametrize(("rows", "columns", "cluster"), [(8, 896, 2), (13, 1352, 1), (32, 640, 2)])
def test_the_norm_is_fused(rows, columns, cluster):
    tensor, norm = make("int4:128", (200, columns), 1), (1 + 0.1 * torch.randn(columns)).bfloat16()
    x, residual = (3 * torch.randn(rows, columns)).bfloat16(), torch.randn(rows, 200).bfloat16()
    weight = gemv.prepare(tensor, dtype=torch.bfloat16)
    got = multiply(weight, x, poisoned(rows, 200), cluster, norm=norm, residual=residual)
    assert error(got, tensor.matmul_reference(norm_of(x, norm)) + residual.double()) < 5e-3


def test_linears_of_a_model_are_cut_such_that_two_kernels_fit():
    for outputs, columns in ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)):
        for rows in (8, 16, 32):
            chosen = stream.choose("int4", outputs, columns, 128, rows, 132)
            assert chosen is not None and chosen.shared <= gemv.SHARED_LIMIT and chosen.slots >= 8
            assert chosen.cluster == (1 if outputs == 24576 else 2)
    assert stream.choose("int4", 4096, 4096, 64, 8, 132) is None and stream.choose("int4", 151936, 4096, 128, 8, 132) is None
