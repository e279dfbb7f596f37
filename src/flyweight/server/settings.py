"""What the person who starts the server decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flyweight.server.connections import ConnectionLimits


@dataclass(frozen=True)
class Settings:
    model: str
    names: tuple[str, ...] = ()  # what clients call it; the model's own name if empty
    # none: open to everybody who reaches the port
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    # names beside addresses and this machine's own that requests may call it by
    allowed_hosts: tuple[str, ...] = ()
    strict: bool = False  # refuse unknown fields instead of warning
    max_queue: int = 256  # samples that wait, beside those that run
    max_body: int = 8 << 20  # bytes of a request
    timeout: float = 600.0  # seconds from arrival to the last token
    # seconds without progress of a step, or a sign of life, after which the engine is replaced
    engine_timeout: float = 30.0
    drain: float = 120.0  # seconds that requests in flight get after SIGTERM
    allow_reset: bool = False  # /reset_prefix_cache without an API key
    # clients are not told how much of a prompt was in the prefix cache
    hide_cached_tokens: bool = False
    log_prompts: bool = False
    connections: ConnectionLimits = field(default_factory=ConnectionLimits.of_this_process)
    tool_parser: str | None = None  # format of tool calls; None: as the chat template shows
    embeddings: str | None = None  # pooling of /v1/embeddings: mean or last; None: refused
    lazy: bool = False  # of several models, none is loaded before it is asked for
    # of several models, so many at once; None: as many as there is room for
    max_loaded: int | None = None
    engine: dict[str, Any] = field(default_factory=dict)  # options of LLM

    @property
    def served(self) -> tuple[str, ...]:
        """The model's names, then those of its adapters."""
        return (*(self.names or (self.model,)), *self.adapters)

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self.engine.get("adapters", ()))
