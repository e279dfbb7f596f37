"""Folders written by Flyweight, loaded by other packages and run against Flyweight's own decoder.

Teacher-forced: logits over 512 positions of random text; the first argmax that differs is reported
with the gap between the two best logits there. Both sides compute in float32 with the same
dequantized weights (the exact path), so the tolerance is that of the order of additions alone: 1e-5
of the largest logit.
"""

import dataclasses
import importlib.util
import json
import math

import pytest
import torch

pytestmark = pytest.mark.interop
packages = pytest.importorskip(
    "packages", reason="needs the packages of `make test-interop`", exc_type=ImportError
)

from flyweight.checkpoint import Checkpoint, CheckpointWriter, formats  # noqa: E402
from flyweight.checkpoint.convert import convert  # noqa: E402
from flyweight.models.decoder import Decoder  # noqa: E402
from flyweight.tensors import FLOAT8, FLOAT8_MAX, Float8, Int8Channel, IntGroup, Plain, VectorQuant  # noqa: E402

TOLERANCE = 1e-5


def int_group(weight, bits, group_size, symmetric=True, dtype=torch.bfloat16):
    """Round to nearest."""
    group_size = weight.shape[1] if group_size == -1 else group_size
    groups = weight.float().unflatten(1, (-1, group_size))
    if symmetric:
        scales = (groups.abs().amax(-1) / (1 << bits - 1)).to(dtype)
        zeros = torch.full_like(scales, 1 << bits - 1)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / ((1 << bits) - 1)).to(dtype)
        zeros = (-low / scales.float()).round().clamp(1, (1 << bits) - 1)
    values = (
        (groups / scales.float()[..., None] + zeros.float()[..., None])
        .round()
        .clamp(0, (1 << bits) - 1)
        .flatten(1)
    )
    return IntGroup.from_values(
        values.int(), scales, None if symmetric else zeros, bits=bits, group_size=group_size
    )


def int8_channel(weight):
    scales = (weight.float().abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
    return Int8Channel(
        (weight.float() / scales.float()).round().clamp(-127, 127).to(torch.int8), scales
    )


def float8(weight, scales="channel", activation="token"):
    if scales == "block":
        rows, columns = (math.ceil(size / 128) for size in weight.shape)
        scale = torch.full((rows, columns), float(weight.abs().max()) / FLOAT8_MAX)
        spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[
            : weight.shape[0], : weight.shape[1]
        ]
    else:
        top = weight.float().abs()
        spread = scale = (
            top.amax(1, keepdim=True) if scales == "channel" else top.max().reshape(1, 1)
        ) / FLOAT8_MAX
    made = Float8(
        (weight.float() / spread).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8), scale, activation
    )
    return dataclasses.replace(
        made,
        block=128 if scales == "block" else None,
        input_scale=torch.tensor([0.05]) if activation == "static" else None,
    )


def write(base, folder, form, quantize):
    """Every linear but lm_head quantized by `quantize(weight)`; returns the weights."""
    checkpoint, form, layers = Checkpoint(base), formats.named(form), {}
    with CheckpointWriter(folder) as writer:
        for name in checkpoint.names():
            if name.endswith("_proj.weight"):
                prefix = name.removesuffix(".weight")
                layers[prefix] = quantize(checkpoint.tensor(name))
                for part, tensor in form.write(prefix, layers[prefix]).items():
                    writer.add(part, tensor)
            else:
                writer.add(name, checkpoint.tensor(name))
        writer.finish(
            checkpoint.config | {"quantization_config": form.config(layers, ignore=["lm_head"])},
            source=base,
        )
    return layers


@torch.no_grad()
def logits(model):
    return model.float().eval()(packages.token_ids(1, 512)).logits[0]


class Dequantized(Checkpoint):
    """As the other side loads it: activations are left alone, where Flyweight's W8A8 and FP8 would
    quantize them."""

    def linear(self, prefix):
        return Plain(super().linear(prefix).dequantize())


def own_logits(folder):
    return Decoder.load(
        Dequantized(folder), device="cpu", dtype=torch.float32, exact=True
    ).forward_whole(packages.token_ids(1, 512))[0]


def report(ours, theirs):
    """The first position whose argmax differs, and how near its two best logits are."""
    different = (ours.argmax(-1) != theirs.argmax(-1)).nonzero().flatten()
    if not len(different):
        largest = (ours - theirs).abs().max()
        return f"argmax agrees at {len(ours)} positions; largest difference {largest:.3g}"
    at = int(different[0])
    best = ours[at].topk(2).values
    gap = best[0] - best[1]
    return f"argmax differs first at position {at}, where the top two are {gap:.3g} apart"


