"""The linear of 9 to 64 rows on a CPU: every index formula of batch_pack.cu and batch.cu run lane by lane, and how it is cut."""

import gemv_model as model
import numpy as np
import pytest
import torch

from flyweight.kernels import batch, gemv
from flyweight.tensors import Int8Channel, IntGroup, Plain

SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (4608, 3584), (3584, 18944), (37888, 3584), (2560, 9728)]


def pack(weight: gemv.Gemv, x: np.ndarray, rows: int, *, parts: int, threads: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """batch_pack.cu: images [steps, bytes] and the factor of each row."""
    kind, group = weight.kind, weight.group
    pieces = -(-x.shape[1] // 128) * 16
    held, warps = -(-pieces // threads), threads // 32
    unit = 2 if kind in gemv.GROUPED and group % 128 == 0 else 1
    sharers = 4 if group == 32 else unit * 8
    planes = 2 if kind in gemv.GROUPED else 1
    groups_at = rows * planes * (256 if kind == "plain" else 128)
    images = np.full((pieces // 16, batch.x_bytes(kind, group, rows)), model.POISON, np.uint8)
    written = np.zeros(images.shape, int)
    factors = np.ones(rows)

    def store(step, at, values):
        for s, a, v in zip(step, at, values, strict=True):
            images[s, a:a + len(v)] = v
            written[s, a:a + len(v)] += 1

    for row in range(rows):
        values = np.zeros((held * threads, 8))
        if row < len(x):
            values[:x.shape[1] // 8] = x[row].reshape(-1, 8)
        most = np.abs(values).max()
        factors[row] = max(most, 127e-12) / 127 if kind == "w8a8" else 1
        for part in range(parts):
            for i in range(held):
                if i * parts // held != part and held >= parts:
                    continue
                for warp in range(warps):
                    piece = i * threads + warp * 32 + model.LANE
                    if held < parts and warp % parts != part:
                        continue
                    inside = piece < pieces
                    step, place = piece[inside] // 16, piece[inside] % 16
                    v = values[piece]
                    if kind == "plain":
                        store(step, row * 256 + ((place * 16) ^ (row % 2 * 64)), model.to_bf16(v).reshape(32, 16)[inside])
                        continue
                    to, column = place // 8 * 64 + place % 4 * 16 + place // 4 % 2 * 8, row * planes
                    if kind == "w8a8":
                        factor = np.float32(127) / np.float32(max(most, 127e-12))
                        codes = np.rint(v.astype(np.float32) * factor).astype(np.int8).view(np.uint8)
                        store(step, column * 128 + (to ^ (column % 2 * 64)), codes[inside])
                        continue
                    high, low, sums, scales = model.convert(v, lanes=sharers, larger=16 if kind == "int4" and group == 32 else 1)
                    store(step, column * 128 + (to ^ (column % 2 * 64)), high.view(np.uint8)[inside])
                    store(step, (column + 1) * 128 + (to ^ 64), low.view(np.uint8)[inside])
                    first = inside & (model.LANE % sharers == 0)
                    words = np.stack([sums.astype(np.int32), scales.astype(np.float32).view(np.int32)], 1)[first]
                    at = groups_at + (piece[first] % 16 // sharers * rows + row) * 8
                    store(piece[first] // 16, at, words.view(np.uint8).reshape(-1, 8))
    assert (written == 1).all(), "every byte of the images is written once"
    return images, factors


class Cta:
    """One CTA of batch.cu; `choice` as the host makes it."""

    def __init__(self, weight: gemv.Gemv, images: np.ndarray, choice: batch.Choice, *, index: int, grid: int):
        self.weight, self.kind, self.images, self.choice = weight, weight.kind, images, choice
        self.blocks, tiles = -(-weight.in_features // 64), -(-weight.out_features // 16)
        self.steps, self.grouped, group = -(-self.blocks // 2), weight.kind in gemv.GROUPED, weight.group
        cut = group // 128 if self.grouped and 128 < group < weight.in_features else 1
        cuts, groups, slices = -(-self.steps // cut), grid // choice.slices, choice.slices
        self.group, self.slice = index // slices, index % slices
        self.first_tile = self.group * tiles // groups
        self.count = (self.group + 1) * tiles // groups - self.first_tile if self.group < groups else 0
        self.first_step = self.slice * cuts // slices * cut
        self.last_step = min((self.slice + 1) * cuts // slices * cut, self.steps)
        self.unit = 2 if self.grouped and group % 128 == 0 else 1
        self.planes = 2 if self.grouped else 1
        self.column_tiles = choice.rows * self.planes // 8 // choice.column_warps
        self.sets = 2 if self.grouped and group == 32 else 1
        self.records = 128 // group if group < 128 else 1

    def stage(self, done: int, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Weights [tiles, 2 blocks, bytes], records [tiles · records, 16] and x as the loaders bring them."""
        weight, tiles = self.weight, min(self.choice.tiles, self.count - done)
        size = gemv.BLOCK_BYTES[self.kind]
        raw = weight.weights.numpy().reshape(-1, self.blocks, size)
        weights = np.full((self.choice.tiles, 2, size), model.POISON, np.uint8)
        blocks = 1 if self.blocks % 2 and step == self.steps - 1 else 2
        records = np.zeros((self.choice.tiles * self.records, 16), np.uint32)
        for loader in range(batch.LOADERS):
            for i in range(loader, tiles, batch.LOADERS):
                weights[i, :blocks] = raw[self.first_tile + done + i, 2 * step:2 * step + blocks]
        if self.grouped:
            known = weight.records.numpy().view(np.uint32)
            for i in range(tiles * self.records * 4):
                group = min(step * 128 // weight.group + i // 4 % self.records, known.shape[1] - 1)
                tile, words = self.first_tile + done + i // 4 // self.records, slice(i % 4 * 4, i % 4 * 4 + 4)
                records[i // 4, words] = known[tile, group, words]
        return weights, records, self.images[step]

    def sums(self) -> dict[int, np.ndarray]:
        """tile → [16, rows], from this CTA's slice."""
        choice, found = self.choice, {}
        for done in range(0, self.count, choice.tiles):
            stages = {step: self.stage(done, step) for step in range(self.first_step, self.last_step)}
            for warp in range(choice.warps):
                tile_warps = -(-choice.tiles // choice.together)
                mine = warp % tile_warps * choice.together
                first_token = warp // tile_warps * (self.column_tiles * 8 // self.planes)
                for m in range(min(choice.together, min(choice.tiles, self.count - done) - mine)):
                    tile = found.setdefault(self.first_tile + done + mine + m, np.full((16, choice.rows), np.nan))
                    self.multiply(stages, mine + m, first_token, tile)
        return found

    def multiply(self, stages: dict, tile: int, first_token: int, out: np.ndarray) -> None:
        total = np.zeros((self.column_tiles, 32, 2))
        whole = np.zeros((self.sets, self.column_tiles, 32, 4), np.int64 if self.kind == "w8a8" else np.float64)
        odd, size, rows = model.G % 2, 256 if self.kind == "plain" else 128, self.choice.rows
        place = (first_token * self.planes + model.G) * size + model.T * 16
        scales = 0 if not self.grouped else 4 if self.weight.group == 32 else 2 // self.unit
        for step, (weights, records, x) in stages.items():
            groups = x[rows * self.planes * size:].view(np.int32).reshape(-1, 2)[first_token:]
            groups = np.stack([groups[:, 0].astype(np.float64), groups[:, 1].copy().view(np.float32).astype(np.float64)], 1)
            for unit in range(2 // self.unit):
                acc = np.zeros((self.sets, self.column_tiles, 32, 4), np.int64)
                for b in range(self.unit):
                    block = unit * self.unit + b
                    if self.blocks % 2 and block == 1 and step == self.steps - 1:
                        break
                    self.multiply_block(weights[tile, block], x, place, block, odd, size, acc if self.grouped else whole)
                if self.grouped:
                    record = unit * self.unit * 64 // self.weight.group if self.weight.group < 128 else 0
                    value = model.scaled_unit(acc, int4=self.kind == "int4")
                    mine = groups[unit * (scales * self.unit // 2) * rows:]
                    at = tile * self.records + record
                    if self.weight.group == 32:
                        model.add_group(total, value[0], records[at], mine, rows, scale_of)
                        model.add_group(total, value[1], records[at + 1], mine[rows:], rows, scale_of)
                    else:
                        model.add_group(total, value.sum(0), records[at], mine, rows, scale_of)
        for i in range(self.column_tiles * 2 // self.planes):
            n = i if self.grouped else i // 2
            token = first_token + (4 * n + model.T if self.grouped else 8 * n + 2 * model.T + i % 2)
            for half in range(2):
                got = total[n, :, half] if self.grouped else whole[:, n, :, 2 * half + i % 2].sum(0)
                assert np.isnan(out[model.G + 8 * half, token]).all(), "an output belongs to one lane"
                out[model.G + 8 * half, token] = got

    def multiply_block(self, block: np.ndarray, x: np.ndarray, place, index: int, odd, size: int, acc: np.ndarray) -> None:
        if self.kind != "plain":
            at = (index * 64) ^ (odd * 64)
            model.multiply_block(self.kind, block, x, lambda n: place + n * 8 * size + at, self.column_tiles, self.sets, acc)
            return
        words = model.bf16(block.reshape(4, 32, 16)).reshape(4, 32, 4, 2)
        for n in range(self.column_tiles):
            for half in range(2):
                at = place + n * 8 * size + index * 128 + odd * 64 + half * np.where(odd, -64, 64)
                b = model.bf16(x[at[:, None] + np.arange(16)]).reshape(32, 4, 2)
                model.mma16(words[2 * half], b[:, :2], acc[0, n])
                model.mma16(words[2 * half + 1], b[:, 2:], acc[0, n])


def scale_of(bits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(bits.astype(np.uint16)).view(torch.bfloat16).double().numpy()


def made(kind: str, group: int, shape: tuple[int, int], seed: int):
    if kind in ("plain", "w8a8"):
        return (Plain if kind == "plain" else Int8Channel).random(shape, seed)
    return IntGroup.random(shape, seed, bits=int(kind[3:]), group_size=group, dtype=torch.bfloat16)


@pytest.mark.parametrize("kind, group, rows, slices, together", [
    ("plain", 0, 16, 2, 1), ("plain", 0, 50, 1, 2), ("w8a8", 0, 9, 3, 1), ("w8a8", 0, 64, 1, 2), ("int4", 128, 16, 2, 1),
    ("int4", 128, 33, 2, 2), ("int4", 64, 20, 1, 3), ("int4", 32, 12, 2, 1), ("int8", 256, 32, 2, 2), ("int8", -1, 10, 3, 1)])
def test_slices_of_ragged_inputs_add_up_to_the_product(kind, group, rows, slices, together):
    outputs, columns = 72, {128: 384, 256: 768, 32: 416}.get(group, 328)  # 5 tiles; an odd number of blocks, cut off inside one
    torch.manual_seed(rows)
    tensor = made(kind, group, (outputs, columns), rows)
    weight = gemv.prepare(tensor, dtype=torch.bfloat16)
    padded = next(size for size in batch.ROWS if size >= rows)
    choice = batch.Choice(padded, slices, 3, together, batch.column_warps(kind, padded), 3, 0, 0.0)
    x = torch.randn(rows, columns).bfloat16().double()
    images, factors = pack(weight, x.numpy(), padded, parts=132 // padded)
    grid = 2 * slices + 1
    got = np.zeros((5, 16, padded))
    for index in range(grid):
        for tile, sums in Cta(weight, images, choice, index=index, grid=grid).sums().items():
            got[tile] += sums
    got = got.reshape(80, padded)[:outputs, :rows].T * factors[:rows, None]
    if kind == "w8a8":
        got *= weight.channel_scale.double().numpy()
    want = tensor.matmul_reference(x.float()).numpy()
    assert np.linalg.norm(got - want) < 1e-3 * np.linalg.norm(want)  # W8A8: a code that lies halfway may fall the other way


@pytest.mark.parametrize("kind", batch.KINDS)
def test_every_linear_of_the_models_is_cut_so_that_an_sm_holds_one_cta_of_it(kind):
    for outputs, columns in SHAPES:
        for rows in (9, 16, 24, 32, 48, 64):
            choice = batch.choose(kind, outputs, columns, 128 if kind in gemv.GROUPED else 64, rows, 132)
            assert choice is not None and choice.rows >= rows
            assert 114 * 1024 < choice.shared <= 226 * 1024 and choice.stages >= 3
            assert choice.warps <= batch.WARPS and choice.tiles <= 16


def test_an_integer_sum_is_never_taken_for_an_empty_word():
    """mail.cuh's `letter`: all ones would be the largest integer, and no sum of W8A8 is near it."""
    longest = 65536 * 128 * 128
    assert longest < 2**31 - 1 and (2**31 - 1) ^ 0x80000000 == 0xFFFFFFFF
