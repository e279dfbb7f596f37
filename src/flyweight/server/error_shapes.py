"""A refusal in the words of the API that was asked: OpenAI's, Anthropic's or Ollama's."""

from __future__ import annotations

from typing import Any

from flyweight.server.refusals import Refusal

ANTHROPIC_KINDS = {  # status → their type
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_content(path: str, refusal: Refusal) -> dict[str, Any]:
    if path.startswith("/v1/messages"):
        return anthropic_error(refusal)
    if path.startswith("/api/"):
        return {"error": str(refusal)}
    return refusal.body()


def anthropic_error(refusal: Refusal) -> dict[str, Any]:
    kind = ANTHROPIC_KINDS.get(refusal.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(refusal)}}
