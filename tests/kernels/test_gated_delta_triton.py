"""Prompts through gated DeltaNet in Triton against torch: compiled where there is a GPU, else
interpreted.
"""

from types import SimpleNamespace

import pytest
import torch

from flyweight.batch import SequenceState, StateStorage
from flyweight.kernels.gated_delta import reference
from flyweight.kernels.gated_delta.shape import DeltaShape, DeltaWeights

prefill = pytest.importorskip("flyweight.kernels.gated_delta.prefill", reason="no triton")
pytestmark = pytest.mark.usefixtures("interpreted_loops")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = DeltaShape(1, 2, 16, 24, 4)
CHUNK = 64 if DEVICE == "cuda" else 16  # the interpreter takes its time


@pytest.fixture(autouse=True)
def small(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(prefill, "CHUNK", CHUNK)


def random_weights(shape):
    return DeltaWeights(
        shape,
        conv=torch.randn(shape.width, shape.channels) / 2,
        decay=-torch.rand(shape.value_heads),
        step_bias=torch.randn(shape.value_heads),
        norm=1 + torch.randn(shape.value_dim) / 10,
        epsilon=1e-6,
    ).to(torch.device(DEVICE))


def test_steps_of_many_sequences_leave_the_same_results_and_states():
    """Fresh ones, ones that go on from their slot or from a copy, single tokens, and marks."""
    weights = random_weights(SHAPE)
    long = CHUNK + 6
    rows = [
        SequenceState(0, long, 0, -1, 1, CHUNK // 2, 4),
        SequenceState(long, 1, 9, 3, 3),
        SequenceState(long + 1, 3, 2, 0, 2, 2, 5),
        SequenceState(long + 4, CHUNK + 2, 16, 6, 6, CHUNK, 7),
    ]
    starts = [*(one.begin for one in rows), long + CHUNK + 6]
    projected = torch.randn(starts[-1], SHAPE.projected, device=DEVICE)
    conv = torch.randn(8, SHAPE.width, SHAPE.channels, device=DEVICE)
    size = (8, SHAPE.value_heads, SHAPE.key_dim, SHAPE.value_dim)
    recurrent = torch.randn(size, device=DEVICE) / 4
    batch = SimpleNamespace(
        states=torch.tensor(rows, dtype=torch.int32, device=DEVICE), query_starts=starts
    )
    found = StateStorage(conv.clone(), recurrent.clone())
    wanted = StateStorage(conv.clone(), recurrent.clone())
    got = prefill.delta_paged(projected, found, batch, weights)
    want = reference.delta_paged(projected, wanted, batch, weights)
    close(got, want)
    close(found.recurrent, wanted.recurrent)
    for one in rows:  # of the rings, what a later step can read
        ends = [(one.slot, one.start + one.tokens)]
        ends += [(one.mark_slot, one.start + one.mark)] if one.mark else []
        for slot, end in ends:
            torch.testing.assert_close(found.history(slot, end), wanted.history(slot, end))


def test_whole_sequences():
    weights = random_weights(SHAPE)
    projected = torch.randn(2, CHUNK + 3, SHAPE.projected, device=DEVICE)
    close(prefill.delta_whole(projected, weights), reference.delta_whole(projected, weights))


def close(got, want):
    """A GPU's products have 10 bits of their factors."""
    error = (got - want).norm() / want.norm()
    assert error < (5e-3 if DEVICE == "cuda" else 1e-5), error
