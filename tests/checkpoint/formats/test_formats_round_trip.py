"""Whatever a format can hold comes back bit for bit, ragged shapes included."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from in_memory import read, same, written

from flyweight.checkpoint import formats
from flyweight.checkpoint.formats.base import dense_of
from flyweight.errors import UnsupportedError
from flyweight.tensors import Float8, Int8Channel, IntGroup, Sparse24, Trellis, VectorQuant

SEEDS = st.integers(0, 10_000)


def halves(tensor):
    return dataclasses.replace(tensor, scales=tensor.scales.to(torch.float16))


@given(
    bits=st.sampled_from([4, 8]),
    rows=st.integers(1, 5),
    words=st.integers(1, 9),
    group=st.sampled_from([8, 32, -1]),
    symmetric=st.booleans(),
    act_order=st.booleans(),
    version2=st.booleans(),
    seed=SEEDS,
)
@settings(max_examples=60)
def test_gptq(bits, rows, words, group, symmetric, act_order, version2, seed):
    group = -1 if group > 8 * words else group  # a group longer than a row is the row
    tensor = halves(
        IntGroup.random(
            (8 * rows, 8 * words),
            seed,
            bits=bits,
            group_size=group,
            symmetric=symmetric,
            act_order=act_order,
        )
    )
    again = read(written("gptq_v2" if version2 else "gptq", tensor))
    if act_order and torch.equal(
        tensor.group_of_column(), dataclasses.replace(tensor, g_idx=None).group_of_column()
    ):
        tensor = dataclasses.replace(tensor, g_idx=None)  # an order that is no order
    same(tensor, again)


@given(
    bits=st.sampled_from([2, 3]),
    rows=st.integers(1, 40),
    blocks=st.integers(1, 5),
    groups=st.booleans(),
    seed=SEEDS,
)
@settings(max_examples=30)
def test_trellis(bits, rows, blocks, groups, seed):
    tensor = Trellis.random((rows, 64 * blocks), seed, bits=bits, groups=groups)
    same(tensor, read(written("trellis", tensor)))


@given(
    rows=st.integers(1, 6),
    groups=st.integers(1, 4),
    group=st.sampled_from([4, 32]),
    symmetric=st.booleans(),
    seed=SEEDS,
)
@settings(max_examples=40)
def test_awq(rows, groups, group, symmetric, seed):
    tensor = halves(
        IntGroup.random((8 * rows, groups * group), seed, group_size=group, symmetric=symmetric)
    )
    if tensor.zeros is not None and bool((tensor.zeros == 8).all()):
        tensor = dataclasses.replace(tensor, zeros=None)
    same(tensor, read(written("awq", tensor)))


@given(
    bits=st.integers(2, 8),
    rows=st.integers(1, 70),
    groups=st.integers(1, 3),
    group=st.sampled_from([5, 32, -1]),
    symmetric=st.booleans(),
    seed=SEEDS,
)
@settings(max_examples=80)
def test_pack_quantized_of_any_width_and_ragged_shape(bits, rows, groups, group, symmetric, seed):
    columns = 11 * groups if group == -1 else group * groups
    tensor = IntGroup.random(
        (rows, columns), seed, bits=bits, group_size=group, symmetric=symmetric
    )
    again = read(written("compressed-tensors", tensor))
    same(tensor, dense_of(again))


@pytest.mark.parametrize("static", [None, "symmetric", "asymmetric"])
def test_int_quantized(static):
    tensor = Int8Channel.random((7, 12))
    if static:
        zero = torch.tensor([-3], dtype=torch.int8) if static == "asymmetric" else None
        tensor = dataclasses.replace(tensor, input_scale=torch.tensor([0.02]), input_zero=zero)
    same(tensor, read(written("compressed-tensors", tensor)))


def float8(scales, activation, block=None, rows=130, columns=256):
    made = Float8.random((rows, columns), activation=activation)
    shape = {"tensor": (1, 1), "channel": (rows, 1), "block": (-(-rows // 128), columns // 128)}[
        scales
    ]
    return dataclasses.replace(
        made,
        scales=torch.rand(shape) + 0.5,
        block=block,
        input_scale=torch.tensor([0.5]) if activation == "static" else None,
    )


@pytest.mark.parametrize("scales", ["tensor", "channel", "block"])
@pytest.mark.parametrize("activation", ["none", "token", "static", "group"])
def test_float_quantized(scales, activation):
    tensor = float8(scales, activation, 128 if scales == "block" else None)
    same(tensor, read(written("compressed-tensors", tensor)))


@pytest.mark.parametrize(
    ("scales", "activation"), [("tensor", "token"), ("tensor", "static"), ("block", "group")]
)
def test_fp8_family(scales, activation):
    tensor = float8(scales, activation, 128 if scales == "block" else None)
    same(tensor, read(written("fp8", tensor)))


@given(
    rows=st.integers(1, 20),
    columns=st.integers(2, 40),
    length=st.integers(1, 8),
    outliers=st.integers(0, 3),
    main=st.sampled_from([4, 64]),
    residual=st.sampled_from([None, 2, 4]),
    permute=st.booleans(),
    normalize=st.booleans(),
    seed=SEEDS,
)
@settings(max_examples=60)
def test_vptq(rows, columns, length, outliers, main, residual, permute, normalize, seed):
    outliers = min(outliers, columns - 1)
    groups = 2 if (columns - outliers) % 2 == 0 else 1
    tensor = VectorQuant.random(
        (rows, columns),
        seed,
        length=length,
        main=main,
        residual=residual,
        groups=groups,
        outliers=outliers,
        outlier_length=3,
        outlier_centroids=5,
        permute=permute,
        normalize=normalize,
    )
    same(tensor, read(written("vptq", tensor)))


def test_vptq_permutations_above_32767_survive_their_16_bits():
    tensor = VectorQuant.random((2, 40_000), length=2, main=4, residual=None, permute=True)
    checkpoint = written("vptq", tensor)
    assert checkpoint.tensors["model.layers.0.mlp.down_proj.perm"].dtype == torch.int16
    same(tensor, read(checkpoint))


@pytest.mark.parametrize("inner", [IntGroup, Int8Channel])
def test_sparse_weights_are_written_dense_and_found_again(inner):
    options = dict(group_size=32, symmetric=True) if inner is IntGroup else {}
    tensor = Sparse24.random((16, 64), inner=inner, **options)
    checkpoint = written("compressed-tensors", tensor)
    assert checkpoint.config["quantization_config"]["sparsity_config"] == {}
    again = read(checkpoint)
    assert isinstance(again, Sparse24) and torch.equal(again.dequantize(), tensor.dequantize())


KINDS = {
    "int4": IntGroup.random((16, 64), group_size=32, symmetric=True),
    "int4 asymmetric": IntGroup.random((16, 64), group_size=32),
    "int4 act-order": IntGroup.random((16, 64), group_size=32, symmetric=True, act_order=True),
    "int4 act-order asymmetric": IntGroup.random((16, 64), group_size=32, act_order=True),
    "int3": IntGroup.random((16, 64), bits=3, group_size=32),
    "w8a8": Int8Channel.random((16, 64)),
    "fp8": Float8.random((16, 64)),
    "fp8 block": float8("block", "group", 128),
    "sparse": Sparse24.random((16, 64)),
    "vptq": VectorQuant.random((16, 64), main=16, residual=None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_format_holds_its_kind(kind):
    tensor = KINDS[kind]
    again = read(written(formats.default_for(tensor), tensor))
    assert torch.equal(again.dequantize(), tensor.dequantize())


def test_default_formats_are_those_of_the_table():
    chosen = {kind: formats.default_for(tensor) for kind, tensor in KINDS.items()}
    assert chosen == {
        "int4": "compressed-tensors",
        "int4 asymmetric": "compressed-tensors",
        "int4 act-order": "gptq",
        "int4 act-order asymmetric": "gptq_v2",
        "int3": "compressed-tensors",
        "w8a8": "compressed-tensors",
        "fp8": "compressed-tensors",
        "fp8 block": "fp8",
        "sparse": "compressed-tensors",
        "vptq": "vptq",
    }
    assert formats.default_of([KINDS["int4"], KINDS["w8a8"]]) == "compressed-tensors"
    assert (
        formats.default_of([KINDS["int4 act-order"], KINDS["int4 act-order asymmetric"]])
        == "gptq_v2"
    )


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("gptq", "w8a8", "quantized again"),
        ("gptq", "int3", "4 and 8 bits"),
        ("awq", "int4 act-order", "g_idx"),
        ("awq", "int3", "4 bits only"),
        ("compressed-tensors", "int4 act-order", "use gptq"),
        ("compressed-tensors", "vptq", "no place"),
        ("fp8", "fp8", "one scale per"),
        ("fp8", "int4", "quantized again"),
        ("vptq", "int4", "quantized again"),
    ],
)
def test_a_format_refuses_what_it_cannot_hold_and_says_why(name, kind, says):
    with pytest.raises(UnsupportedError, match=says):
        formats.named(name).write("layer", KINDS[kind])


def test_gptq_v1_refuses_a_zero_point_that_would_overflow():
    tensor = dataclasses.replace(
        halves(KINDS["int4 asymmetric"]), zeros=torch.zeros(16, 2, dtype=torch.uint8)
    )
    with pytest.raises(UnsupportedError, match="gptq_v2"):
        formats.named("gptq").write("layer", tensor)
    same(tensor, read(written("gptq_v2", tensor)))


def test_scales_that_float16_would_round_are_refused():
    tensor = dataclasses.replace(
        KINDS["int4"], scales=torch.full((16, 2), 1.234e-6, dtype=torch.bfloat16)
    )
    with pytest.raises(UnsupportedError, match="rounded to float16"):
        formats.named("gptq").write("layer", tensor)
