"""Choices that depend on the values of a weight, where there may be none."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flyweight.values import has_values, known, same


def test_real_tensors_and_parameters_have_values():
    assert has_values(torch.ones(2)) and has_values(torch.nn.Parameter(torch.ones(2)))


def test_fake_and_meta_tensors_have_none():
    with FakeTensorMode():
        fake = torch.ones(2)
    assert not has_values(fake) and not has_values(torch.ones(2, device="meta"))


def test_values_decide_where_there_are_some():
    assert known(torch.tensor(True), otherwise=False) and not known(
        torch.tensor(False), otherwise=True
    )
    assert same(torch.ones(2), torch.ones(2)) and not same(torch.ones(2), torch.zeros(2))


def test_what_is_taken_for_granted_decides_where_there_are_none():
    with FakeTensorMode():
        one, other, flag = torch.ones(2), torch.zeros(2), torch.tensor(False)
    assert same(one, other) and known(flag, otherwise=True) and not known(flag, otherwise=False)
