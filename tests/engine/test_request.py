"""SamplingParams: what is refused, and how it is said."""

import dataclasses
import inspect

import pytest

from flyweight.engine.request import SamplingOptions, SamplingParams
from flyweight.errors import RequestError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1}, "unknown sampling parameter 'temprature'; did you mean 'temperature'?"),
        ({"temperature": -1}, "temperature must lie between 0 and 100, not -1"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"temperature": float("nan")}, "temperature must lie between"),
        ({"top_p": 0}, "top_p must lie between"),
        ({"top_k": 1.5}, "top_k must be a whole number, not 1.5"),
        ({"n": 0}, "n must lie between 1"),
        ({"n": True}, "n must be a whole number"),
        ({"max_tokens": 0}, "max_tokens must lie between 1"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens is 4, more than max_tokens 3"),
        ({"stop": ["a", ""]}, "stop must hold non-empty strings"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must hold token ids"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {1: "b"}}, "logit_bias must map token ids to numbers"),
    ],
)
def test_bad_parameters_are_refused_by_name(options, message):
    with pytest.raises(RequestError) as error:
        SamplingParams(**options)
    assert message in str(error.value)


def test_one_stop_string_needs_no_list():
    assert SamplingParams(stop="END").stop == ("END",)


def test_the_models_defaults_fill_only_what_the_caller_left_open():
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    filled = SamplingParams(top_k=0, temperature=0).with_defaults(defaults)
    assert (filled.temperature, filled.top_k, filled.top_p, filled.repetition_penalty) == (
        0,
        0,
        0.95,
        1.0,
    )


def test_a_temperature_too_small_to_divide_by_is_greedy():
    assert SamplingParams(temperature=1e-30).temperature == 0


def test_the_signature_lists_every_field():
    """A constructor that checks names must not show itself as (*args, **options)."""
    assert list(inspect.signature(SamplingParams).parameters) == [
        field.name for field in dataclasses.fields(SamplingParams)
    ]


def test_keywords_of_a_call_are_the_fields_of_sampling_params():
    assert list(SamplingOptions.__annotations__) == [
        field.name for field in dataclasses.fields(SamplingParams)
    ]
