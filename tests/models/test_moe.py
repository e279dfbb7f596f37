"""Mixtures of experts against transformers, from per-expert and fused files, whole and in steps."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_moe import CASES, save

from flyweight.checkpoint import Checkpoint
from flyweight.checkpoint.summary import summarize
from flyweight.engine.llm import LLM
from flyweight.engine.request import SamplingParams
from flyweight.errors import CheckpointError
from flyweight.models.config import ModelConfig
from flyweight.models.decoder import Decoder
from flyweight.models.presets import PresetWeights, preset_config, tensor_shapes
from flyweight.models.standard import plan_of

TOLERANCE = 1e-5  # of the largest logit, float32
TOKENS = torch.randint(0, 128, (2, 40), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def theirs(model):
    return model(TOKENS).logits


def ours(source):
    return Decoder.load(source, device="cpu", dtype=torch.float32, exact=True).forward_whole(TOKENS)


def close(found, expected):
    return float((found - expected).abs().max() / expected.abs().max()) <= TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, tmp_path):
    model = save(case, tmp_path)
    assert close(ours(Checkpoint(tmp_path)), theirs(model))


def fuse(folder):
    """The same experts as one tensor a layer, the way newer files hold them."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.mlp.experts"
        if f"{prefix}.gate_up_proj" in tensors:
            kept |= {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            continue
        gate, up, down = (
            torch.stack([tensors[f"{prefix}.{i}.{part}_proj.weight"] for i in range(8)])
            for part in ("gate", "up", "down")
        )
        kept |= {
            f"{prefix}.gate_up_proj": torch.cat([gate, up], 1).contiguous(),
            f"{prefix}.down_proj": down.contiguous(),
        }
    save_file(kept, folder / "model.safetensors")


@pytest.mark.parametrize("case", ["qwen2", "qwen3"])
def test_experts_in_one_tensor_load_alike(case, tmp_path):
    model = save(case, tmp_path)
    fuse(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.has("model.layers.0.mlp.experts.gate_up_proj") and not checkpoint.has(
        "model.layers.0.mlp.experts.0.gate_proj.weight"
    )
    assert close(ours(checkpoint), theirs(model))


def test_an_expert_too_few_or_too_many_is_an_error(tmp_path):
    save("qwen3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for count in (7, 9):
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts": count}))
        with pytest.raises(CheckpointError, match="gate"):
            ours(Checkpoint(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config))
    fuse(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 16}))
    with pytest.raises(CheckpointError, match="implies"):
        ours(Checkpoint(tmp_path))


@pytest.mark.parametrize("scheme", ["fp32", "int4", "w8a8", "vptq"])
def test_presets_generate_with_every_kind_of_expert(scheme, monkeypatch):
    from flyweight.models import presets

    tiny = presets.PRESETS["qwen2-57b-a14b"] | dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
        mlp_only_layers=[1],
    )
    monkeypatch.setitem(presets.PRESETS, "tiny-moe", tiny)
    llm = LLM(
        f"preset:tiny-moe:{scheme}",
        device="cpu",
        dtype="float32",
        max_model_len=64,
        max_num_seqs=3,
        exact=True,
    )
    prompts = [[1, 2, 3, 4, 5], [9, 8], [7]]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    together = [output.completions[0].token_ids for output in llm.generate(prompts, params)]
    alone = [llm.generate([prompt], params)[0].completions[0].token_ids for prompt in prompts]
    assert together == alone
    whole = llm.decoder.forward_whole(torch.tensor([prompts[0] + together[0]]))[0].argmax(-1)
    assert whole[4:-1].tolist() == together[0]


@pytest.mark.parametrize(
    ("preset", "parameters"), [("qwen2-57b-a14b", 57.41e9), ("qwen3-30b-a3b", 30.53e9)]
)
def test_the_presets_have_the_size_of_the_models(preset, parameters):
    shapes = tensor_shapes(ModelConfig.from_dict(preset_config(preset)))
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == pytest.approx(
        parameters, rel=1e-3
    )


def test_a_layer_without_experts_has_the_groups_of_a_dense_one():
    config = ModelConfig.from_dict(preset_config("qwen2-57b-a14b") | {"mlp_only_layers": [1]})
    assert [group.name for group in plan_of(config).layers[1].groups] == [
        "qkv",
        "o",
        "gate_up",
        "down",
    ]
    names = [group.name for group in plan_of(config).layers[0].groups]
    assert (
        names[2:4] == ["shared_expert.gate_up", "experts.0.gate_up"]
        and names[-1] == "experts.63.down"
    )


def test_the_summary_tells_experts_and_routers_apart(tmp_path):
    save("qwen2", tmp_path)
    groups = {group.module: group for group in summarize(Checkpoint(tmp_path)).groups}
    assert {
        "mlp.experts.*.gate_proj",
        "mlp.shared_expert.down_proj",
        "routers",
        "mlp.gate_proj",
    } <= set(groups)
    assert groups["mlp.experts.*.gate_proj"].count == 16 and groups["routers"].count == 4


def test_random_experts_differ_from_each_other():
    weights = PresetWeights("qwen3-30b-a3b", "bf16")
    one, two = (
        weights.linear(f"model.layers.0.mlp.experts.{i}.down_proj").dequantize() for i in (0, 1)
    )
    assert one.shape == (2048, 768) and not torch.equal(one, two)
