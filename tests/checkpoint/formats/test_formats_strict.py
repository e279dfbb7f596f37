"""Damaged and contradictory folders are errors that name the tensor or key; known faults are mended
with a notice."""

import dataclasses
import fnmatch
import json

import pytest
import torch
from in_memory import MemoryCheckpoint, read, same, words, written

from flyweight.checkpoint import formats
from flyweight.checkpoint.formats import CheckpointNotice
from flyweight.errors import CheckpointError, FlyweightError, UnsupportedError
from flyweight.packing import pack
from flyweight.tensors import Float8, Int8Channel, IntGroup, Plain, Trellis, VectorQuant

PREFIX = "model.layers.0.mlp.down_proj"
INT4 = dataclasses.replace(
    IntGroup.random((16, 64), group_size=32, symmetric=True, dtype=torch.float16)
)
ASYMMETRIC = IntGroup.random((16, 64), group_size=32, dtype=torch.float16)
CASES = {
    "gptq": INT4,
    "gptq_v2": ASYMMETRIC,
    "awq": ASYMMETRIC,
    "compressed-tensors": ASYMMETRIC,
    "w8a8": dataclasses.replace(Int8Channel.random((16, 64)), input_scale=torch.tensor([0.1])),
    "fp8": Float8.random((16, 64)),
    "vptq": VectorQuant.random((16, 64), main=16, residual=4, outliers=4, permute=True),
    "trellis": Trellis.random((17, 64), bits=3),
}


def folder(case):
    return written(
        case if case in formats.WRITABLE and case != "fp8" else "compressed-tensors", CASES[case]
    )


@pytest.mark.parametrize("case", CASES)
def test_every_missing_tensor_is_named(case):
    for name in folder(case).names():
        checkpoint = folder(case)
        del checkpoint.tensors[name]
        if name.endswith("g_idx"):
            continue  # columns in order need none
        with pytest.raises(CheckpointError, match=name.rsplit(".", 1)[1]):
            read(checkpoint)


@pytest.mark.parametrize("case", CASES)
def test_every_wrong_dtype_is_named(case):
    for name, tensor in folder(case).tensors.items():
        checkpoint = folder(case)
        checkpoint.tensors[name] = torch.zeros(
            tensor.shape, dtype=torch.float64 if tensor.dtype != torch.float64 else torch.int8
        )
        with pytest.raises(CheckpointError, match="float64"):
            read(checkpoint)


@pytest.mark.parametrize("case", CASES)
def test_every_wrong_shape_is_named(case):
    scalars = (f"{PREFIX}.input_scale",)  # one number in any shape
    for name, tensor in folder(case).tensors.items():
        for changed in (
            ()
            if name in scalars
            else (tensor[:-1] if tensor.ndim else tensor, tensor[None], tensor[..., :0])
        ):
            checkpoint = folder(case)
            checkpoint.tensors[name] = changed
            with pytest.raises(FlyweightError, match=PREFIX.rsplit(".", 1)[1]):
                read(checkpoint)


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_used(case):
    checkpoint = folder(case)
    read(checkpoint)
    assert checkpoint.used == set(checkpoint.names())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bits": "4"}, '`bits` is "4", a int'),
        ({"bits": 7}, "`bits` is 7"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": 16}, "scales.*shape"),
        ({"bits": 8}, "qweight|qzeros"),
        ({"sym": 1}, "sym"),
        ({"bits": None}, "`bits` is missing"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format"),
        ({"dynamic": {"+:(": {}}}, "pattern"),
        ({"quant_method": "gptqq"}, "did you mean 'gptq'"),
        ({"quant_method": "bitsandbytes"}, "not read"),
        ({"quant_method": 7}, "quant_method"),
    ],
)
def test_a_bad_gptq_config_names_its_key(change, says):
    checkpoint = written("gptq", INT4)
    checkpoint.config["quantization_config"] |= change
    with pytest.raises(FlyweightError, match=says):
        read(checkpoint)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "pack-quantised"}, "did you mean 'pack-quantized'"),
        ({"format": "marlin-24"}, "marlin-24"),
        ({"config_groups": []}, "config_groups"),
        ({"config_groups": {"a": {"targets": ["re:("], "weights": {}}}}, "regular expression"),
        ({"ignore": [PREFIX]}, "no group of config.json targets it"),
        ({"kv_cache_scheme": 8}, "kv_cache_scheme"),
        ({"transform_config": {"config_groups": {}}}, "rotations"),
        ({"sparsity_config": {"format": "sparse-bitmask"}}, "sparse-24-bitmask"),
    ],
)
def test_a_bad_compressed_tensors_config_names_its_key(change, says):
    checkpoint = written("compressed-tensors", INT4)
    checkpoint.config["quantization_config"] |= change
    with pytest.raises(FlyweightError, match=says):
        read(checkpoint)


