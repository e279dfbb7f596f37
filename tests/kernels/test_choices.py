"""Which kernel takes how many rows of a format, and what is said about it."""

import pytest
import torch

from flyweight.kernels import choices, dispatch, few, gemm, gemv
from flyweight.kernels.cuda_linear import CudaLinear
from flyweight.tensors import Int8Channel, IntGroup, Sparse24


@pytest.mark.parametrize("kind", gemv.FORMATS)
def test_every_format_has_a_way_for_any_number_of_rows(kind):
    ways = choices.WAYS[kind]
    assert ways[0].rows == 1 and [way.rows for way in ways] == sorted(way.rows for way in ways)
    assert {way.kernel for way in ways} <= set(choices.KERNELS)
    assert choices.wanted(kind, 1) == "gemv" and choices.wanted(kind, 512) == "gemm"
    assert kind in choices.WARPS and kind in choices.PRODUCTS and kind in choices.EXPERT_TOKENS


@pytest.mark.parametrize(("kind", "rows", "small", "large"), [
    ("w8a8", 4, "batch", "batch"), ("w8a8", 64, "gemm", "gemm"),
    ("w8a8", 32, "gemm", "gemm"), ("int4", 8, "few", "few"), ("int4", 16, "few", "planes"), ("w8a8", 9, "gemm", "gemm"),
    ("int8", 5, "few", "few"), ("int8", 16, "planes", "planes"), ("w8a8", 7, "few", "batch"), ("w8a8", 8, "gemm", "batch"),
    ("int8", 1024, "gemm", "cublas"), ("int4", 2048, "gemm", "cublas"),
    ("int8", 4096, "cublas", "cublas"), ("int4", 32, "gemm", "gemm"), ("plain", 4096, "gemm", "cublas"),
    ("int4", 64, "gemm", "gemm"), ("int8", 17, "gemm", "gemm"), ("plain", 16, "batch", "batch"),
    ("plain", 64, "gemm", "gemm"), ("sparse-int8", 4, "gemv", "gemv"), ("sparse-int8", 8, "batch", "batch"),
    ("sparse-int4", 32, "gemm", "batch"), ("sparse-w8a8", 8, "batch", "batch"), ("sparse-w8a8", 16, "gemm", "batch")])
def test_the_way_measured_to_be_fastest_is_wanted(kind, rows, small, large):
    assert (choices.wanted(kind, rows, 6144, 4096), choices.wanted(kind, rows, 4096, 12288)) == (small, large)


def test_x_that_the_kernel_before_packs_is_multiplied_as_codes():
    assert [choices.wanted("int4", rows, 4096, 12288, residual=True) for rows in (2048, 4096)] == ["gemm", "cublas"]


def test_many_codes_with_silu_are_written_out_for_gemm():
    found = [choices.wanted(kind, 4096, 24576, 4096, gated=True) for kind in ("int4", "int8", "w8a8", "plain")]
    assert found == ["written", "written", "gemm", "gemm"] and choices.wanted("int4", 2048, 24576, 4096, gated=True) == "gemm"


def test_small_linears_with_a_residual_are_multiplied_as_those_around_them():
    assert [choices.wanted("int4", 16, 4096, 4096, residual=residual) for residual in (True, False)] == ["planes", "few"]


def test_eight_rows_with_a_residual_stay_in_registers():
    assert [choices.wanted("w8a8", 8, 4096, 4096, residual=residual) for residual in (True, False)] == ["few", "gemm"]


def test_few_rows_of_fewer_inputs_stay_with_gemv():
    assert [choices.wanted("w8a8", rows, 1536, 576) for rows in (4, 8, 9)] == ["gemv", "gemv", "gemm"]
    assert choices.within("w8a8", 8, 2048) and not choices.within("w8a8", 8, 4096) and choices.within("int4", 8, 4096)


def test_a_device_without_the_fastest_kernel_takes_the_next(monkeypatch):
    linear, device = CudaLinear(Int8Channel.random((64, 128)), dtype=torch.bfloat16), torch.device("cuda", 7)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(gemv, "processors", lambda index: 132)
    assert [linear.way(rows, device) for rows in (1, 4, 8, 64)] == ["gemv", "gemv", "gemv", "cublas"]


def test_rows_that_few_does_not_take_go_another_way(monkeypatch):
    device = torch.device("cuda", 7)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for module in (gemv, few, gemm):
        monkeypatch.setattr(module, "processors", lambda index: 8)

    def ways(shape, rows=8, group=128, gated=False, bits=4, **options):
        tensor = IntGroup.random(shape, group_size=group, bits=bits)
        return CudaLinear(tensor, dtype=torch.bfloat16, gated=gated).way(rows, device, **options)

    assert [ways((128, 4096), rows) for rows in (5, 8, 9, 16)] == ["few"] * 4
    assert ways((128, 4096), 16, norm=True) == ways((128, 4096), 16, residual=True) == "gemm", "with integers for x"
    assert ways((128, 4096), 16, norm=True, group=64) == ways((128, 2048), 16, norm=True, bits=8) == "batch"
    assert ways((128, 4096), norm=True) == ways((128, 4096), group=64) == ways((128, 4096), gated=True) == "batch"
    assert ways((128, 11008)) == ways((136, 4096)) == ways((48, 4096)) == "batch"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert ways((128, 4096)) == "split"


def test_borders_and_reasons_are_told():
    assert "from 9 rows on gemm.cu, up to 33,554,432 weights" in choices.explain("w8a8")
    assert "from 9 rows on gemm.cu, with as many inputs as outputs" in choices.explain("w8a8")
    assert choices.wanted("w8a8", 64, 24576, 4096) == "batch"
    assert choices.explain("int8").startswith("from 1 row on gemv.cu") and "from 1024 rows on cuBLAS" in choices.explain("int8")


def test_two_of_four_are_found_where_a_kernel_takes_them():
    dense = Sparse24.random((32, 64)).to_dense()
    found, why = dispatch._find_sparse(dense, torch.bfloat16)
    assert isinstance(dense, Int8Channel) and isinstance(found, Sparse24) and why == "two of four inputs kept: "
    assert dispatch._find_sparse(Int8Channel.random((32, 64)), torch.bfloat16)[1] == ""
