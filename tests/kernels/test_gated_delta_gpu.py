"""Gated DeltaNet at real shapes on a GPU, prompts and steps, against float64."""

from types import SimpleNamespace

import pytest
import torch

from flyweight.batch import SequenceState, StateStorage
from flyweight.kernels.gated_delta import reference
from flyweight.kernels.gated_delta.decode import DeltaRows, delta_step
from flyweight.kernels.gated_delta.shape import DeltaShape, DeltaWeights

pytestmark = pytest.mark.gpu
SHAPES = [
    DeltaShape(16, 32, 128, 128, 4),
    DeltaShape(2, 4, 64, 64, 4),
    DeltaShape(4, 4, 64, 128, 3),
]


def make(shape):
    torch.manual_seed(0)
    sizes = (
        (shape.width, shape.channels),
        (shape.value_heads,),
        (shape.value_heads,),
        (shape.value_dim,),
    )
    conv, decay, bias, norm = (torch.randn(size) for size in sizes)
    return DeltaWeights(shape, conv / 2, -decay.abs() / 4, bias, 1 + norm / 10, 1e-6).to(
        torch.device("cuda")
    )


def in_double(weights):
    parts = (weights.conv, weights.decay, weights.step_bias, weights.norm)
    return DeltaWeights(weights.shape, *(part.double() for part in parts), weights.epsilon)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prompts_and_the_steps_after_them(shape, dtype):
    """Two prompts, the second in two parts with a copy of its state, which a third goes on from."""
    prefill = pytest.importorskip("flyweight.kernels.gated_delta.prefill")
    weights = make(shape)
    tokens = torch.randn(2, 205, shape.projected, device="cuda").to(dtype)
    want = reference.delta_whole(tokens.double(), in_double(weights))
    size = (5, shape.value_heads, shape.key_dim, shape.value_dim)
    cache = StateStorage(
        torch.full((5, shape.width, shape.channels), torch.nan, device="cuda").to(dtype),
        torch.full(size, torch.nan, device="cuda"),
    )

    def run(*rows):
        packed = torch.cat(
            [tokens[which, one.start : one.start + one.tokens] for which, one in rows]
        )
        table = torch.tensor([one for _, one in rows], dtype=torch.int32, device="cuda")
        starts = [*(one.begin for _, one in rows), len(packed)]
        batch = SimpleNamespace(states=table, query_starts=starts)
        got = prefill.delta_paged(packed, cache, batch, weights)
        expected = torch.cat(
            [want[which, one.start : one.start + one.tokens] for which, one in rows]
        )
        close(got, expected, dtype)

    run((0, SequenceState(0, 150, 0, -1, 1)), (1, SequenceState(150, 100, 0, -1, 2, 96, 3)))
    run(
        (1, SequenceState(0, 100, 100, 2, 2)),
        (1, SequenceState(100, 104, 96, 3, 4)),
        (0, SequenceState(204, 50, 150, 1, 1)),
    )
    slots = torch.tensor([1, 2, 0, 4], dtype=torch.int32, device="cuda")
    for at in range(200, 205):
        lengths = torch.tensor(
            [at + 1, at + 1, 0, at + 1 if at == 200 else 0], dtype=torch.int32, device="cuda"
        )
        out = torch.zeros(4, shape.outputs, device="cuda", dtype=dtype)
        step = torch.stack([tokens[0, at], tokens[1, at], tokens[0, 0], tokens[1, at]])
        delta_step(step, out, cache, DeltaRows(lengths, slots), weights)
        close(out[:2], want[:, at], dtype)
        if at == 200:
            close(out[3], want[1, at], dtype)


def close(got, want, dtype):
    error = ((got.double() - want).norm() / want.norm()).item()
    assert error < (1e-2 if dtype == torch.bfloat16 else 3e-3), error
