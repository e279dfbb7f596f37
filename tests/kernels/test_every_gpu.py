"""Every launch of decode steps and passes fits the GPU it is planned for, whichever of the table that is: no GPU needed."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import planned_launches
import pytest

from flyweight.gpu import GPUS

HOPPER_ONLY = {"gemm.cu", "few.cu", "vptq_rows.cu", "prefill_attention.cu"}
MOST_THREADS = 1024
WORKERS = 2
# Every scheme and every preset, at the sizes of a large model or of a small one: all pairs would take many minutes.
MODELS = ("qwen3-8b:bf16", "qwen3-8b:int4", "qwen3-8b:w8a8", "qwen3-8b:vptq", "qwen2-0.5b:sparse-int4", "tiny:int4")
OTHERS = ("qwen3-4b:int8", "qwen2-0.5b:fp8", "smollm2-135m:sparse-w8a8")
EXPERTS = ("qwen2-57b-a14b:int4",)
# The GPUs that leave least: little shared memory, few processors, or neither warpgroup products nor much else.
MORE = {"sm_86": (*OTHERS, *EXPERTS), "sm_90a:78": (*OTHERS, *EXPERTS), "sm_120a": OTHERS}


@pytest.fixture(scope="module")
def planned():
    """(launches, reasons for steps that are not captured) by GPU."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        futures = {name: pool.submit(planned_launches.launches_on, name, (*MODELS, *MORE.get(name, ()))) for name in GPUS}
        return {name: future.result() for name, future in futures.items()}


@pytest.mark.parametrize("name", GPUS)
def test_every_launch_fits(planned, name):
    launches, _ = planned[name]
    gpu = GPUS[name]
    assert len(launches) > 100
    assert {one for one in launches if one.shared > gpu.shared_memory_per_block_optin} == set()
    assert {one for one in launches if not 32 <= one.threads <= MOST_THREADS or one.threads % 32} == set()
    assert {one for one in launches if one.blocks < 1 or one.blocks % one.cluster} == set()


@pytest.mark.parametrize("name", [name for name, gpu in GPUS.items() if not gpu.has_warpgroups])
def test_kernels_that_only_hopper_has_are_planned_nowhere_else(planned, name):
    launches, _ = planned[name]
    assert {(one.file, one.place) for one in launches if one.file in HOPPER_ONLY} == set()
    clusters = {one for one in launches if one.cluster > 1}
    assert not clusters or GPUS[name].major >= 9


@pytest.mark.parametrize("name", [name for name, gpu in GPUS.items() if gpu.has_warpgroups])
def test_hopper_runs_its_own_kernels(planned, name):
    launches, _ = planned[name]
    # a dry run compiles prompts' attention, but has no prompts to launch it for
    assert {one.file for one in launches} >= HOPPER_ONLY - {"prefill_attention.cu"}


@pytest.mark.parametrize("name", [name for name, gpu in GPUS.items() if not gpu.has_warpgroups])
def test_no_weight_is_written_out_for_a_call(planned, name):
    """Codes become floats in registers everywhere: `untile.cu` is for what no kernel takes."""
    launches, _ = planned[name]
    assert {one.place for one in launches if one.file == "untile.cu"} == set()
    assert {"gemm_mma.cu", "batch.cu", "gemv.cu"} <= {one.file for one in launches}


@pytest.mark.parametrize("name", GPUS)
def test_steps_are_captured_on_every_gpu(planned, name):
    _, uncaptured = planned[name]
    assert uncaptured == {}
