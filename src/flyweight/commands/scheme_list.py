"""`flyweight quantize --list`: every scheme, from its table, without loading what runs it."""

from __future__ import annotations

import shutil
import sys
import textwrap
import tomllib
from importlib.resources import files
from typing import Any

PLAIN = {
    "solver": "gptq",
    "bits": 4,
    "group_size": 128,
    "symmetric": True,
    "activations": "none",
}  # as quant.recipe.Layer
SHAPED = {
    "scheme": "vptq:v8-k65536-256",
    "bits": "(16 + 8) / 8",
    "engines": "Flyweight, transformers with vptq",
    "summary": "codebooks of a chosen shape: vector length, centroids, residual centroids",
}


def schemes() -> list[dict[str, str]]:
    """scheme, bits, summary and engines of each, in the order of the file."""
    text = files("flyweight.quant").joinpath("schemes.toml").read_text(encoding="utf-8")
    rows = [
        {
            "scheme": name,
            "bits": bits_of(PLAIN | keys),
            "summary": keys["summary"],
            "engines": keys["engines"],
        }
        for name, keys in tomllib.loads(text).items()
    ]
    return [*rows, SHAPED]


def names(beginning: str = "") -> list[str]:
    """For the completion of `--scheme`."""
    return [row["scheme"] for row in schemes() if row["scheme"].startswith(beginning)]


def bits_of(layer: dict[str, Any]) -> str:
    if layer["solver"] == "fp8":
        return "8 (float)"
    if layer["solver"] == "vptq":
        return f"{layer['bits']} + 0.25"
    group = "channel" if layer["group_size"] == -1 else f"group {layer['group_size']}"
    zeros = "" if layer["symmetric"] else ", zero points"
    activations = ", int8 activations" if layer["activations"] == "int8" else ""
    return f"{layer['bits']}, {group}{zeros}{activations}"


def shown(rows: list[dict[str, str]]) -> str:
    """On a terminal a paragraph each, within its width; in a pipe a line each, for grep."""
    if not sys.stdout.isatty():
        sizes = [max(len(row[key]) for row in rows) for key in ("scheme", "bits", "summary")]
        return "\n".join(
            f"{row['scheme']:<{sizes[0]}}  {row['bits']:<{sizes[1]}}  "
            f"{row['summary']:<{sizes[2]}}  {row['engines']}"
            for row in rows
        )
    width = min(100, shutil.get_terminal_size().columns)
    paragraphs = []
    for row in rows:
        about = textwrap.fill(
            f"{row['summary']}.", width, initial_indent="    ", subsequent_indent="    "
        )
        readers = textwrap.fill(
            f"read by {row['engines']}", width, initial_indent="    ", subsequent_indent="    "
        )
        paragraphs.append(f"{row['scheme']}: {row['bits']} bits\n{about}\n{readers}")
    return "\n".join(paragraphs)
