"""Tables of the README that are typed by hand say what the rows beside them say."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
WORKLOADS = {
    "a token, batch 1": "decode-1",
    "a step, batch 8": "decode-8",
    "first token after 256": "prompt-256",
}
CELL = re.compile(r"(?:(?P<ours>[\d.,]+) )?\((?P<theirs>[\d.,]+)\), (?P<ratio>[\d.]+) ×")
PEERS = {"ONNX": "onnxruntime"}  # all others are llama.cpp


def tables(text: str) -> list[tuple[str, list[list[str]]]]:
    """Each table with the paragraph in front of it."""
    found = re.findall(r"((?:[^\n|]+\n)+)\n((?:\|[^\n]*\n)+)", text)
    return [
        (
            before,
            [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()],
        )
        for before, table in found
    ]


def beside(path: str) -> list[list[str]]:
    (found,) = [table for before, table in tables(README) if f"({path})" in before]
    return found


def says(printed: str, value: float) -> bool:
    """At the digits that are printed."""
    plain = printed.replace(",", "")
    digits = len(plain.partition(".")[2])
    return abs(float(plain) - value) <= 0.5 * 10**-digits * 1.001


def summaries(path: Path) -> dict[tuple[str, str, str], dict]:
    rows = map(json.loads, path.read_text().splitlines())
    return {
        (row["workload"], row["group"], row["engine"]): row
        for row in rows
        if row["bench"] == "engine_vs_peers_summary"
    }


@pytest.mark.parametrize("name", ["engine_vs_peers.jsonl", "engine_vs_peers-x86.jsonl"])
def test_the_tables_beside_llama_cpp_say_what_their_rows_say(name):
    rows = summaries(ROOT / "benchmarks" / "cpu" / name)
    header, _, *lines = beside(f"benchmarks/cpu/{name}")
    assert len(lines) == len(WORKLOADS)
    for label, *cells in lines:
        for column, text in zip(header[1:], cells, strict=True):
            bits = {"int4": "4-bit", "int8": "8-bit", "16 b": "16-bit"}[column[:4]]
            peer = next((own for word, own in PEERS.items() if word in column), "llama.cpp")
            cell = CELL.fullmatch(text)
            theirs = rows[WORKLOADS[label], bits, peer]
            ours = rows[WORKLOADS[label], bits, "flyweight"]
            assert cell, text
            assert says(cell["theirs"], theirs["ms"]), (label, column)
            assert says(cell["ratio"], theirs["speed_of_ours"]), (label, column)
            assert cell["ours"] is None or says(cell["ours"], ours["ms"]), (label, column)


def test_the_sentence_of_the_second_model_says_what_its_rows_say():
    name = "engine_vs_peers-coder.jsonl"
    rows = summaries(ROOT / "benchmarks" / "cpu" / name)
    (sentence,) = [part for part in README.split("\n\n") if f"(benchmarks/cpu/{name})" in part]
    printed = re.findall(
        r"([\d.,]+\d) (?:ms a token|a step of 8|to the first\s+token after\s+256) \(([\d.,]+\d)\)",
        sentence,
    )
    assert len(printed) == len(WORKLOADS)
    for (ours, theirs), workload in zip(printed, WORKLOADS.values(), strict=True):
        assert says(ours, rows[workload, "4-bit", "flyweight"]["ms"]), workload
        assert says(theirs, rows[workload, "4-bit", "llama.cpp"]["ms"]), workload


def test_the_table_beside_transformers_says_what_its_page_says():
    place = "benchmarks/cpu/engine_vs_transformers.md"
    page = (ROOT / place).read_text(encoding="utf-8")
    wanted = [
        [cells[1].split()[0], cells[2].split()[0], cells[3]]
        for cells in tables("\n".join(["", page]))[0][1][2:]
    ]
    assert [line[1:] for line in beside(place)[2:]] == wanted


def test_a_changed_figure_is_seen():
    assert says("1,221", 1221.4) and not says("1,221", 1221.6)
    assert says("0.72", 0.7249) and not says("0.72", 0.7262)
