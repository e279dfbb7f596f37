"""The VPTQ kernels' own sources, run on the CPU, against the float64 reference."""

import dataclasses
import math

import host_cuda
import pytest
import torch
from test_kernels_on_the_host import error, tiles_by_rows

from flyweight import gpu
from flyweight.kernels import reference as ops
from flyweight.kernels.linear.fused import KvPrefetch, Norm
from flyweight.kernels.vptq import decode as vptq_decode
from flyweight.kernels.vptq import linear as vptq
from flyweight.kernels.vptq import rows as vptq_rows
from flyweight.kernels.vptq import staged
from flyweight.kernels.vptq.parts import Ends
from flyweight.tensors import VectorQuant

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")


@pytest.fixture(autouse=True)
def host(monkeypatch, folder):
    """Items of a lane in any order within their window, and any of two copies, as a GPU would put
    them.
    """
    torch.manual_seed(0)
    host_cuda.pretend(monkeypatch, folder)

    def schedule(banks):
        from_copy = (torch.rand(banks.shape) < 0.5) & (banks >> 4 != banks & 15)
        return torch.rand(banks.shape).argsort(2).to(torch.uint8) + 128 * from_copy.to(torch.uint8)

    monkeypatch.setattr(staged, "schedule", schedule)


def make(*shapes, dtype=torch.bfloat16, bias=None, **options):
    tensors = [
        VectorQuant.random(shape, seed, dtype=dtype, **options) for seed, shape in enumerate(shapes)
    ]
    weight = vptq.join([vptq.prepare(tensor, dtype=dtype, ops=ops) for tensor in tensors], bias)
    return tensors, weight


# the same sizes wherever nothing else is asked for: fewer kernels to compile
BOOKS = dict(main=256, residual=256)
CASES = {
    "seed format": dict(shapes=[(72, 512)], main=8192, residual=256),
    "q, k and v": dict(shapes=[(72, 512), (24, 512), (600, 512)], **BOOKS),
    "ragged": dict(shapes=[(21, 190), (300, 190)], main=300, residual=200),
    "outliers": dict(shapes=[(24, 300), (24, 300)], outliers=44, **BOOKS),
    "more outliers, permuted": dict(
        shapes=[(264, 356), (40, 356)], outliers=100, permute=True, **BOOKS
    ),
    "no residual, plain columns": dict(
        shapes=[(40, 256)], main=256, residual=None, normalize=False
    ),
}


def prepared(case, **options):
    options = dict(case) | options
    return make(*options.pop("shapes"), **options)


def reference(tensors, x):
    return torch.cat([tensor.matmul_reference(x) for tensor in tensors], -1)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_weight_is_written_out(case):
    tensors, weight = prepared(case)
    x = torch.randn(20, tensors[0].in_features).bfloat16()
    out = torch.full((20, weight.out_features), float("nan")).bfloat16()
    vptq_decode.multiply(weight.parts, x, out)
    assert error(out, reference(tensors, x)) < 1e-2


@pytest.mark.parametrize(
    "case",
    [
        dict(shapes=[(72, 512)] * 2, main=8192, residual=256),
        dict(shapes=[(40, 256)] * 2, main=256, residual=None),
    ],
)
def test_gate_and_up_are_written_in_tiles(case):
    _, weight = prepared(case)
    assert vptq_decode.takes_silu(weight.parts) and not vptq_decode.takes_silu(weight.parts[:1])
    dense = vptq_decode.dequantize(weight.parts).clone()
    assert torch.equal(
        vptq_decode.dequantize(weight.parts, tiles=True).flatten(), tiles_by_rows(dense)
    )
    columns, outputs = case["shapes"][0][::-1]
    x, norm = torch.randn(70, columns).bfloat16(), (1 + 0.1 * torch.randn(columns)).bfloat16()
    normed = (
        x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * norm.double()
    )
    gate, up = (normed @ dense.double().T).chunk(2, -1)
    got = weight.silu(x, torch.full((70, outputs), float("nan")).bfloat16(), norm=Norm(norm, 1e-6))
    assert error(got, torch.nn.functional.silu(gate) * up) < 2e-2


