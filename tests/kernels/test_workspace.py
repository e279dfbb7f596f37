"""Buffers belong to an engine, and engines on one device take turns."""

import threading

import pytest
import torch

from flyweight.kernels import workspace
from flyweight.kernels.workspace import Turns, Workspace

CPU = torch.device("cpu")


def test_two_workspaces_share_no_buffer_and_each_keeps_its_own():
    one, other = Workspace(CPU), Workspace(CPU)
    with one:
        first = workspace.current(CPU).bytes("packed", 3000)
        with other:
            assert workspace.current(CPU) is other
            assert workspace.current(CPU).bytes("packed", 3000).data_ptr() != first.data_ptr()
        assert workspace.current(CPU).bytes("packed", 4000) is first, (
            "rounded to the same power of two"
        )
    assert workspace.current(CPU) not in (one, other)


def test_a_thread_without_an_engine_has_a_workspace_of_its_own():
    found = []
    thread = threading.Thread(target=lambda: found.append(workspace.current(CPU)))
    thread.start()
    thread.join()
    assert found[0] is not workspace.current(CPU) and workspace.current(CPU) is workspace.current(
        CPU
    )


def test_mailboxes_are_empty_and_counters_zero_when_they_are_made():
    own = Workspace(CPU)
    assert (
        bool((own.mailbox(100) == -1).all())
        and not own.counter("units").any()
        and not own.tickets().any()
    )


def test_the_place_for_dequantized_weights_grows_and_what_it_was_stays():
    own = Workspace(CPU)
    small = own.dequantized(100, torch.float16)
    large = own.dequantized(1000, torch.float16)
    assert own.dequantized(50, torch.float16).data_ptr() == large.data_ptr() != small.data_ptr()


@pytest.fixture
def calls(monkeypatch):
    """What is asked of the device, by name."""
    found = []

    class Event:
        def record(self, stream):
            found.append(("record", stream))

    class Stream:
        def wait_event(self, event):
            found.append(("wait", event))

    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: found.append(("synchronize", device))
    )
    return found


def member(turns):
    own = Workspace(CPU)
    own._turns = turns
    turns.members.add(own)
    return own


def test_an_engine_alone_asks_nothing_of_the_device(calls):
    own = member(Turns(CPU))
    for _ in range(3):
        with own, own:
            pass
    assert calls == []


def test_a_second_engine_begins_when_the_first_has_ended_on_the_device(calls):
    turns = Turns(CPU)
    one = member(turns)
    with one:
        pass
    other = member(turns)
    with other:
        assert [name for name, _ in calls] == ["synchronize"], (
            "of the first, which was alone, nothing was noted"
        )
    with one, one:
        assert [name for name, _ in calls] == ["synchronize", "record", "wait"], (
            "once, however deep"
        )
    with one:
        pass
    assert [name for name, _ in calls] == ["synchronize", "record", "wait", "record", "record"]


def test_no_two_threads_launch_at_once(calls):
    turns = Turns(CPU)
    engines = [member(turns) for _ in range(2)]
    inside, most = [], []

    def run(own):
        for _ in range(200):
            with own:
                inside.append(own)
                most.append(len(inside))
                inside.remove(own)

    threads = [threading.Thread(target=run, args=(own,)) for own in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
