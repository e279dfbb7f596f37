"""LoRA adapters give what the same adapters merged into the weights give, alone and side by
side."""

import json

import pytest
import torch
from adapter_files import linear_shapes, merged, write_adapter
from model_helpers import DictWeights, assert_same_logits, tokens_of, transformers_model
from safetensors.torch import load_file, save_file
from tiny_configs import LINEARS

from flyweight.batch import NOBODY, Batch, KVStorage
from flyweight.errors import CheckpointError, FlyweightError, UnsupportedError
from flyweight.models.adapters import Adapters
from flyweight.models.config import ModelConfig
from flyweight.models.decoder import Decoder
from flyweight.models.standard import plan_of
from flyweight.tensors import IntGroup, Plain


def load(weights, folders=None, *, exact=False):
    plan = plan_of(ModelConfig.from_dict(weights.config))
    adapters = Adapters.read(folders, plan) if folders else None
    return Decoder.load(weights, device="cpu", dtype=torch.float32, adapters=adapters, exact=exact)


def logits(decoder, sequences, slots=None, *, last_only=False):
    """One packed step of whole sequences, each with its own adapter."""
    config = decoder.config
    pages = [-(-len(tokens) // 4) for tokens in sequences]
    tables = torch.zeros(len(sequences), max(pages), dtype=torch.int32)
    starts, at, wanted, page = [0], [], [], 0
    for i, tokens in enumerate(sequences):
        tables[i, : pages[i]] = torch.arange(page, page + pages[i])
        at += [page * 4 + j for j in range(len(tokens))]
        page += pages[i]
        starts.append(starts[-1] + len(tokens))
        wanted += [starts[-1] - 1] if last_only else range(starts[-2], starts[-1])
    chosen = None
    if slots is not None:
        counts = torch.tensor([len(tokens) for tokens in sequences])
        chosen = torch.tensor(slots, dtype=torch.int32).repeat_interleave(counts)
    tokens = [token for sequence in sequences for token in sequence]
    batch = Batch(
        torch.tensor(tokens),
        torch.cat([torch.arange(len(t)) for t in sequences]),
        torch.tensor(at),
        tables,
        starts,
        [len(t) for t in sequences],
        torch.tensor(wanted),
        chosen,
    )
    size = (page, 4, config.kv_heads, config.head_dim)
    return decoder.forward(
        batch, [KVStorage(torch.zeros(size), torch.zeros(size)) for _ in range(config.layers)]
    )


def model_and_shapes(name, names=LINEARS):
    model = transformers_model(name)
    return model, linear_shapes(model.state_dict(), names)


def with_merged(model, deltas):
    weights = DictWeights.of(model)
    weights.tensors = merged(weights.tensors, deltas)
    return load(weights)


@pytest.mark.parametrize("name", ["llama", "llama tied, biases", "qwen3", "mistral window"])
def test_an_adapter_gives_what_merged_weights_give(name, tmp_path):
    model, shapes = model_and_shapes(name)
    deltas = write_adapter(tmp_path / "a", shapes)
    adapted = load(DictWeights.of(model), {"a": tmp_path / "a"})
    tokens = tokens_of(19)
    found = logits(adapted, [tokens], [0])
    assert_same_logits(found, logits(with_merged(model, deltas), [tokens]))
    assert (
        found - logits(adapted, [tokens], [NOBODY])
    ).abs().max() > 0.1  # the adapter does something


@pytest.mark.parametrize("last_only", [False, True], ids=["every token", "the last tokens"])
def test_several_adapters_and_none_in_one_step(tmp_path, last_only):
    model, shapes = model_and_shapes("qwen2")
    attention = {module: shape for module, shape in shapes.items() if "self_attn" in module}
    first = write_adapter(tmp_path / "a", shapes, rank=4, seed=1)
    second = write_adapter(tmp_path / "b", attention, rank=11, seed=2, lora_alpha=3)
    weights = DictWeights.of(model)
    adapted = load(weights, {"a": tmp_path / "a", "b": tmp_path / "b"})
    sequences = [tokens_of(count, seed=count) for count in (7, 12, 5, 9)]
    found = logits(adapted, sequences, [1, NOBODY, 0, 1], last_only=last_only)
    models = [
        with_merged(model, second),
        load(DictWeights.of(model)),
        with_merged(model, first),
        with_merged(model, second),
    ]
    expected = [
        logits(one, [tokens], last_only=last_only)
        for one, tokens in zip(models, sequences, strict=True)
    ]
    assert_same_logits(found, torch.cat(expected))


def test_rows_without_an_adapter_are_not_touched_by_one_that_overflows(tmp_path):
    model, shapes = model_and_shapes("llama")
    write_adapter(tmp_path / "a", shapes, lora_alpha=1e38)
    adapted = load(DictWeights.of(model), {"a": tmp_path / "a"})
    tokens = tokens_of(6)
    both = logits(adapted, [tokens, tokens], [0, NOBODY])
    assert_same_logits(both[6:], logits(adapted, [tokens]))


def test_an_adapter_over_quantized_weights(tmp_path):
    model, shapes = model_and_shapes("llama")
    deltas = write_adapter(tmp_path / "a", shapes)
    linears = {
        module: IntGroup.random(shape, 3, group_size=16, dtype=torch.float32)
        for module, shape in shapes.items()
    }
    adapted = load(DictWeights.of(model, linears), {"a": tmp_path / "a"}, exact=True)
    weights = DictWeights.of(
        model,
        {
            module: Plain((tensor.dequantize().double() + deltas[module]).float())
            for module, tensor in linears.items()
        },
    )
    tokens = tokens_of(15)
    expected = logits(load(weights, exact=True), [tokens])
    assert torch.allclose(logits(adapted, [tokens], [0]), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        dict(use_rslora=True),
        dict(lora_alpha=5),
        dict(rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 7}),
        dict(alpha_pattern={"mlp.down_proj": 1, r"layers\.1\.self_attn\.o_proj": 2}),
    ],
    ids=["rslora", "alpha", "patterns of one name", "patterns of longer names"],
)
def test_scales_as_peft_has_them(options, tmp_path):
    model, shapes = model_and_shapes("llama")
    plain = {
        **options,
        "alpha_pattern": {
            name.replace("\\", ""): value
            for name, value in options.get("alpha_pattern", {}).items()
        },
    }
    deltas = write_adapter(tmp_path / "a", shapes, **plain)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text()) | options
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config))
    tokens = tokens_of(8)
    adapted = load(DictWeights.of(model), {"a": tmp_path / "a"})
    assert_same_logits(logits(adapted, [tokens], [0]), logits(with_merged(model, deltas), [tokens]))


