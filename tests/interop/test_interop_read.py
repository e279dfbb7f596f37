"""Folders written by other packages: Flyweight sees the same weights as their own loaders, bit for
bit."""

import pytest
import torch

pytestmark = pytest.mark.interop
packages = pytest.importorskip(
    "packages", reason="needs the packages of `make test-interop`", exc_type=ImportError
)


PACKAGES = {"llm-compressor": "llmcompressor", "auto-round": "auto_round", "gptqmodel": "gptqmodel"}


@pytest.mark.parametrize("name", packages.MAKERS)
def test_folder_of_another_package_reads_bit_for_bit(name, tmp_path):
    from flyweight.checkpoint import Checkpoint
    from flyweight.checkpoint.convert import quantized_modules

    pytest.importorskip(
        next(package for start, package in PACKAGES.items() if name.startswith(start))
    )
    folder = packages.make(name, tmp_path)
    checkpoint = Checkpoint(folder)
    theirs = packages.own_weights(name, folder)
    assert set(theirs) == set(quantized_modules(checkpoint)) and len(theirs) == 14
    for prefix, weight in theirs.items():
        assert torch.equal(checkpoint.linear(prefix).dequantize(weight.dtype), weight), prefix
