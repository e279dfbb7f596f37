"""The split linear on a CPU: every index formula of gemv_split.cu run lane by lane, and how the host cuts a linear."""

import gemv_model as model
import numpy as np
import pytest
import torch

from flyweight.kernels import gemv, gemv_split
from flyweight.tensors import IntGroup, Plain

SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (4608, 3584), (3584, 18944), (37888, 3584), (2560, 9728)]


class Cta:
    """One CTA of gemv_split.cu: its slice of the inputs, and its sums of the tiles it is asked for."""

    def __init__(self, weight: gemv.Gemv, x: np.ndarray, *, rows: int, slices: int, index: int, warps: int, stage_blocks: int):
        self.weight, self.kind, self.rows, self.warps, self.stage_blocks = weight, weight.kind, rows, warps, stage_blocks
        columns, group = weight.in_features, weight.group
        self.blocks, self.grouped = -(-columns // 64), weight.kind in gemv.GROUPED
        self.unit = 2 if self.grouped and group % 128 == 0 else 1
        self.planes = 2 if self.grouped else 1
        cut, self.slice, self.shortest = gemv.slice_blocks(self.kind, columns, group, slices)
        cuts = -(-self.blocks // cut)
        self.first = index * cuts // slices * cut
        self.here = min((index + 1) * cuts // slices * cut, self.blocks) - self.first
        self.tiles = -(-rows * self.planes // 8)
        self.sets = 1 if self.tiles > 2 and not (self.grouped and group == 32) else 2
        self.x_row = self.slice * 128 + 64 if self.kind == "plain" else (self.slice | 1) * 64
        self.load(x)

    def load(self, x: np.ndarray) -> None:
        """load_rows, its two loops flattened: (row, 256 inputs) after (row, 256 inputs)."""
        pieces, group = self.slice * 8, self.weight.group
        lanes = 4 if group == 32 else self.unit * 8
        self.shared = np.full(self.rows * self.planes * self.x_row, model.POISON, np.uint8)
        self.groups = np.full((-(-pieces // lanes), self.rows, 2), np.nan)
        self.squares = np.zeros(self.rows)
        for item in range(self.rows * -(-pieces // 32)):
            row, place = item // -(-pieces // 32), item % -(-pieces // 32) * 32 + model.LANE
            piece = self.first * 8 + place
            exists = (row < len(x)) & (piece < x.shape[1] // 8) & (place < self.here * 8)
            values = np.zeros((32, 8))
            values[exists] = x[min(row, len(x) - 1)].reshape(-1, 8)[piece[exists]]
            self.squares[row] += np.square(values).sum()
            inside = place < pieces
            if self.kind == "plain":
                to = row * self.x_row + place[inside] * 16
                self.shared[to[:, None] + np.arange(16)] = model.to_bf16(values[inside]).reshape(-1, 16)
                continue
            larger = 16 if self.kind == "int4" and self.sets == 2 else 1
            high, low, sums, scales = model.convert(values, lanes=lanes, larger=larger)
            to = row * 2 * self.x_row + place // 8 * 64 + place % 4 * 16 + place // 4 % 2 * 8
            for plane, codes in enumerate((high, low)):
                self.shared[(to + plane * self.x_row)[inside, None] + np.arange(8)] = codes[inside].view(np.uint8)
            first = inside & (model.LANE % lanes == 0)
            self.groups[place[first] // lanes, row] = np.stack([sums[first], scales[first]], 1)

    def address(self, block: int):
        step = 128 if self.kind == "plain" else 64
        column = np.minimum(model.G, self.rows * self.planes - 1)
        return lambda n: (column + 8 * n) * self.x_row + model.T * 16 + block * step

    def tile(self, tile: int) -> np.ndarray:
        """The CTA's sums [16, rows] of a tile: stages through the ring, units by turns, warps added up."""
        partial = np.zeros((self.warps, 16, self.rows))
        totals = np.zeros((self.warps, self.tiles, 32, 2))
        whole = np.zeros((self.warps, self.sets, self.tiles, 32, 4), np.int64 if self.grouped else np.float64)
        stages, units = -(-self.slice // self.stage_blocks), -(-self.stage_blocks // self.unit)
        turn, seen = np.arange(self.warps), []
        for start in range(0, stages * self.stage_blocks, self.stage_blocks):
            blocks = min(self.stage_blocks, self.here - start)
            assert blocks > 0, "a stage is empty"
            for warp in range(self.warps):
                for unit in range(turn[warp] * self.unit, self.stage_blocks, self.warps * self.unit):
                    if unit < blocks:
                        seen += range(start + unit, start + min(unit + self.unit, blocks))
                        self.multiply(tile, start, unit, blocks, totals[warp], whole[warp])
            turn = (turn + self.warps - units % self.warps) % self.warps
        assert sorted(seen) == list(range(self.here)), "every block of the slice belongs to one warp"
        for warp in range(self.warps):
            for n in range(self.tiles):
                if self.grouped:
                    for j in range(2):
                        keep = model.T + 4 * n < self.rows
                        partial[warp, (model.G + 8 * j)[keep], (model.T + 4 * n)[keep]] = totals[warp, n, keep, j]
                else:
                    for j in range(4):
                        token = 8 * n + 2 * model.T + j % 2
                        keep = token < self.rows
                        partial[warp, (model.G + 8 * (j // 2))[keep], token[keep]] = whole[warp, :, n, keep, j].sum(1)
        return partial.sum(0)

    def multiply(self, tile: int, start: int, unit: int, blocks: int, total: np.ndarray, whole: np.ndarray) -> None:
        weight, group = self.weight, self.weight.group
        raw = weight.weights.numpy().reshape(-1, self.blocks, gemv.BLOCK_BYTES[self.kind])

        def multiply_block(block: int, acc: np.ndarray) -> None:
            words = raw[tile, self.first + block]
            model.multiply_block(self.kind, words, self.shared, self.address(block), self.tiles, self.sets, acc)

        if not self.grouped:
            return multiply_block(start + unit, whole)
        acc = np.zeros((self.sets, self.tiles, 32, 4), np.int64)
        for b in range(self.unit):
            if unit + b < blocks:
                multiply_block(start + unit + b, acc)
        block, records = start + unit, weight.records.numpy().view(np.uint32)[tile]
        staged = records[(self.first + start) * 64 // group:]  # as the stage's copy of records begins
        at = block * 64 // group - start * 64 // group
        value = model.scaled_unit(acc, int4=self.kind == "int4")

        def scale_of(bits):
            return torch.from_numpy(bits.astype(np.uint16)).view(torch.bfloat16).double().numpy()

        if group == 32:
            model.add_group(total, value[0], staged[at], self.groups[2 * block], self.rows, scale_of)
            if (self.first + block) * 2 + 1 < records.shape[0]:
                model.add_group(total, value[1], staged[at + 1], self.groups[2 * block + 1], self.rows, scale_of)
        else:
            model.add_group(total, value.sum(0), staged[at], self.groups[block // self.unit], self.rows, scale_of)


@pytest.mark.parametrize("kind, group", [("plain", 0), ("int4", 32), ("int4", 64), ("int4", 128), ("int8", 128), ("int8", -1)])
@pytest.mark.parametrize("rows, slices, stage_blocks", [(3, 2, 4), (8, 3, 2), (16, 2, 8)])
def test_slices_of_ragged_inputs_add_up_to_the_product(kind, group, rows, slices, stage_blocks):
    outputs, columns = 24, {0: 1192, 32: 1184, 128: 1152}.get(group, 1216)  # 18 or 19 blocks, not all whole: slices differ
    torch.manual_seed(rows)
    tensor = Plain.random((outputs, columns)) if kind == "plain" else IntGroup.random(
        (outputs, columns), rows, bits=int(kind[3:]), group_size=group, dtype=torch.bfloat16)
    weight = gemv.prepare(tensor, dtype=torch.bfloat16)
    x = torch.randn(rows, columns).bfloat16().float().numpy().astype(np.float64)
    padded = next(size for size in gemv_split.ROWS if size >= rows)
    _, longest, shortest = gemv.slice_blocks(kind, columns, weight.group, slices)
    if (-(-longest // stage_blocks) - 1) * stage_blocks >= shortest:
        stage_blocks = -(-longest // 2) * 2
    ctas = [Cta(weight, x, rows=padded, slices=slices, index=i, warps=8, stage_blocks=stage_blocks) for i in range(slices)]
    assert [c.first for c in ctas[1:]] + [ctas[0].blocks] == [c.first + c.here for c in ctas]
    got = np.concatenate([sum(cta.tile(tile) for cta in ctas) for tile in range(2)])[:outputs, :rows].T
    want = tensor.matmul_reference(torch.from_numpy(x)).numpy()
    assert np.abs(got - want).max() < 1e-3 * np.abs(want).max()
    assert np.allclose(sum(cta.squares for cta in ctas)[:rows], np.square(x).sum(1))


def test_each_word_of_the_mail_is_written_once_and_taken_once():
    """SplitRounds: left by every slice, taken by one, one round later; words of rows and outputs that do not exist never."""
    rows, padded, tiles, slices, slots, threads, outputs = 5, 8, 7, 3, 2, 256, 7 * 16 - 10
    written, taken = {}, {}
    for index in range(slices):
        next_tile = 0
        for first in [*range(0, tiles, slots), tiles]:
            last = min(first + slots, tiles)
            for i in range((last - first) * 16 * padded):
                tile, word = first + i // (16 * padded), i % (16 * padded)
                if word % padded < rows and tile * 16 + word // padded < outputs:
                    place = (tile * slices + index) * 16 * padded + word
                    assert place not in written
                    written[place] = (index, tile, word // padded, word % padded)
            for tile in range(next_tile, first):
                for i in range(16 * padded):
                    row, token = i // padded, i % padded
                    if tile % slices == index and token < rows and tile * 16 + row < outputs:
                        for source in range(slices):
                            place = tile * slices * 16 * padded + row * padded + token + source * 16 * padded
                            assert place not in taken
                            taken[place] = (source, tile, row, token)
            next_tile = max(next_tile, first)
    assert written == taken and len(written) == slices * rows * outputs and threads % padded == 0


@pytest.mark.parametrize("kind", gemv_split.KINDS)
def test_every_linear_of_the_models_can_be_cut_so_that_another_kernel_fits_beside_it(kind):
    for outputs, columns in SHAPES:
        for rows in range(2, 17):
            choice = gemv_split.choose(kind, outputs, columns, 128, rows, 132)
            assert choice is not None and choice.plan.shared <= gemv.SHARED_LIMIT and choice.rows >= rows
            assert choice.plan.stages >= 3 and choice.slices > 1


def test_formats_that_quantize_x_by_its_rows_are_not_cut():
    assert gemv_split.choose("w8a8", 4096, 4096, 64, 8, 132) is None
    assert gemv_split.choose("int4", 4096, 4096, 128, 17, 132) is None
