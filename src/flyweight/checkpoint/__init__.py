"""Model folders on disk: read, written, converted, fetched. Nothing here knows a solver or a
kernel.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flyweight.checkpoint.reader import Checkpoint
    from flyweight.checkpoint.writer import CheckpointWriter

__all__ = ["Checkpoint", "CheckpointWriter"]

HOME = {
    "Checkpoint": "flyweight.checkpoint.reader",
    "CheckpointWriter": "flyweight.checkpoint.writer",
}


def __getattr__(name: str) -> Any:
    """Imported on first use: `flyweight list` and `ps` need no torch."""
    if name not in HOME:
        raise AttributeError(f"module 'flyweight.checkpoint' has no attribute {name!r}")
    return getattr(import_module(HOME[name]), name)
