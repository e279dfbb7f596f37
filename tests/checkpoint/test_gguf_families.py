"""GGUF files of families beyond Llama and Qwen, as llama.cpp names their parts: logits as transformers computes them."""

import gguf
import numpy as np
import pytest
import torch
from gguf_files import tiny_model, write_gguf

from flyweight.checkpoint import Checkpoint
from flyweight.checkpoint.gguf import GGUF
from flyweight.checkpoint.hub import resolve
from flyweight.errors import UnsupportedError
from flyweight.models.decoder import Decoder

Q8_0 = gguf.GGMLQuantizationType.Q8_0
TOKENS = torch.arange(2, 60)[None]  # longer than every window
LONG = {f"rope_factors_{kind}.weight": np.linspace(1, factor, 16, dtype=np.float32) for kind, factor in (("long", 4), ("short", 2))}
# (options of the tiny model, metadata that llama.cpp's converter writes besides)
FAMILIES = {
    "gemma2": (dict(sliding_window=16, query_pre_attn_scalar=32, head_dim=32),
               dict(gemma2__attention__sliding_window=16, gemma2__attn_logit_softcapping=50.0, gemma2__final_logit_softcapping=30.0)),
    "gemma3_text": (dict(sliding_window=16, query_pre_attn_scalar=32, head_dim=32, num_hidden_layers=6),
                    dict(gemma3__attention__sliding_window=16)),
    "granite": (dict(embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.125, logits_scaling=2.0),
                dict(granite__embedding_scale=3.0, granite__residual_scale=0.5, granite__attention__scale=0.125,
                     granite__logit_scale=2.0)),
    "olmo2": ({}, {}),
    "phi3": (dict(tied=False, pad_token_id=0), {}),
    "glm4": (dict(tied=False, partial_rotary_factor=0.5, attention_bias=True, pad_token_id=0),
             dict(glm4__rope__dimension_count=16)),
    "qwen3_moe": (dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True),
                  dict(qwen3moe__expert_count=4, qwen3moe__expert_used_count=2, qwen3moe__expert_feed_forward_length=32)),
    "smollm3": (dict(num_hidden_layers=4, pad_token_id=0), {}),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path / "cache"))


def answers(folder):
    decoder = Decoder.load(Checkpoint(folder), device="cpu", dtype=torch.float32, exact=True)
    with torch.inference_mode():
        return decoder.forward_whole(TOKENS)[0]


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_file_computes_what_its_model_does(tmp_path, kind):
    options, fields = FAMILIES[kind]
    model = tiny_model(kind, **options)
    path = write_gguf(tmp_path / "model.gguf", model, **fields)
    with torch.no_grad():
        expected = model(TOKENS).logits[0]
    assert torch.allclose(answers(resolve(path)), expected, atol=1e-4 * float(expected.abs().max()))
    quantized = write_gguf(tmp_path / "quantized.gguf", model, quantize=Q8_0, **fields)
    kept = answers(resolve(quantized))
    assert torch.allclose(kept, answers(resolve(quantized, dtype="float32")), atol=1e-3 * float(kept.abs().max()))
    assert not torch.equal(kept, expected)


def test_long_rope_comes_from_the_factors_in_the_file(tmp_path):
    from flyweight.checkpoint.gguf import make_config

    model = tiny_model("phi3", tied=False, pad_token_id=0)
    fields = dict(phi3__rope__scaling__original_context_length=32)
    config = make_config(GGUF(write_gguf(tmp_path / "model.gguf", model, extra=LONG, **fields)), torch.float16)
    assert config["original_max_position_embeddings"] == 32 and config["rope_scaling"]["type"] == "longrope"
    assert config["rope_scaling"]["long_factor"] == LONG["rope_factors_long.weight"].tolist()


def test_a_window_where_a_family_has_none_is_refused(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tiny_model("olmo2"), olmo2__attention__sliding_window=16)
    with pytest.raises(UnsupportedError, match="sliding-window"):
        resolve(path)
