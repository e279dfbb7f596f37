"""How the linear of many rows is cut into tiles, chosen on the host: no GPU needed."""

import itertools

import pytest

from flyweight.kernels import gemm

SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (4608, 3584), (37888, 3584), (3584, 18944), (1000, 576)]
LIMIT = 227 * 1024  # what a CTA may have of an SM's shared memory


@pytest.mark.parametrize("kind", ["plain", "int4", "int8", "w8a8"])
@pytest.mark.parametrize("residual", [False, True])
def test_every_shape_of_the_models_is_taken_at_any_number_of_rows(kind, residual):
    for outputs, inputs in SHAPES:
        for rows in (16, 32, 64, 128, 256, 512, 1024, 16384):
            shape = gemm.shape_for(kind, outputs, inputs, 64, rows, 132, residual=residual)
            assert shape is not None, (outputs, inputs, rows)
            assert shape.shared <= LIMIT and shape.stages >= 2
            assert shape.split != gemm.LINE or shape.tiles <= 2 * 132 or rows <= 64


def test_few_rows_are_cut_along_the_inputs_and_many_into_whole_tiles():
    assert gemm.shape_for("w8a8", 4096, 4096, 64, 16, 132).split == gemm.CLUSTERS
    assert gemm.fastest_tile("w8a8", 4096, 4096, 256, 132) == (128, 1, gemm.WHOLE, 1)  # 14.7 µs; 18.2 and 27.3 with larger ones
    assert gemm.fastest_tile("w8a8", 24576, 4096, 2048, 132) == (256, 2, gemm.WHOLE, 1)
    assert gemm.fastest_tile("w8a8", 2560, 9728, 4096, 132) == (224, 2, gemm.WHOLE, 1)  # three rounds like 256, of smaller tiles
    assert gemm.fastest_tile("plain", 4096, 12288, 512, 132) == (256, 2, gemm.CLUSTERS, 2)
    assert gemm.fastest_tile("int4", 4096, 12288, 256, 132) == (128, 2, gemm.CLUSTERS, 2)
    assert gemm.fastest_tile("int4", 24576, 4096, 256, 132) == (128, 3, gemm.WHOLE, 1)
    assert gemm.fastest_tile("int4", 4096, 4096, 100, 132) == (64, 1, gemm.WHOLE, 1)


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("rows", [128, 256, 512, 1024, 2048])
def test_smaller_tiles_of_codes_have_stages_of_128_inputs(kind, rows):
    for outputs, inputs in SHAPES[:4]:
        shape = gemm.shape_for(kind, outputs, inputs, 128, rows, 132)
        assert (shape.stage_blocks == 1) == (shape.tokens == 256) and shape.grid(132) <= 132 * 2


def test_a_prompt_beside_64_answers_is_cut_into_two_tiles_of_tokens():
    for kind in ("plain", "int4", "w8a8"):
        shapes = [gemm.shape_for(kind, *shape, 64, gemm.padded_rows(320), 132, residual=True) for shape in SHAPES[:4]]
        assert [(shape.tokens, shape.warpgroups) for shape in shapes] == [(160, 2), (160, 1), (160, 2), (160, 1)]


def test_tiles_of_17_to_64_rows_have_an_sm_each_and_slices_of_the_inputs_take_those_left():
    found = {6144: (1, 1), 4096: (1, 2), 2560: (1, 3), 24576: (3, 1), 4608: (2, 3)}  # warpgroups, slices
    assert {outputs: gemm.lone_tiles(outputs, 132) for outputs in found} == found
    assert gemm.lone_tiles(37888, 132) is None  # more tiles than SMs, whatever their size
    shape = gemm.shape_for("plain", 2560, 9728, 64, 64, 132, residual=True)
    assert (shape.split, shape.cluster, shape.grid(132)) == (gemm.MAIL, 3, 120) and shape.shared > LIMIT / 2
    for outputs, inputs in SHAPES:
        shape = gemm.shape_for("int8", outputs, inputs, 64, 64, 132)
        assert shape.split != gemm.MAIL or shape.grid(132) <= 132, "CTAs wait for each other: all have to be resident"


