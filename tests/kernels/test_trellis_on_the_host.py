"""A trellis' codes (cuda/trellis.cuh), run on the CPU through every kernel that takes them."""

import host_cuda
import pytest
import torch

from flyweight.kernels.linear import gemv, tiles
from flyweight.tensors import Trellis

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")


@pytest.fixture(autouse=True)
def host(monkeypatch, folder):
    torch.manual_seed(0)
    host_cuda.pretend(monkeypatch, folder)


def error(got, want):
    assert got.isfinite().all(), "an output was not written"
    return float((got.double() - want).norm() / want.norm())


# a row's last unit is a block by itself; outputs end within a tile
@pytest.mark.parametrize(
    ("bits", "groups", "shape", "rows"),
    [
        (2, False, (72, 576), 1),
        (2, True, (40, 640), 2),
        (3, False, (72, 640), 8),
        (3, True, (40, 576), 1),
        (2, False, (40, 64), 4),
    ],
)
def test_few_rows(bits, groups, shape, rows):
    tensor = Trellis.random(shape, 1, bits=bits, groups=groups)
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    assert weight.format.name == "trellis" and weight.format.in_planes
    x = torch.randn(rows, shape[1]).bfloat16()
    assert error(gemv.multiply(weight, x), tensor.matmul_reference(x)) < 4e-3
