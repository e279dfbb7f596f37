"""Python's collector of reference cycles, kept out of what is timed and of answers.

A full collection looks at every object there is. Torch and transformers keep hundreds of thousands,
so it takes as long as many steps of a decoder, in the middle of some answer. What is alive when an
engine is ready stays alive as long as the engine, so it need never be looked at again. That is a
decision for a whole process: the library by itself does not take it.
"""

import contextlib
import gc
from collections.abc import Iterator


def settle() -> None:
    """What is alive now is not looked at again until `release`."""
    release()
    gc.freeze()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """While modules are imported and a model is loaded, nearly everything made stays: looking for
    what does not takes an eighth of importing torch.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def release() -> None:
    """All cycles that nobody holds are freed, `settle` or not."""
    gc.unfreeze()
    gc.collect()


@contextlib.contextmanager
def held() -> Iterator[None]:
    """No collection begins by itself meanwhile."""
    began = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if began:
            gc.enable()
