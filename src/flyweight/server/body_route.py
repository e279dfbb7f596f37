"""Routes whose endpoints take a body and the request, and nothing else.

The framework looks for what else an endpoint may want (parameters of the path and the query,
headers, dependencies) with every request, which takes a third of the time until the engine hears of
it. Here the body is decoded and checked, and that is all. The documentation of the routes is the
framework's as before, and so is whatever it says of a body that is not JSON.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class BodyRoute(APIRoute):
    def get_route_handler(self) -> Handler:
        by_framework: Handler = super().get_route_handler()
        if set(inspect.signature(self.endpoint).parameters) != {"body", "request"}:
            return by_framework
        endpoint = self.endpoint
        validator = get_type_hints(endpoint)["body"].__pydantic_validator__

        async def handle(request: Request) -> Response:
            try:
                content = json.loads(await request.body())
            except (ValueError, RecursionError):
                return await by_framework(request)
            try:
                body = validator.validate_python(content, from_attributes=True)
            except ValidationError as error:
                raise RequestValidationError(
                    [
                        {**problem, "loc": ("body", *problem["loc"])}
                        for problem in error.errors(include_url=False)
                    ],
                    body=content,
                ) from error
            return await endpoint(body=body, request=request)

        return handle
