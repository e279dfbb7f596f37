"""Families through the engine on a GPU: captured steps of tiny models beside a float32 model of the
same random weights.

The measure is what torch's own products make of these weights in 16 bits (`benchmarks/families.py
check`). Medians: where two experts tie, torch's own mean squares in 16 bits differ fourfold between
prompts.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import families

pytestmark = pytest.mark.gpu


# Those whose layers differ most; `benchmarks/families.py check` takes all of them.
@pytest.mark.parametrize("preset", ["gemma-3-12b", "deepseek-v2-lite", "qwen3-next-80b-a3b"])
def test_steps_are_hardly_further_off_than_torch_in_16_bits(preset, monkeypatch):
    # which `check` replaces
    monkeypatch.setattr(families.engine, "open_model", families.engine.open_model)
    row = families.check(preset, "int4", tiny=True)
    assert row["captured"], row["why_not"]
    assert row["median"] < 2 * row["torch_median"], row
