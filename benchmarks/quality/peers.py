"""The published packages, on the same model and the same calibration tokens: (job, model, tokens) →
a model folder.

Group size (`group_of`), symmetry and the type of the scales (16 bits) are those of our scheme of
the same name; everything else is what the package does by default or in its documentation's example
of the method. Where its ranges can be searched too (`mse`, `imatrix`), that stands beside the
default.
"""

from __future__ import annotations

import json
import math
import sys
import types
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from exl3 import exl3
from safetensors.torch import load_file, save_file
from torch import Tensor

# where the model's widths are multiples of it, else the largest power of two that divides them
GROUP = 128
# sequences of one length together: the packages' default of one is several times slower and gives
# the same
BATCH = 8


def group_of(model: Path) -> int:
    """The group size that our schemes take for this model."""
    config = json.loads((model / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return math.gcd(
        GROUP,
        config["hidden_size"],
        config["intermediate_size"],
        config["num_attention_heads"] * head_dim,
    )


def integers(
    bits: int,
    *,
    grouped: bool = True,
    symmetric: bool = True,
    activations: bool = False,
    observer: str | None = None,
) -> dict[str, Any]:
    """A scheme of compressed-tensors; without a group one scale per channel, without an observer
    the default's whole range.
    """
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if grouped else "channel",
        "group_size": GROUP if grouped else None,
    } | ({"observer": observer} if observer else {})
    inputs = (
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        if activations
        else None
    )
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}


# scheme → (what comes before rounding, what rounds, the integers)
LLM_COMPRESSOR: dict[str, tuple[str, str, dict[str, Any]]] = {
    "rtn-int4": ("", "rtn", integers(4)),
    "rtn-int4-mse": ("", "rtn", integers(4, observer="memoryless_mse")),
    "rtn-int8": ("", "rtn", integers(8, grouped=False)),
    "rtn-int8-group": ("", "rtn", integers(8)),
    "gptq-int3": ("", "gptq", integers(3)),
    "gptq-int3-imatrix": ("", "gptq", integers(3, observer="imatrix_mse")),
    "gptq-int4": ("", "gptq", integers(4)),
    "gptq-int4-imatrix": ("", "gptq", integers(4, observer="imatrix_mse")),
    "awq-int3": ("awq", "rtn", integers(3, symmetric=False)),
    "awq-int4": ("awq", "rtn", integers(4, symmetric=False)),
    "w8a8-smooth": ("smooth", "rtn", integers(8, grouped=False, activations=True)),
    "w8a8-smooth-gptq": ("smooth", "gptq", integers(8, grouped=False, activations=True)),
}
AUTO_ROUND: dict[str, dict[str, Any]] = {
    "autoround-int4": {"bits": 4, "sym": True},
    "autoround-int4-asym": {"bits": 4, "sym": False},
    "autoround-int3-asym": {"bits": 3, "sym": False},
    "autoround-int2-asym": {"bits": 2, "sym": False},
}
# name in our tables → bits; the order of its columns (group-aware) is the default
GPTQMODEL = {"gptqmodel-int4": 4, "gptqmodel-int3": 3, "gptqmodel-int2": 2}
EXL3 = ("exl3-4bit", "exl3-3bit", "exl3-2bit")
SCHEMES = {
    "llm-compressor": list(LLM_COMPRESSOR),
    "auto-round": list(AUTO_ROUND),
    "exllamav3": list(EXL3),
    "gptqmodel": list(GPTQMODEL),
}
# of a peer's scheme: ours has one of that name without the ending
VARIANTS = ("-mse", "-imatrix", "-group")
# Below 4 bits: ours, recipes/*.toml among them → all that they are held against
FEWER: dict[tuple[str, ...], list[tuple[str, str]]] = {
    ("vptq-3bit", "vptq-3bit-learned", "int3-best"): [
        ("flyweight", "vptq-3bit"),
        ("flyweight", "gptq-int3"),
        ("flyweight", "awq-int3"),
        ("auto-round", "autoround-int3-asym"),
        ("llm-compressor", "gptq-int3"),
        ("llm-compressor", "gptq-int3-imatrix"),
        ("llm-compressor", "awq-int3"),
        ("exllamav3", "exl3-3bit"),
        ("gptqmodel", "gptqmodel-int3"),
    ],
    ("vptq-2bit", "vptq-2bit-learned", "int2-best", "trellis2"): [
        ("flyweight", "vptq-2bit"),
        ("auto-round", "autoround-int2-asym"),
        ("exllamav3", "exl3-2bit"),
        ("gptqmodel", "gptqmodel-int2"),
    ],
}
AT_FOUR = [
    ("auto-round", "autoround-int4-asym"),
    ("auto-round", "autoround-int4"),
    ("llm-compressor", "awq-int4"),
    ("llm-compressor", "gptq-int4"),
    ("llm-compressor", "gptq-int4-imatrix"),
    ("llm-compressor", "rtn-int4"),
    ("exllamav3", "exl3-4bit"),
    ("gptqmodel", "gptqmodel-int4"),
]
# Ours → the peers' that it is held against, at the same group size and symmetry and no more stored
# bits.
RIVALS: dict[str, list[tuple[str, str]]] = {
    **{
        ours: [
            ("llm-compressor", name)
            for name in LLM_COMPRESSOR
            if name.removeprefix(ours) in ("", *VARIANTS)
        ]
        for ours in LLM_COMPRESSOR
        if not ours.endswith(VARIANTS)
    },
    **{
        ours: [
            *(("llm-compressor", ours + ending) for ending in ("", "-imatrix")),
            ("gptqmodel", ours.replace("gptq-", "gptqmodel-")),
        ]
        for ours in ("gptq-int4", "gptq-int3")
    },
    "int4-best-symmetric": [
        ("auto-round", "autoround-int4"),
        ("llm-compressor", "gptq-int4"),
        ("llm-compressor", "gptq-int4-imatrix"),
        ("llm-compressor", "rtn-int4"),
    ],
    "int4-best": AT_FOUR,
    **{
        ours: [rival for rival in rivals if rival != ("flyweight", ours)]
        for named, rivals in FEWER.items()
        for ours in named
    },
}