def test_scales_of_a_quantized_cache_are_no_weights():
    checkpoint = written("compressed-tensors", INT4)
    checkpoint.config["quantization_config"]["kv_cache_scheme"] = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
    }
    form = formats.find(checkpoint.config, checkpoint)
    same(INT4, formats.read_linear(form, checkpoint, PREFIX))
    assert any(
        fnmatch.fnmatchcase("model.layers.3.self_attn.k_scale", pattern) for pattern in form.spare
    )
    assert not any(
        fnmatch.fnmatchcase(name, pattern) for name in checkpoint.names() for pattern in form.spare
    )
    assert formats.named("compressed-tensors").spare == ()


FLAT = {
    "quant_method": "vptq",
    "format": "vptq",
    "bits": 2,
    "vector_lens": [4, 8],
    "num_centroids": [256, 16],
    "npercent": 5.0,
    "num_res_centroids": [-1, 4],
    "group_num": 2,
    "group_size": -1,
    "enable_norm": True,
    "norm_dim": 0,
    "enable_perm": True,
}


def flat_vptq(**change):
    """The folder as GPTQModel writes it: one set of numbers, shapes from the model, wide integers.
    5 % of 64 inputs are 4."""
    checkpoint = written("vptq", VECTORS)
    for name in (f"{PREFIX}.perm", f"{PREFIX}.outlier_indices"):
        checkpoint.tensors[name] = checkpoint.tensors[name].int()
    checkpoint.config = {
        "hidden_size": 16,
        "intermediate_size": 64,
        "quantization_config": FLAT | change,
    }
    return checkpoint


VECTORS = VectorQuant.random((16, 64), main=16, residual=4, outliers=4, groups=2, permute=True)


def test_the_flat_vptq_config_of_gptqmodel_is_spread_over_the_modules():
    same(VECTORS, read(flat_vptq()))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"norm_dim": 1}, "norm_dim"),
        ({"npercent": "5"}, "npercent"),
        ({"group_num": -1, "group_size": 7}, "padded"),
        ({"vector_lens": [8]}, "vector_lens"),
        ({"group_num": 0}, "group_num"),
    ],
)
def test_a_flat_vptq_config_that_cannot_be_followed_is_refused(change, says):
    with pytest.raises(FlyweightError, match=says):
        read(flat_vptq(**change))
    unknown = flat_vptq()
    unknown.config.pop("hidden_size")
    with pytest.raises(CheckpointError, match="does not tell the shape"):
        read(unknown)


def test_indices_and_groups_that_point_outside_are_refused():
    act_order = written(
        "gptq",
        IntGroup.random(
            (16, 64), group_size=32, symmetric=True, act_order=True, dtype=torch.float16
        ),
    )
    act_order.tensors[f"{PREFIX}.g_idx"][5] = 2
    with pytest.raises(CheckpointError, match="outside the 2 groups"):
        read(act_order)
    vptq = folder("vptq")
    vptq.tensors[f"{PREFIX}.perm"][0] = vptq.tensors[f"{PREFIX}.perm"][1]
    with pytest.raises(CheckpointError, match="no permutation"):
        read(vptq)
    vptq = folder("vptq")
    vptq.tensors[f"{PREFIX}.outlier_indices"][0, 0, 0] = 256
    with pytest.raises(CheckpointError, match="past its codebook"):
        read(vptq)


# -- which module has which scheme -----------------------------------------------------------------


def test_mixed_groups_match_names_before_patterns_of_class_and_leave_out_what_is_ignored():
    layers = {
        "model.layers.0.q_proj": INT4,
        "model.layers.1.q_proj": Int8Channel.random((16, 64)),
        "model.layers.2.q_proj": ASYMMETRIC,
    }
    form = formats.named("compressed-tensors")
    tensors = {
        name: part
        for prefix, tensor in layers.items()
        for name, part in form.write(prefix, tensor).items()
    }
    config = form.config(layers, ignore=["lm_head"])
    assert config["format"] == "mixed-precision" and len(config["config_groups"]) == 3
    config["config_groups"]["group_1"]["targets"] = [r"re:.*\.1\..*"]
    config["config_groups"]["group_2"]["targets"] = ["Linear"]
    checkpoint = MemoryCheckpoint(
        tensors | {"lm_head.weight": torch.ones(4, 4)}, {"quantization_config": config}
    )
    for prefix, tensor in layers.items():
        same(tensor, read(checkpoint, prefix))
    assert isinstance(read(checkpoint, "lm_head"), Plain)


