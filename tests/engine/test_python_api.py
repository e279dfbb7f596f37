"""What a Python user types first: keywords, misspelt keywords, plain loops, help() and dir()."""

import dataclasses
import inspect
import threading

import pytest
from tiny_configs import LLAMA

import flyweight
from flyweight import LLM, SamplingParams
from flyweight.engine.stream import Stream
from flyweight.errors import OptionError, RequestError
from flyweight.models import presets

FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]
METHODS = ("generate", "chat", "stream", "iterate")


@pytest.fixture(scope="module")
def model():
    """Random weights, a vocabulary of 60 and a context of 128."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(presets.PRESETS, "tiny", LLAMA)
        yield LLM("preset:tiny:fp32", blocks=64, block_size=4)


def test_keywords_choose_tokens_as_sampling_params_do(model):
    by_keywords = model.generate([1, 2, 3], max_tokens=5, temperature=0, ignore_eos=True)[0]
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    by_params = model.generate([1, 2, 3], params)[0]
    assert len(by_keywords.token_ids) == 5 and by_keywords.token_ids == by_params.token_ids


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("keyword", "message"),
    [
        ("max_token", "unknown keyword 'max_token'; did you mean 'max_tokens'?"),
        ("temprature", "unknown keyword 'temprature'; did you mean 'temperature'?"),
        (
            "enable_thinking",
            "arguments of a chat template go into chat_template_kwargs={'enable_thinking': …}",
        ),
    ],
)
def test_an_unknown_keyword_is_refused_at_the_call(model, method, keyword, message):
    with pytest.raises(RequestError) as error:
        getattr(model, method)([1, 2, 3], **{keyword: 1})
    assert message in str(error.value)
    assert not model.engine.busy


@pytest.mark.parametrize(
    ("params", "keywords", "message"),
    [
        (SamplingParams(), {"max_tokens": 5}, "max_tokens is given beside params"),
        (5, {}, "params must be SamplingParams, not int"),
        ({"max_tokens": 5}, {}, "params must be SamplingParams, not dict"),
    ],
)
def test_parameters_told_twice_or_in_a_wrong_form_are_refused(model, params, keywords, message):
    with pytest.raises(RequestError) as error:
        model.generate([1, 2, 3], params, **keywords)
    assert message in str(error.value)


def test_an_unknown_option_of_the_model_names_the_nearest():
    with pytest.raises(OptionError, match="'max_model_length'; did you mean 'max_model_len'"):
        LLM("preset:smollm2-135m", max_model_length=64)


@pytest.mark.parametrize("method", METHODS)
def test_signatures_list_what_can_be_given(method):
    parameters = inspect.signature(getattr(LLM, method)).parameters
    assert parameters.keys() >= {*FIELDS, "params", "chat_template_kwargs"}
    assert not [
        one for one in parameters.values() if one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    ]
    assert parameters["max_tokens"].default == SamplingParams().max_tokens


def test_the_constructor_shows_its_options():
    assert {"model", "device", "max_model_len", "seed"} <= inspect.signature(LLM).parameters.keys()


def test_dir_names_what_the_package_offers():
    assert set(flyweight.__all__) <= set(dir(flyweight))


def test_a_plain_loop_reads_a_stream(model):
    stream = model.stream([1, 2, 3], max_tokens=5, temperature=0, ignore_eos=True)
    assert isinstance(stream, Stream)
    tokens = [token for chunk in stream for token in chunk.token_ids]
    whole = model.generate([1, 2, 3], max_tokens=5, temperature=0, ignore_eos=True)
    assert tokens == whole[0].token_ids


def test_leaving_a_stream_or_closing_it_gives_its_memory_back(model):
    with model.stream([1, 2, 3], max_tokens=50, ignore_eos=True) as stream:
        next(stream)
        assert model.engine.busy
    assert not model.engine.busy
    model.engine.pool.forget()
    assert model.engine.pool.available == model.engine.pool.blocks


def test_an_answer_beyond_the_context_is_refused_and_the_default_is_not(model):
    prompt = [1] * 100
    with pytest.raises(RequestError) as error:
        model.generate(prompt, max_tokens=29)
    assert "max_tokens asks for 29 more, but the context holds 128; ask for at most 28" in str(
        error.value
    )
    assert model.room(prompt) == 28
    assert len(model.generate(prompt, ignore_eos=True)[0].token_ids) == 28
    assert len(model.generate(prompt, max_tokens=None, ignore_eos=True)[0].token_ids) == 28


def test_a_step_that_fails_in_one_thread_is_told_to_the_readers_of_others(model, monkeypatch):
    """The thread whose step failed gets the error itself; another's answer must not just end."""
    stream = model.stream([1, 2, 3], max_tokens=50, ignore_eos=True)
    next(stream)

    def launch(*_):
        raise RuntimeError("the device is gone")

    def step_of_another_thread():
        with pytest.raises(RuntimeError):
            model.engine.step()

    monkeypatch.setattr(model.engine.runner, "launch", launch)
    other = threading.Thread(target=step_of_another_thread)
    other.start()
    other.join()
    with pytest.raises(RequestError, match="the device is gone"):
        list(stream)
