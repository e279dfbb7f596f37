import pytest
import torch
import transformers
from model_helpers import LLAMA3, MODELS, TINY, YARN

from flyweight.errors import CheckpointError, UnsupportedError
from flyweight.models.config import FAMILIES, ModelConfig
from flyweight.models.presets import PRESETS
from flyweight.models.standard import plan_of

LLAMA = TINY | dict(model_type="llama")


def config(**changes):
    return ModelConfig.from_dict(
        {key: value for key, value in (LLAMA | changes).items() if value is not ...}
    )


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_saves_reads_back_through_both(name, tmp_path):
    model_type, extra = MODELS[name]
    theirs = transformers.AutoConfig.for_model(model_type, **TINY | extra)
    theirs.save_pretrained(tmp_path)
    ours = ModelConfig.from_dict(transformers.PreTrainedConfig.get_config_dict(tmp_path)[0])
    again = transformers.AutoConfig.for_model(**ours.to_dict())
    assert ModelConfig.from_dict(ours.to_dict()) == ours == ModelConfig.from_dict(again.to_dict())
    for key in (
        "hidden_size",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "tie_word_embeddings",
        "sliding_window",
        "layer_types",
        "max_position_embeddings",
        "eos_token_id",
        "attention_bias",
    ):
        assert getattr(again, key, None) == getattr(theirs, key, None), key
    for key, value in theirs.rope_parameters.items():
        assert again.rope_parameters[key] == value, key


@pytest.mark.parametrize("name", PRESETS)
def test_presets_read_back_through_transformers(name):
    ours = ModelConfig.from_dict(PRESETS[name])
    theirs = transformers.AutoConfig.for_model(**ours.to_dict())
    assert ModelConfig.from_dict(theirs.to_dict()) == ours
    assert theirs.architectures == PRESETS[name]["architectures"]


STATED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "moe_intermediate_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "shared_expert_intermediate_size",
)


@pytest.mark.parametrize(
    "model_type", sorted(FAMILIES.keys() - {"kimi_k2"})
)  # which transformers does not have
def test_a_missing_key_is_what_transformers_takes(model_type):
    """Of files that say no more than their sizes: biases, norms, rope, windows, tied embeddings,
    how experts are chosen."""
    known = transformers.AutoConfig.for_model(model_type).to_dict()
    changes = dict(num_hidden_layers=4, num_experts_per_tok=2) | (
        {"head_dim": 128} if model_type == "glm4_moe" else {}
    )
    changes |= {
        key: 16 for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in known
    }
    theirs = transformers.AutoConfig.for_model(model_type, **changes).to_dict()
    stated = {
        key: theirs[key] for key in (*STATED, *changes, "model_type") if theirs.get(key) is not None
    }
    whole, short = ModelConfig.from_dict(theirs), ModelConfig.from_dict(stated)
    assert plan_of(short) == plan_of(whole)
    assert (short.tied_embeddings, short.context_length) == (
        whole.tied_embeddings,
        whole.context_length,
    )


def test_flags_of_the_families():
    flags = {
        name: ModelConfig.from_dict(TINY | dict(model_type=name))
        for name in ("llama", "mistral", "qwen2", "qwen3")
    }
    assert [(c.qkv_bias, c.o_bias, c.qk_norm) for c in flags.values()] == [
        (False, False, False),
        (False, False, False),
        (True, False, False),
        (False, False, True),
    ]
    assert flags["qwen3"].head_dim == 128 and flags["llama"].head_dim == 8
    assert flags["mistral"].windows == (4096,) * 3 and flags["qwen2"].windows == (None,) * 3


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            dict(model_type="llama", partial_rotary_factor=0.5),
            "a part of each head",
        ),  # which transformers ignores there
        (
            dict(model_type="qwen2", sliding_window=5, layer_types=["sliding_attention"] * 3),
            "says that there are none",
        ),
        (
            dict(model_type="qwen3_5_text", hidden_act="gelu_pytorch_tanh"),
            "only silu is",
        ),  # the convolution has it, too
        (
            dict(model_type="exaone4", sliding_window=5, layer_types=["full_attention"] * 3),
            "that no layer has",
        ),
    ],
)
def test_what_no_two_readers_take_alike_is_refused(changes, told):
    with pytest.raises(UnsupportedError, match=told):
        ModelConfig.from_dict(TINY | changes)


def test_sliding_windows():
    qwen = TINY | dict(model_type="qwen2", sliding_window=9, max_window_layers=2)
    assert ModelConfig.from_dict(qwen).windows == (None, None, None)
    assert ModelConfig.from_dict(qwen | dict(use_sliding_window=True)).windows == (None, None, 9)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert ModelConfig.from_dict(
        qwen | dict(use_sliding_window=True, layer_types=kinds)
    ).windows == (9, None, 9)
    mistral = TINY | dict(model_type="mistral")
    assert [
        ModelConfig.from_dict(mistral | change).windows[0]
        for change in (
            {},
            dict(sliding_window=None),
            dict(sliding_window=0),
            dict(sliding_window=7),
        )
    ] == [4096, None, None, 7]
    with pytest.raises(CheckpointError, match="layer_types"):
        ModelConfig.from_dict(qwen | dict(use_sliding_window=True, layer_types=kinds[:2]))


