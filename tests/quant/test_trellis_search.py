"""Trellis states nearest to given values, beside a search of all ways."""

import itertools

import torch

from flyweight.quant.trellis_search import Shape, search, table

SMALL = Shape(6, 4)  # overlaps of two bits: four of them


def cost(states, targets, weights, shape):
    values = 128 * table(shape.state, states.device).double()[states]
    return (weights * (targets - values).square()).sum((1, 2))


def closed(states, shape):
    shared = states & (shape.overlaps - 1)
    return torch.equal(states >> shape.fresh, shared.roll(-1, 1))


def drawn(circles, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    targets = 128 * torch.randn(circles, steps, 4, generator=generator)
    return targets, 0.5 + torch.rand(steps, 4, generator=generator)


def test_all_ways_were_looked_at():
    """A circle of four steps has 2^16 ways. The seam is chosen first, so the best of all need not
    be found; what is found is the best with its seam.
    """
    targets, weights = drawn(6, 4, seed=0)
    found = search(targets, weights, SMALL)
    assert closed(found, SMALL)
    fresh = torch.tensor(list(itertools.product(range(16), repeat=4)))
    every = fresh | (fresh.roll(-1, 1) & 3) << 4
    assert closed(every, SMALL)
    best = 0
    for circle, target in enumerate(targets):
        costs = cost(every, target[None], weights, SMALL)
        same_seam = every[:, 0] & 3 == found[circle, 0] & 3
        own = cost(found[circle : circle + 1], target[None], weights, SMALL)
        assert own == costs[same_seam].min()
        best += own == costs.min()
    assert best >= 4


def test_a_stream_of_bits_gives_back_its_own_values():
    shape = Shape.of(2)
    fresh = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(1))
    states = fresh | fresh.roll(-1, 1) << 8 | (fresh.roll(-2, 1) & 3) << 16
    targets = 128 * table(18, states.device).float()[states]
    assert torch.equal(search(targets, torch.ones(8, 4), shape), states)
