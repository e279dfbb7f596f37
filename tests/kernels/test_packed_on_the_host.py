"""Kernels that write the packed x of the linear behind them, run on the CPU: the bytes of pack.cu,
and the same answers.
"""

from types import SimpleNamespace

import host_cuda
import pytest
import torch
from test_kernels_on_the_host import error, host, linear_of, make  # noqa: F401 (fixtures)
from tuning import retune

from flyweight.batch import KVStorage
from flyweight.kernels import jit, reference, workspace
from flyweight.kernels.attention import decode
from flyweight.kernels.attention.decode import (
    AttentionLayer,
    HeadShape,
    Rows,
    Workspace,
    decode_attention,
    rope_pairs,
)
from flyweight.kernels.linear import gemm, tiles
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.linear.gemm_shape import CLUSTERS, LINE, WHOLE, Forced
from flyweight.kernels.vptq import linear as vptq
from flyweight.kernels.vptq import rows as vptq_rows
from flyweight.kernels.vptq import staged
from flyweight.kernels.vptq.parts import Ends
from flyweight.tensors import VectorQuant

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")
CPU, HALF, BRAIN = torch.device("cpu"), torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def small_packs(monkeypatch):
    packing = gemm.Packing(8, 1, 1)  # every thread takes memory of the host
    monkeypatch.setattr(gemm, "packing_for", lambda columns, padded, **options: packing)


