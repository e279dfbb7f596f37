"""Answers of a given shape, under every name that clients have for it, on random weights: nothing
else keeps them in shape."""

import json
import re

import pytest
from tiny_server import make_model
from tool_models import fits

from flyweight.commands.serve import open_tokenizer
from flyweight.engine.grammar_kinds import translate
from flyweight.server.guided import GuidedFields
from flyweight.server.prompts import Prompts
from flyweight.server.protocol import ChatRequest
from flyweight.server.refusals import BadRequest
from flyweight.server.thinking import thinking_options
from flyweight.server.words import Words

ASK = dict(prompt="hello", max_tokens=200, temperature=1.0, seed=3)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
PHONE = r"\+[0-9]{2}/[0-9]{4}"
LARK = 'start: "yes " NUMBER\nNUMBER: /[0-9]{1,2}/'
EBNF = 'root ::= "yes " [0-9] [0-9]'


def is_json(text):
    return set(json.loads(text)) == {"n"}


def is_phone(text):
    return re.fullmatch(PHONE, text)


def is_choice(text):
    return text in ("red", "green", "dark blue")


def is_yes(text):
    return re.fullmatch("yes [0-9]{1,2}", text)


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, is_json),
        ({"response_format": {"type": "regex", "pattern": PHONE}}, is_phone),
        ({"response_format": {"type": "grammar", "grammar": LARK}}, is_yes),
        (
            {"response_format": {"type": "choice", "choice": ["red", "green", "dark blue"]}},
            is_choice,
        ),
        ({"guided_json": SCHEMA}, is_json),
        ({"guided_json": json.dumps(SCHEMA), "guided_decoding_backend": "xgrammar"}, is_json),
        ({"guided_regex": PHONE}, is_phone),
        ({"guided_choice": ["red", "green", "dark blue"]}, is_choice),
        ({"guided_grammar": EBNF}, is_yes),
        ({"structured_outputs": {"json": SCHEMA}}, is_json),
        ({"structured_outputs": {"regex": PHONE}}, is_phone),
        ({"structured_outputs": {"choice": ["red", "green", "dark blue"]}}, is_choice),
        ({"structured_outputs": {"grammar": LARK}}, is_yes),
        ({"regex": PHONE}, is_phone),
        ({"ebnf": EBNF}, is_yes),
        ({"json_schema": json.dumps(SCHEMA)}, is_json),
    ],
)
def test_the_answer_has_the_shape_that_was_asked_for(tiny, fields, fits):
    answer = tiny.post("/v1/completions", **ASK | fields)
    assert answer.status_code == 200 and "x-warning" not in answer.headers, answer.text
    (choice,) = answer.json()["choices"]
    assert fits(choice["text"]) and choice["finish_reason"] == "stop"


def test_a_chat_is_held_to_its_shape_after_the_thinking_that_the_prompt_began(tiny):
    """The template has opened the tag: the thinking is free, the answer behind it is not."""
    asked = {
        "messages": [{"role": "user", "content": "x"}],
        "chat_template_kwargs": {"enable_thinking": True},
        "guided_choice": ["red"],
        "max_tokens": 300,
        "temperature": 1.0,
    }
    for seed in range(3):
        message = tiny.post("/v1/chat/completions", **asked, seed=seed).json()["choices"][0][
            "message"
        ]
        assert message["reasoning_content"] and message["content"] in ("", "red")


def allows(tokenizer, fields, text):
    return fits(tokenizer.inner, GuidedFields(**fields).guide.grammar(Words(tokenizer)), text)


STRUCTURE = {"begin": "<function=f>", "schema": SCHEMA, "end": "</function>"}


@pytest.mark.parametrize(
    "fields",
    [
        {
            "response_format": {
                "type": "structural_tag",
                "structures": [STRUCTURE],
                "triggers": ["<function="],
            }
        },
        {"structural_tag": json.dumps({"structures": [STRUCTURE], "triggers": ["<function="]})},
        {
            "structured_outputs": {
                "structural_tag": {"structures": [STRUCTURE], "triggers": ["<function="]}
            }
        },
    ],
)
def test_structural_tags_hold_only_what_stands_between_them(tiny, fields):
    words = tiny.service.prompts.tokenizer
    assert allows(words, fields, "free < text")
    assert allows(
        words, fields, 'so <function=f>{"n": 3}</function> and <function=f>{"n": 4}</function> on'
    )
    assert not allows(words, fields, 'so <function=f>{"n": 33}</function>')
    assert not allows(words, fields, "so <function=g>")


