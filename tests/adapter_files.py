"""Folders of LoRA adapters as PEFT writes them, and the same adapters merged by hand."""

import json
import math

import torch
from safetensors.torch import save_file

CONFIG = dict(
    peft_type="LORA",
    task_type="CAUSAL_LM",
    lora_alpha=16,
    bias="none",
    fan_in_fan_out=False,
    use_dora=False,
    use_rslora=False,
    modules_to_save=None,
    rank_pattern={},
    alpha_pattern={},
    init_lora_weights=True,
)
PREFIX = "base_model.model."


def write_adapter(folder, shapes, *, rank=4, seed=0, dtype=torch.float32, **config):
    """`shapes`: module → (out, in). Returns {module: scale · B A} in float64."""
    made = torch.Generator().manual_seed(seed)
    options = CONFIG | config
    tensors = {}
    deltas = {}
    for module, (outputs, inputs) in shapes.items():
        own = _pattern(options["rank_pattern"], module, rank)
        alpha = _pattern(options["alpha_pattern"], module, options["lora_alpha"])
        a = (torch.randn(own, inputs, generator=made) * 0.3).to(dtype)
        b = (torch.randn(outputs, own, generator=made) * 0.1).to(dtype)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = a
        tensors[f"{PREFIX}{module}.lora_B.weight"] = b
        scale = alpha / (math.sqrt(own) if options["use_rslora"] else own)
        deltas[module] = scale * b.double() @ a.double()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    options["r"] = rank
    options["target_modules"] = sorted({module.rpartition(".")[2] for module in shapes})
    (folder / "adapter_config.json").write_text(json.dumps(options))
    return deltas


def _pattern(patterns, module, otherwise):
    return next((value for name, value in patterns.items() if module.endswith(name)), otherwise)


def linear_shapes(weights, names):
    """{module: shape} of the linears of a state dict whose names end in one of `names`."""
    found = {}
    for name, tensor in weights.items():
        module = name.removesuffix(".weight")
        if module != name and module.endswith(tuple(names)):
            found[module] = tuple(tensor.shape)
    return found


def merged(weights, deltas):
    """A state dict with the adapter in its weights."""
    found = dict(weights)
    for module, delta in deltas.items():
        name = f"{module}.weight"
        found[name] = (weights[name].double() + delta).to(weights[name].dtype)
    return found
