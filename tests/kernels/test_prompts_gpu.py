"""Many rows of 4-bit weights in 8 bits, at real sizes against plain products of the same codes."""

import pytest
import torch
from gpu_linears import linear_of, make

from flyweight.kernels import dispatch
from flyweight.kernels.linear import prompts

pytestmark = [pytest.mark.gpu]


@pytest.fixture(autouse=True)
def of_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("gemm.cu is for Hopper")


def error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def product(tensor, x, kind):
    narrow = prompts.in_eight_bits(tensor.dequantize(), kind)
    return narrow.quantize_input(x).float() @ narrow.dequantize().float().T


@pytest.mark.hopper
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize(("outputs", "inputs", "rows"), [(6144, 4096, 2048), (4096, 12288, 300)])
def test_many_rows_are_multiplied_in_8_bits(kind, outputs, inputs, rows):
    tensor = make("int4:128", (outputs, inputs), 0, torch.bfloat16)
    linear = linear_of(tensor)
    assert linear.narrow_prompts(kind)
    x = torch.randn(rows, inputs, device="cuda").bfloat16()
    residual = torch.randn(rows, outputs, device="cuda").bfloat16()
    assert linear.kernel_for(rows) == "gemm_recoded" and linear.kernel_for(256) != "gemm_recoded"
    want = product(tensor, x, kind) + residual.float()
    exact = x.float() @ tensor.dequantize().float().T + residual.float()
    got = linear.project(x, residual=residual)
    assert error(got, exact) < 1.1 * error(want, exact)
    linear.keep_prompts()
    assert linear.prompts.weights.nbytes == linear.prompt_bytes == outputs * inputs
    assert torch.equal(linear.project(x, residual=residual), got), (
        "the codes are the same, written once"
    )
    # A scale that is rounded otherwise moves many of float8's coarse codes, and hardly any of
    # int8's.
    assert kind == "fp8" or error(got, want) < 8e-3


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_an_evaluation_multiplies_the_same_codes_through_torch(kind):
    tensor = make("int4:128", (6144, 4096), 0, torch.bfloat16)
    exact = dispatch.prepare(tensor, dtype=torch.bfloat16, exact=True)
    few, many = (torch.randn(rows, 4096, device="cuda").bfloat16() for rows in (256, 300))
    before = exact(few)
    assert exact.narrow_prompts(kind) and exact.prompt_bytes == 0
    assert torch.equal(exact(few), before)
    assert error(exact(many), product(tensor, many, kind)) < 5e-3


@pytest.mark.hopper
def test_gate_and_up_are_multiplied_in_8_bits():
    tensor = make("int4:128", (8192, 4096), 1, torch.bfloat16)
    linear = linear_of(tensor, activation="silu")
    assert linear.narrow_prompts("int8")
    x = torch.randn(512, 4096, device="cuda").bfloat16()
    gate, up = product(tensor, x, "int8").chunk(2, -1)
    got = linear.project(x, activation="silu")
    linear.keep_prompts()
    assert torch.equal(linear.project(x, activation="silu"), got)
    assert error(got, torch.nn.functional.silu(gate) * up) < 1e-2
