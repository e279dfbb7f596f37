"""How few rows of a tiled weight go through shared memory: stages, warps and rings of
cuda/gemv.cuh, by a weight's shape and a GPU's memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

from flyweight.gpu import KB, Gpu
from flyweight.kernels import tuned
from flyweight.kernels.linear.tiles import Matrix

ROWS = (1, 2, 4, 8)
# Bytes that a CTA leaves of what it could have: beside another kernel, and alone on an SM (for the
# next one's variables).
RESERVED_BESIDE = 2 * KB
RESERVED_ALONE = 7 * KB


@dataclass(frozen=True)
class Plan:
    """How a weight streams through shared memory."""

    stage_blocks: int
    stages: int
    slots: int  # tiles between two meetings of the warps
    shared: int
    warps: int
    in_registers: bool = False  # x, or in shared memory
    own_units: int = 0  # of a stage, that a warp copies for itself; 0: a producer warp copies
    beside: bool = False  # registers leave room for another kernel, though x is in them
    held_inputs: bool = False  # in registers of the warps that multiply them
    paired: bool = False  # the two CTAs of a cluster have one half of the inputs each

    @property
    def threads(self) -> int:
        return 32 * (self.warps + (not self.own_units))


@dataclass(frozen=True)
class Wanted:
    """What a plan has to make room for."""

    tiles: int  # the most that one CTA gets
    warps: int
    stage_bytes: int = 16384
    more: int = 0  # bytes of shared memory that the kernel needs besides
    slices: int = 1  # that inputs are cut into
    fewest: int = 2  # stages
    slots: int | None = None
    in_registers: bool = False
    own_bytes: int = 0  # that a warp copies at a time for itself; 0: a producer warp copies
    lone_row: bool = False  # one, without an adapter
    paired: bool = False  # CTAs share their tiles, and have half of the inputs each


# Of one row of 4-bit weights whose inputs are in registers (`HELD_INPUTS`)
HELD_REGISTERS = 32  # that a warp's inputs of a tile may take
HELD_SLOTS = 8  # in each of two places for partial sums, which lie where inputs were
HELD_WARPS = 10  # of a tile that then is one stage
# Rows from which on codes in planes, of groups smaller than a block, are multiplied as 16-bit
# floats
HALVES_FROM = 3
# Of a kernel with x in registers that leaves room for another
REGISTER_WARPS = 8
REGISTER_UNITS = 4  # of 128 inputs, that a warp has registers for
# Up to so many rows in registers have two columns of a product each, and share out their inputs;
# with half as many of each unit in a lane a warp has registers for more units (7 and 8 spill)
SPREAD_ROWS = 4
SPREAD_UNITS = 6
PAIR_UNITS = 3  # in a CTA of a pair, whose rows are up to eight (4 spill)
FEWEST_WARPS = 4  # that have a thread for each output of a round


def spread(rows: int) -> dict[str, int]:
    """Of kernels with x of so many rows in registers."""
    return {"SPREAD": 2} if rows <= SPREAD_ROWS else {}


def own_bytes(device: Gpu) -> int:
    """0 where a copy engine and dependent launches make a producer warp the better choice."""
    return 0 if device.has_dependent_launch else tuned.of(device).gemv.own_bytes


def _own_units(matrix: Matrix, wanted: Wanted) -> int:
    """Units of about `own_bytes` together, whose groups lie within them or around them."""
    form = matrix.format
    if not wanted.own_bytes or wanted.in_registers:
        return 0
    unit = _unit_blocks(matrix)
    units = max(1, wanted.own_bytes // (unit * form.block_bytes))
    inputs = units * unit * 64
    fits = not form.grouped or inputs % matrix.group == 0 or matrix.group % inputs == 0
    return units if fits or matrix.group >= matrix.in_features else 1


def _busy_warps(matrix: Matrix, wanted: Wanted) -> int:
    """The fewest that need no more stages for a tile: shares of more would stay empty. More than
    usual where inputs are in registers and a tile then is one stage.
    """
    share = _own_units(matrix, wanted) * _unit_blocks(matrix)
    shares = math.ceil(matrix.blocks / share)
    held = wanted.lone_row and matrix.format.name == "int4" and matrix.blocks % share == 0
    if held and wanted.warps < shares <= HELD_WARPS:
        return shares
    stages = math.ceil(shares / wanted.warps)
    return max(FEWEST_WARPS, math.ceil(shares / stages))


def _held_slots(matrix: Matrix, wanted: Wanted, stage_blocks: int, x_bytes: int) -> int:
    """Tiles between two meetings of warps that hold their inputs in registers, as one row of 4-bit
    weights has it: shared memory is as busy with inputs as with weights. 0: no registers for them.
    """
    own = _own_units(matrix, wanted)
    if not own or not wanted.lone_row or matrix.format.name != "int4":
        return 0
    stages = math.ceil(matrix.blocks / stage_blocks)
    registers = 4 * stages * own * _unit_blocks(matrix)
    room = x_bytes // (2 * wanted.warps * 16 * 4)
    return min(HELD_SLOTS, room) if registers <= HELD_REGISTERS else 0


def _unit_blocks(matrix: Matrix) -> int:
    """Blocks of 64 inputs between two scalings."""
    variant = matrix.format.variant
    group = matrix.group if variant is None else variant.group
    return 2 if matrix.format.grouped and group % 128 == 0 else 1


def _input_scales(matrix: Matrix, blocks: int) -> int:
    """Places that a row of x has for scales and sums of its groups."""
    variant = matrix.format.variant
    if variant is not None:
        return blocks if variant.group % 64 == 0 else 4 * blocks
    return 2 * blocks if matrix.group == 32 else blocks


def as_halves(matrix: Matrix, rows: int) -> bool:
    """Whether all rows take the products of one: cuda/gemv_bits.cuh."""
    variant = matrix.format.variant
    return variant is not None and variant.group % 64 != 0 and rows >= HALVES_FROM


def slice_blocks(matrix: Matrix, slices: int) -> tuple[int, int, int]:
    """(blocks that inputs are cut at, of the longest slice, of the shortest): the sizes of
    gemv.cuh.
    """
    total = matrix.blocks
    grouped = matrix.format.grouped
    group = matrix.group
    unit = _unit_blocks(matrix)
    cut = group // 64 if grouped and 64 * unit < group < matrix.in_features else unit
    cuts = math.ceil(total / cut)
    return (
        cut,
        min(total, math.ceil(cuts / slices) * cut),
        cuts // slices * cut - (cuts * cut - total),
    )


def _stage_blocks(matrix: Matrix, total: int, shortest: int, stage_bytes: int) -> int:
    """Of about `stage_bytes`, whole groups, such that no stage of the shortest slice is empty."""
    grouped = matrix.format.grouped
    group = matrix.group
    step = 2 if grouped else 1
    if grouped and group < matrix.in_features:
        step = max(1, group // 64)
    count = max(1, round(total * matrix.format.block_bytes / stage_bytes))
    while True:
        found = min(
            math.ceil(math.ceil(total / count) / step) * step, math.ceil(total / step) * step
        )
        if (math.ceil(total / found) - 1) * found < shortest or count == 1:
            return found
        count -= 1


@functools.cache
def plan(matrix: Matrix, rows: int, wanted: Wanted, limit: int, least: int) -> Plan | None:
    """The plan with as many stages as fit into `limit` bytes; it takes at least `least`. None: too
    few stages fit.
    """
    form = matrix.format
    group = matrix.group
    warps = wanted.warps
    _, total, shortest = slice_blocks(matrix, wanted.slices)
    own = _own_units(matrix, wanted)
    stage_blocks = _stage_blocks(matrix, total, shortest, wanted.stage_bytes)
    if own:
        stage_blocks = warps * own * _unit_blocks(matrix)
    parts = warps if own else 1
    groups = math.ceil(stage_blocks // parts * 64 / group) * parts if form.grouped else 0
    stage = stage_blocks * form.block_bytes + groups * form.record_bytes
    sums = _input_scales(matrix, total) * rows * 8 if form.grouped else 8 * rows
    slots = wanted.slots or max(1, min(wanted.tiles, 16 // rows))
    floats = form.floats or as_halves(matrix, rows)
    x_row = total * 128 + 64 if floats else (total | 1) * 64 * (2 if form.grouped else 1)
    statistics = rows * warps * 8 if rows == 1 else rows * (math.ceil(total / 4) + 1) * 8
    partial = slots * warps * 16 * rows * 4
    held = _held_slots(matrix, wanted, stage_blocks, x_row)
    if held:
        slots = held
        partial = 0
    if wanted.in_registers:
        # of 128 inputs, in a warp
        units = math.ceil(total / stage_blocks) * math.ceil(stage_blocks / 2 / warps)
        most = SPREAD_UNITS if rows <= SPREAD_ROWS else REGISTER_UNITS
        if wanted.paired:
            most = PAIR_UNITS
        if units > most or total < 2 * warps:
            return None
        x_row = 0
        statistics = rows * (warps + 1) * 8
        partial = max(partial, (total + 1) * 128)  # or the norm's weights
    if wanted.paired:  # what comes from the other CTA
        partial += slots * 16 * rows * 4 + 8 * rows + 32
    fixed = rows * x_row + sums + partial + statistics + 16 * 16 + 256 + wanted.more
    stages = min(16, (limit - fixed) // stage)
    if stages < wanted.fewest:
        return None
    shared = max(fixed + stages * stage, least)
    return Plan(
        stage_blocks,
        stages,
        slots,
        shared,
        warps,
        wanted.in_registers,
        own,
        held_inputs=held > 0,
    )


def plan_beside(matrix: Matrix, rows: int, wanted: Wanted, device: Gpu) -> Plan | None:
    """With room for another kernel on the same SM."""
    return plan(matrix, rows, wanted, device.shared_beside(RESERVED_BESIDE), device.shared_least)


def plan_alone(matrix: Matrix, rows: int, wanted: Wanted, device: Gpu) -> Plan | None:
    return plan(matrix, rows, wanted, device.shared_alone(RESERVED_ALONE), device.shared_least)


def _exclusive_plan(matrix: Matrix, rows: int, wanted: Wanted, device: Gpu) -> Plan | None:
    """With an SM for itself in any case, x in registers where format, groups and length of the rows
    allow it.
    """
    found = None
    if "gemv_registers" in matrix.format.kernels and rows == 8 and matrix.group % 128 == 0:
        in_registers = dataclasses.replace(wanted, fewest=3, in_registers=True, warps=8)
        found = plan_alone(matrix, rows, in_registers, device)
    found = found or plan_alone(matrix, rows, wanted, device)
    return found and dataclasses.replace(found, shared=max(found.shared, device.shared_excluding))


def _has_registers(matrix: Matrix, rows: int) -> bool:
    """Whether x of these rows may be in registers beside another kernel."""
    return "gemv_registers" in matrix.format.kernels and rows in (4, 8) and matrix.group % 128 == 0


def _registers_beside_plan(matrix: Matrix, rows: int, wanted: Wanted, device: Gpu) -> Plan | None:
    """x of four or eight rows in registers, with room for another kernel."""
    if not _has_registers(matrix, rows):
        return None
    warps = REGISTER_WARPS
    slots = max(1, min(wanted.tiles, 2 * warps // rows))  # an output of a round to a thread
    wanted = dataclasses.replace(wanted, fewest=3, in_registers=True, warps=warps, slots=slots)
    found = plan_beside(matrix, rows, wanted, device)
    return found and dataclasses.replace(found, beside=True)


@functools.cache
def pair_plan(matrix: Matrix, rows: int, device: Gpu, *, tiles: int, more: int = 0) -> Plan | None:
    """The same in pairs of CTAs with so many tiles each, where no warp then has more to do."""
    warps = REGISTER_WARPS
    if not _has_registers(matrix, rows) or matrix.blocks % (4 * warps):
        return None
    wanted = Wanted(
        tiles,
        warps,
        tuned.of(device).gemv.stage_bytes,
        more,
        slices=2,
        fewest=3,
        slots=tiles,
        in_registers=True,
        paired=True,
    )
    found = plan_beside(matrix, rows, wanted, device)
    return found and dataclasses.replace(found, beside=True, paired=True)


@functools.cache
def fitting_plan(
    matrix: Matrix,
    rows: int,
    device: Gpu,
    *,
    tiles: int,
    more: int = 0,
    alone: bool = False,
    attends: bool | None = None,
    lone_row: bool = False,
) -> Plan | None:
    """Beside another kernel, or else (or `alone`: in any case) with an SM for itself; None where
    even that is too much. `attends`: attention follows in the same launch, which takes all warps,
    those without a share of the last stages, too; True: x is in registers, where that leaves room
    for another kernel.

    Several rows leave less room: three smaller stages keep memory busier than two large ones.
    """
    numbers = tuned.of(device)
    own = numbers.formats[matrix.format.name]
    wanted = Wanted(
        tiles,
        own.gemv_warps,
        more=more,
        stage_bytes=own.gemv_stage_bytes or numbers.gemv.stage_bytes,
        slots=max(1, min(tiles, numbers.gemv.slots // rows)),
        own_bytes=own_bytes(device),
        lone_row=lone_row,
    )
    if wanted.own_bytes and attends is None:
        wanted = dataclasses.replace(wanted, warps=_busy_warps(matrix, wanted))
    if alone:
        return _exclusive_plan(matrix, rows, wanted, device)
    if attends and (found := _registers_beside_plan(matrix, rows, wanted, device)):
        return found
    several: list[dict[str, Any]] = [
        dict(fewest=3),
        dict(fewest=3, stage_bytes=min(8192, wanted.stage_bytes)),
        dict(fewest=3, stage_bytes=min(8192, wanted.stage_bytes), slots=1),
        {},
    ]
    if wanted.own_bytes:
        # One row of codes rather has two stages than smaller shares or those of fewer warps, one of
        # 16-bit weights has not (sm_89 in workshop/chain-trials-h200.jsonl); others were not tried.
        two: list[dict[str, Any]] = [{}] if rows == 1 and matrix.format.grouped else []
        smaller: dict[str, Any] = dict(own_bytes=wanted.own_bytes // 2)
        warps = max(FEWEST_WARPS, wanted.warps // 2)
        slots = max(1, min(wanted.slots or 1, 2 * warps // rows))
        fewer: dict[str, Any] = dict(fewest=3, warps=warps, slots=slots)
        several = [several[0], *two, smaller | dict(fewest=3), fewer, *several[-2:], smaller]
    if rows == 1 and not wanted.own_bytes:  # stages of the format's own size may leave no room
        several = [{}, dict(stage_bytes=min(numbers.gemv.stage_bytes, wanted.stage_bytes))]
    for options in several:
        if found := plan_beside(matrix, rows, dataclasses.replace(wanted, **options), device):
            return found
    return plan_alone(matrix, rows, wanted, device)


def leaves_room(found: Plan, device: Gpu) -> bool:
    """Whether another kernel fits beside on an SM: registers are limited to half of them unless x
    takes them all.
    """
    registers = found.beside or not found.in_registers
    return registers and found.shared <= device.shared_beside(RESERVED_BESIDE)


def fits(matrix: Matrix, rows: int, device: Gpu) -> bool:
    return fitting_plan(matrix, rows, device, tiles=16 // rows) is not None


def fits_beside(matrix: Matrix, rows: int, device: Gpu) -> bool:
    found = fitting_plan(matrix, rows, device, tiles=16 // rows)
    return found is not None and leaves_room(found, device)
