"""trellis_search.cu, run on the CPU: ways as near as those that torch finds."""

import host_cuda
import pytest
import torch

from flyweight.kernels import trellis
from flyweight.quant.trellis_search import REACH, Shape, Ways, table

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")


def cost(states, pulls, weights, shape):
    values = table(shape.state, states.device).double()[states]
    return (weights * values.square() + pulls * values).sum((1, 2))


@pytest.mark.parametrize(
    ("shape", "steps"), [(Shape(8, 4), 8), (Shape(10, 4), 16), (Shape(11, 6), 8)]
)
@pytest.mark.parametrize("circles", [1, 37])
def test_the_kernel_finds_ways_of_the_same_cost(monkeypatch, folder, shape, steps, circles):
    host_cuda.pretend(monkeypatch, folder)
    generator = torch.Generator().manual_seed(2)
    weights = (0.5 + torch.rand(steps, 4, generator=generator)).half()
    pulls = (-2 * weights * torch.randn(circles, steps, 4, generator=generator)).half()
    values = table(shape.state, torch.device("cpu"))
    found = trellis.search(values, pulls, weights, fresh=shape.fresh, reach=REACH)
    shared = found & (shape.overlaps - 1)
    assert torch.equal(found >> shape.fresh, shared.roll(-1, 1))
    torch.testing.assert_close(
        cost(found, pulls, weights, shape),
        cost(Ways(pulls, weights, shape).states(), pulls, weights, shape),
        rtol=1e-5,
        atol=0,
    )
