"""docs/add-a-model.md, done: a toy family with norms after attention and MLP and a tanh-gelu MLP.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from flyweight.engine.llm import LLM
from flyweight.engine.request import SamplingParams
from flyweight.models import config
from flyweight.models.config import Family, ModelConfig
from flyweight.models.decoder import Decoder
from flyweight.models.plan import ModelPlan, NormPlan
from flyweight.models.presets import PresetWeights
from flyweight.models.standard import plan_of, standard_plan

TOY = dict(
    model_type="toy",
    architectures=["ToyForCausalLM"],
    hidden_act="gelu_pytorch_tanh",
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=96,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    rope_theta=10000.0,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
    dtype="float32",
)


def toy_plan(numbers: ModelConfig) -> ModelPlan:
    """The standard plan, its norms behind attention and MLP instead of before them, both as 1 +
    weight.
    """
    plan = standard_plan(numbers)
    layers = [
        replace(
            layer,
            before_attention=None,
            before_mlp=None,
            after_attention=NormPlan("post_attention_layernorm", plus_one=True),
            after_mlp=NormPlan("post_feedforward_layernorm", plus_one=True),
        )
        for layer in plan.layers
    ]
    return replace(plan, layers=tuple(layers), embedding_scale=48**0.5)


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(config, "FAMILIES", dict(config.FAMILIES))
    monkeypatch.setattr("flyweight.models.standard.FAMILIES", config.FAMILIES)
    config.register("toy", Family("ToyForCausalLM", activations=("gelu_tanh",), plan=toy_plan))
    plan_of.cache_clear()
    yield PresetWeights(TOY, "fp32", seed=3)
    plan_of.cache_clear()


def by_hand(weights: PresetWeights, tokens: list[int]) -> torch.Tensor:
    """The model in plain torch, from its description in words."""
    count, heads, kv_heads, size = len(tokens), 4, 2, 16
    table = weights.tensor("model.embed_tokens.weight")
    x = table[tokens] * 48**0.5
    angles = torch.arange(count)[:, None] * 10000.0 ** -(torch.arange(0, size, 2) / size)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def norm(value, weight):
        return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + 1e-5) * (1 + weight)

    def turn(value):
        first, second = value.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    for index in range(3):

        def of(name, index=index):
            return weights.tensor(f"model.layers.{index}.{name}.weight")

        q, k, v = (
            F.linear(x, of(f"self_attn.{part}_proj")).view(count, -1, size) for part in "qkv"
        )
        q, k = turn(q), turn(k)
        k, v = (value.repeat_interleave(heads // kv_heads, 1) for value in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) * size**-0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        attended = torch.einsum("hts,shd->thd", scores.softmax(-1), v).reshape(count, -1)
        x = x + norm(F.linear(attended, of("self_attn.o_proj")), of("post_attention_layernorm"))
        gated = F.gelu(F.linear(x, of("mlp.gate_proj")), approximate="tanh") * F.linear(
            x, of("mlp.up_proj")
        )
        x = x + norm(F.linear(gated, of("mlp.down_proj")), of("post_feedforward_layernorm"))
    final = (
        x
        * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        * weights.tensor("model.norm.weight")
    )
    return F.linear(final, table)


def test_a_toy_family_gives_the_logits_of_a_model_written_by_hand(toy):
    decoder = Decoder.load(toy, device="cpu", dtype=torch.float32)
    tokens = torch.randint(3, 96, (21,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = by_hand(toy, tokens)
    found = decoder.forward_whole(torch.tensor([tokens]))[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_toy_family_talks_through_the_engine(toy, monkeypatch):
    monkeypatch.setattr("flyweight.engine.llm.open_model", lambda model, device: (toy, None))
    llm = LLM("toy", device="cpu", dtype="float32", max_model_len=48)
    prompt = [5, 9, 44, 7]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    answer = llm.generate([prompt], params)[0].token_ids
    tokens = list(prompt)
    for token in answer:
        best = by_hand(toy, tokens)[-1].topk(2).values
        if best[0] - best[1] > 1e-3:
            assert token == int(by_hand(toy, tokens)[-1].argmax())
        tokens.append(token)
    assert len(answer) == 6
