"""`make results`: figures go where the documents mark their places, and nowhere else."""

import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "results.py"
pytest.importorskip("matplotlib", reason="figures need matplotlib")


@pytest.fixture
def results(tmp_path, monkeypatch):
    """The script as a module, in a repository of two rows and two beside vLLM's."""
    monkeypatch.chdir(tmp_path)
    rows = [{"bench": "environment", "id": "e", "device": "a GPU", "commit": "abc"}]
    for scheme, rate in (("bf16", 276.4), ("int4", 579.8)):
        rows.append(
            {
                "bench": "latency",
                "model": "qwen3-8b",
                "scheme": scheme,
                "checkpoint": "random:0",
                "backend": "native",
                "kv_dtype": "bfloat16",
                "workload": "decode_bound",
                "batch": 1,
                "input": 256,
                "output": 512,
                "latency_s": 512 / rate,
                "decode_tok_s": rate,
                "share_of_limit": 0.681,
                "ttft_ms_last": 8.5,
                "overall_tok_s": 1.5 * rate,
                "repeat": 1,
            }
        )
    common = [
        {"schema": 1, "run_id": str(i), "time": None, "environment": "e", "status": "ok"}
        for i in range(len(rows))
    ]
    Path("benchmarks/h200").mkdir(parents=True)
    lines = [json.dumps(one | row) + "\n" for one, row in zip(common, rows, strict=True)]
    Path("benchmarks/h200/latency.jsonl").write_text("".join(lines))
    Path("benchmarks/h200/vllm-0.33").mkdir()
    changes = (
        ('"native"', '"vllm"'),
        ('"run_id": "', '"run_id": "v'),
        ("276.4", "193.2"),
        ("579.8", "217.1"),
    )
    theirs = lines[1:]
    for before, after in changes:
        theirs = [line.replace(before, after) for line in theirs]
    Path("benchmarks/h200/vllm-0.33/models.jsonl").write_text("".join([*lines, *theirs]))
    Path("docs").mkdir()
    Path("README.md").write_text(
        "# By hand\n\n<!-- rows: headline -->\nold\n<!-- end -->\n"
        "<!-- rows: beside -->\n<!-- end -->\nby hand\n"
    )
    Path("docs/quantize.md").write_text(
        "<!-- rows: quantizing -->\n<!-- end -->\n<!-- rows: quality -->\n<!-- end -->\n"
    )
    Path("docs/serve.md").write_text("by hand\n")
    Path("docs/performance.md").write_text(
        "<!-- rows: limits -->\n<!-- end -->\n\n<!-- rows: steps -->\n<!-- end -->\n"
        "<!-- rows: newest -->\n<!-- end -->\n"
    )
    Path("docs/serve.md").write_text("<!-- rows: caches -->\n<!-- end -->\n")
    specification = importlib.util.spec_from_file_location("results_script", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    # the same code
    git = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=0, stdout=""))
    monkeypatch.setattr(module.sys.modules["covered"], "subprocess", git)
    return module


def test_documents_get_their_figures_from_the_rows_and_keep_their_prose(results):
    results.main()
    text = Path("README.md").read_text()
    assert text.startswith("# By hand") and text.endswith("by hand\n") and "old" not in text
    assert "| 276" in text and "580" in text and "68%" in text
    assert "276 (vLLM 193)" in text and "580 (vLLM 217)" in text
    performance = Path("docs/performance.md").read_text()
    assert "qwen3-8b on a GPU, by workload" in performance and "Not measured yet." in performance
    assert "**qwen3-8b int4, greedy**" in performance and "2.67" in performance, "580 / 217"
    assert (
        Path("docs/results/h200.html").exists()
        and Path("docs/results/decode-speed-at-batch-1.png").exists()
    )
    before = {path: path.read_bytes() for path in Path(".").rglob("*.md")}
    results.main()
    assert {path: path.read_bytes() for path in Path(".").rglob("*.md")} == before


def test_a_document_that_says_something_else_than_the_rows_is_found(results, monkeypatch, capsys):
    results.main()
    monkeypatch.setattr(results.sys, "argv", ["results.py", "--check"])
    with pytest.raises(SystemExit) as ended:
        results.main()
    assert ended.value.code == 0
    Path("README.md").write_text(Path("README.md").read_text().replace("580", "590"))
    with pytest.raises(SystemExit) as ended:
        results.main()
    assert (
        ended.value.code == 1
        and "README.md does not say what the rows say" in capsys.readouterr().out
    )


