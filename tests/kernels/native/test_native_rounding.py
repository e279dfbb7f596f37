"""What the solvers ask of the native kernels, against the same in torch."""

import pytest
import torch

from flyweight.kernels.native import library, rounding
from flyweight.quant import gptq, grid, noise
from flyweight.quant.grid import Integers

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=f"{library.why_not()}")


@pytest.fixture
def in_torch(monkeypatch):
    """Runs a function without the native kernels."""

    def run(function, *arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(rounding, "takes", lambda tensor: False)
            return function(*arguments, **options)

    return run


@pytest.mark.parametrize("bits, symmetric", [(4, True), (4, False), (8, True), (3, False)])
@pytest.mark.parametrize("rows, groups, size", [(1, 1, 3), (70, 3, 40), (5, 9, 64)])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_error_of_a_grid_is_torchs(in_torch, bits, symmetric, rows, groups, size, weighted):
    pieces = torch.randn(rows, groups, size, dtype=torch.float64).float()
    scales = (torch.rand(rows, groups) + 0.5) / 2**bits
    scales[0, 0] *= -1 if symmetric else 1
    zeros = torch.randint(0, 2**bits, (rows, groups)).float()
    weights = torch.rand(groups, size) if weighted else None
    settings = Integers(bits=bits, group_size=size, symmetric=symmetric)
    if symmetric:
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    found = grid.rounding_error(pieces, scales, zeros, settings, weights)
    wanted = in_torch(grid.rounding_error, pieces, scales, zeros, settings, weights)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("columns, rows", [(1, 1), (128, 37), (50, 16)])
@pytest.mark.parametrize("kind", ["rounded", "pruned", "descended"])
def test_columns_are_rounded_as_torch_rounds_them(in_torch, columns, rows, kind):
    tile = torch.randn(columns, rows)
    matrix = torch.randn(columns + 5, columns + 5).triu()[:columns, :columns]
    matrix.diagonal().abs_().add_(1)
    scales = torch.rand(columns, rows) / 8 + 0.1
    zeros = torch.randint(0, 16, (columns, rows)).float()
    options = {
        "rounded": {},
        "pruned": {"kept": torch.rand(columns, rows) > 0.5},
        "descended": {"values": torch.randn(columns, rows)},
    }[kind]
    matrix = matrix / columns**0.5 + torch.eye(columns)  # so that errors do not grow
    found = gptq.walk(tile, matrix, scales, zeros, steps=15, **options)
    wanted = in_torch(gptq.walk, tile, matrix, scales, zeros, steps=15, **options)
    same = found[0] == wanted[0]
    assert same.float().mean() > 0.99  # a sum in another order may fall on the other side
    torch.testing.assert_close(found[1][same], wanted[1][same], rtol=1e-3, atol=1e-1)


def test_noise_and_its_gradient_are_torchs(in_torch):
    weight = torch.randn(30, 96)
    energy = torch.rand(96)
    for size, symmetric in ((96, True), (32, True), (32, False)):
        make = noise.weight_noise(weight, energy, group_size=size, symmetric=symmetric)
        scales = (torch.rand(96) + 0.5).requires_grad_()
        (gradient,) = torch.autograd.grad(make(scales), scales)
        (wanted,) = torch.autograd.grad(in_torch(make, scales), scales)
        pieces = (weight.abs() if symmetric else weight) * scales.detach()
        pieces = pieces.unflatten(1, (-1, size))
        low = 0 if symmetric else pieces.amin(-1).clamp(max=0)
        ranges = pieces.amax(-1).clamp(min=0) - low
        shares = (energy / scales.detach().square()).unflatten(0, (-1, size)).sum(-1)
        torch.testing.assert_close(make(scales).detach(), (ranges.square().sum(0) * shares).sum())
        torch.testing.assert_close(gradient, wanted)
