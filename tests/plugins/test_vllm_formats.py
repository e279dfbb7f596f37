"""Folders that vLLM cannot read, layer by layer, on one rank and on two."""

import sys
from types import SimpleNamespace

import fake_vllm
import pytest
import torch
from vllm_parameters import assert_near

from flyweight.checkpoint import formats
from flyweight.checkpoint.writer import CheckpointWriter
from flyweight.errors import UnsupportedError
from flyweight.plugins import vllm as plugin
from flyweight.plugins.vllm.claims import claims
from flyweight.tensors import IntGroup, VectorQuant

HEADS = {"q_proj": 128, "k_proj": 64, "v_proj": 64}
LAYER = "model.layers.0.self_attn"


def vector(rows, columns, seed):
    return VectorQuant.random(
        (rows, columns), seed, length=8, main=64, residual=16, dtype=torch.float32
    )


def integers(bits):
    return lambda rows, columns, seed: IntGroup.random(
        (rows, columns), seed, bits=bits, group_size=32, dtype=torch.float32
    )


SCHEMES = {
    "vptq": ("vptq", dict.fromkeys([*HEADS, "o_proj"], vector)),
    "mixed": (
        "compressed-tensors",
        dict(q_proj=integers(4), k_proj=integers(8), v_proj=integers(3), o_proj=integers(4)),
    ),
}


def write(folder, scheme, columns=128):
    """A folder with the attention of one layer; its weights."""
    name, kinds = SCHEMES[scheme]
    form = formats.named(name)
    weights = {}
    with CheckpointWriter(folder) as writer:
        for seed, (part, kind) in enumerate(kinds.items()):
            rows, inputs = (HEADS[part], columns) if part in HEADS else (columns, 128)
            weights[f"{LAYER}.{part}"] = weight = kind(rows, inputs, seed)
            for tensor, value in form.write(f"{LAYER}.{part}", weight).items():
                writer.add(tensor, value)
        writer.add("lm_head.weight", torch.randn(16, columns))
        writer.add("model.layers.0.mlp.gate.weight", torch.randn(16, columns))
        settings = form.config(weights, ignore=["lm_head"])
        sizes = dict(hidden_size=columns, num_attention_heads=8, num_key_value_heads=4, head_dim=16)
        writer.finish(dict(model_type="llama", quantization_config=settings, **sizes))
    return weights, settings


@pytest.fixture(params=SCHEMES)
def model(request, tmp_path, monkeypatch):
    weights, settings = write(tmp_path / "model", request.param)
    monkeypatch.setenv(plugin.SETTING, "formats")
    fake_vllm.install(monkeypatch)
    assert plugin.register() == ["formats"]
    registered = sys.modules["vllm.model_executor.layers.quantization"].registered
    config = registered["flyweight"].from_config(settings)
    config.maybe_update_config(str(tmp_path / "model"), hf_config=None, revision=None)
    config.packed_modules_mapping = {"qkv_proj": list(HEADS)}
    return SimpleNamespace(config=config, weights=weights, settings=settings)


def load(model, prefix, sizes, inputs, rank=0, ranks=1):
    """What vLLM does to one layer; the layer and its method."""
    layer = fake_vllm.LinearBase(rank, ranks)
    method = model.config.get_quant_method(layer, prefix)
    method.create_weights(layer, inputs, sizes, 0, 0, torch.float32)
    for parameter in layer.parameters():
        parameter.weight_loader(parameter, torch.ones(3), "q")  # whatever a file holds
    method.process_weights_after_loading(layer)
    return layer, method


def test_the_folder_is_claimed(model):
    kind = type(model.config)
    assert kind.override_quantization_method(model.settings, None) == "flyweight"
    assert kind.override_quantization_method(model.settings, "awq") is None


