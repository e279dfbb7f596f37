"""The same GGUF file in Flyweight and in llama.cpp: is the likeliest next token the same?

    python benchmarks/cpu/llama_agreement.py model.gguf … --peer PYTHON --out rows.jsonl

Both read the same 512 tokens of a held-out text and say of each position which token comes next.
llama.cpp rounds activations to 8 bits in groups of 32, and so do the CPU's kernels here: `served`
is what users of both run. `exact` are our products without that rounding. A row says how many
positions are alike where the two best logits of ours are `apart` or more. How llama.cpp multiplies
depends on the processor (`machine`, `cpu`): two of them do not agree with each other everywhere
either. Of a file with 16-bit weights (`flyweight convert MODEL -o model.gguf --format gguf --dtype
F16`) neither side rounds activations to 8 bits, so that row shows what is left. PYTHON is an
interpreter with llama-cpp-python (default: this one).
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flyweight.engine.loading import open_model
from flyweight.machine import cpu_name
from flyweight.models import native
from flyweight.models.config import ModelConfig
from flyweight.models.decoder import Decoder
from flyweight.models.kv_scheme import KVScheme
from flyweight.quant.subject import NativeWhole

TEXT = Path(__file__).parents[2] / "src/flyweight/quant/held_out.txt"
POSITIONS = 512
APART = (0.0, 0.1, 0.5)
PEER = """
import sys
import numpy, llama_cpp
path, tokens, out = sys.argv[1:]
ids = numpy.load(tokens).tolist()
model = llama_cpp.Llama(path, n_ctx=len(ids) + 8, n_batch=len(ids), logits_all=True, verbose=False)
model.eval(ids)
numpy.save(out, numpy.array(model.scores[: len(ids)], dtype=numpy.float32))
print(llama_cpp.__version__)
print(llama_cpp.llama_print_system_info().decode())
"""


def peer_logits(python: str, file: Path, tokens: list[int]) -> tuple[torch.Tensor, list[str]]:
    """Of every position; its version, and the instructions that it was compiled for."""
    with tempfile.TemporaryDirectory() as folder:
        ids = Path(folder, "ids.npy")
        out = Path(folder, "logits.npy")
        np.save(ids, np.array(tokens))
        command = [python, "-c", PEER, str(file), str(ids), str(out)]
        told = subprocess.run(command, check=True, capture_output=True, text=True)
        return torch.from_numpy(np.load(out)), told.stdout.strip().splitlines()


def compare(file: Path, python: str) -> dict[str, Any]:
    checkpoint, tokenizer = open_model(str(file), torch.device("cpu"))
    assert tokenizer is not None
    tokens = tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:POSITIONS]
    theirs, (version, compiled_for) = peer_logits(python, file, tokens)
    return dict(
        kind="llama.cpp agreement",
        file=file.name,
        positions=len(tokens),
        served=beside(our_logits(checkpoint, tokens, exact=False), theirs, tokens),
        exact=beside(our_logits(checkpoint, tokens, exact=True), theirs, tokens),
        their_perplexity=perplexity(theirs, tokens),
        llama_cpp_python=version,
        llama_cpp_compiled_for=compiled_for,
        machine=platform.machine(),
        cpu=cpu_name(),
        torch=torch.__version__,
    )


def our_logits(checkpoint: Any, tokens: list[int], *, exact: bool) -> torch.Tensor:
    """By the kernels of the CPU, where the model is one of theirs."""
    config = ModelConfig.from_dict(checkpoint.config)
    decoder: Decoder | NativeWhole
    if native.why_not(config, torch.float32) is None:
        decoder = NativeWhole(native.load(checkpoint, exact=exact), KVScheme())
    else:
        decoder = Decoder.load(checkpoint, device="cpu", dtype=torch.float32, exact=exact)
    with torch.inference_mode():
        return decoder.forward_whole(torch.tensor([tokens]))[0].float()


def beside(ours: torch.Tensor, theirs: torch.Tensor, tokens: list[int]) -> dict[str, Any]:
    """How many likeliest tokens are alike, by how far apart our two best are."""
    theirs = theirs[:, : ours.shape[1]]
    best = ours.topk(2).values
    margin = best[:, 0] - best[:, 1]
    alike = ours.argmax(-1) == theirs.argmax(-1)
    divergence = torch.nn.functional.kl_div(
        theirs.log_softmax(-1), ours.log_softmax(-1), reduction="batchmean", log_target=True
    )
    return dict(
        alike={str(apart): int(alike[margin >= apart].sum()) for apart in APART},
        of={str(apart): int((margin >= apart).sum()) for apart in APART},
        divergence=round(float(divergence), 6),
        perplexity=perplexity(ours, tokens),
    )


def perplexity(logits: torch.Tensor, tokens: list[int]) -> float:
    following = torch.tensor(tokens[1:])
    return round(float(torch.nn.functional.cross_entropy(logits[:-1], following).exp()), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument("--library", help="whose llama.cpp PYTHON loads, where it is not its own")
    parser.add_argument("--out", type=Path, default=Path("llama-agreement.jsonl"))
    options = parser.parse_args()
    for file in options.files:
        row = compare(file, options.peer)
        if options.library:
            row["llama_cpp_library"] = options.library
        print(json.dumps(row), flush=True)
        with options.out.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
