"""docs/add-a-gpu.md, done: a GPU that nobody has planned for gets plans that fit it, and numbers
that are not its own.
"""

from __future__ import annotations

import clean_process
import pytest

from flyweight.gpu import GPUS, Gpu
from flyweight.kernels import tuned

# A small Ampere card, as in embedded boards: less shared memory and far fewer SMs than any in the
# table.
SMALL = Gpu(8, 7, 16, 101376, 167936)


def launches_on(gpu: Gpu, model: str) -> list[tuple[str, int, int, int]]:
    """(file, threads, bytes of shared memory, cluster) of every launch of decode steps and a pass.
    For a process of its own.
    """
    from flyweight.engine import ahead
    from flyweight.kernels import jit
    from flyweight.kernels.dry_run import dry_run

    found: list[tuple[str, int, int, int]] = []

    class Recorded:
        def __init__(self, file: str) -> None:
            self.file = file

        def kernel(self, name: str) -> Recorded:
            return self

        def launch(self, grid, block, args=(), *, shared=0, pdl=False, cluster=None) -> None:
            found.append((self.file, block, shared, cluster or 1))

    jit.load = lambda file, **options: Recorded(file)  # type: ignore[assignment]
    with dry_run(gpu):
        decoder = ahead.load(model, None)
        ahead.run_steps(decoder, ahead.Target(gpu, sequences=16))
        ahead.run_pass(decoder, 300)
    return found


@pytest.mark.parametrize("model", ["preset:qwen3-0.6b:int4", "preset:tiny:vptq"])
def test_every_launch_fits_a_gpu_that_is_in_no_table(model):
    with clean_process.pool() as pool:
        found = pool.submit(launches_on, SMALL, model).result()
    assert {file for file, *_ in found} & {"gemv.cu", "vptq.cu", "vptq_layout.cu"}
    for file, threads, shared, cluster in found:
        assert shared <= SMALL.shared_memory_per_block_optin and threads <= 1024 and cluster == 1, (
            file
        )
        assert file not in ("gemm.cu", "few.cu", "vptq_rows.cu", "prefill_attention.cu"), (
            "its body is empty there"
        )


def test_it_takes_the_numbers_of_the_nearest_gpu_and_says_so():
    assert not tuned.is_measured(SMALL) and tuned.is_measured(GPUS["sm_90a"])
    assert tuned.of(SMALL).name == "NVIDIA H200 running code for compute_80"


def test_limits_follow_from_the_facts_of_a_device():
    for name, gpu in GPUS.items():
        assert (
            gpu.shared_least <= gpu.shared_beside(2048) < gpu.shared_excluding <= gpu.shared_most
        ), name
        assert 2 * gpu.shared_excluding > gpu.shared_memory_per_multiprocessor - 2048, (
            "two never fit"
        )
        assert gpu.has_warpgroups == name.startswith("sm_90a")