def test_a_merged_projection_is_its_parts(model):
    layer, method = load(model, f"{LAYER}.qkv_proj", list(HEADS.values()), 128)
    x = torch.randn(5, 128)
    expected = torch.cat([model.weights[f"{LAYER}.{p}"].matmul_reference(x) for p in HEADS], 1)
    assert_near(method.apply(layer, x).double(), expected)
    bias = torch.randn(256)
    found = method.apply(layer, x, bias)
    assert_near(found.double(), expected + bias)


def test_two_ranks_cut_it_by_outputs(model):
    x = torch.randn(5, 128)
    ranks = [
        load(model, f"{LAYER}.qkv_proj", [64, 32, 32], 128, rank, 2)[::-1] for rank in range(2)
    ]
    found = [method.apply(layer, x).split([64, 32, 32], 1) for method, layer in ranks]
    for i, part in enumerate(HEADS):
        expected = model.weights[f"{LAYER}.{part}"].matmul_reference(x)
        both = torch.cat([one[i] for one in found], 1)
        assert_near(both.double(), expected)


def test_more_ranks_than_key_heads_share_them(model):
    """Of four ranks with 32 rows of v for two, the first two have the same ones."""
    x = torch.randn(2, 128)
    expected = model.weights[f"{LAYER}.v_proj"].matmul_reference(x)
    for rank in range(4):
        layer, method = load(model, f"{LAYER}.qkv_proj", [32, 32, 32], 128, rank, 4)
        found = method.apply(layer, x)[:, 64:]
        half = expected[:, rank // 2 * 32 :][:, :32]
        assert_near(found.double(), half)


def test_two_ranks_cut_it_by_inputs(model):
    x = torch.randn(5, 128)
    added = 0
    for rank in range(2):
        layer, method = load(model, f"{LAYER}.o_proj", [128], 64, rank, 2)
        added = added + method.apply(layer, x[:, 64 * rank :][:, :64])
    expected = model.weights[f"{LAYER}.o_proj"].matmul_reference(x)
    assert_near(added.double(), expected)


def test_a_group_across_two_ranks_is_refused(model):
    """16 inputs each, in groups of 32. Codebooks that are for all inputs can be cut anywhere."""
    if model.settings["quant_method"] == "vptq":
        load(model, f"{LAYER}.o_proj", [128], 16, 1, 8)
    else:
        with pytest.raises(UnsupportedError, match=r"o_proj: a group of 32 inputs crosses"):
            load(model, f"{LAYER}.o_proj", [128], 16, 1, 8)


def test_what_is_not_in_the_files_or_not_a_linear_is_named(model):
    with pytest.raises(UnsupportedError, match="has no tensors of"):
        load(model, "model.layers.7.self_attn.o_proj", [128], 128)
    assert model.config.get_quant_method(torch.nn.Module(), "model.norm") is None
    assert model.config.get_quant_method(fake_vllm.ParallelLMHead(), "lm_head") is None
    assert model.config.get_quant_method(fake_vllm.RoutedExperts(4, 2), "mlp.experts") is None


def test_a_linear_without_codes_stays_with_vllm(model):
    """A router, say, which vLLM has kernels of its own for."""
    method = model.config.get_quant_method(fake_vllm.LinearBase(0, 1), "model.layers.0.mlp.gate")
    assert isinstance(method, fake_vllm.UnquantizedLinearMethod)


def group(**weights):
    return {"weights": dict(type="int", num_bits=4, **weights)}


@pytest.mark.parametrize(
    ("settings", "asked", "expected"),
    [
        ({"quant_method": "vptq"}, None, True),
        ({"quant_method": "vptq"}, "gptq", False),
        ({"quant_method": "awq"}, None, False),
        ({"quant_method": "awq"}, "flyweight", True),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": group()}}, None, False),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": group(), "b": group()}},
            None,
            True,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": group(), "b": {"weights": {"type": "float", "num_bits": 4}}},
            },
            None,
            False,
        ),
    ],
)
def test_which_folders_are_ours(settings, asked, expected):
    assert claims(settings, asked) is expected
