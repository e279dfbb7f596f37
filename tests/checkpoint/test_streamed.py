"""A checkpoint streamed to a device gives the same weights as one read on the host, in every
format."""

from pathlib import Path

import pytest
import torch

from flyweight.checkpoint.reader import Checkpoint
from flyweight.checkpoint.streamed import Streamed

GOLDEN = sorted(
    path.parent for path in (Path(__file__).parent.parent / "golden").glob("*/config.json")
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_every_format_is_unpacked_on_the_device_as_on_the_host(folder, device):
    checkpoint, streamed = Checkpoint(folder), Streamed(Checkpoint(folder), torch.device(device))
    prefixes = sorted(
        {
            name.rpartition(".")[0]
            for name in checkpoint.names()
            if name.endswith(
                (".qweight", ".weight_packed", ".weight_scale", ".indices", "_proj.weight")
            )
        }
    )
    assert prefixes
    for prefix in prefixes:
        here, there = checkpoint.linear(prefix), streamed.linear(prefix).to(device)
        assert type(here) is type(there) and here._metadata() == there._metadata()
        for name, tensor in here.tensors().items():
            assert torch.equal(tensor, there.tensors()[name].cpu()), f"{prefix} {name}"
    assert streamed.unused() == checkpoint.unused(), (
        "the strict check sees what was read through it"
    )
