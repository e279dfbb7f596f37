"""How the linear of many rows is cut into tiles, chosen on the host: what holds on every GPU, and
what was measured on one.
"""

import itertools
import math

import pytest

from flyweight.gpu import GPUS, KB
from flyweight.kernels import tuned
from flyweight.kernels.linear import gemm, gemm_shape
from flyweight.kernels.linear.format import FORMATS
from flyweight.kernels.linear.gemm_shape import (
    CLUSTERS,
    LINE,
    MAILBOX,
    WHOLE,
    Forced,
    Product,
    fastest_tile,
    shape_for,
)
from flyweight.kernels.linear.tiles import Matrix

SHAPES = [
    (6144, 4096),
    (4096, 4096),
    (24576, 4096),
    (4096, 12288),
    (4608, 3584),
    (37888, 3584),
    (3584, 18944),
    (1000, 576),
]
ROWS = (8, 16, 32, 64, 128, 256, 320, 512, 1024, 16384)
HOPPER = {name: one for name, one in GPUS.items() if one.has_warpgroups}
H200 = GPUS["sm_90a"]
NUMBERS = tuned.of(H200)


def matrix(name, outputs, inputs, group=None):
    return Matrix(
        FORMATS[name],
        outputs,
        inputs,
        group or (128 if FORMATS[name].grouped and inputs % 128 == 0 else 64),
    )


def shapes_of(name):
    """Those of which stages can be made: blocks that are read together are not cut."""
    even = FORMATS[name].unit_blocks
    return [(outputs, inputs) for outputs, inputs in SHAPES if inputs // 64 % even == 0]


def shape(name, outputs, inputs, rows, group=None, *, forced=None, **options):
    return shape_for(
        Product(matrix(name, outputs, inputs, group), rows, **options), H200, forced or Forced()
    )


# -- properties ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", HOPPER.values(), ids=HOPPER.keys())
@pytest.mark.parametrize("name", FORMATS)
def test_every_shape_fits_its_gpu_and_covers_all_outputs_in_whole_stages(name, device):
    for (outputs, inputs), rows, residual in itertools.product(
        shapes_of(name), ROWS, (False, True)
    ):
        product = Product(matrix(name, outputs, inputs), rows, residual=residual)
        found = shape_for(product, device)
        assert found is not None, (outputs, inputs, rows)
        assert found.shared <= device.shared_most and 2 <= found.stages <= gemm_shape.MOST_STAGES
        assert found.tiles * 64 * found.warpgroups * found.tokens >= outputs * rows, (
            "an output has no tile"
        )
        assert product.matrix.blocks % found.stage_blocks == 0, "inputs end within a stage"
        assert product.matrix.blocks // found.stage_blocks >= found.cluster, (
            "a CTA of a cluster has no stage"
        )
        assert 1 <= found.early_stages <= found.stages and 32 <= found.block <= 1024
        grid = found.grid(device.processors)
        assert found.split != MAILBOX or grid <= device.processors, (
            "CTAs wait for each other: all have to be resident"
        )
        assert found.split not in (CLUSTERS, MAILBOX) or grid == found.tiles * found.cluster
        assert found.cluster <= gemm_shape.MOST_CLUSTER


@pytest.mark.parametrize("device", HOPPER.values(), ids=HOPPER.keys())
@pytest.mark.parametrize("name", [name for name, one in FORMATS.items() if one.grouped])
def test_stages_hold_whole_groups_or_whole_parts_of_one(name, device):
    for (outputs, inputs), rows, group in itertools.product(
        SHAPES[:4], ROWS, (32, 64, 128, 256, 4096)
    ):
        found = shape_for(Product(matrix(name, outputs, inputs, group), rows), device)
        if found is None or group >= inputs:
            continue
        span = 64 * found.stage_blocks
        assert span % group == 0 or (group % span == 0 and not found.int16_inputs)


@pytest.mark.parametrize("device", HOPPER.values(), ids=HOPPER.keys())
def test_kernels_beside_each_other_leave_room_for_two(device):
    for name, (outputs, inputs), rows in itertools.product(FORMATS, SHAPES, (8, 16, 32, 64)):
        if (outputs, inputs) not in shapes_of(name):
            continue
        found = shape_for(Product(matrix(name, outputs, inputs), rows), device)
        if found.beside:
            assert 2 * (found.shared + KB) <= device.shared_memory_per_multiprocessor, (
                "1 KB of each is the system's"
            )


@pytest.mark.parametrize(
    "device",
    [one for one in GPUS.values() if not one.has_warpgroups],
    ids=lambda one: one.architecture,
)
def test_gpus_without_warpgroups_say_so(device):
    for name, (outputs, inputs) in itertools.product(FORMATS, SHAPES):
        assert "Hopper" in gemm.unsupported_reason(matrix(name, outputs, inputs), 64, device)


@pytest.mark.parametrize(
    "rows, alike",
    [
        (9, 16),
        (17, 32),
        (200, 256),
        (257, 320),
        (321, 384),
        (385, 512),
        (600, 640),
        (2048, 2048),
        (2049, 2304),
    ],
)
def test_calls_of_similar_numbers_of_rows_share_one_kernel(rows, alike):
    assert gemm.padded_rows(rows) == alike


