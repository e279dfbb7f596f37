"""Decode attention of random sequences against float64, on the host (host_cuda.py) or a GPU."""

from dataclasses import dataclass

import torch

from flyweight.batch import KVStorage
from flyweight.kernels.attention.decode import (
    AttentionLayer,
    HeadNorms,
    HeadShape,
    Rows,
    Workspace,
    decode_attention,
    rope_pairs,
)

EPSILON = 1e-6
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3}


def normed(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight


@dataclass
class Sequences:
    """Random q, k and v of one new token each, over a cache whose unused tokens are not numbers."""

    shape: HeadShape
    lengths: list[int]  # the new token counted; 0 is padding
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self):
        shape = self.shape
        count = len(self.lengths)
        context = max(self.lengths)
        pages = -(-context // shape.page)
        self.tables = torch.randperm(count * pages, device=self.device).view(count, pages).int()
        size = (count * pages, shape.page, shape.kv_heads, shape.head_dim)
        self.cache = KVStorage(self.random(*size), self.random(*size))
        self.qkv = self.random(count, shape.width // shape.head_dim, shape.head_dim)
        self.norms = None
        if shape.qk_norm:
            self.norms = tuple(1 + 0.1 * self.random(shape.head_dim) for _ in range(2))
        self.angles = 6 * torch.rand(context, shape.rotary // 2, device=self.device)
        for row, length in enumerate(self.lengths):
            unused = self.slots(row, torch.arange(max(length - 1, 0), pages * shape.page))
            for side in self.sides:
                side[unused] = float("nan")

    def random(self, *size):
        return torch.randn(*size, device=self.device).to(self.dtype)

    @property
    def sides(self):
        """Keys and values, [slots, kv_heads, head_dim] each."""
        return self.cache.keys.flatten(0, 1), self.cache.values.flatten(0, 1)

    def slots(self, row, tokens):
        page = self.shape.page
        tokens = tokens.to(self.device)
        return self.tables[row].long()[tokens // page] * page + tokens % page

    def launch(self, workspace, to=None):
        """A function that launches the kernel, and the outputs it fills: not numbers as yet."""
        shape = self.shape
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=self.device)
        rows = Rows(rope_pairs(self.angles.cos(), self.angles.sin()), lengths, self.tables)
        width = shape.heads * shape.head_dim
        out = torch.full((len(lengths), width), float("nan"), device=self.device).to(self.dtype)
        norms = HeadNorms(*self.norms or (), epsilon=EPSILON)
        options = dict(
            layer=AttentionLayer(shape, shape.head_dim**-0.5, norms), workspace=workspace
        )
        qkv = self.qkv.flatten(1)
        return lambda: decode_attention(qkv, out, self.cache, rows, to=to, **options), out

    def attend(self, *, splits=None, to=None, workspace=None):
        """One launch → [sequences, heads · head_dim]; with `to` they stay not numbers."""
        count = len(self.lengths)
        workspace = workspace or Workspace.make(self.shape, count, self.device, splits)
        launch, out = self.launch(workspace, to)
        launch()
        assert not workspace.tickets.any(), "the next launch finds them at zero"
        return out

    def turned(self, x, length):
        """Rope of the newest token, rounded as the cache holds it."""
        half = self.shape.rotary // 2
        angles = self.angles[length - 1].double()
        a, b, rest = x.split([half, half, self.shape.head_dim - 2 * half], -1)
        first = a * angles.cos() - b * angles.sin()
        second = b * angles.cos() + a * angles.sin()
        return torch.cat([first, second, rest], -1).to(self.dtype).double()

    def reference(self, row, sides):
        """float64 [heads, head_dim] and the new key and value; `sides`: what the cache held."""
        shape, length = self.shape, self.lengths[row]
        heads = [shape.heads if shape.gated else 0, shape.heads, shape.kv_heads, shape.kv_heads]
        gate, query, key, value = self.qkv[row].double().split(heads)
        if self.norms:
            query = normed(query, self.norms[0].double())
            key = normed(key, self.norms[1].double())
        query = self.turned(query, length)
        key = self.turned(key, length)
        older = self.slots(row, torch.arange(length - 1))
        first = max(0, length - shape.window) if shape.window else 0
        keys, values = (
            torch.cat([side[older].double(), new[None]])[first:].repeat_interleave(shape.group, 1)
            for side, new in zip(sides, (key, value), strict=True)
        )
        scores = torch.einsum("hd,thd->ht", query, keys) * shape.head_dim**-0.5
        result = torch.einsum("ht,thd->hd", scores.softmax(-1), values)
        return result * gate.sigmoid() if shape.gated else result, key, value

    def check(self, out, before):
        """Results and new tokens as in float64; padding and the rest of the cache as they were."""
        for row, length in enumerate(self.lengths):
            if length == 0:
                assert out[row].isnan().all(), "padding is left alone"
                continue
            slot = self.slots(row, torch.tensor(length - 1))
            found = (out[row], *(side[slot] for side in self.sides))
            for got, want in zip(found, self.reference(row, before), strict=True):
                assert got.isfinite().all()
                error = (got.double().flatten() - want.flatten()).norm() / want.norm()
                assert error < TOLERANCE[self.dtype], (row, length, error)
            for side, old in zip(self.sides, before, strict=True):
                old[slot] = side[slot]
        for side, old in zip(self.sides, before, strict=True):
            assert torch.equal(side.view(torch.int16), old.view(torch.int16))


def attend(shape, lengths, splits, dtype, device="cpu"):
    """One launch on fresh inputs, checked; `splits`: None for as many as suit the device."""
    sequences = Sequences(shape, lengths, dtype, torch.device(device))
    before = [side.clone() for side in sequences.sides]
    sequences.check(sequences.attend(splits=splits), before)