def llm_compressor(
    scheme: str, model: Path, tokens: Tensor, output: Path, *, device: str, seed: int, steps: int
) -> Path:
    stand_in_for_datasets()
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    before, rounding, groups = LLM_COMPRESSOR[scheme]
    weights = groups["group_0"]["weights"]
    sized = weights | {"group_size": weights["group_size"] and group_of(model)}
    groups = {"group_0": groups["group_0"] | {"weights": sized}}
    rounder = {"gptq": GPTQModifier, "rtn": QuantizationModifier}[rounding](
        config_groups=groups, ignore=["lm_head"]
    )
    first = {
        "": [],
        "awq": [AWQModifier()],
        "smooth": [SmoothQuantModifier(smoothing_strength=0.8)],
    }[before]
    needed = None if not first and rounding == "rtn" else loader(tokens)
    # it moves layer by layer to a GPU itself
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    oneshot(
        model=loaded,
        tokenizer=AutoTokenizer.from_pretrained(model),
        dataset=needed,
        recipe=[*first, rounder],
        max_seq_length=tokens.shape[1],
        num_calibration_samples=len(tokens),
        output_dir=str(output),
    )
    narrow_scales(output)
    return output


def narrow_scales(folder: Path) -> None:
    """A float32 model gets float32 scales; in 16 bits, as ours are, they cost half as much and
    nothing else.
    """
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        wide = {
            name: value.half()
            for name, value in tensors.items()
            if name.endswith("weight_scale")
            and value.dtype == torch.float32
            and value.shape[-1] > 1
        }
        if wide:
            save_file(tensors | wide, shard, {"format": "pt"})


def loader(tokens: Tensor) -> torch.utils.data.DataLoader:
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in tokens]
    return torch.utils.data.DataLoader(rows, batch_size=BATCH)  # type: ignore[arg-type]


def auto_round(
    scheme: str, model: Path, tokens: Tensor, output: Path, *, device: str, seed: int, steps: int
) -> Path:
    stand_in_for_datasets()
    from auto_round import AutoRound

    options, place = AUTO_ROUND[scheme], 0 if device.startswith("cuda") else device
    rounder = AutoRound(
        str(model),
        group_size=group_of(model),
        iters=steps,
        seed=seed,
        device_map=place,
        seqlen=tokens.shape[1],
        dataset=[row[None] for row in tokens],
        nsamples=len(tokens),
        batch_size=BATCH,
        enable_torch_compile=False,
        **options,
    )
    rounder.quantize_and_save(str(output), format="auto_gptq")
    return next(output.rglob("config.json")).parent  # it may add a folder of its own


def gptqmodel(
    scheme: str, model: Path, tokens: Tensor, output: Path, *, device: str, seed: int, steps: int
) -> Path:
    stand_in_for_datasets()
    stand_in_for_hub()
    from gptqmodel import GPTQModel, QuantizeConfig

    torch.manual_seed(seed)
    settings = QuantizeConfig(
        bits=GPTQMODEL[scheme], group_size=group_of(model), sym=True, offload_to_disk=False
    )
    loaded = GPTQModel.load(str(model), settings, dtype=torch.float32)
    rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in tokens]
    loaded.quantize(rows, batch_size=BATCH)
    loaded.save(str(output))
    return output


MAKERS = {
    "llm-compressor": llm_compressor,
    "auto-round": auto_round,
    "exllamav3": exl3,
    "gptqmodel": gptqmodel,
}
PACKAGES = {
    "llm-compressor": "llmcompressor",
    "auto-round": "auto-round",
    "exllamav3": "exllamav3",
    "gptqmodel": "gptqmodel",
}


def stand_in_for_hub() -> None:
    """GPTQModel takes a regular expression library that has no wheel, for which Python's own does,
    and functions of a hub that nobody asks here, which transformers has had in one version.
    """
    import re

    import huggingface_hub
    from transformers.utils import hub

    sys.modules.setdefault("pcre", re)
    for name in ("create_repo", "hf_hub_download", "list_repo_tree", "snapshot_download"):
        if not hasattr(hub, name):
            setattr(hub, name, getattr(huggingface_hub, name))


def stand_in_for_datasets() -> None:
    """Both packages import `datasets` (and with it 45 MB of pyarrow) for texts that they are not
    asked to read here.
    """
    if find_spec("datasets") is not None:
        return

    def module(name: str, **names: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__spec__, made.__path__, made.__version__ = (
            ModuleSpec(name, None, is_package=True),
            [],
            "4.8.4",
        )  # type: ignore
        made.__dict__.update(names)
        sys.modules[name] = made
        return made

    kinds = {
        name: type(name, (), {})
        for name in (
            "Dataset",
            "DatasetDict",
            "IterableDataset",
            "Features",
            "Sequence",
            "Value",
            "LazyRow",
        )
    }
    module("datasets", **kinds, load_dataset=None, concatenate_datasets=None)
    module("datasets.formatting")
    module("datasets.formatting.formatting", LazyRow=kinds["LazyRow"])
