"""Folders made by other packages (see tests/golden/README.md) read bit for bit as those packages
read them."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from flyweight.checkpoint import Checkpoint
from flyweight.checkpoint.convert import quantized_modules

GOLDEN = Path(__file__).parents[2] / "golden"
FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/weights.json"))


def test_every_package_is_represented():
    assert {name.split("-")[0] for name in FOLDERS} == {"llm", "auto", "gptqmodel", "vptq"}


@pytest.mark.parametrize("name", FOLDERS)
def test_golden_folder_reads_bit_for_bit(name):
    checkpoint = Checkpoint(GOLDEN / name)
    expected = json.loads((GOLDEN / name / "weights.json").read_text())["weights"]
    assert set(quantized_modules(checkpoint)) == set(expected)
    for prefix, facts in expected.items():
        weight = (
            checkpoint.linear(prefix).dequantize(getattr(torch, facts["dtype"])) + 0.0
        )  # −0 is 0
        assert weight.flatten()[:4].float().tolist() == facts["first"], prefix
        assert (
            hashlib.sha256(weight.float().contiguous().numpy().tobytes()).hexdigest()
            == facts["sha256"]
        ), prefix
    checkpoint.check_used()