def test_a_trigger_that_is_one_token_is_taken_by_its_number(tmp_path):
    _, tokenizer = open_tokenizer(str(make_model(tmp_path / "model", added=("<call>",))))
    structure = {"begin": "<call> ", "schema": SCHEMA, "end": " <|pad|>"}
    fields = {"structural_tag": {"structures": [structure], "triggers": ["<call>"]}}
    assert allows(tokenizer, fields, 'now <call> {"n": 3} <|pad|> then')
    assert not allows(tokenizer, fields, 'now <call> {"n": 33} <|pad|> then')


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        (
            {"guided_regex": "a", "guided_choice": ["b"]},
            "guided_regex and guided_choice both ask",
            "guided_choice",
        ),
        ({"guided_regex": "(a"}, "the regular expression cannot be followed", None),
        ({"guided_grammar": "start: nothing"}, "the grammar cannot be followed", None),
        ({"guided_grammar": "root ::= ("}, "the EBNF grammar cannot be read", "guided_grammar"),
        ({"guided_json": "{"}, "the JSON schema is not JSON", None),
        ({"guided_choice": []}, "a choice needs 1 to", None),
        ({"structured_outputs": {}}, "exactly one of json", "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "whitespace_pattern is not supported",
            "structured_outputs",
        ),
        (
            {"response_format": {"type": "regex"}},
            "of type regex needs 'pattern'",
            "response_format",
        ),
        (
            {"response_format": {"type": "structural_tag"}},
            "needs structures and triggers",
            "response_format",
        ),
        (
            {"structural_tag": {"structures": [STRUCTURE, {"begin": "other"}], "triggers": ["<f"]}},
            "'other' begins with none",
            None,
        ),
        (
            {"structural_tag": {"structures": [STRUCTURE], "triggers": ["<x"]}},
            "no structure begins with the trigger '<x'",
            None,
        ),
        ({"guided_regex": "a", "min_tokens": 3}, "a shape ends where it is complete", "min_tokens"),
    ],
)
def test_shapes_that_cannot_be_are_refused(tiny, fields, message, param):
    answer = tiny.post("/v1/completions", **ASK | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert message in error["message"] and (param is None or error["param"] == param)


def test_every_kind_is_told_by_its_name():
    assert [translate(text)[0] for text in ("{}", "regex:a", 'lark:start: "a"')] == [
        "the JSON schema",
        "the regular expression",
        "the grammar",
    ]


THINKER = (
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
)
HARMONY = "Reasoning: {{ reasoning_effort }}"
OLDER = "{% if thinking %}<think>{% endif %}"


@pytest.mark.parametrize(
    ("template", "effort", "enabled", "options"),
    [
        (THINKER, "none", None, {"enable_thinking": False}),
        (THINKER, "high", None, {"enable_thinking": True}),
        (THINKER, None, False, {"enable_thinking": False}),
        (HARMONY, "low", None, {"reasoning_effort": "low"}),
        (OLDER, "medium", None, {"thinking": True}),
        (THINKER, None, None, {}),
    ],
)
def test_the_wish_to_think_is_put_in_the_words_of_the_template(template, effort, enabled, options):
    assert thinking_options(template, effort, enabled) == (options, [])


def test_a_template_without_a_switch_is_told_about():
    options, (warning,) = thinking_options("thinking is fine, says {{ messages }}", "high", None)
    assert options == {} and "no switch for thinking: reasoning_effort (ignored)" in warning


def test_reasoning_effort_reaches_the_prompt(tiny):
    asked = dict(messages=[{"role": "user", "content": "x"}])
    prompts = Prompts(tiny.service.prompts.tokenizer)
    for effort, opened in (("none", False), ("high", True)):
        options, _ = prompts._options(ChatRequest(**asked, reasoning_effort=effort))
        assert options["enable_thinking"] is opened
    with pytest.raises(BadRequest):
        GuidedFields(guided_choice=[""]).guide  # noqa: B018
