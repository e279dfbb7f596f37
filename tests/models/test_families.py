"""Every family against transformers: tiny random models, written and read as safetensors, in
float32; prompts longer than every window.
"""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from model_helpers import assert_same_logits, run_paged, tokens_of
from safetensors.torch import load_file, save_file

from flyweight.checkpoint.convert import convert
from flyweight.checkpoint.reader import Checkpoint
from flyweight.engine.llm import LLM
from flyweight.engine.memory import CacheShape
from flyweight.engine.request import SamplingParams
from flyweight.errors import CheckpointError, OptionError, UnsupportedError
from flyweight.models.config import ModelConfig
from flyweight.models.decoder import Decoder
from flyweight.models.kv_scheme import choose_kv_scheme
from flyweight.models.presets import PresetWeights, preset_config
from flyweight.quant.calibration import Samples
from flyweight.quant.quantize import quantize
from flyweight.quant.rotated import Rotated, can_rotate

SIZES = dict(
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=97,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
LLAMA3 = dict(
    rope_type="llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
    rope_theta=500.0,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=1e3)
LINEAR = dict(rope_type="linear", factor=3.0, rope_theta=5000.0)
DYNAMIC = dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)


def long_rope(pairs, **more):
    return dict(
        rope_type="longrope",
        rope_theta=1e4,
        short_factor=[1.0 + i / 10 for i in range(pairs)],
        long_factor=[1.5 + i for i in range(pairs)],
        **more,
    )


def by_layer(full, sliding=None):
    local = dict(rope_type="default", rope_theta=100.0)
    return dict(full_attention=full, sliding_attention=sliding or local)


