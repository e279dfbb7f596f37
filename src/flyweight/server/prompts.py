"""From the texts and messages of a request to token ids.

Long texts are tokenized in a thread (the tokenizer lets go of the interpreter lock), so that
nobody's stream waits for somebody's book. Chat templates always run in one, with a time limit: they
are programs, and came with the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flyweight.engine.tokenizer import Tokenizer
from flyweight.errors import FlyweightError
from flyweight.server.counts import LONGEST_NAME
from flyweight.server.protocol import ChatFields, Message
from flyweight.server.reasoning import CLOSE, OPEN
from flyweight.server.refusals import BadRequest, ContextTooLong, Refusal, UnsupportedField
from flyweight.server.thinking import thinking_options
from flyweight.server.threads import Threads

Result = TypeVar("Result")
LONG = 10_000  # characters
READING_SECONDS = 10.0  # for a template to be run, and for tools and grammars to be read
TOKENIZER_SECONDS = 30.0  # for a long text
SLACK = 4  # a tokenizer may drop characters before it counts, but not three of four
# What `apply_chat_template` takes for itself: no client may set it through chat_template_kwargs.
RESERVED = {
    "conversation",
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
}


@dataclass(frozen=True)
class ChatText:
    """A conversation in the words of the model's template."""

    text: str
    tokens: list[int] | None  # None: the text is long, and still to be encoded
    splits: bool  # whether this model's thinking is to be told from its answer
    inside: bool  # the prompt has opened the thinking already
    warnings: list[str] = field(default_factory=list)


