"""The same GGUF file in Flyweight and in llama.cpp: is the likeliest next token the same?

    python benchmarks/cpu/llama_agreement.py model.gguf … --peer PYTHON --out rows.jsonl

Both read the same 512 tokens of a held-out text and say of each position which token comes next.
llama.cpp rounds activations to 8 bits, so close calls differ; a row says how many positions are
alike where the two best logits of ours are `apart` or more. Of a file with 16-bit weights
(`flyweight convert MODEL -o model.gguf --format gguf --dtype F16`) neither side rounds activations
to 8 bits, so that row shows what is left. PYTHON is an interpreter with llama-cpp-python (default:
this one).
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
from flyweight.models.decoder import Decoder

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
"""


def peer_logits(python: str, file: Path, tokens: list[int]) -> tuple[torch.Tensor, str]:
    with tempfile.TemporaryDirectory() as folder:
        ids = Path(folder, "ids.npy")
        out = Path(folder, "logits.npy")
        np.save(ids, np.array(tokens))
        command = [python, "-c", PEER, str(file), str(ids), str(out)]
        told = subprocess.run(command, check=True, capture_output=True, text=True)
        return torch.from_numpy(np.load(out)), told.stdout.strip()


def compare(file: Path, python: str) -> dict[str, Any]:
    checkpoint, tokenizer = open_model(str(file), torch.device("cpu"))
    assert tokenizer is not None
    tokens = tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:POSITIONS]
    decoder = Decoder.load(checkpoint, device="cpu", dtype=torch.float32, exact=True)
    with torch.inference_mode():
        ours = decoder.forward_whole(torch.tensor([tokens]))[0].float()
    theirs, version = peer_logits(python, file, tokens)
    theirs = theirs[:, : ours.shape[1]]
    best = ours.topk(2).values
    margin = best[:, 0] - best[:, 1]
    alike = ours.argmax(-1) == theirs.argmax(-1)
    following = torch.tensor(tokens[1:])
    loss = torch.nn.functional.cross_entropy
    return dict(
        kind="llama.cpp agreement",
        file=file.name,
        positions=len(tokens),
        alike={str(apart): int(alike[margin >= apart].sum()) for apart in APART},
        of={str(apart): int((margin >= apart).sum()) for apart in APART},
        perplexity=round(float(loss(ours[:-1], following).exp()), 4),
        their_perplexity=round(float(loss(theirs[:-1], following).exp()), 4),
        llama_cpp_python=version,
        machine=platform.machine(),
        torch=torch.__version__,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument("--out", type=Path, default=Path("llama-agreement.jsonl"))
    options = parser.parse_args()
    for file in options.files:
        row = compare(file, options.peer)
        print(json.dumps(row), flush=True)
        with options.out.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
