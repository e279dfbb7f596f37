"""How linears of 2 to 64 rows are cut over the SMs, chosen on the host: no GPU needed."""

import pytest

from flyweight.gpu import GPUS
from flyweight.kernels.linear import gemm_small, gemv_plan, gemv_splitk
from flyweight.kernels.linear.choose import whole_or_split
from flyweight.kernels.linear.format import FORMATS
from flyweight.kernels.linear.tiles import Matrix

SHAPES = [
    (6144, 4096),
    (4096, 4096),
    (24576, 4096),
    (4096, 12288),
    (4608, 3584),
    (3584, 18944),
    (37888, 3584),
    (2560, 9728),
]
H200 = GPUS["sm_90a"]
BESIDE = H200.shared_beside(gemv_plan.RESERVED_BESIDE)


def taken_by(kernel):
    return [name for name, one in FORMATS.items() if kernel in one.kernels]


def matrix(name, outputs, columns):
    return Matrix(FORMATS[name], outputs, columns, 128 if FORMATS[name].grouped else 64)


@pytest.mark.parametrize("kind", taken_by("gemv_splitk"))
def test_inputs_can_be_cut_so_that_another_kernel_fits_beside(kind):
    for outputs, columns in SHAPES:
        for rows in range(2, 17):
            choice = gemv_splitk.choose(matrix(kind, outputs, columns), rows, H200)
            assert choice is not None and choice.slices > 1 and choice.rows >= rows
            assert choice.plan.shared <= BESIDE and choice.plan.stages >= 3


def test_formats_that_quantize_x_by_its_rows_are_not_cut():
    assert gemv_splitk.choose(matrix("w8a8", 4096, 4096), 8, H200) is None


@pytest.mark.parametrize("kind", taken_by("gemm_small"))
def test_an_sm_holds_one_cta_of_the_kernel_for_more_rows(kind):
    for outputs, columns in SHAPES:
        for rows in (3, 8, 9, 16, 24, 32, 48, 64):
            choice = gemm_small.choose(matrix(kind, outputs, columns), rows, H200)
            assert choice is not None and choice.rows >= rows
            assert H200.shared_excluding <= choice.shared <= H200.shared_most and choice.stages >= 3
            assert choice.warps <= gemm_small.WARPS and choice.tiles <= 16


@pytest.mark.parametrize(
    ("kind", "rows", "slices"),
    [
        ("int4", 16, (4, 4, 1, 6)),
        ("int8", 16, (4, 4, 1, 6)),
        ("int8", 32, (4, 4, 1, 6)),
        ("w8a8", 8, (4, 4, 1, 6)),
        ("w8a8", 64, (None, None, 1, 6)),
        ("plain", 16, (1, 4, 1, 6)),
    ],
)
def test_inputs_are_cut_as_was_measured_to_be_fastest(kind, rows, slices):
    """Within 0.7 microseconds of the best. None: gemm.cu is faster."""
    for (outputs, columns), count in zip(SHAPES[:4], slices, strict=True):
        assert count in (None, gemm_small.choose(matrix(kind, outputs, columns), rows, H200).slices)


@pytest.mark.parametrize("kind", taken_by("gemv_splitk"))
def test_no_kernel_for_few_rows_takes_an_sm_for_itself(kind):
    """Wherever x as a whole leaves no room for the next kernel, it is cut."""
    for outputs, columns in SHAPES:
        for rows in gemv_plan.ROWS:
            if whole_or_split(matrix(kind, outputs, columns), rows, H200) == "gemv":
                assert gemv_plan.fits_beside(matrix(kind, outputs, columns), rows, H200)


def test_slices_of_unequal_length_cover_all_blocks():
    # 148 groups of 2 blocks
    cut, longest, shortest = gemv_plan.slice_blocks(matrix("int4", 3584, 18944), 11)
    assert (cut, longest, shortest) == (2, 28, 26)
    assert gemv_plan.slice_blocks(matrix("plain", 64, 1192), 2) == (1, 10, 9)


def test_an_integer_sum_is_never_taken_for_an_empty_word():
    """mail.cuh's `letter`: all ones would be the largest integer, and no sum of W8A8 is near it."""
    assert 65536 * 128 * 128 < 2**31 - 1 and (2**31 - 1) ^ 0x80000000 == 0xFFFFFFFF