GEMMA3 = dict(sliding_window=5, layer_types=TYPES, query_pre_attn_scalar=24)
GLM_MOE = dict(
    moe_intermediate_size=24,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=2,
    first_k_dense_replace=1,
    routed_scaling_factor=1.7,
)
EXPERTS = dict(num_local_experts=6, num_experts_per_tok=2)
GPT_OSS = dict(
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=5,
    hidden_size=64,
    intermediate_size=96,
)
DELTA = dict(
    max_position_embeddings=192,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
)
QWEN3_NEXT = DELTA | dict(
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=20,
)
MSCALE = dict(mscale=0.7, mscale_all_dim=0.9, beta_fast=32.0, beta_slow=1.0)
# latent attention has as many keys as queries, and its own head sizes
DEEPSEEK = dict(
    num_key_value_heads=6,
    q_lora_rank=None,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    moe_intermediate_size=24,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=2,
    first_k_dense_replace=1,
    routed_scaling_factor=1.7,
    rope_parameters=YARN | MSCALE,
)
GROUPED = dict(n_group=4, topk_group=2)
# name: (model_type, what differs from SIZES)
MODELS = {
    "olmo2": ("olmo2", {}),
    "olmo2 biases, tied": ("olmo2", dict(attention_bias=True, tie_word_embeddings=True)),
    "olmo2 yarn": ("olmo2", dict(rope_parameters=YARN)),
    "olmo3": ("olmo3", dict(sliding_window=5)),
    "olmo3 yarn": ("olmo3", dict(sliding_window=7, rope_parameters=by_layer(YARN))),
    "olmo3 linear": (
        "olmo3",
        dict(layer_types=TYPES, sliding_window=4, rope_parameters=by_layer(LINEAR)),
    ),
    "granite": (
        "granite",
        dict(
            embedding_multiplier=12.0,
            logits_scaling=8.0,
            residual_multiplier=0.22,
            attention_multiplier=0.1,
        ),
    ),
    "granite biases, tied": (
        "granite",
        dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rope_parameters=LLAMA3),
    ),
    "smollm3": ("smollm3", dict(num_hidden_layers=5, tie_word_embeddings=False)),
    "smollm3 tied, biases": (
        "smollm3",
        dict(no_rope_layers=[1, 0, 1], attention_bias=True, mlp_bias=True, rope_parameters=YARN),
    ),
    "smollm3 window": (
        "smollm3",
        dict(no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=6),
    ),
    "phi3": ("phi3", {}),
    "phi3 window, tied": ("phi3", dict(sliding_window=6, tie_word_embeddings=True)),
    "phi3 partial": ("phi3", dict(partial_rotary_factor=0.75)),
    "phi3 long": ("phi3", dict(original_max_position_embeddings=16, rope_parameters=long_rope(4))),
    "phi3 crossing": (
        "phi3",
        dict(original_max_position_embeddings=21, rope_parameters=long_rope(4)),
    ),
    "phi3 short": ("phi3", dict(original_max_position_embeddings=32, rope_parameters=long_rope(4))),
    "llama longrope": (
        "llama",
        dict(rope_parameters=long_rope(4, factor=4.0, original_max_position_embeddings=16)),
    ),
    "ministral": ("ministral", dict(sliding_window=6, layer_types=TYPES)),
    "ministral dynamic": ("ministral", dict(sliding_window=6, rope_parameters=DYNAMIC)),
    "ministral3": (
        "ministral3",
        dict(
            max_position_embeddings=256,
            rope_parameters=YARN
            | MSCALE
            | dict(original_max_position_embeddings=64, llama_4_scaling_beta=0.1),
        ),
    ),
    "mistral yarn": ("mistral", dict(sliding_window=None, rope_parameters=YARN)),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4 no biases, tied": (
        "glm4",
        dict(attention_bias=False, tie_word_embeddings=True, head_dim=16),
    ),
    "glm4 linear": ("glm4", dict(rope_parameters=LINEAR | dict(partial_rotary_factor=0.5))),
    "glm4_moe": ("glm4_moe", GLM_MOE),
    "glm4_moe groups, norms": (
        "glm4_moe",
        GLM_MOE
        | dict(
            n_group=4, topk_group=2, use_qk_norm=True, attention_bias=True, norm_topk_prob=False
        ),
    ),
    "gemma2": ("gemma2", dict(sliding_window=5, query_pre_attn_scalar=24)),
    "gemma2 uncapped, biases": (
        "gemma2",
        dict(
            sliding_window=5,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            attention_bias=True,
            tie_word_embeddings=False,
        ),
    ),
    "gemma2 small caps": (
        "gemma2",
        dict(sliding_window=7, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    ),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3 pattern": ("gemma3_text", dict(sliding_window=6, num_hidden_layers=7, head_dim=16)),
    "gemma3 linear, untied": (
        "gemma3_text",
        GEMMA3 | dict(rope_parameters=by_layer(LINEAR), tie_word_embeddings=False),
    ),
    "gemma3 capped, silu": (
        "gemma3_text",
        GEMMA3 | dict(final_logit_softcapping=4.0, hidden_activation="silu"),
    ),
    "deepseek_v2": ("deepseek_v2", DEEPSEEK),
    "deepseek_v2 queries, groups": (
        "deepseek_v2",
        DEEPSEEK
        | GROUPED
        | dict(q_lora_rank=20, topk_method="group_limited_greedy", rope_parameters=LINEAR),
    ),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK | GROUPED | dict(q_lora_rank=20)),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        DEEPSEEK
        | dict(
            q_lora_rank=20, mlp_layer_types=["dense", "sparse", "dense"], rope_parameters=LINEAR
        ),
    ),
    "deepseek_v3 halves, tied": (
        "deepseek_v3",
        DEEPSEEK
        | GROUPED
        | dict(
            rope_interleave=False,
            tie_word_embeddings=True,
            norm_topk_prob=False,
            rope_parameters=dict(rope_type="default", rope_theta=1e3),
        ),
    ),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss yarn": (
        "gpt_oss",
        GPT_OSS
        | dict(
            tie_word_embeddings=True,
            layer_types=TYPES[::-1],
            rope_parameters=YARN | dict(truncate=False, beta_fast=32.0, beta_slow=1.0),
        ),
    ),
    "gpt_oss no biases": ("gpt_oss", GPT_OSS | dict(attention_bias=False)),
    "qwen3_next": ("qwen3_next", QWEN3_NEXT),
    "qwen3_next interval, biases": (
        "qwen3_next",
        QWEN3_NEXT
        | dict(
            layer_types=None,
            num_hidden_layers=4,
            attention_bias=True,
            mlp_only_layers=[1],
            linear_conv_kernel_dim=3,
            linear_num_value_heads=2,
        ),
    ),
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_5 states alone": ("qwen3_5_text", DELTA | dict(layer_types=["linear_attention"] * 3)),
    "qwen3_5_moe": ("qwen3_5_moe_text", QWEN3_NEXT),
    "gemma": ("gemma", {}),
    "gemma untied, biases": (
        "gemma",
        dict(attention_bias=True, tie_word_embeddings=False, rope_parameters=LINEAR),
    ),
    "mixtral": ("mixtral", EXPERTS),
    "mixtral window, tied": (
        "mixtral",
        EXPERTS | dict(sliding_window=6, head_dim=None, tie_word_embeddings=True),
    ),
    "minimax_m2": ("minimax_m2", EXPERTS | dict(rotary_dim=4)),
    "minimax_m2 yarn": ("minimax_m2", EXPERTS | dict(rope_parameters=YARN)),
    "olmoe": ("olmoe", dict(num_experts=6, num_experts_per_tok=3)),
    "olmoe biases": (
        "olmoe",
        dict(
            num_experts=6,
            num_experts_per_tok=3,
            attention_bias=True,
            norm_topk_prob=True,
            num_key_value_heads=6,
        ),
    ),
    "exaone4": ("exaone4", dict(num_hidden_layers=5, sliding_window=5)),
    "exaone4 no window, tied": (
        "exaone4",
        dict(
            sliding_window=None,
            layer_types=["full_attention"] * 3,
            tie_word_embeddings=True,
            rope_parameters=LLAMA3,
        ),
    ),
    "seed_oss": ("seed_oss", {}),
    "seed_oss biases": (
        "seed_oss",
        dict(attention_bias=False, attention_out_bias=True, mlp_bias=True),
    ),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5 biases": (
        "ernie4_5",
        dict(use_bias=True, tie_word_embeddings=False, rope_parameters=YARN),
    ),
    "dots1": ("dots1", GLM_MOE),
    "dots1 windows, groups": (
        "dots1",
        GLM_MOE
        | dict(
            n_group=4,
            topk_group=2,
            sliding_window=5,
            max_window_layers=2,
            attention_bias=True,
            norm_topk_prob=True,
        ),
    ),
    "cwm": ("cwm", dict(sliding_window=5, num_hidden_layers=5)),
}
LENGTHS = (23, 3, 12)
HYBRIDS = ("qwen3_next", "qwen3_5")
LONG = (150, 3, 70)  # sequences of hybrids: more than a chunk of their layers


