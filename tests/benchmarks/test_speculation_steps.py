"""Answers with forced guesses, as far as a machine without a GPU can tell: every drafter runs."""

import argparse
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "workshop"))

import speculation_steps as steps  # noqa: E402

from flyweight.engine import flight  # noqa: E402


@pytest.fixture
def here(monkeypatch):
    """Few tokens, on a CPU; whatever is forced is forgotten afterwards."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(flight, "count_accepted", flight.count_accepted)
    monkeypatch.setattr(
        steps,
        "GREEDY",
        steps.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True).with_defaults({}),
    )


def test_answers_with_forced_guesses_say_what_was_forced(here):
    options = argparse.Namespace(scheme="int4", head=None, context=32, guesses=[3])
    decoder = steps.load(options, "tiny", torch.device("cpu"))
    none, *forced = steps.answers(decoder, options)
    assert none["guesses"] == 0 and none["tok_s"] > 0 and "accept_flags" not in none
    assert [(row["drafter"], row["guesses"]) for row in forced] == [
        ("costs nothing", 3),
        ("costs nothing", 7),
        ("eagle3, random weights", 3),
    ]
    assert all(row["accept_flags"] == "forced" and row["tokens_per_step"] > 2 for row in forced)


def test_a_drafter_that_costs_nothing_is_a_whole_one():
    drafter = steps.Repeats()
    for name in (name for name in vars(steps.Drafter) if not name.startswith("_")):
        assert hasattr(drafter, name), name