def test_x_of_few_rows_becomes_integers_where_nobody_can_pack_it_ahead():
    def planes(kind, outputs, columns, group, rows):
        return gemm.shape_for(kind, outputs, columns, group, rows, 132).planes

    assert planes("int4", 4096, 12288, 128, 16) and planes("int4", 24576, 4096, 128, 32) and planes("int8", 6144, 4096, 128, 32)
    assert not planes("int4", 4096, 12288, 128, 32), "gate/up packs its x"
    assert not planes("int4", 24576, 4096, 64, 16) and not planes("int4", 24576, 4096, 128, 64)
    assert not planes("plain", 24576, 4096, 0, 16) and not planes("int4", 6144, 4096, 128, 32)
    assert gemm.shape_for("int4", 4096, 12288, 128, 16, 132).teams == 2


@pytest.mark.parametrize(("kind", "outputs", "columns", "group", "worth"), [
    ("int4", 24576, 4096, 128, True), ("int4", 4096, 12288, 128, True), ("int4", 19456, 2560, 128, True),
    ("int4", 24576, 4096, 64, False), ("int8", 6144, 4096, 128, True), ("int8", 24576, 4096, 128, True),
    ("int8", 6144, 2560, 128, False), ("int8", 3584, 18944, 128, False)])
def test_integers_are_worth_it_of_8_bits_where_no_sm_is_idle(kind, outputs, columns, group, worth):
    assert gemm.worth_planes(kind, outputs, columns, group, 16, 132) == worth
    assert not gemm.worth_planes(kind, outputs, columns, group, 8, 132)


def test_sums_of_a_cluster_meet_beside_its_rings_where_that_costs_nothing():
    def apart(kind, outputs, columns, rows, group=128):
        return gemm.shape_for(kind, outputs, columns, group, rows, 132).apart

    assert apart("w8a8", 6144, 4096, 32) and not apart("w8a8", 6144, 2560, 32) and not apart("w8a8", 4096, 12288, 64)
    assert apart("fp8", 6144, 4096, 64) and not apart("w8a8", 6144, 4096, 64), "attention has the room beside qkv"
    assert gemm.shape_for("w8a8", 6144, 4096, 128, 64, 132, bare=True).apart, "alone it is faster"
    assert apart("int8", 4096, 4096, 64) and not apart("int4", 4096, 4096, 64), "for a stage less"
    for kind, rows in (("w8a8", 32), ("fp8", 64), ("int4", 16)):
        shape = gemm.shape_for(kind, 4096, 4096, 128, rows, 132)
        limit = gemm.SHARED_SMALL if shape.beside else gemm.SHARED_CLUSTERS
        assert shape.apart and shape.shared <= limit + 16 * shape.stages + 512


def test_only_so_many_weights_are_fetched_early_as_arrive_while_x_is_packed():
    def early(kind, rows, *, bare=False):
        shape = gemm.shape_for(kind, 4096, 4096, 128, rows, 132, bare=bare)
        return (shape.before * 64 * shape.stage_blocks, shape.before < shape.stages)

    assert [early("int4", rows) for rows in (16, 32, 64)] == [(1024, True), (512, True), (512, True)]
    assert early("w8a8", 64, bare=True) == early("fp8", 64, bare=True) == early("w8a8", 32, bare=True) == (768, True)
    assert not early("w8a8", 64)[1] and not early("plain", 64)[1], "steps do not gain"
    assert not early("w8a8", 16, bare=True)[1] and not early("int4", 256)[1]
    for kind, rows in itertools.product(gemm.BLOCK_BYTES, (8, 16, 64, 300)):
        for outputs, inputs in SHAPES:
            shape = gemm.shape_for(kind, outputs, inputs, 64, rows, 132, bare=True)
            assert shape is None or 1 <= shape.before <= shape.stages