def rows_of(data, to, columns):
    """[rows, columns] of packed x, each row's values in the packed order."""
    values = data[: 16 * to.groups * columns].view(torch.int16)
    blocks = to.order.stage_blocks
    # stage, 8 rows, column, row, value
    shape = (columns // 64 // blocks, to.groups, 8 * blocks, 8, 8)
    return values.view(shape).permute(1, 3, 0, 2, 4).reshape(-1, columns)[: to.rows]


def check(linear, x, write, rows=slice(None), **cut):
    """What `write` leaves behind is x as pack.cu packs it, and the product the same to the last
    bit.
    """
    forced = Forced(**cut)
    residual = torch.randn(len(x), linear.out_features).to(x.dtype)
    want = gemm.multiply(linear, x, residual=residual, forced=forced)
    to = gemm.packed_input(linear, len(x), x.device, residual=True, forced=forced)
    call = next(call for call in linear.calls.values() if isinstance(call, gemm.Call))
    ours = workspace.current(CPU).bytes("packed", call.packed_bytes).clone()
    to.data.fill_(0x55)
    write(to)
    packed, wanted = (rows_of(data, to, linear.in_features)[rows] for data in (to.data, ours))
    assert torch.equal(packed, wanted)
    assert torch.equal(
        gemm.multiply(linear, to, residual=residual, forced=forced)[rows], want[rows]
    )


# Straight from the registers and through shared memory, rows that fill 8 and that do not, tiles
# wider than the next one's and narrower, warpgroups beyond the last output.
CASES = [
    ("int8:64", BRAIN, 9, dict(split=CLUSTERS), {}),
    ("plain", HALF, 20, dict(split=LINE, tokens=32, staged=32), dict(tokens=16)),
    (
        "int4:32",
        BRAIN,
        41,
        dict(split=WHOLE, tokens=32, staged=32, warpgroups=3),
        dict(tokens=64, stage_blocks=1),
    ),
    ("plain", BRAIN, 170, dict(split=WHOLE, tokens=160), dict(tokens=64)),
    # a tile of prefill
    ("int4:128", HALF, 300, dict(split=WHOLE, tokens=256, staged=64), dict(tokens=128)),
]


@pytest.mark.parametrize(("kind", "dtype", "rows", "first", "second"), CASES)
def test_gate_up_writes_the_packed_input_of_down(kind, dtype, rows, first, second):
    gate_up = tiles.prepare(
        make(kind, (256, 128), 1), dtype=dtype, bias=torch.randn(256).to(dtype), activation="silu"
    )
    down, x = tiles.prepare(make(kind, (40, 128), 2), dtype=dtype), torch.randn(rows, 128).to(dtype)
    forced = Forced(**first)
    gated = gemm.multiply(gate_up, x, forced=forced)
    check(
        down,
        gated,
        lambda to: gemm.multiply(gate_up, x, to=to, forced=forced),
        split=WHOLE,
        warpgroups=1,
        **second,
    )


@pytest.mark.parametrize("kind", ["w8a8", "int4:64"])
def test_rows_are_packed_alike_however_many_a_cta_takes(monkeypatch, kind):
    tensor = make(kind, (40, 576), 1)
    x = torch.randn(21, 576).to(BRAIN)
    norm = torch.rand(576).to(BRAIN)
    found = []
    for rows, parts in ((8, 1), (4, 1), (2, 1), (1, 1), (1, 2)):
        packing = gemm.Packing(rows, 2, parts)
        monkeypatch.setattr(
            gemm, "packing_for", lambda columns, padded, packing=packing, **options: packing
        )
        forced = Forced(split=WHOLE, warpgroups=1)
        found.append(
            gemm.multiply(
                tiles.prepare(tensor, dtype=BRAIN), x, norm=Norm(norm, 1e-6), forced=forced
            )
        )
    assert all(torch.equal(y, found[0]) for y in found[1:])


# runs of 64, and a row that nobody uses
LENGTHS = torch.tensor([1, 3, 0, 130, 17, 8, 66, 2, 70], dtype=torch.int32)


def attention_of(monkeypatch, kv_heads, dtype):
    """A function of where the results go."""
    monkeypatch.setattr(decode, "SHORTEST", 64)
    sequences, splits = len(LENGTHS), 2
    shape = HeadShape(
        heads=2 * kv_heads, kv_heads=kv_heads, head_dim=64, rotary=64, page=16, qk_norm=False
    )
    tables = torch.randperm(9 * sequences).view(sequences, 9).int()
    cache = KVStorage(*torch.randn(2, 9 * sequences, 16, kv_heads, 64).to(dtype))
    angles, qkv = torch.rand(130, 32) * 6, torch.randn(sequences, 4 * kv_heads * 64).to(dtype)

    def attend(to):
        out = torch.zeros(sequences, 128 * kv_heads, dtype=dtype)
        rows = Rows(rope_pairs(angles.cos(), angles.sin()), LENGTHS, tables)
        return decode_attention(
            qkv,
            out,
            cache,
            rows,
            layer=AttentionLayer(shape, 0.125),
            to=to,
            workspace=Workspace.make(shape, sequences, CPU, splits),
        )

    return attend


@pytest.mark.parametrize(("kind", "dtype"), [("plain", BRAIN), ("int4:64", HALF)])
def test_decode_attention_writes_the_packed_input_of_o(monkeypatch, kind, dtype):
    attend = attention_of(monkeypatch, 1, dtype)
    o = tiles.prepare(make(kind, (40, 128), 2), dtype=dtype)
    check(o, attend(None), attend, rows=LENGTHS > 0, split=WHOLE, warpgroups=1)


@pytest.mark.parametrize("dtype", [BRAIN, HALF])
def test_decode_attention_writes_the_packed_input_of_a_vptq_o(monkeypatch, dtype):
    monkeypatch.setattr(
        staged, "schedule", lambda banks: torch.rand(banks.shape).argsort(2).to(torch.uint8)
    )
    attend = attention_of(monkeypatch, 2, dtype)
    tensor = VectorQuant.random((72, 256), dtype=dtype, main=256, residual=256)
    o, x, used = vptq.prepare(tensor, dtype=dtype, ops=reference), attend(None), LENGTHS > 0
    packed = o.packed_input(len(x), 2)

    def rows_here():
        pieces = packed.data[: packed.part_bytes].view(
            -1, packed.groups, 4 * packed.shape.steps, 8, 16
        )
        return pieces.permute(1, 3, 0, 2, 4).reshape(8 * packed.groups, -1)[: len(x)][used]

    attend(packed)
    got, bits = o.project(packed, torch.empty(len(x), 72, dtype=dtype)), rows_here()
    assert error(got[used], tensor.matmul_reference(x[used])) < (1e-2 if dtype == BRAIN else 2e-3)
    vptq_rows.pack(o.parts, x, Ends(), packed.shape, count=2, pdl=True)  # to the same place
    assert bits.equal(rows_here())


def test_x_is_packed_ahead_where_both_linears_are_products_of_unquantized_rows(monkeypatch):
    monkeypatch.setattr(
        jit, "load", lambda file, **options: SimpleNamespace(kernel=lambda name: name)
    )
    retune(monkeypatch, packed_ahead=True)

    def linears(*kinds):
        sizes = zip(kinds, ((512, 256), (192, 256)), (True, False), strict=True)
        return (
            linear_of(make(kind, size, 1), dtype=BRAIN, activation="silu" if gated else None)
            for kind, size, gated in sizes
        )

    gate_up, down = linears("int4:64", "plain")
    assert down.negotiate(gate_up, 64, "silu").to and down.packed_input(64, 1)
    assert down.negotiate(gate_up, 4, "silu").to is None, "few rows go through other kernels"
    assert down.negotiate(gate_up, 64, "gelu").to is None, (
        "what no kernel applies comes after, in rows as they are"
    )
    quantized, last = linears("w8a8", "w8a8")
    assert (
        down.negotiate(quantized, 100, "silu").to is not None
        and last.negotiate(gate_up, 100, "silu").to is None
    )
    retune(monkeypatch, packed_ahead=False)
    assert down.negotiate(gate_up, 64, "silu").to is None
