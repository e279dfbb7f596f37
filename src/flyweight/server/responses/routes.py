"""OpenAI's newer API: POST /v1/responses, and GET and DELETE of those that are kept."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from flyweight.server.fleet import Fleet
from flyweight.server.responses.answer import ResponseTeller
from flyweight.server.responses.request import ResponsesRequest, chat_of, new_messages
from flyweight.server.responses.store import ResponseStore
from flyweight.server.service import Service, json_response
from flyweight.server.telling import Block


def add_responses(
    app: FastAPI, service: Service | Fleet, responses: dict[int | str, dict[str, Any]]
) -> None:
    store = ResponseStore()

    @app.post("/v1/responses", responses=responses, response_class=Response, tags=["responses"])
    async def create(body: ResponsesRequest, request: Request) -> Response:
        """An answer as output items; kept in memory for a while, so that the next can go on from
        it.
        """
        before: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            before = store.get(body.previous_response_id, param="previous_response_id").messages
        chat, warnings = chat_of(body, before)

        def keep(response: dict[str, Any], blocks: list[Block]) -> None:
            if body.store is not False:
                store.put(response, [*before, *new_messages(body), *answer_messages(blocks)])

        def teller(model: str) -> ResponseTeller:
            return ResponseTeller(model, body, keep)

        return await service.converse(request, chat, teller, warnings=warnings)

    @app.get(
        "/v1/responses/{name}", responses=responses, response_class=Response, tags=["responses"]
    )
    async def retrieve(name: str) -> Response:
        """One that is still in memory."""
        return json_response(store.get(name).response)

    @app.delete(
        "/v1/responses/{name}", responses=responses, response_class=Response, tags=["responses"]
    )
    async def delete(name: str) -> Response:
        """Forget it."""
        store.delete(name)
        return json_response({"id": name, "object": "response", "deleted": True})


def answer_messages(blocks: list[Block]) -> list[dict[str, Any]]:
    """The answer as the next prompt shows it; what was thought is not shown again."""
    words = "".join(block.text for block in blocks if block.kind == "text")
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": block.text},
        }
        for block in blocks
        if block.kind == "call"
    ]
    message: dict[str, Any] = {"role": "assistant", "content": words}
    return [message | ({"tool_calls": calls} if calls else {})]
