"""Every way a request can be refused, with the HTTP status and the OpenAI error type it becomes.

Clients see `{"error": {"message", "type", "param", "code"}}`, whatever went wrong.
"""

from __future__ import annotations

from typing import Any

LONGEST_MESSAGE = 2000  # characters


class Refusal(Exception):
    """A request that gets no answer, or not all of it."""

    status = 400
    kind = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, retry_after: int | None = None):
        super().__init__(shortened(message))
        self.param = param
        self.retry_after = retry_after  # seconds

    def body(self) -> dict[str, Any]:
        return error_body(str(self), kind=self.kind, param=self.param, code=self.code)

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}


class BadRequest(Refusal):
    pass


class ContextTooLong(Refusal):
    code = "context_length_exceeded"


class UnsupportedField(Refusal):
    code = "unsupported_parameter"


class UnknownModel(Refusal):
    status = 404
    code = "model_not_found"


class WrongKey(Refusal):
    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class Forbidden(Refusal):
    status = 403
    kind = "permission_error"


class HostRefused(Refusal):
    status = 403
    kind = "permission_error"
    code = "host_not_allowed"


class BodyTooLarge(Refusal):
    status = 413
    code = "request_too_large"


class TooSlow(Refusal):
    """The request itself did not arrive in time; the connection is closed."""

    status = 408
    code = "request_too_slow"

    @property
    def headers(self) -> dict[str, str]:
        return {"connection": "close"}


class HeaderTooLarge(Refusal):
    status = 431
    code = "headers_too_large"


class TooManyConnections(Refusal):
    status = 503
    kind = "rate_limit_error"
    code = "too_many_connections"


class QueueFull(Refusal):
    status = 429
    kind = "rate_limit_error"
    code = "queue_full"


class ClientGone(Refusal):
    """Nobody reads this answer; the status is for the log."""

    status = 499
    code = "client_closed_request"


class EngineFailed(Refusal):
    status = 500
    kind = "server_error"
    code = "engine_error"


class EngineAway(Refusal):
    """Loading, starting again, or draining."""

    status = 503
    kind = "server_error"
    code = "engine_unavailable"


class TookTooLong(Refusal):
    status = 504
    kind = "timeout_error"
    code = "request_timeout"


def shortened(message: str) -> str:
    """A long one repeats what was sent."""
    return message if len(message) <= LONGEST_MESSAGE else message[: LONGEST_MESSAGE - 1] + "…"


def error_body(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": shortened(message), "type": kind, "param": param, "code": code}}
