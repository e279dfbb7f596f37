"""What the host promises the kernel that joins qkv and attention; no GPU needed."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flyweight import gpu
from flyweight.gpu import GPUS
from flyweight.kernels import reference
from flyweight.kernels.attention import qkv
from flyweight.kernels.attention.decode import HeadShape
from flyweight.kernels.linear import gemv_plan
from flyweight.kernels.linear.format import FORMATS
from flyweight.kernels.linear.fused import TorchLinear
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.kernels.linear.tiles import Matrix
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


@pytest.mark.parametrize(
    ("hidden", "changes", "arch", "paired"),
    [
        (4096, {}, "sm_90a", True),
        (2560, {}, "sm_90a", False),  # ten units to eight warps: more turns than with all twenty
        (8192, dict(heads=64), "sm_90a", False),  # more than registers hold
        (3584, dict(heads=28, kv_heads=4), "sm_90a", False),  # 33 CTAs to a head
        (4096, {}, "sm_100a", False),
    ],
)
@pytest.mark.parametrize("rows", [4, 8])
def test_pairs_share_tiles_where_no_warp_gets_more(hidden, changes, arch, paired, rows):
    shape, device = replace(SHAPE, **changes), GPUS[arch]
    weight = SimpleNamespace(matrix=Matrix(FORMATS["int4"], shape.width, hidden, 128))
    more = qkv.chunk_bytes(shape, rows, device)
    chosen = qkv.linear_plan(weight, shape, rows, device, more, beside=True)
    assert chosen.paired == paired
    assert not paired or chosen.shared <= device.shared_beside(gemv_plan.RESERVED_BESIDE)
