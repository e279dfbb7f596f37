"""How linears of 2 to 64 rows are cut over the SMs, chosen on the host: no GPU needed."""

import pytest

from flyweight.kernels import batch, cuda_linear, gemv, gemv_split

SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (4608, 3584), (3584, 18944), (37888, 3584), (2560, 9728)]


@pytest.mark.parametrize("kind", gemv_split.KINDS)
def test_inputs_can_be_cut_so_that_another_kernel_fits_beside(kind):
    for outputs, columns in SHAPES:
        for rows in range(2, 17):
            choice = gemv_split.choose(kind, outputs, columns, 128, rows, 132)
            assert choice is not None and choice.slices > 1 and choice.rows >= rows
            assert choice.plan.shared <= gemv.SHARED_LIMIT and choice.plan.stages >= 3


def test_formats_that_quantize_x_by_its_rows_are_not_cut():
    assert gemv_split.choose("w8a8", 4096, 4096, 64, 8, 132) is None


@pytest.mark.parametrize("kind", batch.KINDS)
def test_an_sm_holds_one_cta_of_the_kernel_for_more_rows(kind):
    for outputs, columns in SHAPES:
        for rows in (3, 8, 9, 16, 24, 32, 48, 64):
            choice = batch.choose(kind, outputs, columns, 128 if kind in gemv.GROUPED else 64, rows, 132)
            assert choice is not None and choice.rows >= rows
            assert 114 * 1024 < choice.shared <= 226 * 1024 and choice.stages >= 3
            assert choice.warps <= batch.WARPS and choice.tiles <= 16


@pytest.mark.parametrize(("kind", "rows", "slices"), [
    ("int4", 16, (4, 4, 1, 6)), ("int8", 16, (4, 4, 1, 6)), ("int8", 32, (4, 4, 1, 6)), ("w8a8", 8, (4, 4, 1, 6)),
    ("w8a8", 64, (None, None, 1, 6)), ("plain", 16, (1, 4, 1, 6))])
def test_inputs_are_cut_as_was_measured_to_be_fastest(kind, rows, slices):
    """Within 0.7 microseconds of the best. None: gemm.cu is faster."""
    group = 128 if kind in gemv.GROUPED else 64
    for (outputs, columns), count in zip(SHAPES[:4], slices, strict=True):
        assert count in (None, batch.choose(kind, outputs, columns, group, rows, 132).slices)


@pytest.mark.parametrize("kind", gemv_split.KINDS)
def test_no_kernel_for_few_rows_takes_an_sm_for_itself(kind):
    """Wherever x as a whole leaves no room for the next kernel, it is cut."""
    for outputs, columns in SHAPES:
        for rows in gemv.ROWS:
            if cuda_linear.whole_or_split(kind, outputs, columns, 128, rows, 132) == "gemv":
                assert gemv.fitting_plan(kind, columns, 128, rows, tiles=16 // rows).shared <= gemv.SHARED_LIMIT


def test_slices_of_unequal_length_cover_all_blocks():
    cut, longest, shortest = gemv.slice_blocks("int4", 18944, 128, 11)  # 148 groups of 2 blocks
    assert (cut, longest, shortest) == (2, 28, 26)
    assert gemv.slice_blocks("plain", 1192, 64, 2) == (1, 10, 9)


def test_an_integer_sum_is_never_taken_for_an_empty_word():
    """mail.cuh's `letter`: all ones would be the largest integer, and no sum of W8A8 is near it."""
    assert 65536 * 128 * 128 < 2**31 - 1 and (2**31 - 1) ^ 0x80000000 == 0xFFFFFFFF
