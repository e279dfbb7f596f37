"""Small models quantized by other packages, and each package's own view of the weights that it
wrote.

`MAKERS` are used by the interop tests and, with a smaller model, by `make_golden.py`.
"""

from __future__ import annotations

import os
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.cpu_count = lambda: 4  # GPTQModel 7.7 cannot start its thread pools on a machine with two cores

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

VOCABULARY = 256


def save_base(folder: Path, *, dtype: torch.dtype, hidden: int = 128, layers: int = 2) -> Path:
    """A random Llama with a tokenizer of one word per token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        head_dim=16,
        num_attention_heads=hidden // 16,
        num_key_value_heads=max(2, hidden // 32),
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    words = Tokenizer(
        models.WordLevel(
            {f"w{i}" if i else "<unk>": i for i in range(VOCABULARY)}, unk_token="<unk>"
        )
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<unk>", eos_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    return folder


def token_ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


# -- makers: base folder → quantized folder --------------------------------------------------------


def llm_compressor(base: Path, folder: Path, *, scheme: str | dict, gptq: bool = False) -> Path:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

    data = Dataset.from_dict(
        {"input_ids": token_ids(8, 32).tolist(), "attention_mask": [[1] * 32] * 8}
    )
    options = (
        {"config_groups": {"group_0": scheme}}
        if isinstance(scheme, dict)
        else {"targets": "Linear", "scheme": scheme}
    )
    recipe = (GPTQModifier if gptq else QuantizationModifier)(ignore=["lm_head"], **options)
    oneshot(
        model=str(base),
        dataset=data,
        recipe=recipe,
        max_seq_length=32,
        num_calibration_samples=8,
        output_dir=str(folder),
    )
    return folder


def auto_round(
    base: Path, folder: Path, *, format: str, bits: int = 4, sym: bool = True, group_size: int = 32
) -> Path:
    from auto_round import AutoRound

    rounder = AutoRound(
        str(base),
        bits=bits,
        group_size=group_size,
        sym=sym,
        iters=0,
        disable_opt_rtn=True,
        device_map="cpu",
        dataset=[row[None] for row in token_ids(2, 32)],
        seqlen=32,
        nsamples=2,
    )
    rounder.quantize_and_save(str(folder), format=format)
    return next(folder.rglob("config.json")).parent  # it may add a folder of its own


def gptqmodel(base: Path, folder: Path, **options) -> Path:
    from gptqmodel import GPTQModel, QuantizeConfig

    rows = [
        {"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in token_ids(64, 32)
    ]
    model = GPTQModel.load(str(base), QuantizeConfig(device="cpu", **options))
    model.quantize(rows, batch_size=1)
    model.save(str(folder))
    return folder


def integers(bits: int, group_size: int | None, symmetric: bool) -> dict:
    return {
        "targets": ["Linear"],
        "weights": {
            "num_bits": bits,
            "type": "int",
            "symmetric": symmetric,
            "group_size": group_size,
            "strategy": "group" if group_size else "channel",
        },
    }


MAKERS = {  # name → (dtype of the model, maker, its options)
    "llm-compressor-w4a16": (
        torch.bfloat16,
        llm_compressor,
        {"scheme": integers(4, 32, True), "gptq": True},
    ),
    "llm-compressor-w4a16-asym": (
        torch.bfloat16,
        llm_compressor,
        {"scheme": integers(4, 32, False), "gptq": True},
    ),
    "llm-compressor-w3a16": (torch.bfloat16, llm_compressor, {"scheme": integers(3, 32, False)}),
    "llm-compressor-w8a16": (torch.bfloat16, llm_compressor, {"scheme": integers(8, None, True)}),
    "llm-compressor-w8a8": (torch.bfloat16, llm_compressor, {"scheme": "W8A8"}),
    "llm-compressor-fp8": (torch.bfloat16, llm_compressor, {"scheme": "FP8"}),
    "llm-compressor-fp8-dynamic": (torch.bfloat16, llm_compressor, {"scheme": "FP8_DYNAMIC"}),
    "llm-compressor-fp8-block": (torch.bfloat16, llm_compressor, {"scheme": "FP8_BLOCK"}),
    "auto-round-gptq": (torch.float16, auto_round, {"format": "auto_gptq"}),
    "auto-round-gptq-asym": (torch.float16, auto_round, {"format": "auto_gptq", "sym": False}),
    "auto-round-gptq-8": (torch.float16, auto_round, {"format": "auto_gptq", "bits": 8}),
    "auto-round-gptq-3": (torch.float16, auto_round, {"format": "auto_gptq", "bits": 3}),
    "auto-round-gptq-2": (torch.float16, auto_round, {"format": "auto_gptq", "bits": 2}),
    "auto-round-awq": (torch.float16, auto_round, {"format": "auto_awq", "sym": False}),
    "gptqmodel-gptq": (
        torch.float16,
        gptqmodel,
        {"bits": 4, "group_size": 32, "sym": True, "desc_act": False},
    ),
    "gptqmodel-gptq-act-order": (
        torch.float16,
        gptqmodel,
        {"bits": 4, "group_size": 32, "sym": True, "desc_act": True},
    ),
    "gptqmodel-gptq-v2": (
        torch.float16,
        gptqmodel,
        {"bits": 4, "group_size": 32, "sym": False, "desc_act": False, "format": "gptq_v2"},
    ),
    "gptqmodel-gptq-8": (
        torch.float16,
        gptqmodel,
        {"bits": 8, "group_size": 32, "sym": True, "desc_act": False},
    ),
    "gptqmodel-awq": (
        torch.float16,
        gptqmodel,
        {"bits": 4, "group_size": 32, "method": "awq", "format": "gemm"},
    ),
}


def make(name: str, folder: Path, **size: int) -> Path:
    dtype, maker, options = MAKERS[name]
    return maker(save_base(folder / "base", dtype=dtype, **size), folder / "quantized", **options)


# -- each package's own weights: folder → {module: weight [out, in]} -------------------------------


def own_weights(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """As the package that wrote the folder dequantizes it, in the dtype that it uses for that."""
    if name.startswith("llm-compressor"):
        return compressed_tensors_weights(folder)
    if name.startswith("auto-round-gptq"):
        return auto_round_weights(folder)
    return gptqmodel_weights(folder, "awq" if name.endswith("awq") else "gptq")


def compressed_tensors_weights(folder: Path) -> dict[str, torch.Tensor]:
    model = load_compressed(folder)
    return {
        prefix: module.weight.data
        for prefix, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and prefix != "lm_head"
    }


def load_compressed(folder: Path, **options):
    """Weights dequantized at load and activations left alone: the exact path."""
    from compressed_tensors.quantization import disable_quantization
    from transformers.utils.quantization_config import CompressedTensorsConfig

    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=CompressedTensorsConfig(dequantize=True), **options
    )
    return model.apply(disable_quantization)


def auto_round_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Its own torch layer multiplied with the identity; without g_idx, which it mishandles where
    outputs exceed inputs."""
    import json

    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors, weights = load_file(folder / "model.safetensors"), {}
    for prefix in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
        parts = {part: tensors[f"{prefix}.{part}"] for part in ("qweight", "qzeros", "scales")}
        inputs, outputs = (
            parts["qweight"].shape[0] * 32 // settings["bits"],
            parts["scales"].shape[1],
        )
        layer = QuantLinear(settings["bits"], settings["group_size"], inputs, outputs, bias=False)
        layer.load_state_dict(parts)
        weights[prefix] = layer(torch.eye(inputs, dtype=torch.float16)).T
    return weights


