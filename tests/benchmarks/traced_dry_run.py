"""Which files of the package a GPU's dry run calls, in a process of its own."""

import fnmatch
import importlib
import pkgutil
import sys
from pathlib import Path

import flyweight
from flyweight.engine import ahead
from flyweight.gpu import GPUS
from flyweight.kernels import jit

ROOT = Path(flyweight.__file__).parents[2]
ROOMS = ("kernels", "engine", "models")


def files_called(model):
    """Python files with a function that was called, and kernel sources that were asked for."""
    for room in ROOMS:  # what runs at import is called for every model
        for module in pkgutil.walk_packages(
            [str(Path(flyweight.__file__).parent / room)], f"flyweight.{room}."
        ):
            if not module.name.rpartition(".")[2].startswith("triton"):
                importlib.import_module(module.name)
    called = set()
    sys.setprofile(
        lambda frame, event, _: called.add(frame.f_code.co_filename) if event == "call" else None
    )
    try:
        ahead.wanted_by(model, ahead.Target(GPUS["sm_90a"], steps=(1, 8, 64), passes=(128, 2048)))
    finally:
        sys.setprofile(None)
    python = {
        str(Path(path).relative_to(ROOT)) for path in called if Path(path).is_relative_to(ROOT)
    }
    return python, {f"src/flyweight/kernels/cuda/{one.file}" for one in jit.wanted}


def among(paths, left_out):
    return sorted(
        path
        for path in paths
        if any(path.startswith(f"{one}/") or fnmatch.fnmatch(path, one) for one in left_out)
    )