def test_fused_names_of_peft_fit_projections_that_are_apart_here(tmp_path):
    """One A and one B of qkv_proj and gate_up_proj, for a model whose plan has q, k and v."""
    model, shapes = model_and_shapes("llama")
    fused = {}
    for index in range(3):
        layer = f"model.layers.{index}."
        for name, parts in {
            "self_attn.qkv_proj": "qkv",
            "mlp.gate_up_proj": ("gate", "up"),
        }.items():
            parent = name.partition(".")[0]
            members = [shapes[f"{layer}{parent}.{part}_proj"] for part in parts]
            fused[layer + name] = (sum(outputs for outputs, _ in members), members[0][1])
    deltas = write_adapter(tmp_path / "a", fused)
    apart = {}
    for module, delta in deltas.items():
        parent = module.rpartition(".")[0]
        names = ("q_proj", "k_proj", "v_proj") if "qkv" in module else ("gate_proj", "up_proj")
        for name, part in zip(
            names, delta.split([shapes[f"{parent}.{name}"][0] for name in names]), strict=True
        ):
            apart[f"{parent}.{name}"] = part
    tokens = tokens_of(9)
    adapted = load(DictWeights.of(model), {"a": tmp_path / "a"})
    assert_same_logits(logits(adapted, [tokens], [0]), logits(with_merged(model, apart), [tokens]))


