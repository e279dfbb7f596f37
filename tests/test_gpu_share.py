"""How much of a GPU a process has, by a driver that says what MPS and green contexts make it."""

from types import SimpleNamespace

import pytest

from flyweight import gpu_share

UNSUPPORTED = 801


class Driver:
    """130 SMs; `contexts` have as many as they are called, `mps` or not."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_MPS_ENABLED="mps", CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="processors"
    )
    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)

    def __init__(self, *, primary=130, current=0, mps=0):
        self.primary, self.current, self.facts = primary, current, {"mps": mps, "processors": 130}

    def cuInit(self, flags):
        return (0,)

    def cuDeviceGet(self, index):
        return 0, index

    def cuDeviceGetAttribute(self, name, device):
        return 0, self.facts[name]

    def cuDevicePrimaryCtxRetain(self, device):
        return 0, self.primary

    def cuCtxGetCurrent(self):
        return 0, self.current

    def cuCtxGetDevResource(self, context, kind):
        if not context:
            return UNSUPPORTED, None
        return 0, SimpleNamespace(sm=SimpleNamespace(smCount=context))


@pytest.fixture(autouse=True)
def without_a_percentage(monkeypatch):
    monkeypatch.delenv(gpu_share.PERCENTAGE, raising=False)


def test_a_process_alone_has_all_of_it():
    assert gpu_share.ask(Driver(), 0) == gpu_share.Share(130, mps=False)


def test_a_driver_that_does_not_know_contexts_is_believed_about_the_device():
    assert gpu_share.ask(Driver(primary=0), 0) == gpu_share.Share(130, mps=False)


def test_a_green_context_has_its_own_processors():
    assert gpu_share.ask(Driver(current=48), 0).processors == 48


def test_mps_leaves_what_its_context_has():
    assert gpu_share.ask(Driver(primary=66, mps=1), 0) == gpu_share.Share(66, mps=True)


@pytest.mark.parametrize(
    ("text", "processors"), [("50", 65), ("12.5", 15), ("", 130), ("0", 130), ("200", 130)]
)
def test_mps_leaves_what_the_percentage_says_where_the_driver_does_not(
    monkeypatch, text, processors
):
    monkeypatch.setenv(gpu_share.PERCENTAGE, text)
    assert gpu_share.ask(Driver(mps=1), 0).processors == processors
    assert gpu_share.ask(Driver(mps=0), 0).processors == 130, "without MPS it says nothing"
