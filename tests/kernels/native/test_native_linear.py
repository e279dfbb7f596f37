"""Every format through the native kernels against `matmul_reference` in float64.

Exact products differ from it by float32 rounding alone. Products with x in 8 bits by group
differ by that rounding: half a step of 127 steps to the group's largest value, which for normal
values of x (largest about 2.5 σ) is 0.6 % of a typical result and more of a small one.
"""

import dataclasses

import pytest
import torch

from flyweight.kernels.native import library
from flyweight.kernels.native.linear import NativeLinear
from flyweight.kernels.native.weight import describe
from flyweight.tensors import (
    Float4,
    Float8,
    Int8Channel,
    IntBlock,
    IntGroup,
    NvFloat4,
    Plain,
    QuantTensor,
    Sparse24,
    Trellis,
    VectorQuant,
)

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=f"{library.why_not()}")

KVALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FLOAT32_ERROR = 2e-6
INT8_ERROR = 0.015
FLOAT16_ERROR = 1.2e-3  # of sums of 32 in float16; rounding x to bfloat16 alone costs more


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def groups(bits: int, size: int, symmetric: bool, columns: int = 256, **options) -> QuantTensor:
    return IntGroup.random(
        (40, columns), bits=bits, group_size=size, symmetric=symmetric, **options
    )


WEIGHT_ONLY = (
    {
        f"int{bits} groups of {size}{' symmetric' if symmetric else ''}": groups(
            bits, size, symmetric
        )
        for bits in (2, 3, 4, 5, 6, 8)
        for size in (32, 64, 128, -1)
        for symmetric in (True, False)
    }
    | {
        "int4 act-order": groups(4, 64, False, act_order=True),
        "int4 act-order, last group short": groups(4, 64, False, columns=224, act_order=True),
        "int4 last group short": groups(4, 128, False, columns=576),
        "int4 whole rows, ragged": groups(4, -1, False, columns=200),
        "int8 groups of 16": groups(8, 16, True),
        "int4 float32 scales": groups(4, 64, False, dtype=torch.float32),
        "int4 groups of 8": groups(4, 8, False),
        "int3 act-order": groups(3, 64, False, act_order=True),
        "int3 last group short": groups(3, 128, False, columns=576),
        "int3 whole rows, ragged": groups(3, -1, False, columns=129),
        "int3 float32 scales": groups(3, 64, False, dtype=torch.float32),
        "int5 groups of 16": groups(5, 16, True),
    }
    | {
        f"blocks of {bits} bits, groups of {size} in {count}s"
        f"{', minima' if mins else ''}": IntBlock.random(
            (43, 512),
            bits=bits,
            group_size=size,
            groups_of_block=count,
            mins=mins,
            sub_bits=4 if bits == 2 else 6,
        )
        for bits, size, count, mins in [
            (4, 32, 1, True),
            (4, 64, 1, True),
            (5, 32, 1, False),
            (5, 32, 1, True),
            (2, 16, 16, True),
            (3, 16, 16, False),
            (4, 32, 8, True),
            (5, 32, 8, True),
            (6, 16, 16, False),
        ]
    }
    | {
        "blocks with a table": IntBlock.random((43, 512), mins=False, table=KVALUES),
        "blocks with a table in 8s": IntBlock.random(
            (43, 512), mins=False, table=KVALUES, groups_of_block=8
        ),
        "nvfp4": NvFloat4.random((43, 512)),
        "mxfp4": Float4.random((43, 96)),
    }
    | {
        f"trellis of {bits} bits{words}": Trellis.random(shape, bits=bits, groups=grouped)
        for bits in (2, 3)
        for words, shape, grouped in (
            (", a scale a row", (43, 576), False),
            (", groups", (40, 320), True),
        )
    }
)

