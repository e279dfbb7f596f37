"""Which cards one row would keep busy: the table of docs/add-a-gpu.md."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import pytest
import saturation


def test_the_page_has_the_table_of_the_committed_rows():
    page = saturation.PAGE.read_text()
    assert page == saturation.written(page), "python benchmarks/saturation.py --write"


def test_a_card_gives_its_bandwidth_shared_out_over_cycles_and_sms():
    card = saturation.Card("made up", "sm_80", 1000.0, 100, 1000)
    assert card.bytes_a_cycle == pytest.approx(10.0)


def test_the_last_chain_of_one_row_counts(tmp_path):
    environment = {
        "bench": "environment",
        "device": "NVIDIA H200 as sm_80 (108 SMs)",
        "clocks_most": "2000 MHz, 3201 MHz",
    }
    kernel = {
        "bench": "kernel",
        "environment": "a",
        "format": "w4a16",
        "rows": 1,
        "chain": "qwen3-8b",
        "gb_s": 2160.0,
    }
    rows = [
        environment | {"id": "a", "processors": 108},
        kernel,
        kernel | {"rows": 8},
        kernel | {"chain": None},
        environment | {"id": "b", "processors": 54},
        kernel | {"environment": "b"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows[:4])))
    assert saturation.reached(path)["sm_80"].bytes_a_cycle == pytest.approx({"int4": 10.0})
    path.write_text("\n".join(map(json.dumps, rows)))
    assert saturation.reached(path)["sm_80"].bytes_a_cycle == pytest.approx({"int4": 20.0})