class Prompts:
    def __init__(self, tokenizer: Tokenizer | None):
        self.tokenizer = tokenizer
        template = getattr(tokenizer.inner, "chat_template", None) if tokenizer else None
        self.template = template if isinstance(template, str) else json.dumps(template or "")
        self.template_words = set(re.findall(r"\w+", self.template))
        self.longest_token = max(map(len, tokenizer.inner.get_vocab())) if tokenizer else 1
        self.threads = Threads()

    def need(self) -> Tokenizer:
        if self.tokenizer is None:
            raise BadRequest(
                "this model has no tokenizer: give /v1/completions a prompt of token ids",
                param="prompt",
            )
        return self.tokenizer

    async def encode(
        self,
        prompts: Sequence[str] | Sequence[list[int]],
        *,
        special: bool = True,
        context: int | None = None,
    ) -> list[list[int]]:
        """`context`: how many tokens there is room for; a text that cannot be so few is refused
        unread.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            self._check(text, context)
        encoded = iter(await self._encode_all(texts, special) if texts else [])
        return [prompt if isinstance(prompt, list) else next(encoded) for prompt in prompts]

    async def chat(self, fields: ChatFields, *, context: int | None = None) -> list[int]:
        text = await self.aside(lambda: self.read_chat(fields, context=context), slow_template)
        return await self.tokens_of(text, context=context)

    async def aside(self, work: Callable[[], Result], slow: Callable[[], Refusal]) -> Result:
        """Beside the event loop, and no longer than one may wait: strangers say what is to be done.
        `slow` makes the refusal of what took longer.
        """
        return await self.threads.run(work, seconds=READING_SECONDS, refusal=slow)

    def read_chat(self, fields: ChatFields, *, context: int | None = None) -> ChatText:
        """In a thread: templates are programs. The tokens too, where they take no time of their
        own.
        """
        options, warnings = self._options(fields)
        tokenizer = self.need()
        text = render(tokenizer, fields.messages, options)
        tokens = None
        if len(text) < LONG:
            self._check(text, context)
            tokens = tokenizer.encode(text, special=False)
        return ChatText(
            text,
            tokens,
            splits=CLOSE in self.template,
            inside=text.rstrip().endswith(OPEN),
            warnings=warnings,
        )

    async def tokens_of(self, chat: ChatText, *, context: int | None = None) -> list[int]:
        if chat.tokens is not None:
            return chat.tokens
        (tokens,) = await self.encode([chat.text], special=False, context=context)
        return tokens

    def _check(self, text: str, context: int | None) -> None:
        check_text(text)
        if context is not None and len(text) > SLACK * self.longest_token * context:
            raise ContextTooLong(
                f"the prompt has {len(text)} characters, more than this model's context of "
                f"{context} tokens can hold",
                param="prompt",
            )

    async def _encode_all(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        tokenizer = self.need()

        def encode() -> list[list[int]]:
            return [tokenizer.encode(text, special=special) for text in texts]

        if sum(map(len, texts)) < LONG:
            return encode()
        return await self.threads.run(
            encode,
            seconds=TOKENIZER_SECONDS,
            refusal=slow_tokenizer,
        )

    def _options(self, fields: ChatFields) -> tuple[dict[str, Any], list[str]]:
        options = {
            name: value
            for name in ("add_generation_prompt", "continue_final_message")
            if (value := getattr(fields, name)) is not None
        }
        if options.get("continue_final_message"):
            options.setdefault("add_generation_prompt", False)
        if fields.tools and getattr(fields, "tool_choice", None) != "none":
            if "tools" not in self.template:
                raise UnsupportedField(
                    "tools are not supported: this model's chat template has no place for them",
                    param="tools",
                )
            options["tools"] = [tool.model_dump() for tool in fields.tools]
        switches, warnings = thinking_options(
            self.template, fields.reasoning_effort, fields.enable_thinking
        )
        options |= switches
        for name, value in (fields.chat_template_kwargs or {}).items():
            if name in RESERVED:
                raise UnsupportedField(
                    f"chat_template_kwargs.{name} cannot be set by a request",
                    param="chat_template_kwargs",
                )
            if name in self.template_words:
                options[name] = value
            else:
                warnings.append(
                    f"this model's chat template does not know {name[:LONGEST_NAME]!r} (ignored)"
                )
        return options, warnings


def slow_template() -> BadRequest:
    return BadRequest(
        f"this model's chat template did not finish within {READING_SECONDS:g} seconds",
        param="messages",
    )


def slow_shape() -> BadRequest:
    return BadRequest(
        f"the shape of the answer could not be read within {READING_SECONDS:g} seconds; simplify it"
    )


def slow_tokenizer() -> BadRequest:
    return BadRequest(
        f"the prompt could not be tokenized within {TOKENIZER_SECONDS:g} seconds; shorten it",
        param="prompt",
    )


def check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"the text is not Unicode: {error.reason} at character {error.start}", param="prompt"
        ) from error


def render(tokenizer: Tokenizer, messages: Sequence[Message], options: dict[str, Any]) -> str:
    try:
        plain = [plain_message(message) for message in messages]
        return tokenizer.render_chat(
            in_words_of(str(tokenizer.inner.chat_template), plain), **options
        )
    except FlyweightError as error:
        raise BadRequest(str(error), param="messages") from error


def in_words_of(template: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a model thought before a call, under the name that its template has for it: gpt-oss
    calls it `thinking`, and refuses it beside words in a message with calls.
    """
    if "reasoning_content" in template or "thinking" not in template:
        return messages
    for message in messages:
        thought = message.pop("reasoning_content", None)
        if thought and not (message.get("content") and message.get("tool_calls")):
            message.setdefault("thinking", thought)
    return messages


def plain_message(message: Message) -> dict[str, Any]:
    """As chat templates want it: text as one string, the arguments of tool calls as objects."""
    given = message.model_dump(exclude_unset=True)
    # Clients send back what they got, with null in every field it did not have; templates ask
    # whether a field is there.
    plain = {name: value for name, value in given.items() if value is not None and value != []}
    plain.setdefault("content", None)
    if isinstance(message.content, list):
        if bad := [
            part
            for part in message.content
            if part.get("type") != "text" or not isinstance(part.get("text"), str)
        ]:
            raise UnsupportedField(
                f"content of type {bad[0].get('type')!r} is not supported: this model reads text "
                "only",
                param="messages",
            )
        plain["content"] = "\n".join(part["text"] for part in message.content)
    calls = plain.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"])
            except (ValueError, RecursionError) as error:
                raise BadRequest(
                    f"the arguments of a tool call are not JSON: {error}", param="messages"
                ) from error
    return plain
