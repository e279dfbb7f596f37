"""An equivalent copy of a model whose weights lie on no quantization grid.

A model imported from a 4-bit file has weights on a 4-bit grid: rounding it to 4 bits again can be
free and says nothing. Channels are multiplied by seeded random factors and divided out where they
are consumed, so that the function stays the same (to float32 rounding) and the grid is gone:

    norm weight · s  → columns of q, k, v (or gate, up) / s
    rows of up · t   → columns of down / t
    rows of v · u    → columns of o / u          (u per kv head, shared by the query heads that read
                     it)

usage: python benchmarks/quality/offgrid.py MODEL TARGET [--seed 0] [--spread 1.3]
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flyweight.checkpoint.hub import resolve


def factors(size: int, spread: float, generator: torch.Generator) -> Tensor:
    """Log-uniform in [1 / spread, spread]. A wide spread makes quantization harder and favours
    scale search.
    """
    return torch.exp(
        (torch.rand(size, generator=generator) * 2 - 1) * torch.log(torch.tensor(spread))
    )


def move_factors(
    tensors: dict[str, Tensor],
    config: dict,
    layer: int,
    *,
    spread: float,
    generator: torch.Generator,
) -> None:
    prefix, heads, kv_heads = (
        f"model.layers.{layer}.",
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    for norm, linears in (
        ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ):
        scale = factors(config["hidden_size"], spread, generator)
        tensors[f"{prefix}{norm}.weight"] *= scale
        for linear in linears:
            tensors[f"{prefix}{linear}.weight"] /= scale
    scale = factors(config["intermediate_size"], spread, generator)
    tensors[f"{prefix}mlp.up_proj.weight"] *= scale[:, None]
    tensors[f"{prefix}mlp.down_proj.weight"] /= scale
    scale = factors(kv_heads * head_dim, spread, generator)
    tensors[f"{prefix}self_attn.v_proj.weight"] *= scale[:, None]
    if (bias := tensors.get(f"{prefix}self_attn.v_proj.bias")) is not None:
        bias *= scale
    shared = (
        scale.view(kv_heads, 1, head_dim).expand(kv_heads, heads // kv_heads, head_dim).reshape(-1)
    )
    tensors[f"{prefix}self_attn.o_proj.weight"] /= shared


def make_offgrid(model: str, target: Path, *, seed: int = 0, spread: float = 1.3) -> Path:
    """`model` is anything that Flyweight can read unquantized; TARGET becomes a float32 folder."""
    source = resolve(model, dtype="float32")
    config = json.loads((source / "config.json").read_text())
    tensors: dict[str, Tensor] = {}
    for shard in sorted(source.glob("*.safetensors")):
        tensors |= {name: value.float() for name, value in load_file(shard).items()}
    generator = torch.Generator().manual_seed(seed)
    for layer in range(config["num_hidden_layers"]):
        move_factors(tensors, config, layer, spread=spread, generator=generator)
    half = target.with_name(f".{target.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and ".safetensors" not in file.name:
            shutil.copy(file, half)
    config.pop("torch_dtype", None)
    (half / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")
    save_file(
        {name: value.contiguous() for name, value in tensors.items()},
        half / "model.safetensors",
        {"format": "pt"},
    )
    half.rename(target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("target", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spread", type=float, default=1.3)
    options = parser.parse_args()
    print(make_offgrid(options.model, options.target, seed=options.seed, spread=options.spread))


if __name__ == "__main__":
    main()
