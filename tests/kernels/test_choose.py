"""Which kernel multiplies how many rows of a format on which GPU, and what is said about it."""

import dataclasses

import pytest
import torch

from flyweight import gpu
from flyweight.gpu import GPUS
from flyweight.kernels import dispatch, reference, tuned
from flyweight.kernels.linear.choose import KERNELS, NEXT, choose, explain, route, within_attention
from flyweight.kernels.linear.format import FORMATS
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.kernels.linear.tiles import Matrix, TiledWeight, format_for
from flyweight.tensors import Float8, Int8Channel, IntGroup, Sparse24

H200 = GPUS["sm_90a"]
HOPPER_ONLY = {"gemv_cluster", "gemm", "gemm_dequantized"}


def matrix(name, outputs=6144, inputs=4096):
    return Matrix(FORMATS[name], outputs, inputs, 128 if FORMATS[name].grouped else 64)


def wanted(name, rows, outputs=6144, inputs=4096, **fusion):
    return route(matrix(name, outputs, inputs), rows, H200, **fusion).kernel


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_a_route_for_any_number_of_rows(name):
    routes = tuned.of(H200).formats[name].routes
    assert routes[0].rows == 1 and [one.rows for one in routes] == sorted(
        one.rows for one in routes
    )
    assert {one.kernel for one in routes} <= set(KERNELS) == set(NEXT)
    assert all(one.why for one in routes)
    expected = ("gemm_mma", "gemm_mma") if FORMATS[name].widened else ("gemv", "gemm")
    assert (wanted(name, 1), wanted(name, 512)) == expected


@pytest.mark.parametrize(
    ("name", "rows", "small", "large"),
    [
        ("w8a8", 4, "gemm_small", "gemm_small"),
        ("w8a8", 64, "gemm", "gemm"),
        ("w8a8", 32, "gemm", "gemm"),
        ("int4", 8, "gemv_cluster", "gemv_cluster"),
        ("int4", 16, "gemv_cluster", "gemm_int16"),
        ("w8a8", 9, "gemm", "gemm"),
        ("int8", 5, "gemv_cluster", "gemv_cluster"),
        ("int8", 16, "gemm_int16", "gemm_int16"),
        ("w8a8", 7, "gemv_cluster", "gemm_small"),
        ("w8a8", 8, "gemm", "gemm_small"),
        ("int8", 1024, "gemm", "cublas"),
        ("int4", 2048, "gemm", "cublas"),
        ("int8", 4096, "cublas", "cublas"),
        ("int4", 32, "gemm", "gemm"),
        ("plain", 4096, "gemm", "cublas"),
        ("int4", 64, "gemm", "gemm"),
        ("int8", 17, "gemm", "gemm"),
        ("plain", 16, "gemm_small", "gemm_small"),
        ("plain", 64, "gemm", "gemm"),
        ("sparse-int8", 4, "gemv", "gemv"),
        ("sparse-int8", 8, "gemm_small", "gemm_small"),
        ("sparse-int4", 32, "gemm", "gemm"),
        ("sparse-w8a8", 8, "gemm_small", "gemm_small"),
        ("sparse-w8a8", 16, "gemm", "gemm_small"),
    ],
)
def test_the_kernel_measured_to_be_fastest_is_wanted(name, rows, small, large):
    assert (wanted(name, rows, 6144, 4096), wanted(name, rows, 4096, 12288)) == (small, large)


def test_x_that_the_kernel_before_packs_is_multiplied_as_codes():
    assert [wanted("int4", rows, 4096, 12288, residual=True) for rows in (2048, 4096)] == [
        "gemm",
        "cublas",
    ]


def test_many_codes_with_silu_are_written_out_for_gemm():
    found = [
        wanted(name, 4096, 24576, 4096, gated=True) for name in ("int4", "int8", "w8a8", "plain")
    ]
    assert found == ["gemm_dequantized", "gemm_dequantized", "gemm", "gemm"]
    assert wanted("int4", 2048, 24576, 4096, gated=True) == "gemm"


def test_small_linears_with_a_residual_are_multiplied_as_those_around_them():
    found = [wanted("int4", 16, 4096, 4096, residual=residual) for residual in (True, False)]
    assert found == ["gemm_int16", "gemv_cluster"]


def test_eight_rows_with_a_residual_stay_in_registers():
    found = [wanted("w8a8", 8, 4096, 4096, residual=residual) for residual in (True, False)]
    assert found == ["gemv_cluster", "gemm"]


def test_few_rows_of_fewer_inputs_stay_with_gemv():
    assert [wanted("w8a8", rows, 1536, 576) for rows in (4, 8, 9)] == ["gemv", "gemv", "gemm"]
    within = [
        within_attention(matrix(name, 6144, inputs), 8, H200)
        for name, inputs in (("w8a8", 2048), ("w8a8", 4096), ("int4", 4096))
    ]
    assert within == [True, False, True]


@pytest.mark.parametrize(
    "device",
    [one for one in GPUS.values() if not one.has_warpgroups],
    ids=lambda one: one.architecture,
)
@pytest.mark.parametrize(
    "tensor, nine_rows",
    [
        (Int8Channel.random((64, 128)), "gemm_small"),
        (IntGroup.random((4096, 4096), group_size=128), "gemm_mma"),
    ],
    ids=["w8a8", "int4"],
)
def test_a_device_without_the_fastest_kernel_takes_the_next(monkeypatch, tensor, nine_rows, device):
    monkeypatch.setattr(gpu, "of", lambda _: device)
    linear = TiledLinear(tensor, dtype=torch.bfloat16, ops=reference)
    for rows in (1, 2, 4, 8, 9, 16, 32, 64, 100, 512, 4096):
        for norm, residual in ((False, False), (True, False), (False, True)):
            found = linear.choose(rows, norm=norm, residual=residual)
            assert found.kernel not in HOPPER_ONLY | {"cublas"} and found.why
    assert [linear.kernel_for(rows) for rows in (1, 9, 100, 8192)] == [
        "gemv",
        nine_rows,
        "gemm_mma",
        "gemm_mma",
    ]


