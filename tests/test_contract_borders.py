"""Executors and solvers know a weight on a device only by its contract: nobody asks which kernel it
is.

`isinstance`, `cast`, `type`, `hasattr` and `match` on classes of kernels/, and comparisons with the
name of a weight format, would bring the tables back that the contract has replaced.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from flyweight.kernels.linear.format import FORMATS

SOURCE = Path(__file__).parents[1] / "src" / "flyweight"
FILES = sorted(
    path for room in ("models", "engine", "quant") for path in (SOURCE / room).rglob("*.py")
)
ASKING = {"isinstance", "issubclass", "cast", "type", "hasattr"}
# `int8` and `fp8` are also what recipes call activations and solvers.
FORMAT_NAMES = set(FORMATS) - {"plain", "int8", "fp8"}
NAMES = FORMAT_NAMES | {"gemv", "gemv_splitk", "gemv_cluster", "gemm_small", "cublas"}


def kernel_classes(tree: ast.AST) -> set[str]:
    """Names that a file imports from kernels/."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flyweight.kernels"):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def named(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nobody_above_asks_which_kernel_a_weight_has(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = kernel_classes(tree)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ASKING
        ):
            asked = (
                set().union(*(named(argument) for argument in node.args[1:]))
                if node.func.id != "cast"
                else named(node)
            )
            assert not asked & classes, f"line {node.lineno}: {ast.unparse(node)}"
        assert not isinstance(node, ast.Match), f"line {node.lineno}: a match"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nobody_above_compares_with_the_name_of_a_format_or_kernel(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Compare):
            texts = {
                part.value
                for part in ast.walk(node)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            }
            assert not texts & NAMES, f"line {node.lineno}: {ast.unparse(node)}"
