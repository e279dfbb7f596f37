"""What the host promises the kernel that joins qkv and attention; no GPU needed."""

import pytest
import torch

from flyweight import gpu
from flyweight.gpu import GPUS
from flyweight.kernels import reference
from flyweight.kernels.attention import qkv
from flyweight.kernels.attention.decode import HeadShape
from flyweight.kernels.linear.fused import TorchLinear
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.tensors import IntGroup

SHAPE = HeadShape(heads=32, kv_heads=8, head_dim=128, rotary=128, page=16, qk_norm=True)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(gpu, "of", lambda device: GPUS["sm_90a"])


@pytest.mark.parametrize("layers", [2, 3, 4, 7])
def test_each_launch_empties_a_mailbox_that_it_does_not_use(layers):
    boxes = qkv.mailbox_cycle(SHAPE, 1, layers, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert len(boxes) == layers and all(
        boxes[i] is not boxes[(i + 1) % layers] for i in range(layers)
    )
    assert all(
        (box.qkv.view(torch.int16) == -1).all() and (box.states.view(torch.int32) == -1).all()
        for box in boxes
    )


def test_the_reason_is_given_where_one_kernel_does_not_do():
    tensor = IntGroup.random((6144, 256), group_size=128)
    linear = TiledLinear(tensor, dtype=torch.bfloat16, ops=reference)

    def reason(linear, shape):
        return qkv.unsupported_reason(linear, shape, 1, GPUS["sm_90a"])

    assert reason(linear, SHAPE) is None
    assert "torch.linear" in reason(TorchLinear(torch.relu, ops=reference), SHAPE)
    for change, words in (
        (dict(heads=16), "6144 outputs, its heads 4096"),
        (dict(head_dim=96), "head_dim 96"),
        (dict(heads=72), "9 query heads"),
        (dict(rotary=4), "rope turns 4"),
    ):
        shape = HeadShape(**{**vars(SHAPE), **change})
        assert words in reason(linear, shape)
