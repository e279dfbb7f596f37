"""The linear for many rows against `matmul_reference` in float64; outputs are poisoned before each
launch.
"""

import dataclasses

import pytest
import torch
from gpu_linears import FORMATS, FUSED_KINDS, KINDS, TOLERANCE, linear_of, make, relative_error

from flyweight import gpu
from flyweight.kernels import tuned
from flyweight.kernels.linear import gemm, gemv, tiles
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.linear.gemm_shape import CLUSTERS, MAILBOX, WHOLE, Forced
from flyweight.tensors import quantize_float8_rows

pytestmark = pytest.mark.gpu


def poisoned(rows, width, dtype):
    return torch.full((rows, width), float("nan"), device="cuda", dtype=dtype)


SHAPES = {
    (1000, 576): (9, 33),
    (1000, 7392): (64,),
    (192, 1536): (16, 17, 65),
    (11008, 512): (40, 300),
}
FEW_SHAPES = {(1000, 576): (9,), (192, 1536): (65,)}


@pytest.mark.hopper
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.bfloat16) for kind in KINDS), *((kind, torch.float16) for kind in FORMATS)],
)
def test_rows_9_to_many_on_ragged_shapes(kind, dtype):
    for seed, (shape, counts) in enumerate(
        (SHAPES if kind in FORMATS and dtype == torch.bfloat16 else FEW_SHAPES).items()
    ):
        tensor = make(kind, shape, seed, dtype)
        prepared = tiles.prepare(tensor, dtype=dtype)
        for rows in counts:
            x = torch.randn(rows, shape[1], device="cuda").to(dtype)
            got = gemm.multiply(prepared, x, poisoned(rows, shape[0], dtype))
            error = relative_error(got, tensor.matmul_reference(x))
            assert error < TOLERANCE[dtype], f"{shape} × {rows}: {error}"


@pytest.mark.parametrize("kind", ["plain", "int4:64", "w8a8"])
def test_a_residual_is_added_by_cublas(kind):
    tensor, residual = make(kind, (320, 576), 4), torch.randn(70, 320, device="cuda").bfloat16()
    x = torch.randn(70, 576, device="cuda").bfloat16()
    linear, want = linear_of(tensor), tensor.matmul_reference(x) + residual.double()
    assert relative_error(linear.multiply(x, residual=residual, kernel="cublas"), want) < 1e-2
    assert (
        relative_error(linear.multiply(x, residual, residual=residual, kernel="cublas"), want)
        < 1e-2
    )
    assert relative_error(residual, want) < 1e-2, "in its place"


@pytest.mark.hopper
@pytest.mark.parametrize("kind", ["int4:64", "int8:128"])
def test_a_gated_weight_is_written_out_in_tiles(kind):
    tensor, norm = make(kind, (640, 576), 4), (1 + 0.1 * torch.randn(576, device="cuda")).bfloat16()
    x = torch.randn(300, 576, device="cuda").bfloat16()
    linear = linear_of(tensor, activation="silu")
    gate, up = tensor.matmul_reference(
        torch.nn.functional.rms_norm(x.double(), (576,), norm.double(), 1e-6)
    ).chunk(2, -1)
    for _ in range(2):
        got = linear.multiply(
            x, poisoned(300, 320, x.dtype), norm=Norm(norm, 1e-6), kernel="gemm_dequantized"
        )
        assert relative_error(got, torch.nn.functional.silu(gate) * up) < 2e-2
    assert linear.choose(8192, norm=True).kernel == "gemm_dequantized"


@pytest.mark.hopper
@pytest.mark.parametrize("kind", ["plain", "int4:128", "int8:64", "w8a8"])
@pytest.mark.parametrize(
    ("tokens", "warpgroups"),
    [
        tile[:2]
        for tile in tuned.of(gpu.GPUS["sm_90a"]).gemm.tiles["between"]
        if tile[0] not in (128, 256)
    ],
)
def test_tiles_of_any_number_of_tokens_give_the_same_bits(kind, tokens, warpgroups):
    tensor, residual = make(kind, (1040, 1536), 4), torch.randn(450, 1040, device="cuda").bfloat16()
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    x = torch.randn(450, 1536, device="cuda").bfloat16()
    cuts = [dict(tokens=256, warpgroups=2), dict(tokens=tokens, warpgroups=warpgroups)]
    want, got = (
        gemm.multiply(
            weight,
            x,
            poisoned(450, 1040, x.dtype),
            residual=residual,
            forced=Forced(split=WHOLE, **cut),
        )
        for cut in cuts
    )
    assert torch.equal(got, want)


