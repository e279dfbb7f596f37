"""Small model folders as a version writes them, with the numbers that it reads from them:
tests/files/flyweight-VERSION.

    git worktree add --detach ../released COMMIT
    PYTHONPATH=../released/src python tests/checkpoint/write_old_files.py

Run it with the sources of the version to be remembered, once, when that version is released; the
folders are committed and never written again. `test_old_files.py` checks that later versions read
the same numbers from them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "quant"))
from tiny_model import TEXT, make_tiny_model

import flyweight
from flyweight.checkpoint.convert import quantized_modules
from flyweight.checkpoint.reader import Checkpoint
from flyweight.models.decoder import Decoder

SMALL = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    dtype="float16",
)
EXPERTS = SMALL | dict(
    model_type="qwen3_moe",
    architectures=["Qwen3MoeForCausalLM"],
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=32,
    norm_topk_prob=True,
    decoder_sparse_step=1,
)
TOKENS = [1, 40, 41, 50, 60, 70, 80, 90]

FOLDERS = {  # name → (scheme, file format or the scheme's own, changes of the model)
    "compressed-tensors-int4": ("rtn-int4", None, SMALL),
    "compressed-tensors-int4-zeros": ("awq-int4", "compressed-tensors", SMALL),
    "compressed-tensors-int3": ("gptq-int3", None, SMALL),
    "compressed-tensors-int8": ("rtn-int8", None, SMALL),
    "compressed-tensors-bfloat16": ("rtn-int4", None, SMALL | {"dtype": "bfloat16"}),
    "compressed-tensors-w8a8": ("w8a8-smooth-gptq", None, SMALL),
    "compressed-tensors-fp8": ("fp8", None, SMALL),
    "compressed-tensors-fp8-static": ("fp8-static", "compressed-tensors", SMALL),
    "compressed-tensors-sparse": ("w4a16-sparse-gptq", None, SMALL),
    "compressed-tensors-experts": ("rtn-int4", None, EXPERTS),
    "gptq": ("gptq-int4", "gptq", SMALL),
    "gptq_v2": ("awq-int4", "gptq_v2", SMALL),
    "awq": ("awq-int4", "awq", SMALL),
    "fp8": ("fp8-static", "fp8", SMALL),
    "vptq": ("vptq:v4-k16-16", "vptq", SMALL),
    "vptq-outliers": ("vptq:v8-k32-o10", "vptq", SMALL),
}


def digest(weight: torch.Tensor) -> str:
    exact = weight.float().contiguous() + 0.0  # −0 is 0
    return hashlib.sha256(exact.numpy().tobytes()).hexdigest()


def numbers(folder: Path) -> dict:
    """What the version that is running reads from a folder."""
    checkpoint = Checkpoint(folder)
    weights = {name: checkpoint.linear(name) for name in quantized_modules(checkpoint)}
    decoder = Decoder.load(Checkpoint(folder), device="cpu", dtype=torch.float32, exact=True)
    logits = decoder.forward_whole(torch.tensor([TOKENS]))
    return {
        "version": flyweight.__version__,
        "weights": {
            name: {
                "kind": weight.kind,
                "shape": list(weight.shape),
                "nbytes": weight.nbytes,
                "first": weight.dequantize()[0, :4].tolist(),
                "sha256": digest(weight.dequantize()),
            }
            for name, weight in weights.items()
        },
        "logits": logits[0, -1, :16].tolist(),
    }


def main() -> None:
    target = Path(__file__).parents[1] / "files" / f"flyweight-{flyweight.__version__}"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        text = work / "calibration.txt"
        text.write_text(TEXT)
        for name, (scheme, format, changes) in FOLDERS.items():
            torch.manual_seed(0)
            model = make_tiny_model(work / f"model-{name}", **changes)
            flyweight.quantize(
                model,
                scheme,
                work / name,
                format=format,
                calibration=str(text),
                samples=4,
                length=48,
                device="cpu",
            )
            kept = target / name
            kept.mkdir(parents=True, exist_ok=False)
            for path in sorted((work / name).glob("*.safetensors*")):
                shutil.copy(path, kept)
            shutil.copy(work / name / "config.json", kept)
            (kept / "numbers.json").write_text(json.dumps(numbers(kept), indent=1) + "\n")
            print(name, sum(path.stat().st_size for path in kept.iterdir()), "bytes")


if __name__ == "__main__":
    main()
