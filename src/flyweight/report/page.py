"""The HTML page: one file with its style, script and drawings inside, so that it opens anywhere
without a network.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path

from flyweight.report import svg
from flyweight.report.blocks import Block, Figure, Heading, Highlights, Items, Paragraph, Table

HERE = Path(__file__).parent
NUMBER = re.compile(r"[+-]?[\d.]+(e[+-]?\d+)?( ?(%|ms|us|s|b|Kb|Mb|Gb|×))?( ± [\d.]+%?)?")
ABSENT = "–"
FEW = 4  # a table of fewer lines needs no filter


def page(blocks: Sequence[Block], *, title: str) -> str:
    body = [render(block, index) for index, block in enumerate(blocks)]
    headings = {
        index: block
        for index, block in enumerate(blocks)
        if isinstance(block, Heading) and block.level <= 2
    }
    shared = Counter(heading.short for heading in headings.values())
    contents = []
    for index, heading in headings.items():
        name = heading.short if shared[heading.short] == 1 else heading.text
        contents.append(f'<a href="#h{index}">{escape(name or heading.text)}</a>')
    template = (HERE / "page.html").read_text(encoding="utf-8")
    parts = {
        "title": escape(title),
        "style": (HERE / "page.css").read_text(encoding="utf-8"),
        "script": (HERE / "page.js").read_text(encoding="utf-8"),
        "contents": "\n".join(contents),
        "body": "\n".join(body),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def render(block: Block, index: int) -> str:
    if isinstance(block, Heading):
        level = min(block.level + 1, 6)  # the page's own title is the h1
        return f'<h{level} id="h{index}">{inline(block.text)}</h{level}>'
    if isinstance(block, Paragraph):
        return f"<p>{inline(block.text)}</p>"
    if isinstance(block, Items):
        return listing(block)
    if isinstance(block, Highlights):
        return highlights(block)
    return table(block) if isinstance(block, Table) else figure(block)


def inline(text: str) -> str:
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", escape(text))
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def highlights(block: Highlights) -> str:
    cards = "".join(
        f"<div><dt>{escape(what)}</dt><dd><strong>{escape(figure)}</strong><span>{escape(against)}</span></dd></div>"
        for what, figure, against in block.items
    )
    return f'<dl class="highlights">{cards}</dl>'


def listing(block: Items) -> str:
    if block.ranked:
        return f"<p class='ranking'>{'<br>'.join(inline(text) for _, text in block.items)}</p>"
    lines = "".join(
        f'<li style="margin-left:{1.2 * depth:g}em">{inline(text)}</li>'
        for depth, text in block.items
    )
    if not block.detail:
        return f"<ul class='notes'>{lines}</ul>"
    return f"<details><summary>{inline(block.title or 'show')}</summary><ul>{lines}</ul></details>"


def table(block: Table) -> str:
    kinds = [
        numeric(next((text for text in column if text != ABSENT), ""))
        for column in zip(*block.rows, strict=True)
    ]
    head = "".join(
        f'<th scope="col" tabindex="0" aria-sort="none"{kind}><span>{inline(name)}</span></th>'
        for name, kind in zip(block.headers, kinds, strict=True)
    )
    rows = "".join(
        f"<tr>{''.join(cell(text, kind) for text, kind in zip(line, kinds, strict=True))}</tr>"
        for line in block.rows
    )
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in block.notes)
    search = (
        '<input type="search" placeholder="filter rows" aria-label="filter rows">'
        if len(block.rows) >= FEW
        else ""
    )
    return (
        '<section class="table"><div '
        f'class="bar"><strong>{escape(block.title)}</strong>{search}</div><div class="scroll">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{notes}</section>"
    )


def cell(text: str, kind: str) -> str:
    """Of a column of figures on the right, what is absent too."""
    return f"<td{kind if text == ABSENT else numeric(text)}>{inline(text)}</td>"


def numeric(text: str) -> str:
    return ' class="n"' if NUMBER.fullmatch(text) else ""


def figure(block: Figure) -> str:
    shown = block.series if block.kind != "heat" else ()
    keys = "".join(
        f'<button type="button" class="{svg.look(block, index)}" data-series="{index}" '
        'aria-pressed="true">'
        f"{escape(series.name)}</button>"
        for index, series in enumerate(shown)
    )
    caption = f'<span class="note">{escape(block.caption)}</span>' if block.caption else ""
    return (
        f"<figure><figcaption><strong>{escape(block.title)}</strong> {caption}</figcaption>"
        f'<div class="scroll">{svg.draw(block)}</div><div class="legend">{keys}</div></figure>'
    )
