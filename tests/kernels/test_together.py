"""Kernels that wait for their own thread blocks run only where all of these run at once; processes
take turns under MPS.
"""

import threading
from types import SimpleNamespace

import pytest

from flyweight import gpu, gpu_share
from flyweight.gpu import GPUS
from flyweight.kernels import together
from flyweight.kernels.process_turns import ProcessTurns

CLUSTER, PDL = 4, 6


class Driver:
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=CLUSTER)

    def __init__(self, each=1, clusters=0, status=0):
        self.each, self.clusters, self.status = each, clusters, status

    def CUfunction(self, handle):
        return handle

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function, threads, shared):
        return self.status, self.each

    def cuOccupancyMaxActiveClusters(self, function, config):
        return self.status, self.clusters


def config(cluster=1):
    attributes = [SimpleNamespace(id=PDL)]
    if cluster > 1:
        attributes.append(
            SimpleNamespace(
                id=CLUSTER, value=SimpleNamespace(clusterDim=SimpleNamespace(x=cluster))
            )
        )
    return SimpleNamespace(attrs=attributes, blockDimX=256, sharedMemBytes=1000)


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    monkeypatch.setattr(gpu, "of", lambda device: GPUS["sm_90a"])
    monkeypatch.setattr(gpu, "real", lambda device: GPUS["sm_90a"])
    monkeypatch.setattr(gpu_share, "of", lambda device: gpu_share.Share(132))
    return monkeypatch


def test_a_block_for_each_sm_is_let_through():
    together.check(Driver(), "batch", 1, config(), (132,), 0)


def test_a_kernel_that_no_sm_has_room_for_is_refused():
    with pytest.raises(together.NotTogether, match=r"batch waits for all 132 .* runs 0 of them"):
        together.check(Driver(each=0), "batch", 1, config(), (132,), 0)
    with pytest.raises(together.NotTogether):
        together.check(Driver(status=1), "batch", 1, config(), (132,), 0)


def test_processors_that_another_process_has_do_not_count(h200):
    h200.setattr(gpu_share, "of", lambda device: gpu_share.Share(66, mps=True))
    with pytest.raises(together.NotTogether, match="runs 66 of them"):
        together.check(Driver(), "batch", 1, config(), (132,), 0)
    together.check(Driver(), "batch", 1, config(), (33, 2), 0)


def test_two_blocks_for_each_sm_are_counted_where_they_wait_for_each_other():
    together.check(Driver(each=2), "gemm_mma", 1, config(), (264,), 0)
    with pytest.raises(together.NotTogether, match="runs 132 of them"):
        together.check(Driver(each=1), "gemm_mma", 1, config(), (264,), 0)


def test_launches_of_more_blocks_than_processors_wait_for_nobody():
    together.check(Driver(each=0), "route", 1, config(), (1000,), 0)


def test_clusters_count_where_they_wait_for_each_other():
    together.check(Driver(clusters=0), "gemm", 1, config(2), (132,), 0)
    together.check(Driver(clusters=66), "vptq_rows", 1, config(2), (132,), 0)
    with pytest.raises(together.NotTogether, match="runs 120 of them"):
        together.check(Driver(clusters=60), "vptq_rows", 1, config(2), (132,), 0)


def test_processes_under_mps_take_turns(tmp_path):
    """Two that hold descriptors of their own, as processes do: the second begins when the first has
    ended.
    """
    first, second = (ProcessTurns("gpu", tmp_path) for _ in range(2))
    order, begun = [], threading.Event()

    def wait_and_run():
        begun.set()
        second.begin()
        order.append("second")
        second.end()

    first.begin()
    thread = threading.Thread(target=wait_and_run)
    thread.start()
    begun.wait()
    order.append("first")
    first.end()
    thread.join()
    assert order == ["first", "second"]


def test_who_waits_comes_before_who_has_just_been(tmp_path):
    first, second, third = (ProcessTurns("gpu", tmp_path) for _ in range(3))
    import fcntl

    first.begin()
    fcntl.flock(second._door, fcntl.LOCK_EX)  # the second waits for the GPU, as `begin` does
    first.end()
    with pytest.raises(BlockingIOError):  # so the first cannot have it again at once
        fcntl.flock(third._door, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(second._room, fcntl.LOCK_EX)
    fcntl.flock(second._door, fcntl.LOCK_UN)
    second.end()
    third.begin()
    third.end()
