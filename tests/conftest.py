"""What several test files share. Nothing here reaches a network except the default model, which may
have to be fetched."""

import contextlib
import importlib.util
import os
import random

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault(
    "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
)  # to ask whether there is a GPU makes no context on it
# Threads that wait sleep: where they spin while others compete for the cores, a step of the real
# model takes seconds. Read when torch is loaded; processes that tests start inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy
import pytest
import torch

if not torch.cuda.is_available():
    # Then Triton kernels run interpreted, on CPU tensors. Triton asks once, when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from gpu_shards import pytest_runtest_logreport, pytest_runtestloop  # noqa: F401 (hooks)

from flyweight import gpu
from flyweight.errors import FlyweightError
from flyweight.kernels import library

with contextlib.suppress(ImportError):  # kernels are also tested where it is not installed
    from hypothesis import HealthCheck, settings

    # The same examples on every machine, however slow; `FLYWEIGHT_FUZZ`, which asks for a long run,
    # looks for new ones.
    settings.register_profile(
        "same",
        deadline=None,
        derandomize="FLYWEIGHT_FUZZ" not in os.environ,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("same")
# and where gguf is not, which these files need to be read at all
NEED_GGUF = [
    f"checkpoint/test_{name}.py"
    for name in (
        "gguf",
        "gguf_export",
        "gguf_import",
        "gguf_kept",
        "gguf_tokenizer",
        "hub",
        "hub_gguf",
    )
]
collect_ignore = [] if importlib.util.find_spec("gguf") else NEED_GGUF


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Random inputs are those of the test, not of the tests before it. A hook, because wide
    fixtures come before narrow ones."""
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    if (
        item.get_closest_marker("hopper")
        and torch.cuda.is_available()
        and not gpu.of(0).has_warpgroups
    ):
        pytest.skip(f"of a kernel for Hopper alone, and this GPU is an {gpu.of(0).architecture}")


def pytest_runtest_teardown():
    """Where another GPU is imitated, all code that a test has loaded is PTX of that GPU: nothing
    made for the one that is here."""
    if name := os.environ.get(gpu.PRETEND):
        wanted = name.partition(":")[0]
        foreign = sorted(
            {f"{one.file} ({one.target})" for one in library.loaded if one.target != wanted}
        )
        assert not foreign, f"loaded while an {wanted} was imitated: {', '.join(foreign)}"


@pytest.fixture(scope="session")
def smollm2():
    """The folder of the default model: real weights, tokenizer and chat template."""
    from flyweight.checkpoint.hub import resolve

    try:
        return resolve("smollm2-135m", dtype="float16")
    except FlyweightError as error:
        pytest.skip(f"the default model cannot be had here: {error}")


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    from browser import Browser, find_browser

    if (command := find_browser()) is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    browser = Browser(command, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def interpreted_loops(monkeypatch):
    """triton 3.6 makes its ranges of arrays of one element, which numpy 2.4 no longer takes for
    numbers."""
    from triton.runtime import interpreter

    def patched(tensor, scope, original=interpreter._patch_lang_tensor):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