def gptqmodel_weights(folder: Path, method: str) -> dict[str, torch.Tensor]:
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    backend = BACKEND.AWQ_TORCH if method == "awq" else BACKEND.GPTQ_TORCH
    model = GPTQModel.load(str(folder), backend=backend, device="cpu", dtype=torch.float16).model
    weights = {}
    for prefix, module in model.named_modules():
        if hasattr(module, "qweight"):
            weight = (
                module.dequantize_weight()
                if method == "gptq"
                else dequantize_gemm(
                    qweight=module.qweight,
                    qzeros=module.qzeros,
                    scales=module.scales,
                    bits=4,
                    group_size=module.group_size,
                )
            )
            weights[prefix] = weight.T
    return weights


def import_vptq():
    """The package, with the import of a sentence model that it never uses blocked."""
    for name in ("sentence_transformers", "sentence_transformers.SentenceTransformer"):
        stub = types.ModuleType(name)
        stub.__spec__ = ModuleSpec(name, None)
        stub.SentenceTransformer = type("SentenceTransformer", (), {})
        sys.modules.setdefault(name, stub)
    import vptq

    return vptq


def vptq_layer(settings: dict, parts: dict[str, torch.Tensor]):
    """The `vptq` package's own layer with these tensors."""
    VQuantLinear = import_vptq().VQuantLinear
    layer = VQuantLinear(
        **settings, dtype=parts["centroids.weight"].dtype, enable_proxy_error=False
    )
    layer.load_state_dict(parts)
    return layer


def gptqmodel_vptq_layer(rows: int, columns: int, **options):
    """GPTQModel's own layer, filled at random; 5 % of the columns and what the groups leave over
    are outliers."""
    from gptqmodel.nn_modules.qlinear.vptq_torch import VPTQLinear

    layer = VPTQLinear(
        bits=2, in_features=columns, out_features=rows, dtype=torch.float32, **options
    )
    generator = torch.Generator().manual_seed(2)
    for name, tensor in layer.state_dict().items():
        if tensor.is_floating_point():
            tensor.normal_(generator=generator)
        elif name == "perm":
            tensor.copy_(torch.randperm(columns, generator=generator))
        else:
            high = options["num_centroids"][0] if name == "outlier_indices" else 1 << 31
            tensor.random_(0, high, generator=generator)
    layer._validate_loaded_state()
    return layer


def gptqmodel_vptq_config(layer) -> dict:
    from gptqmodel.quantization.config import VPTQConfig

    fields = ("npercent", "vector_lens", "enable_norm", "enable_perm", "group_num")
    config = VPTQConfig(
        num_centroids=layer.num_centroids_pair,
        num_res_centroids=layer.num_res_centroids_pair,
        **{name: getattr(layer, name) for name in fields},
    )
    return config.to_dict()
