"""A report in pages that a browser shows and a reader can hold: none over LIMIT bytes.

A page begins where a section does. What is longer goes on in NAME-2.md and so on, between two
blocks where that is possible, else between two lines of a table, whose head is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from flyweight.report.blocks import Block, Heading, Items, Table
from flyweight.report.render import markdown

LIMIT = 60_000


def size_of(block: Block) -> int:
    return len(markdown([block]).encode()) + 1


def halves(block: Block, limit: int) -> Iterator[Block]:
    """The block, or pieces of it that are small enough."""
    if isinstance(block, Table) and size_of(block) > limit and len(block.rows) > 1:
        middle = len(block.rows) // 2
        yield from halves(replace(block, rows=block.rows[:middle], notes=()), limit)
        title = block.title.removesuffix(" (continued)") + " (continued)" if block.title else ""
        yield from halves(replace(block, title=title, rows=block.rows[middle:]), limit)
    elif isinstance(block, Items) and size_of(block) > limit and len(block.items) > 1:
        middle = len(block.items) // 2
        yield from halves(replace(block, items=block.items[:middle]), limit)
        yield from halves(replace(block, items=block.items[middle:]), limit)
    else:
        yield block


def in_pages(blocks: Sequence[Block], limit: int = LIMIT) -> list[list[Block]]:
    pages: list[list[Block]] = [[]]
    filled = 0
    for block in (part for whole in blocks for part in halves(whole, limit)):
        size = size_of(block)
        if pages[-1] and filled + size > limit:
            last = pages[-1]
            pages.append([])
            while last and isinstance(last[-1], Heading):  # no heading without what it is over
                pages[-1].insert(0, last.pop())
            filled = sum(map(size_of, pages[-1]))
        pages[-1].append(block)
        filled += size
    return [page for page in pages if page]


def names(name: str, count: int) -> list[str]:
    """kernel.md, kernel-2.md, …"""
    return [
        f"{name}.md" if number == 1 else f"{name}-{number}.md" for number in range(1, count + 1)
    ]
