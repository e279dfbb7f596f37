"""Linears of 5 to 16 rows through few.cu against `matmul_reference` in float64; outputs are
poisoned before each launch.
"""

from functools import partial

import pytest
import torch
from gpu_linears import TOLERANCE, linear_of, make, relative_error, replayed

from flyweight import gpu
from flyweight.kernels import tuned
from flyweight.kernels.linear import gemm_small, gemv, gemv_cluster, tiles
from flyweight.kernels.linear.fused import Norm

pytestmark = pytest.mark.gpu
# o and down of an 8-billion model; tiles that do not divide among clusters; 8, 9, 10 and 12 warps,
# the last of them in two turns
SHAPES = [(4096, 4096), (4096, 12288), (2128, 2048), (2128, 2304), (4880, 2560), (2560, 6144)]


@pytest.fixture(autouse=True)
def hopper():
    if not gpu.of(0).has_warpgroups:
        pytest.skip("few.cu needs Hopper's clusters")


def most_rows(kind):
    return 8 * max(
        ring.sets for ring in tuned.of(gpu.of(0)).formats[kind.split(":")[0]].cluster_rings
    )


def run(multiply, x, outputs, **options):
    """multiply(x, out, …) into poisoned rows."""
    out = torch.full((len(x) + 1, outputs), float("nan"), device="cuda", dtype=x.dtype)
    multiply(x, out[:-1], **options)
    assert out[-1].isnan().all(), "nothing is written beyond the rows"
    return out[:-1]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("kind", "seed"),
    [("int4:128", 0), ("int4:128", 1), ("int8:128", 0), ("int8:128", 1), ("w8a8", 0)],
)
def test_5_to_16_rows_with_bias_and_residual(kind, seed, dtype):
    """Odd seeds are symmetric."""
    for outputs, columns in SHAPES:
        if kind == "w8a8" and columns > 4096:
            continue
        most = most_rows(kind)
        tensor = make(kind, (outputs, columns), seed, dtype)
        bias = torch.randn(outputs, device="cuda").to(dtype)
        plain, biased = (tiles.prepare(tensor, dtype=dtype, bias=given) for given in (None, bias))
        x, residual = (
            torch.randn(most, width, device="cuda").to(dtype) for width in (columns, outputs)
        )
        want = tensor.matmul_reference(x)
        for rows in range(5, most + 1):
            got = run(partial(gemv_cluster.multiply, plain), x[:rows], outputs)
            assert relative_error(got, want[:rows]) < TOLERANCE[dtype], (outputs, columns, rows)
            if kind == "w8a8":
                other = run(partial(gemm_small.multiply, plain), x[:rows], outputs)
                assert torch.equal(got, other), "other bits than from batch.cu"
        for rows in range(5, most + 1, 4):
            got = run(
                partial(gemv_cluster.multiply, biased), x[:rows], outputs, residual=residual[:rows]
            )
            ended = want[:rows] + bias.double() + residual[:rows].double()
            assert relative_error(got, ended) < TOLERANCE[dtype], (outputs, columns, rows)


@pytest.mark.parametrize(
    ("kind", "shape", "activation"),
    [
        ("int4:128", (24576, 4096), "silu"),
        ("int4:128", (2144, 2560), "silu"),
        ("int4:128", (2128, 2048), None),
        ("int8:128", (4096, 4096), "silu"),
        ("int4:128", (37888, 3584), "silu"),
        ("int4:128", (9728, 896), "silu"),
        ("int4:128", (2144, 5120), "silu"),
        ("int4:128", (2128, 5504), None),
    ],
)
def test_a_norm_before_and_gate_up_after_are_fused(kind, shape, activation):
    """Over inputs of one turn and of several, an odd number of groups among them."""
    columns = shape[1]
    tensor = make(kind, shape, 0, torch.bfloat16)
    weight = tiles.prepare(tensor, dtype=torch.bfloat16, activation=activation)
    norm = Norm((1 + 0.1 * torch.randn(columns, device="cuda")).bfloat16(), 1e-6)
    sizes = torch.arange(1, 9, device="cuda")[:, None]  # rows of other sizes have other norms
    x = (sizes * torch.randn(8, columns, device="cuda")).bfloat16()
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    want = tensor.matmul_reference(normed * norm.weight.double())
    if activation:
        gate, up = want.chunk(2, -1)
        want = torch.nn.functional.silu(gate) * up
    for rows in range(3, 9):
        got = run(
            partial(gemv_cluster.multiply, weight), x[:rows], want.shape[1], norm=norm, beside=True
        )
        assert relative_error(got, want[:rows]) < 2 * TOLERANCE[torch.bfloat16], rows


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "shape",
    [
        (3584, 18944),
        (2560, 9728),
        (4096, 14336),
        (896, 4864),
        (896, 896),
        (3584, 3584),
        (4096, 11008),
    ],
)
def test_inputs_beside_another_kernel_need_not_come_out_even(shape, seed):
    """Of o and down of several models, with a residual and with zero points (seed 0) or without."""
    tensor = make("int4:128", shape, seed, torch.bfloat16)
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    x, residual = (
        torch.randn(8, width, device="cuda").bfloat16() for width in (shape[1], shape[0])
    )
    want = tensor.matmul_reference(x) + residual.double()
    for rows in range(3, 9):
        got = run(
            partial(gemv_cluster.multiply, weight),
            x[:rows],
            shape[0],
            residual=residual[:rows],
            beside=True,
        )
        assert relative_error(got, want[:rows]) < TOLERANCE[torch.bfloat16], rows
        again = run(
            partial(gemv_cluster.multiply, weight),
            x[:rows],
            shape[0],
            residual=residual[:rows],
            beside=True,
        )
        assert torch.equal(got, again), "the same bits every time"


