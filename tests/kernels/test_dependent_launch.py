"""Dependent launches of GPUs that have none: which edges a captured graph gets, with a driver that
only notes them.
"""

import dataclasses

import pytest

from flyweight.gpu import GPUS
from flyweight.kernels import compiler, dependent_launch
from flyweight.kernels.dependent_launch import Capture, Counters, Link, Room
from flyweight.kernels.imitation import Launched

STREAM = 7
HALF = Launched("gemv", 108, 544, 75_000, 1, 56)  # of an SM of an A100


class Graph:
    """A capture: the edges of each node, and what the next one would depend on."""

    def __init__(self):
        self.number = 1
        self.edges = {}
        self.left = ()

    def add(self):
        node = len(self.edges) + 1
        self.edges[node] = set(self.left)
        self.left = (node,)
        return node

    def depend_on(self, stream, nodes):
        assert stream == STREAM
        self.left = tuple(nodes)

    def capture_of(self, stream):
        return Capture(self.number, self.left)


@pytest.fixture
def graph(monkeypatch):
    made = Graph()
    monkeypatch.setattr(dependent_launch, "capture_of", made.capture_of)
    monkeypatch.setattr(dependent_launch, "depend_on", made.depend_on)
    monkeypatch.setattr(dependent_launch, "_zeroed", lambda size: 4096)
    monkeypatch.setattr(dependent_launch, "_streams", dependent_launch._Streams())
    counters = Counters()
    monkeypatch.setattr(dependent_launch, "_counters", lambda device: counters)
    return made


def launch(graph, room=Room.SHARED_PROCESSORS):
    link = Link(STREAM, 0, graph.capture_of(STREAM), room)
    graph.add()
    link.close()
    return link.arguments


def test_edges_skip_one_kernel_and_counters_order_neighbours(graph):
    graph.add()  # somebody else's
    arguments = [launch(graph) for _ in range(5)]
    assert graph.edges == {1: set(), 2: {1}, 3: {1}, 4: {2}, 5: {3}, 6: {4}}
    assert [before for before, _ in arguments] == [0, *(own for _, own in arguments[:-1])]
    assert len({own for _, own in arguments}) == 5, "each has a counter of its own"


def test_what_follows_otherwise_waits_for_both_and_begins_anew(graph):
    for _ in range(3):
        launch(graph)
    graph.add()
    assert graph.edges[4] == {2, 3}
    before, _ = launch(graph)
    assert before == 0 and graph.edges[5] == {4}
    launch(graph)
    assert graph.edges[6] == {4}


def test_a_launch_of_another_kind_waits_for_both_and_begins_anew(graph):
    """One block on every SM and blocks that need an SM of their own: together they might not
    fit.
    """
    for _ in range(2):
        launch(graph)
    before, _ = launch(graph, Room.OTHER_PROCESSORS)
    assert before == 0 and graph.edges[3] == {1, 2}
    before, _ = launch(graph, Room.OTHER_PROCESSORS)
    assert before and graph.edges[4] == {1, 2}


def test_another_capture_begins_anew(graph):
    launch(graph)
    graph.number = 2
    assert launch(graph)[0] == 0


def test_a_kernel_joins_only_with_room_for_two_blocks_on_an_sm_or_on_half_of_the_sms():
    a100 = GPUS["sm_80"]
    assert dependent_launch.room(HALF, a100) is Room.SHARED_PROCESSORS
    larger = dict(shared=90_000), dict(registers=64), dict(threads=1024), dict(blocks=109)
    for change in larger:
        assert dependent_launch.room(dataclasses.replace(HALF, **change), a100) is None, change
    whole = dataclasses.replace(HALF, shared=160_000, blocks=54)
    assert dependent_launch.room(whole, a100) is Room.OTHER_PROCESSORS
    for change in dict(blocks=55), dict(shared=170_000), dict(registers=128):
        assert dependent_launch.room(dataclasses.replace(whole, **change), a100) is None, change


def test_only_gpus_before_hopper_count():
    assert dependent_launch.defines("gemv.cu", GPUS["sm_89"]) == {"BY_COUNTERS": 1}
    assert dependent_launch.defines("gemv.cu", GPUS["sm_90a"]) == {}
    assert dependent_launch.defines("rope.cu", GPUS["sm_89"]) == {}


def test_every_source_with_counters_takes_them():
    """A source of the list has the parameters, begins and ends with them; another has none of
    them.
    """
    for path in compiler.SOURCES.glob("*.cu"):
        text = path.read_text()
        counts = path.name in dependent_launch.SOURCES
        for word in ("LAUNCH_ARGUMENTS", "BEGIN_LAUNCH;", "end_launch("):
            assert (word in text) == counts, (path.name, word)