@pytest.mark.parametrize(
    ("name", "rows"),
    [*((name, rows) for name in CASES for rows in (1, 33)), ("ragged", 3), ("outliers", 3)],
)
def test_rows_are_multiplied(name, rows):
    tensors, weight = prepared(CASES[name])
    x = torch.randn(rows, tensors[0].in_features).bfloat16()
    for _ in range(2 if rows == 3 else 1):  # thread blocks meet again
        out = torch.full((rows, weight.out_features), float("nan")).bfloat16()
        assert error(weight.project(x, out), reference(tensors, x)) < 1e-2


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (1, torch.bfloat16),
        (1, torch.float16),
        (18, torch.bfloat16),
        (70, torch.bfloat16),
        (130, torch.bfloat16),
    ],
)
def test_norm_bias_and_residual_are_fused(rows, dtype):
    bias = torch.randn(88).to(dtype)
    tensors, weight = make(
        (64, 300), (24, 300), outliers=40, permute=True, bias=bias, dtype=dtype, **BOOKS
    )
    x, norm = torch.randn(rows, 300).to(dtype), (1 + 0.1 * torch.randn(300)).to(dtype)
    residual = torch.randn(rows, 88).to(dtype)
    normed = (
        x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * norm.double()
    )
    want = (
        torch.cat([normed @ tensor.dequantize(torch.float64).T for tensor in tensors], -1)
        + bias.double()
        + residual.double()
    )
    assert (
        error(weight.project(x, residual.clone(), norm=Norm(norm, 1e-6), residual=residual), want)
        < 1e-2
    )


@pytest.mark.parametrize(
    ("shapes", "rows"),  # each number of rows has tiles of its own width
    [
        pytest.param(shapes, rows, id=f"{name}-{rows}")
        for name, shapes, counts in (
            ("shared tiles", [(72, 1088), (24, 1088)], (5, 20)),
            ("whole tiles", [(1400, 272), (24, 272), (40, 272)], (12, 40)),
            ("whole columns", [(72, 1280), (24, 1280)], (5, 40)),
        )
        for rows in counts
    ],
)
def test_rows_of_shared_and_whole_tiles_are_normed(shapes, rows):
    tensors, weight = make(*shapes, **BOOKS)
    width = weight.out_features
    x = torch.randn(rows, shapes[0][1]).bfloat16()
    norm = (1 + 0.1 * torch.randn(shapes[0][1])).bfloat16()
    residual = torch.randn(rows, width).bfloat16()
    normed = (
        x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * norm.double()
    )
    want = (
        torch.cat([normed @ tensor.dequantize(torch.float64).T for tensor in tensors], -1)
        + residual.double()
    )
    for _ in range(2):  # thread blocks meet again
        out = torch.full_like(residual, float("nan"))
        assert error(weight.project(x, out, norm=Norm(norm, 1e-6), residual=residual), want) < 1e-2


@pytest.mark.parametrize(
    ("rows", "columns", "count"),
    [(16, 1024, 2), (20, 2048, 5), (40, 1024, 3), (40, 2048, 4), (100, 4096, 9)],
)
def test_pairs_of_thread_blocks_add_up(monkeypatch, rows, columns, count):
    device = dataclasses.replace(host_cuda.HOST, multi_processor_count=count)
    monkeypatch.setattr(gpu, "of", lambda _: device)
    tensors, weight = make((88, columns), **BOOKS)
    assert vptq_rows.choose(weight.parts, rows, device).paired
    x, residual = torch.randn(rows, columns).bfloat16(), torch.randn(rows, 88).bfloat16()
    want, found = reference(tensors, x) + residual.double(), []
    for _ in range(2):  # thread blocks meet again
        found.append(weight.project(x, torch.full_like(residual, float("nan")), residual=residual))
        assert error(found[-1], want) < 1e-2
    assert torch.equal(*found)


def test_keys_and_values_that_are_asked_for_change_nothing():
    tensors, weight = make((72, 512), (24, 512), **BOOKS)
    x, lengths = torch.randn(20, 512).bfloat16(), torch.randint(0, 70, (20,)).int()
    keys, values = torch.randn(2, 110, 16, 2, 64).bfloat16()
    wanted = KvPrefetch(lengths, torch.randperm(110)[:100].view(20, 5).int(), keys, values)
    outs = [
        weight.project(x, torch.full((20, 96), float("nan")).bfloat16(), prefetch=some)
        for some in (None, wanted)
    ]
    assert torch.equal(*outs) and error(outs[1], reference(tensors, x)) < 1e-2


@pytest.mark.parametrize(
    ("rows", "products", "activation"),
    [(1, True, "gelu_tanh"), (5, True, "silu"), (5, False, "silu"), (40, True, "gelu_tanh")],
)
@pytest.mark.parametrize("columns", [512, 4608])
def test_gate_and_up_are_multiplied_where_x_is_read(
    monkeypatch, columns, rows, products, activation
):
    if not products:  # as on a GPU before Hopper
        monkeypatch.setattr(vptq_rows, "takes", lambda *_: False)
    tensors, weight = make((64, columns), **BOOKS)
    gate, up = torch.randn(2, rows, columns).bfloat16()
    x, residual = torch.cat([gate, up], -1), torch.randn(rows, 64).bfloat16()
    gated = ops.gate(x.double(), activation)
    want = gated @ tensors[0].dequantize(torch.float64).T + residual.double()
    assert (
        error(weight.multiply(x, residual, Ends(gated=activation, residual=residual)), want) < 1e-2
    )


