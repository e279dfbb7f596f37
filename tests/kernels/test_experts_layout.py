"""What the host prepares for the kernels of experts, without a GPU."""

import pytest
import torch

from flyweight.gpu import GPUS
from flyweight.kernels import reference
from flyweight.kernels.linear import tiles
from flyweight.kernels.linear.experts.routing import tile_rows
from flyweight.kernels.linear.experts.stacked import STACKED, stack, unsupported_reason
from flyweight.kernels.linear.fused import TorchLinear
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.tensors import Int8Channel, IntGroup, Plain


@pytest.mark.parametrize("kind", [Plain, Int8Channel, IntGroup])
def test_stacked_experts_follow_each_other_tile_by_tile(kind):
    tensors = [kind.random((64, 128), seed) for seed in range(3)]
    alone = [tiles.prepare(tensor, dtype=torch.bfloat16, activation="silu") for tensor in tensors]
    linears = [
        TiledLinear(tensor, dtype=torch.bfloat16, ops=reference, activation="silu")
        for tensor in tensors
    ]
    stacked = stack(linears)
    assert stacked.out_features == 64 and stacked.weights.shape[0] == 3
    for i, linear in enumerate(linears):
        for name in STACKED:
            one, whole = getattr(alone[i], name), getattr(stacked, name)
            assert (one is None) == (whole is None)
            if one is not None:
                assert torch.equal(whole[i], one)
                assert getattr(linear.weight, name).data_ptr() == whole[i].data_ptr(), (
                    "a second copy"
                )


def test_experts_of_several_schemes_are_not_stacked():
    tensors = (Plain.random((64, 128)), Int8Channel.random((64, 128)))
    linears = [TiledLinear(tensor, dtype=torch.bfloat16, ops=reference) for tensor in tensors]
    device = GPUS["sm_90a"]
    assert "more than one scheme" in unsupported_reason(linears, device)
    assert "no kernel" in unsupported_reason(
        [linears[0], TorchLinear(torch.relu, ops=reference)], device
    )
    assert unsupported_reason(linears[:1], device) is None


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize(
    "tensor", [Plain.random((64, 128)), Int8Channel.random((64, 128)), IntGroup.random((64, 128))]
)
def test_experts_are_grouped_on_every_gpu(tensor, name):
    linear = TiledLinear(tensor, dtype=torch.bfloat16, ops=reference)
    assert unsupported_reason([linear], GPUS[name]) is None


@pytest.mark.parametrize("tokens", [1, 9, 16, 100, 256, 2048, 8192])
def test_there_is_room_for_any_load(tokens):
    count, chosen = 64, 8
    pairs, generator = tokens * chosen, torch.Generator().manual_seed(tokens)
    tile = tile_rows(pairs, count)
    most = min(count, pairs) + pairs // tile
    weights = torch.rand(count, generator=generator) ** 8  # a few experts get nearly all
    for loads in (torch.ones(count), weights, torch.eye(count)[0]):
        chosen_by = torch.multinomial(loads + 1e-9, pairs, replacement=True, generator=generator)
        needed = sum(-(-int(load) // tile) for load in torch.bincount(chosen_by, minlength=count))
        assert needed <= most
