"""The CUDA sources themselves, compiled for and run on the CPU: every index and every barrier of a
kernel, without a GPU.
"""

import dataclasses

import host_cuda
import pytest
import torch
from tuning import retune

from flyweight import gpu
from flyweight.kernels import dependent_launch, reference, residual, workspace
from flyweight.kernels.linear import format, gemm, gemv, gemv_plan, tiles
from flyweight.kernels.linear.experts import many
from flyweight.kernels.linear.experts.chosen import ChosenExperts
from flyweight.kernels.linear.experts.few import sum_plan
from flyweight.kernels.linear.experts.grouped import GroupedExperts
from flyweight.kernels.linear.experts.router import DeviceRouter
from flyweight.kernels.linear.experts.routing import Routing
from flyweight.kernels.linear.experts.stacked import joined_parts, stack
from flyweight.kernels.linear.experts.words import empty_words
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.linear.gemm_shape import CLUSTERS, LINE, MAILBOX, WHOLE, Forced
from flyweight.kernels.linear.permuted import PermutedLinear, sort_columns
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.kernels.linear.untile import untile
from flyweight.models.moe import Router, routing_of
from flyweight.models.plan import RouterPlan
from flyweight.tensors import Float4, Float8, Int8Channel, IntGroup, Plain, Sparse24

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")


@pytest.fixture(autouse=True)
def host(monkeypatch, folder):
    torch.manual_seed(0)
    host_cuda.pretend(monkeypatch, folder)


OLDER = gpu.Gpu(8, 0, 5, 166912, 167936)  # before Hopper: each warp copies its own weights


def make(kind, shape, seed=0):
    grouped = dict(inner=IntGroup) if kind.startswith("sparse") else {}
    base = Sparse24 if kind.startswith("sparse") else IntGroup
    if kind == "fp8":
        tensor = Float8.random(shape, seed)
        return dataclasses.replace(tensor, scales=tensor.scales[:1]) if seed % 2 else tensor
    if kind == "fp8-static":
        return dataclasses.replace(
            make("fp8", shape, seed), input_scale=torch.tensor([3 / 448]), activation="static"
        )
    if kind == "fp8-block":  # kernels leave x in 16 bits
        return dataclasses.replace(Float8.random(shape, seed, block=128), activation="none")
    if kind in ("plain", "w8a8", "mxfp4", "sparse-w8a8"):
        return {"plain": Plain, "w8a8": Int8Channel, "mxfp4": Float4, "sparse-w8a8": Sparse24}[
            kind
        ].random(shape, seed)
    bits, group, *zeros = kind.removeprefix("sparse-").split(":")
    options = dict(bits=int(bits[3:]), group_size=int(group), symmetric=bool(zeros), **grouped)
    return base.random(shape, seed, dtype=torch.bfloat16, **options)


def linear_of(tensor, *, dtype=torch.bfloat16, **options):
    return TiledLinear(tensor, dtype=dtype, ops=reference, **options)


def mailboxes_are_empty():
    """Whether every word that was left has been taken."""
    buffers = workspace.current(torch.device("cpu"))._buffers
    return all((box == -1).all() for (name, _), box in buffers.items() if name == "mailbox")


def error(got, want):
    assert got.isfinite().all(), "an output was not written"
    return ((got.double() - want).norm() / want.norm()).item()


# Ragged ends, several tiles a CTA, stages that do not divide among the warps; odd seeds of fp8 have
# one scale for the tensor.
CASES = [
    ("plain", 2, (40, 200)),
    ("w8a8", 8, (40, 320)),
    ("int4:128", 1, (136, 640)),
    ("int4:32", 8, (40, 320)),
    ("int8:64", 1, (136, 576)),
    ("fp8", 1, (40, 200)),
    ("fp8-static", 2, (136, 576)),
    ("sparse-w8a8", 1, (40, 200)),
    ("sparse-int8:64", 2, (40, 320)),
    ("sparse-int4:32", 1, (136, 576)),
    ("sparse-int8:64:symmetric", 1, (40, 320)),
    ("fp8-block", 1, (136, 576)),
    ("fp8-block", 8, (136, 320)),
    ("mxfp4", 8, (40, 352)),
    ("sparse-int4:128:symmetric", 8, (40, 640)),
    ("sparse-int4:32:symmetric", 2, (40, 320)),
]


@pytest.mark.parametrize(("kind", "rows", "shape"), CASES)
def test_few_rows_are_multiplied(kind, rows, shape):
    tensor = make(kind, shape, 1)
    x = torch.randn(rows, shape[1]).bfloat16()
    out = torch.full((rows, shape[0]), float("nan")).bfloat16()
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    assert error(gemv.multiply(weight, x, out), tensor.matmul_reference(x)) < 1e-2


@pytest.mark.parametrize(("kind", "rows", "shape"), [CASES[i] for i in (0, 1, 3, 9)])
def test_few_rows_are_multiplied_with_weights_that_each_warp_copies(kind, rows, shape, monkeypatch):
    monkeypatch.setattr(gpu, "of", lambda _: OLDER)
    test_few_rows_are_multiplied(kind, rows, shape)