def test_both_spellings_of_rope_say_the_same():
    old = config(rope_theta=500.0, rope_scaling=LLAMA3)
    new = config(rope_parameters=LLAMA3 | dict(rope_theta=500.0))
    older = config(
        rope_theta=500.0,
        rope_scaling={**LLAMA3, "type": LLAMA3["rope_type"]} | dict(rope_type=None),
    )
    assert old == new == older and old.rope.theta == 500.0 and old.rope["factor"] == 4.0


def test_context_length_counts_the_factor_of_the_scaling():
    assert config().context_length == 64
    assert config(rope_scaling=dict(type="linear", factor=3.0)).context_length == 192
    assert config(rope_scaling=dict(type="dynamic", factor=2.0)).context_length == 128
    assert config(rope_scaling=YARN).context_length == 64
    assert config(rope_scaling=YARN | dict(factor=8.0)).context_length == 128
    assert config(rope_scaling=LLAMA3).context_length == 64
    assert (
        ModelConfig.from_dict(PRESETS["gemma-3-12b"]).context_length == 131072
    )  # by a factor that is in it
    growing = dict(original_max_position_embeddings=16, llama_4_scaling_beta=0.1)
    assert config(rope_scaling=YARN | growing).context_length == 16  # from where on queries grow


def test_dtype_and_eos_in_every_spelling():
    assert (
        config(torch_dtype="float16").dtype == config(dtype="torch.float16").dtype == torch.float16
    )
    assert config(eos_token_id=[5, 6]).eos_ids == (5, 6) and config(eos_token_id=5).eos_ids == (5,)
    assert config(eos_token_id=None).eos_ids == ()


def test_mixture_of_experts_is_read():
    moe = ModelConfig.from_dict(PRESETS["qwen2-57b-a14b"]).moe
    assert (
        moe.experts,
        moe.experts_per_token,
        moe.intermediate_size,
        moe.shared_intermediate_size,
    ) == (64, 8, 2560, 20480)
    sparse = PRESETS["qwen2-57b-a14b"] | dict(
        model_type="qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[1]
    )
    assert ModelConfig.from_dict(sparse).moe.dense_layers[:4] == (0, 1, 2, 4)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (dict(model_type="gpt2"), UnsupportedError, ["gpt2", *FAMILIES]),
        (dict(model_type=...), UnsupportedError, ["None", "llama"]),
        (dict(hidden_act="gelu"), UnsupportedError, ["hidden_act", "gelu"]),
        (dict(dtype="int8"), UnsupportedError, ["dtype", "int8"]),
        (
            dict(rope_scaling=dict(rope_type="mrope", factor=2.0)),
            UnsupportedError,
            ["mrope", "yarn"],
        ),
        (
            dict(rope_scaling=dict(rope_type="longrope", short_factor=[1.0])),
            CheckpointError,
            ["long_factor"],
        ),
        (
            dict(model_type="olmo_hybrid"),
            UnsupportedError,
            ["olmo_hybrid", "nearest that is: olmo3", "DeltaNet"],
        ),
        (dict(model_type="lama"), UnsupportedError, ["'lama'", "nearest that is: llama"]),
        (
            dict(attn_logit_softcapping=30.0),
            UnsupportedError,
            ["attn_logit_softcapping", "30.0", "llama"],
        ),
        (
            dict(model_type="mistral", attention_bias=True),
            UnsupportedError,
            ["attention_bias", "mistral"],
        ),
        (dict(model_type="gpt_oss", swiglu_limit=5.0), UnsupportedError, ["swiglu_limit"]),
        (
            dict(model_type="gemma3_text", use_bidirectional_attention=True),
            UnsupportedError,
            ["use_bidirectional"],
        ),
        (dict(hidden_size=...), CheckpointError, ["hidden_size", "missing"]),
        (dict(num_hidden_layers="3"), CheckpointError, ["num_hidden_layers", "'3'"]),
        (dict(vocab_size=0), CheckpointError, ["vocab_size", "positive"]),
        (dict(rms_norm_eps=-1.0), CheckpointError, ["rms_norm_eps"]),
        (dict(num_key_value_heads=4), CheckpointError, ["6", "4"]),
        (dict(tie_word_embeddings="yes"), CheckpointError, ["tie_word_embeddings"]),
        (dict(eos_token_id="</s>"), CheckpointError, ["eos_token_id"]),
        (dict(rope_scaling=[1, 2]), CheckpointError, ["rope_scaling"]),
        (dict(rope_scaling=dict(type="linear")), CheckpointError, ["factor", "missing"]),
        (dict(partial_rotary_factor=0.4, head_dim=8), CheckpointError, ["partial_rotary_factor"]),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changes, error, words):
    with pytest.raises(error) as caught:
        config(**changes)
    message = str(caught.value)
    assert message.startswith("config.json:") and "\n" not in message
    assert all(word in message for word in words), message
