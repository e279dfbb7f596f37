"""Launches that are noted once and repeated for other layers, with a driver that only writes down
what it gets.
"""

import ctypes

import pytest
import torch
from test_jit_launch import Driver

from flyweight import gpu
from flyweight.gpu import GPUS
from flyweight.kernels import jit, workspace
from flyweight.kernels.linear import repeated
from flyweight.kernels.linear.choose import Choice
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.kernels.linear.tiles import prepare
from flyweight.tensors import IntGroup

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
SHAPE = (64, 128)
PACK = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_float]
MULTIPLY = [ctypes.c_uint64] * 5 + [ctypes.c_int32]


class Fake(TiledLinear):
    """A product of two launches, and how often Python went all the way."""

    def __init__(self, seed, kernels):
        tensor = IntGroup.random(SHAPE, seed, dtype=torch.float16)
        self.weight = prepare(tensor, dtype=torch.float16)
        self.kernels, self.calls, self.temporary = kernels, 0, False

    def choose(self, rows, **_):
        return Choice("gemm" if rows < 100 else "cublas", "")

    def multiply(self, x, out=None, **_):
        self.calls += 1
        pack, product = self.kernels
        rows = len(x)
        out = self.weight.empty_result(rows, x.device)
        packed = workspace.current(x.device).bytes("packed", 512 * rows)
        packed = torch.empty(512 * rows, dtype=torch.uint8) if self.temporary else packed
        pack.launch(rows, 32, (x[1:], packed, rows, 0.5), pdl=True)
        product.launch(
            132,
            128,
            (self.weight.weights, self.weight.records, None, packed, out, rows),
            shared=1000,
        )
        return out

    def __call__(self, x):
        return self.multiply(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


@pytest.fixture
def world(monkeypatch):
    """Kernels, and what the driver was handed by either way: (configuration, handle, arguments)."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    monkeypatch.setattr(gpu, "of", lambda device: GPUS["sm_90a"])
    monkeypatch.setattr(repeated, "current_stream", lambda device: 77)
    monkeypatch.setattr(repeated, "TiledLinear", Fake)
    monkeypatch.setattr(workspace._thread, "own", {})
    kernels, drivers = [], []
    for handle, types in ((1234, PACK), (1235, MULTIPLY)):
        made = jit.Kernel(handle, f"kernel {handle}")
        made._driver = Driver(types)
        made._shared[0] = 48 * 1024
        kernels.append(made)
        drivers.append(made._driver)
    again = []

    def launch(configuration, handle, places, extra):
        driver = drivers[handle - 1234]
        driver.cuLaunchKernelEx(configuration, handle, places, extra)
        again.append(driver.launches.pop())
        return 0

    monkeypatch.setattr(repeated, "_driver_launch", lambda: launch)
    return kernels, again


def expected(linear, x, out, rows):
    weight = linear.weight
    packed = workspace.current(x.device).bytes("packed", 512 * rows).data_ptr()
    first = [x.view(-1, SHAPE[1])[1:].data_ptr(), packed, rows, 0.5]
    return [
        first,
        [weight.weights.data_ptr(), weight.records.data_ptr(), 0, packed, out.data_ptr(), rows],
    ]


def test_other_layers_of_a_shape_repeat_the_launches_with_their_own_addresses(world):
    kernels, again = world
    one, other = (Fake(seed, kernels) for seed in range(2))
    x = torch.zeros(2, 3, SHAPE[1], dtype=torch.float16)
    assert repeated.RepeatedLinear(one)(x).shape == (2, 3, SHAPE[0])
    assert not again and one.calls == 1
    configurations = [kernel._driver.launches[0][0] for kernel in kernels]
    for linear in (other, one):
        x = torch.zeros(2, 3, SHAPE[1], dtype=torch.float16)
        out = repeated.RepeatedLinear(linear)(x)
        assert out.shape == (2, 3, SHAPE[0]) and out.dtype == torch.float16
        assert [values for _, _, values in again] == expected(linear, x, out, 6)
        assert [place for place, _, _ in again] == [int(one.getPtr()) for one in configurations]
        again.clear()
    assert (one.calls, other.calls) == (1, 0)


def test_another_number_of_rows_or_another_shape_is_noted_anew(world):
    kernels, again = world
    linear = repeated.RepeatedLinear(Fake(0, kernels))
    biased = Fake(0, kernels)
    biased.weight = prepare(
        IntGroup.random(SHAPE, 0, dtype=torch.float16),
        dtype=torch.float16,
        bias=torch.zeros(SHAPE[0]),
    )
    for rows in (1, 2, 1, 2):
        linear(torch.zeros(rows, SHAPE[1], dtype=torch.float16))
    assert linear.linear.calls == 2 and len(again) == 4
    repeated.RepeatedLinear(biased)(torch.zeros(1, SHAPE[1], dtype=torch.float16))
    assert biased.calls == 1


def test_what_torch_takes_part_in_is_never_repeated(world):
    kernels, again = world
    linear = repeated.RepeatedLinear(Fake(0, kernels))
    for rows, dtype, strided, temporary in (
        (100, torch.float16, False, False),  # cuBLAS
        (2, torch.float32, False, False),
        (3, torch.float16, True, False),
        (4, torch.float16, False, True),  # a buffer that is nobody's
    ):
        linear.linear.temporary = temporary
        for _ in range(2):
            x = torch.zeros(rows, SHAPE[1] * (1 + strided), dtype=dtype)[:, : SHAPE[1]]
            linear(x)
    assert linear.linear.calls == 8 and not again
