"""One line per event, as text for people or JSON for machines. Prompts, answers and keys are never
among the fields.

    2026-01-01T12:00:00Z INFO request request_id=6f… path=/v1/completions status=200 ttft_ms=41.2
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any

from flyweight.errors import OptionError, unknown

logger = logging.getLogger("flyweight.server")


def log(event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    logger.log(level, event, extra={"fields": fields})


class EventFormatter(logging.Formatter):
    def facts(self, record: logging.LogRecord) -> dict[str, Any]:
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        stamp = when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        facts = {
            "time": stamp,
            "level": record.levelname,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        return facts | (
            {"traceback": self.formatException(record.exc_info)} if record.exc_info else {}
        )


class TextFormatter(EventFormatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = self.facts(record)
        head = [facts.pop(name) for name in ("time", "level", "event")]
        trace = facts.pop("traceback", None)
        rest = [f"{name}={one_word(value)}" for name, value in facts.items() if value is not None]
        return " ".join([*head, *rest]) + (f"\n{trace}" if trace else "")


class JSONFormatter(EventFormatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self.facts(record), default=str)


FORMATTERS = {"text": TextFormatter, "json": JSONFormatter}


def one_word(value: Any) -> str:
    text = str(value)
    return (
        text
        if text and text.isprintable() and not any(letter in text for letter in ' "=')
        else json.dumps(text)
    )


def configure(style: str, *, level: int = logging.INFO) -> None:
    if style not in FORMATTERS:
        raise OptionError(unknown("log format", style, FORMATTERS))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATTERS[style]())
    for name in ("flyweight.server", "uvicorn"):
        one = logging.getLogger(name)
        one.handlers, one.propagate = [handler], False
        one.setLevel(level if name == "flyweight.server" else logging.WARNING)
