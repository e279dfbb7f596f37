"""The trellis tensor: what its bits mean, spelled out weight by weight."""

import pytest
import torch

from flyweight.tensors import Trellis, merge
from flyweight.tensors.trellis import STATE_BITS, from_matrix, hashed, to_matrix


def signed_bytes(word):
    return [int.from_bytes(word.to_bytes(4, "little")[i : i + 1], signed=True) for i in range(4)]


def spelled_out(tensor, row, column):
    """One weight by the definition, in Python's own numbers."""
    bits, words = tensor.bits, tensor.words.tolist()
    blocks = len(words[0])
    g, t = row % 8, column % 32 // 8
    first = column // 128 * 2
    own = [b for b in (first, first + 1) if b < blocks]
    stream = sum(
        (words[row // 16][b][4 * g + t][k] % 2**32) << 32 * (i * bits + k)
        for i, b in enumerate(own)
        for k in range(bits)
    )
    size = 32 * bits * len(own)
    quarter = row % 16 // 8 + 2 * (column % 8 // 4)
    step = 8 * (column // 64 - first) + 4 * (column % 64 // 32) + quarter
    begin = 4 * bits * step
    state = ((stream | stream << size) >> begin) % 2 ** STATE_BITS[bits]
    y = (state * 0xCBAC1FED + 0x01234567) % 2**32
    r = (y >> 16 | y << 16) % 2**32
    parts = (y, r * 0x9E3779B1 % 2**32, r * 0x85EBCA6B % 2**32)
    value = sum(signed_bytes(part)[column % 4] for part in parts)
    group = column // 128 if tensor.groups > 1 else 0
    return value * tensor.scales[row, group].item()


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("shape", [(16, 128), (40, 192), (5, 64), (32, 384)])
@pytest.mark.parametrize("groups", [False, True])
def test_every_weight_is_what_the_definition_says(bits, shape, groups):
    tensor = Trellis.random(shape, seed=3, bits=bits, groups=groups)
    assert tensor.shape == shape
    found = tensor.dequantize(torch.float64)
    for row in {0, shape[0] - 1, shape[0] // 2, min(9, shape[0] - 1)}:
        for column in range(shape[1]):
            assert found[row, column] == pytest.approx(
                spelled_out(tensor, row, column), rel=1e-6, abs=1e-12
            )


@pytest.mark.parametrize("bits", [2, 3])
def test_states_give_back_the_words(bits):
    tensor = Trellis.random((32, 320), seed=1, bits=bits)
    again = Trellis.from_states(tensor.states(), tensor.scales, bits)
    assert torch.equal(again.words, tensor.words)


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_matrix_goes_to_lanes_and_back(blocks):
    matrix = torch.arange(48 * 384).reshape(48, 384)
    assert torch.equal(to_matrix(from_matrix(matrix, blocks)), matrix)


def test_values_are_centred_and_of_the_spread_they_are_said_to_have():
    values = hashed(torch.arange(1 << 18)).float()
    assert abs(values.mean()) < 2
    assert values.std() == pytest.approx(128, rel=0.02)


def test_bits_are_those_of_words_and_scales():
    tensor = Trellis.random((64, 256), bits=3)
    assert tensor.bits_per_weight == 3 + 16 / 256


def test_only_whole_tiles_are_followed_by_others():
    parts = [Trellis.random((rows, 128), seed=rows) for rows in (32, 16, 8)]
    (joined,) = merge(parts)
    expected = torch.cat([part.dequantize() for part in parts])
    assert torch.equal(joined.dequantize(), expected)
    assert len(merge(parts[::-1])) == 2
    assert len(merge([parts[0], Trellis.random((16, 128), bits=3)])) == 2


def test_experts_are_stacked():
    parts = [Trellis.random((16, 192), seed=seed) for seed in range(3)]
    stacked = Trellis.stack(parts)
    assert stacked.shape == (3, 16, 192)
    assert torch.equal(stacked.dequantize()[1], parts[1].dequantize())
