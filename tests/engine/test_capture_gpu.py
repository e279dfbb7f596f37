"""A capture outlives what Python throws away meanwhile."""

import gc

import pytest
import torch

from flyweight.engine.capture import capture

pytestmark = pytest.mark.gpu


def test_a_graph_that_nobody_holds_does_not_break_a_capture():
    x = torch.zeros(8, device="cuda")
    ring = [capture(lambda: x.add_(1))]
    ring.append(ring)  # a cycle, so that only the collector frees it
    del ring
    before = gc.get_threshold()

    def launch():
        gc.set_threshold(1)
        _ = [[] for _ in range(1000)]
        x.add_(2)

    try:
        graph = capture(launch)
    finally:
        gc.set_threshold(*before)
    x.zero_()
    graph.replay()
    assert x.tolist() == [2.0] * 8
