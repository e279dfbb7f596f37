"""Kernels left out of decode steps, as far as a machine without a GPU can tell: what runs instead,
and the rows.
"""

import sys
from pathlib import Path

import clean_process
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import ablation

from flyweight.engine.ahead import Target
from flyweight.gpu import GPUS
from flyweight.kernels.linear import gemm_small
from flyweight.kernels.linear.format import FORMATS
from flyweight.kernels.linear.tiles import Matrix

TARGET = Target(GPUS["sm_90a"], sequences=16)


def test_steps_of_a_model_launch_other_kernels_instead():
    """By a process of its own: one that has pretended a GPU is good for nothing else."""
    small = {"batch.cu", "batch_pack.cu"}
    with clean_process.pool() as pool:
        asked = [
            pool.submit(ablation.wanted_by, "tiny:int4", variants, TARGET)
            for variants in ([("gemm_small",)], [(), ("gemm_small",)])
        ]
        others, all_of_them = ({one.file for one in future.result()} for future in asked)
    assert not small & others and "gemm.cu" in others
    assert small <= all_of_them and others <= all_of_them, "what all variants ask for"


def test_what_was_left_out_comes_back():
    matrix = Matrix(FORMATS["int4"], 4096, 4096, 128)
    before = gemm_small.choose(matrix, 16, GPUS["sm_90a"])
    with pytest.raises(RuntimeError), ablation.without(["gemm_small"]):
        assert gemm_small.choose(matrix, 16, GPUS["sm_90a"]) is None
        raise RuntimeError
    assert before is not None and gemm_small.choose(matrix, 16, GPUS["sm_90a"]) == before


def test_variants_are_kernels_alone_and_together():
    assert ablation.variants_of("gemv_splitk,gemv_cluster+gemm_small") == [
        (),
        ("gemv_splitk",),
        ("gemv_cluster", "gemm_small"),
    ]
    with pytest.raises(SystemExit, match="no kernel gemm_smal can be left out"):
        ablation.variants_of("gemm_smal")


def test_rows_compare_a_variant_with_all_kernels():
    times = {(): [100.0, 102.0, 101.0], ("gemm_small",): [110.0, 112.0, 111.1]}
    kernels = {(): {"qkv": "gemm_small"}, ("gemm_small",): {"qkv": "gemm"}}
    all_of_them, fewer = ablation.result_rows("qwen3-8b:int4", 16, times, kernels)
    assert (all_of_them["without"], all_of_them["ratio"], all_of_them["us"]) == (None, 1.0, 101.0)
    assert (fewer["model"], fewer["scheme"], fewer["rows"], fewer["without"]) == (
        "qwen3-8b",
        "int4",
        16,
        "gemm_small",
    )
    assert round(fewer["ratio"], 3) == 1.1 and fewer["kernels"] == {"qkv": "gemm"}
