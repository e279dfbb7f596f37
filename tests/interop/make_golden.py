"""Make `tests/golden/` again with the real packages: `python tests/interop/make_golden.py [NAME…]`.

Each folder is a one-layer model cut down to its quantized modules; `weights.json` has the SHA-256
of each weight as the package that wrote it dequantizes it (float32 bytes, rows first), its dtype
and its first values.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path

import packages
import torch
from safetensors.torch import load_file, save_file

GOLDEN = Path(__file__).parent.parent / "golden"
VERSIONS = (
    "torch",
    "transformers",
    "compressed-tensors",
    "llmcompressor",
    "auto-round",
    "gptqmodel",
    "vptq",
)


def digest(weight: torch.Tensor) -> dict:
    weight = weight.detach() + 0.0  # a product with the identity has no −0
    return {
        "dtype": str(weight.dtype).removeprefix("torch."),
        "first": weight.flatten()[:4].float().tolist(),
        "sha256": hashlib.sha256(weight.float().contiguous().numpy().tobytes()).hexdigest(),
    }


def save(
    name: str, tensors: dict[str, torch.Tensor], config: dict, weights: dict[str, torch.Tensor]
) -> None:
    folder = GOLDEN / name
    folder.mkdir(parents=True, exist_ok=True)
    ordered = {key: tensor.contiguous() for key, tensor in sorted(tensors.items())}
    save_file(ordered, folder / "model.safetensors", {"format": "pt"})
    config.get("quantization_config", {}).pop("meta", None)  # paths of the machine it was made on
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    made = {
        "made_with": {package: importlib.metadata.version(package) for package in VERSIONS},
        "weights": {prefix: digest(weight) for prefix, weight in weights.items()},
    }
    (folder / "weights.json").write_text(json.dumps(made, indent=1) + "\n")


def from_maker(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = packages.make(name, Path(folder), hidden=32, layers=1)
        tensors = {
            key: tensor
            for key, tensor in load_file(made / "model.safetensors").items()
            if "_proj." in key
        }
        config = json.loads((made / "config.json").read_text())
        save(
            name,
            tensors,
            {key: config[key] for key in ("model_type", "quantization_config")},
            packages.own_weights(name, made),
        )


def vptq() -> None:
    """50 × 64 with two groups, a residual, outliers, a permutation and norms, packed by the package
    itself."""
    packages.import_vptq()
    from vptq.utils.pack import pack_index

    generator = torch.Generator().manual_seed(0)

    def pick(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator).to(torch.uint16)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    settings = dict(
        in_features=64,
        out_features=50,
        vector_lens=[4, 8],
        num_centroids=[8, 64],
        num_res_centroids=[-1, 16],
        group_num=2,
        group_size=30,
        outlier_size=4,
        indices_as_float=False,
        enable_norm=True,
        enable_perm=True,
        is_indice_packed=True,
        bias=False,
    )
    parts = {
        "indices": pack_index(pick(64, 2, 7, 30), 6, pick(16, 2, 7, 30), 4),
        "centroids.weight": normal(2, 512),
        "res_centroids.weight": normal(2, 128),
        "outlier_indices": pick(8, 1, 13, 4).view(torch.int16),
        "outlier_centroids.weight": normal(1, 32),
        "perm": torch.randperm(64, generator=generator).to(torch.int16),
        "weight_scale": normal(64),
        "weight_bias": normal(64),
    }
    weight = packages.vptq_layer(settings, parts)(torch.eye(64)).T
    config = {"quant_method": "vptq", "config_for_layers": {"layer": settings}}
    tensors = {f"layer.{key}": tensor for key, tensor in parts.items()}
    save("vptq", tensors, {"model_type": "llama", "quantization_config": config}, {"layer": weight})


if __name__ == "__main__":
    small = [
        name for name in packages.MAKERS if name != "gptqmodel-awq"
    ]  # its search for a clip wants 64 outputs
    for wanted in sys.argv[1:] or [*small, "vptq"]:
        vptq() if wanted == "vptq" else from_maker(wanted)