def test_gptq_layers_of_other_bits_and_groups_are_dynamic_rules():
    layers = {
        "a.q_proj": INT4,
        "a.k_proj": INT4,
        "a.v_proj": IntGroup.random(
            (16, 64), bits=8, group_size=-1, symmetric=True, dtype=torch.float16
        ),
    }
    form = formats.named("gptq")
    config = form.config(layers, ignore=["lm_head", "a.gate"])
    assert config["dynamic"] == {
        "+:^a\\.v_proj$": {"bits": 8, "group_size": -1, "sym": True},
        "-:^a\\.gate$": {},
    }
    tensors = {
        name: part
        for prefix, tensor in layers.items()
        for name, part in form.write(prefix, tensor).items()
    }
    checkpoint = MemoryCheckpoint(tensors, {"quantization_config": config})
    for prefix, tensor in layers.items():
        same(tensor, read(checkpoint, prefix))


# -- repairs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("label", "other"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
def test_zero_points_of_the_other_version_are_recognized(label, other):
    checkpoint = written(other, INT4)
    checkpoint.config["quantization_config"]["checkpoint_format"] = label
    with pytest.warns(CheckpointNotice, match="zero points"):
        same(INT4, read(checkpoint))


@pytest.mark.parametrize("file", ["quantize_config.json", "quant_config.json"])
def test_the_config_of_older_tools_beside_config_json_is_used(file, tmp_path):
    old = (
        {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
        if file == "quant_config.json"
        else {"bits": 4, "group_size": 32, "desc_act": False, "sym": False}
    )
    (tmp_path / file).write_text(json.dumps(old))
    checkpoint = written("awq" if file == "quant_config.json" else "gptq", ASYMMETRIC)
    checkpoint.config, checkpoint.folder = {}, tmp_path
    with pytest.warns(CheckpointNotice, match=file):
        same(ASYMMETRIC, read(checkpoint))


def test_the_old_name_of_the_config_is_understood():
    checkpoint = written("compressed-tensors", INT4)
    checkpoint.config = {"compression_config": checkpoint.config["quantization_config"]}
    with pytest.warns(CheckpointNotice, match="compression_config"):
        same(INT4, read(checkpoint))


MODEL = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
}
FUSED = {
    "plain": lambda rows: Plain.random((rows, 64)),
    "gptq": lambda rows: IntGroup.random(
        (rows, 64), group_size=32, act_order=True, symmetric=True, dtype=torch.float16
    ),
    "w8a8": lambda rows: Int8Channel.random((rows, 64)),
    "fp8": lambda rows: dataclasses.replace(
        Float8.random((rows, 64)), scales=torch.tensor([[0.5]])
    ),
    "vptq": lambda rows: VectorQuant.random(
        (rows, 64), main=16, residual=None, length=8, outliers=4
    ),
}


@pytest.mark.parametrize("kind", FUSED)
def test_fused_projections_are_taken_apart(kind):
    whole = FUSED[kind](128)
    name = kind if kind in ("gptq", "vptq") else "compressed-tensors"
    form = formats.named(name)
    config = (
        {} if kind == "plain" else {"quantization_config": form.config({"attn.qkv_proj": whole})}
    )
    checkpoint = MemoryCheckpoint(form.write("attn.qkv_proj", whole), MODEL | config)
    with pytest.warns(CheckpointNotice, match="taken apart"):
        parts = [read(checkpoint, f"attn.{part}_proj") for part in "qkv"]
    assert [part.matrix_shape[0] for part in parts] == [64, 32, 32]
    assert torch.equal(torch.cat([part.dequantize() for part in parts]), whole.dequantize())


