import pytest
import torch

from flyweight.errors import OptionError
from flyweight.models.config import ModelConfig
from flyweight.models.decoder import Decoder
from flyweight.models.presets import PRESETS, SCHEMES, PresetWeights, preset_config, tensor_shapes
from flyweight.tensors import IntGroup, Plain, Sparse24

# Billions of parameters, as the model cards give them (embeddings once where they are tied).
BILLIONS = {
    "qwen2-0.5b": 0.49,
    "qwen2-1.5b": 1.54,
    "qwen2-7b": 7.62,
    "qwen2-72b": 72.7,
    "qwen1.5-32b": 32.5,
    "qwen3-0.6b": 0.6,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "smollm2-135m": 0.1345,
}
SMALL = PRESETS["qwen2-0.5b"] | dict(
    hidden_size=96,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=64,
    max_position_embeddings=32,
)


@pytest.mark.parametrize("name", BILLIONS)
def test_presets_have_the_size_of_the_real_model(name):
    shapes = tensor_shapes(ModelConfig.from_dict(preset_config(name)))
    count = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert count / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


def test_the_stretched_preset_holds_the_longest_input_and_its_answer():
    plain, long = (ModelConfig.from_dict(preset_config("qwen2-72b" + end)) for end in ("", "-yarn"))
    assert plain.context_length == 32768 and long.context_length == 129024 + 2048
    assert tensor_shapes(plain) == tensor_shapes(long)


@pytest.mark.parametrize(
    "model",
    [
        "qwen2-72b:int4",
        "qwen2-72b:w8a16",
        "qwen2-57b-a14b:bf16",
        "qwen2-57b-a14b:int4-sym",
        "qwen1.5-32b:bf16",
    ],
)
def test_the_large_presets_fit_a_gpu_of_139_gib_with_the_longest_context(model):
    """Weights, KV of 32,768 tokens, and 8 GB for a step; the engine leaves a tenth free."""
    name, scheme = model.split(":")
    config = ModelConfig.from_dict(preset_config(name))
    bits = SCHEMES[scheme]((128, 1024), 0, "cpu", dtype=torch.bfloat16).bits_per_weight
    weights = sum(
        torch.Size(shape).numel() * (bits if "_proj" in tensor else 16) / 8
        for tensor, shape in tensor_shapes(config).items()
    )
    kv = 32768 * config.layers * 2 * config.kv_heads * config.head_dim * 2
    assert weights + kv + 8e9 < 0.9 * 139 * 2**30


def test_the_mixture_of_experts_has_its_57_billion():
    config = ModelConfig.from_dict(preset_config("qwen2-57b-a14b"))
    expert = 3 * config.hidden_size * config.moe.intermediate_size * config.moe.experts
    shared = 3 * config.hidden_size * config.moe.shared_intermediate_size
    attention = config.hidden_size * config.head_dim * 2 * (config.heads + config.kv_heads)
    total = (
        config.layers * (expert + shared + attention) + 2 * config.vocab_size * config.hidden_size
    )
    assert total / 1e9 == pytest.approx(57.4, rel=0.01)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_runs(scheme):
    # a trellis takes inputs in blocks of 64
    wider = dict(hidden_size=192) if scheme.startswith("trellis") else {}
    weights = PresetWeights(SMALL | wider, scheme)
    logits = Decoder.load(weights, device="cpu", dtype=torch.float32).forward_whole(
        torch.tensor([[1, 2, 3, 4, 5]])
    )
    assert logits.shape == (1, 5, 64) and logits.isfinite().all() and logits.std() > 0.1
    kind = type(weights.linear("model.layers.0.mlp.down_proj"))
    assert (kind is Plain) == (scheme in ("fp32", "fp16", "bf16"))


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name.startswith("sparse")])
def test_sparse_schemes_keep_two_of_four(scheme):
    tensor = PresetWeights(SMALL, scheme).linear("model.layers.0.mlp.down_proj")
    assert isinstance(tensor, Sparse24)
    assert (tensor.dequantize().unflatten(1, (-1, 4)).count_nonzero(-1) <= 2).all()


def test_bytes_depend_on_seed_and_name_and_not_on_order():
    first, second = PresetWeights(SMALL, "int4", 7), PresetWeights(SMALL, "int4", 7)
    names = [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    ]
    made = {name: first.linear(name).codes for name in names}
    for name in reversed(names):
        second.tensor("model.norm.weight")
        assert torch.equal(second.linear(name).codes, made[name])
    assert not torch.equal(made[names[0]], made[names[1]])
    assert not torch.equal(PresetWeights(SMALL, "int4", 8).linear(names[0]).codes, made[names[0]])


def test_group_size_adapts_to_hidden_sizes_that_128_does_not_divide():
    weights = PresetWeights("smollm2-135m", "int4")
    tensor = weights.linear("model.layers.0.self_attn.o_proj")
    assert isinstance(tensor, IntGroup) and tensor.group_size == 64 and tensor.zeros is not None
    assert weights.linear("model.layers.0.mlp.down_proj").group_size == 128


def test_head_embeddings_and_norms_stay_plain_in_the_dtype_of_the_model():
    weights = PresetWeights(SMALL | dict(tie_word_embeddings=False), "w8a8")
    assert isinstance(weights.linear("lm_head"), Plain)
    assert {weights.tensor(name).dtype for name in ("lm_head.weight", "model.norm.weight")} == {
        torch.bfloat16
    }
    assert PresetWeights(SMALL, "fp16").tensor("model.embed_tokens.weight").dtype == torch.float16


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(OptionError, match=r"unknown preset 'qwen3-8'.*qwen3-8b"):
        PresetWeights("qwen3-8")
    with pytest.raises(OptionError, match=r"unknown scheme 'int4sym'.*int4-sym"):
        PresetWeights("qwen3-8b", "int4sym")


def test_a_config_handed_out_is_ones_own():
    preset_config("llama-3.1-8b")["rope_scaling"]["factor"] = 1.0
    assert PRESETS["llama-3.1-8b"]["rope_scaling"]["factor"] == 8.0
