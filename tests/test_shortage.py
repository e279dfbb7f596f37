"""Out of memory in one line that says how much is missing and what helps."""

import pytest
import torch

from flyweight import shortage
from flyweight.errors import ResourceError

TORCH = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.68 GiB "
    "of which 512.00 MiB is free. "
    "Including non-PyTorch memory, this process has 23.00 GiB memory in use."
)


def test_it_says_how_much_is_missing_and_which_options_help():
    text = shortage.describe(torch.OutOfMemoryError(TORCH))
    assert "2.15 GB more were needed and 0.54 GB are free, 1.61 GB are missing" in text
    assert "--max-model-len" in text and "int4" in text and "--offload" in text and "\n" not in text


@pytest.mark.parametrize(
    "text", ["CUDA out of memory.", "Tried to allocate 2.00 MiB. of which 1.00 GiB is free"]
)
def test_what_torch_does_not_say_is_not_invented(text):
    told = shortage.describe(torch.OutOfMemoryError(text))
    assert told.startswith("out of GPU memory") and "missing" not in told


def test_other_errors_are_left_as_they_are():
    assert shortage.describe(RuntimeError(TORCH)) is None
    with pytest.raises(ValueError, match="else"), shortage.told("loading"):
        raise ValueError("something else")


def test_an_error_of_the_users_says_what_was_done():
    with (
        pytest.raises(
            ResourceError, match=r"m: its weights do not fit: out of GPU memory: 2\.15 GB"
        ),
        shortage.told("m: its weights do not fit"),
    ):
        raise torch.OutOfMemoryError(TORCH)