def make(name, folder=None):
    """Every parameter random, norms and biases too: a forgotten one would not be noticed."""
    model_type, extra = MODELS[name]
    config = transformers.AutoConfig.for_model(model_type, **SIZES | extra)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    zero_centred = model_type.startswith("gemma")  # 1 + weight
    shifted = model_type.startswith(HYBRIDS)  # all norms are 1 + weight but those of DeltaNet
    with torch.no_grad():
        for key, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if (
                parameter.dtype == torch.float32
                and "inv_freq" not in key
                and "embed_scale" not in key
            ):
                centre = float(key.endswith("norm.weight") and not zero_centred)
                if shifted and "linear_attn" not in key:
                    centre = 0.0
                spread = 1.0 if "gate.weight" in key or "router.weight" in key else 0.15
                parameter.normal_(centre, spread)
    if folder is not None:
        model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """(transformers' model, ours from its folder)"""
    folder = tmp_path_factory.mktemp("family")
    model = make(request.param, folder)
    decoder = Decoder.load(Checkpoint(folder), device="cpu", dtype=torch.float32)
    return model, decoder


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def test_whole_sequences_give_the_logits_of_transformers(pair):
    model, decoder = pair
    tokens = tokens_of(LONG[0] if decoder.config.state_layers else LENGTHS[0])
    found = decoder.forward_whole(torch.tensor([tokens]))[0]
    torch.testing.assert_close(found, logits_of(model, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [64, 5, [9, 1]])
def test_batches_in_chunks_give_the_logits_of_transformers(pair, chunk):
    model, decoder = pair
    if decoder.config.state_layers:
        chunk = {64: 100, 5: 37}[chunk] if isinstance(chunk, int) else [68, *[1] * 9, 64]
    lengths = LONG if decoder.config.state_layers else LENGTHS
    sequences = [tokens_of(length, seed) for seed, length in enumerate(lengths)]
    for found, tokens in zip(run_paged(decoder, sequences, chunk), sequences, strict=True):
        assert_same_logits(found, logits_of(model, tokens), 1e-4)


# -- through the engine, and quantized ---------------------------------------------------------

ONE_EACH = (
    "olmo3 yarn",
    "granite",
    "smollm3",
    "phi3 partial",
    "glm4",
    "glm4_moe",
    "gemma2",
    "gemma3",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "mixtral",
    "exaone4",
    *HYBRIDS,
)
# two layers of a hybrid as it usually is have no attention at all
NO_ATTENTION = "qwen3_5 states alone"
SAMPLES = Samples(
    torch.randint(3, 97, (4, 24), generator=torch.Generator().manual_seed(2)), "random", 0
)
GREEDY = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)