AS_DEFINED = {  # the activations are part of the format, so the result is exact either way
    "w8a8": Int8Channel.random((40, 256)),
    "w8a8 ragged": Int8Channel.random((43, 100)),
    "w8a8 static": dataclasses.replace(
        Int8Channel.random((40, 256)), input_scale=torch.tensor([0.02])
    ),
    "w8a8 static with zero point": dataclasses.replace(
        Int8Channel.random((40, 256)),
        input_scale=torch.tensor([0.02]),
        input_zero=torch.tensor([7.0]),
    ),
    "float32": Plain.random((43, 101), dtype=torch.float32),
    "float8 by token": Float8.random((43, 101)),
    "float8 weight only": Float8.random((40, 256), activation="none"),
    "float8 by group": Float8.random((40, 256), activation="group"),
    "float8 static": dataclasses.replace(
        Float8.random((40, 256), activation="static"), input_scale=torch.tensor([0.01])
    ),
    "float8 in blocks": Float8(
        Float8.random((200, 320)).weight, torch.rand(2, 3) / 64, "none", block=128
    ),
    "2:4 w8a8": Sparse24.random((40, 256)),
    "vptq": VectorQuant.random((40, 96), main=256, residual=16),
    "vptq without residual": VectorQuant.random((43, 96), main=256, residual=None),
    "vptq in groups, permuted": VectorQuant.random(
        (40, 96), main=64, residual=300, groups=2, permute=True
    ),
    "vptq with outliers": VectorQuant.random((40, 96), main=64, residual=None, outliers=16),
    "vptq of four": VectorQuant.random((40, 96), length=4, main=64, residual=None, normalize=False),
}


HALVES = {
    "float16": Plain.random((43, 101), dtype=torch.float16),
    "bfloat16": Plain.random((43, 101), dtype=torch.bfloat16),
    "float16, wide": Plain.random((40, 1500), dtype=torch.float16),
}
ALL = WEIGHT_ONLY | AS_DEFINED | HALVES


@pytest.mark.parametrize("name", [*ALL])
def test_exact_products_differ_by_float32_rounding_alone(name: str):
    tensor = ALL[name]
    linear = NativeLinear(tensor, exact=True)
    for rows in (1, 2, 3, 4, 5, 13, 65):
        x = torch.randn(rows, tensor.matrix_shape[1])
        assert relative(linear(x), tensor.matmul_reference(x)) < FLOAT32_ERROR


@pytest.mark.parametrize("name", [*WEIGHT_ONLY])
def test_weight_only_integers_multiply_x_in_8_bits(name: str):
    tensor = WEIGHT_ONLY[name]
    linear = NativeLinear(tensor)
    for rows in (1, 4, 9, 23, 65):
        x = torch.randn(rows, tensor.matrix_shape[1])
        assert relative(linear(x), tensor.matmul_reference(x)) < INT8_ERROR


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e9])
@pytest.mark.parametrize("name", [*HALVES])
def test_weights_in_16_bits_lose_little_whatever_the_size_of_x(name: str, size: float):
    tensor = HALVES[name]
    linear = NativeLinear(tensor)
    for rows in (1, 2, 3, 4, 65):
        x = size * torch.randn(rows, tensor.matrix_shape[1])
        x[:, 5] *= 300  # one input much larger than the others, as models have them
        assert relative(linear(x), tensor.matmul_reference(x)) < FLOAT16_ERROR


@pytest.mark.parametrize("name", [*AS_DEFINED])
def test_formats_that_say_what_x_becomes_are_exact_without_being_asked(name: str):
    tensor = AS_DEFINED[name]
    x = torch.randn(7, tensor.matrix_shape[1])
    assert relative(NativeLinear(tensor)(x), tensor.matmul_reference(x)) < FLOAT32_ERROR


@pytest.mark.parametrize("rows", range(1, 66, 4))
@pytest.mark.parametrize("name", ["int4 groups of 64", "float16"])
def test_every_row_of_a_batch_is_what_it_is_alone(name: str, rows: int):
    linear = NativeLinear(ALL[name])
    if name == "float16" and not library.load().half_products():
        pytest.skip("the order of float32 sums depends on the number of rows")
    x = torch.randn(rows, linear.inputs)
    together = linear(x)
    assert torch.equal(together, torch.cat([linear(row[None]) for row in x]))


@pytest.mark.parametrize("outputs, inputs", [(1, 32), (7, 64), (9, 576), (1000, 96), (8, 1024)])
def test_outputs_need_not_fill_a_block(outputs: int, inputs: int):
    tensor = IntGroup.random((outputs, inputs), bits=4, group_size=32)
    x = torch.randn(3, inputs)
    assert relative(NativeLinear(tensor, exact=True)(x), tensor.matmul_reference(x)) < FLOAT32_ERROR


