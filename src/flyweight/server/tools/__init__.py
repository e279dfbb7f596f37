"""Calls of tools, in the formats that the families of models write them in: one file per format."""

from __future__ import annotations

from flyweight.errors import OptionError, unknown
from flyweight.server.tools.harmony import Harmony
from flyweight.server.tools.hermes import Hermes
from flyweight.server.tools.llama import Llama
from flyweight.server.tools.mistral import Mistral
from flyweight.server.tools.qwen_coder import QwenCoder

Format = Harmony | Hermes | Llama | Mistral | QwenCoder
FORMATS: dict[str, type[Format]] = {
    form.name: form for form in (Harmony, Hermes, Llama, Mistral, QwenCoder)
}
SIGNS = (  # in a chat template → the format of its family, the first that is found
    ("<|channel|>", "harmony"),
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama"),
    ('"parameters":', "llama"),
)


def choose_format(template: str, wanted: str | None = None) -> Format | None:
    """The format that a model's chat template speaks of, or the one asked for; None: no sign of
    any.
    """
    if wanted is not None and wanted not in FORMATS:
        raise OptionError(unknown("--tool-parser", wanted, FORMATS))
    name = wanted or next((name for sign, name in SIGNS if sign in template), None)
    return FORMATS[name](template) if name else None
