"""The chat page at / and the reference at /docs. Neither loads anything from anywhere else.

The page is one file. Its policy lets only its own script run, by hash: should a model's answer ever
get past the sanitizer, the browser still runs nothing of it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def page() -> tuple[str, str]:
    """(the HTML, its content security policy)."""
    parts = {name: (HERE / f"chat.{name}").read_text(encoding="utf-8") for name in ("css", "js")}
    html = re.sub(
        r"\{\{(\w+)\}\}",
        lambda match: parts[match[1]],
        (HERE / "chat.html").read_text(encoding="utf-8"),
    )
    sources = {
        kind: " ".join(
            f"'sha256-{digest(part)}'"
            for part in re.findall(rf"<{kind}>(.*?)</{kind}>", html, re.DOTALL)
        )
        for kind in ("script", "style")
    }
    return html, (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action "
        "'none'; "
        f"frame-ancestors 'self'; script-src {sources['script']}; style-src {sources['style']}"
    )


def digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def documentation(schema: dict[str, Any]) -> str:
    """The OpenAPI document as a plain page: every endpoint with its fields and answers."""
    style = (HERE / "docs.css").read_text(encoding="utf-8")
    sections = [
        endpoint(path, method, operation, schema)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width">'
        f"<title>{escape(schema['info']['title'])} "
        f"API</title><style>{style}</style></head><body><main>"
        f"<h1>{escape(schema['info']['title'])} API</h1><p>{escape(schema['info']['description'])} "
        "The same for machines: "
        '<a href="/openapi.json">/openapi.json</a>. <a '
        f'href="/">Chat</a>.</p>{"".join(sections)}</main></body></html>'
    )


def endpoint(path: str, method: str, operation: dict[str, Any], schema: dict[str, Any]) -> str:
    content = (
        operation.get("requestBody", {})
        .get("content", {})
        .get("application/json", {})
        .get("schema", {})
    )
    fields = schema["components"]["schemas"].get(content.get("$ref", "").rsplit("/", 1)[-1], {})
    required = fields.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code>{' *' if name in required else ''}</td>"
        f"<td>{escape(kind(field))}</td>"
        f"<td>{escape(field.get('description', ''))}</td></tr>"
        for name, field in fields.get("properties", {}).items()
    )
    answers = "".join(
        f"<li><code>{escape(code)}</code> {escape(answer['description'])}</li>"
        for code, answer in operation["responses"].items()
    )
    table = f"<table><tr><th>field</th><th>type</th><th></th></tr>{rows}</table>" if rows else ""
    return (
        f"<section><h2><code>{method.upper()} "
        f"{escape(path)}</code></h2><p>{escape(operation.get('description', ''))}</p>"
        f"{table}<ul>{answers}</ul></section>"
    )


def kind(field: dict[str, Any]) -> str:
    """A field's type in a few words."""
    if "anyOf" in field:
        return " | ".join(dict.fromkeys(kind(one) for one in field["anyOf"]))
    if "$ref" in field:
        return field["$ref"].rsplit("/", 1)[-1]
    if "enum" in field or "const" in field:
        return " | ".join(map(repr, field.get("enum", [field.get("const")])))
    return (
        f"list of {kind(field['items'])}"
        if field.get("type") == "array" and "items" in field
        else field.get("type", "any")
    )
