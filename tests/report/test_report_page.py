"""The HTML page: self-contained, and in a real browser sortable, filterable, hoverable, without
errors or network."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flyweight.cli import app
from flyweight.report.blocks import Heading
from flyweight.report.page import page as make_page

EXCERPTS = sorted(str(path) for path in (Path(__file__).parent / "excerpts").iterdir())
CHECKS = """<script>
window.addEventListener("error", (event) => {
  window.failed = true;
  parent.postMessage(event.message, "*");
});
window.addEventListener("load", () => {
  const found = [];
  const check = (name, good) => found.push(`${good ? "pass" : "FAIL"} ${name}`);
  const tables = [...document.querySelectorAll("section.table")];
  const section = tables.find((one) => one.querySelector("input") && one.querySelector("th.n"));
  const body = section.querySelector("tbody");
  const header = [...section.querySelectorAll("th")].find((one) => one.className === "n");
  const number = (row) => parseFloat(row.cells[header.cellIndex].textContent);
  const column = () => [...body.rows].map(number);
  const sorted = (values) => values.every((value, index) => !index || values[index - 1] <= value);
  header.click(); check("sorts up", sorted(column()));
  header.click(); check("sorts down", sorted(column().reverse()));
  const input = section.querySelector("input");
  input.value = "awq";
  input.dispatchEvent(new Event("input"));
  const shown = [...body.rows].filter((row) => !row.hidden);
  const some = shown.length > 0 && shown.length < body.rows.length;
  check("filters", some && shown.every((row) => /awq/i.test(row.textContent)));
  const mark = document.querySelector("svg [data-tip]");
  mark.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, clientX: 50, clientY: 50}));
  const tip = document.getElementById("tip");
  check("hovers", !tip.hidden && tip.textContent === mark.dataset.tip);
  const button = document.querySelector(".legend button"); button.click();
  const line = button.closest("figure").querySelector("svg [data-series='0']");
  check("legend hides", getComputedStyle(line).display === "none");
  const before = getComputedStyle(document.body).backgroundColor;
  document.getElementById("theme").click();
  check("toggles theme", getComputedStyle(document.body).backgroundColor !== before);
  check("fits the width", document.documentElement.scrollWidth <= innerWidth);
  check("no errors", !window.failed);
  parent.postMessage(found.join("; "), "*");
});
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    done = CliRunner().invoke(app, ["report", *EXCERPTS, "-o", str(path)])
    assert done.exit_code == 0, done.output
    return path


def test_page_needs_nothing_from_outside(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"""(?:src|href)\s*=\s*["']([^"']*)|url\(([^)]*)\)|@import""", text)
    assert all(link.startswith(("#", "data:")) for link, _ in links)
    assert "http://" not in text and "https://" not in text


def test_headings_that_are_called_alike_are_told_apart_in_the_contents():
    headings = [
        Heading("Configuration: input_len=2048 (first_token)", short="first_token"),
        Heading("Configuration: input_len=16384 (first_token)", short="first_token"),
        Heading("Configuration: input_len=128 (interactive)", short="interactive"),
        Heading("Kernels"),
        Heading("Environment"),
    ]
    contents = make_page(headings, title="t").partition("<nav>")[2].partition("</nav>")[0]
    assert re.findall(r">([^<]+)</a>", contents) == [
        headings[0].text,
        headings[1].text,
        "interactive",
        "Kernels",
        "Environment",
    ]


def test_page_is_well_formed(page):
    void = {"meta", "link", "input", "br"}
    stack: list[str] = []

    class Checker(HTMLParser):
        def handle_starttag(self, tag, attributes):
            if tag not in void:
                stack.append(tag)

        def handle_endtag(self, tag):
            assert stack.pop() == tag

        def handle_startendtag(self, tag, attributes):
            pass

    Checker().feed(page.read_text(encoding="utf-8"))
    assert stack == []


def test_page_has_both_themes_and_all_figures(page):
    text = page.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text and "data-theme=dark" in text
    for title in (
        "Throughput against latency",
        "TTFT and TPOT",
        "Speed by input length",
        "Peak memory",
        "Kernel time ÷ torch",
    ):
        assert title in text


FRAME = """<!doctype html><script>onmessage = (event) => { document.title = event.data; };</script>
<iframe src="checked.html" width="WIDTH" height="900"></iframe>"""


@pytest.mark.parametrize(
    "width", [1200, 390]
)  # in a frame, because a headless Chromium opens no window this narrow
def test_page_works_in_a_browser(page, browser, width, tmp_path):
    checked = tmp_path / "checked.html"
    checked.write_text(
        page.read_text(encoding="utf-8").replace("</body>", CHECKS + "</body>"), encoding="utf-8"
    )
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.replace("WIDTH", str(width)), encoding="utf-8")
    browser.size(1300, 1000)
    browser.open(frame.as_uri())
    browser.wait("document.title")
    verdicts = browser.js("document.title").split("; ")
    assert len(verdicts) == 8 and all(verdict.startswith("pass") for verdict in verdicts), verdicts
    assert not browser.errors and all(
        url.startswith(("file:", "data:")) for url in browser.requests
    )


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_of_all_rows_fits_the_width(browser, width):
    browser.size(width, 900)
    browser.open((Path(__file__).parents[2] / "docs" / "results" / "h200.html").as_uri())
    bar = browser.js("innerWidth - document.documentElement.clientWidth")
    assert browser.js("document.documentElement.scrollWidth") == width - bar
    assert browser.js("document.querySelectorAll('section.table').length") > 20
    assert not browser.errors


def test_markdown_names_figures_that_are_there(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.md"
    done = CliRunner().invoke(app, ["report", *EXCERPTS, "-o", str(path), "--pictures", "svg"])
    assert done.exit_code == 0, done.output
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", path.read_text(encoding="utf-8"))
    assert len(pictures) >= 6 and all((tmp_path / name).stat().st_size > 1000 for name in pictures)
    assert len(set(pictures)) == len(pictures)


def test_unknown_ending_layout_and_baseline_are_one_line_errors(tmp_path):
    for arguments, message in (
        (["-o", str(tmp_path / "x.pdf")], "unknown ending '.pdf'"),
        (["-o", ""], "unknown ending ''"),
        (["--layout", "sead"], "did you mean 'seed'?"),
        (["--baseline", "bf17"], "did you mean 'bf16'?"),
    ):
        done = CliRunner().invoke(app, ["report", *EXCERPTS, *arguments])
        assert message in str(done.exception)
