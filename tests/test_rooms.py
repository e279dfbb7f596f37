"""Rooms import downwards only, in the order that docs/architecture.md states, and no two files
import each other.

Imports inside functions and for type checkers count: a knot that is tied late is still a knot. An
exception is a pair of modules with the reason beside it; one that is no longer needed fails the
test, so the list can only shrink.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "flyweight"

UPWARDS: set[tuple[str, str]] = set()
# Imports that close a circle; without them there is none.
CIRCULAR: set[tuple[str, str]] = set()


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def imports(module: str) -> Iterator[str]:
    """Every module of the package that a file names in an import, wherever that stands."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


@functools.cache
def edges() -> set[tuple[str, str]]:
    """(who, whom). The package's own __init__ is imported with every module, and imports when it is
    asked: left out.
    """
    found = {(module, other) for module in MODULES for other in imports(module)}
    return {(who, whom) for who, whom in found if "flyweight" not in (who, whom) and who != whom}


def stated_order() -> list[list[str]]:
    """The rooms of docs/architecture.md, the highest first; the lines between the marks are the
    order.
    """
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = text.split("<!-- order of rooms -->")[1].split("```")[1]
    lines = [line.split("—")[0] for line in block.splitlines() if line.strip()]
    return [[word.strip() for word in line.split(",")] for line in lines]


def room(module: str) -> str:
    return module.split(".")[1]


def test_every_room_has_its_place_in_the_order():
    stated = [name for line in stated_order() for name in line]
    assert len(stated) == len(set(stated))
    there = {room(module) for module in MODULES if module != "flyweight"}
    assert there == set(stated), (
        "docs/architecture.md, `The order of rooms`, names other rooms than there are"
    )


def test_files_that_the_map_names_are_there():
    """In the tree, within the room whose line is above; elsewhere on the page by their path."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    source = ROOT / "src" / "flyweight"
    tree = text.split("## The rooms")[1].split("```")[1]
    missing = [
        path
        for path in re.findall(r"`([a-z_/]+\.(?:py|toml|h|c))`", text)
        if not (source / path).exists() and not (ROOT / path).exists()
    ]
    folder = source
    for line in tree.splitlines():
        if begun := re.match(r"  ([a-z]\w*)/ ", line):
            folder = source / begun[1]
        elif re.match(r"  [a-z_]\w*\.py", line):
            folder = source
        for name in re.findall(r"\b[\w]+\.(?:py|toml)\b", line):
            if not any(folder.rglob(name)):
                missing.append(f"{folder.name}/{name}")
    assert not missing
    assert len(re.findall(r"\.py", tree)) > 100, "the tree was read"


def test_rooms_import_downwards_only():
    height = {name: -line for line, names in enumerate(stated_order()) for name in names}
    lowest = min(
        height.values()
    )  # rooms of the last line may use each other; that they make no circle is tested below
    upwards = {
        (who, whom)
        for who, whom in edges()
        if room(who) != room(whom)
        and height[room(who)] <= height[room(whom)]
        and not height[room(who)] == height[room(whom)] == lowest
    }
    assert not upwards - UPWARDS, "these import upwards"
    assert not UPWARDS - upwards, "these exceptions are no longer needed"


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one circle of imports, or nothing."""
    left = {who: set(whom) for who, whom in graph.items()}
    while True:
        free = {who for who, whom in left.items() if not whom}
        if not free:
            break
        left = {who: whom - free for who, whom in left.items() if who not in free}
    if not left:
        return []
    path = [min(left)]
    while path[-1] not in path[:-1]:
        path.append(min(left[path[-1]]))
    return path[path.index(path[-1]) :]


def graph_of(pairs: set[tuple[str, str]]) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = defaultdict(set)
    for who, whom in pairs:
        graph[who].add(whom)
        graph[whom] |= set()
    return graph


def test_no_two_files_import_each_other():
    assert not circle(graph_of(edges() - CIRCULAR)), "a circle of imports"


@pytest.mark.parametrize("exception", sorted(CIRCULAR))
def test_an_exception_is_still_needed(exception):
    assert exception in edges() and circle(graph_of(edges() - CIRCULAR | {exception}))


def test_a_circle_is_found():
    assert not circle(graph_of({("a", "b"), ("b", "c"), ("a", "c")}))
    assert set(circle(graph_of({("a", "b"), ("b", "c"), ("c", "b")}))) == {"b", "c"}
