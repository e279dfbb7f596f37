"""Everything that is shown of the rows in benchmarks/h200/, made again: `make results`.

    docs/results/h200.md             the answer, and a list of the pages with all rows
    docs/results/h200/*.md           all rows, a page or several for each kind of measurement
                                     (pages.py)
    docs/results/h200.html           all rows in one page with sortable tables
    docs/results/NNN.md, .rst        the rows of NNN-*.jsonl in the layout of the document of that
                                     number
    README.md, docs/performance.md, docs/quantize.md, docs/serve.md   what stands between `<!--
        rows: NAME -->` and `<!-- end -->`, by BLOCKS
    docs/results/decode-speed-at-batch-1.png   the picture of the README

Works with whatever files there are, and says which rows are missing and which were measured by code
that has changed since (covered.py). No figure in those places is typed by hand. `python
benchmarks/results.py --check` writes nothing and ends with exit code 1 where a document says
something else than the rows.

Rows in the documents are of this code, or are marked: where the code of a block's rows has changed
since they were measured, it must be called `<!-- rows: NAME, older -->`, and then says of which
commit it is. Else nothing is written.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent / "workshop"))
sys.path.insert(0, str(Path(__file__).parent / "quality"))
import beside
import documents
import ranges
import serving
import table
from covered import changed, commit_of, latest, missing, provenance
from pages import in_pages, names
from ran import code_of

from flyweight.commands.report import write
from flyweight.report import performance
from flyweight.report.answer import answer
from flyweight.report.blocks import (
    Block,
    Figure,
    Heading,
    Items,
    Paragraph,
    Point,
    Series,
    Table,
    with_colors,
)
from flyweight.report.document import SECTIONS, build
from flyweight.report.figures import of_a_peer
from flyweight.report.plot import draw
from flyweight.report.read import read, read_one
from flyweight.report.records import Record
from flyweight.report.render import terminal
from flyweight.report.rows import Results, Row
from flyweight.report.view import View

ROWS, DOCS = Path("benchmarks/h200"), Path("docs/results")
DOCUMENTS_WITH_BLOCKS = (
    Path("README.md"),
    Path("docs/performance.md"),
    Path("docs/quantize.md"),
    Path("docs/serve.md"),
)
DOCUMENTS = {"000": ".md", "001": ".md", "002": ".md", "003": ".md", "004": ".rst"}
MODEL, SCHEMES = "qwen3-8b", ("bf16", "w8a8", "int4", "vptq")
HEADLINE = (
    beside.HEADLINE[0],
    ("decode_bound", "share_of_limit", "share of the limit at copy bandwidth", 0),
    *beside.HEADLINE[1:],
)


def cells_of(results: Results) -> dict[tuple[str, str], Record]:
    """(workload, scheme) → the record of the headline's model in its own type."""
    return {
        (one["work"], one["scheme"]): one
        for one in performance.beside(results, "latency")
        if one["model"] == MODEL and one.get("kv_dtype") == "bfloat16"
    }


def headline(results: Results) -> list[Block]:
    found = cells_of(results)
    schemes = [scheme for scheme in SCHEMES if ("decode_bound", scheme) in found]
    lines = []
    for work, metric, text, digits in HEADLINE:
        values = [found.get((work, scheme), {}).get(metric) for scheme in schemes]
        form = ".0%" if metric == "share_of_limit" else f".{digits}f"
        lines.append((text, *("–" if one is None else f"{one:{form}}" for one in values)))
    return [Table("", ("Qwen3-8B", *schemes), tuple(lines))] if schemes else []


def picture(results: Results) -> Figure:
    """Ours, and the limit at copy bandwidth."""
    found = cells_of(results)
    records = [
        found["decode_bound", scheme] for scheme in SCHEMES if ("decode_bound", scheme) in found
    ]
    series = [
        Series(name, tuple(Point(one["scheme"], one[key]) for one in records if one.get(key)))
        for name, key in (("Flyweight", "decode_tok_s"), ("the memory's limit", "limit_tok_s"))
    ]
    return Figure(
        "bars",
        "Decode speed at batch 1",
        "Qwen3-8B, 256 tokens in, 512 out, one H200",
        "tok/s",
        tuple(series),
    )


def newest(results: Results) -> list[Block]:
    return beside.tables(beside.rows_of())


def quality(results: Results) -> list[Block]:
    path = ROWS / "quality.jsonl"
    return [Paragraph(f"{table.made_on(path)}\n\n{table.document(path)}")] if path.exists() else []


