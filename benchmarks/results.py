"""Everything that is shown of the rows in benchmarks/h200/, made again: `make results`.

    docs/results/h200.md, .html      all rows
    docs/results/NNN.md, .rst        the rows of NNN-*.jsonl in the layout of the document of that number
    README.md, docs/performance.md, docs/quantize.md   what stands between `<!-- rows: NAME -->` and `<!-- end -->`, by BLOCKS
    docs/results/decode-speed-at-batch-1.png   the picture of the README

Works with whatever files there are, and says which rows are missing and which were measured by code that has changed since
(covered.py). No figure in those places is typed by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent / "workshop"))
sys.path.insert(0, str(Path(__file__).parent / "quality"))
import table
from covered import latest, missing, provenance

from flyweight.commands.report import write
from flyweight.report import performance
from flyweight.report.blocks import Block, Figure, Heading, Items, Paragraph, Point, Series, Table
from flyweight.report.document import View, build
from flyweight.report.figures import of_a_peer
from flyweight.report.plot import draw
from flyweight.report.read import read, read_one
from flyweight.report.records import Record
from flyweight.report.render import terminal
from flyweight.report.rows import Results

ROWS, DOCS = Path("benchmarks/h200"), Path("docs/results")
DOCUMENTS = {"000": ".md", "001": ".md", "002": ".md", "003": ".md", "004": ".rst"}
MODEL, SCHEMES = "qwen3-8b", ("bf16", "w8a8", "int4", "vptq")
HEADLINE = (  # workload, metric, what it is called, digits
    ("decode_bound", "decode_tok_s", "decode, batch 1 (256 in, 512 out), tok/s", 0),
    ("decode_bound", "share_of_limit", "share of the limit at copy bandwidth", 0),
    ("prefill_bound", "ttft_ms_last", "first token after 2,048 tokens, ms", 1),
    ("long_context", "ttft_ms_last", "first token after 16,384 tokens, ms", 0),
    ("medium_batch", "overall_tok_s", "batch 8 (256 in, 128 out), tok/s in and out", 0),
    ("base", "overall_tok_s", "batch 32 (256 in, 32 out)", 0),
    ("high_concurrency", "overall_tok_s", "batch 64 (256 in, 128 out)", 0),
)


def cells_of(results: Results) -> dict[tuple[str, str], Record]:
    """(workload, scheme) → the record of the headline's model in its own type."""
    return {(one["work"], one["scheme"]): one for one in performance.beside(results, "latency")
            if one["model"] == MODEL and one.get("kv_dtype") == "bfloat16"}


def headline(results: Results) -> list[Block]:
    found = cells_of(results)
    schemes = [scheme for scheme in SCHEMES if ("decode_bound", scheme) in found]
    if not schemes:
        return []
    lines = []
    for work, metric, text, digits in HEADLINE:
        line = [text]
        for record in (found.get((work, scheme), {}) for scheme in schemes):
            value, peer = record.get(metric), record.get(f"peer_{metric}")
            shown = "–" if value is None else f"{value:.0%}" if metric == "share_of_limit" else f"{value:.{digits}f}"
            line.append(shown + (f" (vLLM {peer:.{digits}f})" if peer else ""))
        lines.append(tuple(line))
    return [Table("", ("Qwen3-8B", *schemes), tuple(lines))]


def picture(results: Results) -> Figure:
    found = cells_of(results)
    records = [found["decode_bound", scheme] for scheme in SCHEMES if ("decode_bound", scheme) in found]
    series = [Series(name, tuple(Point(one["scheme"], one[key]) for one in records if one.get(key)))
              for name, key in (("Flyweight", "decode_tok_s"), ("vLLM 0.24.0", "peer_decode_tok_s"),
                                ("the memory's limit", "limit_tok_s"))]
    return Figure("bars", "Decode speed at batch 1", "Qwen3-8B, 256 tokens in, 512 out, one H200", "tok/s", tuple(series))


def quality(results: Results) -> list[Block]:
    path = ROWS / "quality.jsonl"
    return [Paragraph(f"{table.made_on(path)}\n\n{table.document(path)}")] if path.exists() else []


def best(results: Results) -> list[Block]:
    path = ROWS / "quality.jsonl"
    return [Paragraph("\n".join(table.best_lines(table.collect(path))))] if path.exists() else []


def quantizing(results: Results) -> list[Block]:
    """How long a model takes, and the memory, by quantize_speed.py: quality's jobs ran many at once."""
    lines = [(row["scheme"], f"{row['seconds']:.0f}",
              f"from {row['blocks']} blocks" if row["extrapolated"] else "whole, from disk to disk",
              f"{row['peak_gpu_gb']:.1f}", f"{row['peak_host_gb']:.1f}")
             for row in results.of("quantize") if "extrapolated" in row]
    return [Table("", ("scheme", "seconds", "how", "GPU memory, GB", "host memory, GB"), tuple(lines))] if lines else []