SCHEMES = {
    "w4a16": lambda weight: int_group(weight, 4, 32),
    "w4a16-asymmetric": lambda weight: int_group(weight, 4, 32, symmetric=False),
    "w8a16": lambda weight: int_group(weight, 8, -1),
    "w3a16": lambda weight: int_group(weight, 3, 64),
    "w8a8": int8_channel,
    "fp8": float8,
    "fp8-tensor-static": lambda weight: float8(weight, "tensor", "static"),
    "fp8-block": lambda weight: float8(weight, "block", "group"),
    "mixed": lambda weight: (
        int_group(weight, 4, 32) if weight.shape[0] == 128 else int8_channel(weight)
    ),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compressed_tensors_folder_gives_the_same_logits_in_transformers(scheme, tmp_path):
    from transformers import AutoModelForCausalLM

    base = packages.save_base(tmp_path / "base", dtype=torch.bfloat16)
    write(base, tmp_path / "ct", "compressed-tensors", SCHEMES[scheme])
    convert(tmp_path / "ct", tmp_path / "plain", format="plain", dtype="float32")
    ours = own_logits(tmp_path / "ct")
    others = {
        "compressed-tensors": packages.load_compressed(tmp_path / "ct", dtype=torch.float32),
        "dequantized": AutoModelForCausalLM.from_pretrained(
            tmp_path / "plain", dtype=torch.float32
        ),
    }
    for name, theirs in ((name, logits(model)) for name, model in others.items()):
        print(scheme, name, report(ours, theirs))
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1)), report(ours, theirs)
        assert (ours - theirs).abs().max() <= TOLERANCE * ours.abs().max(), report(ours, theirs)


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
def test_the_default_model_gives_the_same_logits_in_transformers(scheme, smollm2, tmp_path):
    """Real weights, so that attention sinks and outlier channels are there too."""
    write(smollm2, tmp_path / "ct", "compressed-tensors", SCHEMES[scheme])
    ours, theirs = (
        own_logits(tmp_path / "ct"),
        logits(packages.load_compressed(tmp_path / "ct", dtype=torch.float32)),
    )
    print(scheme, report(ours, theirs))
    allowed = 10 * TOLERANCE * ours.abs().max()  # thirty layers deep
    assert (ours - theirs).abs().max() <= allowed, report(ours, theirs)
    best = ours.topk(2, -1).values
    close = best[:, 0] - best[:, 1] <= 2 * allowed
    assert (close | (ours.argmax(-1) == theirs.argmax(-1))).all(), report(ours, theirs)


@pytest.mark.parametrize(
    ("form", "scheme"),
    [
        ("gptq", lambda weight: int_group(weight, 4, 32, dtype=torch.float16)),
        ("gptq", lambda weight: int_group(weight, 8, -1, dtype=torch.float16)),
        ("gptq_v2", lambda weight: int_group(weight, 4, 32, symmetric=False, dtype=torch.float16)),
        (
            "gptq",
            lambda weight: dataclasses.replace(
                int_group(weight, 4, 32, dtype=torch.float16),
                g_idx=(torch.randperm(weight.shape[1]) // 32).int(),
            ),
        ),
        ("awq", lambda weight: int_group(weight, 4, 32, symmetric=False, dtype=torch.float16)),
    ],
    ids=["gptq", "gptq-8-channel", "gptq-v2-asymmetric", "gptq-act-order", "awq"],
)
def test_gptq_and_awq_folders_have_the_same_weights_in_gptqmodel(form, scheme, tmp_path):
    pytest.importorskip("gptqmodel")
    base = packages.save_base(tmp_path / "base", dtype=torch.float16)
    layers = write(base, tmp_path / "quantized", form, scheme)
    theirs = packages.gptqmodel_weights(tmp_path / "quantized", form.removesuffix("_v2"))
    assert set(theirs) == set(layers)
    for prefix, weight in theirs.items():
        assert torch.equal(layers[prefix].dequantize(weight.dtype), weight), prefix


def test_fp8_family_folder_has_the_same_weights_in_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    base = packages.save_base(tmp_path / "base", dtype=torch.bfloat16)
    layers = write(base, tmp_path / "fp8", "fp8", SCHEMES["fp8-block"])
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8",
        dtype=torch.bfloat16,
        quantization_config=FineGrainedFP8Config(dequantize=True),
    )
    for prefix, tensor in layers.items():
        assert torch.equal(model.get_submodule(prefix).weight, tensor.dequantize(torch.bfloat16)), (
            prefix
        )


def test_vptq_layer_has_the_same_weight_in_gptqmodel(tmp_path):
    """Its flat config has no shapes and a share of outliers: 5 % of 64 inputs are 4."""
    layer = packages.gptqmodel_vptq_layer(
        50,
        64,
        npercent=5.0,
        group_num=3,
        vector_lens=[4, 8],
        num_centroids=[8, 64],
        num_res_centroids=[-1, 16],
        enable_norm=True,
        enable_perm=True,
    )
    prefix = "model.layers.0.mlp.down_proj"
    config = packages.gptqmodel_vptq_config(layer)
    parts = {f"{prefix}.{name}": tensor for name, tensor in layer.state_dict().items()}
    with CheckpointWriter(tmp_path / "flat") as writer:
        for name, tensor in parts.items():
            writer.add(name, tensor)
        writer.finish({"hidden_size": 50, "intermediate_size": 64, "quantization_config": config})
    checkpoint = Checkpoint(tmp_path / "flat")
    torch.testing.assert_close(
        checkpoint.linear(prefix).dequantize(), layer.dequantize(), rtol=1e-6, atol=1e-6
    )
    checkpoint.check_used()


@pytest.mark.parametrize(
    "options",
    [
        dict(main=16, residual=None, normalize=False),
        dict(main=64, residual=16),
        dict(main=64, residual=16, groups=2, permute=True),
        dict(main=64, residual=16, groups=3, outliers=4, outlier_centroids=8, permute=True),
        dict(main=4096, residual=256, length=6),
    ],
    ids=["plain", "residual", "groups-permuted", "outliers", "ragged"],
)
def test_vptq_layer_has_the_same_weight_in_vptq(options, tmp_path):
    if importlib.util.find_spec("vptq") is None:
        pytest.skip("needs the vptq package")
    tensor = VectorQuant.random((50, 64), dtype=torch.float32, **options)
    form = formats.named("vptq")
    parts = {
        name.removeprefix("layer."): part for name, part in form.write("layer", tensor).items()
    }
    settings = json.loads(json.dumps(form.config({"layer": tensor})))["config_for_layers"]["layer"]
    layer = packages.vptq_layer(settings, parts)
    theirs = layer(torch.eye(64)).T
    torch.testing.assert_close(theirs, tensor.dequantize(), rtol=1e-6, atol=1e-6)