SEVERAL = (
    "### Other models\n\nThe same schemes on models whose weights are as they were trained or "
    "published (`run.py --natural`), and on\nthe default model's off-grid equivalent: change of "
    "perplexity over the original's with its standard error,\nand KL divergence, for each text. "
    "Groups, bits and the type of the scales are the same for all tools. Where a model hardly "
    "knows a text\n(the small one was trained for a minute), rounding "
    "may lower its perplexity\nby chance: there the KL divergence tells which copy is nearer to "
    "the original."
)


def several(results: Results) -> list[Block]:
    """Other models, each on several texts; not a word of them before there are rows."""
    path = ROWS / "quality-models.jsonl"
    if not path.exists():
        return [Paragraph("")]
    parts = (f"{SEVERAL} {table.made_on(path)}", table.made_with(path), table.across(path))
    return [Paragraph("\n\n".join(parts))]


def best(results: Results) -> list[Block]:
    path = ROWS / "quality.jsonl"
    return [Paragraph("\n".join(table.best_lines(table.collect(path))))] if path.exists() else []


def quantizing(results: Results) -> list[Block]:
    """How long a model takes, and the memory, by quantize_speed.py: quality's jobs ran many at
    once.
    """
    lines = [
        (
            row["scheme"],
            f"{row['seconds']:.0f}",
            f"from {row['blocks']} blocks" if row["extrapolated"] else "whole, from disk to disk",
            f"{row['peak_gpu_gb']:.1f}",
            f"{row['peak_host_gb']:.1f}",
        )
        for row in results.of("quantize")
        if "extrapolated" in row
    ]
    return (
        [Table("", ("scheme", "seconds", "how", "GPU memory, GB", "host memory, GB"), tuple(lines))]
        if lines
        else []
    )


def serving_block(name: str, results: Results) -> list[Block]:
    """What an option of serving costs in quality; its rows are no part of the pages."""
    shown = serving.BLOCKS[name]([Path("benchmarks/cpu/quality"), ROWS / "quality"])
    return [Paragraph(shown)] if shown else []


LONG_PROMPT = 2048  # tokens, from which on power is the limit


def zeros(results: Results) -> list[Block]:
    """Prompts through random weights and through zeros, which the same kernels multiply faster at
    the GPU's power limit.
    """
    found = {
        (*row["model"].split(":")[1:], row["case"], row["passes"]): row["step_ms"]
        for row in results.of("prefill")
        if "step_ms" in row
    }
    peers: dict[tuple[str, str, int], list[float]] = {}
    for one in results.of("latency"):
        if (
            one["backend"].startswith(performance.PEER)
            and one["batch"] == 1
            and one.get("ttft_ms_last")
            and one["checkpoint"] != "random:vllm"  # its dummies, which are not random
        ):
            cell = (one["model"], performance.kind_of(one), one["input"])
            peers.setdefault(cell, []).append(one["ttft_ms_last"])
    lines = []
    for (model, scheme, case, passes), time in found.items():
        if passes.endswith("of zeros") and case.isdigit() and int(case) >= LONG_PROMPT:
            random = found.get((model, scheme, case, passes.partition(",")[0]))
            theirs = peers.get((model, scheme, int(case)))
            times = (random, time, median(theirs) if theirs else None)
            lines.append(
                (model, scheme, f"{int(case):,}", *(f"{ms:.1f}" if ms else "–" for ms in times))
            )
    columns = (
        "model",
        "scheme",
        "tokens",
        "random weights, ms",
        "zeros, ms",
        "vLLM, random weights, ms",
    )
    return [Table("", columns, tuple(lines))] if lines else []


def of_linears(results: Results) -> list[Row]:
    """Of Qwen3-8B's, on this GPU as it is."""
    return [
        row
        for row in plain_runs(results).of("kernel")
        if str(row.get("shape")).startswith("qwen3-8b ") and row.get("ratio")
    ]


def linears(results: Results) -> list[Block]:
    """How many times as fast as cuBLAS in bf16, the least and the most of Qwen3-8B's four, ours and
    others'.
    """
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in of_linears(results):
        whose = row["kernel"] if of_a_peer(row) else "Flyweight"
        found.setdefault((row["format"], whose), {}).setdefault(row["rows"], []).append(
            1 / row["ratio"]
        )
    counts = sorted({rows for line in found.values() for rows in line})
    lines = [
        (
            *name,
            *(
                f"{min(line[rows]):.2f} – {max(line[rows]):.2f}" if rows in line else "–"
                for rows in counts
            ),
        )
        for name, line in found.items()
    ]
    columns = ("format", "kernel", *(f"{rows:,} row{'s' * (rows > 1)}" for rows in counts))
    return [Table("", columns, tuple(lines))] if lines else []


