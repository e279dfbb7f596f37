"""Steps all of whose layers leave room for another kernel on every SM, planned without a GPU."""

import clean_process
import pytest

from flyweight.engine import ahead
from flyweight.engine.graphs import DecodeGraphs
from flyweight.engine.rows import Rows
from flyweight.engine.speculation.shared_rows import SharedRows
from flyweight.gpu import GPUS
from flyweight.kernels import jit
from flyweight.kernels.dry_run import dry_run

SIZES = (1, 2, 4, 8)


def plan(preset, name):
    """By rows of a sequence: whether layers leave room, and their kernels. For a process of its
    own.
    """
    found = {}
    with dry_run(GPUS[name]):
        decoder = ahead.load(preset, None)
        decoder.blocks = decoder.blocks * 2
        caches = ahead.make_caches(decoder, None)
        rows = Rows(8, pages=66, vocabulary=decoder.config.vocab_size, device=decoder.device)
        with decoder.active():
            graphs = DecodeGraphs(decoder, caches, SharedRows(rows), sizes=SIZES)
            for size in SIZES:
                jit.wanted.clear()
                step = graphs.step(size)
                step.launch()
                found[size] = (
                    step.decode.roomy,
                    [(one.file, dict(one.defines)) for one in jit.wanted],
                )
    return found


def planned(preset, name="sm_90a"):
    with clean_process.pool() as pool:
        return pool.submit(plan, preset, name).result()


def test_layers_that_were_measured_go_through_few_as_a_whole():
    found = planned("preset:qwen3-8b:int4")
    assert [found[size][0] for size in SIZES] == [False, False, True, True]
    for size in (4, 8):
        kernels = found[size][1]
        few = {(one["NDIM"], one["KDIM"]) for file, one in kernels if file == "few.cu"}
        assert few == {(4096, 4096), (24576, 4096), (4096, 12288)}
        (fused,) = (one for file, one in kernels if file == "qkv_attention.cu")
        assert fused["BESIDE"] == fused["IN_REGISTERS"] == fused["TOGETHER"] == 1
        assert fused["SHARED_BYTES"] <= GPUS["sm_90a"].shared_beside(0)


@pytest.mark.parametrize(
    "preset, name",
    [("qwen3-4b:int4", "sm_90a"), ("qwen3-8b:w8a16", "sm_90a"), ("qwen3-8b:int4", "sm_89")],
)
def test_others_stay_as_they_are(preset, name):
    found = planned(f"preset:{preset}", name)
    assert not any(roomy for roomy, _ in found.values())
    assert not any("BESIDE" in one for _, kernels in found.values() for _, one in kernels)
