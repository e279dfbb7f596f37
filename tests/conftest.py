"""What several test files share. Nothing here reaches a network except the default model, which may have to be fetched."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

if not torch.cuda.is_available():
    # Then Triton kernels run interpreted, on CPU tensors. Triton asks once, when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from flyweight.errors import FlyweightError


@pytest.fixture(scope="session")
def smollm2():
    """The folder of the default model: real weights, tokenizer and chat template."""
    from flyweight.checkpoint.hub import resolve

    try:
        return resolve("smollm2-135m")
    except FlyweightError as error:
        pytest.skip(f"the default model cannot be had here: {error}")
