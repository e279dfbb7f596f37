"""Every layout by hand: words written in hexadecimal, weights worked out on paper."""

import pytest
import torch
from in_memory import MemoryCheckpoint, read, words

from flyweight.checkpoint.formats import CheckpointNotice
from flyweight.errors import UnsupportedError
from flyweight.tensors import (
    FLOAT8,
    Float8,
    Int8Channel,
    IntBlock,
    IntGroup,
    NvFloat4,
    Plain,
    Sparse24,
    VectorQuant,
)

P = "layer"


def checkpoint(config, **tensors):
    return MemoryCheckpoint(
        {f"{P}.{name.replace('__', '.')}": tensor for name, tensor in tensors.items()},
        {"quantization_config": config},
    )


def weight(config, **tensors):
    tensor = read(checkpoint(config, **tensors), P)
    return tensor, tensor.dequantize()


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True, "desc_act": False}


def gptq_parts(zeros, **more):
    """8 inputs, 8 outputs: output 0 has the codes 0…7, the others 9."""
    return {
        "qweight": torch.cat([words(0x76543210), words(0x99999999).repeat(7)])[None],
        "qzeros": words(zeros)[None],
        "scales": torch.full((1, 8), 0.5, dtype=torch.float16),
        "g_idx": torch.zeros(8, dtype=torch.int32),
    } | more


def test_gptq_v1_counts_along_inputs_and_stores_the_zero_point_less_one():
    tensor, found = weight(GPTQ, **gptq_parts(0x77777777))
    assert isinstance(tensor, IntGroup) and tensor.zeros is None and tensor.g_idx is None
    assert found[0].tolist() == [(q - 8) * 0.5 for q in range(8)]
    assert (found[1:] == 0.5).all()


def test_gptq_v2_stores_the_zero_point_itself():
    _, found = weight(GPTQ | {"checkpoint_format": "gptq_v2"}, **gptq_parts(0x88888888))
    assert found[0].tolist() == [(q - 8) * 0.5 for q in range(8)]


