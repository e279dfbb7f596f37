"""gemv.cu with an adapter of its own row, compiled for the CPU."""

import host_cuda
import pytest
import torch

from flyweight.batch import NOBODY
from flyweight.kernels import reference
from flyweight.kernels.linear import gemv, tiles
from flyweight.kernels.linear.delta import AdaptedRow, Delta
from flyweight.kernels.linear.fused import Norm
from flyweight.tensors import IntGroup, Plain

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")


@pytest.fixture(autouse=True)
def host(monkeypatch, folder):
    torch.manual_seed(0)
    host_cuda.pretend(monkeypatch, folder)


def make_delta(sizes, inputs, rank):
    a = (torch.randn(3, len(sizes), rank, inputs) * inputs**-0.5).bfloat16()
    return Delta(a, torch.randn(3, rank, sum(sizes)).bfloat16(), sizes, reference)


def added(delta, x, slot):
    """float64 [1, out]"""
    if slot == NOBODY:
        return torch.zeros(1, delta.ends[-1], dtype=torch.float64)
    parts = zip(delta.ends, delta.ends[1:], strict=False)
    return torch.cat(
        [
            x @ delta.a[slot, i].double().T @ delta.b[slot, :, begin:end].double()
            for i, (begin, end) in enumerate(parts)
        ],
        -1,
    )


# outputs of the parts (more tiles than thread blocks, and fewer), inputs, rank, format, norm,
# residual, gate and up as x
CASES = [
    ((96, 32, 32), 256, 16, "int4", True, False, None),
    ((32,), 1032, 8, "plain", False, True, None),
    ((160, 160), 128, 24, "int4", True, False, None),
    ((48,), 512, 16, "int4", False, True, "silu"),
    ((2048,), 128, 64, "int4", False, True, None),  # B stays in memory
]


@pytest.mark.parametrize(("sizes", "inputs", "rank", "kind", "normed", "residual", "gated"), CASES)
def test_a_row_gets_what_its_adapter_adds(sizes, inputs, rank, kind, normed, residual, gated):
    outputs = sum(sizes)
    if kind == "plain":
        tensor = Plain((torch.randn(outputs, inputs) * inputs**-0.5).bfloat16())
    else:
        tensor = IntGroup.random((outputs, inputs), 1, bits=4, group_size=128)
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    delta, other = make_delta(sizes, inputs, rank), make_delta(sizes, inputs, 8)
    delta.before, other.before = other, delta
    norm = Norm((1 + 0.1 * torch.randn(inputs)).bfloat16(), 1e-6) if normed else None
    for slot in (1, NOBODY, 2, 2):  # words are emptied by the launch that follows
        x = torch.randn(1, inputs * (2 if gated else 1)).bfloat16()
        rest = torch.randn(1, outputs).bfloat16() if residual else None
        seen = reference.gate(x.double(), gated) if gated else x.double()
        if norm is not None:
            seen = (
                seen
                * torch.rsqrt(seen.square().mean(-1, keepdim=True) + 1e-6)
                * norm.weight.double()
            )
        want = seen @ tensor.dequantize(torch.float64).T + added(delta, seen, slot)
        want = want + rest.double() if residual else want
        row = AdaptedRow(delta, torch.tensor([slot], dtype=torch.int32))
        got = gemv.multiply(weight, x, norm=norm, residual=rest, one=gemv.OneRow(row, gated))
        assert ((got.double() - want).norm() / want.norm()).item() < 1e-2
        assert (slot == NOBODY) == bool((delta.words.view(torch.int32) == -1).all())
        gemv.multiply(
            weight,
            x,
            norm=norm,
            residual=rest,
            one=gemv.OneRow(AdaptedRow(other, torch.tensor([NOBODY], dtype=torch.int32)), gated),
        )
        assert (delta.words.view(torch.int32) == -1).all()


def test_halves_of_a_weight_end_as_gate_and_up_with_what_is_added():
    inputs, half = 256, 112  # pairs of tiles: more than thread blocks, and not as many for each
    tensor = IntGroup.random((2 * half, inputs), 1, bits=4, group_size=128)
    weight = tiles.prepare(tensor, dtype=torch.bfloat16)
    delta, other = make_delta((half, half), inputs, 16), make_delta((half, half), inputs, 8)
    delta.before, other.before = other, delta
    norm = Norm((1 + 0.1 * torch.randn(inputs)).bfloat16(), 1e-6)
    for slot in (1, NOBODY, None):
        x = torch.randn(1, inputs).bfloat16()
        seen = (
            x.double()
            * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
            * norm.weight.double()
        )
        both = seen @ tensor.dequantize(torch.float64).T
        if slot is not None:
            both += added(delta, seen, slot)
        want = reference.gate(both, "silu")
        row = None if slot is None else AdaptedRow(delta, torch.tensor([slot], dtype=torch.int32))
        got = gemv.multiply(weight, x, norm=norm, one=gemv.OneRow(row, apart="silu"))
        assert got.shape == (1, half)
        assert ((got.double() - want).norm() / want.norm()).item() < 1e-2
        delta.words.view(torch.int32).fill_(-1)


def test_a_rank_is_shared_as_far_as_thread_blocks_go():
    row = AdaptedRow(make_delta((64, 16, 16), 256, 16), None)
    assert [row.splits(16, workers) for workers in (20, 100, 132, 400, 4000)] == [1, 2, 2, 8, 16]
    assert row.splits(8, 4000) == 8


def test_only_a_small_b_lies_in_shared_memory():
    sizes, inputs = (64,), 256
    found = {
        rank: AdaptedRow(make_delta(sizes, inputs, rank), None).held_bytes(3) for rank in (16, 64)
    }
    assert found == {16: 16 * 3 * 32, 64: 0}
