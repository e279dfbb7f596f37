"""Every file format of quantized weights: which one a folder has, which one a weight is saved in,
and both directions.

    form = find(checkpoint.config, checkpoint)        # None: a plain checkpoint
    weight = read_linear(form, checkpoint, prefix)    # QuantTensor, whatever the file calls or
        packs it
    form = named("gptq"); form.write(prefix, weight); form.config({prefix: weight},
        ignore=["lm_head"])
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flyweight.checkpoint.formats.awq import Awq
from flyweight.checkpoint.formats.base import CheckpointNotice, Format, Settings, Source, notice
from flyweight.checkpoint.formats.compressed_tensors import CompressedTensors
from flyweight.checkpoint.formats.fp8 import Fp8
from flyweight.checkpoint.formats.fused import read_linear
from flyweight.checkpoint.formats.gguf import Gguf
from flyweight.checkpoint.formats.gptq import Gptq
from flyweight.checkpoint.formats.hqq import Hqq
from flyweight.checkpoint.formats.modelopt import ModelOpt
from flyweight.checkpoint.formats.trellis import TrellisFormat
from flyweight.checkpoint.formats.vptq import Vptq
from flyweight.errors import CheckpointError, OptionError, UnsupportedError, unknown
from flyweight.tensors import IntGroup, QuantTensor

__all__ = [
    "DEFAULTS",
    "READABLE",
    "WRITABLE",
    "CheckpointNotice",
    "Format",
    "Gguf",
    "Source",
    "default_for",
    "default_of",
    "find",
    "named",
    "read_linear",
    "register",
]

READABLE: dict[str, type[Format]] = {
    "gptq": Gptq,
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "vptq": Vptq,
    "modelopt": ModelOpt,
    "hqq": Hqq,
    "trellis": TrellisFormat,
}
WRITABLE: dict[str, Format] = {
    "gptq": Gptq(),
    "gptq_v2": Gptq(version2=True),
    "awq": Awq(),
    "compressed-tensors": CompressedTensors(),
    "fp8": Fp8(),
    "vptq": Vptq(),
    "modelopt": ModelOpt(),
    "trellis": TrellisFormat(),
}
# Known to transformers, but with a run time of their own and no place in the QuantTensor family.
FOREIGN = (
    "bitsandbytes",
    "quanto",
    "torchao",
    "aqlm",
    "spqr",
    "higgs",
    "eetq",
    "fbgemm_fp8",
    "bitnet",
    "quark",
    "quip",
    "fp_quant",
    "exl2",
    "exl3",
)

# What a weight is saved in by default: the files that most engines run fast. First line that fits.
DEFAULTS = (
    (
        "int, with g_idx",
        "gptq",
        "compressed-tensors 0.20 rejects act-order; vLLM and SGLang run it with Marlin",
    ),
    ("int, with g_idx and zero points", "gptq_v2", "version 1 overflows at a zero point of 0"),
    (
        "int",
        "compressed-tensors",
        "2 to 8 bits, zero points or none, scales in the model's own dtype; Marlin and Machete",
    ),
    ("w8a8", "compressed-tensors", "the only format with quantized int8 activations"),
    (
        "fp8, blocks of 128 with grouped activations",
        "fp8",
        "the family of DeepSeek and Qwen3-FP8: transformers, vLLM, SGLang",
    ),
    ("fp8", "compressed-tensors", "the only format with one scale per output"),
    ("sparse24", "compressed-tensors", "dense with zeros: 2:4 storage is gone from every engine"),
    ("vptq", "vptq", "the only format with codebooks"),
    ("trellis", "trellis", "of this package alone: no other engine has this code"),
    ("nvfp4", "modelopt", "the files that its authors publish"),
)


def register(form: Format) -> None:
    """A format from outside of this folder, to be read and written under its name."""
    if form.name in READABLE or form.name in WRITABLE:
        raise ValueError(f"there is a format {form.name} already")
    READABLE[form.name] = type(form)
    WRITABLE[form.name] = form


def default_for(tensor: QuantTensor) -> str:
    """The name of the format that this weight is saved in unless another is asked for; `DEFAULTS`
    has the reasons.
    """
    if tensor.file_format is not None:
        return tensor.file_format
    if isinstance(tensor, IntGroup) and tensor.g_idx is not None:
        return "gptq" if tensor.zeros is None else "gptq_v2"
    if tensor.kind == "fp8":
        return (
            "fp8"
            if getattr(tensor, "block", None) == 128 and not WRITABLE["fp8"].refuses(tensor)
            else "compressed-tensors"
        )
    return "compressed-tensors"


def default_of(tensors: Iterable[QuantTensor]) -> str:
    """One format for a whole checkpoint: what its layers agree on, else compressed-tensors, which
    can mix schemes.
    """
    wanted = {default_for(tensor) for tensor in tensors if tensor.kind != "plain"}
    if wanted == {"gptq", "gptq_v2"}:
        return "gptq_v2"
    return wanted.pop() if len(wanted) == 1 else "compressed-tensors"


def named(name: str) -> Format:
    if name not in WRITABLE:
        raise OptionError(unknown("format", name, [*WRITABLE, "plain"]))
    return WRITABLE[name]


# -- finding ---------------------------------------------------------------------------------------


def find(config: dict[str, Any], checkpoint: Source) -> Format | None:
    """The format that the folder says it has; None for a plain one."""
    settings = _settings(config, checkpoint)
    if settings is None:
        return None
    method = str(settings.get("quant_method", str, _guess(settings) or "")).lower()
    method = (
        method.replace("_", "-")
        if method in ("compressed_tensors", "auto_round")
        else method.removeprefix("intel/")
    )
    if method == "auto-round":
        return _auto_round(settings)
    if method == "mxfp4":  # experts in one tensor (stacked.py); everything else is plain
        return None
    if method in FOREIGN:
        raise UnsupportedError(
            f"{settings.where}: files of {method} are not read; these are: {', '.join(READABLE)}"
        )
    if method not in READABLE:
        raise UnsupportedError(
            f"{settings.where}: {unknown('quant_method', method, [*READABLE, *FOREIGN])}"
        )
    return READABLE[method].parse(settings)


def _settings(config: dict[str, Any], checkpoint: Source) -> Settings | None:
    """`quantization_config`, or what older tools left in other places."""
    where = f"{checkpoint.folder}/config.json: quantization_config"
    found = config.get("quantization_config")
    if found is None and config.get("compression_config") is not None:
        notice(
            checkpoint,
            "config.json has `compression_config`, the old name of "
            "`quantization_config`: read as such",
        )
        found = config["compression_config"]
        if isinstance(found, dict) and isinstance(found.get("quantization_config"), dict):
            found = found["quantization_config"] | {
                "sparsity_config": found.get("sparsity_config") or {}
            }
    if found is None:
        return _beside(checkpoint)
    if not isinstance(found, dict):
        raise CheckpointError(f"{where} is a {type(found).__name__}, an object is wanted")
    return Settings(found, where) if found else None


def _beside(checkpoint: Source) -> Settings | None:
    """The file that AutoGPTQ, AutoAWQ and Model Optimizer wrote beside config.json, if the tensors
    are quantized too.
    """
    path = checkpoint.folder / "hf_quant_config.json"
    if path.is_file():
        values = _object(path).get("quantization")
        return Settings(
            {"quant_method": "modelopt"} | (values if isinstance(values, dict) else {}), str(path)
        )
    if not any(name.endswith(".qweight") for name in checkpoint.names()):
        return None
    for file in ("quantize_config.json", "quant_config.json"):
        path = checkpoint.folder / file
        if path.is_file():
            values = _object(path)
            notice(
                checkpoint, f"config.json has no `quantization_config`; {file} beside it is used"
            )
            return Settings(values, str(path))
    return None


def _object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: an object is wanted, not a {type(values).__name__}")
    return values


def _guess(settings: Settings) -> str | None:
    """Files from before `quant_method`: AutoAWQ counted `w_bit`, AutoGPTQ had `desc_act`."""
    if "w_bit" in settings.values:
        return "awq"
    if "desc_act" in settings.values or "sym" in settings.values:
        return "gptq"
    return "compressed-tensors" if "config_groups" in settings.values else None


def _auto_round(settings: Settings) -> Format:
    """auto-round's own label on the packings of other tools."""
    packing = settings.get("packing_format", str, "").lower()
    for part, form in (("awq", Awq), ("gptq", Gptq), ("llm_compressor", CompressedTensors)):
        if part in packing:
            return form.parse(
                Settings(
                    {key: value for key, value in settings.values.items() if key != "format"},
                    settings.where,
                )
            )
    raise UnsupportedError(
        f"{settings.where}: auto-round with packing_format {packing!r} is not read; export with "
        "--format auto_gptq, auto_awq or llm_compressor"
    )
