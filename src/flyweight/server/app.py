"""The routes. Each says what it takes and gives; the work is in `service.py`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from flyweight import __version__
from flyweight.server.gate import Gate
from flyweight.server.json_body import broken_json
from flyweight.server.page import documentation, page
from flyweight.server.page.fields import describe
from flyweight.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from flyweight.server.refusals import BadRequest, EngineFailed, Forbidden, Refusal, UnsupportedField, error_body
from flyweight.server.service import Service, json_response


class Problem(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: Problem


REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text} for status, text in (
        (400, "Something in the request cannot be done; the message names it."), (401, "No valid API key."),
        (404, "No such model."), (413, "The body is larger than this server takes."),
        (429, "The queue is full; Retry-After says when to try again."), (500, "The engine failed on this request."),
        (503, "The engine is loading or starting again."), (504, "The answer took longer than this server allows."))}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer; with `stream`, chunks of one token each as server-sent events.",
          "content": {"application/json": {}, "text/event-stream": {}}}}


def create_app(service: Service, *, start: bool = True) -> ASGIApp:
    """`start`: the engine begins to load when the server begins to listen."""
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if start:
            service.engine.start()
        yield
        service.engine.stop()

    app = FastAPI(title="Flyweight", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None,
                  description="An OpenAI-compatible server. Every error is an object with message, type, param and code.")
    add_generation(app, service)
    add_tokens(app, service)
    add_state(app, service)
    add_pages(app)
    add_handlers(app)
    return Gate(app, service.settings, service.metrics)


def add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", responses={**REFUSALS, **STREAM}, response_class=Response, tags=["generate"])
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text, token ids, or several of either."""
        return await service.complete(request, body)

    @app.post("/v1/chat/completions", responses={**REFUSALS, **STREAM}, response_class=Response, tags=["generate"])
    async def chat(body: ChatRequest, request: Request) -> Response:
        """The next message of a conversation."""
        return await service.chat(request, body)

    @app.post("/v1/embeddings", responses={400: REFUSALS[400]}, response_class=Response, tags=["generate"])
    async def embeddings() -> Response:
        """Refused: this server generates text."""
        raise UnsupportedField("embeddings are not supported: this server generates text; use an embedding model's own server")


def add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", responses=REFUSALS, response_class=Response, tags=["tokens"])
    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a prompt, or of messages in the model's chat template."""
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("give either prompt or messages", param="prompt")
        if body.prompt is not None:
            tokens = (await service.prompts.encode([body.prompt], special=body.add_special_tokens is not False))[0]
        else:
            tokens = (await service.prompts.chat(body)).tokens  # type: ignore[arg-type]
        names = [service.names.text(token) for token in tokens] if body.return_token_strs else None
        return json_response({"count": len(tokens), "max_model_len": service.engine.facts.get("max_model_len"), "tokens": tokens,
                              "token_strs": names})

    @app.post("/detokenize", responses=REFUSALS, response_class=Response, tags=["tokens"])
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        service.check_model(body.model)
        size = len(service.prompts.need().inner)
        if bad := [token for token in body.tokens if token >= size]:
            raise BadRequest(f"token id {bad[0]} is outside the vocabulary of {size}", param="tokens")
        return json_response({"prompt": service.text_of(body.tokens)})

    @app.post("/reset_prefix_cache", responses={**REFUSALS, 403: {"model": ErrorBody, "description": "Not switched on."}},
              response_class=Response, tags=["state"])
    async def reset_prefix_cache() -> Response:
        """Forget all cached prefixes. Needs an API key, or a server that was started with --allow-reset."""
        if not service.settings.api_keys and not service.settings.allow_reset:
            raise Forbidden("resetting the prefix cache is not switched on; start the server with --allow-reset or an API key")
        service.engine.reset_prefix_cache()
        return json_response({"status": "ok"})


def add_state(app: FastAPI, service: Service) -> None:
    created, engine = int(time.time()), service.engine

    def describe(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": created, "owned_by": "flyweight", "root": service.settings.model,
                "parent": None, "max_model_len": engine.facts.get("max_model_len")}

    @app.get("/v1/models", response_class=Response, responses={401: REFUSALS[401]}, tags=["state"])
    async def models() -> Response:
        """The names this server answers to; `root` is the model behind them."""
        return json_response({"object": "list", "data": [describe(name) for name in service.settings.served]})

    missing: dict[int | str, dict[str, Any]] = {401: REFUSALS[401], 404: REFUSALS[404]}

    @app.get("/v1/models/{name:path}", response_class=Response, responses=missing, tags=["state"])
    async def model(name: str) -> Response:
        """One of them."""
        return json_response(describe(service.check_model(name)))

    @app.get("/health", response_class=Response, tags=["state"])
    async def health() -> Response:
        """200 as long as this process can mend itself; a liveness probe."""
        return json_response({"status": "ok", "engine": engine.state}, status=200 if engine.state != "stopped" else 503)

    @app.get("/ready", response_class=Response, responses={503: {"description": "Not yet, or not any more."}}, tags=["state"])
    async def ready() -> Response:
        """200 from the end of the warm-up on, while requests are taken; a readiness probe."""
        load = engine.load
        body = {"status": engine.state, "running": load.running, "in_flight": engine.in_flight, "kv_blocks": load.blocks,
                "kv_blocks_used": load.blocks - load.free_blocks, "restarts": engine.restarts}
        return json_response(body, status=200 if engine.state == "ready" else 503)

    @app.get("/metrics", response_class=Response, tags=["state"])
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def add_pages(app: FastAPI) -> None:
    shown, policy = page()
    described: Callable[[], str] = lambda: documentation(openapi(app))  # noqa: E731

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def chat_page() -> Response:
        return HTMLResponse(shown, headers={"content-security-policy": policy, "x-content-type-options": "nosniff",
                                            "referrer-policy": "no-referrer"})

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(described(), headers={"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"})

    @app.get("/openapi.json", include_in_schema=False)
    async def document() -> Response:
        return json_response(openapi(app))


def openapi(app: FastAPI) -> dict[str, Any]:
    """The document, with 400 where the framework would answer 422."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(name, None)
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}, {}]
        app.openapi_schema = describe(schema)
    return app.openapi_schema


def add_handlers(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        request.state.facts.setdefault("error", str(error))
        return json_response(error.body(), status=error.status, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = [str(part) for part in first["loc"][1:]]
        message = f"{'.'.join(where)}: {first['msg']}" if where else f"the body is not a request: {first['msg']}"
        if (broken := broken_json(error)) is not None:
            where, message = [], broken
        request.state.facts.setdefault("error", f"{'.'.join(where)}: {first['type']}")
        return json_response(BadRequest(message, param=where[0] if where else None).body(), status=400)

    @app.exception_handler(Exception)  # a fault of ours: the gate writes down which
    async def failed(_: Request, __: Exception) -> Response:
        error = EngineFailed("the server failed on this request; its log says why")
        return json_response(error.body(), status=error.status)

    @app.exception_handler(HTTPException)
    async def refused_by_framework(_: Request, error: HTTPException) -> Response:
        body = error_body(str(error.detail), kind="invalid_request_error", code=str(error.status_code))
        return json_response(body, status=error.status_code, headers=dict(error.headers or {}))
