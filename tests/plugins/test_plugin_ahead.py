"""Kernels of an engine's model, compiled before its first pass."""

import pickle

import pytest
import torch

from flyweight import gpu
from flyweight.plugins import ahead, op
from flyweight.tensors import Int8Channel, IntGroup, Sparse24

WEIGHTS = {
    "int4": lambda: IntGroup.random((64, 256), 0, dtype=torch.float16),
    "w8a8": lambda: Int8Channel.random((64, 256), 0),
    "2:4 int4": lambda: Sparse24.random((64, 256), 0, inner=IntGroup, group_size=128),
}


def outline(kind):
    return ahead.outline_of(WEIGHTS[kind]())


@pytest.mark.parametrize("kind", WEIGHTS)
def test_an_outline_has_no_values_and_can_be_sent(kind):
    sent = pickle.loads(pickle.dumps(outline(kind)))
    assert ahead.name_of(sent) == ahead.name_of(outline(kind))
    assert sent.matrix_shape == (64, 256)
    assert all(value.is_meta for value in sent.fields().values() if torch.is_tensor(value))


def test_weights_that_need_other_kernels_have_other_names():
    names = {
        ahead.NotedLinear([outline(kind)], dtype, bias).name
        for kind in WEIGHTS
        for dtype in (torch.float16, torch.bfloat16)
        for bias in (False, True)
    }
    assert len(names) == 12


def test_rows_lie_on_both_sides_of_every_border():
    rows = ahead.row_counts(gpu.GPUS["sm_90a"], most=4096)
    assert {1, 8, 64, 4096} <= set(rows) and max(rows) == 4096


def test_weights_on_a_cpu_ask_for_nothing():
    key = op.hold(op.prepare([WEIGHTS["int4"]()], dtype=torch.float32), torch.device("cpu"))
    assert not ahead.has_noted()
    assert op.linear(torch.ones(2, 256), key, 64).shape == (2, 64)


def test_a_fault_of_the_second_process_is_told_and_nothing_more():
    finished, told = ahead._run("no order")
    assert not finished and "ValueError" in told
