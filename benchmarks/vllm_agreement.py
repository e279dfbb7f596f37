"""Does vLLM read what Flyweight writes? The same text, teacher-forced, through both; where they
differ, by how much.

    # saved row by row
    python benchmarks/vllm_agreement.py --model smollm2-135m --text valid.txt --out rows.jsonl

Rows name whose kernels multiplied: `vllm-plugin` with ours, `vllm` without (`FLYWEIGHT_VLLM=off`).
`--steps make` writes the folders and our own half, which `--steps compare` then finds in `--work`.
Each folder is rounded to nearest and written in one of the formats; vLLM gives the
log-probabilities of a prompt of 512 tokens (`prompt_logprobs`), Flyweight those of its exact path
(weights dequantized to float32, activations quantized only where the format says so). vLLM computes
in float16, so near-ties may fall the other way: they agree where every position with another
likeliest token has its two best within TIES of each other, and the text's own tokens differ by less
than that on average.

int8 and float8 activations turn a rounding difference into a whole step, one step into many in the
next layer, and after thirty layers two orders of summation in float32 lie as far apart as quantized
and unquantized activations do. So for them the bound is measured: ours again, with the inputs of
every linear rounded to vLLM's type before they are quantized, and vLLM may be SLACK times as far
from ours as that is (`floor_…` in the rows).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# is compiled for minutes at the first start, and samples nothing here
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import torch
from torch import Tensor
from vllm_plugin import architectures, look_at

from flyweight.bench.rows import ResultFile, environment_row, make_row
from flyweight.checkpoint.reader import Checkpoint
from flyweight.models.decoder import Decoder
from flyweight.plugins import vllm as plugin
from flyweight.quant.quantize import quantize
from flyweight.quant.recipe import Recipe
from flyweight.quant.subject import encode

# name → (file format, recipe)
FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq": ("gptq", {"bits": 4}),
    "awq": ("awq", {"bits": 4, "symmetric": False}),
    "w4a16": ("compressed-tensors", {"bits": 4}),
    "w8a16": ("compressed-tensors", {"bits": 8, "group_size": -1}),
    "w8a8": ("compressed-tensors", {"bits": 8, "group_size": -1, "activations": "int8"}),
    "fp8": ("compressed-tensors", {"solver": "fp8"}),
    # read by our plug-in alone: parts of one layer in several kinds
    "mixed": ("compressed-tensors", {"bits": 4, "layers": [{"match": "*.v_proj", "bits": 8}]}),
}
TIES = 0.1  # natural log
SLACK = 1.5
ACTIVATIONS = ("w8a8", "fp8")
POSITIONS = 512
STEPS = ("make", "compare")


def ours(folder: Path, ids: list[int], device: str, rounded: torch.dtype | None = None) -> Tensor:
    """Log-probabilities [positions − 1, vocabulary] of what follows each token. `rounded`: the type
    of all linears' inputs.
    """
    torch.set_float32_matmul_precision("highest")
    model = Decoder.load(Checkpoint(folder), device=device, dtype=torch.float32, exact=True)
    for block in model.blocks if rounded else ():
        for linear in block.linears.values():
            linear.substitute(
                lambda x, segments=linear.segments: torch.cat(
                    [segment(x.to(rounded).to(x.dtype)) for segment in segments], -1
                )
            )
    return torch.log_softmax(
        model.forward_whole(torch.tensor([ids], device=device))[0, :-1], -1
    ).cpu()


Places = list[dict[int, tuple[int, float]]]  # by position: token → (rank, log-probability)


def theirs(folder: Path, ids: list[int], dtype: str) -> tuple[Places, dict[str, int]]:
    """Of the two likeliest tokens and of the text's own; and which classes multiplied, how many
    linears each.
    """
    from vllm import LLM, SamplingParams

    small = dict(kv_cache_memory_bytes=1 << 30) if torch.cuda.is_available() else {}
    look_at(architectures(str(folder)))
    engine = LLM(
        model=str(folder),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=2 * POSITIONS,
        max_num_seqs=4,
        max_num_batched_tokens=2 * POSITIONS,
        gpu_memory_utilization=0.05,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **small,
    )
    output = engine.generate(
        [{"prompt_token_ids": ids}],
        SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2),
        use_tqdm=False,
    )[0]
    found = [
        {token: (item.rank, item.logprob) for token, item in place.items()}
        for place in output.prompt_logprobs[1:]
    ]
    kernels = engine.apply_model(plugin.kernels_of)[0]
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return found, kernels


def far(expected: Tensor, likeliest: list[int], own: list[float], ids: list[int]) -> dict[str, Any]:
    """How far another evaluation is: its likeliest token by position, and its log-probability of
    the text's own tokens.
    """
    two = expected.topk(2, -1)
    gaps = (two.values[:, 0] - two.values[:, 1]).tolist()
    different = [i for i, token in enumerate(likeliest) if token != int(two.indices[i, 0])]
    moved = [abs(a - b) for a, b in zip(own, own_tokens(expected, ids), strict=True)]
    return {
        "same_argmax": len(likeliest) - len(different),
        "first_difference": {"position": different[0] + 1, "top2_gap": round(gaps[different[0]], 5)}
        if different
        else None,
        "largest_gap_at_difference": round(max((gaps[i] for i in different), default=0.0), 5),
        "logprob_difference_mean": round(sum(moved) / len(moved), 6),
        "logprob_difference_max": round(max(moved), 6),
    }


def own_tokens(logs: Tensor, ids: list[int]) -> list[float]:
    found: list[float] = logs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return found


def compare(
    expected: Tensor, found: Places, ids: list[int], rounded: Tensor | None = None
) -> dict[str, Any]:
    """`rounded`: ours once more with rounded inputs, which sets the bound."""
    likeliest = [next(token for token, (rank, _) in place.items() if rank == 1) for place in found]
    facts = far(
        expected,
        likeliest,
        [place[token][1] for place, token in zip(found, ids[1:], strict=True)],
        ids,
    )
    mean, gap = TIES, TIES
    if rounded is not None:
        floor = far(expected, rounded.argmax(-1).tolist(), own_tokens(rounded, ids), ids)
        facts |= {f"floor_{name}": value for name, value in floor.items()}
        mean, gap = (
            SLACK * floor["logprob_difference_mean"],
            SLACK * floor["largest_gap_at_difference"],
        )
    agrees = facts["logprob_difference_mean"] <= mean and facts["largest_gap_at_difference"] <= gap
    return facts | {
        "positions": len(ids),
        "bound_mean": round(mean, 5),
        "bound_gap": round(gap, 5),
        "agrees": agrees,
    }


@dataclass(frozen=True, eq=False)
class Made:
    """A folder, the text and what our exact path says of it."""

    folder: Path
    ids: list[int]
    expected: Tensor
    rounded: Tensor | None  # the same with rounded inputs, where activations have 8 bits


def make(name: str, options: argparse.Namespace) -> Made:
    form, settings = FOLDERS[name]
    folder = options.work / name
    recipe = Recipe.from_dict({"name": name, "solver": "rtn"} | settings, name)
    quantize(
        options.model,
        output=folder,
        recipe=recipe,
        format=form,
        device=options.device,
        overwrite=True,
    )
    text = options.text.read_text(encoding="utf-8")
    ids = encode(Checkpoint(folder).tokenizer(), text)[0][:POSITIONS]
    rounded = None
    if name in ACTIVATIONS:
        rounded = ours(folder, ids, options.device, getattr(torch, options.dtype))
    return Made(folder, ids, ours(folder, ids, options.device), rounded)


def kept(name: str, options: argparse.Namespace) -> Path:
    """Where what was made stays between a run that makes it and one that compares."""
    found: Path = options.work / f"{name}.made"
    return found


def compared(name: str, options: argparse.Namespace) -> dict[str, Any]:
    place = kept(name, options)
    if "make" in options.steps:
        made = make(name, options)
    else:
        made = Made(**torch.load(place, weights_only=False))
    if "compare" not in options.steps:
        torch.save(vars(made), place)
        return {"made": str(made.folder)}
    found, kernels = theirs(made.folder, made.ids, options.dtype)
    facts = compare(made.expected, found, made.ids, made.rounded)
    checkpoint = Checkpoint(made.folder).hash()
    return facts | dict(linear_kernels=kernels, checkpoint=checkpoint, text=options.text.name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--folders", nargs="+", default=list(FOLDERS), choices=list(FOLDERS))
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--work", type=Path, default=Path("vllm-agreement.work"))
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=STEPS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    active = bool(plugin.wanted_parts(os.environ.get(plugin.SETTING, "")))
    environment, file = environment_row(options.device), ResultFile(options.out)
    if "compare" in options.steps:
        file.append([environment])
        (plugin.register if active else plugin.withdraw)()
    for name in options.folders:
        shared = dict(
            check="vllm",
            tool="vllm",
            model=Path(options.model).name,
            scheme=name,
            format=FOLDERS[name][0],
            weights="trained",
            dtype=options.dtype,
            backend="vllm-plugin" if active else "vllm",
        )
        try:
            row = make_row("quality", environment["id"], **shared, **compared(name, options))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:800]
            row = make_row("quality", environment["id"], status="failed", reason=reason, **shared)
        if "compare" in options.steps:
            file.append([row])
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