def test_split_projections_are_put_together():
    parts = {"mlp.gate_proj": INT4, "mlp.up_proj": INT4}
    form = formats.named("compressed-tensors")
    tensors = {
        name: part
        for prefix, tensor in parts.items()
        for name, part in form.write(prefix, tensor).items()
    }
    checkpoint = MemoryCheckpoint(tensors, {"quantization_config": form.config(parts)})
    with pytest.warns(CheckpointNotice, match="put together"):
        joined = read(checkpoint, "mlp.gate_up_proj")
    assert torch.equal(joined.dequantize(), INT4.dequantize().repeat(2, 1))


def test_padded_rows_are_dropped():
    with pytest.warns(CheckpointNotice, match="padding"):
        awq = written("awq", ASYMMETRIC)
        found = read(MemoryCheckpoint(awq.tensors, {"hidden_size": 10} | awq.config))
    assert torch.equal(found.dequantize(), ASYMMETRIC.dequantize()[:10])
    gptq = written("gptq", INT4)
    gptq.tensors[f"{PREFIX}.qweight"] = torch.cat(
        [gptq.tensors[f"{PREFIX}.qweight"], words(0).expand(8, 16)]
    )
    with pytest.warns(CheckpointNotice, match="padded"):
        same(INT4, read(gptq))
    packed = written("compressed-tensors", INT4)
    for name in ("weight_packed", "weight_scale"):
        packed.tensors[f"{PREFIX}.{name}"] = torch.nn.functional.pad(
            packed.tensors[f"{PREFIX}.{name}"], (0, 0, 0, 3)
        )
    with pytest.warns(CheckpointNotice, match="padding"):
        same(INT4, read(packed))


def test_g_idx_that_was_never_filled_is_ignored_without_act_order():
    checkpoint = written("gptq", INT4)
    checkpoint.tensors[f"{PREFIX}.g_idx"].zero_()
    with pytest.warns(CheckpointNotice, match="in order"):
        same(INT4, read(checkpoint))


def test_old_compressed_tensors_with_g_idx_and_unpacked_zero_points():
    tensor = IntGroup.random((16, 64), group_size=32, act_order=True)
    checkpoint = written("compressed-tensors", dataclasses.replace(tensor, g_idx=None))
    checkpoint.tensors |= {
        f"{PREFIX}.weight_g_idx": tensor.g_idx,
        f"{PREFIX}.weight_zero_point": (tensor.zeros.int() - 8).to(torch.int8),
    }
    same(tensor, read(checkpoint))


def test_auto_round_labels_the_packing_it_took_from_others():
    checkpoint = written("gptq", INT4)
    checkpoint.config["quantization_config"] |= {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
    }
    same(INT4, read(checkpoint))
    checkpoint.config["quantization_config"]["packing_format"] = "auto_round:exllamav2"
    with pytest.raises(UnsupportedError, match="auto_gptq"):
        read(checkpoint)


def test_two_and_three_bit_gptq_can_be_read():
    for bits in (2, 3):
        tensor = IntGroup.random((32, 64), bits=bits, group_size=32, dtype=torch.float16)
        tensors = {
            f"{PREFIX}.qweight": tensor.codes.T.contiguous(),
            f"{PREFIX}.scales": tensor.scales.T.contiguous(),
            f"{PREFIX}.qzeros": pack(tensor.zeros.int().T, bits),
        }
        config = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": 32,
            "sym": False,
            "checkpoint_format": "gptq_v2",
        }
        same(tensor, read(MemoryCheckpoint(tensors, {"quantization_config": config})))


@pytest.mark.parametrize(
    ("part", "shape", "told"),
    [
        ("trellis", (1, 3, 32, 4), "2 and 3 bits"),
        ("trellis", (1, 0, 32, 2), "2 and 3 bits"),
        ("trellis", (2, 3, 32, 2), "no fit for 2 tiles"),
        ("scales", (17, 1), "no fit for 1 tiles"),
        ("scales", (16, 3), "no fit for 1 tiles of 16 outputs and 3 blocks"),
    ],
)
def test_shapes_of_a_trellis_must_fit(part, shape, told):
    checkpoint = written("trellis", Trellis.random((16, 192)))
    name = f"{PREFIX}.{part}"
    checkpoint.tensors[name] = torch.zeros(shape, dtype=checkpoint.tensors[name].dtype)
    with pytest.raises(CheckpointError, match=told):
        read(checkpoint)


def test_trellises_of_a_later_version_are_refused():
    checkpoint = written("trellis", Trellis.random((16, 64)))
    checkpoint.config["quantization_config"]["version"] = 2
    with pytest.raises(UnsupportedError, match="`version` is 2"):
        read(checkpoint)
