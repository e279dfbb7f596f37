"""Many rows through gemm_mma.cu as it stands, compiled for and run on the CPU."""

import dataclasses

import host_cuda
import pytest
import torch
from test_kernels_on_the_host import error, error_of_experts, host, make, norm_of  # noqa: F401 (fixtures)

from flyweight import gpu
from flyweight.kernels import workspace
from flyweight.kernels.linear import format, gemm_mma, tiles
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.linear.gemm_mma import LINE, WHOLE
from flyweight.kernels.linear.untile import untile
from flyweight.kernels.tuned import MmaTile

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")

SMALL = MmaTile(2, 1, 1, 2, 1, 1.0)  # 32 outputs × 16 tokens
WIDE = MmaTile(1, 2, 2, 2, 1, 1.0)  # the same outputs × 32 tokens, two warps beside each other
# 64 outputs × 16 tokens of four warps: each thread counts one address up
EVEN = MmaTile(4, 1, 1, 2, 1, 1.0)
DEEP = MmaTile(2, 2, 4, 2, 1, 1.0)  # 128 outputs × 32 tokens, four tiles of a warp
LONG = MmaTile(1, 1, 1, 16, 1, 1.0)  # 16 outputs × 128 tokens of one warp
AMPERE = gpu.Gpu(8, 6, 3, 101376, 102400)

# Outputs and inputs that end inside a tile, rows that do not fill one, more tiles than thread
# blocks and fewer, stages of one block and of several, groups larger than a stage and smaller.
CASES = [
    ("plain", 20, (40, 200), SMALL, LINE),
    ("plain", 150, (200, 264), WIDE, LINE),  # several rounds of whole tiles first
    ("w8a8", 97, (264, 320), WIDE, LINE),
    ("int4:128", 33, (72, 640), WIDE, LINE),
    ("int4:32", 70, (200, 160), SMALL, WHOLE),
    ("int4:128", 130, (24, 256), LONG, WHOLE),
    ("mxfp4", 33, (40, 160), SMALL, LINE),
    ("fp8-block", 17, (136, 256), SMALL, LINE),
    ("int8:64:symmetric", 18, (40, 192), WIDE, WHOLE),
    ("int4:128", 39, (128, 384), EVEN, LINE),
    ("int8:128", 32, (128, 256), EVEN, WHOLE),
    ("w8a8", 40, (72, 328), WIDE, LINE),
    ("fp8", 17, (40, 192), SMALL, LINE),
    ("sparse-int4:32", 20, (40, 192), SMALL, LINE),
    ("sparse-w8a8", 20, (40, 192), WIDE, WHOLE),
]


@pytest.mark.parametrize(("kind", "rows", "shape", "tile", "split"), CASES)
def test_many_rows_are_multiplied_and_added_to_the_residual(kind, rows, shape, tile, split):
    tensor = make(kind, shape, 1)
    x = torch.randn(rows, shape[1]).bfloat16()
    residual = torch.randn(rows, shape[0]).bfloat16()
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    cut = gemm_mma.plan(weight.matrix, rows, host_cuda.HOST, tile=tile, split=split)
    out = torch.full((rows, shape[0]), float("nan")).bfloat16()
    got = gemm_mma.multiply(weight, x, out, residual=residual, cut=cut)
    assert error(got, tensor.matmul_reference(x) + residual.double()) < 5e-3
    boxes = [
        held
        for (name, _), held in workspace.current(x.device)._buffers.items()
        if name == "mailbox"
    ]
    assert all((box == -1).all() for box in boxes), "emptied for the next launch"


@pytest.mark.parametrize(
    ("kind", "rows", "shape", "split"),
    [
        ("plain", 150, (200, 264), LINE),
        ("plain", 70, (256, 128), WHOLE),
        ("w8a8", 130, (300, 640), LINE),
        ("w8a8", 97, (256, 512), WHOLE),
    ],
)
def test_a_warp_loads_what_it_multiplies_next_before_the_barrier(kind, rows, shape, split):
    tile = MmaTile(2, 2, 4, 2, 1, 1.0)
    tensor = make(kind, shape, 1)
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    cut = gemm_mma.plan(weight.matrix, rows, host_cuda.HOST, tile=tile, split=split)
    x = torch.randn(rows, shape[1]).bfloat16()
    residual = torch.randn(rows, shape[0]).bfloat16()
    want = tensor.matmul_reference(x) + residual.double()
    got = gemm_mma.multiply(weight, x, residual=residual, cut=dataclasses.replace(cut, ahead=True))
    assert error(got, want) < 5e-3


@pytest.mark.parametrize("kind", ["int4:128", "w8a8"])
def test_tiles_end_with_thread_blocks_where_some_may_stay_idle(kind):
    """Two tiles of three or more stages on five processors: two thread blocks each, and one that
    only waits.
    """
    tensor = make(kind, (128, 768), 1)
    x = torch.randn(9, 768).bfloat16()
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    cut = gemm_mma.plan(weight.matrix, 16, host_cuda.HOST, tile=EVEN, split=LINE)
    assert (cut.working, cut.grid(5)) == (4, 5)
    assert error(gemm_mma.multiply(weight, x, cut=cut), tensor.matmul_reference(x)) < 5e-3
    assert not gemm_mma.plan(weight.matrix, 16, host_cuda.HOST, tile=EVEN, split=WHOLE).working


