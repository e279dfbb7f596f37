"""One step of latent attention over a cache, and what float64 makes of it: for the host and for the
GPU.
"""

import torch

from flyweight.batch import KVStorage
from flyweight.kernels.attention.decode import Rows, rope_pairs
from flyweight.kernels.attention.latent import LatentLayer, LatentShape, Workspace, latent_attention
from flyweight.kernels.linear.fused import Norm

CONTEXT, EPSILON = 640, 1e-6


def rounded(x, dtype):
    return x.to(dtype).double()


def expected(shape, query, latent, weights, turn, older):
    """[heads, value] and the cached row of one token, rounded where the kernels round."""
    dtype = latent.dtype
    norm, keys, values, scale = weights
    cos, sin = turn

    def turned(x):
        a, b = x.double().chunk(2, -1)
        return rounded(torch.cat([a * cos - b * sin, b * cos + a * sin], -1), dtype)

    plain = latent[: shape.rank].double()
    normed = rounded(plain * (plain.square().mean() + EPSILON).rsqrt(), dtype)
    row = torch.cat([rounded(normed * norm.double(), dtype), turned(latent[shape.rank :])])
    heads = query.view(shape.heads, -1)
    inside = torch.einsum("hp,hpr->hr", heads[:, : shape.plain].double(), keys.double())
    inside = torch.cat([rounded(inside, dtype), turned(heads[:, shape.plain :])], -1)
    rows = torch.cat([older.double(), row[None]])
    mixed = (inside @ rows.T * scale).softmax(-1) @ rows[:, : shape.rank]
    return torch.einsum("hr,hvr->hv", mixed, values.double()), row


def check(shape: LatentShape, lengths, *, splits, dtype, device="cpu", most=None):
    """One launch over a cache whose unused rows are not numbers; checks outputs, new rows and all
    that must stay.
    """
    torch.manual_seed(0)
    count, width = len(lengths), -(-CONTEXT // shape.page)
    tables = torch.randperm(count * width).view(count, width).int()
    pages = torch.randn(count * width, shape.page, 1, shape.width).to(dtype)
    projected = torch.randn(count, shape.heads * (shape.plain + shape.rope) + shape.width).to(dtype)
    split = projected.shape[1] - shape.width
    norm = (1 + 0.1 * torch.randn(shape.rank)).to(dtype)
    keys = (torch.randn(shape.heads, shape.plain, shape.rank) * shape.plain**-0.5).to(dtype)
    values = (torch.randn(shape.heads, shape.value, shape.rank) * shape.rank**-0.5).to(dtype)
    angles = torch.rand(CONTEXT, shape.rope // 2, dtype=torch.float64) * 6
    at = torch.arange(CONTEXT)
    slots = [
        tables[row].long()[at // shape.page] * shape.page + at % shape.page for row in range(count)
    ]
    for row, length in enumerate(lengths):
        pages.flatten(0, 2)[slots[row][max(length - 1, 0) :]] = float("nan")
    before = pages.clone()
    pages = pages.to(device)
    cache = KVStorage(pages, pages[..., : shape.rank])
    pairs = rope_pairs(angles.cos().float(), angles.sin().float()).to(device)
    rows = Rows(pairs, torch.tensor(lengths, dtype=torch.int32, device=device), tables.to(device))
    workspace = Workspace.make(
        shape, count, dtype=dtype, device=torch.device(device), splits=splits
    )
    scale = (shape.plain + shape.rope) ** -0.5
    layer = LatentLayer(
        shape, scale, Norm(norm.to(device), EPSILON), keys.to(device), values.to(device)
    )
    here = projected.to(device)
    out = torch.full((count, shape.heads * shape.value), float("nan"), dtype=dtype, device=device)
    latent_attention(
        here[:, :split], here[:, split:], out, cache, rows, layer=layer, workspace=workspace
    )
    stored = pages.cpu().flatten(0, 2)
    for row, length in enumerate(lengths):
        if length == 0:
            assert not out[row].any(), "padding"
            continue
        turn = angles[length - 1].cos(), angles[length - 1].sin()
        older = before.flatten(0, 2)[slots[row][: length - 1]]
        weights = norm, keys, values, scale
        want, new = expected(
            shape, projected[row, :split], projected[row, split:], weights, turn, older
        )
        slot = slots[row][length - 1]
        for got, right in ((out[row].cpu(), want.flatten()), (stored[slot], new)):
            error = (got.double() - right).norm() / right.norm()
            assert error < (most or (8e-3 if dtype == torch.bfloat16 else 1e-3)), (
                row,
                length,
                error,
            )
        before.flatten(0, 2)[slot] = stored[slot]
    assert torch.equal(stored.view(torch.int16), before.flatten(0, 2).view(torch.int16))
