"""Every kind of QuantTensor as weights of the decoder: the same logits as the plain model of its
dequantized weights."""

import dataclasses

import pytest
import torch
from model_helpers import (
    assert_same_logits,
    load,
    run_paged,
    tokens_of,
    transformers_model,
)
from tiny_configs import LINEARS

from flyweight.models.config import ModelConfig
from flyweight.models.layers import Linear
from flyweight.models.standard import plan_of
from flyweight.tensors import Float8, Int8Channel, IntGroup, Plain, Sparse24, VectorQuant


def int4(shape, seed, **options):
    return IntGroup.random(shape, seed, group_size=16, dtype=torch.float32, **options)


def vector(shape, seed, **options):
    return VectorQuant.random(shape, seed, main=32, residual=8, dtype=torch.float32, **options)


KINDS = {
    "plain bf16": lambda shape, seed: Plain.random(shape, seed),
    "int4": int4,
    "int4 symmetric": lambda shape, seed: int4(shape, seed, symmetric=True),
    "int3": lambda shape, seed: int4(shape, seed, bits=3),
    "int8": lambda shape, seed: int4(shape, seed, bits=8),
    "int4 act-order": lambda shape, seed: int4(
        shape, seed, act_order=True
    ),  # each projection its own order
    "w8a8": Int8Channel.random,
    "fp8": Float8.random,
    "fp8 weight only": lambda shape, seed: Float8.random(shape, seed, activation="none"),
    "sparse w8a8": Sparse24.random,
    "sparse int4": lambda shape, seed: Sparse24.random(shape, seed, inner=IntGroup, group_size=16),
    "vptq": vector,
    "vptq whole": lambda shape, seed: vector(shape, seed, groups=2, outliers=8, permute=True),
}
QUANTIZES_INPUTS = {"w8a8", "fp8", "sparse w8a8"}


def quantized(model, kind_of):
    """A QuantTensor for every linear, and the plain model of what they dequantize to."""
    linears = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            index, linear = name.removeprefix("model.layers.").split(".", 1)
            kind = kind_of(int(index), linear)
            linears[name] = KINDS[kind](tuple(module.weight.shape), len(linears))
            with torch.no_grad():
                module.weight.copy_(linears[name].dequantize())
    return linears


@pytest.mark.parametrize("kind", sorted(set(KINDS) - QUANTIZES_INPUTS))
def test_a_quantized_model_equals_its_dequantized_one(kind):
    model = transformers_model("qwen2")
    linears, tokens = quantized(model, lambda index, linear: kind), tokens_of(12)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    assert_same_logits(run_paged(load(model, linears, exact=True), [tokens], 5)[0], expected)
    served = run_paged(load(model, linears), [tokens], 5)[0]  # weights in 16 bits, or inputs in 8
    assert (served - expected).norm() / expected.norm() < (5e-2 if kind.startswith("int") else 1e-2)


@pytest.mark.parametrize("kind", sorted(QUANTIZES_INPUTS))
def test_quantized_activations_follow_the_reference_of_each_linear(kind):
    model = transformers_model("llama")
    linears = quantized(model, lambda index, linear: kind)
    for name, tensor in linears.items():
        model.get_submodule(name).forward = lambda x, tensor=tensor: tensor.matmul_reference(
            x
        ).float()
    tokens = tokens_of(12)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    # Rounding of activations is a step: an input that differs in its last bit may land on the next
    # code.
    assert_same_logits(
        run_paged(load(model, linears, exact=True), [tokens], 5)[0], expected, tolerance=5e-3
    )


MIXED = {
    "self_attn.q_proj": "int4",
    "self_attn.k_proj": "int8",
    "self_attn.v_proj": "vptq",
    "self_attn.o_proj": "int4 act-order",
    "mlp.gate_proj": "plain bf16",
    "mlp.up_proj": "fp8 weight only",
    "mlp.down_proj": "sparse int4",
}


def test_projections_of_one_merge_may_all_differ():
    model = transformers_model("qwen2")
    decoder = load(
        model,
        quantized(model, lambda index, linear: MIXED[linear] if index else "int4"),
        exact=True,
    )
    tokens = tokens_of(12)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    assert_same_logits(run_paged(decoder, [tokens], 5)[0], expected)
    assert [
        [len(linear.segments) for linear in block.linears.values()] for block in decoder.blocks[:2]
    ] == [[1, 1, 1, 1], [3, 1, 2, 1]]


def test_siblings_that_agree_are_one_call_and_the_rest_stay_apart():
    act_order = int4((24, 48), 0, act_order=True)
    cases = [
        ([int4((24, 48), 0), int4((8, 48), 1), int4((8, 48), 2)], 1),
        ([int4((24, 48), 0), int4((8, 48), 1, bits=8), int4((8, 48), 2)], 3),  # mixed bits
        ([act_order, int4((8, 48), 1, act_order=True)], 2),  # differing g_idx
        ([act_order, dataclasses.replace(int4((8, 48), 1), g_idx=act_order.g_idx)], 1),
        ([vector((24, 48), 0), vector((8, 48), 1), vector((8, 48), 2)], 3),
        ([Plain.random((24, 48)), vector((8, 48), 1), Plain.random((8, 48))], 3),
    ]
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    for tensors, segments in cases:
        bias = torch.randn(sum(tensor.shape[0] for tensor in tensors))
        linear = Linear(tensors, bias, dtype=torch.float32, exact=True)
        assert len(linear.segments) == segments and linear.sizes == tuple(
            tensor.shape[0] for tensor in tensors
        )
        expected = torch.cat([tensor.matmul_reference(x) for tensor in tensors], -1) + bias
        torch.testing.assert_close(linear(x), expected.float(), rtol=1e-5, atol=1e-5)


def test_every_linear_belongs_to_one_group():
    layer = plan_of(ModelConfig.from_dict(transformers_model("llama").config.to_dict())).layers[0]
    names = [name for group in layer.groups for name in group.linears]
    assert len(set(names)) == len(names) and set(names) == set(LINEARS)
