"""Many rows of 4-bit weights in 8 bits: the kernels' own sources, run on the CPU."""

import host_cuda
import pytest
import torch
from test_kernels_on_the_host import error, host, linear_of, make  # noqa: F401 (fixtures)

from flyweight import gpu
from flyweight.kernels.linear import prompts
from flyweight.kernels.linear.untile import recode

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(prompts, "FEW_ROWS", 8)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("kind", "weight"), [("int8", "int4:32"), ("fp8", "int4:64:symmetric")])
def test_tiles_are_written_as_those_of_8_bit_weights(kind, weight, activation):
    tensor = make(weight, (96, 320), 1)
    linear = linear_of(tensor, activation=activation)
    assert linear.narrow_prompts(kind)
    written = recode(linear.weight, linear.prompts)
    plain = linear_of(prompts.in_eight_bits(tensor.dequantize(), kind), activation=activation)
    assert linear.prompts.format is plain.weight.format
    torch.testing.assert_close(
        linear.prompts.channel_scale, plain.weight.channel_scale, rtol=5e-3, atol=0
    )
    codes = [
        one.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn).float()
        for one in (written, plain.weight.weights)
    ]
    # the largest weight of a row was rounded to bfloat16 on one way: a code may be its neighbour
    assert error(codes[0], codes[1].double()) < 0.02


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_many_rows_are_multiplied_in_8_bits_and_few_as_before(kind):
    tensor = make("int4:64", (136, 320), 1)
    linear, before = linear_of(tensor), linear_of(tensor)
    linear.narrow_prompts(kind)
    many, few = torch.randn(20, 320).bfloat16(), torch.randn(8, 320).bfloat16()
    assert linear.choose(20).kernel == "gemm_recoded" and linear.choose(8) == before.choose(8)
    residual = torch.randn(20, 136).bfloat16()
    want = (
        prompts.in_eight_bits(tensor.dequantize(), kind).matmul_reference(many) + residual.double()
    )
    got = linear.multiply(many, residual=residual)
    assert error(got, want) < 0.01
    linear.keep_prompts()
    assert linear.prompts.weights.nbytes == linear.prompt_bytes
    assert torch.equal(linear.multiply(many, residual=residual), got), (
        "the codes are the same, written once"
    )
    assert torch.equal(linear.multiply(few), before.multiply(few))


def test_a_gpu_without_hoppers_kernels_takes_none(monkeypatch):
    linear = linear_of(make("int4:64", (136, 320), 1))
    monkeypatch.setattr(gpu, "of", lambda device: gpu.by_name("sm_80"))
    assert not linear.narrow_prompts("int8")
    assert linear.prompts is None and linear.prompt_bytes == 0


def test_weights_of_other_bits_stay_as_they_are():
    linear = linear_of(make("int8:64", (40, 320)))
    assert not linear.narrow_prompts("int8") and linear.prompts is None
