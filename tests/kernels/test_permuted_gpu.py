"""Groups of scattered inputs (GPTQ's act-order) on a GPU, against float64."""

import pytest
import torch
from gpu_linears import relative_error

from flyweight.kernels import dispatch
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.linear.permuted import PermutedLinear
from flyweight.tensors import IntGroup

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_stay_codes_and_x_comes_in_their_order(rows, bits):
    tensor = IntGroup.random((1000, 2048), 1, "cuda", bits=bits, act_order=True)
    linear = dispatch.prepare(tensor, dtype=torch.bfloat16)
    assert isinstance(linear, PermutedLinear) and linear.nbytes < tensor.nbytes * 1.06
    x, residual = (torch.randn(rows, width, device="cuda").bfloat16() for width in (2048, 1000))
    norm = Norm((1 + 0.1 * torch.randn(2048, device="cuda")).bfloat16(), 1e-6)
    assert relative_error(linear(x), tensor.matmul_reference(x)) < 1e-2
    normed = (
        x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    ).bfloat16() * norm.weight
    want = tensor.matmul_reference(normed) + residual.double()
    assert relative_error(linear.project(x, norm=norm, residual=residual), want) < 1e-2
