"""gemm_mma.cu on whatever GPU there is, against `matmul_reference` in float64; outputs are poisoned
before each launch.
"""

import dataclasses

import pytest
import torch
from gpu_linears import (
    FORMATS,
    FUSED_KINDS,
    KINDS,
    TOLERANCE,
    linear_of,
    make,
    product_of,
    relative_error,
    replayed,
)

from flyweight import gpu
from flyweight.kernels.linear import format, gemm_mma, tiles
from flyweight.kernels.linear.experts.grouped import GroupedExperts
from flyweight.kernels.linear.experts.routing import Routing, tile_rows
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.linear.gemm_mma import LINE, WHOLE

pytestmark = pytest.mark.gpu


class Without(gpu.Gpu):
    """This GPU, as if it had no warpgroup products."""

    has_warpgroups = False


def poisoned(rows, width, dtype):
    return torch.full((rows, width), float("nan"), device="cuda", dtype=dtype)


def cut_for(weight, rows, **options):
    return gemm_mma.plan(weight.matrix, rows, gpu.of(0), **options)


SHAPES = {(1000, 576): (1, 33), (1000, 7392): (130,), (192, 1536): (17, 65), (11008, 512): (300,)}
FEW_SHAPES = {(1000, 576): (40,), (192, 1536): (65,)}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.bfloat16) for kind in KINDS), *((kind, torch.float16) for kind in FORMATS)],
)
def test_any_rows_on_ragged_shapes(kind, dtype):
    for seed, (shape, counts) in enumerate(
        (SHAPES if kind in FORMATS and dtype == torch.bfloat16 else FEW_SHAPES).items()
    ):
        tensor = make(kind, shape, seed, dtype)
        weight = tiles.prepare(tensor, dtype=dtype)
        for rows in counts:
            x = torch.randn(rows, shape[1], device="cuda").to(dtype)
            want = product_of(tensor, weight, x)
            for split in (WHOLE, LINE):
                cut = cut_for(weight, rows, split=split)
                got = gemm_mma.multiply(weight, x, poisoned(rows, shape[0], dtype), cut=cut)
                error = relative_error(got, want)
                assert error < TOLERANCE[dtype], f"{shape} × {rows}, {cut}: {error}"


@pytest.mark.parametrize("kind", FUSED_KINDS)
def test_a_norm_before_and_silu_or_a_residual_after(kind):
    tensor = make(kind, (640, 576), 4)
    norm = (1 + 0.1 * torch.randn(576, device="cuda")).bfloat16()
    x = torch.randn(300, 576, device="cuda").bfloat16()
    normed = torch.nn.functional.rms_norm(x.double(), (576,), norm.double(), 1e-6)
    gated = tiles.prepare(tensor, dtype=x.dtype, activation="silu")
    product = product_of(tensor, gated, normed)
    gate, up = product.chunk(2, -1)
    got = gemm_mma.multiply(gated, x, poisoned(300, 320, x.dtype), norm=Norm(norm, 1e-6))
    assert relative_error(got, torch.nn.functional.silu(gate) * up) < 3e-2
    residual = torch.randn(300, 640, device="cuda").bfloat16()
    want = product + residual.double()
    weight = tiles.prepare(tensor, dtype=x.dtype)
    got = gemm_mma.multiply(weight, x, residual, norm=Norm(norm, 1e-6), residual=residual)
    assert relative_error(got, want) < 2e-2, "in its place"


@pytest.mark.parametrize("kind", ["plain", "int4:128", "int8:64", "w8a8"])
def test_sums_of_several_thread_blocks_are_the_same_every_time(kind):
    weights = [
        tiles.prepare(make(kind, (1536, 1536), seed), dtype=torch.bfloat16) for seed in range(6)
    ]
    start = torch.randn(70, 1536, device="cuda").bfloat16()

    def multiply(weight, x, out, *, pdl):
        return gemm_mma.multiply(weight, x, out, pdl=pdl, cut=cut_for(weight, 70, split=LINE))

    first, *others = replayed(multiply, weights, start, replays=300)
    assert first.isfinite().all() and all(torch.equal(one, first) for one in others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float8_is_widened_where_no_matrix_unit_takes_it(monkeypatch, dtype):
    monkeypatch.setattr(tiles, "format_of", lambda tensor, dtype: format.named("fp8-wide"))
    tensor = make("fp8", (1000, 576), 2)
    weight = tiles.prepare(tensor, dtype=dtype)
    for rows in (1, 40, 300):
        x = torch.randn(rows, 576, device="cuda").to(dtype)
        want = x.double() @ tensor.dequantize(torch.float64).T
        assert (
            relative_error(gemm_mma.multiply(weight, x, poisoned(rows, 1000, dtype)), want)
            < TOLERANCE[dtype]
        )


@pytest.mark.parametrize("kind", ["plain", "int4:128", "w8a8"])
@pytest.mark.parametrize("tokens", [12, 100, 700])
def test_rows_sorted_by_expert(monkeypatch, kind, tokens):
    """The route and both products of GroupedExperts as on a GPU without warpgroup products."""
    count, chosen, hidden, width = 8, 2, 256, 128
    without = Without(*dataclasses.astuple(gpu.of(0)))
    tensors = [
        (make(kind, (2 * width, hidden), i), make(kind, (hidden, width), i)) for i in range(count)
    ]
    router = torch.randn(count, hidden, device="cuda") * hidden**-0.5
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "of", lambda device: without)
        layer = GroupedExperts.make(
            [linear_of(first, activation="silu") for first, _ in tensors],
            [linear_of(second) for _, second in tensors],
            router=router,
            routing=Routing(count, chosen, normalize=True),
        )
        assert isinstance(layer, GroupedExperts), layer
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        norm = (1 + 0.1 * torch.randn(hidden, device="cuda")).bfloat16()
        route = layer.route(x, norm=Norm(norm, 1e-6))
        assert route.tile == tile_rows(tokens * chosen, count)
        y = layer.multiply(x, route, norm=Norm(norm, 1e-6))
    normed = torch.nn.functional.rms_norm(x.float(), (hidden,), norm.float(), 1e-6).bfloat16()
    expert_of = route.expert_of[route.place.long() // route.tile].long()
    for expert in range(count):
        token, choice = (expert_of == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        gate, up = tensors[expert][0].matmul_reference(normed[token]).chunk(2, -1)
        want = tensors[expert][1].matmul_reference((torch.nn.functional.silu(gate) * up).bfloat16())
        assert relative_error(y[route.place[token, choice].long()], want) < 4e-2
