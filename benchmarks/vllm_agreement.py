"""Does vLLM read what Flyweight writes? The same text, teacher-forced, through both; where they differ, by how much.

    python benchmarks/vllm_agreement.py --model smollm2-135m --text valid.txt --out rows.jsonl

Each folder is rounded to nearest and written in one of the formats; vLLM gives the log-probabilities of a prompt of 512
tokens (`prompt_logprobs`), Flyweight those of its exact path (weights dequantized to float32, activations quantized only
where the format says so). vLLM computes in float16, so near-ties may fall the other way: they agree where every position
with another likeliest token has its two best within TIES of each other, and the text's own tokens differ by less than
that on average. int8 and float8 activations turn a rounding difference into a whole step: their bound is wider.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch
from torch import Tensor

from flyweight.bench.rows import environment_row, make_row
from flyweight.checkpoint.reader import Checkpoint
from flyweight.commands.evaluate import encode
from flyweight.models.decoder import Decoder
from flyweight.quant.quantize import quantize
from flyweight.quant.recipe import Recipe

# name → (file format, recipe)
FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq": ("gptq", {"bits": 4}),
    "awq": ("awq", {"bits": 4, "symmetric": False}),
    "w4a16": ("compressed-tensors", {"bits": 4}),
    "w8a16": ("compressed-tensors", {"bits": 8, "group_size": -1}),
    "w8a8": ("compressed-tensors", {"bits": 8, "group_size": -1, "activations": "int8"}),
    "fp8": ("compressed-tensors", {"solver": "fp8"}),
}
TIES = {"w8a8": 0.5, "fp8": 0.5}  # natural log; others 0.1
POSITIONS = 512


def ours(folder: Path, ids: list[int], device: str) -> Tensor:
    """Log-probabilities [positions − 1, vocabulary] of what follows each token."""
    torch.set_float32_matmul_precision("highest")
    model = Decoder.load(Checkpoint(folder), device=device, dtype=torch.float32, exact=True)
    return torch.log_softmax(model.forward_whole(torch.tensor([ids], device=device))[0, :-1], -1).cpu()


def theirs(folder: Path, ids: list[int], dtype: str) -> list[dict[int, tuple[int, float]]]:
    """By position: token → (rank, log-probability) of the two likeliest and of the text's own."""
    from vllm import LLM, SamplingParams

    engine = LLM(model=str(folder), dtype=dtype, enforce_eager=True, max_model_len=2 * POSITIONS, max_num_seqs=4,
                 gpu_memory_utilization=0.25, enable_prefix_caching=False, disable_log_stats=True)
    output = engine.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2),
                             use_tqdm=False)[0]
    found = [{token: (item.rank, item.logprob) for token, item in place.items()} for place in output.prompt_logprobs[1:]]
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return found


def compare(expected: Tensor, found: list[dict[int, tuple[int, float]]], ids: list[int], ties: float) -> dict[str, Any]:
    likeliest = [next(token for token, (rank, _) in place.items() if rank == 1) for place in found]
    two = expected.topk(2, -1)
    gaps = (two.values[:, 0] - two.values[:, 1]).tolist()
    different = [i for i, token in enumerate(likeliest) if token != int(two.indices[i, 0])]
    own = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    moved = [abs(place[token][1] - value) for place, token, value in zip(found, ids[1:], own, strict=True)]
    mean = sum(moved) / len(moved)
    return {"positions": len(found) + 1, "same_argmax": len(found) - len(different),
            "first_difference": {"position": different[0] + 1, "top2_gap": round(gaps[different[0]], 5)} if different else None,
            "largest_gap_at_difference": round(max((gaps[i] for i in different), default=0.0), 5),
            "logprob_difference_mean": round(mean, 6), "logprob_difference_max": round(max(moved), 6), "ties": ties,
            "agrees": mean < ties and all(gaps[i] < ties for i in different)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--folders", nargs="+", default=list(FOLDERS), choices=list(FOLDERS))
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--work", type=Path, default=Path("vllm-agreement.work"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    environment = environment_row(options.device)
    rows = [environment]
    for name in options.folders:
        form, settings = FOLDERS[name]
        shared = dict(tool="vllm", model=options.model, scheme=name, format=form, weights="trained", dtype=options.dtype)
        try:
            folder = options.work / name
            recipe = Recipe.from_dict({"name": name, "solver": "rtn"} | settings, name)
            quantize(options.model, output=folder, recipe=recipe, format=form, device=options.device, overwrite=True)
            checkpoint = Checkpoint(folder)
            ids = encode(checkpoint.tokenizer(), options.text.read_text(encoding="utf-8"))[0][:POSITIONS]
            facts = compare(ours(folder, ids, options.device), theirs(folder, ids, options.dtype), ids, TIES.get(name, 0.1))
            row = make_row("quality", environment["id"], checkpoint=checkpoint.hash(), text=options.text.name, **shared, **facts)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:800]
            row = make_row("quality", environment["id"], status="failed", reason=reason, **shared)
        print(json.dumps(row), flush=True)
        rows.append(row)
    with options.out.open("a") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
