"""What several test files share. Nothing here reaches a network except the default model, which may have to be fetched."""

import os
import zlib

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # to ask whether there is a GPU makes no context on it

import pytest
import torch

if not torch.cuda.is_available():
    # Then Triton kernels run interpreted, on CPU tensors. Triton asks once, when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from gpu_shards import pytest_runtest_logreport, pytest_runtestloop  # noqa: F401 (hooks)

from flyweight.errors import FlyweightError


@pytest.fixture(autouse=True)
def random_numbers_of_its_own(request):
    """A test on a GPU that fails once fails again."""
    if request.node.get_closest_marker("gpu"):
        torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session")
def smollm2():
    """The folder of the default model: real weights, tokenizer and chat template."""
    from flyweight.checkpoint.hub import resolve

    try:
        return resolve("smollm2-135m")
    except FlyweightError as error:
        pytest.skip(f"the default model cannot be had here: {error}")


@pytest.fixture
def interpreted_loops(monkeypatch):
    """triton 3.6 makes its ranges of arrays of one element, which numpy 2.4 no longer takes for numbers."""
    from triton.runtime import interpreter

    def patched(tensor, scope, original=interpreter._patch_lang_tensor):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
