"""What stands behind the routes: a request of any kind becomes prompts, parameters and a format,
and then a response.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from flyweight.engine.request import SamplingParams
from flyweight.engine.tokenizer import Tokenizer
from flyweight.errors import FlyweightError, unknown
from flyweight.server.answer import Answer, timings
from flyweight.server.answer_plan import AnswerPlan, plan_answer
from flyweight.server.counts import LONGEST_NAME
from flyweight.server.engine_client import EngineClient
from flyweight.server.formats import ChatFormat, CompletionFormat, Format
from flyweight.server.metrics import Metrics
from flyweight.server.prompts import ChatText, Prompts, slow_shape, slow_template
from flyweight.server.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    SamplingFields,
)
from flyweight.server.refusals import BadRequest, ClientGone, UnknownModel
from flyweight.server.settings import Settings
from flyweight.server.telling import Teller, ToldAnswer
from flyweight.server.ticket import Ticket
from flyweight.server.token_names import TokenNames
from flyweight.server.tools import choose_format
from flyweight.server.tools.grammar import Thinking
from flyweight.server.words import Words

EVENTS = "text/event-stream"
GRACE = 30.0  # seconds beyond the time limit that a reader has for what is already there
LONGEST_WARNING = 1000  # characters in a header
Result = TypeVar("Result")


@dataclass(frozen=True)
class PreparedChat:
    """A chat request, read."""

    model: str
    tokens: list[int]
    params: SamplingParams
    plan: AnswerPlan
    warnings: list[str]


class Service:
    def __init__(self, settings: Settings, engine: EngineClient, tokenizer: Tokenizer | None):
        self.settings, self.engine = settings, engine
        self.prompts = Prompts(tokenizer)
        self.token_names = TokenNames(tokenizer)
        self.words = Words(tokenizer)
        self.tool_format = choose_format(self.prompts.template, settings.tool_parser)
        self.metrics = Metrics(engine)
        self.when_finished: Callable[[], None] = lambda: None  # after every request

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the model."""
        return self.settings.served

    def start(self) -> None:
        self.engine.start()

    def stop(self) -> None:
        self.engine.stop()

    def of(self, name: str | None) -> Service:
        """The service of the model with this name: there is one, or the name is refused."""
        self.check_model(name)
        return self

    @contextlib.asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[Service]:
        """The same for a request that goes on to the engine."""
        yield self.of(name)

    def check_model(self, name: str | None) -> str:
        served = self.settings.served
        if name is not None and name not in served:
            raise UnknownModel(unknown("model", name[:LONGEST_NAME], served), param="model")
        return name or served[0]

    @property
    def context(self) -> int | None:
        return self.engine.facts.get("max_model_len")

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        model = self.check_model(body.model)
        warnings = await self.aside(body, lambda: body.check(strict=self.settings.strict))
        if body.max_tokens == 0 and not body.echo:
            raise BadRequest(
                "max_tokens must be at least 1, except with echo, where 0 judges the prompt",
                param="max_tokens",
            )
        # before the work: there may be very many
        self.engine.check_room(len(body.prompts), body.samples)
        with self.engine.gathering.coming():
            prompts = await self.prompts.encode(
                body.prompts, special=body.add_special_tokens is not False, context=self.context
            )
        texts = [self.text_of(prompt) for prompt in body.prompts] if body.echo else []
        more: dict[str, Any] = {
            "max_tokens": DEFAULT_COMPLETION_TOKENS
            if body.max_tokens is None
            else max(1, body.max_tokens)
        }
        if body.logprobs is not None:
            more |= {"logprobs": body.logprobs} | (
                {"prompt_logprobs": body.logprobs} if body.echo else {}
            )
        form = CompletionFormat(body, prompts, texts, self.token_names)
        guide = body.guide
        grammar = await self.aside(body, lambda: guide.grammar(self.words)) if guide else None
        return await self.generate(
            request,
            body,
            form,
            prompts,
            sampling(body, **more),
            model=model,
            warnings=warnings,
            grammar=grammar,
        )

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        asked = await self.prepare(body)
        readers = [asked.plan.reader() for _ in range(body.samples)]
        form = ChatFormat(body, asked.tokens, self.token_names, readers)
        return await self.generate(
            request,
            body,
            form,
            [asked.tokens],
            asked.params,
            model=asked.model,
            warnings=asked.warnings,
            grammar=asked.plan.grammar,
        )

    async def converse(
        self,
        request: Request,
        body: ChatRequest,
        teller: Callable[[str], Teller],
        *,
        warnings: Sequence[str] = (),
        media_type: str = EVENTS,
    ) -> Response:
        """A chat whose answer is told in the words of another API; `teller` is made with the
        model's name.
        """
        asked = await self.prepare(body)

        def answer(ticket: Ticket) -> ToldAnswer:
            return ToldAnswer(ticket, asked.plan.reader(), teller(asked.model))

        return await self.run(
            request,
            body,
            answer,
            [asked.tokens],
            asked.params,
            grammar=asked.plan.grammar,
            warnings=[*warnings, *asked.warnings],
            media_type=media_type,
        )

    async def prepare(self, body: ChatRequest) -> PreparedChat:
        with self.engine.gathering.coming():
            return await self._prepare(body)

    async def _prepare(self, body: ChatRequest) -> PreparedChat:
        """The whole reading of a chat is one piece of work beside the event loop: each of many
        would cost a wait for the interpreter lock, and a burst has as many chats as seats.
        """
        model = self.check_model(body.model)
        self.engine.check_room(1, body.samples)
        params = chat_sampling(body)
        context = self.context
        slow = slow_shape

        def read() -> tuple[ChatText, AnswerPlan, list[str]]:
            nonlocal slow
            warnings = body.check(strict=self.settings.strict)
            slow = slow_template
            text = self.prompts.read_chat(body, context=context)
            slow = slow_shape
            plan = self.plan(body, text)
            return text, plan, [*warnings, *text.warnings, *plan.warnings]

        text, plan, warnings = await self.prompts.aside(read, lambda: slow())
        tokens = await self.prompts.tokens_of(text, context=context)
        return PreparedChat(model, tokens, params, plan, warnings)

    def plan(self, body: ChatRequest, text: ChatText) -> AnswerPlan:
        thinking = Thinking(possible=text.splits, begun=text.splits and text.inside)
        return plan_answer(
            body.chosen_tools,
            body.guide,
            self.words,
            form=self.tool_format,
            thinking=thinking,
            parallel=body.parallel_tool_calls is not False,
            free=body.endless,
        )

    async def aside(self, body: SamplingFields, work: Callable[[], Result]) -> Result:
        """Grammars are read beside the event loop: they are strangers', maybe long."""
        if not body.shaped:
            return work()
        return await self.prompts.aside(work, slow_shape)

    async def generate(
        self,
        request: Request,
        body: SamplingFields,
        form: Format,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        model: str,
        warnings: list[str],
        grammar: str | None = None,
    ) -> Response:
        def answer(ticket: Ticket) -> Answer:
            return Answer(body, ticket, form, model=model)

        return await self.run(
            request, body, answer, prompts, params, warnings=warnings, grammar=grammar
        )

    async def run(
        self,
        request: Request,
        body: SamplingFields,
        answer_of: Callable[[Ticket], Answer | ToldAnswer],
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        warnings: Sequence[str],
        grammar: str | None,
        media_type: str = EVENTS,
    ) -> Response:
        headers = {"x-warning": header_text("; ".join(warnings))} if warnings else {}
        adapter = body.model if body.model in self.settings.adapters else None
        ticket = self.engine.submit(
            prompts, params, schema=grammar, cache_salt=body.cache_salt, adapter=adapter
        )
        ticket.shows_cached = not self.settings.hide_cached_tokens
        events = None
        try:
            answer = answer_of(ticket)
            async with while_connected(request.receive, ticket):
                if not body.stream:
                    return json_response(await answer.whole(), headers=headers)
                first = await ticket.next()
            headers["content-type"] = media_type
            events = EventStream(self, request, ticket, answer.events(first), headers)
            return events
        finally:
            if events is None:  # else it finishes when its last event is written
                self.finish(request, ticket)

    def finish(self, request: Request, ticket: Ticket) -> None:
        """The request is over, well or not: free what it held and write down what it was."""
        self.metrics.record(ticket)
        if ticket.failure:
            self.metrics.errors.labels(ticket.failure.code or str(ticket.failure.status)).inc()
        self.engine.release(ticket)
        ticket.shows_cached = True  # to the log
        measured = timings(ticket)
        request.state.facts.update(
            prompt_tokens=sum(map(len, ticket.prompts)),
            completion_tokens=sum(sample.tokens for sample in ticket.samples),
            finish_reason=",".join(
                sorted({str(sample.finish_reason) for sample in ticket.samples})
            ),
            **{
                name: measured.get(name)
                for name in ("cache_n", "queue_ms", "ttft_ms", "predicted_per_token_ms")
            },
        )
        if ticket.failure:
            request.state.facts["error"] = str(ticket.failure)
        if self.settings.log_prompts:
            request.state.facts["prompts"] = [
                self.text_of(list(prompt)) for prompt in ticket.prompts
            ]
        self.when_finished()

    def text_of(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        tokenizer = self.prompts.tokenizer
        size = len(tokenizer.inner) if tokenizer else 0
        return (
            tokenizer.fast.decode([t for t in prompt if t < size], skip_special_tokens=False)
            if tokenizer
            else ""
        )


def chat_sampling(body: ChatRequest) -> SamplingParams:
    limit = body.max_completion_tokens or body.max_tokens
    if limit == 0:
        raise BadRequest("max_tokens must be at least 1", param="max_tokens")
    more: dict[str, Any] = {"max_tokens": limit}
    if body.logprobs:
        more["logprobs"] = body.top_logprobs or 0
    return sampling(body, **more)


def sampling(body: SamplingFields, **more: Any) -> SamplingParams:
    try:
        return body.sampling(**more)
    except FlyweightError as error:
        name = str(error).split(" ", 1)[0]
        raise BadRequest(
            str(error), param=name if name in type(body).model_fields else None
        ) from error


@contextlib.asynccontextmanager
async def while_connected(receive: Receive, ticket: Ticket) -> AsyncIterator[None]:
    """Fails the ticket as soon as the client hangs up."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        ticket.fail(ClientGone("the client went away"))

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


class EventStream(Response):
    """Events, written as they come. A reader that does not read waits alone."""

    def __init__(
        self,
        service: Service,
        request: Request,
        ticket: Ticket,
        events: AsyncIterator[bytes],
        headers: dict[str, str],
    ):
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers}
        )
        del self.headers["content-length"]
        self.service, self.request, self.ticket, self.events = service, request, ticket, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with (
                while_connected(receive, self.ticket),
                asyncio.timeout(self.service.settings.timeout + GRACE),
            ):
                await send(
                    {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                )
                async for part in self.events:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
                # where many answers end at once, all last events go before what is written down
                await asyncio.sleep(0)
        except TimeoutError:
            self.ticket.fail(ClientGone("the client did not read its answer in time"))
        finally:
            self.service.finish(self.request, self.ticket)


def json_response(
    content: Any, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Pure ASCII: a message may quote what no encoder takes, such as half a surrogate pair."""
    body = json.dumps(content, separators=(",", ":"))
    return Response(body, status_code=status, headers=headers, media_type="application/json")


def header_text(text: str) -> str:
    """Printable ASCII: whatever a client called its field, it must not end the header."""
    plain = text.encode("ascii", "backslashreplace").decode()
    return "".join(letter if letter.isprintable() else "?" for letter in plain)[:LONGEST_WARNING]
