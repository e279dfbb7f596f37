"""Families against transformers at the shapes of real layers: random weights, in float32.

Of each family the smallest preset, with few layers (all kinds are there), few experts, a small
vocabulary and MLPs of at most 2,560; all else is the model's own. `test_families.py` has the
variants, in tiny sizes.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from model_helpers import tokens_of

from flyweight.checkpoint.reader import Checkpoint
from flyweight.kernels import cpu
from flyweight.models.decoder import Decoder
from flyweight.models.presets import preset_config

LOCAL = ["sliding_attention", "full_attention"]
STATES = ["linear_attention", "full_attention"]
WIDEST = 2560  # of an MLP: wider ones are the same two products and take most of the time
EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
# preset: what differs from it
SHAPES = {
    "qwen2-0.5b": {},
    "qwen3-0.6b": {},
    "gemma-2b": dict(num_hidden_layers=1),
    "gemma-2-2b": dict(layer_types=LOCAL),
    "gemma-3-1b": dict(layer_types=LOCAL),
    "gpt-oss-20b": dict(layer_types=LOCAL),
    "qwen3-next-80b-a3b": dict(layer_types=STATES),
    "qwen3.5-35b-a3b": dict(layer_types=STATES),
    "phi-4-mini": dict(num_hidden_layers=1),
    "granite-3.3-2b": {},
    "olmo2-7b": dict(num_hidden_layers=1),
    "olmo3-7b": dict(num_hidden_layers=1, layer_types=LOCAL[:1]),
    "olmoe-1b-7b": {},
    "smollm3-3b": dict(no_rope_layers=[1, 0]),
    "ministral-8b": dict(num_hidden_layers=1, layer_types=LOCAL[:1]),
    "ministral-3-8b": dict(num_hidden_layers=1),
    "glm-4-9b": dict(num_hidden_layers=1),
    "glm-4.5-air": dict(num_hidden_layers=1, first_k_dense_replace=0),
    "dots.llm1": dict(num_hidden_layers=1, first_k_dense_replace=0),
    "deepseek-v2-lite": dict(first_k_dense_replace=1),
    "minimax-m2": dict(num_hidden_layers=1),
    "ernie-4.5-0.3b": {},
    "exaone-4-1.2b": dict(layer_types=["full_attention"] * 2),
}
WINDOW = 16
TOKENS = 80  # more than every window, and than a chunk of layers with states


def config_of(preset):
    config = preset_config(preset)
    config |= dict(vocab_size=997, num_hidden_layers=2, max_position_embeddings=4096)
    config |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    config["intermediate_size"] = min(WIDEST, config["intermediate_size"])
    if config.get("sliding_window"):
        config["sliding_window"] = WINDOW
    for key in EXPERTS:
        if config.get(key):
            config |= {key: 4, "num_experts_per_tok": 2}
    return config | SHAPES[preset]


PERIOD = 1_048_583  # a prime: no two rows of a matrix, and no two experts, have the same numbers


@pytest.fixture
def initialized_once(monkeypatch):
    """transformers draws all weights anew, after torch; it draws them from numbers that are there,
    because a hundred million new ones take longer than all that is tested.
    """
    monkeypatch.setattr(torch.nn.Linear, "reset_parameters", lambda linear: None)
    numbers = torch.randn(PERIOD)

    def normal(x, mean=0.0, std=1.0, *, generator=None):
        period = (numbers * std + mean).roll(int(torch.randint(PERIOD, (1,))))
        for part in x.view(-1).split(PERIOD):
            part.copy_(period[: part.numel()])
        return x

    monkeypatch.setattr(torch.Tensor, "normal_", normal)
    # a second copy of every weight, which test_cpu_linear.py holds against the first
    monkeypatch.setattr(cpu, "has_packing", lambda: False)


@pytest.mark.usefixtures("initialized_once")
@pytest.mark.parametrize("preset", SHAPES)
def test_real_layers_give_the_logits_of_transformers(preset, tmp_path):
    config = config_of(preset)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(config.pop("model_type"), **config),
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases, which begin as ones and zeros
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(tmp_path)
    decoder = Decoder.load(Checkpoint(tmp_path), device="cpu", dtype=torch.float32)
    tokens = torch.tensor([tokens_of(TOKENS)])
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
    assert expected.std() > 0.01
    torch.testing.assert_close(decoder.forward_whole(tokens), expected, rtol=1e-4, atol=1e-4)