def test_a_codebook_too_large_for_shared_memory_is_read_through_the_caches(monkeypatch):
    device = gpu.Gpu(8, 6, 3, 101376, 102400)
    monkeypatch.setattr(gpu, "of", lambda _: device)
    tensors, weight = make((72, 512), (24, 512), main=8192, residual=256)
    assert not weight.gathers and [weight.kernel_for(rows) for rows in (1, 4, 5)] == [
        "vptq",
        "vptq",
        "vptq_decode + cublas",
    ]
    x, norm = torch.randn(2, 512).bfloat16(), (1 + 0.1 * torch.randn(512)).bfloat16()
    residual = torch.randn(2, 96).bfloat16()
    want = reference(tensors, ops.normalize(x, Norm(norm, 1e-6))) + residual.double()
    assert error(weight.project(x, residual, norm=Norm(norm, 1e-6), residual=residual), want) < 1e-2


def test_what_is_not_alike_is_not_joined():
    assert make((64, 512), (64, 256), **BOOKS)[1] is None
    assert (
        vptq.join(
            [
                vptq.prepare(
                    VectorQuant.random((16, 512), length=24, main=16), dtype=torch.bfloat16, ops=ops
                )
            ]
        )
        is None
    )
    assert vptq_rows.takes(make((64, 512))[1].parts, 2, host_cuda.HOST)


def test_tiles_are_cut_by_what_a_second_one_costs():
    Cut = vptq_rows.Cut
    # two for each tile, though 132 would have 6 units each
    assert vptq_rows.cut((768,), 16, 16, 132, 4) == Cut((96,), 8, each=2)
    assert vptq_rows.cut((768,), 16, 16, 132, 1) == Cut((132,), 7)
    assert vptq_rows.cut((528,), 24, 48, 132, 4) == Cut((132,), 8, each=6)
    # fewer thread blocks than tiles
    assert vptq_rows.cut((3200,), 16, 16, 132, 4) == Cut((132,), 29)


def test_a_small_last_tile_has_at_least_half_of_a_whole_ones_thread_blocks():
    # q, k and v of Qwen3-8B
    assert vptq_rows.cut((512, 128, 128), 24, 16, 132, 4) == vptq_rows.Cut((86, 22, 22), 4, 2, 4)
    assert vptq_rows.cut((512, 128, 128), 24, 16, 140, 4) == vptq_rows.Cut((88, 24, 24), 4, 4, 4)
    # too few for that: three for a whole tile
    assert vptq_rows.cut((512, 128, 128), 24, 16, 128, 4).apart == 3
    assert vptq_rows.cut((8,), 24, 16, 132, 4) == vptq_rows.Cut((16,), 1, 16, 16)


@pytest.mark.parametrize(
    ("outputs", "options", "normed"),
    [(72, dict(main=8192, residual=256), False), (21, BOOKS | dict(outliers=44), True)],
)
def test_slices_of_columns_add_up(outputs, options, normed):
    """By any number of thread blocks, in one phase of x and in several, with a norm whose squares
    the slices hand over, too.
    """
    tensors, weight = make((outputs, 6000), **options)
    x, residual = torch.randn(1, 6000).bfloat16(), torch.randn(1, outputs).bfloat16()
    norm = (1 + 0.1 * torch.randn(6000)).bfloat16() if normed else None
    used = x.double()
    if norm is not None:
        used = used * torch.rsqrt(used.square().mean(-1, keepdim=True) + 1e-6) * norm.double()
    want = used @ tensors[0].dequantize(torch.float64).T + residual.double()
    for split, count, room in ((2, 2, 0), (2, 5, 1 << 10), (4, 9, 0), (8, 8, 0)):
        launch = vptq.gather_plan.Launch("staged", split=split)
        limit = host_cuda.HOST.shared_most
        small = vptq.gather_plan.plan(weight.parts, launch, 1, count=count, limit=limit)
        limit = small.shared - room if room else limit
        chosen = vptq.gather_plan.plan(weight.parts, launch, 1, count=count, limit=limit)
        assert sum(chosen.ctas) == count // split * split
        assert (chosen.phase < math.ceil(weight.layout.chunks / split)) == bool(room)
        for _ in range(2):  # thread blocks meet again
            out = torch.full_like(residual, float("nan"))
            vptq.gather.run(
                weight.parts,
                chosen,
                x,
                out,
                Ends(norm=norm, residual=residual),
                arrived=weight.arrived,
                pdl=False,
            )
            assert error(out, want) < 1e-2, (split, count, room)
