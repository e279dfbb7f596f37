"""Quantized mixtures of experts: every scheme round trips, routers stay, experts without tokens are
rounded and counted."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from tiny_moe import save

from flyweight.checkpoint import Checkpoint
from flyweight.checkpoint.convert import convert
from flyweight.models.decoder import Decoder
from flyweight.quant import calibrate
from flyweight.quant.calibration import Samples
from flyweight.quant.gptq import GPTQ, gptq
from flyweight.quant.grid import Integers
from flyweight.quant.quantize import quantize
from flyweight.quant.rtn import rtn
from flyweight.quant.statistics import Statistics
from flyweight.tensors import Plain

SMALL = dict(
    num_hidden_layers=2, num_experts=4, num_experts_per_tok=2
)  # the second layer has no experts
TOKENS = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(1))
SAMPLES = Samples(
    torch.randint(0, 128, (4, 64), generator=torch.Generator().manual_seed(2)), "random", 0
)


class Dequantized(Checkpoint):
    """Activations left alone, as the other side leaves them."""

    def linear(self, prefix):
        return Plain(super().linear(prefix).dequantize())


def logits(folder):
    return Decoder.load(
        Dequantized(folder), device="cpu", dtype=torch.float32, exact=True
    ).forward_whole(TOKENS)


@torch.no_grad()
def plain_logits(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits


@pytest.mark.parametrize(
    ("case", "scheme", "format"),
    [
        ("qwen2", "rtn-int4", None),
        ("qwen3", "rtn-int4", "gptq"),
        ("qwen2", "gptq-int4", None),
        ("qwen3", "awq-int4", "awq"),
        ("qwen2", "w8a8-smooth", None),
        ("qwen3", "fp8", None),
        ("qwen3", "vptq:v8-k16-4", None),
    ],
)
def test_a_quantized_folder_gives_the_logits_of_its_dequantized_weights_in_transformers(
    case, scheme, format, tmp_path
):
    original = save(case, tmp_path / "base", **SMALL)
    summary = quantize(
        tmp_path / "base",
        scheme,
        tmp_path / "out",
        calibration=SAMPLES,
        format=format,
        device="cpu",
    )
    convert(tmp_path / "out", tmp_path / "plain", format="plain", dtype="float32")
    found, expected = logits(tmp_path / "out"), plain_logits(tmp_path / "plain")
    assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-5
    with torch.no_grad():
        far = (found - original(TOKENS).logits).norm() / original(TOKENS).logits.norm()
    assert far < (0.9 if "vptq" in scheme else 0.5)  # quantized, not scrambled
    checkpoint = Checkpoint(tmp_path / "out")
    for name in checkpoint.names():
        if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
            assert torch.equal(
                checkpoint.tensor(name), dict(original.named_parameters())[name].data
            )
    ignored = json.dumps(checkpoint.config["quantization_config"])
    assert "model.layers.0.mlp.gate" in ignored or format in ("gptq", "awq") or "vptq" in scheme
    assert sum("expert" in name for name in summary.layers) == 4 * 3 + (3 if case == "qwen2" else 0)


def test_experts_that_few_tokens_reached_are_rounded_to_nearest_and_counted(tmp_path, monkeypatch):
    save("qwen3", tmp_path / "base", **SMALL)
    monkeypatch.setattr(calibrate, "FEWEST_TOKENS", 1 << 20)
    summary = quantize(
        tmp_path / "base", "gptq-int4", tmp_path / "out", calibration=SAMPLES, device="cpu"
    )
    assert summary.notes == (
        "12 of 12 expert linears saw fewer than 1048576 calibration tokens and were rounded to "
        "nearest",
    )
    first = {
        name: facts
        for name, facts in summary.layers.items()
        if name.startswith("model.layers.0.mlp.")
    }
    tokens = [facts["tokens"] for name, facts in first.items() if "up_proj" in name]
    assert sum(tokens) == 4 * 64 * 2  # each token goes to two
    assert "tokens" not in summary.layers["model.layers.0.self_attn.q_proj"]


def test_no_note_where_every_expert_saw_enough(tmp_path, monkeypatch):
    save("qwen2", tmp_path / "base", **SMALL)
    monkeypatch.setattr(calibrate, "FEWEST_TOKENS", 0)
    assert (
        quantize(
            tmp_path / "base", "gptq-int4", tmp_path / "out", calibration=SAMPLES, device="cpu"
        ).notes
        == ()
    )


def test_uniform_statistics_make_gptq_round_to_nearest():
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(3))
    settings = Integers(4, 32, True, "minmax", True, torch.float32)
    found = gptq(weight, Statistics.uniform(64, "cpu"), settings, GPTQ())
    assert torch.equal(found.dequantize(), rtn(weight, settings, None).dequantize())


def test_a_run_that_was_cut_off_goes_on_with_the_same_bytes(tmp_path):
    save("qwen2", tmp_path / "base", **SMALL)
    whole = quantize(
        tmp_path / "base", "gptq-int4", tmp_path / "whole", calibration=SAMPLES, device="cpu"
    )
    quantize(
        tmp_path / "base",
        "gptq-int4",
        tmp_path / "parts",
        calibration=SAMPLES,
        device="cpu",
        blocks=1,
    )
    parts = quantize(
        tmp_path / "base",
        "gptq-int4",
        tmp_path / "parts",
        calibration=SAMPLES,
        device="cpu",
        resume=True,
    )
    assert whole.layers == parts.layers
    for file in (tmp_path / "whole").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "parts" / file.name).read_bytes()


def test_rounding_is_learned_through_the_experts_too(tmp_path):
    from flyweight.quant import recipe

    save("qwen3", tmp_path / "base", **SMALL | dict(num_hidden_layers=1))
    mine = recipe.Recipe.from_dict({"base": "rtn-int4", "learn_steps": 3}, "mine")
    quantize(
        tmp_path / "base", recipe=mine, output=tmp_path / "out", calibration=SAMPLES, device="cpu"
    )
    learned = json.loads((tmp_path / "out" / "flyweight.json").read_text())["transforms"][
        "model.layers.0"
    ]["learned"]
    assert learned["after"] <= learned["before"]
