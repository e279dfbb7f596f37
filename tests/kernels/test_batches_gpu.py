"""Linears of 2 to 65 rows against `matmul_reference` in float64; outputs are poisoned before each
launch.
"""

import functools

import pytest
import torch
from gpu_linears import (
    TOLERANCE,
    expected,
    linear_of,
    mailboxes_are_empty,
    make,
    relative_error,
    replayed,
)

from flyweight import gpu
from flyweight.kernels.linear import gemm_small, gemv_splitk, tiles
from flyweight.kernels.linear.fused import Norm

pytestmark = pytest.mark.gpu
FORMATS = ["plain", "w8a8", "int4:128", "int8:128", "sparse-int8:64", "sparse-int4:128"]
OTHERS = [
    "w8a8-static",
    "int4:64",
    "int4:32",
    "int4:channel",
    "int8:32",
    "sparse-w8a8",
    "sparse-int4:32",
]
# and the slices of 50 rows: a third of the SMs would have more of the 688 tiles than their warps
# hold, a fourth goes twice
SHAPES = {(1000, 7392): 3, (192, 1536): 3, (11008, 576): 4}


def poisoned(rows, width, dtype=torch.bfloat16):
    return torch.full((rows, width), float("nan"), device="cuda", dtype=dtype)


def may_run(kernel, weight, rows, slices):
    """The cuts are made for Hopper, whose SMs hold them all; other GPUs are never asked for what
    does not fit.
    """
    here = gpu.of(0)
    return here.has_warpgroups or kernel.choose(weight.matrix, rows, here, slices) is not None


@pytest.mark.parametrize("kind", ["plain", "w8a8", "int4:64", "fp8", "sparse-int4:64"])
def test_every_number_of_rows_from_1_to_65(kind):
    tensor = make(kind, (1000, 576), 1)
    linear = linear_of(tensor)
    x = torch.randn(65, 576, device="cuda").bfloat16()
    want = expected(tensor, x)
    for rows in range(1, 66):
        assert (
            relative_error(linear.multiply(x[:rows], poisoned(rows, 1000)), want[:rows]) < 1e-2
        ), rows


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.bfloat16) for kind in FORMATS + OTHERS),
        *((kind, torch.float16) for kind in FORMATS[:4]),
    ],
)
def test_slices_and_steps_of_ragged_shapes(kind, dtype):
    # the others differ in sizes of groups or in a scale
    thorough = kind in FORMATS and dtype == torch.bfloat16
    for seed, shape in enumerate(SHAPES if thorough else [*SHAPES][:1]):
        tensor = make(kind, shape, seed, dtype)
        weight = tiles.prepare(tensor, dtype=dtype)
        x = torch.randn(64, shape[1], device="cuda").to(dtype)
        want = tensor.matmul_reference(x)
        cuts = (
            ((9, None), (7, 1), (32, 2), (64, 1))
            if thorough and seed == 0
            else ((50, SHAPES[shape]),)
        )
        ways = [(gemm_small, rows, slices) for rows, slices in cuts]
        if "gemv_splitk" in weight.format.kernels:
            cuts = ((3, None), (8, 2), (16, 5)) if thorough and seed == 0 else ((8, 3),)
            ways += [(gemv_splitk, rows, slices) for rows, slices in cuts]
        for kernel, rows, slices in ways:
            if not may_run(kernel, weight, rows, slices):
                continue
            got = kernel.multiply(weight, x[:rows], poisoned(rows, shape[0], dtype), slices=slices)
            assert relative_error(got, want[:rows]) < TOLERANCE[dtype], (shape, rows, slices)
    assert mailboxes_are_empty(), "every word that was left was taken"


@pytest.mark.parametrize("kind", ["plain", "w8a8", "int4:128", "int8:64"])
def test_norm_bias_residual_and_silu_are_fused(kind):
    tensor = make(kind, (512, 1536), 3)
    bias = torch.randn(512, device="cuda").bfloat16()
    norm = (1 + 0.1 * torch.randn(1536, device="cuda")).bfloat16()
    linear, gated = (
        tiles.prepare(tensor, dtype=torch.bfloat16, bias=bias, activation=gate)
        for gate in (None, "silu")
    )
    bound = 3e-2 if kind == "w8a8" else 1e-2  # the reference's norm is rounded
    ways = [(gemm_small, 12), (gemm_small, 33)] + [(gemv_splitk, 6)] * (kind != "w8a8")
    for kernel, rows in ways:
        x, residual = (torch.randn(rows, width, device="cuda").bfloat16() for width in (1536, 512))
        normed = (
            x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6) * norm.float()
        ).bfloat16()
        want = tensor.matmul_reference(normed) + bias.double()
        gate, up = want.chunk(2, -1)
        for slices in (None,) if rows == 12 else (2,):
            if not may_run(kernel, linear, rows, slices):
                continue
            got = kernel.multiply(
                linear,
                x,
                poisoned(rows, 512),
                norm=Norm(norm, 1e-6),
                residual=residual,
                slices=slices,
            )
            assert relative_error(got, want + residual.double()) < bound
            got = kernel.multiply(
                gated, x, poisoned(rows, 256), norm=Norm(norm, 1e-6), slices=slices
            )
            assert relative_error(got, torch.nn.functional.silu(gate) * up) < bound


@pytest.mark.parametrize("multiply, rows", [(gemv_splitk.multiply, 8), (gemm_small.multiply, 32)])
def test_a_thousand_dependent_replays_agree_bit_for_bit(multiply, rows):
    weights = [
        tiles.prepare(make("int4:128", (1024, 1024), i), dtype=torch.bfloat16) for i in range(6)
    ]
    norm = torch.ones(1024, device="cuda").bfloat16()
    start = torch.randn(rows, 1024, device="cuda").bfloat16()
    product = functools.partial(multiply, norm=Norm(norm, 1e-6), slices=2)
    results = replayed(product, weights, start, replays=1000)
    assert (
        all(torch.equal(result, results[0]) for result in results) and results[0].isfinite().all()
    )


@pytest.mark.parametrize("end", ["store", "residual", "silu"])
def test_w8a8_gives_the_same_numbers_in_any_batch(end):
    weight = linear_of(make("w8a8", (1008, 1536), 2), activation="silu" if end == "silu" else None)
    x = torch.randn(65, 1536, device="cuda").bfloat16()
    residual = torch.randn(65, 1008, device="cuda").bfloat16()

    def first(rows):
        return weight.multiply(
            x[:rows], **({"residual": residual[:rows]} if end == "residual" else {})
        )[:1]

    for rows in (2, 4, 7, 8, 16, 31, 64, 65):
        assert torch.equal(first(rows), first(1)), rows
