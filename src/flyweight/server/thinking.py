"""Whether, and how hard, a model is to think: one wish of the client, in the words of its chat
template.

Some templates take an effort (`reasoning_effort`), most only a switch. Which of them a template
reads is seen in its text.
"""

from __future__ import annotations

import re
from typing import Any, Literal

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORT = "reasoning_effort"
SWITCHES = ("enable_thinking", "thinking")


def reads(template: str, name: str) -> bool:
    """Whether the template looks at a variable of this name, rather than speaks of it."""
    code = " ".join(re.findall(r"\{[%{].*?[%}]\}", template, re.DOTALL))
    return bool(
        re.search(
            rf"(?:if|elif|not|and|or|=|\()\s*{name}\b|\b{name}\s+(?:is|==)|{{{{-?\s*{name}\b", code
        )
    )


def thinking_options(
    template: str, effort: str | None, enabled: bool | None
) -> tuple[dict[str, Any], list[str]]:
    """(arguments for the template, warnings about a wish that it has no word for)."""
    if effort is None and enabled is None:
        return {}, []
    options: dict[str, Any] = {}
    if effort is not None and effort != "none" and reads(template, EFFORT):
        options[EFFORT] = effort
    wanted = enabled if enabled is not None else effort != "none"
    for name in SWITCHES:
        if reads(template, name):
            options[name] = wanted
    asked = EFFORT if effort is not None else SWITCHES[0]
    return options, [] if options else [
        f"this model's chat template has no switch for thinking: {asked} (ignored)"
    ]
