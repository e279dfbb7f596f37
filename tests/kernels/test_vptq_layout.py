"""The VPTQ layout without a GPU: a slow copy of the kernel's indexing must give the reference product."""

import pytest
import torch

from flyweight.kernels import vptq
from flyweight.tensors import VectorQuant


def fragment_product(entries, x_of_lane):
    """One step as the matrix unit sees it: entries [32 lanes, 8], x [32 lanes] → 8 sums."""
    a, b = torch.zeros(16, 16, dtype=torch.float64), torch.zeros(16, 8, dtype=torch.float64)
    for lane in range(32):
        group, t = lane // 4, lane % 4
        for quarter in range(4):  # ldmatrix .trans: register q holds entries 2t and 2t + 1 of quarter q, output g
            row, column = group + 8 * (quarter % 2), 2 * t + 8 * (quarter // 2)
            a[row, column : column + 2] = entries[8 * quarter + 2 * t : 8 * quarter + 2 * t + 2, group]
        half, register = lane >> 2 & 1, lane >> 3 & 1
        b[2 * t + half + 8 * register, group] = x_of_lane[lane]
    d = a @ b
    return d[:8, :4].sum(1) + d[8:, 4:].sum(1)


def fields(word, form):
    main = word & ((1 << form.main) - 1)
    residual = word >> form.main & ((1 << form.residual) - 1)
    return main, residual, word >> (form.main + form.residual) & ((1 << form.position) - 1)


def staged_x(weight, x):
    """The stored columns of x, scaled, and the sum of bias · x; x [in]."""
    affine = weight.affine.long() & 0xFFFFFFFF
    scale = (affine & 0xFFFF).to(torch.uint16).view(weight.dtype).double()
    bias = (affine >> 16).to(torch.uint16).view(weight.dtype).double()
    used = affine != 0
    source = torch.arange(affine.numel()) if weight.source is None else weight.source.long() & 0xFFFF
    values = torch.where(used, x.double()[torch.where(used, source, 0)], 0)
    return values * scale, (values * bias).sum()


def entry_table(book, residual, halves):
    """Sum of main and residual entry, [halves] of a function of the two indices."""
    def entry(h, main, extra):
        value = book[h, main].double()
        return value if residual is None else value + residual[h, extra].double()
    return [lambda m, r, h=h: entry(h, m, r) for h in range(halves)]


def dense_sums(weight, block, x):
    sums = torch.zeros(8 * weight.halves, dtype=torch.float64)
    for step in range(weight.dense_steps):
        for h in range(weight.halves):
            lanes = weight.dense[block, step, h].double().view(8, 4, 4, 2)  # [g, t, quarter, pair]
            entries = lanes.permute(2, 1, 3, 0).reshape(32, 8)
            sums[8 * h : 8 * h + 8] += fragment_product(entries, x[32 * step : 32 * step + 32])
    return sums


def lane_words(weight, block):
    """Words of one row block, [steps, 32], read as the kernel reads its chunks."""
    chunks = weight.stream[block].long()  # [chunks, bytes]
    size = weight.form.item_bytes
    first, rest = chunks[:, :512].view(-1, 32, 16), chunks[:, 512:].view(-1, 32, 8 * size - 16)
    octets = torch.cat([first, rest], 2).view(-1, 32, 8, size)
    return sum(octets[..., i] << (8 * i) for i in range(size)).transpose(1, 2).reshape(-1, 32)


def multiply_staged(weight, x):
    scaled, bias = staged_x(weight, x)
    tables = entry_table(weight.book[0], None if weight.residual is None else weight.residual[0], weight.halves)
    rows = []
    for block in range(weight.row_blocks):
        words = lane_words(weight, block)
        sums = dense_sums(weight, block, scaled[256 * weight.chunks :])
        for step in range(words.shape[0]):
            main, extra, position = fields(words[step], weight.form)
            at = step - step % weight.form.window + position if weight.form.position else torch.full((32,), step)
            x_of_lane = scaled[32 * at + torch.arange(32)]
            for h in range(weight.halves):
                sums[8 * h : 8 * h + 8] += fragment_product(tables[h](main, extra), x_of_lane)
        rows.append(sums[: weight.length] + bias)
    return torch.cat(rows)[: weight.out_features]


def multiply_sliced(weight, x):
    scaled, bias = staged_x(weight, x)
    words, offsets = weight.stream.long() & 0xFFFFFFFF, weight.offsets.tolist()
    rows = []
    for block in range(weight.row_blocks):
        sums = dense_sums(weight, block, scaled[weight.ranges * (weight.width + 2) :])
        for piece in range(weight.slices):
            extra_book = None if weight.residual is None else weight.residual[piece if weight.residual.shape[0] > 1 else 0]
            tables = entry_table(weight.book[piece], extra_book, weight.halves)
            for r in range(weight.ranges):
                at = (block * weight.slices + piece) * weight.ranges + r
                for step in range(offsets[at], offsets[at + 1]):
                    main, extra, position = fields(words[step], weight.form)
                    x_of_lane = scaled[r * (weight.width + 2) + position]
                    for h in range(weight.halves):
                        sums[8 * h : 8 * h + 8] += fragment_product(tables[h](main, extra), x_of_lane)
        rows.append(sums[: weight.length] + bias)
    return torch.cat(rows)[: weight.out_features]


CASES = {
    "seed format, 3 bytes": dict(shape=(24, 512), main=8192, residual=256),
    "window of 16 steps": dict(shape=(16, 512), main=4096, residual=256),
    "window of 4 steps": dict(shape=(16, 256), main=8192, residual=512),
    "no residual": dict(shape=(16, 256), main=256, residual=None),
    "ragged": dict(shape=(21, 190), main=300, residual=200),
    "outliers and permutation": dict(shape=(24, 300), main=256, residual=256, outliers=44, permute=True),
    "vectors of 4": dict(shape=(22, 128), main=256, residual=256, length=4),
    "vectors of 16": dict(shape=(40, 128), main=256, residual=256, length=16, outliers=32, outlier_length=8),
    "vectors of 12, plain columns": dict(shape=(24, 128), main=256, residual=None, length=12, normalize=False),
    "slices of a large codebook": dict(shape=(16, 640), main=65536, residual=256),
    "slices, outliers, permutation": dict(shape=(20, 400), main=16384, residual=None, outliers=40, permute=True),
    "groups": dict(shape=(16, 384), main=64, residual=16, groups=3),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernel_indexing_gives_the_reference_product(case):
    options = dict(case)
    tensor = VectorQuant.random(options.pop("shape"), seed=3, **options)
    weight = vptq.prepare(tensor, dtype=torch.bfloat16, batch=4000)
    x = torch.randn(tensor.in_features).bfloat16()
    multiply = multiply_staged if weight.offsets is None else multiply_sliced
    expected = tensor.matmul_reference(x[None])[0]
    torch.testing.assert_close(multiply(weight, x), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("item_bytes, position", [(3, 0), (3, 2), (4, 0), (4, 4), (4, 5)])
def test_every_item_format_holds_the_same_weight(item_bytes, position):
    tensor = VectorQuant.random((16, 700), seed=1, main=1024, residual=256)
    weight = vptq.prepare(tensor, dtype=torch.bfloat16, item_bytes=item_bytes, position=position)
    x = torch.randn(700).bfloat16()
    torch.testing.assert_close(multiply_staged(weight, x), tensor.matmul_reference(x[None])[0], rtol=1e-6, atol=1e-7)


def cycles(banks):
    """Mean over steps of how often the fullest bank must be served; banks [groups, 8, window]."""
    return torch.nn.functional.one_hot(banks.long(), vptq.BANKS).sum(1).amax(-1).float().mean().item()


@pytest.mark.parametrize("window, at_most", [(4, 2.1), (8, 1.9), (16, 1.7)])
def test_schedule_is_a_permutation_with_fewer_clashes(window, at_most):
    banks = torch.randint(0, 8, (500, 8, window), generator=torch.Generator().manual_seed(0))
    order = vptq.schedule(banks).long()
    assert torch.equal(order.sort(2).values, torch.arange(window).expand_as(order))
    assert cycles(banks) > 2.5
    assert cycles(banks.gather(2, order)) < at_most


def test_items_take_three_bytes_where_they_fit():
    small = vptq.prepare(VectorQuant.random((16, 1024), main=8192, residual=512), dtype=torch.bfloat16)
    assert small.stream.numel() == 2 * 1024 * 3
    large = vptq.prepare(VectorQuant.random((16, 4096), main=65536, residual=256), dtype=torch.bfloat16)
    assert large.stream.numel() * 4 < 2 * 4096 * 4 * 1.2  # padding of the lists


def test_why_not_names_the_obstacle():
    wide = VectorQuant.random((8, 64), main=16, residual=1024)
    assert vptq.why_not(wide, torch.bfloat16) == "1024 residual centroids are more than 512"
    assert "float32" in vptq.why_not(VectorQuant.random((8, 64), main=16), torch.float32)
    assert vptq.why_not(VectorQuant.random((8, 64), main=16), torch.float16) is None
