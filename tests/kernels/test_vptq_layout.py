"""The VPTQ layout without a GPU: a slow copy of the kernels' indexing must give the reference
product.
"""

import dataclasses
import io
import itertools

import pytest
import torch

from flyweight.gpu import GPUS
from flyweight.kernels import compiler, reference
from flyweight.kernels.vptq import gather_plan, staged
from flyweight.kernels.vptq import linear as vptq
from flyweight.kernels.vptq import rows as vptq_rows
from flyweight.kernels.vptq.choose_layout import lay_out
from flyweight.kernels.vptq.layout import ItemFormat
from flyweight.tensors import VectorQuant


@pytest.fixture(autouse=True)
def shuffled(monkeypatch):
    """Any order of a lane's items, and either copy of a doubled entry, must give the same
    product.
    """
    generator = torch.Generator().manual_seed(7)

    def schedule(banks, residuals=None):
        order = torch.rand(banks.shape, generator=generator).argsort(2).to(torch.uint8)
        from_copy = (torch.rand(banks.shape, generator=generator) < 0.5) & (
            banks >> 4 != banks & 15
        )
        return order + 128 * from_copy.to(torch.uint8)

    monkeypatch.setattr(staged, "schedule", schedule)


def fragment_product(entries, x_of_lane):
    """One step as the matrix unit sees it: entries [32 lanes, 8], x [32 lanes] → 8 sums."""
    a, b = torch.zeros(16, 16, dtype=torch.float64), torch.zeros(16, 8, dtype=torch.float64)
    for lane in range(32):
        group, t = lane // 4, lane % 4
        # ldmatrix .trans: register q holds entries 2t and 2t + 1 of quarter q, output g
        for quarter in range(4):
            row, column = group + 8 * (quarter % 2), 2 * t + 8 * (quarter // 2)
            a[row, column : column + 2] = entries[
                8 * quarter + 2 * t : 8 * quarter + 2 * t + 2, group
            ]
        half, register = lane >> 2 & 1, lane >> 3 & 1
        b[2 * t + half + 8 * register, group] = x_of_lane[lane]
    d = a @ b
    return d[:8, :4].sum(1) + d[8:, 4:].sum(1)


def column_of(step, lane):
    return step // 2 * 64 + 2 * lane + step % 2


def fields(word, form):
    main = word & ((1 << form.main) - 1)
    residual = word >> form.main & ((1 << form.residual) - 1)
    return main, residual, word >> (form.main + form.residual) & ((1 << form.position) - 1)


def staged_x(layout, x):
    """The stored columns of x, scaled, and the sum of bias · x; x [in]."""
    affine = layout.affine.long() & 0xFFFFFFFF
    scale = (affine & 0xFFFF).to(torch.uint16).view(layout.dtype).double()
    bias = (affine >> 16).to(torch.uint16).view(layout.dtype).double()
    used = affine != 0
    source = (
        torch.arange(affine.numel()) if layout.source is None else layout.source.long() & 0xFFFF
    )
    values = torch.where(used, x.double()[torch.where(used, source, 0)], 0)
    return values * scale, (values * bias).sum()


def entry_of(layout, piece, main, extra, half):
    value = layout.book[piece, half, main].double()
    if layout.residual is None:
        return value
    return value + layout.residual[piece if layout.residual_books > 1 else 0, half, extra].double()


def dense_sums(layout, block, x):
    sums = torch.zeros(8 * layout.halves, dtype=torch.float64)
    for step in range(layout.dense_steps):
        for h in range(layout.halves):
            lanes = layout.dense[block, step, h].double().view(8, 4, 4, 2)  # [g, t, quarter, pair]
            entries = lanes.permute(2, 1, 3, 0).reshape(32, 8)
            sums[8 * h : 8 * h + 8] += fragment_product(
                entries, x[column_of(step, torch.arange(32))]
            )
    return sums


def lane_words(layout, block):
    """Words of one row block, [steps, 32], read as the kernel reads its chunks."""
    chunks = layout.stream[block].long()  # [chunks, bytes]
    size = layout.form.item_bytes
    first, rest = chunks[:, :512].view(-1, 32, 16), chunks[:, 512:].view(-1, 32, 8 * size - 16)
    octets = torch.cat([first, rest], 2).view(-1, 32, 8, size)
    return sum(octets[..., i] << (8 * i) for i in range(size)).transpose(1, 2).reshape(-1, 32)


def multiply_staged(layout, x):
    scaled, bias = staged_x(layout, x)
    rows = []
    for block in range(layout.row_blocks):
        words = lane_words(layout, block)
        sums = dense_sums(layout, block, scaled[layout.dense_begin :])
        for step in range(words.shape[0]):
            main, extra, position = fields(words[step], layout.form)
            x_of_lane = scaled[
                column_of(step - step % layout.form.window + position, torch.arange(32))
            ]
            for h in range(layout.halves):
                sums[8 * h : 8 * h + 8] += fragment_product(
                    entry_of(layout, 0, main, extra, h), x_of_lane
                )
        rows.append(sums[: layout.length] + bias)
    return torch.cat(rows)[: layout.out_features]


def multiply_sliced(layout, x):
    scaled, bias = staged_x(layout, x)
    words, offsets = layout.stream.long() & 0xFFFFFFFF, layout.offsets.tolist()
    rows = []
    for block in range(layout.row_blocks):
        sums = dense_sums(layout, block, scaled[layout.dense_begin :])
        for piece in range(layout.slices):
            for r in range(layout.ranges):
                at = (block * layout.slices + piece) * layout.ranges + r
                for step in range(offsets[at], offsets[at + 1]):
                    main, extra, position = fields(words[step], layout.form)
                    x_of_lane = scaled[r * (layout.width + 2) + position]
                    for h in range(layout.halves):
                        sums[8 * h : 8 * h + 8] += fragment_product(
                            entry_of(layout, piece, main, extra, h), x_of_lane
                        )
        rows.append(sums[: layout.length] + bias)
    return torch.cat(rows)[: layout.out_features]


CASES = {
    "seed format, 3 bytes": dict(shape=(24, 512), main=8192, residual=256),
    "window of 16 steps": dict(shape=(16, 512), main=4096, residual=256),
    "window of 4 steps": dict(shape=(16, 256), main=8192, residual=512),
    "no residual": dict(shape=(16, 256), main=256, residual=None),
    "ragged": dict(shape=(21, 190), main=300, residual=200),
    "outliers and permutation": dict(
        shape=(24, 300), main=256, residual=256, outliers=44, permute=True
    ),
    "more outliers": dict(shape=(16, 300), main=256, residual=256, outliers=100, permute=True),
    "vectors of 4": dict(shape=(22, 128), main=256, residual=256, length=4),
    "vectors of 16": dict(
        shape=(40, 128), main=256, residual=256, length=16, outliers=32, outlier_length=8
    ),
    "vectors of 12, plain columns": dict(
        shape=(24, 128), main=256, residual=None, length=12, normalize=False
    ),
    "slices of a large codebook": dict(shape=(16, 640), main=65536, residual=256),
    "several ranges": dict(shape=(8, 2200), main=16384, residual=512),
    "slices, outliers, permutation": dict(
        shape=(20, 400), main=16384, residual=None, outliers=40, permute=True
    ),
    "groups": dict(shape=(16, 384), main=64, residual=16, groups=3),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernel_indexing_gives_the_reference_product(case):
    options = dict(case)
    tensor = VectorQuant.random(options.pop("shape"), seed=3, **options)
    layout = lay_out(tensor, dtype=torch.bfloat16, batch=4000)
    x = torch.randn(tensor.in_features).bfloat16()
    multiply = multiply_sliced if layout.sliced else multiply_staged
    torch.testing.assert_close(
        multiply(layout, x), tensor.matmul_reference(x[None])[0], rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize(
    "form, doubled",
    [
        (ItemFormat(10, 8, 0, 3), False),
        (ItemFormat(10, 8, 2, 3), False),
        (ItemFormat(10, 8, 4, 4), False),
        (ItemFormat(11, 8, 3, 3), True),
        (ItemFormat(11, 8, 4, 3), True),
    ],
)
def test_every_item_format_holds_the_same_weight(form, doubled):
    tensor = VectorQuant.random((16, 700), seed=1, main=1024, residual=256)
    layout = lay_out(tensor, dtype=torch.bfloat16, form=form, doubled=doubled)
    x = torch.randn(700).bfloat16()
    torch.testing.assert_close(
        multiply_staged(layout, x), tensor.matmul_reference(x[None])[0], rtol=1e-6, atol=1e-7
    )


def test_the_copy_of_an_entry_lies_in_another_bank():
    entries = torch.arange(4096)
    copies = staged.rotated(entries)
    assert torch.equal(copies.sort().values, entries)
    assert (copies % 8 != entries % 8).all()


def test_items_take_three_bytes_where_they_fit():
    small = lay_out(VectorQuant.random((16, 1024), main=8192, residual=512), dtype=torch.bfloat16)
    assert small.stream.numel() == 2 * 1024 * 3
    large = lay_out(VectorQuant.random((16, 4096), main=65536, residual=256), dtype=torch.bfloat16)
    assert large.stream.numel() * 4 < 2 * 4096 * 4 * 1.2  # padding of the lists


@pytest.mark.parametrize(
    "options, reason",
    [
        (dict(main=16, residual=1024), "1024 residual centroids are more than 512"),
        (dict(main=16, length=24), "vectors of 24 are longer than 16"),
    ],
)
def test_a_weight_without_a_kernel_is_decoded_and_says_why(options, reason):
    tensor = VectorQuant.random((48, 64), outliers=16, outlier_length=8, permute=True, **options)
    weight = vptq.prepare(tensor, dtype=torch.float32, ops=reference)
    assert "float32" in weight.why
    x = torch.randn(5, 64)
    torch.testing.assert_close(weight(x), tensor.matmul_reference(x).float(), rtol=1e-4, atol=1e-4)
    assert reason in vptq.prepare(tensor, dtype=torch.bfloat16, ops=reference).why


H200 = GPUS["sm_90a"]


@pytest.mark.parametrize("main, residual", [(8192, 256), (4096, 256), (4096, 512), (8192, 512)])
@pytest.mark.parametrize("columns", [1024, 16384, 29568])
@pytest.mark.parametrize("rows", [1, 8])
def test_a_plan_covers_every_column_and_stays_within_shared_memory(main, residual, columns, rows):
    layout = lay_out(
        VectorQuant.random((1056, 256), main=main, residual=residual), dtype=torch.bfloat16
    )
    stream = layout.stream.new_empty(0).expand(132, columns // 256 + 1, 0)
    grown = dataclasses.replace(layout, stream=stream, in_features=columns)
    plan = gather_plan.choose((grown,), rows, H200)
    assert plan is not None and plan.shared <= H200.shared_most
    if plan.launch.kernel == "staged":
        assert plan.x_columns >= 256 * min(plan.phase, grown.chunks)
        assert plan.phase >= 8 or plan.phase >= grown.chunks


@pytest.mark.parametrize(
    ("books", "kind"),
    [
        ((4096, 512), dict(resident=2, copies=1)),
        ((4096, 256), dict(resident=2, copies=2)),
        ((8192, 256), dict(share=2)),
    ],
)
def test_small_weights_leave_room_for_a_neighbour_where_older_gpus_overlap_launches(
    monkeypatch, books, kind
):
    a100, main, residual = GPUS["sm_80"], *books
    parts = (
        gather_plan.outline(
            VectorQuant.random((4096, 1024), main=main, residual=residual), doubled=False
        ),
    )
    alone, hopper = gather_plan.choose(parts, 1, a100), gather_plan.choose(parts, 1, H200)
    assert alone.launch.resident == alone.launch.share == 1
    monkeypatch.setattr(gather_plan.dependent_launch, "enabled", True)
    beside = gather_plan.choose(parts, 1, a100)
    assert {name: getattr(beside.launch, name) for name in kind} == kind
    assert beside.shared <= a100.shared_memory_per_multiprocessor // beside.launch.resident - 1024
    assert sum(beside.ctas) <= a100.processors // beside.launch.share
    assert gather_plan.choose(parts, 1, H200) == hopper


@pytest.mark.parametrize(
    "options",
    [dict(), dict(outliers=100), dict(length=12), dict(main=300, residual=None, permute=True)],
)
@pytest.mark.parametrize("doubled", [False, True])
def test_an_outline_is_like_the_layout(options, doubled):
    tensor = VectorQuant.random((88, 1100), **(dict(main=4096, residual=256) | options))
    made = lay_out(tensor, dtype=torch.bfloat16, doubled=doubled)
    outline = gather_plan.outline(tensor, doubled=doubled)
    for name in (
        "form",
        "row_blocks",
        "chunks",
        "halves",
        "dense_steps",
        "out_features",
        "in_features",
    ):
        assert getattr(outline, name) == getattr(made, name), name


def test_lookups_of_residuals_are_ordered_where_few_copies_fit():
    tensor = VectorQuant.random((4096, 1024), main=8192, residual=512)
    assert gather_plan.residual_copies(tensor, H200, doubled=False) == 8
    assert gather_plan.residual_copies(tensor, GPUS["sm_80"], doubled=False) < 8
    assert (
        gather_plan.residual_copies(
            VectorQuant.random((64, 512), residual=None), GPUS["sm_80"], doubled=False
        )
        == 8
    )


COMMON = dict(
    MAIN_BITS=13, RES_BITS=8, POS_BITS=3, ITEM_BYTES=3, PIECES=1, COPIES=8, FP16=0, RESIDENT=1
)


def rows_shape(tokens, warps, paired=False):
    return vptq_rows.shape_for(13, 8, tokens, warps, 232448, paired=paired).defines | dict(DENSE=0)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    "file, defines",
    [
        ("vptq.cu", dict(KERNEL=0, ROWS=1, WARPS=16, BY_COUNTERS=1, RESIDENT=2, MAIN_BITS=12)),
        ("vptq.cu", dict(KERNEL=0, ROWS=1, WARPS=16)),
        ("vptq.cu", dict(KERNEL=0, ROWS=8, WARPS=16)),
        ("vptq.cu", dict(KERNEL=1, ROWS=1, WARPS=8)),
        ("vptq.cu", dict(KERNEL=2, ROWS=2, WARPS=32, POS_BITS=11, ITEM_BYTES=4)),
        ("vptq.cu", dict(KERNEL=0, ROWS=1, WARPS=16, NORM=1)),
        ("vptq.cu", dict(KERNEL=0, ROWS=1, WARPS=16, GATED=2)),
        *(("vptq_decode.cu", dict(WARPS=16, IN_TILES=tiles)) for tiles in (0, 1)),
        *(
            (
                "vptq_pack.cu",
                dict(
                    WARPS=4,
                    NORM=1,
                    GATED=0,
                    STAGE_STEPS=4,
                    PARTS=3,
                    APART=whole,
                    BOOK_BYTES=131072,
                    WHOLE=whole,
                ),
            )
            for whole in (0, 1)
        ),
        (
            "vptq_pack.cu",
            dict(
                WARPS=4,
                NORM=0,
                GATED=2,
                STAGE_STEPS=4,
                PARTS=1,
                APART=0,
                BOOK_BYTES=131072,
                WHOLE=1,
            ),
        ),
        ("vptq_rows.cu", rows_shape(64, 12) | dict(DENSE=1)),
        ("vptq_rows.cu", rows_shape(64, 12, paired=True) | dict(COMING=1)),
        *(
            ("vptq_bytes.cu", dict(ROWS=rows, WARPS=16, OWN=1, COPIES=16, UNITS=3, NORM=0, GATED=2))
            for rows in (1, 2)
        ),
        ("vptq_layout.cu", dict(KERNEL=0, LANES=16)),
        ("vptq_layout.cu", dict(KERNEL=1, OWN=1)),
        ("vptq_layout.cu", dict(KERNEL=2)),
    ],
)
def test_kernels_compile(file, defines, arch, tmp_path, monkeypatch):
    pytest.importorskip("cuda.core")
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path))
    assert compiler.compile_cubin(file, COMMON | defines, arch)


@pytest.mark.parametrize(
    ("tokens", "warps", "paired"),
    [
        *itertools.product((16, 32, 64), (8, 12), (False, True)),
        (8, 8, False),
        (8, 12, False),
        (128, 8, False),
        (128, 8, True),
    ],
)
def test_products_are_in_flight_while_the_next_weights_are_looked_up(tokens, warps, paired):
    """Where the compiler cannot tell that nobody touches their registers, it does one after the
    other, and says so.
    """
    core = pytest.importorskip("cuda.core")
    defines = [
        (name, str(value)) for name, value in (COMMON | rows_shape(tokens, warps, paired)).items()
    ]
    options = core.ProgramOptions(std="c++17", arch="sm_90a", define_macro=defines)
    log = io.StringIO()
    core.Program(compiler.source_of("vptq_rows.cu"), code_type="c++", options=options).compile(
        "cubin", logs=log
    )
    assert "serialized" not in log.getvalue()
