"""Families whose layers differ from Llama's: one short file each, as data.

Importing this package registers them in `config.FAMILIES`; `models/__init__.py` does that, so that
whoever reads a config knows them all. docs/add-a-model.md adds one.
"""

from typing import Any

from flyweight.models.config import Family, register
from flyweight.models.families import (
    cwm,
    deepseek,
    dots,
    ernie,
    exaone,
    gemma,
    glm,
    gpt_oss,
    granite,
    mistral,
    mixtral,
    olmo,
    phi,
    qwen_next,
    seed_oss,
    smollm,
)

MODULES = (
    olmo,
    granite,
    smollm,
    phi,
    mistral,
    mixtral,
    glm,
    dots,
    ernie,
    exaone,
    seed_oss,
    cwm,
    deepseek,
    gemma,
    gpt_oss,
    qwen_next,
)

ALL: dict[str, Family] = {}
PRESETS: dict[str, dict[str, Any]] = {}
for _module in MODULES:
    ALL |= _module.FAMILIES
    PRESETS |= _module.PRESETS

for _name, _family in ALL.items():
    register(_name, _family)
