"""The re-laid-out weights, multiplied the way the kernel multiplies them, but in plain torch on the
CPU.
"""

import copy

import pytest
import torch

from flyweight.gpu import GPUS
from flyweight.kernels.linear import gemv_plan, tiles
from flyweight.kernels.linear.format import FORMATS
from flyweight.kernels.linear.tiles import Matrix, TiledWeight
from flyweight.tensors import Float8, Int8Channel, IntGroup, Plain, Sparse24

LANES = torch.arange(32)


def unlayout(prepared: TiledWeight) -> torch.Tensor:
    """Codes [tiles · 16, blocks · 64] read back lane by lane, as mma.m16n8k16 takes its
    registers.
    """
    blocks = -(-prepared.in_features // 64)
    tiles = -(-prepared.out_features // 16)
    rows, columns = LANES // 4, LANES % 4
    raw = prepared.weights.view(tiles, blocks, -1)
    codes = torch.zeros(tiles, 16, blocks, 64)
    for half in range(2):
        for step in range(2):
            for i in range(4):
                for j in range(2):  # row g or g + 8
                    if prepared.format.name == "int4":
                        byte = raw.view(tiles, blocks, 32, 4, 4)[..., 2 * step + j, i]
                        value = byte >> 4 if half else byte & 15
                    elif prepared.format.name == "int8":
                        value = raw.view(tiles, blocks, 2, 32, 4, 4)[:, :, half, :, 2 * step + j, i]
                    elif prepared.format.name == "fp8":
                        value = raw.view(tiles, blocks, 2, 32, 4, 4)[
                            :, :, half, :, 2 * step + j, i
                        ].view(torch.float8_e4m3fn)
                    elif prepared.format.name == "w8a8":
                        value = raw.view(tiles, blocks, 2, 32, 4, 4)[
                            :, :, half, :, 2 * step + j, i
                        ].view(torch.int8)
                    else:
                        registers = raw.view(prepared.dtype).view(tiles, blocks, 4, 32, 4, 2)
                        value = registers[:, :, 2 * half + step, :, 2 * (i // 2) + j, i % 2]
                    codes[:, rows + 8 * j, :, 32 * half + 8 * columns + 4 * step + i] = (
                        value.permute(2, 0, 1).float()
                    )
    return codes.view(tiles * 16, blocks * 64)


def read_sparse(prepared: TiledWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, which are kept), both [tiles · 16, blocks · 64], as mma.sp.m16n8k64 takes its
    registers and places.
    """
    tiles, blocks = -(-prepared.out_features // 16), -(-prepared.in_features // 64)
    raw = prepared.weights.view(tiles, blocks, -1)
    values = raw[..., :-128]
    places = raw[..., -128:].contiguous().view(torch.int32).view(tiles, blocks, 8, 4)
    if prepared.format.name == "sparse-int4":
        words = values.reshape(tiles, blocks, 32, 2, 4)
        words = torch.stack([words & 15, words >> 4], 3)  # half, row g or g + 8
    else:
        words = values.reshape(tiles, blocks, 32, 2, 2, 4)
    signed = words.view(torch.int8) if prepared.format.name == "sparse-w8a8" else words
    codes = torch.zeros(tiles, blocks, 16, 64)
    kept = torch.zeros(tiles, blocks, 16, 64, dtype=torch.bool)
    for row in range(16):
        for four in range(16):  # as the matrix unit counts them
            half, lane = four // 8, row % 8 * 4 + four % 8 // 2
            nibble = places[:, :, row % 8, 2 * half + row // 8] >> four % 8 * 4
            # B's register i of lane t is inputs 16 i + 4 t …; there lie the inputs 32 (i / 2) + 8 t
            # + 4 (i % 2) … of x
            start = 32 * (four // 8) + 8 * (four % 4) + 4 * (four // 4 % 2)
            for i in range(2):
                column = (start + (nibble >> 2 * i & 3)).long()[..., None]
                code = signed[:, :, lane, half, row // 8, four % 2 * 2 + i].float()[..., None]
                codes[:, :, row].scatter_(2, column, code)
                kept[:, :, row].scatter_(2, column, True)
    return tuple(part.transpose(1, 2).reshape(tiles * 16, blocks * 64) for part in (codes, kept))


@pytest.mark.parametrize("shape", [(32, 128), (40, 192), (24, 72)])
@pytest.mark.parametrize(
    "options",
    [{}, dict(inner=IntGroup, bits=8, group_size=64), dict(inner=IntGroup, group_size=-1)],
)
def test_sparse_layouts_hold_every_kept_code_where_the_sparse_matrix_unit_reads_it(shape, options):
    rows, columns = shape
    tensor = Sparse24.random(shape, 5, **options)
    prepared = tiles.prepare(tensor, dtype=torch.bfloat16)
    codes, kept = read_sparse(prepared)
    inner = tensor.inner.codes if isinstance(tensor.inner, Int8Channel) else tensor.inner.values()
    want = torch.zeros(shape).scatter_(1, tensor.columns(), inner.float())
    assert torch.equal(codes[:rows, :columns], want)
    assert torch.equal(
        kept[:rows, :columns], torch.zeros(shape).scatter_(1, tensor.columns(), 1.0).bool()
    )
    assert (kept.unflatten(1, (-1, 4)).sum(-1) == 2).all(), "padding keeps two of four as well"
    assert prepared.weights.numel() == prepared.format.block_bytes * kept.numel() // 1024


def regrouped(places: torch.Tensor, odd: int) -> torch.Tensor:
    """gemm.cu's `regroup`: the even or odd places of two rows [..., 2] as one word."""
    found = places >> 4 * odd & 0x0F0F0F0F
    found = found | found >> 4
    low, high = ((found & 0xFF) | (found >> 16 & 0xFF) << 8).unbind(-1)
    return low | high << 16


def test_sparse_weights_in_16_bits_meet_the_inputs_that_pack_has_put_there():
    """wgmma.sp.m64nNk32: registers of gemm.cu's load_block, places by its regroup, columns of B by
    pack.cu's ORDER 2.
    """
    tensor = Sparse24.random((16, 64), 3, inner=IntGroup, bits=8, group_size=-1)
    raw = tiles.prepare(tensor, dtype=torch.bfloat16).weights
    values = raw[:512].view(32, 2, 2, 4)
    words = raw[512:].view(torch.int32).view(8, 2, 2).long() & 0xFFFFFFFF
    # of 32, by place in B
    inputs = torch.cat([start + torch.arange(4) for c in range(4) for start in (4 * c, 16 + 4 * c)])
    read = torch.zeros(16, 64)
    for half in range(2):
        for row in range(16):
            for four in range(8):
                lane, register = row % 8 * 4 + four % 4, four // 4
                # of lane 0 for fours 0 to 3, of lane 1 for the others
                word = regrouped(words[row % 8, half], four // 4)
                nibble = word >> 16 * (row // 8) + 4 * (four % 4)
                for i in range(2):
                    column = inputs[4 * four + int(nibble >> 2 * i & 3)]
                    read[row, 32 * half + column] = values[
                        lane, half, row // 8, 2 * register + i
                    ].float()
    assert torch.equal(
        read, torch.zeros(16, 64).scatter_(1, tensor.columns(), tensor.inner.values().float())
    )


@pytest.mark.parametrize("shape", [(32, 128), (40, 192), (24, 72)])
def test_layouts_hold_every_code_where_the_matrix_unit_reads_it(shape):
    rows, columns = shape
    for tensor, codes in [
        (t := IntGroup.random(shape, group_size=32), t.values()),
        (t := IntGroup.random(shape, bits=8, group_size=-1), t.values()),
        (t := Int8Channel.random(shape), t.codes),
        (t := Plain.random(shape), t.weight),
        (t := Float8.random(shape), t.weight),
    ]:
        read = unlayout(tiles.prepare(tensor, dtype=torch.bfloat16))
        assert torch.equal(read[:rows, :columns], codes.float())
        assert not read[rows:].any() and not read[:, columns:].any()


def test_interleaved_tiles_hold_gate_rows_then_up_rows():
    tensor = IntGroup.random((64, 128), group_size=64)
    prepared = tiles.prepare(tensor, dtype=torch.float16, activation="silu")
    gate, up = tensor.values().float().chunk(2)
    read = unlayout(prepared).view(4, 2, 8, 128)
    assert torch.equal(read[:, 0].reshape(32, 128), gate) and torch.equal(
        read[:, 1].reshape(32, 128), up
    )
    scales = (
        (prepared.records & 0xFFFF)
        .to(torch.int16)
        .view(torch.bfloat16)
        .transpose(1, 2)
        .reshape(4, 2, 8, 2)
    )
    assert torch.equal(scales[:, 1].reshape(32, 2), tensor.scales[32:])
    assert torch.equal(
        (prepared.records >> 16).transpose(1, 2).reshape(4, 2, 8, 2)[:, 0].reshape(32, 2),
        tensor.zeros[:32].int(),
    )


@pytest.mark.parametrize("device", GPUS.values(), ids=GPUS.keys())
def test_plans_cover_the_weight_and_stay_within_shared_memory(device):
    limit = device.shared_beside(gemv_plan.RESERVED_BESIDE)
    for kind in FORMATS.values():
        for columns in (576, 1536, 3584, 4096, 7392, 12288, 18944):
            for group in (32, 64, 128, columns):
                matrix = Matrix(kind, 1024, columns, group)
                plan = gemv_plan.plan_beside(
                    matrix, 1, gemv_plan.Wanted(tiles=12, warps=16), device
                )
                if limit < 100 * 1024 and plan is None:
                    continue  # of long rows nothing fits twice on a GPU with little shared memory
                assert plan is not None and plan.stages >= 2 and plan.shared <= limit
                if kind.grouped and group < columns:
                    assert (
                        plan.stage_blocks * 64 % group == 0 or group % (plan.stage_blocks * 64) == 0
                    )


def test_a_copy_has_weights_of_its_own_and_nothing_that_was_made_ready_for_the_first():
    prepared = tiles.prepare(Int8Channel.random((32, 64)), dtype=torch.bfloat16)
    # as a kernel: cannot be copied, and knows the addresses of these weights
    prepared.calls["gemm"] = torch
    copied = copy.deepcopy(prepared)
    assert (
        copied.calls == {}
        and prepared.calls
        and copied.weights.data_ptr() != prepared.weights.data_ptr()
    )
    assert torch.equal(copied.weights, prepared.weights) and torch.equal(
        copied.channel_scale, prepared.channel_scale
    )


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_89", "sm_90a"])
@pytest.mark.parametrize("kind", ["plain", "int4", "int8", "w8a8"])
def test_a_round_has_a_thread_for_every_output(kind, name):
    """Small matrices have few warps, and where little shared memory is free half as many."""
    for inputs in (512, 576, 768, 896, 1536, 4096):
        matrix = Matrix(FORMATS[kind], 256, inputs, 128 if FORMATS[kind].grouped else inputs)
        for rows in range(1, 9):
            found = gemv_plan.fitting_plan(
                matrix, rows, GPUS[name], tiles=max(1, 16 // rows), more=20480
            )
            assert found is None or found.slots * 16 * rows <= 32 * found.warps, (inputs, rows)
