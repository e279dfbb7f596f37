"""Anthropic's API: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from flyweight.server.anthropic.answer import MessagesTeller
from flyweight.server.anthropic.request import CountRequest, MessagesRequest, chat_of
from flyweight.server.fleet import Fleet
from flyweight.server.service import Service, json_response


def add_anthropic(
    app: FastAPI, service: Service | Fleet, responses: dict[int | str, dict[str, Any]]
) -> None:
    @app.post("/v1/messages", responses=responses, response_class=Response, tags=["Anthropic"])
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """The next message of a conversation, as Anthropic's API says it."""
        chat, warnings = chat_of(body)
        return await service.converse(request, chat, MessagesTeller, warnings=warnings)

    @app.post(
        "/v1/messages/count_tokens",
        responses=responses,
        response_class=Response,
        tags=["Anthropic"],
    )
    async def count_tokens(body: CountRequest) -> Response:
        """How many tokens the prompt of such a message has."""
        chat, _ = chat_of(body)
        tokens = await service.of(chat.model).prompts.chat(chat)
        return json_response({"input_tokens": len(tokens)})