def test_gptq_asymmetric_zero_points_lie_along_outputs_and_wrap():
    # stored 0, 1, …, 6, 15 → 1, 2, …, 7, 0
    tensor, found = weight(GPTQ | {"sym": False}, **gptq_parts(0xF6543210))
    assert tensor.zeros[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    assert found[7].tolist() == [4.5] * 8 and found[0].tolist() == [(q - 1) * 0.5 for q in range(8)]


def test_gptq_act_order_takes_each_column_from_its_group():
    parts = gptq_parts(
        0x77777777,
        g_idx=torch.tensor([1, 0, 1, 0, 1, 0, 1, 0], dtype=torch.int32),
        scales=torch.tensor([[1.0], [2.0]], dtype=torch.float16).expand(2, 8).contiguous(),
        qzeros=words(0x77777777, 0x77777777)[:, None],
    )
    tensor, found = weight(GPTQ | {"group_size": 4, "desc_act": True}, **parts)
    assert tensor.g_idx.tolist() == [1, 0] * 4
    assert found[0].tolist() == [(q - 8) * (2.0, 1.0)[q % 2] for q in range(8)]


def test_gptq_three_bits_straddle_words():
    # 32 values i % 8: the stream 000 001 010 … from the lowest bit, in three words
    stream = sum((i % 8) << (3 * i) for i in range(32))
    qweight = (
        words(*(stream >> 32 * i & 0xFFFFFFFF for i in range(3)))[:, None]
        .expand(3, 32)
        .contiguous()
    )
    zeros = sum(3 << (3 * i) for i in range(32))  # 4 less one
    _, found = weight(
        GPTQ | {"bits": 3},
        qweight=qweight,
        qzeros=words(*(zeros >> 32 * i & 0xFFFFFFFF for i in range(3)))[None],
        scales=torch.ones(1, 32, dtype=torch.float16),
    )
    assert found[5].tolist() == [i % 8 - 4 for i in range(32)]


BY_GPTQMODEL = {"meta": {"quantizer": ["gptqmodel:6.0.3"]}}


@pytest.mark.parametrize("known", [BY_GPTQMODEL, {}])
def test_gptq_three_bits_of_gptqmodel(known):
    """The words that GPTQModel 6.0.3 wrote for zero points of 4: less 4, 1 and 2 instead of 1."""
    settings = GPTQ | {"bits": 3} | known
    parts = {
        "qweight": torch.zeros(3, 32, dtype=torch.int32),
        "qzeros": words(0, 0xB6DB6DB7, 0x49249249)[None],
        "scales": torch.ones(1, 32, dtype=torch.float16),
    }
    if known:
        tensor, found = weight(settings, **parts)
    else:  # the zero points of a symmetric weight are known, whoever wrote them
        with pytest.warns(CheckpointNotice, match="1 of GPTQModel"):
            tensor, found = weight(settings, **parts)
    assert tensor.zeros is None and (found == -4).all()


def test_gptq_three_bits_of_gptqmodel_with_zero_points():
    wanted = [7 * i % 8 for i in range(32)]
    stream = sum(zero << (3 * i) for i, zero in enumerate(wanted))
    taken = (0x24924924, 0x92492492, 0x49249249)
    stored = [((stream >> 32 * i) - taken[i]) & 0xFFFFFFFF for i in range(3)]
    tensor, _ = weight(
        GPTQ | {"bits": 3, "sym": False} | BY_GPTQMODEL,
        qweight=torch.zeros(3, 32, dtype=torch.int32),
        qzeros=words(*stored)[None],
        scales=torch.ones(1, 32, dtype=torch.float16),
    )
    assert tensor.zeros[:, 0].tolist() == wanted


def test_awq_interleaves_eight_outputs_in_a_word():
    # nibbles from the lowest: outputs 0, 2, 4, 6, 1, 3, 5, 7; codes equal to the output →
    # 0x75316420
    _, found = weight(
        {"quant_method": "awq", "bits": 4, "group_size": 1, "zero_point": True, "version": "gemm"},
        qweight=words(0x75316420)[None],
        qzeros=words(0x00000001)[None],
        scales=torch.tensor([[2.0] * 8], dtype=torch.float16),
    )
    assert found[:, 0].tolist() == [-2, 2, 4, 6, 8, 10, 12, 14]  # only output 0 has zero point 1


def ct(weights, layout, inputs=None):
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "symmetric": True} | weights,
                "input_activations": inputs,
            }
        },
    }


def test_pack_quantized_keeps_signed_codes_shifted_to_unsigned():
    config = ct({"num_bits": 4, "strategy": "group", "group_size": 4}, "pack-quantized")
    tensor, found = weight(
        config,
        weight_packed=words(0xF8765430, 0x88888888)[:, None],
        weight_scale=torch.tensor([[1.0, 10.0], [1.0, 1.0]]),
        weight_shape=torch.tensor([2, 8]),
    )
    assert isinstance(tensor, IntGroup | Sparse24)
    assert found.tolist() == [[-8, -5, -4, -3, -20, -10, 0, 70], [0] * 8]


def test_pack_quantized_packs_zero_points_along_outputs():
    config = ct({"num_bits": 4, "strategy": "channel", "symmetric": False}, "pack-quantized")
    # zero points −8 (stored 0) of output 0 and 7 (stored 15) of output 1, both in the first word of
    # column 0
    _, found = weight(
        config,
        weight_packed=words(0x76543210, 0x76543210)[:, None],
        weight_shape=torch.tensor([2, 8]),
        weight_scale=torch.ones(2, 1),
        weight_zero_point=words(0x000000F0)[:, None],
    )
    assert found.tolist() == [list(range(8)), [q - 15 for q in range(8)]]


def test_pack_quantized_before_0_17_left_the_rest_of_a_word_empty():
    config = ct({"num_bits": 3, "strategy": "channel"}, "pack-quantized") | {"version": "0.12.2"}
    # ten 3-bit values to a word: 0…7, 0, 1 and then 2, 3
    first, second = sum((i % 8) << (3 * i) for i in range(10)), 2 | 3 << 3
    _, found = weight(
        config,
        weight_packed=words(first, second)[None],
        weight_shape=torch.tensor([1, 12]),
        weight_scale=torch.ones(1, 1),
    )
    assert found[0].tolist() == [i - 4 for i in [*range(8), 0, 1, 2, 3]]