@pytest.mark.parametrize(
    ("hidden", "inner"), [(3584, 18944), (2560, 9728), (896, 4864), (4096, 14336), (5120, 17408)]
)
def test_a_thousand_replays_of_layers_whose_kernels_leave_room_agree(hidden, inner):
    """o, gate/up with its norm, and down, two on an SM at a time."""
    shapes = ((hidden, hidden), (2 * inner, hidden), (hidden, inner))
    layers = [
        [
            tiles.prepare(
                make("int4:128", shape, i, torch.bfloat16),
                dtype=torch.bfloat16,
                activation="silu" if shape[0] == 2 * inner else None,
            )
            for shape in shapes
        ]
        for i in range(3)
    ]
    norm = Norm(torch.ones(hidden, device="cuda").bfloat16(), 1e-6)
    start = torch.randn(8, hidden, device="cuda").bfloat16()
    attended = torch.randn(8, hidden, device="cuda").bfloat16()
    gated = torch.empty(8, inner, device="cuda").bfloat16()

    def layer(weights, x, out, pdl):
        o, gate_up, down = weights
        gemv_cluster.multiply(o, attended, out, residual=x, pdl=pdl, beside=True)
        gemv_cluster.multiply(gate_up, out, gated, norm=norm, pdl=pdl, beside=True)
        return gemv_cluster.multiply(down, gated, out, residual=out, pdl=pdl, beside=True)

    results = replayed(layer, layers, start, replays=1000)
    assert (
        all(torch.equal(result, results[0]) for result in results) and results[0].isfinite().all()
    )


@pytest.mark.parametrize(
    ("kind", "shape", "kernel"),
    [
        ("int4:128", (4096, 4096), "gemv_cluster"),
        ("int4:128", (2560, 9728), "gemm_small"),
        ("int4:128", (1000, 4096), "gemm_small"),
        ("int4:64", (4096, 4096), "gemm_small"),
        ("int8:128", (4096, 4096), "gemv_cluster"),
        ("int8:64", (4096, 4096), "gemm_small"),
        ("w8a8", (4096, 4096), "gemv_cluster"),
        ("w8a8", (4096, 12288), "gemm_small"),
        ("w8a8-static", (4096, 4096), "gemm_small"),
        ("int4:128", (4096, 1536), "gemv"),
    ],
)
def test_linears_that_few_does_not_take_go_another_way(kind, shape, kernel):
    tensor = make(kind, shape, 1)
    linear, x = linear_of(tensor), torch.randn(8, shape[1], device="cuda").bfloat16()
    residual = torch.randn(8, shape[0], device="cuda").bfloat16()
    assert linear.choose(8, residual=True).kernel.removesuffix("_splitk") == kernel
    assert linear.choose(8, norm=True).kernel != "gemv_cluster"
    want = tensor.matmul_reference(x) + residual.double()
    assert relative_error(run(linear.multiply, x, shape[0], residual=residual), want) < 1e-2


@pytest.mark.parametrize(
    ("kind", "columns"),
    [("int4:128", 4096), ("int4:128", 6144), ("int8:128", 4096), ("w8a8", 4096)],
)
@pytest.mark.parametrize(
    ("rows", "others"), [(8, None), (8, "gemm_small"), (8, "gemv"), (16, None), (16, "gemm_small")]
)
def test_a_thousand_dependent_replays_agree_bit_for_bit(kind, columns, rows, others):
    """Behind itself, or by turns with kernels that have an SM each or leave room."""
    if rows > most_rows(kind):
        pytest.skip("more rows than it takes")
    weights = [
        tiles.prepare(make(kind, (columns, columns), i), dtype=torch.bfloat16) for i in range(6)
    ]
    norm = torch.ones(columns, device="cuda").bfloat16()
    start = torch.randn(rows, columns, device="cuda").bfloat16()
    between = {"gemm_small": gemm_small.multiply, "gemv": gemv.multiply}

    def product(step, x, out, pdl):
        i, weight = step
        if others and i % 2:
            return between[others](weight, x, out, norm=Norm(norm, 1e-6), pdl=pdl)
        return gemv_cluster.multiply(weight, x, out, residual=start if i % 3 else None, pdl=pdl)

    results = replayed(product, list(enumerate(weights)), start, replays=1000)
    assert (
        all(torch.equal(result, results[0]) for result in results) and results[0].isfinite().all()
    )


@pytest.mark.parametrize(
    ("kind", "rows", "shape"), [("int8:128", 16, (24576, 4096)), ("int4:128", 16, (24576, 4096))]
)
def test_teams_that_do_not_divide_the_stages_wait_for_each_other(kind, rows, shape):
    """A team that was ahead once took a slot for full in which the stage before, another team's,
    had not arrived yet.
    """
    weights = [tiles.prepare(make(kind, shape, i), dtype=torch.bfloat16) for i in range(2)]
    chosen = gemv_cluster.choose(weights[0].matrix, rows, gpu.of(0))
    assert chosen.stages % (chosen.warps // chosen.team), "the case that was wrong"
    x = torch.randn(rows, shape[1], device="cuda").bfloat16()
    want = [gemv_cluster.multiply(weight, x, pdl=False) for weight in weights]
    out = [torch.empty_like(one) for one in want]
    for _ in range(20):
        for one in out:
            one.fill_(float("nan"))
        for _ in range(25):
            for weight, one in zip(weights, out, strict=True):
                gemv_cluster.multiply(weight, x, one)
        assert all(torch.equal(*pair) for pair in zip(out, want, strict=True))
