"""Steps all of whose layers leave room for another kernel on every SM, planned without a GPU."""

import clean_process
import pytest

from flyweight.engine import ahead
from flyweight.engine.graphs import DecodeGraphs
from flyweight.engine.rows import Rows
from flyweight.engine.speculation.shared_rows import SharedRows, runs_as_eight
from flyweight.gpu import GPUS
from flyweight.kernels import jit
from flyweight.kernels.dry_run import dry_run

SIZES = (1, 2, 4, 8)


def plan(preset, name, **options):
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
            graphs = DecodeGraphs(decoder, caches, SharedRows(rows), sizes=SIZES, **options)
            for size in SIZES:
                jit.wanted.clear()
                step = graphs.step(size)
                step.launch()
                found[size] = (
                    step.decode.stage.beside,
                    [(one.file, dict(one.defines)) for one in jit.wanted],
                )
    return found


def planned(preset, name="sm_90a", **options):
    with clean_process.pool() as pool:
        return pool.submit(plan, f"preset:{preset}", name, **options).result()


def sizes_left_out(preset, separate):
    """Of SIZES, where qkv and attention are two kernels for a reason given."""
    with dry_run(GPUS["sm_90a"]):
        decoder = ahead.load(preset, None)
        decoder.blocks = decoder.blocks * 2
        rows = Rows(8, pages=66, vocabulary=decoder.config.vocab_size, device=decoder.device)
        caches = ahead.make_caches(decoder, None)
        graphs = DecodeGraphs(decoder, caches, SharedRows(rows), sizes=SIZES, separate=separate)
        with decoder.active():
            return [size for size in SIZES if runs_as_eight(graphs.step(size).decode)]


@pytest.mark.parametrize("name", ["sm_90a", "sm_90a:114"])
@pytest.mark.parametrize(
    "preset, hidden, attended, inner",
    [
        ("qwen3-8b:int4", 4096, 4096, 12288),
        ("llama-3.1-8b:int4", 4096, 4096, 14336),
        ("qwen2-7b:int4", 3584, 3584, 18944),
        ("qwen3-4b:int4", 2560, 4096, 9728),
        ("qwen2-1.5b:int4", 1536, 1536, 8960),
    ],
)
def test_kernels_of_a_layer_leave_each_other_room_where_all_of_them_can(
    preset, hidden, attended, inner, name
):
    found = planned(preset, name)
    assert [found[size][0] for size in SIZES] == [False, False, True, True]
    for size in (4, 8):
        kernels = found[size][1]
        few = [one for file, one in kernels if file == "few.cu" and "BESIDE" in one]
        shapes = {(one["NDIM"], one["KDIM"]) for one in few}
        assert shapes == {(hidden, attended), (2 * inner, hidden), (hidden, inner)}
        (fused,) = (one for file, one in kernels if file == "qkv_attention.cu")
        assert not fused.get("IN_REGISTERS") or fused["BESIDE"]
        for one in (*few, fused):
            assert one["SHARED_BYTES"] <= GPUS[name].shared_beside(0)


def test_few_inputs_are_converted_soon_enough_without():
    found = planned("qwen2-0.5b:int4")
    assert [found[size][0] for size in SIZES] == [False, False, False, True]


def test_layers_whose_kernels_could_leave_room_need_not():
    found = planned("qwen3-8b:int4", whole_layers=False)
    assert not any(beside for beside, _ in found.values())
    assert not any("BESIDE" in one for _, kernels in found.values() for _, one in kernels)


@pytest.mark.parametrize(
    "preset, name",
    [("gemma-2-9b:int4", "sm_90a"), ("qwen3-8b:w8a16", "sm_90a"), ("qwen3-8b:int4", "sm_89")],
)
def test_others_stay_as_they_are(preset, name):
    """Norms between a layer's linears, a format that has not been measured so, no clusters."""
    found = planned(preset, name)
    assert not any(beside for beside, _ in found.values())
    assert not any("BESIDE" in one for _, kernels in found.values() for _, one in kernels)


@pytest.mark.parametrize(
    "preset, separate, left_out",
    [
        ("qwen3-8b:int4", "tried", SIZES),  # eight rows have few.cu, two have not
        ("qwen3-8b:int4", None, ()),
        ("qwen2-0.5b:nvfp4", "tried", ()),  # gemv.cu takes all of them
    ],
)
def test_steps_run_as_eight_rows_only_where_these_have_kernels_of_their_own(
    preset, separate, left_out
):
    with clean_process.pool() as pool:
        found = pool.submit(sizes_left_out, f"preset:{preset}", separate).result()
    assert found == [*left_out]