@pytest.mark.hopper
@pytest.mark.parametrize("kind", ["plain", "int4:128", "int8:64", "w8a8", "fp8"])
@pytest.mark.parametrize(
    ("rows", "cut"),
    [
        (200, dict(split=CLUSTERS, tokens=128, cluster=2)),
        (200, dict(split=MAILBOX, tokens=128, cluster=3)),
        (500, dict(split=CLUSTERS, tokens=256, cluster=2)),
        (1100, dict(split=MAILBOX, tokens=128, cluster=2)),
        (5, dict(split=CLUSTERS, cluster=2, separate_exchange=True)),
        (30, dict(split=CLUSTERS, cluster=6, separate_exchange=True)),
        (60, dict(split=CLUSTERS, cluster=3, separate_exchange=True)),
    ],
)
def test_inputs_of_several_tiles_of_tokens_are_cut_into_slices(kind, rows, cut):
    tensor, residual = make(kind, (600, 1536), 4), torch.randn(rows, 600, device="cuda").bfloat16()
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    x = torch.randn(rows, 1536, device="cuda").bfloat16()
    want = tensor.matmul_reference(x) + residual.double()
    forced = Forced(warpgroups=2, **cut)
    found = [
        gemm.multiply(weight, x, poisoned(rows, 600, x.dtype), residual=residual, forced=forced)
        for _ in range(3)
    ]
    assert relative_error(found[0], want) < TOLERANCE[x.dtype] and all(
        torch.equal(one, found[0]) for one in found
    )


@pytest.mark.hopper
@pytest.mark.parametrize(
    ("kind", "rows", "cut"),
    [
        (kind, rows, cut)
        for kind in ("plain", "int4:128", "int8:64", "w8a8", "fp8")
        for rows, cut in (
            (20, dict(split=WHOLE)),
            (
                64,
                dict(
                    split=CLUSTERS, cluster=2, beside=False, separate_exchange=True, early_stages=2
                ),
            ),
            (40, dict(split=MAILBOX, cluster=3)),
            (100, dict(split=WHOLE, tokens=64)),
            (200, dict(split=WHOLE, tokens=128)),
        )
        if kind != "fp8" or rows <= 100
    ],
)
def test_two_teams_take_the_stages_of_a_tile_by_turns(kind, rows, cut):
    # 13 stages
    tensor, residual = make(kind, (600, 1664), 4), torch.randn(rows, 600, device="cuda").bfloat16()
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    x = torch.randn(rows, 1664, device="cuda").bfloat16()
    want = tensor.matmul_reference(x) + residual.double()
    forced = Forced(warpgroups=1, stage_blocks=2, teams=2, **cut)
    found = [
        gemm.multiply(weight, x, poisoned(rows, 600, x.dtype), residual=residual, forced=forced)
        for _ in range(3)
    ]
    assert relative_error(found[0], want) < TOLERANCE[x.dtype] and all(
        torch.equal(one, found[0]) for one in found
    )


