"""EXL3 (exllamav3) among the peers: its own quantizer, on the calibration tokens of all others.

Its converter runs its own engine, whose hundreds of kernels take longer to compile than a small
model to quantize. So only what quantizes is compiled (twelve files, in `build`), and the way of
its converter through a model is walked here: block by block, the inputs of attention and then of
the MLP are taken with what is in front already quantized, siblings share a Hessian and the signs of
its rotation, and every linear gets the converter's defaults (codebook "mul1", scales of output
channels). Widths that are no multiple of 128 are filled up with zeros, as exllamav3 does.

The folder that comes out holds the weights spelled out, so that the evaluator of all others reads
it; what EXL3's own file would take is in `stored.json`.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import types
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STORED = "stored.json"
WIDTH = 128  # of the rotation
SIGMA = 0.025  # of the converter
TOKENS_TOGETHER = 8  # sequences in one forward pass
# what one pass over a block takes the inputs of
STAGES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
BINDINGS = """
#include <torch/extension.h>
#include "quant/quantize.cuh"
#include "quant/hadamard.cuh"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("quantize_tiles", &quantize_tiles);
    m.def("quantize_tiles_scratch", &quantize_tiles_scratch);
    m.def("had_r_128", &had_r_128);
}
"""


def package() -> Path:
    spec = find_spec("exllamav3")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("exllamav3 is not installed: pip install --no-deps exllamav3==1.6.5")
    return Path(next(iter(spec.submodule_search_locations)))


def build(folder: Path) -> Any:
    """The compiled part of exllamav3 that quantizes: as it is installed, or else made in FOLDER."""
    if find_spec("exllamav3_ext") is not None:
        return importlib.import_module("exllamav3_ext")
    from torch.utils.cpp_extension import load

    sources = package() / "exllamav3_ext"
    folder.mkdir(parents=True, exist_ok=True)
    bindings = folder / "bindings.cpp"
    if not bindings.exists():
        bindings.write_text(BINDINGS)
    names = ["quantize.cu", "hadamard.cu", "exl3_devctx.cu"]
    names += [f"comp_units/quantize_tiles_inst_k{bits}.cu" for bits in range(1, 9)]
    names += ["comp_units/quantize_tiles_frac_inst.cu"]
    return load(
        name="exllamav3_ext",
        sources=[str(bindings), *(str(sources / "quant" / name) for name in names)],
        extra_include_paths=[str(sources)],
        extra_cflags=["-O3"],
        extra_cuda_cflags=["-O3", "--use_fast_math"],
        build_directory=str(folder),
    )


@functools.cache
def quantizer(folder: Path) -> Any:
    """`quantize_exl3`, without all that importing exllamav3 brings along. Only once in a process:
    with its modules replaced the package itself can't be found again.
    """
    extension = build(folder)
    root = package()
    for name in ("", ".util", ".modules", ".modules.quant"):
        module = types.ModuleType(f"exllamav3{name}")
        module.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[module.__name__] = module
    bound = types.ModuleType("exllamav3.ext")
    bound.exllamav3_ext = extension  # type: ignore[attr-defined]
    sys.modules[bound.__name__] = bound
    stand_in("exllamav3.util.memory", free_mem=lambda: None, list_gpu_tensors=lambda: None)
    stand_in("exllamav3.util.progress", ProgressBar=Silent)
    stand_in("exllamav3.util.tensor", save_tensor_image=lambda *_: None)
    sys.modules["exllamav3.util"].cuda_sync_active = torch.cuda.synchronize  # type: ignore[attr-defined]
    from exllamav3.modules.quant.exl3_lib.quantize import quantize_exl3

    return quantize_exl3


def stand_in(name: str, **values: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(values)
    sys.modules[name] = module


class Silent:
    """In the place of a progress bar."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def update(self, _: int) -> None:
        pass

    def new_task(self, *_: Any) -> None:
        pass


class Enough(Exception):
    """The first block has been reached."""