def plain_runs(results: Results) -> Results:
    """Without imitations of other GPUs and without workloads that compare something else; their
    rows are in the pages.
    """
    kept = [
        row
        for row in results.rows
        if " as " not in (results.device(row) or "") and row.get("workload") != "long_cache"
    ]
    return replace(results, rows=tuple(kept))


BLOCKS: dict[str, Callable[[Results], Sequence[Block]]] = {
    "headline": headline,
    "newest": newest,
    "beside": lambda results: beside.headline(beside.rows_of()),
    "quality": quality,
    "several": several,
    "best": best,
    "quantizing": quantizing,
    "zeros": zeros,
    "linears": linears,
    "limits": lambda results: performance.limits(plain_runs(results))[1:],
    "steps": lambda results: performance.step_table(plain_runs(results))[1:],
    **{name: partial(serving_block, name) for name in serving.BLOCKS},
}


PLACE = re.compile(
    r"<!-- rows: (?P<name>\w+)(?P<older>, older)? -->.*?<!-- end "
    r"-->",
    flags=re.DOTALL,
)
# blocks → the rows of ours that they show; those of quality in serving name no commit of a kernel
SHOWN: dict[str, Callable[[Results], tuple[Results, list[Row]]]] = {
    "headline": lambda results: (
        results,
        [
            row
            for row in results.of("latency")
            if row.get("model") == MODEL
            and row.get("backend") == "native"
            and row.get("kv_dtype") == "bfloat16"
            and row.get("workload") in {line[0] for line in HEADLINE}
        ],
    ),
    "beside": lambda results: rows_beside(),
    "newest": lambda results: rows_beside(),
    "best": lambda results: rows_of_quality("quality.jsonl", schemes=table.BEST),
    "quality": lambda results: rows_of_quality("quality.jsonl"),
    "several": lambda results: rows_of_quality("quality-models.jsonl"),
    "quantizing": lambda results: (
        results,
        [row for row in results.of("quantize") if "extrapolated" in row],
    ),
    "limits": lambda results: (
        results,
        [
            row
            for bench in ("latency", "speed")
            for row in plain_runs(results).of(bench)
            if row["backend"].startswith("native")
        ],
    ),
    "steps": lambda results: (
        results,
        [row for row in plain_runs(results).of("profile") if row.get("level") == "part"],
    ),
    "linears": lambda results: (results, of_linears(results)),
    "zeros": lambda results: (results, results.of("prefill")),
}


def rows_of_quality(name: str, schemes: Collection[str] | None = None) -> tuple[Results, list[Row]]:
    """Those of ours, of these schemes or of all."""
    path = ROWS / name
    if not path.exists():
        return Results((), {}), []
    results = read([path])
    rows = [row for row in results.of("quality") if row.get("tool") == "flyweight"]
    return results, [row for row in rows if schemes is None or row.get("scheme") in schemes]


def rows_beside() -> tuple[Results, list[Row]]:
    """Those of ours: vLLM's are not of our code."""
    results = beside.rows_of()
    rows = [row for own in beside.runs(results).values() for row in own]
    return results, [row for row in rows if row["backend"] == "native"]


def filled(text: str, results: Results) -> str:
    """The document with the tables where it marks their places."""

    def made(match: re.Match[str]) -> str:
        name, older = match["name"], match["older"] or ""
        shown = terminal(BLOCKS[name](results) or [Paragraph("Not measured yet.")]).strip()
        if older:
            shown += f"\n\nMeasured by older code than this: {ages(name, results)}."
        return f"<!-- rows: {name}{older} -->\n{shown}\n<!-- end -->"

    return PLACE.sub(made, text)


def ages(name: str, results: Results) -> str:
    """Commits and days of the rows that a block shows."""
    days: dict[str, str] = {}
    known, rows = SHOWN[name](results)
    for row in rows:
        commit = (commit_of(known, row) or "unknown")[:12]
        days[commit] = max(days.get(commit, ""), str(row["time"])[:10])
    return ", ".join(
        f"{commit} of {day}" for commit, day in sorted(days.items(), key=lambda item: item[1])
    )


def unmarked(text: str, results: Results) -> list[str]:
    """A line for each block whose rows are older than their code, and which does not say so."""
    found = []
    for match in PLACE.finditer(text):
        name = match["name"]
        if match["older"] or name not in SHOWN:
            continue
        known, rows = SHOWN[name](results)
        of_commits = {(commit_of(known, row), code_of(row, known.device(row))) for row in rows}
        now = {
            changed(commit, code) if commit or not code else "of an unknown commit"
            for commit, code in of_commits
        } - {"the same", "none of ours"}
        if now:
            found.append(
                f"{name}: {'; '.join(sorted(now))}: measure it again, or call it <!-- "
                f"rows: {name}, older -->"
            )
    return found