def assert_greedy(model, prompt, answer):
    """Each token is the likeliest by transformers, wherever that is clear; one by one, since long
    rope turns all tokens anew once there are too many.
    """
    texts = [prompt + answer[:count] for count in range(len(answer))]
    logits = torch.stack([logits_of(model, tokens)[-1] for tokens in texts])
    best = logits.topk(2).values
    clear = best[:, 0] - best[:, 1] > 1e-3
    assert clear.any()
    assert torch.equal(torch.tensor(answer)[clear], logits.argmax(-1)[clear])


@pytest.mark.parametrize("name", [*ONE_EACH, NO_ATTENTION, "phi3 long", "phi3 crossing"])
def test_the_engine_answers_as_transformers_would(name, tmp_path):
    """Prompts in chunks, several at once, the second time out of the prefix cache."""
    model = make(name, tmp_path)
    llm = LLM(
        str(tmp_path), device="cpu", dtype="float32", max_num_batched_tokens=16, max_model_len=48
    )
    shared = tokens_of(18)
    prompts = [shared + tokens_of(length, length) for length in (9, 1, 4)] + [tokens_of(7)]
    first = llm.generate(prompts, GREEDY)
    outputs = llm.generate(prompts, GREEDY)
    for prompt, before, output in zip(prompts, first, outputs, strict=True):
        assert_greedy(model, prompt, list(output.token_ids))
        assert before.token_ids == output.token_ids
    assert any(output.completions[0].cached_tokens for output in outputs)


