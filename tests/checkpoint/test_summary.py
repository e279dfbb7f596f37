import json
import math

import pytest
import torch

from flyweight.checkpoint import Checkpoint, CheckpointWriter, formats
from flyweight.checkpoint.summary import describe, summarize
from flyweight.kernels.dispatch import prepare
from flyweight.tensors import Float8, Int8Channel, IntGroup, Plain, Sparse24, VectorQuant


def write_model(folder, layers, *, form=None):
    """A folder with an embedding, a norm per layer and the given weights; `layers` is a list of
    {module: QuantTensor}."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": len(layers),
        "hidden_size": 64,
        "vocab_size": 100,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "dtype": "bfloat16",
    }
    weights = {
        f"model.layers.{i}.{module}": tensor
        for i, layer in enumerate(layers)
        for module, tensor in layer.items()
    }
    with CheckpointWriter(folder) as writer:
        writer.add("model.embed_tokens.weight", torch.zeros(100, 64, dtype=torch.bfloat16))
        for i in range(len(layers)):
            writer.add(
                f"model.layers.{i}.input_layernorm.weight", torch.ones(64, dtype=torch.bfloat16)
            )
        for prefix, tensor in weights.items():
            for name, part in (
                form.write(prefix, tensor) if form else {f"{prefix}.weight": tensor.weight}
            ).items():
                writer.add(name, part)
        if form:
            config["quantization_config"] = form.config(weights)
        writer.finish(config)
    return Checkpoint(folder)


def test_like_layers_are_one_group_and_every_parameter_is_counted(tmp_path):
    layer = {"self_attn.q_proj": Plain.random((64, 64)), "mlp.down_proj": Plain.random((64, 128))}
    checkpoint = write_model(tmp_path / "out", [layer] * 3)
    summary = summarize(checkpoint)
    groups = {group.module: group for group in summary.groups}
    assert set(groups) == {"embedding", "norms, biases", "self_attn.q_proj", "mlp.down_proj"}
    assert groups["mlp.down_proj"].layers == (0, 1, 2) and groups["mlp.down_proj"].shape == (
        64,
        128,
    )
    assert summary.parameters == sum(
        math.prod(checkpoint.shape(name)) for name in checkpoint.names()
    )
    assert sum(group.nbytes for group in summary.groups) == checkpoint.nbytes == summary.memory
    assert summary.bits_by_scheme() == {"bfloat16": 16.0}
    assert (
        summary.tied_embeddings
        and summary.architecture == "LlamaForCausalLM"
        and summary.context_length == 512
    )


def test_mixed_bits_are_shown_layer_by_layer(tmp_path):
    four, eight = (
        IntGroup.random((64, 128), bits=bits, group_size=64, symmetric=True) for bits in (4, 8)
    )
    layers = [{"mlp.down_proj": tensor} for tensor in (eight, four, four, eight)]
    summary = summarize(
        write_model(tmp_path / "out", layers, form=formats.named("compressed-tensors"))
    )
    found = {
        group.scheme: (group.layers, group.bits_per_weight)
        for group in summary.groups
        if group.module == "mlp.down_proj"
    }
    assert found == {
        "int4 group 64": ((1, 2), four.bits_per_weight),
        "int8 group 64": ((0, 3), eight.bits_per_weight),
    }
    assert summary.quantization == "compressed-tensors"


def test_one_layer_of_each_kind_is_read(tmp_path):
    checkpoint = write_model(tmp_path / "out", [{"mlp.down_proj": Plain.random((64, 128))}] * 4)
    summarize(checkpoint)
    assert len(checkpoint.names()) - len(checkpoint.unused()) == 1


def test_the_kernel_and_its_memory_come_from_dispatch(tmp_path):
    checkpoint = write_model(tmp_path / "out", [{"mlp.down_proj": Plain.random((64, 128))}] * 2)
    summary = summarize(
        checkpoint, lambda tensor: prepare(tensor, dtype=torch.float32, exact=True), itemsize=4
    )
    group = next(group for group in summary.groups if group.module == "mlp.down_proj")
    assert group.kernel and group.why and group.memory == 2 * 64 * 128 * 4
    assert summary.memory == 4 * summary.parameters
    assert json.loads(json.dumps(summary.to_dict()))["groups"][-1]["bits_per_weight"] == 16.0


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (Plain.random((8, 16)), "bfloat16"),
        (IntGroup.random((8, 64), group_size=32), "int4 group 32, zeros"),
        (IntGroup.random((8, 64), group_size=-1, symmetric=True, bits=3), "int3 channel"),
        (
            IntGroup.random((8, 64), group_size=32, act_order=True),
            "int4 group 32, zeros, act-order",
        ),
        (Int8Channel.random((8, 16)), "w8a8 dynamic"),
        (Float8.random((8, 16)), "fp8 channel, activations token"),
        (Sparse24.random((8, 16)), "2:4 w8a8 dynamic"),
        (VectorQuant.random((16, 16), main=16, residual=4), "vptq v8 k16+4"),
    ],
)
def test_every_scheme_has_a_name(tensor, words):
    assert describe(tensor) == words
