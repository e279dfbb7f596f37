"""gated_delta.cu, compiled for the CPU: steps of sequences against the whole of them in float64."""

import host_cuda
import pytest
import torch

from flyweight.batch import StateStorage
from flyweight.kernels.gated_delta import reference
from flyweight.kernels.gated_delta.decode import DeltaRows, delta_step, unsupported_reason
from flyweight.kernels.gated_delta.shape import DeltaShape, DeltaWeights

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")


def random_weights(shape, dtype=torch.float32):
    return DeltaWeights(
        shape,
        conv=torch.randn(shape.width, shape.channels, dtype=dtype) / 2,
        decay=-torch.rand(shape.value_heads, dtype=dtype),
        step_bias=torch.randn(shape.value_heads, dtype=dtype),
        norm=1 + torch.randn(shape.value_dim, dtype=dtype) / 10,
        epsilon=1e-6,
    )


# heads of keys and values, their sizes, width of the convolution; each is a compilation
SHAPES = [DeltaShape(1, 2, 32, 64, 4), DeltaShape(2, 2, 32, 32, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps_of_sequences_are_the_whole_of_them(shape, monkeypatch, tmp_path):
    host_cuda.pretend(monkeypatch, tmp_path)
    torch.manual_seed(0)
    assert unsupported_reason(shape) is None
    weights = random_weights(shape)
    tokens = torch.randn(2, 5, shape.projected).bfloat16()
    wide = DeltaWeights(
        shape,
        *(x.double() for x in (weights.conv, weights.decay, weights.step_bias, weights.norm)),
        weights.epsilon,
    )
    want = reference.delta_whole(tokens.double(), wide)
    cache = StateStorage(
        torch.full((4, shape.width, shape.channels), torch.nan).bfloat16(),
        torch.zeros(4, shape.value_heads, shape.key_dim, shape.value_dim),
    )
    untouched = cache.recurrent[[0, 2]].clone()
    slots = torch.tensor([3, 0, 1], dtype=torch.int32)
    for at in range(5):
        # the row in between is padding
        lengths = torch.tensor([at + 1, 0, at + 1], dtype=torch.int32)
        projected = torch.stack([tokens[0, at], tokens[0, 0], tokens[1, at]])
        out = torch.zeros(3, shape.outputs).bfloat16()
        delta_step(projected, out, cache, DeltaRows(lengths, slots), weights)
        got = out[[0, 2]].double()
        assert ((got - want[:, at]).norm() / want[:, at].norm()).item() < 5e-3
    assert torch.equal(cache.recurrent[[0, 2]], untouched)


def test_heads_that_the_kernel_cannot_take_are_named():
    assert unsupported_reason(DeltaShape(16, 32, 128, 128, 4)) is None
    for key_dim, value_dim in ((128, 48), (8, 8), (256, 256), (40, 128)):
        assert f"{key_dim} x {value_dim}" in str(
            unsupported_reason(DeltaShape(2, 2, key_dim, value_dim, 4))
        )
