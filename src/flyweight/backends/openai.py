"""Any OpenAI-compatible server: prompts as token ids, answers as a stream, tokens counted the best
way the server allows.

    token_ids   the server names the ids of every chunk (`return_token_ids`)
    usage       it counts: with every chunk (`continuous_usage_stats`), or once at the end, where
                chunks count one token each and the last one the rest
    text        neither: every chunk that has text counts one token

A role-only chunk is never a token. A server that refuses the options above gets plain requests, and
says so in the rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flyweight.backends.base import WARM_OUTPUT, EngineOptions, Limits
from flyweight.backends.http import Client, HttpError
from flyweight.clock import Answer, Chunk, Run
from flyweight.errors import OptionError, ResultError

EXACT = {"ignore_eos": True, "return_token_ids": True}  # what OpenAI itself does not know
Prompt = Sequence[int] | str | Sequence[Mapping[str, str]]  # token ids, text, or a conversation


@dataclass(frozen=True)
class Event:
    """One line of a stream that says something about tokens."""

    time: float
    text: str
    ids: tuple[int, ...] | None = None
    total: int | None = None  # tokens so far, by the server's own count


@dataclass
class Reply:
    """A stream, complete: what was sent when, and what came."""

    sent: float
    events: list[Event] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for event in self.events for token in event.ids or ())

    @property
    def cached_tokens(self) -> int | None:
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    def chunks(self) -> tuple[str, tuple[Chunk, ...]]:
        """(where the counts come from, the chunks that have tokens)"""
        if any(event.ids is not None for event in self.events):
            return "token_ids", tuple(
                (event.time, len(event.ids)) for event in self.events if event.ids
            )
        if len({event.total for event in self.events if event.total}) > 1:
            return "usage", tuple(rises(self.events))
        spoken = [event.time for event in self.events if event.text]
        total = self.usage.get("completion_tokens")
        if spoken and total and total >= len(spoken):
            return "usage", (
                *((when, 1) for when in spoken[:-1]),
                (spoken[-1], total - len(spoken) + 1),
            )
        return "text", tuple((when, 1) for when in spoken)


def rises(events: Sequence[Event]) -> list[Chunk]:
    found, before = [], 0
    for event in events:
        if event.total is not None and event.total > before:
            found.append((event.time, event.total - before))
            before = event.total
    return found


class Endpoint:
    """One model on one server, asked over a client of its own."""

    def __init__(
        self, url: str, model: str, *, sampling: Mapping[str, Any] | None = None, exact: bool = True
    ):
        key = os.environ.get("OPENAI_API_KEY")
        self.client = Client(url, {"Authorization": f"Bearer {key}"} if key else None)
        self.model, self.exact = model, exact
        self.sampling = dict(sampling or {"temperature": 0})

    async def ask(self, prompt: Prompt, output: int) -> Reply:
        """Send and collect; the clock is that of the event loop."""
        now = asyncio.get_running_loop().time
        path, body = self.request(prompt, output)
        reply = Reply(now())
        async for data in events(self.client.lines(path, body)):
            if "error" in data:
                raise ResultError(f"the server stopped answering: {data['error']}")
            read_event(reply, data, now())
        return reply

    def request(self, prompt: Prompt, output: int) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": output,
            "stream": True,
            **self.sampling,
            "stream_options": {"include_usage": True},
        }
        if self.exact:
            body |= {
                **EXACT,
                "min_tokens": output,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        if isinstance(prompt, str) or all(isinstance(item, int) for item in prompt):
            return "/v1/completions", body | {
                "prompt": prompt if isinstance(prompt, str) else list(prompt)
            }
        return "/v1/chat/completions", body | {"messages": list(prompt)}

    async def find_model(self) -> None:
        """Servers name a model as they like; where there is only one, that one is meant."""
        with contextlib.suppress(HttpError, ValueError, KeyError, OSError):
            names = [one["id"] for one in json.loads(await self.client.text("/v1/models"))["data"]]
            if self.model not in names and len(names) == 1:
                self.model = names[0]

    async def probe(self, prompt: Prompt) -> None:
        """One short request; a server that refuses exact lengths and token ids is asked without
        them from now on.
        """
        try:
            await self.ask(prompt, 2)
        except HttpError as error:
            if error.status not in (400, 422) or not self.exact:
                hint = "; put its key into OPENAI_API_KEY" if error.status == 401 else ""
                raise ResultError(
                    f"the server refuses the first request ({error}){hint}"
                ) from error
            self.exact = False
            await self.probe(prompt)
        except OSError as error:
            raise ResultError(
                f"no server answers at {self.client.host}:{self.client.port} ({error})"
            ) from error


async def events(lines: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    async for line in lines:
        if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
            yield json.loads(data)


def read_event(reply: Reply, data: Mapping[str, Any], when: float) -> None:
    usage = data.get("usage") or {}
    reply.usage |= usage
    for choice in data.get("choices") or ():
        delta = choice.get("delta") or {}
        text = (
            choice.get("text")
            or delta.get("content")
            or delta.get("reasoning_content")
            or delta.get("reasoning")
            or ""
        )
        ids = choice.get("token_ids", delta.get("token_ids"))
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
        reply.events.append(
            Event(when, text, None if ids is None else tuple(ids), usage.get("completion_tokens"))
        )


class OpenAI:
    """A batch is as many streams at once; `tokens` of the answers are exact where the server
    ignores end of text.
    """

    name: str = "openai"
    sized: ClassVar[bool] = False
    warm_output: ClassVar[int | None] = WARM_OUTPUT

    def __init__(self, model: str, options: EngineOptions):
        if not options.url:
            raise OptionError(
                "the openai backend needs --url of a server that runs, such as "
                "http://localhost:8000"
            )
        self.model, self.options, self.url = model, options, options.url
        self.kv_dtype: str | None = None
        self.exact = True

    def start(self, limits: Limits) -> None:
        async def probe() -> Endpoint:
            endpoint = Endpoint(self.url, self.model, sampling=self.options.choice)
            await endpoint.find_model()
            await endpoint.probe([11, 12, 13])
            endpoint.client.close()
            return endpoint

        found = asyncio.run(probe())
        self.model, self.exact = found.model, found.exact

    def generate(self, prompts: Sequence[Sequence[int]], output: int) -> Run:
        return asyncio.run(self._generate(prompts, output))

    async def _generate(self, prompts: Sequence[Sequence[int]], output: int) -> Run:
        now = asyncio.get_running_loop().time
        endpoint = Endpoint(self.url, self.model, sampling=self.options.choice, exact=self.exact)
        begin = now()
        replies = await asyncio.gather(*(endpoint.ask(prompt, output) for prompt in prompts))
        end = now()
        endpoint.client.close()
        return Run(
            begin,
            end,
            tuple(
                Answer(begin, reply.chunks()[1], reply.token_ids, sent=reply.sent)
                for reply in replies
            ),
        )

    def memory(self) -> dict[str, float | None]:
        return {}

    def stop(self) -> None:
        """The server is not ours."""
