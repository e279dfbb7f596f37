"""Every launch of decode steps and passes fits the GPU it is planned for, whichever of the table that is: no GPU needed."""

import planned_launches
import clean_process
import pytest

from flyweight.gpu import GPUS
from flyweight.models import families

HOPPER_ONLY = {"gemm.cu", "few.cu", "vptq_rows.cu", "prefill_attention.cu"}
MOST_THREADS = 1024
WORKERS = 2
# Every scheme and every preset, at the sizes of a large model or of a small one: all pairs would take many minutes.
MODELS = ("qwen3-8b:bf16", "qwen3-8b:int4", "qwen3-8b:w8a8", "qwen3-8b:vptq", "qwen2-0.5b:sparse-int4", "tiny:int4")
OTHERS = ("qwen3-4b:int8", "qwen2-0.5b:fp8", "smollm2-135m:sparse-w8a8")
EXPERTS = ("qwen2-57b-a14b:int4",)
# GPUs between two others, of the kernels of both: half of the models are enough.
FEWER = ("qwen3-8b:int4", "qwen3-8b:w8a8", "qwen2-0.5b:sparse-int4")
BETWEEN = {"sm_89": FEWER, "sm_90a:114": ("qwen3-8b:int4", "qwen3-8b:vptq", "tiny:int4"), "sm_100a": FEWER}
# The GPUs that leave least: little shared memory, few processors, or neither warpgroup products nor much else.
MORE = {"sm_86": (*OTHERS, *EXPERTS), "sm_90a:78": (*OTHERS, *EXPERTS), "sm_120a": OTHERS}


# Every preset of a family beyond Llama's like, by schemes in turn, on GPUs in turn; the Hoppers have those whose kernels differ.
SCHEMES = ("int4", "bf16", "w8a8", "vptq", "fp8")
BENT = ("gemma-3-12b:int4", "gemma-2-9b:bf16", "gpt-oss-20b:int4", "gpt-oss-20b:mxfp4", "glm-4.5-air:int4")


def scheme_of(i, config):
    if "num_experts_per_tok" in config:  # of which VPTQ's kernels take none
        return ("int4", "mxfp4", "w8a8")[i % 3]
    return SCHEMES[i % len(SCHEMES)]


def families_of(name):
    at = list(GPUS).index(name)
    found = [f"{preset}:{scheme_of(i, config)}" for i, (preset, config) in enumerate(families.PRESETS.items())
             if i % len(GPUS) == at]
    return tuple(dict.fromkeys([*found, *(BENT if name == "sm_90a" else ())]))


def gathered(work, models_of):
    with clean_process.pool(WORKERS) as pool:
        futures = {name: pool.submit(work, name, models_of(name)) for name in GPUS}
        return {name: future.result() for name, future in futures.items()}


@pytest.fixture(scope="module")
def planned():
    """(launches, reasons for steps that are not captured) by GPU."""
    return gathered(planned_launches.launches_on, lambda name: (*BETWEEN.get(name, MODELS), *MORE.get(name, ())))


@pytest.fixture(scope="module")
def planned_families():
    return gathered(planned_launches.families_on, families_of)


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


@pytest.mark.parametrize("name", GPUS)
def test_every_family_is_captured_and_every_launch_of_it_fits(planned_families, name):
    launches, uncaptured = planned_families[name]
    gpu = GPUS[name]
    assert uncaptured == {} and launches
    assert {one for one in launches if one.shared > gpu.shared_memory_per_block_optin} == set()
    assert {one for one in launches if not 32 <= one.threads <= MOST_THREADS or one.threads % 32} == set()
    assert gpu.has_warpgroups or {one.place for one in launches if one.file in HOPPER_ONLY} == set()


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
