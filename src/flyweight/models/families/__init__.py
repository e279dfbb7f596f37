"""Families whose layers differ from Llama's: one short file each, as data.

Importing this package registers them in `config.FAMILIES`; `models/__init__.py` does that, so that
whoever reads a config knows them all. docs/add-a-model.md adds one.
"""

from typing import Any

from flyweight.models.config import Family, register
from flyweight.models.families import (
    deepseek,
    gemma,
    glm,
    gpt_oss,
    granite,
    mistral,
    olmo,
    phi,
    qwen_next,
    smollm,
)

ALL: dict[str, Family] = {
    **olmo.FAMILIES,
    **granite.FAMILIES,
    **smollm.FAMILIES,
    **phi.FAMILIES,
    **mistral.FAMILIES,
    **glm.FAMILIES,
    **deepseek.FAMILIES,
    **gemma.FAMILIES,
    **gpt_oss.FAMILIES,
    **qwen_next.FAMILIES,
}

PRESETS: dict[str, dict[str, Any]] = {
    **olmo.PRESETS,
    **granite.PRESETS,
    **smollm.PRESETS,
    **phi.PRESETS,
    **mistral.PRESETS,
    **glm.PRESETS,
    **deepseek.PRESETS,
    **gemma.PRESETS,
    **gpt_oss.PRESETS,
    **qwen_next.PRESETS,
}

for _name, _family in ALL.items():
    register(_name, _family)
