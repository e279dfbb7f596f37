"""The routes. Each says what it takes and gives; the work is in `service.py`."""

from __future__ import annotations

import asyncio
import os
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
from flyweight.server.anthropic.routes import add_anthropic
from flyweight.server.body_route import BodyRoute
from flyweight.server.embeddings import add_embeddings
from flyweight.server.error_shapes import error_content
from flyweight.server.fleet import Fleet
from flyweight.server.gate import Gate
from flyweight.server.json_body import broken_json
from flyweight.server.ollama.routes import add_ollama
from flyweight.server.page import documentation, page
from flyweight.server.page.fields import describe
from flyweight.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from flyweight.server.refusals import BadRequest, EngineFailed, Forbidden, Refusal, error_body
from flyweight.server.responses.routes import add_responses
from flyweight.server.service import Service, json_response


class Problem(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: Problem


REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in (
        (400, "Something in the request cannot be done; the message names it."),
        (401, "No valid API key."),
        (404, "No such model."),
        (408, "The request did not arrive in time."),
        (413, "The body is larger than this server takes."),
        (429, "The queue is full; Retry-After says when to try again."),
        (500, "The engine failed on this request."),
        (503, "The engine is loading or starting again."),
        (504, "The answer took longer than this server allows."),
    )
}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream`, chunks of one token each as server-sent events.",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}


def create_app(service: Service | Fleet, *, start: bool = True) -> ASGIApp:
    """`start`: the engine begins to load when the server begins to listen."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if start:
            service.start()
        yield
        service.stop()

    app = FastAPI(
        title="Flyweight",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        description="An OpenAI-compatible server. Every error is an object with message, type, "
        "param and code.",
    )
    app.router.route_class = BodyRoute
    add_generation(app, service)
    for add_api in (add_responses, add_anthropic, add_ollama, add_embeddings):
        add_api(app, service, {**REFUSALS, **STREAM})
    add_tokens(app, service)
    add_state(app, service)
    add_pages(app)
    add_handlers(app)
    return Gate(app, service.settings, service.metrics)


def add_generation(app: FastAPI, service: Service | Fleet) -> None:
    @app.post(
        "/v1/completions",
        responses={**REFUSALS, **STREAM},
        response_class=Response,
        tags=["generate"],
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text, token ids, or several of either."""
        return await service.complete(request, body)

    @app.post(
        "/v1/chat/completions",
        responses={**REFUSALS, **STREAM},
        response_class=Response,
        tags=["generate"],
    )
    async def chat(body: ChatRequest, request: Request) -> Response:
        """The next message of a conversation."""
        return await service.chat(request, body)


def add_tokens(app: FastAPI, service: Service | Fleet) -> None:
    @app.post("/tokenize", responses=REFUSALS, response_class=Response, tags=["tokens"])
    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a prompt, or of messages in the model's chat template."""
        one = service.of(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("give either prompt or messages", param="prompt")
        if body.prompt is not None:
            tokens = (
                await one.prompts.encode(
                    [body.prompt], special=body.add_special_tokens is not False
                )
            )[0]
        else:
            tokens = await one.prompts.chat(body)  # type: ignore[arg-type]
        names = (
            await asyncio.to_thread(lambda: list(map(one.token_names.text, tokens)))
            if body.return_token_strs
            else None
        )
        return json_response(
            {
                "count": len(tokens),
                "max_model_len": one.engine.facts.get("max_model_len"),
                "tokens": tokens,
                "token_strs": names,
            }
        )

    @app.post("/detokenize", responses=REFUSALS, response_class=Response, tags=["tokens"])
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        one = service.of(body.model)
        size = len(one.prompts.need().inner)
        if bad := next((token for token in body.tokens if token >= size), None):
            raise BadRequest(f"token id {bad} is outside the vocabulary of {size}", param="tokens")
        return json_response({"prompt": await asyncio.to_thread(one.text_of, body.tokens)})

    @app.post(
        "/reset_prefix_cache",
        responses={**REFUSALS, 403: {"model": ErrorBody, "description": "Not switched on."}},
        response_class=Response,
        tags=["state"],
    )
    async def reset_prefix_cache() -> Response:
        """Forget all cached prefixes. Needs an API key, or a server that was started with
        --allow-reset.
        """
        if not service.settings.api_keys and not service.settings.allow_reset:
            raise Forbidden(
                "resetting the prefix cache is not switched on; start the server with "
                "--allow-reset or an API key"
            )
        service.engine.reset_prefix_cache()
        return json_response({"status": "ok"})


FRAMEWORK_ERRORS = {  # refused before any code of ours is reached
    400: "the body is not JSON: no UTF-8, or nested too deeply",
    404: "there is no such path; /docs lists all of them",
    405: "this path takes another method; /docs lists all of them",
}
AWAY = "the engine is away for a moment"
REASONS = {  # state of the engine → why it takes no requests
    "loading": "the model is being loaded",
    "restarting": "the engine has died and is being started again",
    "draining": "the server is going down and takes no new requests",
    "stopped": "the engine has died and is not started again; the server's log says why",
}


def add_state(app: FastAPI, service: Service | Fleet) -> None:
    created, engine = int(time.time()), service.engine

    def describe(name: str) -> dict[str, Any]:
        one = service.of(name)
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "flyweight",
            "root": root_of(one.settings.model),
            "parent": one.settings.served[0] if name in one.settings.adapters else None,
            "max_model_len": one.engine.facts.get("max_model_len"),
        }

    @app.get("/v1/models", response_class=Response, responses={401: REFUSALS[401]}, tags=["state"])
    async def models() -> Response:
        """The names this server answers to; `root` is the model behind them, `parent` that of an
        adapter.
        """
        return json_response({"object": "list", "data": [describe(name) for name in service.names]})

    missing: dict[int | str, dict[str, Any]] = {401: REFUSALS[401], 404: REFUSALS[404]}

    @app.get("/v1/models/{name:path}", response_class=Response, responses=missing, tags=["state"])
    async def model(name: str) -> Response:
        """One of them."""
        return json_response(describe(service.check_model(name)))

    @app.get("/live", response_class=Response, tags=["state"])
    async def live() -> Response:
        """200 as long as this process can mend itself, loading included; a liveness probe."""
        return json_response(
            {"status": engine.state}, status=200 if engine.state != "stopped" else 503
        )

    not_ready: dict[int | str, dict[str, Any]] = {503: {"description": "Not yet, or not any more."}}

    @app.get("/health", response_class=Response, responses=not_ready, tags=["state"])
    async def health() -> Response:
        """200 while requests are taken, 503 with the reason otherwise."""
        if engine.available:
            return json_response({"status": "ok"})
        body = {"status": engine.state, "reason": REASONS.get(engine.state, AWAY)}
        return json_response(body, status=503)

    @app.get("/ready", response_class=Response, responses=not_ready, tags=["state"])
    async def ready() -> Response:
        """As /health, with what the engine holds; a readiness probe."""
        load = engine.load
        body = {
            "status": engine.state,
            "running": load.running,
            "in_flight": engine.in_flight,
            "kv_blocks": load.blocks,
            "kv_blocks_used": load.blocks - load.free_blocks,
            "restarts": engine.restarts,
        }
        return json_response(body, status=200 if engine.available else 503)

    @app.get("/metrics", response_class=Response, tags=["state"])
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def root_of(model: str) -> str:
    """Without its folder: this machine's folders are nobody's business."""
    return os.path.basename(model) if os.path.isabs(model) else model


def add_pages(app: FastAPI) -> None:
    shown, policy = page()
    described: Callable[[], str] = lambda: documentation(openapi(app))  # noqa: E731

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def chat_page() -> Response:
        return HTMLResponse(
            shown,
            headers={
                "content-security-policy": policy,
                "x-content-type-options": "nosniff",
                "referrer-policy": "no-referrer",
            },
        )

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(
            described(),
            headers={"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"},
        )

    @app.get("/openapi.json", include_in_schema=False)
    async def document() -> Response:
        return json_response(openapi(app))


def openapi(app: FastAPI) -> dict[str, Any]:
    """The document, with 400 where the framework would answer 422."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
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
        return json_response(
            error_content(request.url.path, error), status=error.status, headers=error.headers
        )

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = [str(part) for part in first["loc"][1:]]
        message = (
            f"{'.'.join(where)}: {first['msg']}"
            if where
            else f"the body is not a request: {first['msg']}"
        )
        if (broken := broken_json(error)) is not None:
            where, message = [], broken
        request.state.facts.setdefault("error", f"{'.'.join(where)}: {first['type']}")
        refusal = BadRequest(message, param=where[0] if where else None)
        return json_response(error_content(request.url.path, refusal), status=400)

    @app.exception_handler(Exception)  # a fault of ours: the gate writes down which
    async def failed(request: Request, _: Exception) -> Response:
        error = EngineFailed("the server failed on this request; its log says why")
        return json_response(error_content(request.url.path, error), status=error.status)

    @app.exception_handler(HTTPException)
    async def refused_by_framework(_: Request, error: HTTPException) -> Response:
        body = error_body(
            FRAMEWORK_ERRORS.get(error.status_code, str(error.detail)),
            kind="invalid_request_error",
            code=str(error.status_code),
        )
        return json_response(body, status=error.status_code, headers=dict(error.headers or {}))
