"""Tiny models whose chat templates speak of tools as five families do, and a script of what they
answer."""

from __future__ import annotations

from pathlib import Path

from tiny_server import ScriptedEngine, make_model

CALL = "{{ '{\"name\": ' }}{{ call.function.name | tojson }}"
QWEN = (
    "{% if tools %}<|start|>system\n# Tools\n{{ tools | tojson }}\nanswer within "
    "<tool_call></tool_call>.<|end|>\n{% endif %}"
    "{% for message in messages %}<|start|>{{ message.role }}\n"
    "{% if message.role == 'tool' %}<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% else %}{% if message.content %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls %}\n<tool_call>\n"
    + CALL
    + ', "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif "
    "%}{% endif %}"
)
LLAMA = (
    '{% if tools %}Respond in the format {"name": function name, "parameters": dictionary}. {{ '
    "tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{% if 'tool_calls' in message %}{% if message.tool_calls | "
    "length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{% for call in message.tool_calls %}"
    + CALL
    + ', "parameters": {{ call.function.arguments | tojson }}}<|end|>{% endfor %}'
    "{% else %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}{# <|python_tag|> #}"
)
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for message in messages %}{% if message.tool_calls %}[TOOL_CALLS][{% for call in "
    "message.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('IDs should be alphanumeric, with length "
    "9!') }}{% endif %}"
    + CALL
    + ', "arguments": {{ call.function.arguments | tojson }}}{% endfor %}]'
    "{% elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]"
    "{% else %}[{{ message.role }}]{{ message.content }}{% endif %}{% endfor %}"
)
NEW_MISTRAL = MISTRAL + "{# [TOOL_CALLS]name[ARGS]{} #}"
CODER = (
    "{% if tools %}<|start|>system\n# Tools\n{{ tools | tojson "
    "}}\n<tool_call>\n<function=example_function_name>\n"
    "<parameter=example_parameter_1>\nvalue_1\n</parameter>\n</function>\n</tool_call><|end|>\n{% "
    "endif %}"
    "{% for message in messages %}<|start|>{{ message.role }}\n"
    "{% if message.role == 'tool' %}<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% else %}{% if message.content %}{{ message.content }}{% endif %}{% for call in "
    "message.tool_calls %}"
    "\n<tool_call>\n<function={{ call.function.name }}>\n{% for key, value in "
    "call.function.arguments | items %}"
    "<parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n{% "
    "endfor %}</function>\n"
    "</tool_call>{% endfor %}{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt "
    "%}<|start|>assistant\n{% endif %}"
)
HARMONY = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort if reasoning_effort is defined else "
    "'medium' }}<|end|>"
    "{% if tools %}<|start|>developer<|message|>namespace functions {{ tools | tojson }}<|end|>{% "
    "endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}<|start|>functions "
    "to=assistant<|channel|>commentary<|message|>"
    "{{ message.content }}<|end|>{% elif message.tool_calls %}{% if message.content and "
    "message.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking in an assistant message with tool "
    "calls!') }}{% endif %}"
    "{% if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking "
    "}}<|end|>{% endif %}"
    "{% for call in message.tool_calls %}"
    "<|start|>assistant to=functions.{{ call.function.name }}<|channel|>commentary json<|message|>"
    "{{ call.function.arguments | tojson }}<|call|>{% endfor %}"
    "{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% "
    "endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

FAMILIES = {  # name → (template, special tokens, other added tokens)
    "qwen": (QWEN, (), ("<tool_call>", "</tool_call>", "<think>", "</think>")),
    "spelled": (QWEN, (), ()),  # the tags are no tokens of this vocabulary
    "llama": (LLAMA, ("<|python_tag|>",), ()),
    "mistral": (MISTRAL, ("[TOOL_CALLS]",), ()),
    "new mistral": (NEW_MISTRAL, ("[TOOL_CALLS]", "[ARGS]"), ()),
    "coder": (CODER, (), ("<tool_call>", "</tool_call>")),
    "harmony": (HARMONY, ("<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"), ()),
}


def make_family(name: str, folder: Path) -> Path:
    template, special, added = FAMILIES[name]
    return make_model(folder, template=template, special=special, added=added)


def scripted(answers: dict[str, str]) -> type[ScriptedEngine]:
    """An engine that says these; what it was asked is in its `submitted`."""
    return type("Script", (ScriptedEngine,), {"answers": answers, "submitted": []})


def function(name: str, **properties) -> dict:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            },
        },
    }


def fits(tokenizer, grammar: str, text: str) -> bool:
    """Whether a grammar lets this text through, token by token, and lets it end there."""
    from flyweight.engine.grammar import Grammars

    constraint = Grammars(tokenizer, 264, [257])(grammar)()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return all(constraint.allowed(tokens[:at])[token] for at, token in enumerate([*tokens, 257]))


WEATHER = function(
    "get_weather", city={"type": "string", "maxLength": 8}, unit={"enum": ["C", "F"]}
)
ADD = function(
    "add",
    a={"type": "integer", "minimum": 0, "maximum": 99},
    b={"type": "integer", "minimum": 0, "maximum": 99},
)


THOUGHTFUL = "<think>\nLet me think.\n</think>\n\nIt is warm."
CALLING = (
    'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "unit": "C"}}\n'
    "</tool_call>"
)
# last words of a prompt → what is answered; the later ones first, since earlier words stay in the
# prompt
CONVERSATION = {
    "21 degrees": "It is 21 degrees in Paris.",
    "say the weather": CALLING,
    "think hard": THOUGHTFUL,
    "say hello": "Hello! How are you?",
}
