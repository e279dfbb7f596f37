"""What a launch hands to the driver, with a driver that only writes down what it gets: no GPU
needed.
"""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from flyweight import gpu
from flyweight.gpu import GPUS
from flyweight.kernels import compiler, jit

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")


class Driver:
    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES="own",
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="most",
    )
    CUkernel = CUdevice = int

    def __init__(self, types):
        self.types, self.launches, self.status = types, [], 0
        self.own, self.asked = 1024, []

    def cuKernelGetAttribute(self, attribute, kernel, device):
        assert (attribute, kernel, device) == ("own", 1234, 0)
        return 0, self.own

    def cuKernelSetAttribute(self, attribute, size, kernel, device):
        assert (attribute, kernel, device) == ("most", 1234, 0)
        self.asked.append(size)
        return (0,)

    def cuLaunchKernelEx(self, config, function, places, extra):
        addresses = (ctypes.c_void_p * len(self.types)).from_address(places)
        values = [
            kind.from_address(address).value
            for kind, address in zip(self.types, addresses, strict=True)
        ]
        self.launches.append((config, int(function), values))
        return (self.status,)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    monkeypatch.setattr(gpu, "of", lambda device: GPUS["sm_90a"])
    made = jit.Kernel(1234, "example")
    made._driver = Driver([ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_float])
    return made


def test_arguments_arrive_by_pointer_integer_and_float(kernel):
    x = torch.zeros(4)
    kernel.launch(3, 64, (x, None, -5, 0.5))
    kernel.launch(3, 64, (None, x, 7, 1.0))
    (_, function, first), (_, _, second) = kernel._driver.launches
    assert function == 1234
    assert first == [x.data_ptr(), 0, -5, 0.5] and second == [0, x.data_ptr(), 7, 1.0]


def test_bytes_arrive_by_value_between_others(kernel):
    kernel._driver = Driver(
        [ctypes.c_int32, ctypes.c_char * 128, ctypes.c_float, ctypes.c_char * 128, ctypes.c_uint64]
    )
    maps, x = [bytes(range(1, 129)), bytes(range(128, 0, -1))], torch.zeros(4)
    kernel.launch(3, 64, (-5, maps[0], 0.5, maps[1], x))
    assert kernel._driver.launches[0][2] == [-5, maps[0], 0.5, maps[1], x.data_ptr()]


def test_the_configuration_says_grid_stream_cluster_and_dependent_launch(kernel):
    kernel.launch((4, 2), 128, (None, None, 1, 1.0), shared=1000, pdl=True, cluster=2)
    ((config, _, _),) = kernel._driver.launches
    assert (config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX) == (4, 2, 1, 128)
    assert config.sharedMemBytes == 1000 and int(config.hStream) == 77
    cluster, dependent = config.attrs
    assert (
        cluster.value.clusterDim.x == 2
        and dependent.value.programmaticStreamSerializationAllowed == 1
    )
    kernel.launch((4, 2), 128, (None, None, 1, 1.0))
    assert kernel._driver.launches[-1][0].numAttrs == 0


def test_launches_wait_for_their_turn_where_overlap_is_not_allowed(kernel):
    with jit.overlap(False):
        kernel.launch(1, 32, (None, None, 1, 1.0), pdl=True)
    kernel.launch(1, 32, (None, None, 1, 1.0), pdl=True)
    assert [config.numAttrs for config, _, _ in kernel._driver.launches] == [0, 1]


def test_launches_wait_for_their_turn_on_a_gpu_before_hopper(kernel, monkeypatch):
    monkeypatch.setattr(gpu, "of", lambda device: GPUS["sm_89"])
    kernel.launch(1, 48, (None, None, 1, 1.0), pdl=True)
    assert [config.numAttrs for config, _, _ in kernel._driver.launches] == [0]


def test_a_launch_that_fails_says_what_was_asked_for(kernel):
    kernel._driver.status = 701
    with pytest.raises(
        compiler.KernelError, match=r"example was not launched \(grid 9, 256 threads.*701"
    ):
        kernel.launch(9, 256, (None, None, 1, 1.0))


def test_shared_memory_beyond_48_kb_with_the_kernels_own_is_asked_for_once(kernel):
    for size in (0, 47 * 1024, 47 * 1024 + 16, 47 * 1024 + 16, 1000, 90_000):
        kernel.launch(1, 32, (None, None, 1, 1.0), shared=size)
    assert kernel._driver.asked == [47 * 1024 + 16, 90_000]
