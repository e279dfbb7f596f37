"""qkv and attention in one kernel, against float64 and against the two kernels; outputs are
poisoned before each launch.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from gpu_linears import linear_of, make

from flyweight import gpu
from flyweight.batch import KVStorage
from flyweight.kernels import jit
from flyweight.kernels.attention import qkv
from flyweight.kernels.attention.decode import (
    AttentionLayer,
    HeadNorms,
    HeadShape,
    Rows,
    Workspace,
    decode_attention,
    rope_pairs,
)
from flyweight.kernels.attention.qkv import (
    linear_plan,
    mailbox_cycle,
    qkv_attention,
    unsupported_reason,
)
from flyweight.kernels.linear import gemv, gemv_plan, tiles
from flyweight.kernels.linear.fused import Norm

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 1.5e-2}
EPSILON = 1e-6
SHAPE = HeadShape(heads=32, kv_heads=8, head_dim=128, rotary=128, page=16, qk_norm=True)
KINDS = ["plain", "w8a8", "int4:128", "int4:32", "int8:64", "fp8", "sparse-w8a8", "sparse-int4:128"]


def normed(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight


@dataclass
class Layer:
    """Random weights, norms, rope and a paged cache for `rows` sequences of up to `context`
    tokens.
    """

    kind: str
    shape: HeadShape
    rows: int
    context: int
    dtype: torch.dtype = torch.bfloat16
    hidden: int = 512
    bias: bool = False
    before: list[int] | None = None  # of each row: how many rows before are of its sequence
    beside: bool = False  # all kernels of the layer leave each other room

    def __post_init__(self):
        shape, dtype = self.shape, self.dtype
        width, size = shape.width, shape.head_dim
        self.tensor = make(self.kind, (width, self.hidden), 2, dtype)
        self.offset = torch.randn(width, device=DEVICE).to(dtype) if self.bias else None
        self.linear = linear_of(self.tensor, dtype=dtype, bias=self.offset)
        if self.linear.weight.format.widened:
            pytest.skip(
                "this GPU has no matrix units for float8, and a kernel of its own for their product"
            )
        here = gpu.of(DEVICE)
        reason = unsupported_reason(self.linear, shape, self.rows, here)
        if reason and not here.has_warpgroups:
            pytest.skip(f"steps have two kernels here: {reason}")
        assert reason is None
        self.norm = (1 + 0.1 * torch.randn(self.hidden, device=DEVICE)).to(dtype)
        self.sinks = (
            (torch.randn(shape.heads, device=DEVICE) + 2).to(dtype) if shape.sinks else None
        )
        self.norms = (
            tuple((1 + 0.1 * torch.randn(size, device=DEVICE)).to(dtype) for _ in range(2))
            if shape.qk_norm
            else None
        )
        angles = 6 * torch.rand(self.context, shape.rotary // 2, device=DEVICE)
        self.tables = (angles.cos(), angles.sin())
        self.rope = rope_pairs(*self.tables)
        pages = -(-self.context // shape.page)
        self.pages = torch.randperm(self.rows * pages, device=DEVICE).view(self.rows, pages).int()
        self.cache = KVStorage(
            *(
                torch.randn(self.rows * pages, shape.page, shape.kv_heads, size, device=DEVICE).to(
                    dtype
                )
                for _ in range(2)
            )
        )
        for row, back in enumerate(self.before or ()):
            self.pages[row] = self.pages[row - back]
        chunk = 1 if self.before is None else self.rows
        self.boxes = mailbox_cycle(shape, self.rows, 2, dtype=dtype, device=DEVICE, chunk=chunk)
        self.out = torch.empty(self.rows, shape.heads * size, device=DEVICE, dtype=dtype)

    @property
    def layer(self):
        return AttentionLayer(
            self.shape,
            self.shape.head_dim**-0.5,
            HeadNorms(*self.norms or (), epsilon=EPSILON),
            self.sinks,
            self.beside,
        )

    def row_tables(self, lengths):
        before = (
            None
            if self.before is None
            else torch.tensor(self.before, dtype=torch.int32, device=DEVICE)
        )
        return Rows(self.rope, lengths, self.pages, before)

    @property
    def first_norm(self):
        return Norm(self.norm, EPSILON)

    def fused(self, x, lengths):
        self.out.fill_(float("nan"))
        qkv_attention(
            self.linear,
            x,
            self.out,
            self.cache,
            self.row_tables(lengths),
            norm=self.first_norm,
            mailboxes=tuple(self.boxes),
            layer=self.layer,
        )
        self.boxes.reverse()
        return self.out.clone()

    def apart(self, x, lengths):
        qkv = gemv.multiply(self.linear.weight, x, norm=self.first_norm)
        workspace = Workspace.make(self.shape, self.rows, DEVICE)
        return decode_attention(
            qkv,
            torch.full_like(self.out, float("nan")),
            self.cache,
            self.row_tables(lengths),
            workspace=workspace,
            layer=self.layer,
        )

    def slots(self, row, tokens):
        return (
            self.pages[row].long()[tokens // self.shape.page] * self.shape.page
            + tokens % self.shape.page
        )

    def reference(self, x, lengths):
        """float64 [rows, heads · head_dim], and the new K and V of each row; None for padding."""
        shape, dtype = self.shape, self.dtype
        qkv = self.tensor.matmul_reference(normed(x.double(), self.norm.double()).to(dtype))
        qkv = (qkv if self.offset is None else qkv + self.offset.double()).to(dtype).double()
        qkv = qkv.view(self.rows, -1, shape.head_dim)
        results = []
        for row, length in enumerate(lengths.tolist()):
            results.append(None if length == 0 else self.reference_row(qkv[row], row, length))
            if self.before is not None and length:  # the rows behind it see its token
                slot = self.slots(row, torch.tensor(length - 1, device=DEVICE))
                for store, new in zip(
                    (self.cache.keys, self.cache.values), results[-1][1:], strict=True
                ):
                    store.flatten(0, 1)[slot] = new.to(self.dtype)
        return results

    def reference_row(self, qkv, row, length):
        shape = self.shape
        gates = shape.heads if shape.gated else 0
        gate, query, key, value = qkv.split([gates, shape.heads, shape.kv_heads, shape.kv_heads])
        if self.norms:
            query, key = (
                normed(z, weight.double())
                for z, weight in zip((query, key), self.norms, strict=True)
            )
        cos, sin = (table[length - 1].double() for table in self.tables)

        def turned(z):
            a, b, rest = z.split(
                [shape.rotary // 2, shape.rotary // 2, shape.head_dim - shape.rotary], -1
            )
            return (
                torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(self.dtype).double()
            )

        query, key = turned(query), turned(key)
        slots = self.slots(row, torch.arange(length - 1, device=DEVICE))
        first = max(0, length - shape.window) if shape.window else 0
        keys, values = (
            torch.cat([store.flatten(0, 1)[slots].double(), new[None]])[first:].repeat_interleave(
                shape.group, 1
            )
            for store, new in ((self.cache.keys, key), (self.cache.values, value))
        )
        scores = torch.einsum("hd,thd->ht", query, keys) * shape.head_dim**-0.5
        if shape.soft_cap is not None:
            scores = shape.soft_cap * (scores / shape.soft_cap).tanh()
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.double()[:, None]], -1)
        weights = scores.softmax(-1)[:, : len(keys)]
        found = torch.einsum("ht,thd->hd", weights, values)
        return (found * gate.sigmoid() if shape.gated else found).flatten(), key, value

    def check(self, lengths, fused=None):
        """One launch on fresh inputs: outputs and new K and V as in float64, the rest of the cache
        untouched.
        """
        lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        x = torch.randn(self.rows, self.hidden, device=DEVICE).to(self.dtype)
        want = self.reference(x, lengths)
        if self.before is not None:  # new tokens are read from nowhere
            for row, length in enumerate(lengths.tolist()):
                for store in (self.cache.keys, self.cache.values):
                    if length:
                        store.flatten(0, 1)[
                            self.slots(row, torch.tensor(length - 1, device=DEVICE))
                        ] = float("nan")
        before = [store.clone() for store in (self.cache.keys, self.cache.values)]
        got = (fused or self.fused)(x, lengths)
        for row, length in enumerate(lengths.tolist()):
            if length == 0:
                assert got[row].isnan().all(), "padding is left alone"
                continue
            slot = self.slots(row, torch.tensor(length - 1, device=DEVICE))
            stores = [store.flatten(0, 1) for store in (self.cache.keys, self.cache.values)]
            for result, expected in zip(
                (got[row], stores[0][slot], stores[1][slot]), want[row], strict=True
            ):
                assert result.isfinite().all()
                # W8A8 and float8 quantize the float32 result of the norm, the reference one that
                # was rounded to 16 bits first one step of one input (1/127 of the row's largest)
                # moves every output of a head, and few heads average it less
                integers = 2.5e-2 if self.shape.heads < 16 else 1.2e-2
                rough = (
                    5e-2 if self.kind == "fp8" else integers if self.kind.endswith("w8a8") else 0
                )
                bound = max(TOLERANCE[self.dtype], rough)
                assert (result.double() - expected).norm() / expected.norm() < bound
            for store, old in zip(stores, before, strict=True):
                old.flatten(0, 1)[slot] = store[slot]
        for store, old in zip((self.cache.keys, self.cache.values), before, strict=True):
            assert torch.equal(store.view(torch.int16), old.view(torch.int16))
        assert (self.boxes[0].qkv.view(torch.int16) == -1).all() and (
            self.boxes[0].states.view(torch.int32) == -1
        ).all()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kind", KINDS)
def test_one_to_eight_sequences_of_ragged_lengths(kind, dtype):
    for lengths in (
        [1, 2, 15, 16, 17, 63, 64, 65],
        [500, 0, 4097, 128],
        [4097, 33],
        [1],
        [2],
        [17],
        [64],
        [65],
        [500],
        [4097],
    ):
        layer = Layer(kind, SHAPE, rows=len(lengths), context=4200, dtype=dtype)
        layer.check(lengths)
        layer.check([length and length + 1 for length in lengths])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kind", ["int4:128", "int8:128"])
def test_eight_sequences_whose_inputs_stay_in_registers(kind, dtype):
    layer = Layer(kind, SHAPE, rows=8, context=700, dtype=dtype, hidden=2688)
    chosen = linear_plan(layer.linear.weight, SHAPE, 8, gpu.of(DEVICE))
    if not gpu.of(DEVICE).has_warpgroups and not chosen.in_registers:
        pytest.skip("the linear has room for x in shared memory here")
    assert chosen.in_registers
    for lengths in ([1, 2, 15, 16, 17, 63, 64, 65], [600, 0, 1, 300, 64, 0, 129, 650]):
        layer.check(lengths)


# Lengths of the first row of each sequence and how many rows it has: alone, beside others, before
# padding.
GUESSES = {
    2: [[(700, 2)], [(1, 2)], [(33, 1), (64, 1)]],
    4: [
        [(1021, 4)],
        [(30, 4)],
        [(1, 4)],
        [(4097, 3), (65, 1)],
        [(500, 2), (15, 2)],
        [(255, 1), (0, 3)],
        [(129, 2), (0, 2)],
    ],
    8: [
        [(1017, 8)],
        [(1, 8)],
        [(2040, 7), (0, 1)],
        [(58, 4), (63, 4)],
        [(4090, 5), (17, 2), (0, 1)],
        [(n, 1) for n in range(60, 68)],
        [(300, 3), (1, 1), (640, 4)],
    ],
}


def rows_of_guesses(kind, rows, spans, shape, **options):
    lengths = [length + i if length else 0 for length, count in spans for i in range(count)]
    before = [i if length else 0 for length, count in spans for i in range(count)]
    layer = Layer(kind, shape, rows=rows, context=4200, before=before, **options)
    for _ in range(2):
        layer.check(lengths)


@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
@pytest.mark.parametrize("rows", list(GUESSES))
@pytest.mark.parametrize(
    ("kind", "hidden"), [("int4:128", 4096), ("int4:128", 512), ("w8a8", 1024), ("plain", 512)]
)
def test_rows_of_a_sequence_see_what_is_before_them(kind, hidden, rows, together, monkeypatch):
    monkeypatch.setattr(qkv, "TOGETHER", 99 * together)
    for spans in GUESSES[rows]:
        rows_of_guesses(kind, rows, spans, SHAPE, hidden=hidden)


@pytest.mark.parametrize("rows", [4, 8])
@pytest.mark.parametrize(
    ("hidden", "changes"),
    [
        (4096, {}),
        (2560, {}),
        (3584, dict(heads=28, kv_heads=4, qk_norm=False)),
        (896, dict(heads=14, kv_heads=2, head_dim=64, rotary=64, qk_norm=False)),
    ],
    ids=["8b", "4b", "7b", "0.5b"],
)
def test_rows_of_a_sequence_leave_room_for_another_kernel(hidden, changes, rows):
    """With the heads of several models; x in registers where there is enough of it."""
    shape = replace(SHAPE, **changes)
    for spans in GUESSES[rows][:5]:
        rows_of_guesses(
            "int4:128", rows, spans, shape, hidden=hidden, bias=not shape.qk_norm, beside=True
        )


@pytest.mark.parametrize(
    "changes",
    [
        dict(heads=9, kv_heads=3, head_dim=64, rotary=64, qk_norm=False),
        dict(heads=28, kv_heads=4, qk_norm=False),
        dict(heads=8, kv_heads=8, rotary=64),
        dict(heads=14, kv_heads=2, head_dim=64, rotary=64, page=8),
        dict(window=64),
        dict(window=1000),
        dict(heads=64, head_dim=64, rotary=64, window=128, sinks=True, qk_norm=False),
        dict(soft_cap=2.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [4, 8])
def test_rows_of_a_sequence_together_have_windows_and_other_heads(rows, changes, monkeypatch):
    monkeypatch.setattr(qkv, "TOGETHER", 99)
    for spans in GUESSES[rows][:5]:
        rows_of_guesses("int4:128", rows, spans, replace(SHAPE, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        dict(heads=9, kv_heads=3, head_dim=64, rotary=64, qk_norm=False),
        dict(heads=28, kv_heads=4, qk_norm=False),
        dict(heads=8, kv_heads=8, rotary=64),
        dict(heads=16, kv_heads=2),
        dict(heads=16, kv_heads=4, head_dim=256, rotary=64),
        dict(heads=14, kv_heads=2, head_dim=64, rotary=64, page=8),
        dict(window=40),
        dict(window=1000),
        dict(heads=40, kv_heads=40),
        dict(heads=64, head_dim=64, rotary=64, window=128, sinks=True, qk_norm=False),
        dict(soft_cap=2.0),
        dict(heads=24, kv_heads=2, sinks=True),
        dict(heads=16, kv_heads=2, head_dim=256, rotary=64, gated=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["int4:128", "w8a8"])
def test_head_shapes_windows_and_biases(kind, changes):
    for lengths in ([700], [1], [5, 0, 300, 64, 0, 1, 129, 2000]):
        layer = Layer(
            kind,
            replace(SHAPE, **changes),
            rows=len(lengths),
            context=2100,
            bias="qk_norm" in changes,
        )
        layer.check(lengths)
        layer.check([length and length + 1 for length in lengths])


def test_a_mailbox_that_longer_sequences_have_used_serves_others():
    layer = Layer("int4:128", SHAPE, rows=2, context=4200)
    for lengths in ([4000, 3000], [5, 0], [4100, 700], [0, 1], [64, 4000]):
        layer.check(lengths)
        layer.check(lengths)
        layer.check(lengths)


@pytest.mark.parametrize("kind", KINDS)
def test_one_kernel_gives_what_two_give(kind):
    layer = Layer(kind, SHAPE, rows=4, context=1200)
    for lengths in ([1000, 1, 64, 257], [3, 600, 0, 90]):
        layer.check(lengths, fused=layer.apart)
        lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        x = torch.randn(4, layer.hidden, device=DEVICE).bfloat16()
        one = layer.fused(x, lengths)[lengths > 0].double()
        two = layer.apart(x, lengths)[lengths > 0].double()
        # both round once more or less
        assert ((one - two).norm(dim=-1) / two.norm(dim=-1)).max() < 8e-3


@pytest.mark.parametrize(
    ("kind", "rows"), [("int4:128", 1), ("int4:128", 8), ("plain", 1), ("w8a8", 2)]
)
def test_a_thousand_replays_of_a_dependent_chain_give_the_same_bits(kind, rows):
    layers = [Layer(kind, SHAPE, rows=rows, context=700) for _ in range(3)]
    outs = [tiles.prepare(make(kind, (512, 4096), 1), dtype=torch.bfloat16) for _ in layers]
    if not gemv_plan.fits(outs[0].matrix, rows, gpu.of(DEVICE)):
        pytest.skip("so many rows of these inputs go through another kernel here")
    boxes = mailbox_cycle(SHAPE, rows, len(layers), dtype=torch.bfloat16, device=DEVICE)
    start = torch.randn(rows, 512, device=DEVICE).bfloat16()
    hidden, attended = torch.empty_like(start), torch.empty_like(layers[0].out)
    lengths = torch.tensor(
        [600, 17, 64, 300, 1, 2, 500, 0][:rows], dtype=torch.int32, device=DEVICE
    )

    def chain(pdl: bool = True) -> None:
        x = start
        for i, layer in enumerate(layers):
            with jit.overlap(pdl):
                qkv_attention(
                    layer.linear,
                    x,
                    attended,
                    layer.cache,
                    layer.row_tables(lengths),
                    norm=layer.first_norm,
                    mailboxes=(boxes[i], boxes[(i + 1) % len(boxes)]),
                    layer=layer.layer,
                )
            x = gemv.multiply(outs[i], attended, hidden, pdl=pdl)

    attended.zero_()
    chain(pdl=False)
    want = hidden.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    used = lengths > 0
    for _ in range(1000):
        hidden.fill_(float("nan"))
        attended[used] = float("nan")
        graph.replay()
        assert torch.equal(hidden[used], want[used])
    assert want[used].isfinite().all()
