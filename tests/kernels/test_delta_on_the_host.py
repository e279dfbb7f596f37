"""delta.cu, compiled for the CPU: what adapters add to the rows of a decode step."""

import host_cuda
import pytest
import torch

from flyweight.batch import NOBODY
from flyweight.kernels import reference
from flyweight.kernels.linear.delta import Delta
from flyweight.kernels.linear.fused import Norm

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")


@pytest.fixture(autouse=True)
def host(monkeypatch, folder):
    torch.manual_seed(0)
    host_cuda.pretend(monkeypatch, folder)
    monkeypatch.setattr(Delta, "takes", lambda self, x: True)


# parts, inputs (more than the threads hold at once, and fewer), rank, slots of the rows, what it
# is added to, whether a norm comes before; each is a compilation
CASES = [
    ((40, 16, 16), 2304, 8, [2, NOBODY, 0], "nothing", True),
    ((1360, 1360), 64, 16, [1], "nothing", True),
    ((72,), 4104, 24, [NOBODY, 1], "in place", False),
    ((40, 24), 64, 8, [0, 2], "a residual", False),
]


@pytest.mark.parametrize(("sizes", "inputs", "rank", "slots", "added", "normed"), CASES)
def test_rows_get_what_their_own_adapter_adds(sizes, inputs, rank, slots, added, normed):
    a = (torch.randn(3, len(sizes), rank, inputs) * inputs**-0.5).bfloat16()
    b = torch.randn(3, rank, sum(sizes)).bfloat16()
    delta = Delta(a, b, sizes, reference)
    x = torch.randn(len(slots), inputs).bfloat16()
    norm = Norm((1 + 0.1 * torch.randn(inputs)).bfloat16(), 1e-6) if normed else None
    residual = None if added == "nothing" else torch.randn(len(slots), sum(sizes)).bfloat16()
    want = expected(delta, x, slots, norm, residual, sizes)
    out = residual if added == "in place" else None
    chosen = torch.tensor(slots, dtype=torch.int32)
    got = delta.add(x, chosen, norm=norm, residual=residual, out=out)
    assert out is None or got is out
    assert ((got.double() - want).norm() / want.norm()).item() < 5e-3
    for row, slot in enumerate(slots):
        if slot == NOBODY:
            assert torch.equal(got[row].double(), want[row])


@pytest.mark.parametrize("kernel", [True, False])
def test_gate_and_up_are_multiplied_on_the_way(kernel, monkeypatch):
    """For every row, whether or not it has an adapter."""
    monkeypatch.setattr(Delta, "takes", lambda self, x: kernel)
    slots = [1, NOBODY]
    a = (torch.randn(2, 1, 8, 72) * 72**-0.5).bfloat16()
    delta = Delta(a, torch.randn(2, 8, 40).bfloat16(), (40,), reference)
    gate_up = torch.randn(2, 144).bfloat16()
    residual = torch.randn(2, 40).bfloat16()
    x, got = delta.gate_and_add(
        gate_up, torch.tensor(slots, dtype=torch.int32), "silu", residual=residual
    )
    assert torch.allclose(x.float(), reference.gate(gate_up, "silu").float(), rtol=0.02, atol=1e-3)
    want = expected(delta, x, slots, None, residual, (40,))
    assert ((got.double() - want).norm() / want.norm()).item() < 5e-3


def expected(delta, x, slots, norm, residual, sizes):
    y = torch.zeros(len(x), sum(sizes)).double() if residual is None else residual.double()
    normed = x if norm is None else reference.normalize(x, norm)
    for row, slot in enumerate(slots):
        begin = 0
        for part, size in enumerate(sizes):
            if slot != NOBODY:
                low = delta.a[slot, part].double() @ normed[row].double()
                y[row, begin : begin + size] += (
                    low @ delta.b[slot, :, begin : begin + size].double()
                )
            begin += size
    return y


def test_torch_adds_the_same(monkeypatch):
    monkeypatch.setattr(Delta, "takes", lambda self, x: False)
    for case in CASES:
        test_rows_get_what_their_own_adapter_adds(*case)
