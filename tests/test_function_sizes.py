"""A reader can hold a function in mind: at most 8 parameters and 80 lines in the rooms below."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "flyweight"
FILES = sorted(
    [*SOURCE.glob("models/**/*.py"), *SOURCE.glob("kernels/**/*.py"), SOURCE / "engine/graphs.py"]
)
MOST_PARAMETERS = 8
MOST_LINES = 80


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """By name, the object or class itself left out, *args and **options counted as one each."""
    given = function.args
    found = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    found += [one for one in (given.vararg, given.kwarg) if one]
    return [one.arg for one in found if one.arg not in ("self", "cls")]


def is_triton_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Pointers, strides and constants are all that Triton's functions can be handed: no objects."""
    return any("triton.jit" in ast.unparse(one) for one in function.decorator_list)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_functions_are_short_and_take_few_parameters(path):
    for function in functions(path):
        lines = (function.end_lineno or 0) - function.lineno + 1
        assert lines <= MOST_LINES, f"{function.name} has {lines} lines"
        names = parameters(function)
        if not is_triton_kernel(function):
            assert len(names) <= MOST_PARAMETERS, f"{function.name} takes {len(names)}: {names}"


def test_the_rule_counts_keyword_only_parameters_but_not_self():
    source = "def f(self, a, /, b, *more, c, d=1, **rest): pass"
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert parameters(function) == ["a", "b", "c", "d", "more", "rest"]