@pytest.mark.hopper
@pytest.mark.parametrize("seed", [0, 1])  # with and without zero points
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("int4:128", torch.bfloat16), ("int4:128", torch.float16), ("int8:128", torch.bfloat16)],
)
@pytest.mark.parametrize(
    ("rows", "cut"),
    [
        (5, dict(split=WHOLE, warpgroups=3)),
        (16, dict(split=CLUSTERS, warpgroups=1, cluster=2, beside=False, teams=2)),
        (32, dict(split=MAILBOX, warpgroups=2, cluster=3)),
        (17, dict(split=WHOLE, warpgroups=1, teams=2)),
        (9, {}),
    ],
)
def test_few_rows_become_integers(kind, dtype, seed, rows, cut):
    tensor = make(kind, (1000, 3328), seed, dtype)
    residual = torch.randn(rows, 1000, device="cuda").to(dtype)
    x = torch.randn(rows, 3328, device="cuda").to(dtype)
    x[:, 7] *= 200  # one input of a group far from the others
    x[rows // 2, 128:256] = 0
    weight = tiles.prepare(tensor, dtype=dtype)
    want = tensor.matmul_reference(x) + residual.double()
    forced = Forced(int16_inputs=True, **cut)
    found = [
        gemm.multiply(weight, x, poisoned(rows, 1000, dtype), residual=residual, forced=forced)
        for _ in range(3)
    ]
    assert relative_error(found[0], want) < TOLERANCE[dtype] and all(
        torch.equal(one, found[0]) for one in found
    )


@pytest.mark.hopper
@pytest.mark.parametrize("kind", ["w8a8", "fp8", "int4:128", "int8:128", "plain"])
def test_a_row_with_a_nan_has_no_results_that_look_like_numbers(kind):
    linear = linear_of(make(kind, (4096, 4096), 1))
    for rows in (1, 2, 4, 8, 16, 32, 64, 300):
        x = torch.randn(rows, 4096, device="cuda").bfloat16()
        x[rows // 2, 1000] = float("nan")
        got = linear(x)
        assert got[rows // 2].isnan().all() and got.isnan().any(-1).sum() == 1, rows


@pytest.mark.hopper
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_rows_are_packed_alike_however_many_a_cta_takes(monkeypatch, rows):
    monkeypatch.setattr(
        gemm, "packing_for", lambda columns, padded, **options: gemm.Packing(rows, 12, 1)
    )
    for kind in ("w8a8", "fp8", "plain"):
        tensor, x = make(kind, (192, 9728), 1), torch.randn(700, 9728, device="cuda").bfloat16()
        got = gemm.multiply(tiles.prepare(tensor, dtype=torch.bfloat16), x)
        assert relative_error(got, tensor.matmul_reference(x)) < TOLERANCE[x.dtype]


@pytest.mark.hopper
@pytest.mark.parametrize("kind", FUSED_KINDS)
def test_norm_bias_residual_and_silu_are_fused(kind):
    dtype = torch.bfloat16
    tensor = make(kind, (512, 1536), 3, dtype)
    bias = torch.randn(512, device="cuda").to(dtype)
    norm = (1 + 0.1 * torch.randn(1536, device="cuda")).to(dtype)
    for rows in (12, 150, 2000):
        x, residual = (torch.randn(rows, width, device="cuda").to(dtype) for width in (1536, 512))
        normed = (
            x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6) * norm.float()
        ).to(dtype)
        want = tensor.matmul_reference(normed) + bias.double()
        linear = tiles.prepare(tensor, dtype=dtype, bias=bias)
        got = gemm.multiply(
            linear, x, poisoned(rows, 512, dtype), norm=Norm(norm, 1e-6), residual=residual
        )
        # the reference's norm is rounded
        bound = 4e-2 if kind.startswith("fp8") else 3e-2 if kind.endswith("w8a8") else 1e-2
        assert relative_error(got, want + residual.double()) < bound
        gate, up = want.chunk(2, -1)
        gated = tiles.prepare(tensor, dtype=dtype, bias=bias, activation="silu")
        got = gemm.multiply(gated, x, poisoned(rows, 256, dtype), norm=Norm(norm, 1e-6))
        assert relative_error(got, torch.nn.functional.silu(gate) * up) < bound


@pytest.mark.hopper
@pytest.mark.parametrize(
    ("kind", "rows", "choices"),
    [
        ("plain", 40, {}),
        ("w8a8", 40, {}),
        ("int4:128", 40, {}),
        ("int4:128", 16, {}),
        ("fp8", 40, {}),
        ("sparse-w8a8", 40, {}),
        ("sparse-int4:128", 40, {}),
        ("w8a8", 20, dict(separate_exchange=True)),
        ("fp8", 8, dict(separate_exchange=True)),
        ("int8:128", 16, dict(split=CLUSTERS, warpgroups=1, cluster=4, separate_exchange=True)),
    ],
)
def test_a_thousand_dependent_replays_agree_bit_for_bit(kind, rows, choices):
    tensor = make(kind, (1536, 1536), 1)
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    x = torch.randn(rows, 1536, device="cuda").bfloat16()
    norm = torch.ones(1536, device="cuda").bfloat16()
    buffers = [torch.empty_like(x) for _ in range(3)]

    def chain(pdl):
        source = x
        for target in buffers:
            target.fill_(float("nan"))
        for target in buffers:
            source = gemm.multiply(
                weight, source, target, norm=Norm(norm, 1e-6), pdl=pdl, forced=Forced(**choices)
            )

    chain(False)
    torch.cuda.synchronize()
    want = buffers[-1].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(True)
    for _ in range(1000):
        graph.replay()
        assert torch.equal(buffers[-1], want)


@pytest.mark.hopper
@pytest.mark.parametrize(
    ("kind", "dtype", "rows"),
    [
        ("plain", torch.bfloat16, 33),
        ("plain", torch.bfloat16, 2000),
        ("int4:128", torch.bfloat16, 64),
        ("int4:128", torch.bfloat16, 300),
        ("int4:32", torch.float16, 20),
        ("int8:64", torch.bfloat16, 70),
    ],
)
def test_x_packed_by_the_linear_before_gives_the_same_bits(kind, dtype, rows):
    gate_up = tiles.prepare(make(kind, (6144, 512), 1, dtype), dtype=dtype, activation="silu")
    down = tiles.prepare(make(kind, (512, 3072), 2, dtype), dtype=dtype)
    norm = torch.ones(512, device="cuda", dtype=dtype)
    hidden = torch.randn(rows, 512, device="cuda").to(dtype)

    def layers(x, ahead, pdl):
        # the next one's gate/up writes what this one's down has read
        for out in [poisoned(rows, 512, dtype) for _ in range(3)]:
            to = gemm.packed_input(down, rows, x.device, residual=True) if ahead else None
            gated = gemm.multiply(gate_up, x, norm=Norm(norm, 1e-6), to=to, pdl=pdl)
            x = gemm.multiply(down, to or gated, out, residual=x, pdl=pdl)
        return x

    want = layers(hidden, False, False)
    with torch.inference_mode():  # another test may have made this buffer in it
        gemm.packed_input(down, rows, hidden.device, residual=True).data.fill_(255)  # not a number
    assert torch.equal(layers(hidden, True, False), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layers(hidden, True, True)
    for _ in range(100):
        graph.replay()
        assert torch.equal(got, want)


@pytest.mark.hopper
@pytest.mark.parametrize("kind", ["int8:64", "int8:channel", "int4:64", "sparse-int8:64"])
def test_zero_points_are_taken_out_exactly(kind):
    """Inputs with a mean of 4 make much of a zero point that is off by one."""
    tensor, x = make(kind, (512, 1536), 0), (4 + torch.randn(40, 1536, device="cuda")).bfloat16()
    got = gemm.multiply(tiles.prepare(tensor, dtype=torch.bfloat16), x)
    assert relative_error(got, tensor.matmul_reference(x)) < 5e-3


@pytest.mark.hopper
def test_float8_sums_of_one_sign_keep_their_size():
    """The matrix units add up with 14 bits: on their own, as with torch's fast accumulation, they
    lose a fifth of such sums.
    """
    tensor = make("fp8", (512, 12288), 0)
    x = torch.randn(512, 12288, device="cuda").abs().bfloat16()
    tensor = dataclasses.replace(tensor, weight=tensor.weight.float().abs().to(tensor.weight.dtype))
    want = tensor.matmul_reference(x)
    for tokens in (128, 256):
        forced = Forced(tokens=tokens, warpgroups=2, split=WHOLE)
        got = gemm.multiply(tiles.prepare(tensor, dtype=torch.bfloat16), x, forced=forced)
        assert relative_error(got, want) < 4e-3
    codes, scale = quantize_float8_rows(x)
    fast = torch._scaled_mm(
        codes,
        tensor.weight.t(),
        scale_a=scale,
        scale_b=tensor.scales.float().view(1, -1),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    assert relative_error(fast, want) > 0.1


@pytest.mark.hopper
@pytest.mark.parametrize("kind", ["w8a8", "sparse-w8a8"])
def test_w8a8_is_the_same_function_at_every_number_of_rows(kind):
    tensor = make(kind, (1536, 2048), 2)
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    x = torch.randn(300, 2048, device="cuda").bfloat16()
    want = gemm.multiply(weight, x)
    for rows in (8, 1, 16, 33, 100):
        multiply = gemv.multiply if rows <= 8 else gemm.multiply
        got = multiply(weight, x[:rows].contiguous())
        assert torch.equal(got, want[:rows])
