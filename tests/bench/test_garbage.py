"""Cycles are collected when nobody waits."""

import gc
import weakref

import pytest
from tiny_preset import add_tiny

from flyweight import garbage


class Ring:
    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def released():
    yield
    gc.unfreeze()


def test_what_is_alive_is_not_looked_at_again_until_it_is_released():
    gone, kept = Ring(), Ring()
    watched, held = weakref.ref(gone), weakref.ref(kept)
    del gone
    garbage.settle()
    assert watched() is None and gc.get_freeze_count() > 1000
    del kept
    gc.collect()
    assert held() is not None, "frozen"
    garbage.release()
    assert held() is None and gc.get_freeze_count() == 0


def test_an_engine_that_is_measured_is_frozen_and_freed(monkeypatch):
    from flyweight.backends.base import EngineOptions, Limits
    from flyweight.backends.native import Native

    add_tiny(monkeypatch)
    backend = Native("preset:tiny:bf16", EngineOptions(device="cpu"))
    backend.start(Limits(context=64, batch=2, tokens=128))
    engine = weakref.ref(backend.llm.engine)
    assert gc.get_freeze_count() > 1000
    backend.stop()
    assert engine() is None and gc.get_freeze_count() == 0


def test_no_collection_begins_while_it_is_held(monkeypatch):
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        with garbage.held():
            gone = Ring()
            watched = weakref.ref(gone)
            del gone
            _ = [[] for _ in range(1000)]
            assert watched() is not None
        assert gc.isenabled()
        _ = [[] for _ in range(1000)]
        assert watched() is None
    finally:
        gc.set_threshold(*before)
