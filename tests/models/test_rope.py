import pytest
import torch
import transformers
from model_helpers import LLAMA3, TINY, YARN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from flyweight.kernels.reference import rope_rows, rotate
from flyweight.models.config import ModelConfig
from flyweight.models.presets import PRESETS
from flyweight.models.rope import rope_tables

REAL_LLAMA3 = PRESETS["llama-3.1-8b"]["rope_scaling"]
SCALINGS = {
    "linear": dict(rope_type="linear", factor=2.5),
    "llama3": LLAMA3,
    "llama3 of Llama 3.1": REAL_LLAMA3,
    "yarn": YARN,
    "yarn of Qwen": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
    "yarn with betas": YARN | dict(beta_fast=16, beta_slow=2, attention_factor=1.5),
    "yarn with mscale": YARN | dict(mscale=0.7, mscale_all_dim=0.4),
    "yarn not rounded": YARN | dict(truncate=False),
    "yarn by a factor below one": YARN | dict(factor=0.5),
}


def read(theta=10000.0, **changes):
    data = (
        TINY
        | dict(model_type="glm", head_dim=64, max_position_embeddings=128, rope_theta=theta)
        | changes
    )
    return ModelConfig.from_dict(data), transformers.AutoConfig.for_model(**data)


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_tables_equal_transformers(name, theta, partial):
    scaling = SCALINGS[name]
    ours, theirs = read(theta, rope_scaling=dict(scaling), partial_rotary_factor=partial)
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs)
    cos, sin = rope_tables(ours)
    assert cos.shape == (ours.context_length, int(32 * partial))
    angles = torch.arange(ours.context_length)[:, None].float() * frequencies
    torch.testing.assert_close(
        cos, angles.cos() * factor, rtol=0, atol=2e-5 * max(1, ours.context_length / 4096)
    )
    torch.testing.assert_close(
        sin, angles.sin() * factor, rtol=0, atol=2e-5 * max(1, ours.context_length / 4096)
    )


def test_dynamic_rows_are_those_of_a_sequence_that_ends_there():
    ours, theirs = read(rope_scaling=dict(rope_type="dynamic", factor=3.0))
    cos, sin = rope_tables(ours)
    assert len(cos) == 384
    for position in (0, 5, 127, 128, 200, 383):
        frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, seq_len=position + 1)
        torch.testing.assert_close(cos[position], (position * frequencies).cos(), rtol=0, atol=5e-5)
        torch.testing.assert_close(sin[position], (position * frequencies).sin(), rtol=0, atol=5e-5)


@pytest.mark.parametrize("rotary", [16, 8])
def test_rotate_turns_pairs_half_a_rotary_apart_and_leaves_the_rest(rotary):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 16, generator=generator)
    angles = torch.rand(40, rotary // 2, generator=generator) * 6
    positions = torch.tensor([7, 0, 39, 7, 12])
    turned = rotate(x, *rope_rows(angles.cos(), angles.sin(), positions))
    half = rotary // 2
    expected = torch.complex(x[..., :half], x[..., half:rotary]) * torch.polar(
        torch.ones(5, 1, half), angles[positions][:, None]
    )
    torch.testing.assert_close(turned[..., :half], expected.real)
    torch.testing.assert_close(turned[..., half:rotary], expected.imag)
    assert torch.equal(turned[..., rotary:], x[..., rotary:])
