"""The small parts alone: thinking told from answers, tickets, the names of tokens."""

import asyncio
import random

import pytest

from flyweight.engine.byte_level import byte_alphabet
from flyweight.server.messages import FAILED, REFUSED, Delta
from flyweight.server.prompts import Prompts
from flyweight.server.protocol import ChatRequest
from flyweight.server.reasoning import ReasoningSplitter
from flyweight.server.refusals import BadRequest, EngineFailed, TookTooLong
from flyweight.server.ticket import Ticket
from flyweight.server.token_names import finite

TEXTS = {  # text, whether the prompt opened the thinking → (reasoning, content)
    ("<think>\nhm, 1 < 2\n\n</think>\n\nYes </think> it is.", False): (
        "hm, 1 < 2",
        "Yes </think> it is.",
    ),
    ("hm\n</think>\n\nYes.", True): ("hm", "Yes."),
    ("still thinking </thin", True): ("still thinking </thin", ""),
    ("No <think> here", False): ("", "No <think> here"),
    ("<thinker> is no tag", False): ("", "<thinker> is no tag"),
    ("  \n<think></think>x", False): ("", "x"),
    ("<thi", False): ("", "<thi"),
    ("", False): ("", ""),
}


@pytest.mark.parametrize("case", TEXTS)
def test_thinking_is_told_from_the_answer_wherever_the_text_is_cut(case):
    (text, inside), expected = case, TEXTS[case]
    for seed in range(20):
        cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=seed % 7))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        splitter = ReasoningSplitter(inside=inside)
        found = [splitter.add(piece, last=at == len(pieces) - 1) for at, piece in enumerate(pieces)]
        assert ("".join(a for a, _ in found), "".join(b for _, b in found)) == expected


def test_a_preset_takes_token_ids_and_says_that_it_reads_no_text():
    prompts = Prompts(None)  # random weights have no tokenizer
    assert asyncio.run(prompts.encode([[1, 2], [3]])) == [[1, 2], [3]]
    chat = ChatRequest(messages=[{"role": "user", "content": "hello"}])
    for asked in (prompts.encode(["hello"]), prompts.chat(chat)):
        with pytest.raises(
            BadRequest, match="no tokenizer: give /v1/completions a prompt of token ids"
        ):
            asyncio.run(asked)


def test_a_ticket_gives_what_came_then_how_it_ended():
    async def read():
        ticket = Ticket([[1, 2], [3]], 2)
        ticket.put(1, Delta(0, 1, "a", [5], cached=3, started=0.5), now=1.0)
        ticket.put(1, Delta(0, 1, "b", [6], finish_reason="stop"), now=2.0)
        assert [(number, delta.text) for number, delta in await ticket.next()] == [
            (3, "a"),
            (3, "b"),
        ]
        sample = ticket.samples[3]
        assert (sample.cached, sample.started, sample.first, sample.last, sample.tokens) == (
            3,
            0.5,
            1.0,
            2.0,
            2,
        )
        ticket.put(0, Delta(1, 0, "c", [7]), now=3.0)
        ticket.fail(TookTooLong("too long"))
        ticket.fail(BadRequest("too late to matter"))
        assert [delta.text for _, delta in await ticket.next()] == ["c"]
        with pytest.raises(TookTooLong):
            await ticket.next()

    asyncio.run(read())


def test_a_finished_ticket_ends_and_cannot_fail_any_more():
    async def read():
        ticket = Ticket([[1]], 1)
        ticket.put(0, Delta(0, 0, "a", [5], finish_reason="stop"), now=1.0)
        ticket.fail(TookTooLong("too long"))
        assert len(await ticket.next()) == 1 and await ticket.next() == []

    asyncio.run(read())


@pytest.mark.parametrize(("reason", "kind"), [(REFUSED, BadRequest), (FAILED, EngineFailed)])
def test_what_the_engine_refuses_is_the_clients_fault_and_what_fails_is_ours(reason, kind):
    async def read():
        ticket = Ticket([[1]], 1)
        ticket.put(0, Delta(0, 0, "", [], finish_reason=reason, stop_reason="why"), now=1.0)
        with pytest.raises(kind, match="why"):
            await ticket.next()

    asyncio.run(read())


def test_bytes_have_the_letters_that_tokenizers_give_them():
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256)) and len(alphabet) == 256
    assert (alphabet["Ġ"], alphabet["Ċ"], alphabet["a"]) == (32, 10, 97)
    assert finite(-float("inf")) == -9999.0 and finite(-1.5) == -1.5


def test_usage_tells_guesses_where_there_were_any():
    from types import SimpleNamespace

    from flyweight.server.answer import Answer

    async def usage(**guesses):
        ticket = Ticket([[1, 2]], 1)
        ticket.put(0, Delta(0, 0, "a", [5, 6, 7]), now=1.0)
        ticket.put(0, Delta(0, 0, "b", [8], finish_reason="stop", **guesses), now=2.0)
        return Answer(
            SimpleNamespace(max_tokens=9), ticket, SimpleNamespace(prefix="chatcmpl"), model="m"
        ).usage()

    assert "completion_tokens_details" not in asyncio.run(usage())
    assert asyncio.run(usage(drafted=6, accepted=2))["completion_tokens_details"] == {
        "accepted_prediction_tokens": 2,
        "rejected_prediction_tokens": 4,
    }


@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}, {"n": 2}])
def test_events_whose_frame_is_kept_are_those_encoded_whole(more):
    """Texts that JSON must escape, thinking and words by turns, two samples by turns."""
    from flyweight.server.answer import Answer, encode_event
    from flyweight.server.formats import ChatFormat
    from flyweight.server.reader import MessageReader
    from flyweight.server.token_names import TokenNames

    request = ChatRequest(messages=[{"role": "user", "content": "?"}], stream=True, **more)
    samples = request.samples
    texts = ["<think>", "so ", 'a "b"\n', "</think>", "\u00e9\ud83c\udf89", "\\", "", "end"]

    async def events(framed):
        ticket = Ticket([[1, 2]], samples)
        readers = [MessageReader(ReasoningSplitter(inside=False)) for _ in range(samples)]
        answer = Answer(
            request, ticket, ChatFormat(request, [1, 2], TokenNames(None), readers), model="m"
        )
        answer.id, answer.created, answer.bare = "id", 0, framed
        deltas = [
            (number, Delta(0, number, text, [5], finish_reason="stop" if text == "end" else None))
            for text in texts
            for number in range(samples)
        ]
        return b"".join(
            [
                answer._event(number, delta, first=not at)
                for at, (number, delta) in enumerate(deltas)
            ]
        )

    whole = asyncio.run(events(False))
    assert asyncio.run(events(True)) == whole and whole.count(b"data: ") == len(texts) * samples
    assert encode_event({"a": 1}) == b'data: {"a":1}\n\n'
