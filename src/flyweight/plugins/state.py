"""Whether another engine will find and take a plug-in of ours, told without importing it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class State:
    active: bool
    text: str


def installed_version(packages: Sequence[str]) -> str | None:
    """Of the first of these packages that is there."""
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def unseen(engine: str, group: str) -> str | None:
    """Engines look for entry points of installed packages."""
    found = importlib.metadata.entry_points(group=group)
    if any(point.name == "flyweight" for point in found):
        return None
    return (
        f"{engine} does not find it: this package is not installed, only on the path "
        "(pip install .)"
    )
