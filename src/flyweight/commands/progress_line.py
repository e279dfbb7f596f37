"""One line of progress that fits 80 columns: what is cut stands last, after the time left."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

BAR = 12  # columns


def progress_line(console: Console, name: str, unit: str) -> Progress:
    """`NAME ━━╸─ 3/30 blocks 0:00:41 left  doing this`; nothing without a terminal."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    whole = Column(no_wrap=True, overflow="ignore")  # rich cuts a column that may be cut
    rest = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    return Progress(
        TextColumn(name, table_column=whole),
        BarColumn(bar_width=BAR, table_column=whole),
        MofNCompleteColumn(table_column=whole),
        TextColumn(unit, table_column=whole),
        TimeRemainingColumn(elapsed_when_finished=True, table_column=whole),
        TextColumn("left", table_column=whole),
        TextColumn("{task.description}", table_column=rest),
        console=console,
        transient=True,
        expand=True,
        disable=not console.is_terminal,
    )
