"""A wait for other thread blocks ends, and names the kernel: what of it can be seen without a
GPU.
"""

import ctypes
import re

import pytest

from flyweight.kernels import compiler, stall

# Loops that wait for another CTA: what they read, and where they may be.
READS = re.compile(r"while \(.*(missing<|!all\b|!all_here|load_acquire)")


def test_every_wait_for_another_cta_has_an_end():
    """A new loop that polls memory counts its polls, too."""
    waits = 0
    for path in sorted(compiler.SOURCES.glob("*.cu*")):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if READS.search(line):
                # polls stand before a wait or first in it
                near = "\n".join(lines[max(0, number - 12) : number + 2])
                assert "patience.poll()" in near, f"{path.name}:{number + 1} waits for ever"
                waits += 1
    assert waits >= 9


@pytest.fixture
def slots(monkeypatch):
    """As the driver makes them, in ordinary memory."""
    room = ctypes.create_string_buffer(stall.WORD * (stall.SLOTS + 2))
    made = object.__new__(stall.Slots)
    made._lock = __import__("threading").Lock()
    made.names = []
    made.address = ctypes.addressof(room)
    made.room = room
    given = made.given = []
    made._copy = lambda variable, place: given.append(
        (variable, ctypes.c_uint64.from_address(place).value)
    )
    monkeypatch.setattr(stall, "_slots", made)
    return made


def test_the_kernel_that_gave_up_is_named(slots):
    for variable, name in enumerate(("gemm.cu", "batch.cu", "experts.cu")):
        slots.give(variable, name)
    error = RuntimeError("unspecified launch failure")
    assert stall.stalled() == [] and stall.explain(error) is error
    # as the kernel does before its trap
    ctypes.c_uint32.from_address(slots.given[1][1]).value = 7 + 1
    assert stall.stalled() == ["batch.cu (thread block 7)"]
    told = stall.explain(error)
    assert isinstance(told, stall.KernelStalled) and "batch.cu (thread block 7) waited" in str(told)


def test_a_process_without_a_gpu_has_nothing_to_tell(monkeypatch):
    monkeypatch.setattr(stall, "_slots", None)
    assert stall.stalled() == []


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_modules_that_wait_have_a_word_to_leave_and_others_have_none(arch, tmp_path, monkeypatch):
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path))
    routes = dict(
        FP16=0,
        KDIM=3584,
        EXPERTS=64,
        CHOSEN=8,
        GATE=1,
        NORMALIZE=0,
        ROWS=1,
        TILE=1,
        BY_TOKEN=1,
        EARLY=1,
    )
    assert stall.SYMBOL in compiler.compile_cubin("route.cu", routes, arch)
    assert stall.SYMBOL not in compiler.compile_cubin(
        "token.cu", dict(FP16=0, WIDTH=151936, THREADS=256), arch
    )