@pytest.mark.parametrize("name", [*ONE_EACH, "granite biases, tied", "olmoe biases"])
def test_a_rotated_family_is_the_same_function(name, tmp_path):
    make(name, tmp_path)
    source = Checkpoint(tmp_path)
    if not can_rotate(ModelConfig.from_dict(source.config)):
        pytest.skip("norms behind attention or MLP see the basis")
    tokens = torch.tensor([tokens_of(LENGTHS[0])])
    found, wanted = (
        Decoder.load(each, device="cpu", dtype=torch.float32).forward_whole(tokens)
        for each in (Rotated(source, seed=3), source)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        *((name, scheme) for name in ONE_EACH for scheme in ("rtn-int4", "gptq-int4")),
        ("gemma3", "awq-int4"),  # folds factors into norms of 1 + weight
        ("phi3 partial", "awq-int4"),  # has sources that nothing can be folded into
    ],
)
def test_a_quantized_family_gives_the_logits_of_its_dequantized_weights(name, scheme, tmp_path):
    model = make(name, tmp_path / "base")
    quantize(tmp_path / "base", scheme, tmp_path / "out", calibration=SAMPLES, device="cpu")
    decoder = Decoder.load(
        Checkpoint(tmp_path / "out"), device="cpu", dtype=torch.float32, exact=True
    )
    prompt = tokens_of(LENGTHS[0])
    found = decoder.forward_whole(torch.tensor([prompt]))[0]
    original = logits_of(model, prompt)
    # quantized, not scrambled; a router that chooses another expert changes a token much
    most = 0.5 if decoder.config.moe is None else 0.9
    assert 0 < (found - original).norm() / original.norm() < most
    torch.testing.assert_close(run_paged(decoder, [prompt], 6)[0], found, rtol=1e-3, atol=1e-3)
    if name == "gpt_oss":
        return  # experts one by one, as no one else has them
    convert(tmp_path / "out", tmp_path / "plain", format="plain", dtype="float32")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32, attn_implementation="eager"
    )
    torch.testing.assert_close(found, logits_of(again, prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("preset", "key", "value", "told"),
    [
        ("deepseek-v2-lite", "topk_method", "noaux_tc", "known: greedy, group_limited_greedy"),
        ("deepseek-v2-lite", "norm_topk_prob", True, "norm_topk_prob is not supported"),
        ("deepseek-v3", "scoring_func", "softmax", "known: sigmoid"),
        ("deepseek-v3", "moe_layer_freq", 2, "moe_layer_freq 2 is not supported"),
        ("deepseek-v3", "attention_bias", True, "attention_bias True is not supported"),
    ],
)
def test_routers_and_layers_that_nobody_here_knows_are_refused(preset, key, value, told):
    with pytest.raises(UnsupportedError, match=told):
        ModelConfig.from_dict(preset_config(preset) | {key: value})


def test_a_compressed_cache_has_no_eight_bits():
    weights = PresetWeights("deepseek-v2-lite")
    config = ModelConfig.from_dict(weights.config)
    assert CacheShape.of(config, torch.bfloat16).token_bytes == 27 * 576 * 2
    with pytest.raises(OptionError, match="one compressed row for all heads"):
        choose_kv_scheme("fp8", weights, config)


# -- other files -------------------------------------------------------------------------------

VISION = dict(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=8,
    patch_size=4,
)


@pytest.mark.parametrize(
    ("whole", "name"),
    [
        ("gemma3", "gemma3"),
        ("mistral3", "mistral yarn"),
        ("qwen3_5", "qwen3_5"),
        ("qwen3_vl", "qwen3_vl_text"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_the_text_model_beside_a_vision_tower_is_read(whole, name, prefix, tmp_path):
    """By the names of transformers 5, and by those of the files on the hub."""
    model_type, extra = MODELS.get(name, (name, {}))
    text = SIZES | extra | dict(model_type=model_type)
    config = transformers.AutoConfig.for_model(
        whole, text_config=text, vision_config=VISION, tie_word_embeddings=whole == "gemma3"
    )
    torch.manual_seed(1)
    model = transformers.AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager"
    ).eval()
    model.save_pretrained(tmp_path)
    if prefix:
        rename(tmp_path / "model.safetensors", prefix)
    decoder = Decoder.load(Checkpoint(tmp_path), device="cpu", dtype=torch.float32)
    tokens = tokens_of(LENGTHS[0])
    found = decoder.forward_whole(torch.tensor([tokens]))[0]
    torch.testing.assert_close(found, logits_of(model, tokens), rtol=1e-4, atol=1e-4)


def rename(file, prefix):
    tensors = {}
    for name, tensor in load_file(file).items():
        name = name.replace("model.language_model.", f"{prefix}model.").replace(
            "model.vision", "vision"
        )
        name = name.replace("model.multi_modal", "multi_modal").replace(
            "language_model.language_model", "language_model"
        )
        tensors[f"{prefix}{name}" if name.startswith("lm_head.") else name] = tensor
    save_file(tensors, file)


def test_experts_in_mxfp4_are_the_values_that_transformers_makes_of_them(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = make("gpt_oss", tmp_path)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, experts in list(model.named_modules()):
        if not name.endswith(".experts"):
            continue
        for part in ("gate_up_proj", "down_proj"):
            _, columns, rows = getattr(experts, part).shape
            columns = -(-columns // 32) * 32
            blocks = torch.randint(
                0, 256, (4, rows, columns // 32, 16), generator=generator, dtype=torch.uint8
            )
            scales = torch.randint(
                120, 126, (4, rows, columns // 32), generator=generator, dtype=torch.uint8
            )
            del tensors[f"{name}.{part}"]
            tensors |= {f"{name}.{part}_blocks": blocks, f"{name}.{part}_scales": scales}
            getattr(experts, part).data = convert_moe_packed_tensors(
                blocks, scales, dtype=torch.float32
            )
    save_file(tensors, tmp_path / "model.safetensors")
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"] = dict(quant_method="mxfp4")
    (tmp_path / "config.json").write_text(json.dumps(settings))
    decoder = Decoder.load(Checkpoint(tmp_path), device="cpu", dtype=torch.float32, exact=True)
    tokens = tokens_of(LENGTHS[0])
    found = decoder.forward_whole(torch.tensor([tokens]))[0]
    torch.testing.assert_close(found, logits_of(model, tokens), rtol=1e-4, atol=1e-4)


def test_layers_that_guess_ahead_are_left_out(tmp_path):
    make("glm4_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(48, 96)
    save_file(tensors, tmp_path / "model.safetensors")
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["num_nextn_predict_layers"] = 1
    (tmp_path / "config.json").write_text(json.dumps(settings))
    Decoder.load(Checkpoint(tmp_path), device="cpu", dtype=torch.float32)
    settings["num_nextn_predict_layers"] = 0
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"layers\.3\.eh_proj"):
        Decoder.load(Checkpoint(tmp_path), device="cpu", dtype=torch.float32)
