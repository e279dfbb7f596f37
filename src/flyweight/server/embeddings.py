"""POST /v1/embeddings: texts → vectors, on servers that were started with --embeddings."""

from __future__ import annotations

import base64
import struct
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BeforeValidator, Field

from flyweight.engine.request import SamplingParams
from flyweight.server.counts import MOST_PROMPTS, check_prompt
from flyweight.server.fleet import Fleet
from flyweight.server.protocol import Loose, Prompt, Texts
from flyweight.server.refusals import BadRequest, UnsupportedField
from flyweight.server.service import Service, json_response, while_connected

ONE = SamplingParams(max_tokens=1)  # nothing is sampled; the queue counts one sample for each text


class EmbeddingRequest(Loose):
    input: Prompt = Field(description="Text, token ids, or a list of either.")
    model: str | None = Field(None, description="A served name; may be left out.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: 32-bit floats, little end first."
    )
    dimensions: int | None = Field(None, description="Only the model's own number.")
    user: str | None = None


class OllamaEmbed(Loose):
    model: str = Field(description="A served name, with or without :latest.")
    input: Annotated[str | Texts, BeforeValidator(check_prompt)] = Field(
        description="A text, or several."
    )


def texts_of(given: Any) -> list[Any]:
    if isinstance(given, str):
        return [given]
    if not given:
        raise BadRequest(f"input has 0 texts; give 1 to {MOST_PROMPTS}", param="input")
    return [given] if isinstance(given[0], int) else list(given)


async def embed(
    service: Service, request: Request, texts: list[Any], name: str | None
) -> tuple[list[list[float]], int]:
    """(vectors, tokens read)."""
    pooling = service.settings.embeddings
    if pooling is None:
        raise UnsupportedField(
            "embeddings are not supported: start the server with --embeddings mean or last"
        )
    if name in service.settings.adapters:
        raise UnsupportedField(
            f"embeddings are of the model itself, not of an adapter; call it {service.names[0]}",
            param="model",
        )
    service.engine.check_room(1, 1)  # before the work: there may be very many
    prompts = await service.prompts.encode(texts, context=service.context)
    vectors: list[list[float]] = [[] for _ in prompts]
    room = max(1, service.engine.capacity // 2)  # the rest is for others
    for first in range(0, len(prompts), room):
        ticket = service.engine.submit(prompts[first : first + room], ONE, pooling=pooling)
        try:
            async with while_connected(request.receive, ticket):
                while deltas := await ticket.next():
                    for number, delta in deltas:
                        vectors[first + number] = delta.embedding or []
        finally:
            service.finish(request, ticket)
    return vectors, sum(map(len, prompts))


def add_embeddings(
    app: FastAPI, service: Service | Fleet, responses: dict[int | str, dict[str, Any]]
) -> None:
    @app.post("/v1/embeddings", responses=responses, response_class=Response, tags=["embeddings"])
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Vectors of unit length, one for each text."""
        async with service.using(body.model) as one:
            vectors, tokens = await embed(one, request, texts_of(body.input), body.model)
        if body.dimensions not in (None, len(vectors[0])):
            raise UnsupportedField(
                f"dimensions is not supported: this model's vectors have {len(vectors[0])}",
                param="dimensions",
            )
        encode = packed if body.encoding_format == "base64" else list
        data = [
            {"object": "embedding", "index": index, "embedding": encode(vector)}
            for index, vector in enumerate(vectors)
        ]
        return json_response(
            {
                "object": "list",
                "data": data,
                "model": service.check_model(body.model),
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    @app.post("/api/embed", responses=responses, response_class=Response, tags=["Ollama"])
    async def ollama(body: OllamaEmbed, request: Request) -> Response:
        """The same in Ollama's words."""
        name = body.model.removesuffix(":latest")
        async with service.using(name) as one:
            vectors, tokens = await embed(one, request, texts_of(body.input), name)
        return json_response({"model": name, "embeddings": vectors, "prompt_eval_count": tokens})


def packed(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