@pytest.mark.parametrize(
    ("kind", "columns", "warps"),
    [("int4:128", 2560, 5), ("w8a8", 2560, 7), ("int4:128", 64, 4)],
)
def test_warps_that_would_have_no_share_of_a_stage_are_left_out(kind, columns, warps, monkeypatch):
    monkeypatch.setattr(gpu, "of", lambda _: OLDER)
    tensor, x = make(kind, (40, columns), 1), torch.randn(1, columns).bfloat16()
    norm = (1 + 0.1 * torch.randn(columns)).bfloat16()
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    assert gemv_plan.fitting_plan(weight.matrix, 1, OLDER, tiles=1).warps == warps
    assert (
        error(
            gemv.multiply(weight, x, norm=Norm(norm, 1e-6)),
            tensor.matmul_reference(norm_of(x, norm)),
        )
        < 1e-2
    )


# Shares of 4 blocks: 5, 7, 9, 10, 11 and 16 of them, with a ragged last one, and of one block.
@pytest.mark.parametrize(
    ("kind", "columns", "warps"),
    [
        ("int4:128", 1280, 5),
        ("int4:64", 1792, 7),
        ("int4:128", 2304, 9),
        ("int4:32", 2560, 10),
        ("int4:128", 2752, 6),
        ("int4:128", 4096, 8),
        ("int4:4096", 4096, 8),
    ],
)
def test_one_row_of_4_bits_is_multiplied_from_registers_before_hopper(
    kind, columns, warps, monkeypatch
):
    """More tiles than a CTA has places for sums, so that both places are taken by turns."""
    monkeypatch.setattr(gpu, "of", lambda _: OLDER)
    tensor, x = make(kind, (1720, columns), 1), torch.randn(1, columns).bfloat16()
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    chosen = gemv_plan.fitting_plan(weight.matrix, 1, OLDER, tiles=23, lone_row=True)
    assert (chosen.held_inputs, chosen.warps) == (True, warps)
    assert error(gemv.multiply(weight, x), tensor.matmul_reference(x)) < 1e-2


@pytest.mark.parametrize(
    ("kind", "columns", "rows"), [("int4:128", 12288, 1), ("int4:128", 640, 2)]
)
def test_inputs_stay_in_shared_memory_where_registers_end(kind, columns, rows):
    weight = tiles.prepare(make(kind, (40, columns), 1), dtype=torch.bfloat16)
    for device, lone in (OLDER, rows == 1), (host_cuda.HOST, True):
        chosen = gemv_plan.fitting_plan(weight.matrix, rows, device, tiles=3, lone_row=lone)
        assert not chosen.held_inputs


@pytest.mark.parametrize("held", [1, 9])
def test_a_ring_whose_last_stages_wait_for_the_inputs_gives_the_same(held, monkeypatch):
    weight = tiles.prepare(make("int4:128", (136, 640), 1), dtype=torch.bfloat16)
    x = torch.randn(1, 640).bfloat16()
    want = gemv.multiply(weight, x)
    retune(monkeypatch, formats={"int4": dict(gemv_late_stages=held)})
    assert torch.equal(gemv.multiply(weight, x), want)


# 5 CTAs: of 9 tiles and 18 stages or more, so that most begin and end inside of tiles.
@pytest.mark.parametrize(
    ("kind", "rows", "activation", "device"),
    [
        ("int4:128", 1, None, host_cuda.HOST),
        ("int4:128", 1, None, OLDER),
        ("w8a8", 2, "silu", OLDER),
        ("plain", 1, "silu", OLDER),
    ],
)
def test_ctas_that_share_tiles_hand_their_sums_over(kind, rows, activation, device, monkeypatch):
    tensor, x = make(kind, (144, 1280), 1), torch.randn(rows, 1280).bfloat16()
    norm, bias = Norm((1 + 0.1 * torch.randn(1280)).bfloat16(), 1e-6), torch.randn(144).bfloat16()
    weight = tiles.prepare(tensor, dtype=torch.bfloat16, bias=bias, activation=activation)
    whole = gemv.multiply(weight, x, norm=norm)
    retune(monkeypatch, gemv=dict(balance_margin=1.0, stage_bytes=2048, slots=2))
    monkeypatch.setattr(gpu, "of", lambda _: device)
    gemv_plan.fitting_plan.cache_clear()
    assert gemv.is_balanced(weight.matrix, device)
    found = gemv.multiply(weight, x, norm=norm)
    gemv_plan.fitting_plan.cache_clear()
    assert error(found, whole.double()) < 4e-3 and mailboxes_are_empty()


def test_norm_bias_and_silu_of_a_gated_float8_weight_are_fused():
    tensor = make("fp8", (96, 192), 1)
    bias = torch.randn(96).bfloat16()
    norm = (1 + 0.1 * torch.randn(192)).bfloat16()
    x = torch.randn(2, 192).bfloat16()
    gate, up = (tensor.matmul_reference(norm_of(x, norm)) + bias.double()).chunk(2, -1)
    weight = tiles.prepare(tensor, dtype=torch.bfloat16, bias=bias, activation="silu")
    got = gemv.multiply(weight, x, norm=Norm(norm, 1e-6))
    assert error(got, torch.nn.functional.silu(gate) * up) < 4e-2