@pytest.mark.parametrize("rows", [16, 21, 45])
def test_many_rows_of_long_rows_of_weights(rows: int):
    """More columns than a panel takes at once, a last panel and a last tile that are not full."""
    tensor = Plain.random((43, 2309), dtype=torch.float16)
    x = torch.randn(rows, 2309)
    assert relative(NativeLinear(tensor, exact=True)(x), tensor.matmul_reference(x)) < FLOAT32_ERROR


def test_bias_is_added():
    tensor = groups(4, 64, False)
    bias = torch.randn(40)
    x = torch.randn(5, 256)
    assert (
        relative(NativeLinear(tensor, exact=True, bias=bias)(x), tensor.matmul_reference(x) + bias)
        < FLOAT32_ERROR
    )


@pytest.mark.parametrize("name", [*ALL])
def test_nan_and_infinity_are_passed_on_in_their_row_alone(name: str):
    """Where x has a scale of its own, given with the weight, infinity becomes the largest code: the
    reference says so.
    """
    tensor = ALL[name]
    others = [0, 1, 3, 4, 5, 6, 7, 8]
    # infinity times nothing is NaN, too, but is another matter
    touched = tensor.dequantize()[:, 17] != 0
    for exact in (False, True):
        linear = NativeLinear(tensor, exact=exact)
        for bad in (float("nan"), float("inf"), -float("inf")):
            x = torch.randn(9, tensor.matrix_shape[1])
            x[2, 17] = bad
            out = linear(x)
            lost = ~tensor.matmul_reference(x)[2].isfinite()
            assert lost.any() or (bad == bad and "static" in name)
            assert not out[2][touched & lost].isfinite().any()
            assert out[others].isfinite().all()


def test_a_row_of_zeros_gives_zeros():
    assert torch.equal(NativeLinear(groups(4, 64, False))(torch.zeros(2, 256)), torch.zeros(2, 40))


def test_no_rows_give_no_rows():
    assert NativeLinear(groups(4, 64, False))(torch.zeros(0, 256)).shape == (0, 40)


def test_small_scales_survive_in_16_bits():
    """bfloat16 scales of 1e-7 would be subnormal float16: a power of two is taken out of all of
    them.
    """
    tensor = groups(4, 64, False)
    tiny = dataclasses.replace(tensor, scales=(tensor.scales.float() * 1e-5).bfloat16())
    x = torch.randn(2, 256)
    linear = NativeLinear(tiny, exact=True)
    assert not linear.weight.matrix.wide_scales
    assert relative(linear(x), tiny.matmul_reference(x)) < FLOAT32_ERROR


@pytest.mark.parametrize(
    "name, most",
    [
        ("int4 groups of 64 symmetric", 1.01),
        ("int8 groups of 128", 1.02),
        ("float8 weight only", 1.01),
        ("bfloat16", 1.2),
        ("trellis of 2 bits, a scale a row", 1.02),  # whose scales become float32
    ],
)
def test_weights_keep_about_the_bytes_of_their_file(name: str, most: float):
    tensor = ALL[name]
    assert NativeLinear(tensor).nbytes <= most * tensor.nbytes


def test_what_a_weight_became_is_said():
    assert describe(NativeLinear(groups(4, 64, True)).weight)["activation"] == "int8 by group"
    assert "no native layout" in NativeLinear(groups(4, 8, False)).why


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
@pytest.mark.parametrize("symmetric", [True, False])
def test_odd_numbers_of_bits_stay_what_they_are(bits, symmetric):
    """A scale and a zero point in 8 bits for every 64 inputs, and the codes."""
    tensor = IntGroup.random(
        (64, 512), bits=bits, group_size=64, symmetric=symmetric, dtype=torch.float16
    )
    linear = NativeLinear(tensor)
    assert linear.nbytes == 64 * 512 * bits // 8 + 64 * 8 * (2 if symmetric else 3)
    assert linear.nbytes <= 1.05 * tensor.nbytes