def test_rows_are_packed_by_ctas_that_hold_them():
    for inputs, rows in itertools.product(
        (192, 576, 1536, 4096, 7392, 12288, 18944, 29568), (8, 32, 64, 256, 2048)
    ):
        eights = -(-inputs // 64) * 8
        each, warps, parts = gemm.packing_for(inputs, rows, norm=False, quantized=False)
        assert each == 8 and (parts == 1 or parts * warps * 4 == eights)
        for norm, quantized in ((False, True), (True, False), (True, True)):
            each, warps, parts = gemm.packing_for(inputs, rows, norm=norm, quantized=quantized)
            held = -(-eights * each // (32 * warps))
            assert rows % each == 0 and parts <= held and 32 * warps <= 1024
            assert rows > 32 or (each == 1 and parts == (1 if norm and quantized else held))


def test_forced_parts_of_a_shape_are_taken():
    forced = Forced(tokens=64, warpgroups=1, split=WHOLE, stage_blocks=1, teams=1, early_stages=1)
    found = shape("int4", 4096, 4096, 512, forced=forced)
    assert (
        found.tokens,
        found.warpgroups,
        found.split,
        found.stage_blocks,
        found.early_stages,
    ) == (64, 1, WHOLE, 1, 1)


# -- what was measured on an H200 -----------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name for name, numbers in NUMBERS.formats.items() if not numbers.gemm_one_tile_per_sm]
)
def test_few_rows_are_cut_along_the_inputs_up_to_the_files_rows(name):
    """`gemm_cluster_rows`, where tiles that have an SM each do not come before."""
    numbers = NUMBERS.formats[name]
    for large, (outputs, inputs) in enumerate(((4096, 4096), (24576, 4096))):
        most = numbers.gemm_cluster_rows[large]
        assert shape(name, outputs, inputs, most).split == CLUSTERS
        if most < 64:
            assert shape(name, outputs, inputs, 2 * most).split == LINE


@pytest.mark.parametrize("name", FORMATS)
def test_many_rows_take_a_tile_of_the_file(name):
    numbers = NUMBERS.formats[name]
    known = {tuple(tile[:2]) for tile in NUMBERS.gemm.tiles[numbers.gemm_tiles]} | {(256, 2)}
    for (outputs, inputs), rows in itertools.product(SHAPES, (100, 256, 512, 1024, 2048, 4096)):
        tokens, warpgroups, split, slices = fastest_tile(matrix(name, outputs, inputs), rows, H200)
        assert (tokens, warpgroups) in known and (slices == 2) == (split == CLUSTERS)
        assert split != CLUSTERS or numbers.gemm_halves_inputs
    assert fastest_tile(matrix(name, 24576, 4096), 16384, H200)[2:] == (WHOLE, 1), (
        "many rounds of whole tiles"
    )


def test_tiles_of_up_to_64_rows_have_an_sm_each_and_slices_of_the_inputs_take_those_left():
    for outputs, processors in itertools.product(
        (1024, 2560, 4096, 4608, 6144, 24576, 37888), (78, 114, 132)
    ):
        found = gemm_shape.one_tile_per_sm(outputs, processors)
        if found is not None:
            warpgroups, slices = found
            resident = math.ceil(outputs / (64 * warpgroups)) * slices
            assert 0.7 * processors <= resident <= processors
    assert gemm_shape.one_tile_per_sm(37888, 132) is None, (
        "more tiles than SMs, whatever their size"
    )


def test_x_becomes_integers_only_in_whole_groups_of_128():
    for name, rows, group in itertools.product(FORMATS, ROWS, (64, 128)):
        found = gemm_shape.takes_int16(matrix(name, 24576, 4096, group), rows, H200)
        assert not found or ("gemm_int16" in FORMATS[name].kernels and group == 128 and rows <= 32)
    assert gemm_shape.takes_int16(matrix("int4", 24576, 4096), 16, H200)
    worth = {
        name: gemm_shape.int16_pays(matrix(name, 6144, 2560), 16, H200) for name in ("int4", "int8")
    }
    assert worth == {name: NUMBERS.formats[name].int16_always for name in worth}
    assert not gemm_shape.int16_pays(matrix("int4", 24576, 4096), 8, H200)


@pytest.mark.parametrize("name", FORMATS)
def test_two_teams_share_lone_tiles_for_the_files_numbers_of_tokens(name):
    first, last = NUMBERS.formats[name].gemm_team_tokens
    for (outputs, inputs), rows in itertools.product(shapes_of(name), ROWS):
        found = shape(name, outputs, inputs, rows)
        assert found.teams == 1 or (
            first <= found.tokens <= last and found.warpgroups == 1 and not found.beside
        )


@pytest.mark.parametrize("name", ["plain", "int4", "int8", "w8a8"])
@pytest.mark.parametrize("rows, attention", [(32, 22017), (64, 13569)])
def test_a_thread_block_of_decode_attention_has_room_beside_a_tile_of_qkv(name, rows, attention):
    found = shape(name, 6144, 4096, rows)
    assert found.shared + attention + 2 * KB <= H200.shared_memory_per_multiprocessor, (
        "1 KB of each is the system's"
    )


def test_three_warpgroups_get_no_tile_whose_sums_have_no_registers():
    for name in ("fp8", "int4"):
        border = NUMBERS.formats[name].gemm_register_tokens
        for tokens in (64, 128, 192):
            forced = Forced(warpgroups=3, split=WHOLE, tokens=tokens)
            assert (shape(name, 24576, 4096, 512, forced=forced) is None) == (tokens >= border)