def test_int_quantized_static_input_scale_and_zero_point():
    inputs = {
        "num_bits": 8,
        "type": "int",
        "strategy": "tensor",
        "dynamic": False,
        "symmetric": False,
    }
    config = ct({"strategy": "channel"}, "int-quantized", inputs)
    tensor, found = weight(
        config,
        weight=torch.tensor([[1, -2, 3, 4]], dtype=torch.int8),
        weight_scale=torch.tensor([[0.5]]),
        input_scale=torch.tensor([0.25]),
        input_zero_point=torch.tensor([3], dtype=torch.int8),
    )
    assert (
        isinstance(tensor, Int8Channel)
        and tensor.input_scale.item() == 0.25
        and tensor.input_zero.item() == 3
    )
    assert found.tolist() == [[0.5, -1.0, 1.5, 2.0]]


def test_float_quantized_multiplies_each_block_by_its_scale():
    config = ct(
        {"type": "float", "strategy": "block", "block_structure": [2, 2]},
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True},
    )
    tensor, found = weight(
        config,
        weight=torch.full((3, 3), 2.0).to(FLOAT8),
        weight_scale=torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    )
    assert isinstance(tensor, Float8) and tensor.activation == "group"
    assert found.tolist() == [[2, 2, 4], [2, 2, 4], [6, 6, 8]]


def test_fp8_family_calls_the_factor_an_inverse():
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [2, 2]}
    _, found = weight(
        config,
        weight=torch.full((2, 3), 4.0).to(FLOAT8),
        weight_scale_inv=torch.tensor([[0.5, 2.0]]),
    )
    assert found.tolist() == [[2, 2, 8]] * 2


def test_sparse_24_bitmask_puts_kept_values_back():
    config = ct(
        {"strategy": "channel"},
        "int-quantized",
        {"num_bits": 8, "strategy": "token", "dynamic": True},
    ) | {"sparsity_config": {"format": "sparse-24-bitmask"}}
    # columns 0, 3, 5, 6 kept: bits 0b01101001
    parts = {
        "compressed": torch.tensor([[1, 2, 3, 4]], dtype=torch.int8),
        "bitmask": torch.tensor([[0b01101001]], dtype=torch.uint8),
        "shape": torch.tensor([[1], [8]]),
        "weight_scale": torch.tensor([[2.0]]),
    }
    tensor, found = weight(config, **parts)
    assert isinstance(tensor, Sparse24) and found.tolist() == [[2, 0, 0, 4, 0, 6, 8, 0]]
    plain = parts | {"compressed": parts["compressed"].to(torch.bfloat16)}
    del plain["weight_scale"]
    tensor, found = weight(config, **plain)
    assert isinstance(tensor, Plain) and found.tolist() == [[1, 0, 0, 2, 0, 3, 4, 0]]


def test_vptq_reads_one_stream_of_joint_indices():
    """3 outputs in blocks of 2, 4 inputs: 1 outlier column, 3 of one group; 2-bit main and 1-bit
    residual indices."""
    layer = dict(
        in_features=4,
        out_features=3,
        vector_lens=[3, 2],
        num_centroids=[2, 4],
        num_res_centroids=[-1, 2],
        group_num=1,
        group_size=3,
        outlier_size=1,
        indices_as_float=False,
        enable_norm=True,
        enable_perm=True,
        is_indice_packed=True,
        bias=False,
    )
    tensor, found = weight(
        {"quant_method": "vptq", "config_for_layers": {P: layer}},
        # rows 0–1: (res, main) = (0,1) (1,2) (0,3) → 001, 110, 011; row 2: (1,0) (0,0) (1,1) → 100,
        # 000, 101
        indices=torch.tensor([[[0b011_110_001], [0b101_000_100]]], dtype=torch.int32),
        centroids__weight=torch.tensor([[0.0, 0, 1, 10, 2, 20, 3, 30]]),
        res_centroids__weight=torch.tensor([[0.0, 0, 100, 1000]]),
        outlier_indices=torch.tensor([[[1]]], dtype=torch.int16),
        outlier_centroids__weight=torch.tensor([[0.0, 0, 0, 7, 8, 9]]),
        perm=torch.tensor([2, 0, 1, 3], dtype=torch.int16),
        weight_scale=torch.tensor([1.0, 1, 1, 2]),
        weight_bias=torch.tensor([0.0, 0, 0, 0.5]),
    )
    assert isinstance(tensor, VectorQuant)
    # stored columns [outlier | 0 | 1 | 2] belong to inputs 2, 0, 1, 3
    assert found.tolist() == [[1, 102, 7, 6.5], [10, 1020, 8, 60.5], [100, 0, 9, 202.5]]


NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def float4_parts(**more):
    """Two outputs of 16 inputs: the codes 0 … 15 in order, and all of them 2 (1.0)."""
    codes = torch.tensor(
        [[2 * i | (2 * i + 1) << 4 for i in range(8)], [0x22] * 8], dtype=torch.uint8
    )
    return {"weight_scale": torch.tensor([[2.0], [0.5]]).to(FLOAT8)} | more, codes


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_nvfp4_of_model_optimizer_multiplies_both_scales():
    parts, codes = float4_parts(weight_scale_2=torch.tensor(0.25), input_scale=torch.tensor(1.0))
    tensor, found = weight(NVFP4, weight=codes, **parts)
    assert isinstance(tensor, NvFloat4)
    assert found[0].tolist() == [0.5 * value for value in (*E2M1, *(-value for value in E2M1))]
    assert found[1].tolist() == [0.125] * 16


def test_nvfp4_of_compressed_tensors_divides_by_the_global_scale():
    config = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "tensor_group",
                    "group_size": 16,
                },
            }
        },
    }
    parts, codes = float4_parts(weight_global_scale=torch.tensor([4.0]))
    _, found = weight(config, weight_packed=codes, **parts)
    assert found[0].tolist() == [0.5 * value for value in (*E2M1, *(-value for value in E2M1))]


HQQ = {"quant_method": "hqq", "quant_config": {}}


def hqq_parts(packed, bits, rows, columns, count):
    return {
        "W_q": packed,
        "scale": torch.full((count, 1), 0.5).half(),
        "zero": torch.full((count, 1), 1.25).half(),
        "shape": torch.tensor([rows, columns]),
        "nbits": torch.tensor(bits),
        "axis": torch.tensor(1),
    }


def test_hqq_keeps_the_first_half_of_the_groups_in_the_upper_bits():
    # two outputs of 16 inputs: codes 0 … 15 and 3
    packed = torch.tensor([[i << 4 | 3 for i in range(16)]], dtype=torch.uint8)
    tensor, found = weight(HQQ, **hqq_parts(packed, 4, 2, 16, 2))
    assert isinstance(tensor, IntBlock) and tensor.group_size == 16
    assert (
        found[0].tolist() == [(code - 1.25) * 0.5 for code in range(16)]
        and found[1].tolist() == [0.875] * 16
    )


def test_hqq_of_three_bits_has_ten_groups_to_a_word():
    # one output of 48 inputs in three groups: 7, 5 and 1; the other seven fields are padding
    packed = torch.full((1, 16), 7 << 27 | 5 << 24 | 1 << 21, dtype=torch.int32)
    _, found = weight(HQQ, **hqq_parts(packed, 3, 1, 48, 3))
    assert found[0].tolist() == [2.875] * 16 + [1.875] * 16 + [-0.125] * 16


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"axis": torch.tensor(0)}, "axis=1"), ({"nbits": torch.tensor(8)}, "8 bits")],
)
def test_hqq_that_has_no_kernel_is_refused(changed, words):
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    with pytest.raises(UnsupportedError, match=words):
        weight(HQQ, **(hqq_parts(packed, 4, 2, 16, 2) | changed))
