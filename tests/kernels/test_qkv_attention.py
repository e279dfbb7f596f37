"""What the host promises the kernel that joins qkv and attention; no GPU needed."""

import pytest
import torch

from flyweight.kernels import gemv, qkv_attention
from flyweight.kernels.attention import HeadShape
from flyweight.tensors import IntGroup

SHAPE = HeadShape(heads=32, kv_heads=8, head_dim=128, rotary=128, page=16, qk_norm=True)


@pytest.fixture(autouse=True)
def processors(monkeypatch):
    monkeypatch.setattr(qkv_attention, "processors", lambda device: 132)


@pytest.mark.parametrize("layers", [2, 3, 4, 7])
def test_each_launch_empties_a_mailbox_that_it_does_not_use(layers):
    boxes = qkv_attention.mailbox_cycle(SHAPE, 1, layers, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert len(boxes) == layers and all(boxes[i] is not boxes[(i + 1) % layers] for i in range(layers))
    assert all((box.qkv.view(torch.int16) == -1).all() and (box.states.view(torch.int32) == -1).all() for box in boxes)


def test_the_reason_is_given_where_one_kernel_does_not_do():
    weight = gemv.prepare(IntGroup.random((6144, 256), group_size=128), dtype=torch.bfloat16)
    assert qkv_attention.why_not(weight, SHAPE, 1) is None
    for change, reason in ((dict(heads=16), "6144 outputs, its heads 4096"), (dict(head_dim=96), "head_dim 96"),
                           (dict(heads=128), "16 query heads"), (dict(rotary=4), "rope turns 4")):
        shape = HeadShape(**{**vars(SHAPE), **change})
        assert reason in qkv_attention.why_not(weight, shape, 1)