def test_older_names_and_16_bit_files_are_read(tmp_path):
    model, shapes = model_and_shapes("llama", ["q_proj", "v_proj"])
    deltas = write_adapter(tmp_path / "a", shapes, dtype=torch.bfloat16)
    file = tmp_path / "a" / "adapter_model.safetensors"
    save_file(
        {
            name.replace(".weight", ".default.weight"): tensor
            for name, tensor in load_file(file).items()
        },
        file,
    )
    adapted = load(DictWeights.of(model), {"a": tmp_path / "a"})
    tokens = tokens_of(9)
    assert_same_logits(logits(adapted, [tokens], [0]), logits(with_merged(model, deltas), [tokens]))


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(use_dora=True), "DoRA"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save"),
        (dict(bias="all"), "biases"),
        (dict(lora_bias=True), "biases"),
        (dict(peft_type="IA3"), "only LORA"),
        (dict(lora_alpha="much"), "must be a number"),
        (dict(lora_alpha=float("nan")), "must be a number"),
        (dict(init_lora_weights="pissa_niter_16"), "init_lora_weights"),
        (dict(fan_in_fan_out=True), "fan_in_fan_out"),
        (dict(target_parameters=["experts.down"]), "target_parameters"),
        (dict(rank_pattern=[1]), "rank_pattern"),
        (dict(alpha_pattern={"(q": 1}), "alpha_pattern"),
    ],
)
def test_what_changes_the_formula_is_refused_in_one_line(change, words, tmp_path):
    model, shapes = model_and_shapes("llama", ["q_proj"])
    write_adapter(tmp_path / "a", shapes)
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FlyweightError, match=words) as refused:
        load(DictWeights.of(model), {"a": tmp_path / "a"})
    assert "\n" not in str(refused.value) and str(path) in str(refused.value)


def refusal(model, folder):
    with pytest.raises((CheckpointError, UnsupportedError)) as refused:
        load(DictWeights.of(model), {"a": folder})
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_modules_without_a_place_and_wrong_shapes_are_named(tmp_path):
    model, shapes = model_and_shapes("llama", ["layers.0.self_attn.q_proj"])
    module, shape = next(iter(shapes.items()))
    write_adapter(tmp_path / "head", {"lm_head": (97, 48)})
    assert "lm_head has no place" in refusal(model, tmp_path / "head")
    write_adapter(tmp_path / "layer", {module.replace("layers.0", "layers.9"): shape})
    assert "layers.9.self_attn.q_proj has no place" in refusal(model, tmp_path / "layer")
    write_adapter(tmp_path / "wide", {module: (shape[0], shape[1] + 8)})
    assert "belongs to another model" in refusal(model, tmp_path / "wide")


def test_damaged_files_and_pickles_are_named(tmp_path):
    model, shapes = model_and_shapes("llama", ["q_proj"])
    folder = tmp_path / "a"
    write_adapter(folder, shapes)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    first = next(iter(tensors))

    save_file(tensors | {first: torch.full_like(tensors[first], torch.nan)}, file)
    assert "NaN" in refusal(model, folder)
    save_file({name: tensor for name, tensor in tensors.items() if name != first}, file)
    assert "has only lora_" in refusal(model, folder)
    save_file(tensors | {"base_model.model.lm_head.weight": torch.zeros(2, 2)}, file)
    assert "neither lora_A nor lora_B" in refusal(model, folder)
    save_file(tensors | {first: tensors[first][:-1].contiguous()}, file)
    assert "no rank in common" in refusal(model, folder)
    file.write_bytes(file.read_bytes()[:-9])
    assert "get it again" in refusal(model, folder)
    file.rename(folder / "adapter_model.bin")
    assert "pickle" in refusal(model, folder)
    (folder / "adapter_config.json").unlink()
    assert "adapter_config.json" in refusal(model, folder)
    assert "no such folder" in refusal(model, tmp_path / "nowhere")


def test_adapters_of_experts_are_refused(tmp_path):
    config = dict(
        model_type="qwen3_moe",
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=1,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=97,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        max_position_embeddings=64,
    )
    plan = plan_of(ModelConfig.from_dict(config))
    write_adapter(tmp_path / "a", {"model.layers.0.mlp.experts.1.up_proj": (32, 48)})
    with pytest.raises(UnsupportedError, match="experts take no adapters"):
        Adapters.read({"a": tmp_path / "a"}, plan)
    write_adapter(tmp_path / "b", {"model.layers.0.self_attn.o_proj": (48, 48)})
    assert Adapters.read({"b": tmp_path / "b"}, plan).slots == {"b": 0}
