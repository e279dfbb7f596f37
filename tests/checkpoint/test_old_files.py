"""Model folders written by versions before this one still load, and mean the same numbers."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from flyweight.checkpoint.convert import quantized_modules
from flyweight.checkpoint.formats import WRITABLE
from flyweight.checkpoint.reader import Checkpoint
from flyweight.models.decoder import Decoder

FILES = Path(__file__).parents[1] / "files"
FOLDERS = sorted(path.parent for path in FILES.glob("flyweight-*/*/numbers.json"))
TOKENS = [1, 40, 41, 50, 60, 70, 80, 90]  # as write_old_files.py has them
NEWER = {"modelopt", "trellis"}  # formats that no remembered version could write


def test_every_file_format_that_is_written_has_an_old_folder():
    written = {
        json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
        for folder in FOLDERS
    }
    assert written | NEWER == {name.removesuffix("_v2") for name in WRITABLE}
    assert {"gptq", "gptq_v2"} <= {folder.name for folder in FOLDERS}


@pytest.mark.parametrize(
    "folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}/{folder.name}"
)
def test_an_old_folder_holds_the_same_weights(folder):
    checkpoint = Checkpoint(folder)
    expected = json.loads((folder / "numbers.json").read_text())["weights"]
    assert set(quantized_modules(checkpoint)) == set(expected)
    for name, facts in expected.items():
        tensor = checkpoint.linear(name)
        assert (tensor.kind, list(tensor.shape), tensor.nbytes) == (
            facts["kind"],
            facts["shape"],
            facts["nbytes"],
        ), name
        weight = tensor.dequantize().float().contiguous() + 0.0  # −0 is 0
        assert weight[0, :4].tolist() == facts["first"], name
        assert hashlib.sha256(weight.numpy().tobytes()).hexdigest() == facts["sha256"], name


@pytest.mark.parametrize(
    "folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}/{folder.name}"
)
def test_an_old_folder_runs_and_predicts_the_same(folder):
    decoder = Decoder.load(Checkpoint(folder), device="cpu", dtype=torch.float32, exact=True)
    logits = decoder.forward_whole(torch.tensor([TOKENS]))[0, -1, :16]
    expected = torch.tensor(json.loads((folder / "numbers.json").read_text())["logits"])
    # Sums in another order round differently, and where inputs are rounded too one of them may fall
    # to its neighbour; a code that is read wrong moves the logits by far more.
    rounds_inputs = folder.name.endswith(("w8a8", "fp8", "fp8-static"))
    assert float((logits - expected).norm() / expected.norm()) < (3e-2 if rounds_inputs else 1e-4)
