"""The kernel that orders lookups, run on the CPU."""

import host_cuda
import pytest
import torch
from torch.nn.functional import one_hot

from flyweight.kernels import jit
from flyweight.kernels.vptq import staged
from flyweight.kernels.vptq.layout import ItemFormat

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")
GROUPS = 200


@pytest.fixture
def schedule(monkeypatch, folder):
    host_cuda.pretend(monkeypatch, folder)

    def run(banks, residuals=None):
        groups, lanes, window = banks.shape
        defines = {"KERNEL": 0, "POS_BITS": window.bit_length() - 1, "LANES": lanes}
        defines |= {} if residuals is None else {"RESIDUALS": 1}
        order = torch.empty_like(banks)
        kernel = jit.load("vptq_layout.cu", defines=defines).kernel("vptq_schedule")
        kernel.launch(-(-groups // 64), 64, (banks, residuals, order, groups, 96 * lanes * window))
        return order

    return run


def clashes(bank, order):
    return one_hot(bank.gather(2, order), 8).sum(1).amax(-1).double().mean().item()


def test_an_order_by_both_books_costs_main_lookups_hardly_anything(schedule):
    torch.manual_seed(0)
    copies, window = 4, 8
    bank = torch.randint(0, 8, (GROUPS, 8, window))
    lane = torch.arange(8)[:, None]
    residual = (torch.randint(0, 256, bank.shape) * copies + lane % copies) % 8
    doubled = (bank | bank << 4).to(torch.uint8)
    alone, both = schedule(doubled).long(), schedule(doubled, residual.to(torch.uint8)).long()
    for order in (alone, both):
        assert torch.equal(order.sort(2).values, torch.arange(window).expand_as(order))
    assert clashes(bank, both) < clashes(bank, alone) + 0.06
    assert clashes(residual, both) < clashes(residual, alone) - 0.4


def test_the_residual_of_an_item_stays_with_it_when_the_other_copy_is_taken(schedule):
    torch.manual_seed(1)
    bank = torch.randint(0, 8, (GROUPS, 8, 4))
    other = (bank + torch.randint(1, 8, bank.shape)) % 8
    residual = torch.randint(0, 8, bank.shape)
    order = schedule((bank | other << 4).to(torch.uint8), residual.to(torch.uint8))
    item = (order & 127).long()
    assert torch.equal(item.sort(2).values, torch.arange(4).expand_as(item)) and (order > 127).any()
    taken = torch.where(order > 127, other.gather(2, item), bank.gather(2, item))
    together = one_hot(taken, 8).sum(1).amax(-1) + one_hot(residual.gather(2, item), 8).sum(1).amax(
        -1
    )
    assert together.double().mean() < 3.3, "5.2 in any order"


def test_a_layout_asks_for_banks_of_residuals_where_copies_are_few(monkeypatch):
    asked = []
    natural = torch.arange(8, dtype=torch.uint8)
    monkeypatch.setattr(
        staged,
        "schedule",
        lambda banks, residuals=None: asked.append(residuals) or natural.expand_as(banks),
    )
    form = ItemFormat(13, 8, 3, 3)
    joint = torch.randint(0, 1 << 21, (2, 256))
    staged.stream(joint, form, main_bits=13)
    staged.stream(joint, form, main_bits=13, residual_copies=4)
    assert asked[0] is None and asked[1].shape == (8, 8, 8) and asked[1].max() < 8
