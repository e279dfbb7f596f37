"""5 to 16 rows through few.cu as it stands, compiled for and run on the CPU."""

import itertools
import math

import host_cuda
import pytest
import torch
from test_kernels_on_the_host import error, host, linear_of, make  # noqa: F401 (fixtures)

from flyweight.gpu import GPUS
from flyweight.kernels import tuned
from flyweight.kernels.linear import gemm_small, gemv_cluster, tiles
from flyweight.kernels.linear.format import FORMATS
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.linear.tiles import Matrix

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")
H200 = GPUS["sm_90a"]


def multiply(weight, x, **options):
    out = torch.full((len(x) + 1, weight.width), float("nan")).to(x.dtype)
    gemv_cluster.multiply(weight, x, out[:-1], **options)
    assert out[-1].isnan().all(), "nothing is written beyond the rows"
    return out[:-1]


# Tiles that do not divide among clusters, fewer and more of them than slots, several turns of the
# inputs; of more than 8 rows teams of 8, 5, 9 (all warps, an odd number) and 6 warps, stages that
# do and do not divide among slots.
@pytest.mark.parametrize(
    ("kind", "rows", "shape"),
    [
        ("int4:128", 8, (112, 2048)),
        ("int4:128:symmetric", 7, (416, 4096)),
        ("int4:128", 5, (80, 6144)),
        ("int4:128", 6, (240, 2560)),
        ("int4:128", 8, (80, 12288)),
        ("int4:128", 16, (112, 4096)),
        ("int4:128:symmetric", 9, (416, 4096)),
        ("int4:128", 13, (240, 2560)),
        ("int4:128", 16, (80, 2304)),
        ("int4:128", 11, (80, 6144)),
        ("int4:128", 16, (80, 12288)),
        ("int8:128", 8, (112, 4096)),
        ("int8:128:symmetric", 5, (80, 12288)),
        ("int8:128", 16, (240, 2560)),
        ("int8:128", 12, (80, 12288)),
        ("w8a8", 8, (416, 4096)),
        ("w8a8", 6, (80, 2304)),
        ("w8a8", 7, (240, 2560)),
    ],
)
def test_rows_are_multiplied(kind, rows, shape):
    tensor = make(kind, shape, 1)
    weight, x = tiles.prepare(tensor, dtype=torch.bfloat16), torch.randn(rows, shape[1]).bfloat16()
    first = multiply(weight, x)
    assert error(first, tensor.matmul_reference(x)) < 4e-3
    assert torch.equal(first, multiply(weight, x)), "the same bits every time"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [6, 13])
def test_bias_and_residual_are_fused(dtype, rows):
    tensor, bias = make("int4:128", (96, 4096), 1), torch.randn(96).to(dtype)
    x, residual = torch.randn(rows, 4096).to(dtype), torch.randn(rows, 96).to(dtype)
    want = tensor.matmul_reference(x) + bias.double() + residual.double()
    linear = linear_of(tensor, dtype=dtype, bias=bias)
    assert linear.choose(6).kernel == "gemv_cluster"
    assert error(multiply(linear.weight, x, residual=residual), want) < 4e-3
    assert error(linear.multiply(x, residual=residual, kernel="gemv_cluster"), want) < 4e-3


# Beside another kernel inputs need not come out even. In groups: 7 and 19 of an odd number, in one
# turn and in two; 37 (18,944 inputs of a CTA), 38 and 43 in several turns, in the last of which a
# team has some, one or none; fewer tiles than clusters
@pytest.mark.parametrize(
    ("kind", "rows", "shape"),
    [
        ("int4:128", 8, (80, 896)),
        ("int4:128:symmetric", 4, (96, 19 * 128)),
        ("int4:128", 8, (16, 38 * 128)),
        ("int4:128", 4, (80, 9728)),
        ("int4:128:symmetric", 8, (48, 18944)),
        ("int4:128", 7, (32, 11008)),
        ("int8:128", 8, (80, 9728)),
        ("int4:128", 3, (80, 128)),
    ],
)
def test_inputs_beside_another_kernel_need_not_come_out_even(kind, rows, shape):
    tensor = make(kind, shape, 1)
    weight, x = tiles.prepare(tensor, dtype=torch.bfloat16), torch.randn(rows, shape[1]).bfloat16()
    residual = torch.randn(rows, shape[0]).bfloat16()
    assert gemv_cluster.choose(weight.matrix, rows, host_cuda.HOST) is None, (
        "its own ways have no idle warps"
    )
    first = multiply(weight, x, residual=residual, beside=True)
    assert error(first, tensor.matmul_reference(x) + residual.double()) < 4e-3
    assert torch.equal(first, multiply(weight, x, residual=residual, beside=True)), (
        "the same bits every time"
    )


@pytest.mark.parametrize(
    ("kind", "rows", "activation", "columns"),
    [
        ("int4:128", 8, "silu", 2048),
        ("int4:128:symmetric", 5, None, 2048),
        ("int8:128", 7, "silu", 2048),
        ("int4:128", 8, "silu", 896),
        ("int4:128", 4, "silu", 5120),
        ("int4:128", 8, None, 43 * 128),
    ],
)
def test_a_norm_before_and_gate_up_after_are_fused(kind, rows, activation, columns):
    """Over inputs that come in one turn and in several, and out even or not."""
    tensor, bias = make(kind, (112, columns), 1), torch.randn(112).bfloat16()
    x = (torch.arange(1, rows + 1)[:, None] * torch.randn(rows, columns)).bfloat16()
    norm = Norm((1 + 0.1 * torch.randn(columns)).bfloat16(), 1e-6)
    weight = tiles.prepare(tensor, dtype=torch.bfloat16, bias=bias, activation=activation)
    got = multiply(weight, x, norm=norm, beside=True)
    normed = (
        x.double()
        / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
        * norm.weight.double()
    )
    want = tensor.matmul_reference(normed) + bias.double()
    if activation:
        gate, up = want.chunk(2, -1)
        want = torch.nn.functional.silu(gate) * up
    assert error(got, want) < 6e-3