@pytest.mark.parametrize(("kind", "rows"), [("int4:128", 1), ("plain", 2)])
def test_a_norm_before_and_a_residual_after_are_fused_together(kind, rows):
    """As linears with adapters have it: what these add comes as a residual."""
    tensor = make(kind, (72, 256), 1)
    x = torch.randn(rows, 256).bfloat16()
    residual = torch.randn(rows, 72).bfloat16()
    norm = (1 + 0.1 * torch.randn(256)).bfloat16()
    got = linear_of(tensor).project(x, norm=Norm(norm, 1e-6), residual=residual)
    assert error(got, tensor.matmul_reference(norm_of(x, norm)) + residual.double()) < 1e-2


@pytest.mark.parametrize(("rows", "normed"), [(1, True), (2, False)])
def test_groups_of_scattered_inputs_are_sorted(rows, normed):
    """As GPTQ's act-order leaves them: codes stay codes, and x comes in their order."""
    tensor = IntGroup.random((72, 640), 1, group_size=64, act_order=True)
    found, order = sort_columns(tensor)
    torch.testing.assert_close(found.dequantize(), tensor.dequantize()[:, order])
    linear = PermutedLinear(found, order, dtype=torch.bfloat16, ops=reference)
    x, residual = torch.randn(rows, 640).bfloat16(), torch.randn(rows, 72).bfloat16()
    norm = Norm((1 + 0.1 * torch.randn(640)).bfloat16(), 1e-6) if normed else None
    want = tensor.matmul_reference(norm_of(x, norm.weight) if norm else x) + residual.double()
    assert error(linear.project(x, norm=norm, residual=residual), want) < 1e-2


@pytest.mark.parametrize("rows", [1, 20])
def test_gelu_is_fused_too(rows):
    tensor, bias = make("int4:64", (96, 192), 1), 4 * torch.randn(96).bfloat16()
    x = torch.randn(rows, 192).bfloat16()
    weight = tiles.prepare(tensor, dtype=torch.bfloat16, bias=bias, activation="gelu_tanh")
    want = reference.gate(tensor.matmul_reference(x) + bias.double(), "gelu_tanh")
    got = gemv.multiply(weight, x) if rows == 1 else gemm.multiply(weight, x)
    assert error(got, want) < 1e-2


