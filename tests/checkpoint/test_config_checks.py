"""Values that cannot be: each is one line that names the file, the key and what it must be."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file
from tiny_configs import BYTES

from flyweight.checkpoint import Checkpoint
from flyweight.checkpoint.config_checks import check_config, check_generation_config
from flyweight.errors import CheckpointError

NAN, INFINITY = float("nan"), float("inf")


@pytest.fixture
def folder(tmp_path):
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(BYTES))
    return tmp_path


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("rope_theta", NAN, "a number between 2 and 1e+12, not nan"),
        ("rope_theta", INFINITY, "not inf"),
        ("rope_theta", 0.5, "not 0.5"),
        ("rms_norm_eps", INFINITY, "a number between 0 and 1, not inf"),
        ("rms_norm_eps", NAN, "not nan"),
        ("rms_norm_eps", 1e300, "not 1e+300"),
        ("max_position_embeddings", 10**9, "between 1 and 16777216, not 1000000000"),
        ("hidden_size", "64", "a whole number between 1 and 16777216, not '64'"),
        ("hidden_size", True, "not True"),
        ("num_hidden_layers", 10**30, "between 1 and 10000"),
        ("model_type", [], "a text, not []"),
        ("dtype", 16, "a text, not 16"),
        ("architectures", [5], "a list of texts"),
        ("layer_types", [[]], "a list of texts"),
        ("rope_scaling", "linear", "an object"),
        ("tie_word_embeddings", "false", "true or false, not 'false'"),
        ("eos_token_id", [[2]], "a token id or a list of them"),
        ("eos_token_id", 2.0, "a token id or a list of them"),
        ("pad_token_id", "0", "a token id, not '0'"),
        ("mlp_only_layers", [0.5], "a list of whole numbers"),
        ("decoder_sparse_step", 0, "between 1 and 10000, not 0"),
        ("partial_rotary_factor", INFINITY, "a number between 0 and 1"),
        ("quantization_config", [], "an object, not []"),
        ("hidden_size", "x" * 1000, "not '" + "x" * 59 + "…"),
    ],
)
def test_a_config_value_that_cannot_be_is_named(tmp_path, key, value, wanted):
    with pytest.raises(
        CheckpointError, match=rf"config\.json: '{key}' must be .*{re.escape(wanted)}"
    ):
        check_config({key: value}, tmp_path / "config.json")


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"rope_type": "linear", "factor": NAN},
            "'rope_scaling.factor' must be a number between 0.001 and 10000, not nan",
        ),
        ({"rope_type": []}, "'rope_scaling.rope_type' must be a text"),
        (
            {"rope_type": "linear", "factor": 9000.0},
            "'rope_scaling.factor' makes a context of 36864000 tokens, more than 16777216",
        ),
        (
            {"rope_type": "yarn", "factor": 9000, "original_max_position_embeddings": 4096},
            "makes a context of 36864000",
        ),
        (
            {"rope_type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "'rope_scaling.high_freq_factor' must be greater",
        ),
        ({"rope_type": "yarn", "beta_fast": "32"}, "'rope_scaling.beta_fast' must be a number"),
    ],
)
def test_a_rope_scaling_that_cannot_be_is_named(tmp_path, scaling, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        check_config(
            {"max_position_embeddings": 4096, "rope_scaling": scaling}, tmp_path / "config.json"
        )


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("temperature", "0.7", "a number between 0 and 100, not '0.7'"),
        ("temperature", NAN, "not nan"),
        ("top_k", 0.5, "a whole number"),
        ("top_p", 0, "a number between 1e-06 and 1, not 0"),
        ("top_p", [0.9], "not [0.9]"),
        ("repetition_penalty", -1.0, "a number between 0.01 and 100"),
        ("eos_token_id", ["2"], "a token id or a list of them"),
        ("do_sample", "yes", "true or false"),
    ],
)
def test_a_sampling_default_that_cannot_be_is_found_at_load_and_not_at_the_first_request(
    folder, key, value, wanted
):
    (folder / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(
        CheckpointError, match=rf"generation_config\.json: '{key}' must be .*{re.escape(wanted)}"
    ):
        Checkpoint(folder)


def test_ordinary_values_and_unknown_keys_are_left_alone(tmp_path):
    check_config(
        BYTES
        | {
            "rope_scaling": None,
            "sliding_window": None,
            "pad_token_id": -1,
            "eos_token_id": [1, 2],
            "time_step_limit": [0.0, INFINITY],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        tmp_path / "config.json",
    )
    check_generation_config(
        {
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.95,
            "do_sample": True,
            "transformers_version": "5.0",
            "eos_token_id": [151645, 151643],
        },
        tmp_path / "generation_config.json",
    )
