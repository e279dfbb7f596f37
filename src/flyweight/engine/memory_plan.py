"""The plan of an LLM's memory: what its steps need beside weights is measured or reckoned, and the
KV cache gets the rest.
"""

from __future__ import annotations

from typing import Any

import torch

from flyweight import shortage
from flyweight.engine.limits import Limits
from flyweight.engine.memory import (
    CacheShape,
    Memory,
    graph_bytes,
    measure_workspace,
    plan_memory,
)
from flyweight.engine.packed import SIZES
from flyweight.engine.speculation.drafter import Drafter
from flyweight.engine.speculation.model import ModelDrafter
from flyweight.engine.speculation.shared_rows import CAPACITY


def plan_for(
    decoder: Any,
    shape: CacheShape,
    limits: Limits,
    *,
    name: str,
    device: torch.device,
    drafter: Drafter | None,
    guessed: bool,
    blocks: int | None,
    memory_fraction: float | None,
) -> Memory:
    """`guessed`: whether steps with guesses are run; `blocks`: of the KV cache, where given."""
    workspace = graphs = 0
    if device.type == "cuda":
        with shortage.told(
            f"{name}: a step of {limits.tokens:,} tokens does not fit beside its weights"
        ):
            workspace = measure_workspace(
                decoder,
                shape,
                tokens=limits.tokens,
                context=limits.context,
                block_size=limits.block_size,
            )
        graphs = captured_bytes(decoder, limits, drafter, guessed=guessed)
    return plan_memory(
        shape,
        weights=decoder.nbytes - offloaded_bytes(decoder),
        workspace=workspace,
        graphs=graphs,
        blocks=blocks,
        block_size=limits.block_size,
        device=device,
        context=limits.context,
        sequences=limits.sequences,
        memory_fraction=memory_fraction,
    )


def captured_bytes(decoder: Any, limits: Limits, drafter: Drafter | None, *, guessed: bool) -> int:
    """Of the steps and passes that will be captured."""
    size = graph_bytes(decoder, limits.sequences, min(limits.tokens, SIZES[-1]))
    if guessed:  # steps with guesses are captured beside the others
        size += graph_bytes(decoder, CAPACITY, 0)
    if isinstance(drafter, ModelDrafter):
        size += graph_bytes(drafter.runner.model, limits.sequences, SIZES[-1])  # type: ignore[arg-type]
    return size


def offloaded_bytes(decoder: Any) -> int:
    """Of weights that are not on the device."""
    offload = getattr(decoder, "offload", None)
    return 0 if offload is None else offload.nbytes