@pytest.mark.parametrize("kind", ["int4:128", "int8:128"])
def test_a_row_has_the_same_bits_in_either_set(kind):
    weight = tiles.prepare(make(kind, (112, 2048), 1), dtype=torch.bfloat16)
    x = torch.randn(8, 2048).bfloat16()
    first, second = multiply(weight, torch.cat([x, x])).split(8)
    assert torch.equal(first, second)


@pytest.mark.parametrize("rows", [5, 8])
def test_w8a8_has_the_same_bits_as_from_batch(rows):
    weight = tiles.prepare(make("w8a8", (112, 2048), 1), dtype=torch.bfloat16)
    x = torch.randn(rows, 2048).bfloat16()
    options = dict(residual=torch.randn(rows, 112).bfloat16())
    assert torch.equal(multiply(weight, x, **options), gemm_small.multiply(weight, x, **options))


@pytest.mark.parametrize("rows", [8, 16])
def test_the_residual_may_be_what_is_written(rows):
    tensor = make("int4:128", (112, 2048), 1)
    x = torch.randn(rows, 2048).bfloat16()
    hidden = torch.randn(rows, 112).bfloat16()
    want = tensor.matmul_reference(x) + hidden.double()
    assert (
        error(
            gemv_cluster.multiply(
                tiles.prepare(tensor, dtype=torch.bfloat16), x, hidden, residual=hidden
            ),
            want,
        )
        < 4e-3
    )


def test_linears_of_a_model_are_cut_such_that_two_kernels_fit():
    shapes = (
        (6144, 4096),
        (4096, 4096),
        (24576, 4096),
        (4096, 12288),
        (4096, 14336),
        (2560, 4096),
        (3584, 3584),
        (5120, 5120),
    )
    kinds = [name for name, one in FORMATS.items() if "gemv_cluster" in one.kernels]
    for kind, rows, (outputs, columns) in itertools.product(kinds, (8, 16), shapes):
        matrix = Matrix(FORMATS[kind], outputs, columns, 128)
        chosen = gemv_cluster.choose(matrix, rows, H200)
        if kind == "w8a8" and (rows > 8 or columns > 4096):
            assert chosen is None
            continue
        assert chosen is not None and chosen.warps <= gemv_cluster.MOST_WARPS
        assert chosen.late < chosen.stages <= gemv_cluster.MOST_STAGES
        assert chosen.stages * chosen.team >= (3 if kind == "int4" else 1.5) * chosen.warps
        ring = next(
            ring for ring in tuned.of(H200).formats[kind].cluster_rings if ring.sets == chosen.sets
        )
        assert columns <= 5120 or chosen.stages * chosen.team <= ring.deep * chosen.warps
    for outputs, columns in (
        (4096, 1536),
        (2560, 9728),
        (3584, 18944),
        (4096, 4224),
        (1024, 4096),
        (4104, 4096),
    ):
        assert gemv_cluster.choose(Matrix(FORMATS["int4"], outputs, columns, 128), 8, H200) is None


@pytest.mark.parametrize(
    "hidden, inner",
    [
        (4096, 12288),
        (4096, 14336),
        (3584, 18944),
        (2560, 9728),
        (896, 4864),
        (1536, 8960),
        (2048, 6144),
        (4096, 11008),
        (5120, 17408),
        (8192, 28672),
    ],
)
@pytest.mark.parametrize("name", ["sm_90a", "sm_90a:114", "sm_90a:78"])
def test_linears_of_any_model_fit_beside_each_other(hidden, inner, name):
    """o, gate/up and down: threads, registers and shared memory of two at a time."""
    device = GPUS[name]
    for rows, shape in itertools.product(
        (4, 8), ((hidden, hidden), (2 * inner, hidden), (hidden, inner))
    ):
        matrix = Matrix(FORMATS["int4"], *shape, 128)
        chosen = gemv_cluster.choose(matrix, rows, device, beside=True)
        assert (
            chosen is not None
            and chosen.warps % chosen.team == 0
            and 2 <= chosen.warps <= gemv_cluster.MOST_WARPS
        )
        assert 0 <= chosen.late < chosen.stages <= gemv_cluster.MOST_STAGES
        turns = math.ceil(math.ceil(shape[1] / 256) / chosen.warps)
        assert turns == math.ceil(shape[1] / 256 / gemv_cluster.MOST_WARPS), (
            "no more turns than registers ask for"
        )
        assert 256 * turns * chosen.warps - shape[1] <= 256 * max(turns, 2 * turns - 1), (
            "few idle warps"
        )


def test_what_does_not_fit_is_told():
    weight = tiles.prepare(make("int4:128", (96, 1536), 1), dtype=torch.bfloat16)
    with pytest.raises(
        ValueError,
        match=r"8 rows of 1536 inputs do not go through few\.cu: 1536 inputs and 96 outputs",
    ):
        gemv_cluster.multiply(weight, torch.randn(8, 1536).bfloat16())
    fitting = tiles.prepare(make("int4:128", (96, 2048), 1), dtype=torch.bfloat16)

    def reason(rows, **options):
        return gemv_cluster.unsupported_reason(fitting, rows, host_cuda.HOST, **options)

    assert reason(8) is None and reason(16) is None
    assert "up to 16 rows" in reason(17) and "norm" in reason(8, norm=True)
    assert reason(8, norm=True, beside=True) is None
    older = GPUS["sm_89"]
    assert "Hopper" in gemv_cluster.unsupported_reason(fitting, 8, older)