def test_a_document_in_a_reproduced_layout_is_held_against_its_rows_too(results):
    lines = Path("benchmarks/h200/latency.jsonl").read_text()
    Path("benchmarks/h200/002-qwen3-4b.jsonl").write_text(
        lines.replace('"run_id": "', '"run_id": "b')
    )
    results.main()
    known = results.latest(results.read(results.files("*.jsonl")))
    document = Path("docs/results/002.md")
    assert results.differing(known) == [] and "579.80" in document.read_text()
    document.write_text(document.read_text().replace("579.80", "599.80"))
    Path("docs/results/002-2.md").write_text("of a run before\n")
    assert results.differing(known) == [Path("docs/results/002-2.md"), document]


def test_rows_of_older_code_stand_in_the_readme_only_where_they_are_marked(results, monkeypatch):
    monkeypatch.setattr(results, "changed", lambda commit, paths: "changed: kernels")
    before = Path("README.md").read_text()
    with pytest.raises(SystemExit) as ended:
        results.main()
    told = str(ended.value.code)
    assert (
        "headline: changed: kernels" in told
        and "beside: changed: kernels" in told
        and Path("README.md").read_text() == before
    )
    for path in (Path("README.md"), Path("docs/performance.md")):
        text = path.read_text()
        for name in ("headline", "beside", "limits", "newest"):
            text = text.replace(f"rows: {name}", f"rows: {name}, older")
        path.write_text(text)
    results.main()
    assert (
        "| 276" in Path("README.md").read_text()
        and "Measured by older code than this: abc" in Path("README.md").read_text()
    )


def test_no_page_is_too_long_and_no_line_is_lost(results):
    from flyweight.report.blocks import Heading, Table

    rows = tuple((str(i), "x" * 90) for i in range(500))
    pages = results.in_pages(
        [
            Heading("A"),
            Table("t", ("n", "x"), rows[:20]),
            Heading("B"),
            Table("u", ("n", "x"), rows),
        ],
        9_000,
    )
    assert (
        all(sum(map(results.sys.modules["pages"].size_of, page)) <= 9_000 for page in pages)
        and len(pages) > 5
    )
    assert not any(isinstance(page[-1], Heading) for page in pages)
    tables = [block for page in pages for block in page if isinstance(block, Table)]
    assert [row for table in tables[1:] for row in table.rows] == list(rows) and tables[
        2
    ].title == "u (continued)"


def test_a_file_that_was_cut_off_before_its_first_row_is_passed_over(results):
    first = Path("benchmarks/h200/latency.jsonl").read_text().splitlines()[0]
    Path("benchmarks/h200/002-qwen3-4b.jsonl").write_text(first.replace('"e"', '"f"') + "\n")
    Path("benchmarks/h200/001-vptq.jsonl").write_text("")
    results.main()
    assert not Path("docs/results/002.md").exists()


def test_times_of_quantizing_say_whether_they_are_of_a_whole_model(results):
    row = {
        "schema": 1,
        "bench": "quantize",
        "time": None,
        "environment": "e",
        "status": "ok",
        "scheme": "gptq-int4",
        "model": "qwen3-8b",
        "peak_gpu_gb": 7.31,
        "peak_host_gb": 2.53,
        "blocks": 4,
    }
    rows = [  # of the quality benchmark
        row | {"run_id": "a", "seconds": 57.5, "extrapolated": True},
        row | {"run_id": "b", "seconds": 63.9, "extrapolated": False},
        row | {"run_id": "c", "seconds": 900.0},
    ]
    lines = [
        Path("benchmarks/h200/latency.jsonl").read_text().splitlines()[0],
        *map(json.dumps, rows),
    ]
    Path("benchmarks/h200/quantize_speed.jsonl").write_text("\n".join(lines) + "\n")
    results.main()
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in Path("docs/quantize.md").read_text().splitlines()
        if line.startswith("| gptq-int4")
    ]
    assert cells == [
        ["gptq-int4", "58", "from 4 blocks", "7.3", "2.5"],
        ["gptq-int4", "64", "whole, from disk to disk", "7.3", "2.5"],
    ]


