"""What checks allow: more where a format rounds more, and what right kernels have needed so far."""

import json
import math
from pathlib import Path

import pytest
import torch

from flyweight.tensors import Float8, Int8Channel
from flyweight.tensors.rounding import (
    attention_bound,
    input_rounding,
    product_bound,
    rounding,
)

ROWS = Path(__file__).parents[1] / "benchmarks" / "h200" / "kernels.jsonl"
KINDS = {"bf16": "plain", "w4a16": "int", "w8a16": "int", "w8a8": "w8a8", "fp8": "fp8"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rounding_is_that_of_torch(dtype):
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    error = (x.to(dtype).double() - x).norm() / x.norm()
    assert float(error) == pytest.approx(rounding(dtype), rel=0.1)


@pytest.mark.parametrize("tensor", [Int8Channel, Float8])
def test_the_rounding_of_inputs_is_that_of_the_format(tensor):
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    lost = tensor.random((8, 4096)).quantize_input(x) - x
    assert float(lost.norm() / x.norm()) == pytest.approx(input_rounding(tensor.kind), rel=0.15)


def test_a_format_that_rounds_more_is_allowed_more():
    bounds = [product_bound(kind, torch.bfloat16) for kind in ("plain", "int", "vptq")]
    assert bounds == sorted(bounds) and bounds[0] < bounds[-1] < 0.01
    chains = [product_bound(kind, torch.bfloat16, products=4) for kind in ("int", "w8a8", "fp8")]
    assert chains == sorted(chains) and chains[-1] < 0.2
    assert product_bound("int", torch.float16) < product_bound("int", torch.bfloat16) / 4
    assert product_bound("somebody's own", torch.bfloat16) == product_bound("vptq", torch.bfloat16)


def test_measured_kernels_are_within_their_bounds():
    measured = 0
    for line in ROWS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["bench"] != "kernel" or row["status"] != "ok" or not row.get("relative_error"):
            continue
        bound = attention_bound(torch.bfloat16)
        if row["format"] != "attention":
            kind = KINDS.get(row["format"], "vptq" if row["format"] == "vptq" else "sparse24")
            products = 4 if row.get("chain") else 1
            bound = product_bound(kind, getattr(torch, row["dtype"]), products=products)
        assert row["relative_error"] <= bound, row
        measured += math.isfinite(bound)
    assert measured > 100
