"""docs/add-a-kernel.md, done: a toy kernel for two-level weights takes them before any other, and
says so.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flyweight.kernels import dispatch, reference
from flyweight.kernels.dispatch import Request, prepare
from flyweight.kernels.linear.fused import FusedLinear, Norm
from flyweight.models.decoder import Decoder
from flyweight.models.presets import PRESETS, PresetWeights
from flyweight.tensors import Int8Channel, Plain


class Counted(FusedLinear):
    """Multiplies as torch does, and counts; norm, activation and residual are left to the
    contract's plain way.
    """

    kernel = "counted"
    why = "a test asked for it"

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.shape = tuple(weight.shape)
        self.nbytes = weight.nbytes
        self.ops = reference
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.linear(x, self.weight)


def counted(request: Request) -> FusedLinear | None:
    if not isinstance(request.tensor, Int8Channel) or request.tensor.device.type != "cpu":
        return None
    return Counted(request.tensor.dequantize(request.dtype))


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(dispatch, "PREPARERS", list(dispatch.PREPARERS))
    dispatch.register(counted)


def test_a_registered_kernel_takes_what_it_says_and_nothing_else(registered):
    taken = prepare(Int8Channel.random((16, 32)), dtype=torch.float32)
    left = prepare(Plain.random((16, 32)), dtype=torch.float32)
    assert (taken.kernel, taken.why, taken.kernel_for(8)) == (
        "counted",
        "a test asked for it",
        "counted",
    )
    assert left.kernel != "counted"


def test_the_contract_does_around_a_kernel_what_the_kernel_does_not(registered):
    linear = prepare(Int8Channel.random((16, 32)), dtype=torch.float32)
    x, residual = torch.randn(3, 32), torch.randn(3, 8)
    norm = Norm(torch.rand(32) + 0.5, 1e-5)
    gate, up = F.linear(F.rms_norm(x, (32,), norm.weight, 1e-5), linear.weight).chunk(2, -1)
    found = linear.project(x, norm=norm, activation="silu", residual=residual)
    torch.testing.assert_close(found, F.silu(gate) * up + residual, rtol=1e-5, atol=1e-5)


def test_a_whole_model_runs_through_it(registered):
    decoder = Decoder.load(
        PresetWeights(PRESETS["tiny"], "w8a8"), device="cpu", dtype=torch.float32
    )
    decoder.forward_whole(torch.tensor([[3, 4, 5]]))
    linears = [linear.fused for block in decoder.blocks for linear in block.linears.values()]
    assert (
        all(isinstance(linear, Counted) and linear.calls == 1 for linear in linears)
        and len(linears) == 8
    )
