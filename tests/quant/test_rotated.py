"""A rotated model is the same function with weights that are nearer to normal."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from tiny_model import make_tiny_model

from flyweight.checkpoint.reader import Checkpoint
from flyweight.models.config import ModelConfig
from flyweight.models.decoder import Decoder
from flyweight.models.presets import PresetWeights, preset_config
from flyweight.quant.rotated import Rotated, can_rotate, orthogonal


def logits(source):
    decoder = Decoder.load(source, device=torch.device("cpu"), dtype=torch.float32, exact=True)
    tokens = torch.randint(0, decoder.config.vocab_size, (2, 12), generator=torch.manual_seed(0))
    with torch.no_grad():
        return decoder.forward_whole(tokens)


@pytest.mark.parametrize("size", [1, 64, 96, 36])
def test_a_basis_is_orthogonal_and_even(size):
    basis = orthogonal(size, seed=1)
    torch.testing.assert_close(basis @ basis.T, torch.eye(size), atol=1e-6, rtol=0)
    odd = size // (size & -size)
    assert basis.abs().max() <= (odd / size) ** 0.5 + 1e-6


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(tie_word_embeddings=False),
        dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"]),
    ],
    ids=["tied", "untied", "biases"],
)
def test_a_rotated_model_is_the_same_function(tmp_path, changes):
    source = Checkpoint(make_tiny_model(tmp_path / "tiny", **changes))
    rotated = Rotated(source, seed=3)
    wanted, found = logits(source), logits(rotated)
    assert found.std() > 0.1
    torch.testing.assert_close(found, wanted, atol=2e-4 * float(wanted.abs().max()), rtol=0)
    assert torch.equal(rotated.tensor("model.norm.weight"), torch.ones(64))


def test_loud_inputs_are_spread(tmp_path):
    """Weights of the tiny model are normal; behind its norm some columns are six times as loud."""
    source = Checkpoint(make_tiny_model(tmp_path / "tiny"))
    name = "model.layers.0.mlp.up_proj"
    norm = source.tensor("model.layers.0.post_attention_layernorm.weight")
    before = (source.linear(name).dequantize() * norm).square().mean(0)
    after = Rotated(source).linear(name).dequantize().square().mean(0)
    assert after.max() / after.mean() < 0.5 * before.max() / before.mean()


def test_experts_and_their_router_are_turned_together():
    source = PresetWeights("tiny-moe", "fp32")
    wanted = logits(source)
    close = 2e-4 * float(wanted.abs().max())
    torch.testing.assert_close(logits(Rotated(source)), wanted, atol=close, rtol=0)


def test_norms_behind_attention_forbid_it():
    assert not can_rotate(ModelConfig.from_dict(preset_config("gemma-2-2b")))
    assert can_rotate(ModelConfig.from_dict(preset_config("qwen3-8b")))
