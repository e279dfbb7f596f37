"""`flyweight report`: tables and figures from result files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flyweight.errors import MissingPackageError, OptionError, unknown
from flyweight.saving import write_text

if TYPE_CHECKING:
    from flyweight.report.blocks import Block, Figure

PICTURES = ("png", "svg")


def report(
    files: Annotated[
        list[Path], typer.Argument(help="Result rows (JSONL), or result files of other tools.")
    ],
    output: Annotated[
        list[Path] | None, typer.Option("--output", "-o", help="A .md, .rst, .csv or .html file.")
    ] = None,
    layout: Annotated[
        str, typer.Option(help="full, or seed: exactly the columns of the documents reproduced.")
    ] = "full",
    baseline: Annotated[
        str | None,
        typer.Option(help="The scheme or backend that speed-ups are over; default: bf16."),
    ] = None,
    section: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this part, such as latency, limits or steps; several can be given."
        ),
    ] = None,
    title: Annotated[str, typer.Option(help="The title of the page.")] = "Flyweight results",
    figures: Annotated[
        bool, typer.Option(help="Draw the figures of .md and .rst beside them.")
    ] = True,
    pictures: Annotated[str, typer.Option(help="png or svg, for .md and .rst.")] = "png",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the rows, joined and converted, as JSONL.")
    ] = False,
) -> None:
    """Tables and figures from result files: on the terminal what people paste into a pull request,
    or a whole document.

    HTML is one file that needs no network. Rows of different checkpoints stay apart, and what is
    wrong with a row is said.

    Examples:

        flyweight report result.jsonl

        flyweight report benchmarks/h200/*.jsonl -o report.html -o report.md

        flyweight report kernels.jsonl --layout seed -o kernels.rst

        flyweight report benchmarks/h200/*.jsonl --section limits --section steps
    """
    from flyweight.report.document import SECTIONS, build
    from flyweight.report.layouts import LAYOUTS
    from flyweight.report.read import dump, read
    from flyweight.report.render import terminal
    from flyweight.report.view import View

    for kind, name, known in (
        ("layout", layout, LAYOUTS),
        ("picture format", pictures, PICTURES),
        *(("section", name, SECTIONS) for name in section or ()),
    ):
        if name not in known:
            raise OptionError(unknown(kind, name, known))
    results = read(files)
    if as_json:
        typer.echo(dump(results), nl=False)
        return
    here = {
        str(row.get(name)).lower()
        for row in results.rows
        for name in ("scheme", "backend")
        if row.get(name)
    }
    if baseline is not None and baseline.lower() not in here:
        raise OptionError(unknown("baseline", baseline, here))
    blocks = build(View(results, layout=layout, baseline=baseline, sections=tuple(section or ())))
    if not output:
        typer.echo(terminal(blocks), nl=False)
    for path in output or []:
        write(path, blocks, title=title, draw=figures, pictures=pictures)
        typer.echo(str(path))


def write(path: Path, blocks: Sequence[Block], *, title: str, draw: bool, pictures: str) -> None:
    from flyweight.report import render
    from flyweight.report.page import page

    formats: dict[str, Callable[[Callable[[Figure], Path] | None], str]] = {
        ".md": lambda place: render.markdown(blocks, place),
        ".rst": lambda place: render.rst(blocks, place),
        ".csv": lambda place: render.comma_separated(blocks),
        ".html": lambda place: page(blocks, title=title),
    }
    if path.suffix not in formats:
        raise OptionError(f"--output {path}: {unknown('ending', path.suffix, formats)}")
    write_text(path, formats[path.suffix](drawer(path, pictures) if draw else None))


def drawer(path: Path, kind: str) -> Callable[[Figure], Path]:
    """Draws into a folder beside the document and gives the path as the document must write it."""
    from flyweight.report.plot import draw, file_name

    folder, titles = path.with_name(f"{path.stem}_figures"), dict[str, str]()

    def place(figure: Figure) -> Path:
        name = file_name(figure)
        # models whose names differ in capitals alone
        while titles.setdefault(name, figure.title) != figure.title:
            name += "-2"
        try:
            return draw(figure, folder, kind=kind, name=name).relative_to(path.parent)
        except MissingPackageError as error:
            raise MissingPackageError(f"{error}, or give --no-figures") from None

    return place
