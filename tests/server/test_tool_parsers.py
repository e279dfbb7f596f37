"""Calls are found in text wherever it is cut, in every format; what is no call stays text."""

import random

import pytest

from flyweight.errors import OptionError
from flyweight.server.pieces import Arguments, Call, Text, Thought
from flyweight.server.tools import FORMATS, choose_format

NESTED = '{"a": {"b": [1, "}\\"]"]}, "é": ","}'
CODER = """I look.
<tool_call>
<function=f>
<parameter=s>
{"not": "parsed"}
</parameter>
<parameter=n>
12
</parameter>
<parameter=flag>
True
</parameter>
<parameter=list>
["a", {"b": 1.5}]
</parameter>
<parameter=maybe>
null
</parameter>
<parameter=either>
7
</parameter>
<parameter=stranger>
42
</parameter>
</function>
</tool_call>
<tool_call>
<function=g>
<parameter=text>
<b>
  x
</parameter>
</function>
</tool_call>"""
CODER_ARGUMENTS = (
    '{"s": "{\\"not\\": \\"parsed\\"}", "n": 12, "flag": true, "list": ["a", {"b": 1.5}], '
    '"maybe": null, "either": 7, '
    '"stranger": "42"}'
)
# as the format's documentation has it
HARMONY = (
    "<|channel|>analysis<|message|>Need to use function "
    "f.<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "Looking it up.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    "<|constrain|>json<|message|>"
    '{"location":"San Francisco"}<|call|>'
)
TOOLS = {
    "f": {
        "type": "object",
        "$defs": {"flag": {"type": "boolean"}},
        "properties": {
            "s": {"type": "string"},
            "n": {"type": "integer"},
            "flag": {"$ref": "#/$defs/flag"},
            "list": {"type": "array"},
            "maybe": {"type": ["string", "null"]},
            "either": {"anyOf": [{"type": "string"}, {"type": "number"}]},
        },
    },
    "g": {"type": "object", "properties": {"text": {"type": "string"}}},
    "python": None,
}
CASES = [  # format, text → words, calls
    ("hermes", "no call < here <tool", "no call < here <tool", []),
    ("hermes", "text at the end \n", "text at the end \n", []),
    (
        "hermes",
        f'Let me see.\n\n<tool_call>\n{{"name": "f", "arguments": {NESTED}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        "Let me see.",
        [("f", NESTED), ("g", "{}")],
    ),
    (
        "hermes",
        '<tool_call>[{"name":"f"},{"arguments":"{\\"x\\":1}","name":"g"}]</tool_call> done',
        "done",
        [("f", "{}"), ("g", '{"x":1}')],
    ),
    ("hermes", "<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
    ("hermes", '<tool_call>{"city": 1}</tool_call>', '<tool_call>{"city": 1}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"cut": "off', "", [("f", '{"cut": "off')]),
    ("hermes", '<tool_call>{"nam', '<tool_call>{"nam', []),
    ("llama", f'{{"name": "f", "parameters": {NESTED}}}', "", [("f", NESTED)]),
    ("llama", ' {"type": "function", "name": "f", "parameters": null}', "", [("f", "{}")]),
    ("llama", '{"name": "Bob", "age": 3}, a person', '{"name": "Bob", "age": 3}, a person', []),
    ("llama", '{"x": 1}', '{"x": 1}', []),
    ("llama", 'I call {"name": "f"}', 'I call {"name": "f"}', []),
    (
        "llama",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"q": 1}}',
        "",
        [("f", "{}"), ("g", '{"q": 1}')],
    ),
    ("llama", '<|python_tag|>f.call(query="a b", n=3)', "", [("f", '{"query": "a b", "n": 3}')]),
    (
        "llama",
        "<|python_tag|>import os\nos.remove('x')",
        "",
        [("python", '{"code": "import os\\nos.remove(\'x\')"}')],
    ),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "f", "arguments": {NESTED}}}, '
        f'{{"name": "g", "arguments": {{}}, "id": "x"}}]',
        "",
        [("f", NESTED), ("g", "{}")],
    ),
    (
        "mistral",
        f"Yes.[TOOL_CALLS]f[ARGS]{NESTED}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{{}}",
        "Yes.",
        [("f", NESTED), ("g", "{}")],
    ),
    ("mistral", "a [TOOL", "a [TOOL", []),
    ("mistral", "[TOOL_CALLS]?! what", "[TOOL_CALLS]?! what", []),
    ("qwen_coder", CODER, "I look.", [("f", CODER_ARGUMENTS), ("g", '{"text": "<b>\\n  x"}')]),
    ("qwen_coder", "<tool_call>\n<function=g>\n</function>\n</tool_call>", "", [("g", "{}")]),
    (
        "qwen_coder",
        "<tool_call>\n<function=f>\n<parameter=s>\nhalf a st",
        "",
        [("f", '{"s": "half a st')],
    ),
    (
        "qwen_coder",
        "<tool_call>\n<function=f>\n<parameter=s>\nunclosed\n</function>\n</tool_call> done",
        "done",
        [("f", '{"s": "unclosed"}')],
    ),
    ("qwen_coder", "<tool_call>no function</tool_call>", "<tool_call>no function</tool_call>", []),
    ("qwen_coder", "a < b and <tool", "a < b and <tool", []),
    ("harmony", HARMONY, "Looking it up.", [("f", '{"location":"San Francisco"}')]),
    (
        "harmony",
        "<|channel|>final<|message|>2 < 3 <| and <|mess<|return|>",
        "2 < 3 <| and <|mess",
        [],
    ),
    (
        "harmony",
        " to=functions.f<|channel|>commentary "
        "json<|message|>{}<|call|><|start|>assistant<|channel|>commentary "
        'to=functions.g <|constrain|>json<|message|>{"x": [1]}<|call|>',
        "",
        [("f", "{}"), ("g", '{"x": [1]}')],
    ),
    ("harmony", "<|channel|>commentary to=functions.f<|message|><|call|>", "", [("f", "{}")]),
    ("harmony", "words without any channel", "words without any channel", []),
    (
        "harmony",
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"cut',
        "",
        [("f", '{"cut')],
    ),
]


