import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flyweight.tensors import (
    Float4,
    Float8,
    Int8Channel,
    IntGroup,
    Plain,
    QuantTensor,
    Sparse24,
    VectorQuant,
    merge,
    reorder_rows,
)
from flyweight.tensors.vector import entries as entries_of

RANDOM = {
    "plain": lambda shape: Plain.random(shape),
    "int4": lambda shape: IntGroup.random(shape, group_size=32),
    "int4 act-order": lambda shape: IntGroup.random(shape, group_size=32, act_order=True),
    "int3 symmetric": lambda shape: IntGroup.random(shape, bits=3, group_size=32, symmetric=True),
    "int8 channel": lambda shape: IntGroup.random(shape, bits=8, group_size=-1),
    "w8a8": lambda shape: Int8Channel.random(shape),
    "fp8": lambda shape: Float8.random(shape),
    "mxfp4": lambda shape: Float4.random(shape),
    "sparse w8a8": lambda shape: Sparse24.random(shape),
    "sparse int4": lambda shape: Sparse24.random(shape, inner=IntGroup, group_size=32),
    "vptq": lambda shape: VectorQuant.random(shape, main=64, residual=16),
    "vptq whole": lambda shape: VectorQuant.random(
        shape, main=64, residual=16, groups=2, outliers=8, permute=True
    ),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_random_weights_keep_a_unit_input_near_one(kind):
    tensor: QuantTensor = RANDOM[kind]((96, 128))
    weight = tensor.dequantize()
    assert tensor.shape == weight.shape == (96, 128) and weight.isfinite().all()
    out = tensor.matmul_reference(torch.randn(64, 128, generator=torch.Generator().manual_seed(1)))
    assert out.dtype == torch.float64 and 0.4 < out.std() < 2.5


@pytest.mark.parametrize("kind", [*RANDOM, "fp8 blocks"])
def test_rows_in_another_order_are_those_rows(kind):
    """Blocks of scales and vectors of a codebook follow where they move as a whole."""
    plain = Float8.random((96, 128))
    blocks = dataclasses.replace(plain, scales=torch.rand(3, 4) + 0.5, block=32, activation="none")
    tensor: QuantTensor = blocks if kind == "fp8 blocks" else RANDOM[kind]((96, 128))
    parts = torch.arange(96).view(3, 32)[[2, 0, 1]].flatten()
    for order in (parts, torch.arange(96).flip(0)):
        moved = reorder_rows(tensor, order)
        assert torch.equal(moved.dequantize(), tensor.dequantize()[order])
        assert type(moved) is type(tensor) or order is not parts or kind == "vptq whole"


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_random_weights_with_zero_points_lean_to_no_side(bits):
    weight = IntGroup.random((256, 512), bits=bits, group_size=32).dequantize()
    assert abs(weight.mean()) < 0.02 * weight.std(), (
        "a deep model of weights that do says one token whatever it is asked"
    )


@pytest.mark.parametrize("kind", RANDOM)
def test_experts_are_a_stack_of_weights(kind):
    tensor = RANDOM[kind]((3, 96, 128))
    assert tensor.experts == 3 and tensor.shape == (3, 96, 128)
    again = QuantTensor.stack([tensor[i] for i in range(3)])
    assert torch.equal(again.dequantize(), tensor.dequantize())
    x = torch.randn(3, 5, 128)
    torch.testing.assert_close(tensor.matmul_reference(x)[1], tensor[1].matmul_reference(x[1]))


@given(
    bits=st.integers(2, 8),
    rows=st.integers(1, 9),
    columns=st.integers(1, 70),
    group=st.sampled_from([16, 32, -1]),
    symmetric=st.booleans(),
    act_order=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_int_groups_mean_scale_times_code_less_zero(
    bits, rows, columns, group, symmetric, act_order, seed
):
    tensor = IntGroup.random(
        (rows, columns), seed, bits=bits, group_size=group, symmetric=symmetric, act_order=act_order
    )
    values, weight = tensor.values(), tensor.dequantize()
    for k in {0, columns // 2, columns - 1}:
        g = int(tensor.g_idx[k]) if act_order else k // (columns if group == -1 else group)
        zero = 1 << (bits - 1) if symmetric else tensor.zeros[:, g].int()
        torch.testing.assert_close(
            weight[:, k], tensor.scales[:, g].float() * (values[:, k] - zero)
        )


def test_bits_per_weight_counts_scales_zeros_codebooks_and_padding():
    assert IntGroup.random((256, 256), group_size=128).bits_per_weight == 4 + 16 / 128 + 4 / 128
    assert (
        IntGroup.random((256, 256), group_size=128, symmetric=True).bits_per_weight == 4 + 16 / 128
    )
    assert Int8Channel.random((256, 256)).bits_per_weight == 8 + 16 / 256
    assert Sparse24.random((256, 256), dtype=torch.float16).bits_per_weight == 5 + 16 / 256
    vector = VectorQuant.random((256, 256), main=64, residual=16, normalize=False)
    assert vector.bits_per_weight == 10 / 8 + (64 + 16) * 8 * 16 / 256**2
    assert Float4.random((256, 256)).bits_per_weight == 4 + 8 / 32
    ragged = IntGroup.random((1, 33), bits=3, group_size=-1, symmetric=True)
    assert ragged.codes.nbytes == 4 * math.ceil(33 * 3 / 32)


@pytest.mark.parametrize("inner", ["w8a8", "int4", "int4 symmetric"])
def test_sparse_survives_the_dense_form_and_is_found_again(inner):
    options = {
        "w8a8": {},
        "int4": dict(inner=IntGroup, group_size=32),
        "int4 symmetric": dict(inner=IntGroup, group_size=32, symmetric=True),
    }[inner]
    sparse = Sparse24.random((48, 64), **options)
    weight = sparse.dequantize()
    assert ((weight.unflatten(1, (-1, 4)) != 0).sum(-1) <= 2).all()
    dense = sparse.to_dense()
    assert torch.equal(dense.dequantize(), weight)
    found = Sparse24.from_dense(dense)
    assert found is not None and torch.equal(found.dequantize(), weight)
    x = torch.randn(3, 64)
    assert torch.equal(found.matmul_reference(x), dense.matmul_reference(x))


def test_a_dense_weight_is_not_taken_for_sparse():
    assert Sparse24.from_dense(Int8Channel.random((8, 64))) is None
    assert Sparse24.from_dense(IntGroup.random((8, 64), group_size=32, act_order=True)) is None


def test_w8a8_reference_quantizes_activations_per_token():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1e-3], [1.0], [50.0], [0.0]]
    )
    tensor = Int8Channel.random((16, 64))
    scale = x.abs().amax(1, keepdim=True) / 127
    expected = ((x / scale.clamp(min=1e-12)).round() * scale).double() @ tensor.dequantize(
        torch.float64
    ).T
    torch.testing.assert_close(tensor.matmul_reference(x), expected, rtol=1e-5, atol=1e-7)
    assert (tensor.matmul_reference(x)[3] == 0).all()


