"""Blocks as Markdown, reStructuredText, CSV, and the text of a terminal: each a table of block →
lines.

The terminal gets Markdown too: it is what people paste into pull requests, and its padded tables
read well as they are.
"""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

from flyweight.report.blocks import Block, Figure, Heading, Highlights, Items, Paragraph, Table

UNDERLINES = "=-~^"
Pictures = Callable[[Figure], Path | None]  # where the picture of a figure is, if it was drawn


def width(text: str) -> int:
    return sum(0 if unicodedata.combining(character) else 1 for character in text)


def pad(text: str, size: int) -> str:
    return text + " " * (size - width(text))


def widths(table: Table) -> list[int]:
    return [
        max(width(line[index]) for line in (table.headers, *table.rows))
        for index in range(len(table.headers))
    ]


def pipe_table(table: Table) -> str:
    sizes = widths(table)
    lines = [
        [pad(cell.replace("|", "\\|"), size) for cell, size in zip(line, sizes, strict=True)]
        for line in (table.headers, *table.rows)
    ]
    lines.insert(1, ["-" * size for size in sizes])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def grid_table(table: Table) -> str:
    """An rst grid; the first `merge` columns are one tall cell where they repeat."""
    sizes = widths(table)
    out = [rule(sizes, "-"), grid_line(table.headers, sizes), rule(sizes, "=")]
    for index, cells in enumerate(table.rows):
        above = table.rows[index - 1] if index else ()
        shown = [
            "" if repeats(cells, above, column, table.merge) else cell
            for column, cell in enumerate(cells)
        ]
        out.append(grid_line(shown, sizes))
        below = table.rows[index + 1] if index + 1 < len(table.rows) else ()
        out.append(
            "+"
            + "+".join(
                (" " if repeats(cells, below, column, table.merge) else "-") * (size + 2)
                for column, size in enumerate(sizes)
            )
            + "+"
        )
    return "\n".join(out)


def repeats(cells: Sequence[str], other: Sequence[str], column: int, merge: int) -> bool:
    return column < merge and tuple(cells[: column + 1]) == tuple(other[: column + 1])


def rule(sizes: Sequence[int], mark: str) -> str:
    return "+" + "+".join(mark * (size + 2) for size in sizes) + "+"


def grid_line(cells: Sequence[str], sizes: Sequence[int]) -> str:
    return (
        "|"
        + "|".join(f" {pad(cell, size)} " for cell, size in zip(cells, sizes, strict=True))
        + "|"
    )


def markdown(blocks: Sequence[Block], pictures: Pictures | None = None) -> str:
    return "\n\n".join(filter(None, (markdown_block(block, pictures) for block in blocks))) + "\n"


def markdown_block(block: Block, pictures: Pictures | None) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Paragraph):
        return block.text
    if isinstance(block, Items):
        if block.ranked:
            return "\n".join(
                f"{text}  " if not text.endswith("  ") else text for _, text in block.items
            )
        title = f"#### {block.title}\n\n" if block.title else ""
        return title + "\n".join(f"{'  ' * depth}- {text}" for depth, text in block.items)
    if isinstance(block, Highlights):
        return "\n".join(
            f"- {what}: **{figure}**{f', {against}' if against else ''}"
            for what, figure, against in block.items
        )
    if isinstance(block, Table):
        title = f"**{block.title}**\n\n" if block.title else ""
        return title + pipe_table(block) + "".join(f"\n\nNote: {note}." for note in block.notes)
    path = pictures(block) if pictures else None
    return f"![{block.title}]({path.as_posix()})\n\n{block.caption}".rstrip() if path else ""


def terminal(blocks: Sequence[Block]) -> str:
    """Tables and rankings only: no runs, no figures, and no heading that stands over nothing."""
    kept = [
        block
        for block in blocks
        if not isinstance(block, Figure) and not (isinstance(block, Items) and block.detail)
    ]
    levels = [block.level if isinstance(block, Heading) else 9 for block in kept] + [0]
    return markdown(
        [
            block
            for index, block in enumerate(kept)
            if not (isinstance(block, Heading) and levels[index + 1] <= block.level)
        ]
    )


def rst(blocks: Sequence[Block], pictures: Pictures | None = None) -> str:
    return "\n\n".join(filter(None, (rst_block(block, pictures) for block in blocks))) + "\n"


def rst_block(block: Block, pictures: Pictures | None) -> str:
    if isinstance(block, Heading):
        return f"{block.text}\n{UNDERLINES[block.level - 1] * max(width(block.text), 4)}"
    if isinstance(block, Paragraph):
        return code(block.text)
    if isinstance(block, Items):
        if block.ranked:
            return "\n".join(f"| {code(text)}" for _, text in block.items)
        lines = [rst_block(Heading(block.title, level=4), None), ""] if block.title else []
        for index, (depth, text) in enumerate(block.items):
            if index and depth != block.items[index - 1][0]:
                lines.append("")  # rst starts and ends a nested list with an empty line
            lines.append(f"{'  ' * depth}- {code(text)}")
        return "\n".join(lines)
    if isinstance(block, Highlights):
        return "\n".join(
            f"- {what}: **{figure}**{f', {against}' if against else ''}"
            for what, figure, against in block.items
        )
    if isinstance(block, Table):
        plain = Table(
            block.title,
            tuple(map(code, block.headers)),
            tuple(tuple(map(code, line)) for line in block.rows),
            merge=block.merge,
        )
        title = f"**{block.title}**\n\n" if block.title else ""
        return title + grid_table(plain) + "".join(f"\n\nNote: {note}." for note in block.notes)
    path = pictures(block) if pictures else None
    return (
        f".. figure:: {path.as_posix()}\n   :alt: {block.title}\n\n   "
        f"{block.caption or block.title}"
        if path
        else ""
    )


def code(text: str) -> str:
    """Literals with two ticks; a word's last underscore escaped, which would be a link."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(
        f"`{part}`" if part.startswith("`") else re.sub(r"_(?!\w)", r"\\_", part) for part in parts
    )


def comma_separated(blocks: Sequence[Block]) -> str:
    """The tables one after the other, each under a line with its title."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    title = ""
    for block in blocks:
        if isinstance(block, Heading) and block.level <= 2:
            title = block.text
        if isinstance(block, Table):
            writer.writerows([[f"# {title}: {block.title}"], block.headers, *block.rows, []])
    return out.getvalue()
