"""Folders in other formats: the same codes in other words, or a refusal that leaves nothing
behind."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from flyweight.checkpoint import Checkpoint, CheckpointWriter, formats
from flyweight.checkpoint.convert import convert, quantized_modules
from flyweight.cli import app
from flyweight.errors import FlyweightError, OptionError, UnsupportedError
from flyweight.tensors import Float8, Int8Channel, IntGroup, Sparse24, VectorQuant

SHAPES = {"model.layers.0.self_attn.q_proj": (32, 64), "model.layers.0.mlp.down_proj": (64, 96)}
KINDS = {
    "int4": lambda shape, seed: IntGroup.random(
        shape, seed, group_size=32, symmetric=True, dtype=torch.float16
    ),
    "int4 asymmetric": lambda shape, seed: IntGroup.random(
        shape, seed, group_size=32, dtype=torch.float16
    ),
    "int8 channel": lambda shape, seed: IntGroup.random(
        shape, seed, bits=8, group_size=-1, symmetric=True, dtype=torch.float16
    ),
    "act-order": lambda shape, seed: IntGroup.random(
        shape, seed, group_size=32, symmetric=True, act_order=True, dtype=torch.float16
    ),
    "w8a8": lambda shape, seed: Int8Channel.random(shape, seed),
    "fp8": lambda shape, seed: dataclasses.replace(
        Float8.random(shape, seed), scales=torch.tensor([[0.01]])
    ),
    "sparse": lambda shape, seed: Sparse24.random(shape, seed),
    "vptq": lambda shape, seed: VectorQuant.random(
        shape, seed, main=16, residual=4, dtype=torch.float16
    ),
}


def make(folder, kind, form):
    """A folder with two quantized linears, a bias, a norm, an embedding and a plain lm_head."""
    form, layers = formats.named(form), {}
    with CheckpointWriter(folder) as writer:
        for seed, (prefix, shape) in enumerate(SHAPES.items()):
            layers[prefix] = KINDS[kind](shape, seed)
            for name, part in form.write(prefix, layers[prefix]).items():
                writer.add(name, part)
        for name, shape in {
            "model.layers.0.self_attn.q_proj.bias": (32,),
            "model.norm.weight": (64,),
            "lm_head.weight": (16, 64),
            "model.embed_tokens.weight": (16, 64),
        }.items():
            writer.add(name, torch.randn(shape).half())
        config = {
            "model_type": "llama",
            "dtype": "float16",
            "quantization_config": form.config(
                layers, ignore=["lm_head"], biased=["model.layers.0.self_attn.q_proj"]
            ),
        }
        writer.finish(config)
    return layers


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("int4", "gptq", "compressed-tensors"),
        ("int8 channel", "gptq", "compressed-tensors"),
        ("int4", "gptq_v2", "gptq"),
        ("int4 asymmetric", "gptq_v2", "compressed-tensors"),
        ("int4 asymmetric", "awq", "compressed-tensors"),
        ("int4 asymmetric", "awq", "gptq_v2"),
        ("int4", "awq", "gptq"),
        ("act-order", "gptq", "gptq_v2"),
        ("fp8", "fp8", "compressed-tensors"),
    ],
)
def test_there_and_back_gives_the_same_bytes(kind, first, second, tmp_path):
    layers = make(tmp_path / "a", kind, first)
    convert(tmp_path / "a", tmp_path / "b", format=second)
    convert(tmp_path / "b", tmp_path / "c", format=first)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in "ac")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(
            tensor.view(torch.uint8), after[name].view(torch.uint8)
        ), name
    config = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in "ac"]
    assert config[0] == config[1]
    middle = Checkpoint(tmp_path / "b")
    for prefix, tensor in layers.items():
        assert torch.equal(middle.linear(prefix).dequantize(), tensor.dequantize())


def test_gptq_and_compressed_tensors_share_their_words(tmp_path):
    make(tmp_path / "gptq", "int4", "gptq")
    convert(tmp_path / "gptq", tmp_path / "ct", format="compressed-tensors")
    gptq, packed = (load_file(tmp_path / folder / "model.safetensors") for folder in ("gptq", "ct"))
    for prefix in SHAPES:
        assert torch.equal(gptq[f"{prefix}.qweight"].T, packed[f"{prefix}.weight_packed"])
        assert torch.equal(gptq[f"{prefix}.scales"].T, packed[f"{prefix}.weight_scale"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", None])
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("int4", "gptq"),
        ("w8a8", "compressed-tensors"),
        ("sparse", "compressed-tensors"),
        ("vptq", "vptq"),
        ("fp8", "fp8"),
    ],
)
def test_plain_folders_hold_the_dequantized_weights(kind, form, dtype, tmp_path):
    layers = make(tmp_path / "a", kind, form)
    convert(tmp_path / "a", tmp_path / "plain", format="plain", dtype=dtype)
    checkpoint = Checkpoint(tmp_path / "plain")
    assert checkpoint.format is None and checkpoint.config["dtype"] == (dtype or "float16")
    for prefix, tensor in layers.items():
        weight = checkpoint.linear(prefix).weight
        assert (
            torch.equal(weight, tensor.dequantize(weight.dtype))
            and str(weight.dtype) == f"torch.{dtype or 'float16'}"
        )
    assert {name for name in checkpoint.names() if "self_attn" in name} == {
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
    }


@pytest.mark.parametrize(
    ("kind", "form", "target", "says"),
    [
        ("act-order", "gptq", "compressed-tensors", "g_idx"),
        ("act-order", "gptq", "awq", "g_idx"),
        ("int8 channel", "gptq", "awq", "4 bits"),
        ("w8a8", "compressed-tensors", "gptq", "quantized again"),
        ("vptq", "vptq", "compressed-tensors", "no place"),
        ("int4", "gptq", "fp8", "quantized again"),
    ],
)
def test_a_conversion_that_would_lose_something_is_refused_and_leaves_nothing(
    kind, form, target, says, tmp_path
):
    make(tmp_path / "a", kind, form)
    with pytest.raises(UnsupportedError, match=says):
        convert(tmp_path / "a", tmp_path / "b", format=target)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_wrong_requests_are_named_before_anything_is_written(tmp_path):
    make(tmp_path / "a", "int4", "gptq")
    with pytest.raises(OptionError, match="did you mean 'gptq'"):
        convert(tmp_path / "a", tmp_path / "b", format="gptq4")
    with pytest.raises(OptionError, match="did you mean 'float16'"):
        convert(tmp_path / "a", tmp_path / "b", format="plain", dtype="float15")
    convert(tmp_path / "a", tmp_path / "plain", format="plain")
    with pytest.raises(OptionError, match="not quantized"):
        convert(tmp_path / "plain", tmp_path / "b", format="gptq")
    with pytest.raises(FlyweightError, match="exists already"):
        convert(tmp_path / "a", tmp_path / "plain", format="awq")


def test_biased_and_plain_modules_are_announced(tmp_path):
    make(tmp_path / "a", "vptq", "vptq")
    layers = json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"][
        "config_for_layers"
    ]
    assert [layer["bias"] for layer in layers.values()] == [True, False]
    make(tmp_path / "b", "int4", "gptq")
    convert(tmp_path / "b", tmp_path / "c", format="compressed-tensors")
    checkpoint = Checkpoint(tmp_path / "c")
    assert checkpoint.config["quantization_config"]["ignore"] == ["lm_head"]
    assert set(quantized_modules(checkpoint)) == set(SHAPES)


def test_the_command_prints_what_it_did(tmp_path):
    make(tmp_path / "a", "int4", "gptq")
    arguments = [
        "convert",
        str(tmp_path / "a"),
        "-o",
        str(tmp_path / "b"),
        "--format",
        "compressed-tensors",
        "--json",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert (
        facts["modules"] == {"int": 2}
        and facts["format"] == "compressed-tensors"
        and facts["bytes_after"] > 0
    )


@pytest.mark.parametrize(
    ("scheme", "format"), [("int4", "awq"), ("w8a8", "compressed-tensors"), ("bf16", None)]
)
def test_a_preset_s_folder_gives_the_tokens_of_the_preset(scheme, format, tmp_path, monkeypatch):
    from flyweight import LLM, SamplingParams
    from flyweight.models import presets
    from flyweight.models.random_folder import write_preset

    sizes = dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        head_dim=16,
        max_position_embeddings=64,
    )
    monkeypatch.setitem(presets.PRESETS, "tiny", presets.PRESETS["qwen2-7b"] | sizes)
    folder = write_preset(f"preset:tiny:{scheme}", tmp_path / "folder", format=format)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    settings = dict(device="cpu", max_model_len=32, max_num_seqs=1)
    one, other = (
        LLM(model, **settings).generate([[5, 6, 7]], params)[0]
        for model in (f"preset:tiny:{scheme}", folder)
    )
    assert one.completions[0].token_ids == other.completions[0].token_ids