def test_prompts_through_zeros_stand_beside_random_weights_and_the_peer(results):
    first = {
        "schema": 1,
        "bench": "prefill",
        "time": None,
        "environment": "e",
        "status": "ok",
        "model": "preset:qwen3-8b:int4",
        "case": "16384",
    }
    for i, (passes, time) in enumerate(
        (("captured", 484.2), ("captured, weights of zeros", 404.7), ("one by one", 500.0))
    ):
        with Path("benchmarks/h200/latency.jsonl").open("a") as file:
            file.write(
                json.dumps(first | {"run_id": f"p{i}", "passes": passes, "step_ms": time}) + "\n"
            )
    several = first | {
        "run_id": "q",
        "case": "8192x32",
        "passes": "captured, weights of zeros",
        "step_ms": 9.0,
    }
    peer = {
        "schema": 1,
        "bench": "latency",
        "time": None,
        "environment": "e",
        "status": "ok",
        "model": "qwen3-8b",
        "scheme": "awq4",
        "checkpoint": "random:vllm",
        "latency_s": 1.0,
        "batch": 1,
        "input": 16384,
        "output": 32,
        "workload": "long_context",
    }
    folder = peer | {"backend": "vllm (mode=0)", "scheme": "int4", "checkpoint": "random:0"}
    rows = [
        several,
        peer | {"run_id": "v", "backend": "vllm", "ttft_ms_last": 456.0},
        *(
            folder | {"run_id": f"f{i}", "repeat": i, "ttft_ms_last": time}
            for i, time in enumerate((524.4, 527.4, 600.0))
        ),
    ]
    with Path("benchmarks/h200/latency.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    (table,) = results.zeros(results.latest(results.read(results.files("*.jsonl"))))
    assert table.rows == (("qwen3-8b", "int4", "16,384", "484.2", "404.7", "527.4"),)


def test_linears_stand_beside_others_kernels_by_rows(results):
    first = {
        "schema": 1,
        "bench": "kernel",
        "time": None,
        "environment": "e",
        "status": "ok",
        "format": "w4a16",
        "us": 1.0,
    }
    cells = [
        ("qwen3-8b o", 1, "gemv.int4", 0.25),
        ("qwen3-8b qkv", 1, "gemv.int4", 0.5),
        ("qwen3-8b o", 256, "gemv.int4", 1.25),
        ("qwen3-8b o", 1, "vllm.marlin", 0.8),
        ("another", 1, "gemv.int4", 0.1),
    ]
    rows = [
        first | {"run_id": f"k{i}", "shape": shape, "rows": count, "kernel": kernel, "ratio": ratio}
        for i, (shape, count, kernel, ratio) in enumerate(cells)
    ]
    imitated = {
        "schema": 1,
        "bench": "environment",
        "time": None,
        "id": "a",
        "run_id": "a",
        "environment": "a",
        "status": "ok",
        "device": "NVIDIA H200 as sm_80, 108 SMs",
    }
    # of another GPU: in no table of this one
    rows += [imitated, rows[0] | {"run_id": "k9", "environment": "a", "ratio": 0.01}]
    with Path("benchmarks/h200/latency.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    (table,) = results.linears(results.latest(results.read(results.files("*.jsonl"))))
    assert table.headers == ("format", "kernel", "1 row", "256 rows")
    assert table.rows == (
        ("w4a16", "Flyweight", "2.00 – 4.00", "0.80 – 0.80"),
        ("w4a16", "vllm.marlin", "1.25 – 1.25", "–"),
    )


def test_the_documents_of_this_repository_say_what_its_rows_say(monkeypatch, tmp_path):
    monkeypatch.chdir(SCRIPT.parents[1])
    specification = importlib.util.spec_from_file_location("results_of_this_repository", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert module.differing(module.latest(module.read(module.files("*.jsonl")))) == [], (
        "make results"
    )
    monkeypatch.setattr(
        "flyweight.report.plot.draw",
        lambda figure, folder, *, kind, name: folder / f"{name}.{kind}",
    )
    module.write_pages(module.latest(module.read(module.files("*.jsonl"))), tmp_path)
    of_today = {"provenance.md"}  # what has changed since depends on the newest commit
    for page in (*tmp_path.glob("*.md"), *tmp_path.glob("h200/*.md")):
        there = Path("docs/results", page.relative_to(tmp_path))
        assert page.name in of_today or page.read_text() == there.read_text(), (
            f"{there}: make results"
        )
        for link in re.findall(r"\]\(([^)#]+)\)", there.read_text()):
            assert link.startswith("http") or (there.parent / link).exists(), (there, link)
    serving = module.sys.modules["serving"]
    assert set(module.BLOCKS) == set(module.SHOWN) | set(serving.BLOCKS), (
        "which code are its rows of?"
    )
    most = module.sys.modules["pages"].LIMIT + 1_000
    pages = [path for path in Path("docs").rglob("*") if path.suffix in (".md", ".rst")]
    assert not [path for path in pages if path.stat().st_size > most], (
        "pages.py cuts reports that are longer"
    )
