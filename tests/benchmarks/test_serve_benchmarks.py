"""The serving benchmarks' own judgement: which answers are wrong, and what a ratio is made of."""

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import serve_load
from serve_overhead import Took, Turns

RIGHT = serve_load.Reference(prompt=[9], tokens=[1, 2, 3, 4], gaps=[0.5, 0.5, 0.001, 0.5])


@pytest.fixture
def storm():
    return serve_load.Storm(
        port=0, end=0.0, longest=4, tie=0.01, references={"ask": RIGHT}, tally=serve_load.Tally()
    )


@pytest.mark.parametrize(
    ("tokens", "wrong", "ties"),
    [
        ([1, 2, 3, 4], 0, 0),
        ([1, 2], 0, 0),
        ([], 0, 0),  # all of it, and clients that left
        ([1, 2, 7, 8], 0, 1),  # it left where two tokens are as good
        ([1, 7, 3, 4], 1, 0),
        ([1, 2, 3, 9], 1, 0),  # it left where they are not
    ],
)
def test_an_answer_may_leave_its_reference_only_at_a_tie(storm, tokens, wrong, ties):
    storm.judge("ask", tokens)
    assert (len(storm.tally.wrong), storm.tally.ties) == (wrong, ties)
    assert list(storm.tally.left) == ([("ask", tuple(tokens))] if ties else [])


def test_after_a_tie_every_token_must_be_the_likeliest_or_as_good(storm, monkeypatch):
    async def call(port, path, body):
        assert body["prompt"] == [9, 1, 7, 8] and body["max_tokens"] == 0 and body["echo"]
        tops = [None, {"a": -1.0}, {"b": -1.0, "c": -1.005}, {"d": -1.0, "e": -3.0}]
        return {
            "choices": [
                {"logprobs": {"token_logprobs": [None, -1.0, -1.005, -3.0], "top_logprobs": tops}}
            ]
        }

    monkeypatch.setattr(serve_load, "call", call)
    asyncio.run(storm.rescore("ask", (1, 7, 8)))
    assert storm.tally.rescored == 3 and len(storm.tally.not_best) == 2
    assert storm.tally.wrong == ["token 2 of an answer that left is 2.000 behind the likeliest"]


def test_a_ratio_is_the_median_of_the_rounds_own():
    engine = [Took(0.5, 1.0), Took(0.5, 2.0), Took(0.5, 3.0)]
    http = [Took(1.0, 2.0), Took(0.5, 2.0), Took(1.0, 4.0)]
    found = Turns("plain", 64, engine=engine, http=http).figures(output=10)
    assert found["share_of_engine"] == 0.75 and found["share_of_engine_samples"] == [0.5, 1.0, 0.75]
    assert found["share_until_first_tokens"] == 0.5 and found["share_from_then_on"] == round(
        2.5 / 3, 4
    )
    assert found["output_tok_s"] == 320.0 and found["goal"] == 0.97