@pytest.mark.parametrize(
    ("kind", "rows", "choices"),
    [
        ("w8a8", 2, None),
        ("int4:128", 1, None),
        ("fp8", 8, None),
        ("w8a8", 20, {}),
        ("fp8", 9, {}),
        ("int4:128", 16, dict(int16_inputs=True)),
        ("int8:64", 20, {}),
    ],
)
def test_a_row_with_a_nan_has_no_results_that_look_like_numbers(kind, rows, choices):
    weight = tiles.prepare(make(kind, (72, 512)), dtype=torch.bfloat16)
    x = torch.randn(rows, 512).bfloat16()
    x[rows // 2, 200] = float("nan")
    got = (
        gemv.multiply(weight, x)
        if choices is None
        else gemm.multiply(weight, x, forced=Forced(**choices))
    )
    assert got[rows // 2].isnan().all() and got.isnan().any(-1).sum() == 1


# Clusters, large ones too; a line of stages that CTAs share; whole tiles, written through shared
# memory.
MANY = [
    ("plain", 20, (136, 192), {}),
    ("fp8-block", 20, (136, 256), {}),
    ("mxfp4", 70, (144, 160), dict(split=WHOLE, tokens=64)),
    ("int8:64", 20, (128, 192), dict(split=LINE)),
    ("int8:64:symmetric", 20, (128, 192), dict(split=LINE)),
    ("int8:192:symmetric", 40, (128, 192), {}),
    ("plain", 50, (200, 512), dict(split=CLUSTERS, warpgroups=3, cluster=4)),
    ("int4:64", 30, (256, 1024), dict(split=CLUSTERS, warpgroups=4, cluster=8)),
    ("w8a8", 60, (240, 1024), dict(split=CLUSTERS, warpgroups=4, cluster=8)),
    ("int8:128:symmetric", 60, (200, 1024), dict(split=MAILBOX, warpgroups=2, cluster=4)),
    ("w8a8", 20, (240, 1024), dict(split=MAILBOX, warpgroups=2, cluster=3)),
    # tiles of 16 rows, without work
    ("w8a8", 5, (136, 512), dict(split=CLUSTERS, tokens=8, warpgroups=1, cluster=2)),
    *(
        (
            "w8a8",
            20,
            (136, 1024),
            dict(split=CLUSTERS, warpgroups=2, cluster=3, separate_exchange=separate),
        )
        for separate in (False, True)
    ),
    ("fp8", 60, (136, 1024), dict(split=CLUSTERS, warpgroups=1, cluster=2, separate_exchange=True)),
    # half own columns
    (
        "int8:64",
        30,
        (72, 2048),
        dict(split=CLUSTERS, warpgroups=1, cluster=8, separate_exchange=True),
    ),
    ("int4:64", 200, (200, 512), dict(split=CLUSTERS, tokens=128, warpgroups=3, cluster=2)),
    (
        "int8:128:symmetric",
        150,
        (144, 768),
        dict(split=MAILBOX, tokens=128, warpgroups=2, cluster=3),
    ),
    ("w8a8", 260, (136, 512), dict(split=MAILBOX, tokens=256, warpgroups=2, cluster=2)),
    ("w8a8", 70, (144, 320), dict(split=WHOLE, tokens=64, warpgroups=1)),
    ("fp8", 20, (64, 192), dict(split=LINE)),
    ("fp8", 130, (144, 448), dict(split=WHOLE, tokens=128, warpgroups=2)),
    ("plain", 200, (136, 192), dict(split=LINE, tokens=160, warpgroups=2)),
    ("int4:64", 200, (144, 192), dict(split=WHOLE, tokens=192, warpgroups=2)),
    ("w8a8", 230, (144, 320), dict(split=WHOLE, tokens=224, warpgroups=2)),
    # 9 stages
    ("int4:64", 20, (72, 1152), dict(split=WHOLE, warpgroups=1, stage_blocks=2, teams=2)),
    (
        "plain",
        50,
        (72, 1024),
        dict(split=CLUSTERS, cluster=2, warpgroups=1, beside=False, stage_blocks=2, teams=2),
    ),
    ("w8a8", 60, (72, 1024), dict(split=MAILBOX, cluster=3, warpgroups=1, stage_blocks=2, teams=2)),
    (
        "fp8",
        60,
        (72, 1152),
        dict(split=WHOLE, warpgroups=1, stage_blocks=2, teams=2, early_stages=1),
    ),
    (
        "fp8",
        60,
        (72, 1536),
        dict(split=CLUSTERS, cluster=2, warpgroups=1, beside=False, stage_blocks=2, teams=2),
    ),
    (
        "int8:128:symmetric",
        100,
        (80, 768),
        dict(split=WHOLE, tokens=128, warpgroups=1, stage_blocks=2, teams=2),
    ),
    ("sparse-w8a8", 20, (72, 192), dict(split=LINE)),
    ("sparse-int4:32", 20, (72, 192), dict(split=LINE)),
]


@pytest.mark.parametrize(("kind", "rows", "shape", "choices"), MANY)
def test_many_rows_are_multiplied_and_added_to_the_residual(kind, rows, shape, choices):
    tensor = make(kind, shape, 1)
    x = torch.randn(rows, shape[1]).bfloat16()
    residual = torch.randn(rows, shape[0]).bfloat16()
    out = torch.full((rows, shape[0]), float("nan")).bfloat16()
    got = gemm.multiply(
        tiles.prepare(tensor, dtype=torch.bfloat16),
        x,
        out,
        residual=residual,
        forced=Forced(**choices),
    )
    assert error(got, tensor.matmul_reference(x) + residual.double()) < 5e-3


# x as integers: tiles that are ragged, several stages, clusters, mail, two teams, more threads than
# inputs
PLANES = [
    ("int4:128", 20, (136, 512), dict(split=WHOLE, warpgroups=3)),
    ("int4:128:symmetric", 9, (72, 1152), dict(split=WHOLE, warpgroups=1, stage_blocks=2, teams=2)),
    (
        "int4:128",
        16,
        (200, 1024),
        dict(split=CLUSTERS, warpgroups=1, cluster=2, beside=False, teams=2),
    ),
    ("int8:128", 32, (200, 1024), dict(split=MAILBOX, warpgroups=2, cluster=3)),
    ("int8:128:symmetric", 5, (64, 640), dict(split=WHOLE, warpgroups=1)),
]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("kind", "rows", "shape", "choices"), PLANES)
def test_few_rows_become_integers(kind, rows, shape, choices, normed):
    tensor = make(kind, shape, 1)
    x = torch.randn(rows, shape[1]).bfloat16()
    residual = torch.randn(rows, shape[0]).bfloat16()
    x[:, 7] *= 200  # one input of a group far from the others
    x[rows // 2, 128:256] = 0
    norm = (1 + 0.1 * torch.randn(shape[1])).bfloat16()
    out = torch.full((rows, shape[0]), float("nan")).bfloat16()
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    got = gemm.multiply(
        weight,
        x,
        out,
        norm=Norm(norm, 1e-6) if normed else None,
        residual=residual,
        forced=Forced(int16_inputs=True, **choices),
    )
    assert (
        error(got, tensor.matmul_reference(norm_of(x, norm) if normed else x) + residual.double())
        < 5e-3
    )


@pytest.mark.parametrize(
    ("kind", "tokens", "warpgroups"),
    [("int4:64", 1, 2), ("w8a8", 2, 2), ("plain", 4, 2), ("int4:64", 12, 2), ("int4:64", 12, 4)],
)
def test_tokens_go_to_their_experts_and_come_back_added_up(monkeypatch, kind, tokens, warpgroups):
    monkeypatch.setitem(many.WARPGROUPS, 16, warpgroups)
    assert error_of_experts(kind, tokens) < 8e-2


def error_of_experts(kind, tokens):
    count, chosen, hidden, width = 6, 2, 192, 64
    tensors = [
        (make(kind, (2 * width, hidden), i), make(kind, (hidden, width), i)) for i in range(count)
    ]
    gate_up = stack([linear_of(first, activation="silu") for first, _ in tensors])
    down = stack([linear_of(second) for _, second in tensors])
    ready = torch.zeros(1, dtype=torch.int32)
    router = torch.randn(count + 1, hidden) * hidden**-0.5
    layer = GroupedExperts(
        gate_up, down, DeviceRouter(router, ready, Routing(count, chosen, normalize=True))
    )
    x, norm = torch.randn(tokens, hidden).bfloat16(), (1 + 0.1 * torch.randn(hidden)).bfloat16()
    route = layer.route(x, norm=Norm(norm, 1e-6))
    assert check_route(layer, route, x, norm)
    y = layer.multiply(x, route, norm=Norm(norm, 1e-6))
    out = torch.empty_like(x)
    shared = torch.randn_like(x)
    layer.combine(y, route, x, out, shared=shared)
    normed, want = norm_of(x, norm), route.gates.double()[:, None] * shared.double()
    for token in range(tokens):
        for expert, share in zip(
            experts_of(route)[token].tolist(), route.shares[token].double(), strict=True
        ):
            gate, up = tensors[expert][0].matmul_reference(normed[token : token + 1]).chunk(2, -1)
            product = tensors[expert][1].matmul_reference(
                (torch.nn.functional.silu(gate) * up).bfloat16()
            )
            want[token] += share * product[0]
    assert int(ready) == 0
    return error(out.double() - x.double(), want)


@pytest.mark.parametrize(("kind", "tokens"), [("sparse-int4:64", 2), ("int4:64", 12)])
def test_experts_that_another_router_has_chosen_come_back_added_up(kind, tokens):
    """Experts below 0 are another GPU's: some of the first token's, all of the last one's, and then
    everybody's.
    """
    count, chosen, hidden, width = 6, 2, 192, 64
    tensors = [
        (make(kind, (2 * width, hidden), i), make(kind, (hidden, width), i)) for i in range(count)
    ]
    layer = ChosenExperts(
        stack([linear_of(first, activation="silu") for first, _ in tensors]),
        stack([linear_of(second) for _, second in tensors]),
        DeviceRouter(
            torch.empty(0, hidden),
            torch.zeros(1, dtype=torch.int32),
            Routing(count, chosen, normalize=False),
        ),
    )
    x, shares = torch.randn(tokens, hidden).bfloat16(), torch.rand(tokens, chosen)
    ids = torch.stack([torch.randperm(count)[:chosen] for _ in range(tokens)]).int()
    ids[-1], ids[0, 1] = -1, -1
    got = layer(x, shares, ids)
    for token in range(tokens):
        want = torch.zeros(hidden, dtype=torch.double)
        for expert, share in zip(ids[token].tolist(), shares[token].double(), strict=True):
            if expert >= 0:
                gate, up = tensors[expert][0].matmul_reference(x[token : token + 1]).chunk(2, -1)
                product = tensors[expert][1].matmul_reference(
                    (torch.nn.functional.silu(gate) * up).bfloat16()
                )
                want += share * product[0]
        assert error(got[token], want) < 2e-2 if want.any() else not got[token].any()
    assert int(layer.router.ready) == 0 and not layer(x, shares, torch.full_like(ids, -1)).any()


@pytest.mark.parametrize("gated", [True, False])
def test_the_shared_expert_of_one_token_is_one_choice_more(gated):
    count, chosen, hidden, width = 40, 3, 320, 64
    tensors = [
        (make("int4:64", (2 * width, hidden), i), make("int4:64", (hidden, width), i))
        for i in range(count + 1)
    ]
    first = [linear_of(one, activation="silu") for one, _ in tensors]
    second = [linear_of(one) for _, one in tensors]
    members = first[:-1], second[:-1]
    assert joined_parts((first[-1], second[-1]), members, chosen, host_cuda.HOST) == 1
    assert joined_parts((second[-1], first[-1]), members, chosen, host_cuda.HOST) == 0
    router = torch.randn(count + gated, hidden) * hidden**-0.5
    ready = torch.zeros(1, dtype=torch.int32)
    shared = (first[-1], second[-1])
    chooser = DeviceRouter(router, ready, Routing(count, chosen, normalize=True), joined=1)
    layer = GroupedExperts(stack(first), stack(second), chooser, shared)
    norm = Norm((1 + 0.1 * torch.randn(hidden)).bfloat16(), 1e-6)
    x = torch.randn(1, hidden).bfloat16()
    apart = dataclasses.replace(layer, router=dataclasses.replace(chooser, joined=0))
    # which adds the choices up, and the other does not
    assert sum_plan(layer.down.matrix, chosen + 1, host_cuda.HOST)
    assert torch.equal(experts_of(layer.route(x, norm=norm))[0, -1:], torch.tensor([count]))
    ready.zero_()
    assert error(layer.project(x, norm=norm), apart.project(x, norm=norm)) < 8e-3
    assert int(ready) == 0


@pytest.mark.parametrize("kind", ["int4:64", "plain"])
def test_a_larger_shared_expert_is_several_choices_before_hopper(monkeypatch, kind):
    """Its weights lie behind the others' as its own kernels want them."""
    ampere = gpu.Gpu(8, 6, 5, 101376, 102400)
    monkeypatch.setattr(gpu, "of", lambda device: ampere)
    count, chosen, parts, hidden, width = 7, 2, 3, 192, 128
    first, second = (
        [linear_of(make(kind, shape, i), activation=act) for i in range(count)]
        for shape, act in (((2 * width, hidden), "silu"), ((hidden, width), None))
    )
    shared = (
        linear_of(make(kind, (2 * parts * width, hidden), count), activation="silu"),
        linear_of(make(kind, (hidden, parts * width), count)),
    )
    assert joined_parts(shared, (first, second), chosen, ampere) == parts
    assert joined_parts(shared, (first, second), chosen, host_cuda.HOST) == 0
    assert joined_parts(shared, (first, second), 30, ampere) == 0
    stacked = [stack(part, one, parts) for part, one in zip((first, second), shared, strict=True)]
    ready = torch.zeros(1, dtype=torch.int32)
    router = torch.randn(count + 1, hidden) * hidden**-0.5
    chooser = DeviceRouter(router, ready, Routing(count, chosen, normalize=True), joined=parts)
    layer = GroupedExperts(*stacked, chooser, shared)
    apart = dataclasses.replace(layer, router=dataclasses.replace(chooser, joined=0))
    norm = Norm((1 + 0.1 * torch.randn(hidden)).bfloat16(), 1e-6)
    for _ in range(2):
        x = torch.randn(1, hidden).bfloat16()
        assert error(layer.project(x, norm=norm), apart.project(x, norm=norm)) < 8e-3
        assert int(ready) == 0
    x = torch.randn(2, hidden).bfloat16()
    assert torch.equal(layer.project(x, norm=norm), apart.project(x, norm=norm)), (
        "one token's alone"
    )


@pytest.mark.parametrize(("hidden", "width"), [(320, 2560), (2304, 320)])
def test_experts_of_one_token_hold_their_inputs_before_hopper(hidden, width, monkeypatch):
    """Ten or nine warps where a tile is as many shares; other rows for each slot."""
    count, chosen = 4, 3
    first, second = (
        [linear_of(make("int4:64", shape, i), activation=act) for i in range(count)]
        for shape, act in (((2 * width, hidden), "silu"), ((hidden, width), None))
    )
    router = torch.randn(count, hidden) * hidden**-0.5
    ready = torch.zeros(1, dtype=torch.int32)
    chooser = DeviceRouter(router, ready, Routing(count, chosen, normalize=True))
    layer = GroupedExperts(stack(first), stack(second), chooser)
    norm = Norm((1 + 0.1 * torch.randn(hidden)).bfloat16(), 1e-6)
    x = torch.randn(1, hidden).bfloat16()
    want = layer.project(x, norm=norm)
    monkeypatch.setattr(gpu, "of", lambda _: OLDER)
    for weight in layer.gate_up, layer.down:
        plan = gemv_plan.fitting_plan(weight.matrix, 1, OLDER, tiles=16, lone_row=True)
        assert plan.held_inputs
    assert error(layer.project(x, norm=norm), want.double()) < 8e-3


def test_the_experts_own_kernel_chooses_as_the_route_does():
    count, chosen, hidden, width = 259, 5, 320, 64
    first, second = (
        [linear_of(make("int4:64", shape, i % 7), activation=act) for i in range(count + 1)]
        for shape, act in (((2 * width, hidden), "silu"), ((hidden, width), None))
    )
    router = torch.randn(count + 1, hidden) * hidden**-0.5
    words = empty_words(len(router), chosen + 1, router.device)
    ready = torch.zeros(1, dtype=torch.int32)
    chooser = DeviceRouter(router, ready, Routing(count, chosen, normalize=True), joined=1)
    layer = GroupedExperts(stack(first), stack(second), chooser, (first[-1], second[-1]), words)
    assert layer._words_plan(host_cuda.HOST) is not None
    norm = Norm((1 + 0.1 * torch.randn(hidden)).bfloat16(), 1e-6)
    for _ in range(2):
        x = torch.randn(1, hidden).bfloat16()
        want = dataclasses.replace(layer, words=None).project(x, norm=norm)
        assert torch.equal(layer.project(x, norm=norm), want) and not torch.equal(want, x)
        assert (words.view(torch.int32) == -1).all(), "ready for the next step"


def test_results_are_normed_and_added():
    hidden, y = torch.randn(2, 3, 2312).bfloat16()
    norm = Norm((0.1 * torch.randn(2312)).bfloat16(), 1e-6, plus_one=True)
    want = reference.add_normed(hidden.double(), y.double(), norm, scale=0.25)
    got = residual.add_normed(hidden, y, norm, scale=0.25, out=hidden)
    assert got is hidden and error(got, want) < 4e-3


@pytest.mark.parametrize(
    ("plan", "tokens"),
    [
        (RouterPlan("", 16, 3, True, "sigmoid", 2.5, "bias", groups=4, chosen_groups=2), 5),
        (RouterPlan("", 12, 3, False, "chosen_softmax", bias="bias"), 5),
        (RouterPlan("", 300, 10, True, "sigmoid", 2.5, "bias"), 1),
        (RouterPlan("", 259, 10, False), 1),
    ],
)
def test_routers_of_other_kinds_choose_like_their_reference(plan, tokens):
    weight = tiles.prepare(Plain.random((32, 128)), dtype=torch.bfloat16)
    router = torch.randn(plan.experts, 128) * 128**-0.5
    bias = torch.randn(plan.experts) if plan.bias else None
    layer = GroupedExperts(
        weight,
        weight,
        DeviceRouter(router, torch.zeros(1, dtype=torch.int32), routing_of(plan), bias),
    )
    x, norm = torch.randn(tokens, 128).bfloat16(), torch.ones(128).bfloat16()
    route = layer.route(x, norm=Norm(norm, 1e-6))
    shares, chosen = Router(plan, router, bias)(norm_of(x, norm))
    assert torch.equal(experts_of(route), chosen) and (route.shares - shares).abs().max() < 1e-4


def test_experts_in_mxfp4_with_biases_and_a_shared_one_that_counts_whole():
    count, hidden, width = 4, 128, 64
    tensors = [
        (make("mxfp4", (2 * width, hidden), i), make("mxfp4", (hidden, width), i))
        for i in range(count)
    ]
    biases = [(torch.randn(2 * width).bfloat16(), torch.randn(hidden).bfloat16()) for _ in tensors]
    gate_up = stack(
        [
            linear_of(one[0], bias=bias[0], activation="clipped_swiglu")
            for one, bias in zip(tensors, biases, strict=True)
        ]
    )
    down = stack(
        [linear_of(one[1], bias=bias[1]) for one, bias in zip(tensors, biases, strict=True)]
    )
    router = torch.randn(count, hidden) * hidden**-0.5
    layer = GroupedExperts(
        gate_up,
        down,
        DeviceRouter(router, torch.zeros(1, dtype=torch.int32), Routing(count, 2, normalize=True)),
    )
    norm = torch.ones(hidden).bfloat16()
    for tokens in (1, 12):
        x = torch.randn(tokens, hidden).bfloat16()
        route = layer.route(x, norm=Norm(norm, 1e-6))
        out = torch.empty_like(x)
        shared = torch.randn_like(x)
        layer.combine(layer.multiply(x, route, norm=Norm(norm, 1e-6)), route, x, out, shared=shared)
        want = shared.double()
        for token, normed in enumerate(norm_of(x, norm)):
            for expert, share in zip(
                experts_of(route)[token].tolist(), route.shares[token].double(), strict=True
            ):
                between = (
                    tensors[expert][0].matmul_reference(normed[None]) + biases[expert][0].double()
                )
                product = tensors[expert][1].matmul_reference(
                    reference.gate(between, "clipped_swiglu").bfloat16()
                )
                want[token] += share * (product[0] + biases[expert][1].double())
        assert error(out.double() - x.double(), want) < 3e-2


@pytest.mark.parametrize("tokens", [5, 20])
def test_many_tokens_are_sorted_by_expert(tokens):
    weight = tiles.prepare(Plain.random((32, 128)), dtype=torch.bfloat16)
    ready = torch.zeros(1, dtype=torch.int32)
    layer = GroupedExperts(
        weight, weight, DeviceRouter(torch.randn(12, 128), ready, Routing(12, 3, normalize=False))
    )
    x, norm = torch.randn(tokens, 128).bfloat16(), torch.ones(128).bfloat16()
    lengths = torch.ones(tokens, dtype=torch.int32)
    lengths[[0, 3]] = 0  # nobody uses the fourth; the first has experts all the same
    route = layer.route(x, norm=Norm(norm, 1e-6), lengths=lengths)
    used = torch.arange(tokens) != 3
    assert check_route(layer, route, x, norm, used)
    assert (
        not route.shares[3].any()
        and not workspace.current(x.device).bytes("route tickets", 8).any()
    )
    rows = torch.arange(int(route.tiles) * route.tile)
    sources = route.source[rows]
    assert torch.equal(
        sources[route.place[used].long()].long(), torch.arange(tokens)[used, None].expand(-1, 3)
    )
    assert int((sources >= 0).sum()) == 3 * int(used.sum())


def norm_of(x, norm):
    scaled = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
    return (scaled.float() * norm.float()).bfloat16()


def experts_of(route):
    return route.expert_of[route.place.long() // route.tile].long()


def check_route(layer, route, x, norm, used=slice(None)):
    """The experts, shares and gates of the reference."""
    logits = norm_of(x, norm).double() @ layer.router.weight.double().T
    shares, chosen = (
        logits[:, : layer.router.routing.experts].softmax(-1).topk(layer.router.routing.chosen)
    )
    shares = shares / shares.sum(-1, keepdim=True) if layer.router.routing.normalize else shares
    same = (
        torch.equal(experts_of(route)[used], chosen[used])
        and (route.shares[used] - shares[used]).abs().max() < 1e-3
    )
    return same and (
        not layer.router.gated
        or (route.gates[used] - logits[used, -1].sigmoid()).abs().max() < 1e-3
    )


def tiles_by_rows(dense):
    """gemm.cu's BY_ROWS, gate and up by turns."""
    order = (
        format.TILE,
        format.BLOCK,
        format.HALF,
        format.HALF_ROW,
        format.ROW,
        format.COLUMN,
        format.STEP,
        format.PAIR,
        format.WITHIN,
    )
    return tiles.blocks(dense, interleave=True).permute(order).flatten()


@pytest.mark.parametrize("kind", ["int4:64", "int4:128:symmetric", "int8:32", "plain"])
def test_a_weight_is_written_out_row_by_row_and_in_tiles(kind):
    tensor = make(kind, (96, 320), 1)
    gated, single = (linear_of(tensor, activation=act).weight for act in ("silu", None))
    dense = tensor.dequantize().bfloat16()
    assert torch.equal(untile(single), dense) and torch.equal(untile(gated), dense)
    assert torch.equal(untile(gated, tiles=True), tiles_by_rows(dense))


def test_of_equal_experts_the_first_is_chosen():
    weight = tiles.prepare(Plain.random((32, 128)), dtype=torch.bfloat16)
    router = torch.randn(36, 128)
    router[1::2] = router[::2]
    layer = GroupedExperts(
        weight,
        weight,
        DeviceRouter(router, torch.zeros(1, dtype=torch.int32), Routing(36, 5, normalize=True)),
    )
    norm = Norm(torch.ones(128).bfloat16(), 1e-6)
    chosen = experts_of(layer.route(torch.randn(4, 128).bfloat16(), norm=norm))
    assert (chosen[:, ::2] % 2 == 0).all() and torch.equal(chosen[:, 1::2], chosen[:, :4:2] + 1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rotary", "normed"),
    [
        (3, 1, 80, 32, True),
        (2, 2, 256, 256, False),
        (14, 2, 128, 128, True),
        (3, 1, 64, 24, True),
        (1, 1, 36, 12, True),
    ],
)
def test_heads_are_normed_turned_and_written_to_their_slots(
    monkeypatch, heads, kv_heads, size, rotary, normed
):
    pytest.importorskip("triton", reason="the Triton twin of this op is imported beside it")
    from flyweight.batch import KVStorage
    from flyweight.kernels.attention import rope

    tokens, epsilon = 5, 1e-6
    qkv = torch.randn(tokens, heads + 2 * kv_heads, size).bfloat16()
    norm = torch.randn(heads + kv_heads, size).bfloat16() if normed else None
    angles, slots = torch.rand(tokens, rotary // 2) * 6, torch.tensor([7, 2, 5, 0, 3])
    caches = [
        KVStorage(*torch.zeros(2, 2, 4, kv_heads, size, dtype=torch.bfloat16)) for _ in range(2)
    ]
    cos, sin = reference.rope_rows(angles.cos(), angles.sin(), torch.arange(tokens))
    options = dict(norm=Norm(norm, epsilon) if normed else None, cos=cos, sin=sin, query_scale=0.37)
    want = reference.rope_norm_write(qkv.clone(), caches[0], slots, **options)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    got = rope.rope_norm_write(qkv, caches[1], slots, **options)
    for ours, theirs in zip(
        (*got, caches[1].keys, caches[1].values),
        (*want, caches[0].keys, caches[0].values),
        strict=True,
    ):
        assert error(ours, theirs.double()) < 5e-3


@pytest.mark.parametrize("kind", ["int4:128", "int8:64", "plain"])
def test_stages_that_warps_keep_in_registers_are_multiplied_with_the_others(kind, monkeypatch):
    """Little shared memory, so that rings are short and most stages lie behind them."""
    tensor, x = make(kind, (328, 1280), 1), torch.randn(1, 1280).bfloat16()
    monkeypatch.setattr(
        gpu, "of", lambda _: dataclasses.replace(OLDER, shared_memory_per_multiprocessor=48 << 10)
    )
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    want = gemv.multiply(weight, x)
    assert error(want, tensor.matmul_reference(x)) < 1e-2
    retune(monkeypatch, formats={weight.format.name: dict(gemv_kept=3)})
    chosen = gemv_plan.fitting_plan(weight.matrix, 1, gpu.of(None), tiles=5)
    assert gemv.kept_stages(weight, 1, chosen, gpu.of(None)) == 0, "launches do not overlap"
    monkeypatch.setattr(dependent_launch, "enabled", True)
    assert [gemv.kept_stages(weight, rows, chosen, gpu.of(None)) for rows in (1, 2)] == [3, 0]
    for kept in (1, 2, 3):
        retune(monkeypatch, formats={weight.format.name: dict(gemv_kept=kept)})
        assert torch.equal(gemv.multiply(weight, x), want)