def test_fp8_blocks_scale_their_own_tile():
    weight = torch.ones(130, 200).to(torch.float8_e4m3fn)
    scales = torch.arange(1.0, 5.0).view(2, 2)
    dense = Float8(weight, scales, "none", block=128).dequantize()
    assert dense[0, 0] == 1 and dense[0, 128] == 2 and dense[128, 0] == 3 and dense[129, 199] == 4


def test_vptq_places_outliers_groups_and_permutation():
    tensor = VectorQuant.random(
        (20, 48), main=16, residual=None, groups=2, outliers=8, permute=True, normalize=False
    )
    weight = tensor.dequantize()
    main, _ = tensor.split_indices()
    stored = 8 + 20 + 3  # fourth column of the second group
    expected = torch.cat([tensor.codebook[1, main[1, row, 3]] for row in range(3)])[:20].float()
    assert torch.equal(weight[:, tensor.perm[stored]], expected)
    outlier = torch.cat(
        [tensor.outlier_codebook[tensor.outlier_indices[row, 5]] for row in range(5)]
    ).float()
    assert torch.equal(weight[:, tensor.perm[5]], outlier)


def rows_of(segments):
    return torch.cat([segment.dequantize() for segment in segments])


@pytest.mark.parametrize(
    "kind", ["plain", "int4", "int3 symmetric", "w8a8", "fp8", "sparse w8a8", "sparse int4"]
)
def test_alike_projections_merge_into_one_weight(kind):
    parts = [RANDOM[kind]((64, 128)), RANDOM[kind]((32, 128)), RANDOM[kind]((32, 128))]
    merged = merge(parts)
    assert len(merged) == 1 and torch.equal(merged[0].dequantize(), rows_of(parts))


