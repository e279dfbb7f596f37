"""Every launch of decode steps and passes fits the GPU it is planned for, whichever of the table
that is: no GPU needed.
"""

import clean_process
import planned_launches
import pytest

from flyweight.gpu import GPUS, Gpu, by_name
from flyweight.models import families

HOPPER_ONLY = {"gemm.cu", "few.cu", "vptq_rows.cu", "prefill_attention.cu"}
MOST_THREADS = 1024
WORKERS = 2
# Every scheme and every preset, at the sizes of a large model or of a small one: all pairs would
# take many minutes.
MODELS = (
    "qwen3-8b:bf16",
    "qwen3-8b:int4",
    "qwen3-8b:w8a8",
    "qwen3-8b:vptq",
    "qwen2-0.5b:sparse-int4",
    "tiny:int4",
)
OTHERS = ("qwen3-4b:int8", "qwen2-0.5b:fp8", "smollm2-135m:sparse-w8a8")
EXPERTS = ("qwen2-57b-a14b:int4",)
# GPUs between two others, of the kernels of both: half of the models are enough.
FEWER = ("qwen3-8b:int4", "qwen3-8b:w8a8", "qwen2-0.5b:sparse-int4")
BETWEEN = {
    "sm_89": FEWER,
    "sm_90a:114": ("qwen3-8b:int4", "qwen3-8b:vptq", "tiny:int4"),
    "sm_100a": FEWER,
}
# The GPUs that leave least: little shared memory, few processors, or neither warpgroup products nor
# much else.
MORE = {"sm_86": (*OTHERS, *EXPERTS), "sm_90a:78": (*OTHERS, "tiny-moe:int4"), "sm_120a": OTHERS}


# Every preset of a family beyond Llama's like, by schemes in turn, on GPUs in turn; the Hoppers
# have those whose kernels differ.
SCHEMES = ("int4", "bf16", "w8a8", "vptq", "fp8")
BENT = (
    "gemma-3-12b:int4",
    "gemma-2-9b:bf16",
    "gpt-oss-20b:mxfp4",
    "glm-4.5-air:int4",
)


# Cards that are in no table: few processors, slices of large ones, generations between and after. A
# model or two each.
UNLISTED = {
    "RTX 3060": (by_name("sm_86:28"), ("qwen2-0.5b:int4",)),
    "RTX 4060": (by_name("sm_89:24"), ("qwen2-0.5b:fp8",)),
    "RTX A400": (by_name("sm_86:6"), ("smollm2-135m:sparse-w8a8",)),
    "a seventh of an A100": (by_name("sm_80:14"), ("qwen2-0.5b:sparse-int4",)),
    "a seventh of an H100": (by_name("sm_90a:16"), ("qwen2-0.5b:int4",)),
    "Jetson Orin": (Gpu(8, 7, 16, 166912, 167936), ("qwen2-0.5b:bf16",)),
    "B300": (Gpu(10, 3, 160, 232448, 233472), ("qwen2-0.5b:int4",)),
    "Jetson Thor": (Gpu(11, 0, 20, 232448, 233472), ("qwen2-0.5b:w8a8",)),
    "GB10": (Gpu(12, 1, 48, 101376, 102400), ("qwen2-0.5b:int4",)),
    "one processor": (by_name("sm_86:1"), ("qwen2-0.5b:int4",)),
}


def scheme_of(i, config):
    if "num_experts_per_tok" in config:  # of which VPTQ's kernels take none
        return ("int4", "mxfp4", "w8a8")[i % 3]
    return SCHEMES[i % len(SCHEMES)]


def families_of(name):
    at = list(GPUS).index(name)
    found = [
        f"{preset}:{scheme_of(i, config)}"
        for i, (preset, config) in enumerate(families.PRESETS.items())
        if i % len(GPUS) == at
    ]
    return tuple(dict.fromkeys([*found, *(BENT if name == "sm_90a" else ())]))


@pytest.fixture(scope="module")
def gathered():
    """A function: what `work` finds of each card and its models, by name. The same processes for
    all, since a dry run is faster in one that has had others: they share what torch has learnt of
    tensors without values.
    """

    def gather(work, cards):
        futures = {name: pool.submit(work, *card) for name, card in cards.items()}
        return {name: future.result() for name, future in futures.items()}

    with clean_process.pool(WORKERS) as pool:
        yield gather


@pytest.fixture(scope="module")
def planned(gathered):
    """(launches, reasons for steps that are not captured) by GPU."""
    cards = {
        name: (gpu, (*BETWEEN.get(name, MODELS), *MORE.get(name, ()))) for name, gpu in GPUS.items()
    }
    return gathered(planned_launches.launches_on, cards)


@pytest.fixture(scope="module")
def planned_families(gathered):
    return gathered(
        planned_launches.families_on, {name: (gpu, families_of(name)) for name, gpu in GPUS.items()}
    )


@pytest.fixture(scope="module")
def planned_unlisted(gathered):
    return gathered(planned_launches.launches_on, UNLISTED)


def assert_fits(launches, gpu):
    assert {one for one in launches if one.shared > gpu.shared_memory_per_block_optin} == set()
    assert {
        one for one in launches if not 32 <= one.threads <= MOST_THREADS or one.threads % 32
    } == set()
    assert {one for one in launches if one.blocks < 1 or one.blocks % one.cluster} == set()


@pytest.mark.parametrize("name", GPUS)
def test_every_launch_fits(planned, name):
    launches, _ = planned[name]
    assert len(launches) > 100
    assert_fits(launches, GPUS[name])


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
    assert_fits(launches, gpu)
    assert gpu.has_warpgroups or {one.place for one in launches if one.file in HOPPER_ONLY} == set()


@pytest.mark.parametrize("name", UNLISTED)
def test_every_launch_fits_a_card_that_is_in_no_table(planned_unlisted, name):
    launches, uncaptured = planned_unlisted[name]
    gpu, _ = UNLISTED[name]
    assert uncaptured == {} and len(launches) > 40
    assert_fits(launches, gpu)
    assert gpu.has_warpgroups or {one.place for one in launches if one.file in HOPPER_ONLY} == set()
    assert gpu.major >= 9 or {one.place for one in launches if one.cluster > 1} == set()


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