def read(parser, pieces):
    found = [
        piece
        for at, text in enumerate(pieces)
        for piece in parser.add(text, last=at == len(pieces) - 1)
    ]
    words = "".join(piece.text for piece in found if isinstance(piece, Text))
    calls = [[piece.name, ""] for piece in found if isinstance(piece, Call)]
    for piece in found:
        if isinstance(piece, Arguments):
            calls[piece.index][1] += piece.text
    return words, [tuple(call) for call in calls]


@pytest.mark.parametrize(("form", "text", "words", "calls"), CASES)
def test_calls_are_told_from_text_wherever_it_is_cut(form, text, words, calls):
    for seed in range(40):
        cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=seed % 9))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(FORMATS[form].parser(TOOLS), pieces) == (words, calls), pieces
    assert read(FORMATS[form].parser(TOOLS), [*text, ""]) == (words, calls), (
        "one character at a time"
    )


def test_arguments_go_out_while_they_come_in():
    parser = FORMATS["hermes"].parser({"f"})
    parser.add('<tool_call>\n{"name": "f", "arguments": {"text": "a lo')
    assert parser.add("ng story") == [Arguments(0, "ng story")]


def test_text_in_tags_goes_out_while_it_comes_in():
    parser = FORMATS["qwen_coder"].parser(TOOLS)
    parser.add("<tool_call>\n<function=f>\n<parameter=s>\na lo")
    assert parser.add('ng "story"\n') == [Arguments(0, 'ng \\"story\\"')]


def test_channels_are_told_apart():
    parser = FORMATS["harmony"].parser({})
    text = (
        "<|channel|>analysis<|message|>Hmm, 2 < 3.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    )
    found = [piece for letter in text for piece in parser.add(letter)] + parser.add("", last=True)
    assert "".join(piece.text for piece in found if isinstance(piece, Thought)) == "Hmm, 2 < 3."
    assert "".join(piece.text for piece in found if isinstance(piece, Text)) == "Yes."


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>\n<function=x>\n<parameter=y>", "qwen_coder"),
        ("<|channel|>commentary to=functions.", "harmony"),
        ("… <tool_call> …", "hermes"),
        ("[TOOL_CALLS] and <tool_call>", "mistral"),
        ("{{ '<|python_tag|>' }}", "llama"),
        ('Respond {"name": function name, "parameters": dictionary}', "llama"),
        ("{{ tools }}", None),
    ],
)
def test_the_chat_template_shows_the_format(template, name):
    found = choose_format(template)
    assert (found and found.name) == name
    assert choose_format(template, "llama").name == "llama", "--tool-parser overrides it"


def test_an_unknown_parser_is_refused_with_the_nearest():
    with pytest.raises(OptionError, match="did you mean 'hermes'"):
        choose_format("", "herms")


def test_mistral_gets_ids_that_its_template_takes():
    (call, _) = FORMATS["mistral"].parser({"f"}).add('[TOOL_CALLS][{"name": "f", "arguments": {}}]')
    assert len(call.id) == 9 and call.id.isalnum()