def test_no_thread_block_works_longer_so_that_another_may_stay_idle():
    sm_80 = dataclasses.replace(gpu.GPUS["sm_80"], multi_processor_count=132)
    alone = MmaTile(8, 1, 1, 8, 1, 1.0, False)
    # the next kernel begins on the multiprocessors that idle
    beside = dataclasses.replace(alone, ctas=2, beside=True)
    for outputs, inputs, working in (
        (4096, 4096, 128),
        (4096, 12288, 128),
        (6144, 4096, 132),
        (24576, 4096, 132),
    ):
        matrix = tiles.Matrix(format.FORMATS["int4"], outputs, inputs, 128)
        for tile, expected in ((alone, working), (beside, 132)):
            found = gemm_mma.plan(matrix, 64, sm_80, tile=tile, split=LINE)
            assert found.working == expected


@pytest.mark.parametrize("kind", ["plain", "w8a8", "int4:64"])
@pytest.mark.parametrize("end", ["bias", "residual", "silu"])
def test_results_of_neighbouring_tiles_are_written_together(kind, end):
    """The last tiles of a thread block, and the last rows of a tile, do not exist."""
    tensor = make(kind, (192, 128), 1)
    bias = torch.randn(192) if end != "residual" else None
    silu = "silu" if end == "silu" else None
    weight = tiles.prepare(tensor, dtype=torch.bfloat16, bias=bias, activation=silu)
    x = torch.randn(77, 128).bfloat16()
    residual = torch.randn(77, 192).bfloat16() if end == "residual" else None
    cut = gemm_mma.plan(weight.matrix, 77, host_cuda.HOST, tile=DEEP, split=WHOLE)
    before = torch.full((80, weight.width), float("nan")).bfloat16()
    got = gemm_mma.multiply(weight, x, before[:77], residual=residual, cut=cut)
    want = tensor.matmul_reference(x) + (0 if bias is None else bias.double())
    if silu:
        gate, up = want.chunk(2, -1)
        want = torch.nn.functional.silu(gate) * up
    assert error(got, want + (0 if residual is None else residual.double())) < 2e-2
    assert before[77:].isnan().all()


def test_results_that_are_not_aligned_are_refused():
    weight = tiles.prepare(make("plain", (64, 128), 1), dtype=torch.bfloat16)
    x = torch.randn(20, 128).bfloat16()
    out = torch.empty(20 * 64 + 1).bfloat16()[1:].view(20, 64)
    with pytest.raises(ValueError, match="16 bytes"):
        gemm_mma.multiply(weight, x, out)


@pytest.mark.parametrize("kind", ["plain", "int4:64"])
def test_a_norm_comes_before_and_silu_after(kind):
    tensor = make(kind, (96, 192), 1)
    x = torch.randn(21, 192).bfloat16()
    norm = (1 + 0.1 * torch.randn(192)).bfloat16()
    weight = tiles.prepare(tensor, dtype=torch.bfloat16, activation="silu")
    cut = gemm_mma.plan(weight.matrix, 21, host_cuda.HOST, tile=SMALL, split=WHOLE)
    out = torch.full((21, 48), float("nan")).bfloat16()
    got = gemm_mma.multiply(weight, x, out, norm=Norm(norm, 1e-6), cut=cut)
    gate, up = tensor.matmul_reference(norm_of(x, norm)).chunk(2, -1)
    assert error(got, torch.nn.functional.silu(gate) * up) < 2e-2


def test_float8_is_widened_where_no_matrix_unit_takes_it(monkeypatch):
    monkeypatch.setattr(tiles, "format_of", lambda tensor, dtype: format.named("fp8-wide"))
    tensor = make("fp8", (40, 200), 1)
    x = torch.randn(5, 200).bfloat16()
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    cut = gemm_mma.plan(weight.matrix, 5, host_cuda.HOST, tile=SMALL, split=LINE)
    assert weight.format.name == "fp8-wide" and untile(weight).isfinite().all()
    assert (
        error(
            gemm_mma.multiply(weight, x, cut=cut), x.double() @ tensor.dequantize(torch.float64).T
        )
        < 5e-3
    )


def test_half_precision_scales_and_a_bias():
    tensor = make("int4:64", (40, 192), 1)
    bias = torch.randn(40)
    x = torch.randn(20, 192).half()
    weight = tiles.prepare(tensor, dtype=torch.float16, bias=bias)
    cut = gemm_mma.plan(weight.matrix, 20, host_cuda.HOST, tile=WIDE, split=LINE)
    got = gemm_mma.multiply(weight, x, cut=cut)
    assert error(got, tensor.matmul_reference(x) + bias.double()) < 2e-3


def test_tokens_sorted_by_expert_need_no_hopper(monkeypatch):
    monkeypatch.setattr(gpu, "of", lambda device: AMPERE)
    assert error_of_experts("int4:64", 12) < 8e-2
