"""Tensors without values get the shapes, types and devices that those with values have."""

import clean_process
import pytest
import torch

CASES = {
    "view": lambda x, y: x.view(2, -1),
    "slices": lambda x, y: x[:, 1:3],
    "rows by number": lambda x, y: x[torch.zeros(3, dtype=torch.long, device=x.device)],
    "a new dimension": lambda x, y: x[None, ..., 0],
    "transposed": lambda x, y: x.transpose(0, 1).contiguous(),
    "strides": lambda x, y: x.transpose(0, 1) & 3,
    "shifted": lambda x, y: (x >> 2) | (x << 1),
    "broadcast": lambda x, y: x & x[:1],
    "masked": lambda x, y: (x > 0) & x.long(),
    "in place": lambda x, y: x.__ior__(1),
    "written": lambda x, y: y.copy_(y + 1).normal_(),
    "promoted": lambda x, y: x * y,
    "by a number": lambda x, y: (x + 1.5).to(torch.bfloat16),
    "divided": lambda x, y: x.div(3),
    "one number elsewhere": lambda x, y: y * torch.tensor(2.0),
    "moved": lambda x, y: x.to("cpu", torch.int8),
    "as another": lambda x, y: x.to(y),
    "a type": lambda x, y: y.to(dtype=torch.float16),
    "parts": lambda x, y: x.split([1, 3]),
    "joined": lambda x, y: torch.cat([x, x[:2]]),
    "stacked": lambda x, y: torch.stack([y, y]),
    "chosen": lambda x, y: torch.where(x > 0, y, 0.0),
    "padded": lambda x, y: torch.nn.functional.pad(x, (0, 3)),
    "made": lambda x, y: torch.full((2, 3), 1.5, device=y.device),
    "counted": lambda x, y: torch.arange(3, 9),
}


def facts(device):
    """Shape, strides, type and place of every result."""
    found = {}
    for name, function in CASES.items():
        x = torch.zeros(4, 6, dtype=torch.int32, device=device)
        y = torch.ones(4, 6, device=device)
        result = function(x, y)
        parts = result if isinstance(result, tuple) else (result,)
        found[name] = [(*one.shape, *one.stride(), one.dtype, one.device.type) for one in parts]
    return found


def dry_facts():
    from flyweight.gpu import GPUS
    from flyweight.kernels.dry_run import DEVICE, dry_run

    with dry_run(GPUS["sm_80"]):
        return facts(DEVICE)


@pytest.fixture(scope="module")
def without_values():
    with clean_process.pool() as pool:
        return pool.submit(dry_facts).result()


@pytest.mark.parametrize("name", CASES)
def test_shapes_and_types_are_those_of_tensors_with_values(name, without_values):
    on_cpu = ("moved", "counted")
    want = [(*one[:-1], "cpu" if name in on_cpu else "cuda") for one in facts("cpu")[name]]
    assert without_values[name] == want