LONG_PROMPT = 2048  # tokens, from which on power is the limit


def zeros(results: Results) -> list[Block]:
    """Prompts through random weights and through zeros, which the same kernels multiply faster at the GPU's power limit."""
    found = {(*row["model"].split(":")[1:], row["case"], row["passes"]): row["step_ms"] for row in results.of("prefill")
             if "step_ms" in row}
    peers: dict[tuple[str, str, int, bool], list[float]] = {}  # the last: with vLLM's own dummy weights
    for one in results.of("latency"):
        if one["backend"].startswith(performance.PEER) and one["batch"] == 1 and one.get("ttft_ms_last"):
            cell = (one["model"], performance.kind_of(one), one["input"], one["checkpoint"] == "random:vllm")
            peers.setdefault(cell, []).append(one["ttft_ms_last"])
    lines = []
    for (model, scheme, case, passes), time in found.items():
        if passes.endswith("of zeros") and case.isdigit() and int(case) >= LONG_PROMPT:
            random = found.get((model, scheme, case, passes.partition(",")[0]))
            theirs = [peers.get((model, scheme, int(case), dummy)) for dummy in (False, True)]
            times = (random, time, *(median(ms) if ms else None for ms in theirs))
            lines.append((model, scheme, f"{int(case):,}", *(f"{ms:.1f}" if ms else "–" for ms in times)))
    columns = ("model", "scheme", "tokens", "random weights, ms", "zeros, ms", "vLLM, random weights, ms", "vLLM, dummies, ms")
    return [Table("", columns, tuple(lines))] if lines else []


def linears(results: Results) -> list[Block]:
    """How many times as fast as cuBLAS in bf16, the least and the most of Qwen3-8B's four, ours and others'."""
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in results.of("kernel"):
        if str(row.get("shape")).startswith("qwen3-8b ") and row.get("ratio"):
            whose = row["kernel"] if of_a_peer(row) else "Flyweight"
            found.setdefault((row["format"], whose), {}).setdefault(row["rows"], []).append(1 / row["ratio"])
    counts = sorted({rows for line in found.values() for rows in line})
    lines = [(*name, *(f"{min(line[rows]):.2f} – {max(line[rows]):.2f}" if rows in line else "–" for rows in counts))
             for name, line in found.items()]
    columns = ("format", "kernel", *(f"{rows:,} row{'s' * (rows > 1)}" for rows in counts))
    return [Table("", columns, tuple(lines))] if lines else []


BLOCKS: dict[str, Callable[[Results], Sequence[Block]]] = {
    "headline": headline, "quality": quality, "best": best, "quantizing": quantizing, "zeros": zeros, "linears": linears,
    "limits": lambda results: performance.limits(results)[1:],
    "steps": lambda results: performance.step_table(results)[1:],
}


def fill(path: Path, results: Results) -> None:
    """Put the tables where the document marks their places."""
    def made(match: re.Match[str]) -> str:
        text = terminal(BLOCKS[match["name"]](results) or [Paragraph("Not measured yet.")]).strip()
        return f"<!-- rows: {match['name']} -->\n{text}\n<!-- end -->"

    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(r"<!-- rows: (?P<name>\w+) -->.*?<!-- end -->", made, text, flags=re.DOTALL), encoding="utf-8")


def without_runs(blocks: Sequence[Block]) -> list[Block]:
    """The single runs are in the page and in the rows."""
    return [block for block in blocks if not (isinstance(block, Items) and block.detail and block.title)
            and not (isinstance(block, Heading) and block.text == "Detailed Results")]


def files(pattern: str) -> list[Path]:
    """Those with rows: a run that was cut off may have left nothing but its environment."""
    return [path for path in sorted(ROWS.glob(pattern)) if path.stat().st_size and read_one(path).rows]


def main() -> None:
    results = latest(read(files("*.jsonl")))
    gaps = missing(results)
    blocks = [*build(View(results)), *provenance(results), *gaps]
    write(DOCS / "h200.md", without_runs(blocks), title="", draw=True, pictures="png")
    write(DOCS / "h200.html", blocks, title="Flyweight on one H200", draw=False, pictures="png")
    for number, ending in DOCUMENTS.items():
        if found := files(f"{number}-*.jsonl"):
            document = build(View(latest(read(found)), layout="seed"))
            write(DOCS / f"{number}{ending}", document, title="", draw=False, pictures="png")
    if (figure := picture(results)).series[0].points:
        draw(figure, DOCS)
    for path in (Path("README.md"), Path("docs/performance.md"), Path("docs/quantize.md")):
        fill(path, results)
    print(terminal(gaps) if gaps else "no rows are missing")


if __name__ == "__main__":
    main()