def test_static_float8_projections_merge_where_they_share_the_scale_of_their_input():
    first, second, other = (
        Float8.random((64, 128), seed, activation="static") for seed in range(3)
    )
    first, second = (
        dataclasses.replace(t, input_scale=torch.tensor([0.5])) for t in (first, second)
    )
    other = dataclasses.replace(other, input_scale=torch.tensor([0.25]))
    merged = merge([first, second, other])
    assert [segment.matrix_shape[0] for segment in merged] == [128, 64]
    x = torch.randn(3, 128)
    expected = torch.cat([t.matmul_reference(x) for t in (first, second)], -1)
    assert torch.equal(merged[0].matmul_reference(x), expected)


def test_a_dense_weight_that_is_two_of_four_is_found():
    sparse = Sparse24.random((24, 64), inner=IntGroup, group_size=32)
    dense = sparse.to_dense()
    found = Sparse24.find(dense)
    assert isinstance(found, Sparse24) and torch.equal(found.dequantize(), sparse.dequantize())
    values = dense.values()
    values[20, :4] = 15  # beyond the rows that are looked at first
    changed = IntGroup.from_values(values, dense.scales, dense.zeros, bits=4, group_size=32)
    assert Sparse24.find(changed) is changed
    plain = Plain.random((8, 64))
    assert Sparse24.find(plain) is plain


def test_unlike_projections_stay_segments_in_order():
    def four(seed, **options):
        return IntGroup.random((32, 128), seed, group_size=32, **options)

    ordered = four(1, act_order=True)
    same = IntGroup(ordered.codes, ordered.scales, ordered.zeros, 4, 32, 128, ordered.g_idx)
    cases = [
        ([four(0), IntGroup.random((32, 128), bits=8, group_size=32), four(1)], 3),  # mixed bits
        ([ordered, four(2, act_order=True)], 2),  # differing g_idx
        ([ordered, same], 1),
        ([four(0), four(1), Plain.random((32, 128))], 2),
        ([four(0), four(1, symmetric=True)], 2),
        ([VectorQuant.random((32, 128), main=16), VectorQuant.random((32, 128), main=16)], 2),
    ]
    for parts, count in cases:
        merged = merge(parts)
        assert len(merged) == count and torch.equal(rows_of(merged), rows_of(parts))
    wide, narrow = Float8.random((32, 64)), Float8.random((32, 64))
    narrow = Float8(narrow.weight, narrow.scales[:1], "token")  # one scale for the whole tensor
    assert torch.equal(merge([wide, narrow])[0].dequantize(), rows_of([wide, narrow]))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (3, 128), (4, -1), (8, 64)])
def test_whole_groups_mean_the_same_as_columns_one_by_one(bits, group_size, symmetric):
    tensor = IntGroup.random((24, 256), 1, bits=bits, group_size=group_size, symmetric=symmetric)
    by_column = tensor.integers().float() * tensor.scales.float()[:, tensor.group_of_column()]
    assert torch.equal(tensor.dequantize(), by_column)


def test_random_symmetric_weights_have_no_common_offset():
    """Half a code of it, times thousands of inputs, and a deep model says one token whatever it is
    asked."""
    codes = IntGroup.random((64, 512), bits=4, symmetric=True).values()
    assert codes.min() == 1 and codes.max() == 15
    assert abs(float(codes.double().mean()) - 8) < 0.1


@pytest.mark.parametrize("entries", [1, 2, 5, 16, 17])
def test_a_book_of_few_entries_gets_the_gradient_that_indexing_gives(entries):
    generator = torch.Generator().manual_seed(entries)
    book = torch.randn(2, entries, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    index = torch.randint(0, entries, (2, 7, 9), generator=generator)
    pull = torch.randn(2, 7, 9, 4, generator=generator, dtype=torch.float64)
    vectors = entries_of(book, index)
    indexed = book[torch.arange(2)[:, None, None], index]
    assert vectors.shape == indexed.shape and torch.equal(vectors, indexed)
    found, wanted = (torch.autograd.grad((v * pull).sum(), book)[0] for v in (vectors, indexed))
    torch.testing.assert_close(found, wanted)
