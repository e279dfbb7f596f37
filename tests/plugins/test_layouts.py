"""Parameters of vLLM read as weights of ours mean the same numbers."""

import pytest
import torch
from vllm_parameters import LAYOUTS, parameter

from flyweight.packing import pack
from flyweight.plugins import layouts
from flyweight.tensors import Float8, Int8Channel, IntGroup


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 128, -1])
def test_integer_groups_of_every_layout(layout, bits, symmetric, group):
    weight = IntGroup.random((48, 256), bits=bits, symmetric=symmetric, group_size=group)
    read = layouts.integers(*LAYOUTS[layout](weight), bits=bits, group=group, inputs=256)
    assert torch.equal(read.dequantize(), weight.dequantize())
    assert (read.zeros is None) == symmetric


def test_a_square_of_words_is_not_turned_by_mistake():
    """512 outputs x 4096 inputs of 4 bits are 512 x 512 words: only the axes' names tell."""
    weight = IntGroup.random((64, 512), bits=4, symmetric=True)
    for layout in LAYOUTS.values():
        read = layouts.integers(*layout(weight), bits=4, group=128, inputs=512)
        assert torch.equal(read.codes, weight.codes)


def test_scales_that_every_rank_has_whole():
    """Of layers cut by rows vLLM repeats a channel's scale: a parameter without input axis."""
    weight = IntGroup.random((48, 256), group_size=-1, symmetric=True)
    codes = LAYOUTS["gptq and awq"](weight)[0]
    scales = parameter(weight.scales.t(), output_dim=1)
    read = layouts.integers(codes, scales, None, bits=4, group=-1, inputs=256)
    assert torch.equal(read.dequantize(), weight.dequantize())


def test_awq_words_as_a_file_has_them():
    """vLLM turns AWQ's order of nibbles round; what it makes of a file's words is what we read."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # nibble i of a word holds output order[i] of its eight
    weight = IntGroup.random((16, 64), group_size=64)
    values = weight.values()  # [out, in]
    file = pack(values.t().unflatten(-1, (-1, 8))[..., order].flatten(-2), 4)  # [in, out / 8]
    shifts = torch.arange(0, 32, 4)
    unpacked = (file.long()[..., None] >> shifts & 15)[..., [0, 4, 1, 5, 2, 6, 3, 7]]
    turned = pack(unpacked.flatten(-2).t(), 4).t()  # [in / 8, out]
    codes, scales, zeros = LAYOUTS["gptq and awq"](weight)
    assert torch.equal(turned, codes.data)
    read = layouts.integers(codes, scales, zeros, bits=4, group=64, inputs=64)
    assert torch.equal(read.dequantize(), weight.dequantize())


@pytest.mark.parametrize("static", [None, torch.tensor([0.02])])
def test_eight_bits_on_both_sides(static):
    whole = Int8Channel.random((32, 64))
    read = layouts.channels(whole.codes, whole.scales.float(), static)
    x = torch.randn(3, 64)
    expected = Int8Channel(whole.codes, whole.scales.float(), static)
    assert torch.equal(read.matmul_reference(x), expected.matmul_reference(x))
    fp8 = Float8.random((32, 64))
    again = layouts.float8(fp8.weight, fp8.scales.view(-1), static)
    assert torch.equal(again.dequantize(), fp8.dequantize())
    assert again.activation == ("token" if static is None else "static")


def test_one_scale_for_all_outputs():
    codes = torch.randint(-127, 128, (32, 64), dtype=torch.int8)
    read = layouts.channels(codes, torch.tensor(0.5))
    assert torch.equal(read.dequantize(), codes.float() * 0.5)
