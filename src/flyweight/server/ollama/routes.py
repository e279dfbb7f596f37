"""Ollama's API: /api/chat, /api/generate, /api/tags, /api/show, /api/ps and /api/version."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from flyweight import __version__
from flyweight.server.fleet import Fleet
from flyweight.server.ollama.answer import LINES, ChatTeller, GenerateTeller, now
from flyweight.server.ollama.facts import listed, shown
from flyweight.server.ollama.request import (
    OllamaChat,
    OllamaFields,
    OllamaGenerate,
    ShowRequest,
    chat_of,
    generate_of,
    served_name,
)
from flyweight.server.refusals import UnsupportedField
from flyweight.server.service import Service, json_response

TAGS: list[Any] = ["Ollama"]


def add_ollama(
    app: FastAPI, service: Service | Fleet, responses: dict[int | str, dict[str, Any]]
) -> None:
    add_answers(app, service, responses)
    add_facts(app, service, responses)


def add_answers(
    app: FastAPI, service: Service | Fleet, responses: dict[int | str, dict[str, Any]]
) -> None:
    @app.post("/api/chat", responses=responses, response_class=Response, tags=TAGS)
    async def chat(body: OllamaChat, request: Request) -> Response:
        """The next message of a conversation, as Ollama's API says it."""
        if not body.messages:
            return loaded(body, {"message": {"role": "assistant", "content": ""}})
        wanted, warnings = chat_of(body)
        return await service.converse(
            request, wanted, ChatTeller, warnings=warnings, media_type=LINES
        )

    @app.post("/api/generate", responses=responses, response_class=Response, tags=TAGS)
    async def generate(body: OllamaGenerate, request: Request) -> Response:
        """An answer to one prompt, as Ollama's API says it."""
        if not body.prompt:
            return loaded(body, {"response": ""})
        if body.raw:
            raise UnsupportedField(
                "raw is not supported here; /v1/completions takes a prompt as it is", param="raw"
            )
        wanted, warnings = generate_of(body)
        return await service.converse(
            request, wanted, GenerateTeller, warnings=warnings, media_type=LINES
        )

    def loaded(body: OllamaFields, content: dict[str, Any]) -> Response:
        """Their way to ask for a model to be loaded."""
        name = service.check_model(served_name(body.model))
        return json_response(
            {"model": name, "created_at": now(), **content, "done": True, "done_reason": "load"}
        )


def add_facts(
    app: FastAPI, service: Service | Fleet, responses: dict[int | str, dict[str, Any]]
) -> None:
    @app.get("/api/tags", response_class=Response, tags=TAGS)
    async def tags() -> Response:
        """The models there are."""
        return json_response({"models": [listed(service.of(name), name) for name in service.names]})

    @app.post("/api/show", responses=responses, response_class=Response, tags=TAGS)
    async def show(body: ShowRequest) -> Response:
        """What one of them is."""
        return json_response(shown(service.of(served_name(body.model or body.name or ""))))

    @app.get("/api/ps", response_class=Response, tags=TAGS)
    async def running() -> Response:
        """Those that are loaded."""
        loaded = [
            (name, service.of(name))
            for name in service.names
            if service.of(name).engine.state == "ready"
        ]
        models = [
            listed(one, name) | {"context_length": one.engine.facts["max_model_len"]}
            for name, one in loaded
        ]
        return json_response({"models": models})

    @app.get("/api/version", response_class=Response, tags=TAGS)
    async def version() -> Response:
        """Ours, in the place of theirs."""
        return json_response({"version": __version__})
