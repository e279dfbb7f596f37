"""What several test files share. Nothing here reaches a network except the default model, which may have to be fetched."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from flyweight.errors import FlyweightError


@pytest.fixture(scope="session")
def smollm2():
    """The folder of the default model: real weights, tokenizer and chat template."""
    from flyweight.checkpoint.hub import resolve

    try:
        return resolve("smollm2-135m")
    except FlyweightError as error:
        pytest.skip(f"the default model cannot be had here: {error}")
