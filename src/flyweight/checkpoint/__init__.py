"""Model folders on disk: read, written, converted, fetched. Nothing here knows a solver or a kernel."""

from flyweight.checkpoint.reader import Checkpoint
from flyweight.checkpoint.writer import CheckpointWriter

__all__ = ["Checkpoint", "CheckpointWriter"]
