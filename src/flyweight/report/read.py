"""Any file of results as rows: our JSONL, the result files of other tools, and the documents whose
layouts we reproduce.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from flyweight.errors import ResultError
from flyweight.report import foreign
from flyweight.report.rows import Results, join, read_jsonl
from flyweight.report.seeds import read_seed


def read(paths: Iterable[Path]) -> Results:
    results = join(read_one(path) for path in paths)
    if not results.rows:
        raise ResultError("no result rows in these files")
    return results


def read_one(path: Path) -> Results:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ResultError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ResultError(f"{path}: cannot be read as text ({error})") from None
    if not text.strip():
        raise ResultError(f"{path}: the file is empty")
    if text.lstrip()[0] not in "{[":
        return read_seed(path)
    if (tool := foreign.recognize(text)) is not None:
        return tool(path, text)
    return read_jsonl(path)


def dump(results: Results) -> str:
    """The rows as JSONL, environments first, so that they can be read again."""
    return "".join(
        json.dumps(row, ensure_ascii=False) + "\n"
        for row in (*results.environments.values(), *results.rows)
    )