@pytest.mark.parametrize("name", [name for name, one in GPUS.items() if not one.has_warpgroups])
@pytest.mark.parametrize("form", [form for form in FORMATS if form != "fp8"])
def test_no_number_of_rows_is_left_to_cublas_elsewhere(form, name):
    """A weight that is written out for each call costs more bytes than any of the kernels."""
    device = GPUS[name]
    for shape in ((6144, 4096), (24576, 4096), (4096, 12288), (151936, 896), (1000, 7392)):
        weight = TiledWeight(matrix(form, *shape), torch.empty(0), torch.bfloat16)
        found = {choose(weight, rows, device).kernel for rows in (*range(1, 66), 100, 2048, 16384)}
        assert found <= {"gemv", "gemv_splitk", "gemm_small", "gemm_mma"}


def test_float8_has_its_matrix_units_where_there_are_some():
    weight = TiledWeight(matrix("fp8"), torch.empty(0), torch.bfloat16)
    assert (
        choose(weight, 64, GPUS["sm_89"]).kernel
        == choose(weight, 64, GPUS["sm_120a"]).kernel
        == "gemm_mma"
    )
    tensor = Float8.random((64, 128))
    for name, held in (
        ("sm_80", "fp8-wide"),
        ("sm_86", "fp8-wide"),
        ("sm_89", "fp8"),
        ("sm_90a", "fp8"),
    ):
        assert format_for(tensor, torch.bfloat16, GPUS[name]).name == held


def test_rows_that_a_kernel_does_not_take_go_to_the_next(monkeypatch):
    device = dataclasses.replace(H200, multi_processor_count=8)
    monkeypatch.setattr(gpu, "of", lambda _: device)

    def kernel(shape, rows=8, group=128, gated=False, bits=4, **fusion):
        tensor = IntGroup.random(shape, group_size=group, bits=bits)
        linear = TiledLinear(
            tensor, dtype=torch.bfloat16, ops=reference, activation="silu" if gated else None
        )
        return linear.choose(rows, **fusion).kernel

    assert [kernel((128, 4096), rows) for rows in (5, 8, 9, 16)] == ["gemv_cluster"] * 4
    assert kernel((128, 4096), 16, norm=True) == kernel((128, 4096), 16, residual=True) == "gemm", (
        "with integers for x"
    )
    assert (
        kernel((128, 4096), 16, norm=True, group=64)
        == kernel((128, 2048), 16, norm=True, bits=8)
        == "gemm_small"
    )
    assert (
        kernel((128, 4096), norm=True)
        == kernel((128, 4096), group=64)
        == kernel((128, 4096), gated=True)
        == "gemm_small"
    )
    assert kernel((128, 11008)) == kernel((136, 4096)) == kernel((48, 4096)) == "gemm_small"


def test_borders_and_reasons_are_told():
    told = explain(matrix("w8a8"), H200)
    assert "from 9 rows on gemm.cu, up to 33,554,432 weights" in told
    assert "from 9 rows on gemm.cu, with as many inputs as outputs" in told
    assert wanted("w8a8", 64, 24576, 4096) == "gemm_small"
    told = explain(matrix("int8"), H200)
    assert told.startswith("from 1 row on gemv.cu") and "from 1024 rows on cuBLAS" in told


def test_a_gpu_without_numbers_of_its_own_takes_the_nearest():
    assert tuned.is_measured(H200) and not tuned.is_measured(GPUS["sm_90a:78"])
    assert {tuned.of(one).name for one in GPUS.values() if one.has_warpgroups} == {"NVIDIA H200"}


def test_a_gpu_other_than_hopper_never_takes_hoppers_numbers():
    elsewhere = [one for one in GPUS.values() if not one.has_warpgroups]
    assert {tuned.of(one).capability for one in elsewhere} == {(8, 0)}
    assert not any(tuned.is_measured(one) for one in elsewhere)
    assert {
        one.kernel for form in tuned.of(elsewhere[0]).formats.values() for one in form.routes
    } == {"gemv", "gemm_small", "gemm_mma"}


def test_two_of_four_are_found_where_a_kernel_takes_them():
    dense = Sparse24.random((32, 64)).to_dense()
    found, why = dispatch._find_sparse(dense, torch.bfloat16)
    assert (
        isinstance(dense, Int8Channel)
        and isinstance(found, Sparse24)
        and why == "two of four inputs kept: "
    )
    assert dispatch._find_sparse(Int8Channel.random((32, 64)), torch.bfloat16)[1] == ""


def test_info_names_the_kernels_that_run_on_this_gpu(monkeypatch):
    from flyweight.commands.info import Laid

    linear = TiledLinear(
        IntGroup.random((4096, 4096), group_size=128), dtype=torch.bfloat16, ops=reference
    )
    monkeypatch.setattr(gpu, "of", lambda _: H200)
    told = Laid(linear)
    assert (
        told.kernel.startswith("tiles.int4 (gemv, ")
        and "from 5 rows gemv_cluster, from 17 rows gemm," in told.kernel
    )
    assert (
        told.kernel.endswith("cublas)") and told.why == linear.why and told.nbytes == linear.nbytes
    )
    monkeypatch.setattr(gpu, "of", lambda _: GPUS["sm_89"])
    assert (
        Laid(linear).kernel.endswith("from 3 rows gemm_mma)")
        and "gemv_cluster" not in Laid(linear).kernel
    )
