"""The threads behind the kernels: however many there are, results are the same, and a forked
process gets its own.
"""

import os
import signal

import pytest
import torch
from tiny_configs import NATIVE

from flyweight.batch import Batch, KVStorage
from flyweight.kernels.native import library
from flyweight.kernels.native.executor import NativeDecoder
from flyweight.kernels.native.linear import NativeLinear
from flyweight.models.native import read_parts
from flyweight.models.presets import PresetWeights
from flyweight.tensors import IntGroup

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=f"{library.why_not()}")


@pytest.fixture(params=[1, 2, 3, 5])
def threads(request):
    """More than there are cores, too: then some of them sleep at every barrier."""
    library.start_team(request.param)
    yield request.param
    library.start_team(library.thread_count())


@pytest.fixture(scope="module")
def expected():
    library.start_team(1)
    return run_steps(), multiply()


def multiply() -> torch.Tensor:
    linear = NativeLinear(IntGroup.random((333, 256), bits=4, group_size=64))
    return linear(torch.randn(9, 256, generator=torch.Generator().manual_seed(1)))


def run_steps() -> torch.Tensor:
    """A prompt and twenty tokens after it, of two sequences."""
    decoder = NativeDecoder(read_parts(PresetWeights(NATIVE, "int4")))
    page = (8, 16, 2, 16)
    layers = NATIVE["num_hidden_layers"]
    pages = [KVStorage(torch.zeros(page), torch.zeros(page)) for _ in range(layers)]
    tables = torch.arange(8, dtype=torch.int32).view(2, 4)
    logits = []
    for start, count in [(0, 11), *((11 + i, 1) for i in range(20))]:
        positions = torch.arange(start, start + count).repeat(2)
        slots = torch.cat([positions[:count], positions[:count] + 64])
        batch = Batch(
            positions % 64,
            positions,
            slots,
            tables,
            [0, count, 2 * count],
            [start + count] * 2,
            torch.tensor([count - 1, 2 * count - 1]),
        )
        logits.append(decoder.forward(batch, pages))
    return torch.cat(logits)


def test_any_number_of_threads_gives_the_same_bits(expected, threads: int):
    steps, products = expected
    assert torch.equal(multiply(), products)
    assert torch.equal(run_steps(), steps)


def test_a_forked_process_makes_threads_of_its_own():
    library.start_team(2)
    before = multiply()
    child = os.fork()
    if child == 0:  # no thread of the parent's is here: waiting for one would take for ever
        signal.alarm(60)
        os._exit(0 if torch.equal(multiply(), before) else 1)
    assert os.waitpid(child, 0)[1] == 0
    library.start_team(library.thread_count())


def test_the_environment_says_how_many(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert library.thread_count() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert 1 <= library.thread_count() <= len(library.allowed_cores())