def differing(results: Results) -> list[Path]:
    """Documents that do not say what the rows say."""
    found = []
    for path in DOCUMENTS_WITH_BLOCKS:
        text = path.read_text(encoding="utf-8")
        if text != filled(text, results):
            found.append(path)
    with tempfile.TemporaryDirectory() as place:
        write_documents(Path(place))
        made = {path.name: path.read_bytes() for path in Path(place).iterdir()}
    there = {path.name: path.read_bytes() for path in DOCS.glob("0*.*")}
    return found + [
        DOCS / name
        for name in sorted(made.keys() | there.keys())
        if made.get(name) != there.get(name)
    ]


def without_runs(blocks: Sequence[Block]) -> list[Block]:
    """The single runs are in the page and in the rows."""
    return [
        block
        for block in blocks
        if not (isinstance(block, Items) and block.detail and block.title)
        and not (isinstance(block, Heading) and block.text == "Detailed Results")
    ]


def files(pattern: str) -> list[Path]:
    """Those with rows: a run that was cut off may have left nothing but its environment."""
    return [
        path for path in sorted(ROWS.glob(pattern)) if path.stat().st_size and read_one(path).rows
    ]


def write_pages(results: Results, docs: Path = DOCS) -> None:
    """h200.md and the pages that it lists."""
    view = View(results)
    parts = {name: without_runs(SECTIONS[name](view)) for name in SECTIONS}
    parts["ranges"] = ranges.spread(ranges.read())
    parts["provenance"] = provenance(results)
    folder = docs / "h200"
    shutil.rmtree(folder, ignore_errors=True)
    listed = []
    for name, blocks in parts.items():
        pages = in_pages(with_colors(blocks)) if blocks else []
        for number, (file, page) in enumerate(zip(names(name, len(pages)), pages, strict=True), 1):
            write(folder / file, page, title="", draw=True, pictures="png")
            title = blocks[0].text if isinstance(blocks[0], Heading) else name
            listed.append((0, f"[{title}{f', page {number}' if number > 1 else ''}](h200/{file})"))
    notes = Items(tuple((0, note) for note in results.notes))
    opening = [
        *answer(results, None),
        Heading("All rows"),
        Items(tuple(listed)),
        *([notes] if results.notes else []),
    ]
    write(docs / "h200.md", [*opening, *missing(results)], title="", draw=False, pictures="png")


def write_documents(folder: Path) -> None:
    """In the layouts of the documents that are reproduced."""
    for number, ending in DOCUMENTS.items():
        if found := files(f"{number}-*.jsonl"):
            rows = latest(read(found))
            shown = [*documents.opening(number, rows), *build(View(rows, layout="seed"))]
            write_document(folder, number, ending, shown)


def write_document(folder: Path, number: str, ending: str, blocks: Sequence[Block]) -> None:
    pages = in_pages(blocks) if ending == ".md" else [list(blocks)]
    for old in folder.glob(f"{number}-*.md"):
        old.unlink()
    files = names(number, len(pages)) if ending == ".md" else [f"{number}{ending}"]
    for file, page in zip(files, pages, strict=True):
        goes_on = [Paragraph(f"Goes on in {', '.join(f'[{one}]({one})' for one in files[1:])}.")]
        shown = [*goes_on, *page] if len(files) > 1 and file == files[0] else page
        write(folder / file, shown, title="", draw=False, pictures="png")


def main() -> None:
    results = latest(read(files("*.jsonl")))
    if "--check" in sys.argv[1:]:
        found = differing(results)
        print(
            "\n".join(f"{path} does not say what the rows say: make results" for path in found)
            or "documents and rows agree"
        )
        sys.exit(1 if found else 0)
    stale = [
        f"{path}: {line}"
        for path in DOCUMENTS_WITH_BLOCKS
        for line in unmarked(path.read_text(encoding="utf-8"), results)
    ]
    if stale:
        sys.exit("rows of older code are shown:\n" + "\n".join(stale))
    gaps = missing(results)
    write_pages(results)
    blocks = [*build(View(results)), *provenance(results), *gaps]
    write(DOCS / "h200.html", blocks, title="Flyweight on one H200", draw=False, pictures="png")
    write_documents(DOCS)
    if (figure := picture(results)).series[0].points:
        draw(figure, DOCS)
    for path in DOCUMENTS_WITH_BLOCKS:
        path.write_text(filled(path.read_text(encoding="utf-8"), results), encoding="utf-8")
    print(terminal(gaps) if gaps else "no rows are missing")


if __name__ == "__main__":
    main()
