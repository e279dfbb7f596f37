"""2 to 64 rows through gemv_split.cu and batch.cu as they stand, compiled for and run on the
CPU.
"""

import host_cuda
import pytest
import torch
from test_kernels_on_the_host import error, host, mailboxes_are_empty, make, norm_of  # noqa: F401 (fixtures)

from flyweight.kernels.linear import gemm_small, gemv, gemv_splitk, tiles
from flyweight.kernels.linear.fused import Norm

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")


def poisoned(rows, outputs):
    return torch.full((rows, outputs), float("nan")).bfloat16()


# Inputs that end inside a block, slices of different lengths, tiles that do not divide, rows that
# fill a kernel and that do not, more tiles than loaders and than a round has, more steps than
# stages.
SPLIT = [
    ("plain", 3, (40, 584), 2),
    ("int4:128", 8, (136, 640), 3),
    ("int4:32", 16, (24, 352), 2),
    ("int8:64", 2, (40, 320), 5),
    ("sparse-int4:128:symmetric", 8, (40, 640), 2),
]
BATCH = [
    ("plain", 16, (40, 200), 2),
    ("w8a8", 9, (56, 328), 3),
    ("int4:128", 33, (40, 256), 2),
    ("int4:32", 12, (24, 160), 1),
    ("int8:64", 20, (24, 192), 1),
    ("int4:128", 7, (1304, 896), 1),
    ("int4:32", 5, (312, 160), 2),
    ("w8a8", 4, (24, 3200), 2),
    ("sparse-int8:64", 12, (40, 320), 1),
    ("sparse-int8:128:symmetric", 8, (136, 896), 2),
    ("sparse-int4:128:symmetric", 20, (40, 256), 2),
    ("sparse-int4:32", 5, (24, 160), 1),
    ("sparse-w8a8", 9, (56, 328), 3),
]


@pytest.mark.parametrize(("kind", "rows", "shape", "slices"), SPLIT)
def test_inputs_cut_into_slices(kind, rows, shape, slices):
    check(gemv_splitk.multiply, kind, rows, shape, slices)


@pytest.mark.parametrize(("kind", "rows", "shape", "slices"), BATCH)
def test_inputs_that_stream_beside_the_weights(kind, rows, shape, slices):
    check(gemm_small.multiply, kind, rows, shape, slices)


def check(multiply, kind, rows, shape, slices):
    tensor = make(kind, shape, 1)
    weight, x = tiles.prepare(tensor, dtype=torch.bfloat16), torch.randn(rows, shape[1]).bfloat16()
    want = tensor.matmul_reference(x)
    for _ in range(2):  # the second time with the mail that the first has emptied
        assert error(multiply(weight, x, poisoned(rows, shape[0]), slices=slices), want) < 1e-2
    assert mailboxes_are_empty(), "every word was taken"


@pytest.mark.parametrize(
    ("multiply", "kind", "rows", "slices"),
    [
        (gemv_splitk.multiply, "int4:64", 6, 2),
        (gemm_small.multiply, "w8a8", 10, 1),
        (gemm_small.multiply, "int4:64", 10, 2),
    ],
)
def test_norm_bias_residual_and_silu_are_fused(multiply, kind, rows, slices):
    tensor, bias = make(kind, (64, 320), 1), torch.randn(64).bfloat16()
    x, residual = torch.randn(rows, 320).bfloat16(), torch.randn(rows, 64).bfloat16()
    norm = (1 + 0.1 * torch.randn(320)).bfloat16()
    want = tensor.matmul_reference(norm_of(x, norm)) + bias.double()
    weight = tiles.prepare(tensor, dtype=torch.bfloat16, bias=bias)
    got = multiply(
        weight, x, poisoned(rows, 64), norm=Norm(norm, 1e-6), residual=residual, slices=slices
    )
    assert error(got, want + residual.double()) < 2e-2
    gate, up = want.chunk(2, -1)
    gated = tiles.prepare(tensor, dtype=torch.bfloat16, bias=bias, activation="silu")
    got = multiply(gated, x, poisoned(rows, 32), norm=Norm(norm, 1e-6), slices=slices)
    assert error(got, torch.nn.functional.silu(gate) * up) < 3e-2


def test_w8a8_gives_the_same_numbers_in_any_batch():
    """Whole sums are integers: a row comes out the same, bit for bit, alone and beside others."""
    tensor = make("w8a8", (24, 320), 2)
    weight, x = tiles.prepare(tensor, dtype=torch.bfloat16), torch.randn(33, 320).bfloat16()
    alone = gemv.multiply(weight, x[:1].contiguous())
    for rows, slices in ((2, 2), (33, 1)):
        assert torch.equal(
            gemm_small.multiply(weight, x[:rows].contiguous(), slices=slices)[:1], alone
        )
