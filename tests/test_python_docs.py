"""The Python of README and docs: every call uses methods and keywords that there are."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import flyweight
from flyweight import LLM, SamplingParams

ROOT = Path(__file__).parents[1]
CALLED = {"LLM": LLM, "SamplingParams": SamplingParams, "quantize": flyweight.quantize}


def blocks():
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for number, found in enumerate(
            re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
        ):
            yield pytest.param(found, id=f"{path.name} {number}")


def target_of(call):
    """What is called: a name of ours, or a method of `llm`."""
    function = call.func
    if isinstance(function, ast.Name):
        return CALLED.get(function.id)
    if (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "llm"
    ):
        return getattr(LLM, function.attr)
    return None


@pytest.mark.parametrize("text", list(blocks()))
def test_examples_call_what_there_is(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and (target := target_of(node)) is not None:
            known = inspect.signature(target).parameters
            assert {keyword.arg for keyword in node.keywords} <= known.keys(), ast.unparse(node)


def test_the_page_about_python_shows_every_way_to_ask():
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert all(f"llm.{name}(" in text for name in ("generate", "chat", "stream", "room"))