def first_inputs(model: nn.Module, blocks: nn.ModuleList, tokens: Tensor) -> Iterator[tuple]:
    """(hidden state, other arguments) that the first block gets, batch by batch."""
    caught: list[tuple] = []

    def catch(_: nn.Module, arguments: tuple, named: dict[str, Any]) -> None:
        caught.append((arguments[0] if arguments else named.pop("hidden_states"), named))
        raise Enough

    hook = blocks[0].register_forward_pre_hook(catch, with_kwargs=True)
    for batch in tokens.split(TOKENS_TOGETHER):
        try:
            model(batch.to(next(model.parameters()).device), use_cache=False)
        except Enough:
            yield caught.pop()
    hook.remove()


class Hessians:
    """Sums of xᵀ·x by input; linears that read the same tensor share one."""

    def __init__(self, linears: dict[str, nn.Linear]) -> None:
        self.by_linear: dict[str, dict[str, Any]] = {}
        self.last: tuple[Tensor, dict[str, Any]] | None = None
        self.hooks = [
            linear.register_forward_pre_hook(self.watch(name)) for name, linear in linears.items()
        ]

    def watch(self, name: str) -> Any:
        def see(_: nn.Module, arguments: tuple) -> None:
            x = arguments[0]
            if self.last is not None and self.last[0] is x:
                self.by_linear[name] = self.last[1]
                return
            rows = pad(x.flatten(0, -2).float(), dim=1)
            data = self.by_linear.setdefault(name, fresh(rows.shape[1], x.device))
            data["H"].addmm_(rows.T, rows)
            data["count"] += len(rows)
            self.last = (x, data)

        return see

    def leave(self) -> None:
        for hook in self.hooks:
            hook.remove()


def fresh(columns: int, device: torch.device) -> dict[str, Any]:
    hessian = torch.zeros(columns, columns, device=device)
    return {"H": hessian, "count": 0, "finalized": False, "device": device, "num_total": 0}


def pad(x: Tensor, *, dim: int) -> Tensor:
    """Filled up with zeros to a multiple of the rotation's width."""
    missing = -x.shape[dim] % WIDTH
    return F.pad(x, (0, missing) if dim == 1 else (0, 0, 0, missing)) if missing else x


@torch.no_grad()
def exl3(
    scheme: str, model: Path, tokens: Tensor, output: Path, *, device: str, seed: int, steps: int
) -> Path:
    """`scheme` is exl3-3bit or the like."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantize = quantizer(model.parent / "exl3-built")
    bits = int(scheme.removeprefix("exl3-").removesuffix("bit"))
    torch.manual_seed(seed)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
    blocks = loaded.model.layers
    stored = sum(p.numel() for n, p in loaded.named_parameters() if "_proj.weight" not in n) * 32
    spelled, packed, number = 0, 0, 0
    batches = list(first_inputs(loaded, blocks, tokens))
    for block in blocks:
        for stage in STAGES:
            linears = {name: block.get_submodule(name) for name in stage}
            found = Hessians(linears)
            for hidden, named in batches:
                block(hidden, **named)
            found.leave()
            for name, linear in linears.items():
                arguments = {
                    "seed": number,
                    "K": bits,
                    "devices": [torch.device(device).index or 0],
                }
                arguments |= {"device_ratios": None, "apply_out_scales": True, "mul1": True}
                arguments |= {"sigma_reg": SIGMA, "no_pack": True}
                rows, columns = linear.weight.shape
                weight = pad(pad(linear.weight.T.float(), dim=1), dim=0).contiguous()
                made, _, _ = quantize(weight, found.by_linear[name], arguments, True)
                linear.weight.copy_(made[:columns, :rows].T)
                spelled += rows * columns
                packed += bits * weight.numel() + 16 * sum(weight.shape)
                number += 1
        batches = [(unwrapped(block(hidden, **named)), named) for hidden, named in batches]
    loaded.save_pretrained(output)
    AutoTokenizer.from_pretrained(model).save_pretrained(output)
    facts = {"size_gb": round((stored + packed) / 8e9, 4), "bits_per_weight": packed / spelled}
    (output / STORED).write_text(json.dumps(facts) + "\n")
    return output


def unwrapped(found: Any) -> Tensor:
    return found[0] if isinstance(found, tuple) else found