def test_two_teams_share_lone_tiles_of_64_outputs():
    def teams(kind, outputs, rows, **cut):
        return gemm.shape_for(kind, outputs, 4096, 128, rows, 132, **cut).teams

    assert [teams("int4", outputs, 32) for outputs in (6144, 4096, 24576, 37888)] == [2, 2, 1, 1]
    assert teams("int4", 4096, 64) == teams("int4", 4096, 100) == teams("int8", 6144, 32) == 2
    assert [teams("fp8", 4096, rows) for rows in (32, 64)] == [1, 2]
    assert teams("int8", 4096, 64) == teams("plain", 4096, 32) == teams("int4", 4096, 256) == teams("int4", 2560, 32) == 1
    assert teams("int4", 4096, 512, tokens=64, warpgroups=1, split=gemm.WHOLE) == 1, "a CTA has more than one tile"


@pytest.mark.parametrize("kind", ["plain", "int4", "int8", "w8a8"])
@pytest.mark.parametrize("rows, attention", [(32, 22017), (64, 13569)])
def test_a_thread_block_of_decode_attention_has_room_beside_a_tile_of_qkv(kind, rows, attention):
    shape = gemm.shape_for(kind, 6144, 4096, 128, rows, 132)
    assert shape.shared + attention + 2 * 1024 <= 228 * 1024, "1 KB of each is the system's"


@pytest.mark.parametrize("rows, alike", [(9, 16), (17, 32), (200, 256), (257, 320), (321, 384), (385, 512), (600, 640),
                                         (2048, 2048), (2049, 2304)])
def test_calls_of_similar_numbers_of_rows_share_one_kernel(rows, alike):
    assert gemm.padded_rows(rows) == alike


def test_rows_that_are_normed_are_packed_by_more_warps_and_quantized_ones_by_more_ctas():
    def found(inputs, rows, norm=False, quantized=False):
        return gemm.pack_shape(inputs, rows, norm=norm, quantized=quantized)

    assert found(4096, 2048, norm=True) == (8, 12, 1)
    assert [found(inputs, 2048, norm=True, quantized=True) for inputs in (4096, 2560, 1536)] == [(2, 8, 1), (2, 5, 1), (8, 8, 1)]
    assert [found(inputs, 2048, quantized=True) for inputs in (4096, 9728, 12288, 18944)] == [
        (4, 4, 1), (2, 19, 1), (4, 12, 1), (8, 24, 1)]
    assert [found(inputs, 64, quantized=True) for inputs in (4096, 9728, 18944)] == [(2, 8, 1), (2, 8, 3), (2, 16, 3)]
    assert found(4096, 64, norm=True) == (2, 8, 2) and found(4096, 64, norm=True, quantized=True) == (1, 8, 1)


def test_rows_nobody_sums_up_and_few_rows_are_packed_in_parts():
    for inputs in (192, 576, 1536, 4096, 7392, 12288, 18944, 29568):
        eights = -(-inputs // 64) * 8
        for rows in (8, 32, 64, 256, 2048):
            each, warps, parts = gemm.pack_shape(inputs, rows, norm=False, quantized=False)
            assert each == 8 and (parts == 1 or parts * warps * 4 == eights)
            for norm, quantized in ((False, True), (True, False), (True, True)):
                each, warps, parts = gemm.pack_shape(inputs, rows, norm=norm, quantized=quantized)
                held = -(-eights * each // (32 * warps))
                assert rows % each == 0 and parts <= held
                assert rows > 32 or (each == 1 and parts == (1 if norm and quantized else held))


def test_three_warpgroups_get_no_tile_whose_sums_have_no_registers():
    cut = dict(warpgroups=3, split=gemm.WHOLE)
    found = {(kind, tokens): gemm.shape_for(kind, 24576, 4096, 128, 512, 132, tokens=tokens, **cut) is None
             for kind in ("fp8", "int4") for tokens in (64, 128, 192)}
    assert found == {("fp8", 64): False, ("fp8", 128): True, ("fp8", 192): True,
                     ("int4", 64): False, ("int4", 128): False, ("int4", 192): True}
