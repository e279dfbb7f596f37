"""Layers in the host's memory: the same numbers, from two slots by turns. On a CPU, where a copy is
a copy.
"""

import pytest
import torch

from flyweight.errors import OptionError, UnsupportedError
from flyweight.kernels import offload
from flyweight.kernels.offload import Offload, spread
from flyweight.limit import offload_limit
from flyweight.models.decoder import Decoder
from flyweight.models.presets import PRESETS, PresetWeights

CPU = torch.device("cpu")
CONFIG = PRESETS["tiny"] | dict(num_hidden_layers=6)
TOKENS = torch.arange(1, 13)[None]


@pytest.fixture(autouse=True)
def small_tensors_too(monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST", 1 << 10)


def load(scheme, count):
    return Decoder.load(
        PresetWeights(CONFIG, scheme), device=CPU, dtype=torch.float32, exact=True, offload=count
    )


@pytest.mark.parametrize("count", [1, 2, 3, 6, 9])
def test_logits_are_those_of_a_model_that_is_all_there(count):
    whole, streamed = load("bf16", 0), load("bf16", count)
    for _ in range(2):
        assert torch.equal(streamed.forward_whole(TOKENS), whole.forward_whole(TOKENS))
    moved = streamed.offload
    assert len(moved.moved) == min(count, 6) and len(moved.slots) == min(count, 2)
    assert moved.nbytes > 0.9 * min(count, 6) * sum(
        one.nbytes for one in whole.blocks[0].linears.values()
    )


def test_the_memory_of_moved_layers_is_given_back():
    streamed = load("bf16", 4)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for block in streamed.blocks
        for linear in block.linears.values()
        for tensor in offload.tensors_of(linear)
    }
    whole = sum(linear.nbytes for linear in load("bf16", 0).blocks[0].linears.values())
    assert sum(storages.values()) < 1.1 * (2 + 2) * whole, "two layers that stay, and two slots"


def test_layers_are_spread_so_that_copies_have_something_to_hide_behind():
    assert (
        spread(1, 36) == [18]
        and spread(3, 36) == [6, 18, 30]
        and spread(6, 6) == [0, 1, 2, 3, 4, 5]
    )
    for count in range(1, 37):
        assert len(set(spread(count, 36))) == count


class Stream:
    """Notes what waits for what."""

    def __init__(self, notes):
        self.notes = notes

    def wait_stream(self, other):
        self.notes.append("side waits for compute")

    def wait_event(self, event):
        self.notes.append(f"side waits for {event.name}")


def test_a_copy_waits_until_the_layer_that_had_its_slot_is_done(monkeypatch):
    notes = []

    class Event:
        def record(self, stream):
            self.name = "a layer" if stream is compute else "a copy"

    class Compute(Stream):
        def wait_event(self, event):
            self.notes.append(f"compute waits for {event.name}")

    compute = Compute(notes)
    moved = Offload(CPU)
    for place in (0, 1, 2):
        layer = torch.nn.Linear(64, 64)
        moved.take(place, layer, 0)
    moved.finish()
    moved.stream = Stream(notes)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(offload, "_on", lambda stream: __import__("contextlib").nullcontext())
    for layer in moved.in_turn(["0", "1", "2"]):
        notes.append(f"layer {layer}")
    assert notes == [
        "side waits for compute",
        "compute waits for a copy",
        "layer 0",
        "side waits for a layer",
        "compute waits for a copy",
        "layer 1",
        "compute waits for a copy",
        "layer 2",
    ]


def test_weights_that_hide_in_closures_are_not_left_behind_in_silence():
    weight = torch.zeros(256, 256)
    with pytest.raises(UnsupportedError, match=r"layer 3: .*run it without --offload"):
        Offload(CPU).take(3, lambda x: x @ weight, weight.nbytes)


def test_a_cpu_has_nothing_to_offload():
    from flyweight import LLM

    with pytest.raises(OptionError, match="runs on a CPU"):
        LLM("preset:tiny:bf16", device="cpu", offload=2)


def test_the_speed_is_that_of_the_slower_of_memory_and_bus():
    assert offload_limit(
        resident_bytes=10e9, streamed_bytes=5e9, copy_gb_s=4000, bus_gb_s=50
    ) == pytest.approx(10)
    assert offload_limit(
        resident_bytes=10e9, streamed_bytes=1e6, copy_gb_s=100, bus_gb_s=50
    ) == pytest.approx(10)
