"""How several models share the memory of one device.

On a GPU each gets a share of the device, `--memory-fraction` or an equal part, for weights and
cache together; an engine is told up to where the device may be full after it, which is the shares
of those before it and its own. On a CPU the cache is a share of what is free, and weights fit if as
much is free as they need.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flyweight.server.settings import Settings

GPU_FRACTION = 0.9  # of the device, for all models together
CPU_FRACTION = 0.25  # of what is free, for their caches
MOST_FRACTION = 0.97
SLACK = 1.1  # what a process needs beside its weights


class MemoryShares:
    def __init__(self, models: int, device: str, *, available: int | None = None):
        """`available`: bytes that are free, in place of what the machine says."""
        self.models = models
        self.gpu = device.startswith("cuda")
        self.available = available
        self.granted: dict[str, float] = {}  # by model: the share it was last loaded with

    def share(self, settings: Settings) -> float:
        """Its own part, beside the others."""
        asked = settings.engine.get("memory_fraction")
        return asked or self.whole(settings) / self.models

    def whole(self, settings: Settings) -> float:
        """What it may have alone."""
        return settings.engine.get("memory_fraction") or (
            GPU_FRACTION if self.gpu else CPU_FRACTION
        )

    def fits(self, wanted: Settings, loaded: Sequence[Settings]) -> bool:
        if self.gpu:
            return self.share(wanted) + self._used(loaded) <= MOST_FRACTION
        return SLACK * weights_in_memory(wanted) <= self.free()

    def grant(
        self, wanted: Settings, loaded: Sequence[Settings], *, whole: bool = False
    ) -> dict[str, Any]:
        """The options to start its engine with."""
        share = self.whole(wanted) if whole else self.share(wanted)
        self.granted[wanted.model] = share
        before = self._used(loaded) if self.gpu else 0.0
        return wanted.engine | {"memory_fraction": min(MOST_FRACTION, before + share)}

    def _used(self, loaded: Sequence[Settings]) -> float:
        return sum(self.granted.get(settings.model, 0.0) for settings in loaded)

    def free(self) -> int:
        if self.available is not None:
            return self.available
        from flyweight.engine.memory import available_memory

        return available_memory()


def weights_in_memory(settings: Settings) -> int:
    """Bytes: 16-bit weights are 32-bit ones on a CPU, quantized ones stay as they are."""
    folder = Path(settings.model)
    if not folder.is_dir():  # a preset: nobody knows before it is made
        return 0
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    dtype = settings.engine.get("dtype") or "float32"
    plain = (
        "quantization_config" not in config
        and str(config.get("dtype") or config.get("torch_dtype")) != "float32"
    )
    return size * 2 if plain and dtype == "float32" else size
