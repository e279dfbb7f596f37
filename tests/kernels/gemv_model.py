"""What the lanes of gemv*.cu and batch*.cu do, in numpy: the same index formulas, for tests without a GPU.

Shared memory is an array of bytes that is addressed as the kernels address it; the matrix units are spelled out register
by register (PTX's fragments of m16n8k32 and m16n8k16). Bytes that nobody wrote are poison, so a wrong address shows.
"""

import numpy as np

LANE = np.arange(32)
G, T = LANE // 4, LANE % 4
POISON = 0x7F


def mma32(a: np.ndarray, b: np.ndarray, accumulators: np.ndarray) -> None:
    """a int [32 lanes, 4 words, 4 bytes], b int [32, 2, 4] → accumulators [32, 4] += D, m16n8k32."""
    left, right = np.zeros((16, 32), np.int64), np.zeros((32, 8), np.int64)
    for i in range(4):
        for word in range(4):
            left[G + 8 * (word % 2), 16 * (word // 2) + 4 * T + i] = a[:, word, i]
        for word in range(2):
            right[16 * word + 4 * T + i, G] = b[:, word, i]
    product = left @ right
    for j in range(4):
        accumulators[:, j] += product[G + 8 * (j // 2), 2 * T + j % 2]


def mma16(a: np.ndarray, b: np.ndarray, accumulators: np.ndarray) -> None:
    """a float [32, 4 words, 2 halves], b float [32, 2, 2] → accumulators [32, 4] += D, m16n8k16."""
    left, right = np.zeros((16, 16)), np.zeros((16, 8))
    for i in range(2):
        for word in range(4):
            left[G + 8 * (word % 2), 8 * (word // 2) + 2 * T + i] = a[:, word, i]
        for word in range(2):
            right[8 * word + 2 * T + i, G] = b[:, word, i]
    product = left @ right
    for j in range(4):
        accumulators[:, j] += product[G + 8 * (j // 2), 2 * T + j % 2]


def bf16(raw: np.ndarray) -> np.ndarray:
    """Pairs of bytes as bfloat16 numbers."""
    return (np.ascontiguousarray(raw).view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to nearest even, as bytes [..., 2]."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)[..., None].view(np.uint8)


def convert(values: np.ndarray, *, lanes: int, larger: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """`convert` of piece.cuh for integer weights. values [32, 8]: high and low bytes [32, 8], sums and scales [32]."""
    peak = np.maximum(np.abs(values).max(1), 1e-30).reshape(-1, lanes).max(1).repeat(lanes)
    factor = 32512 / peak
    q = np.rint(values * factor[:, None]).astype(np.int64)
    sums = q.sum(1).reshape(-1, lanes).sum(1).repeat(lanes)
    low = ((q & 0xFF) ^ 0x80) - 0x80
    high = ((((q + 128) >> 8) & 0xFF) ^ 0x80) - 0x80
    assert (256 * high + low == q).all()
    return high.astype(np.int8), low.astype(np.int8), sums * larger, 1 / (factor * larger)


def multiply_block(kind: str, block: np.ndarray, x: np.ndarray, address, tiles: int, sets: int, acc: np.ndarray) -> None:
    """multiply_block of gemv_products.cuh. block: the bytes of 16 × 64 weights; x: bytes of shared memory; `address(n)`: where
    lane [32] reads column tile n; acc [sets, tiles, 32, 4]."""
    if kind == "plain":
        words = bf16(block.reshape(4, 32, 16)).reshape(4, 32, 4, 2)
        for half in range(2):
            for n in range(tiles):
                b = bf16(x[(address(n) + half * 64)[:, None] + np.arange(16)]).reshape(32, 4, 2)
                mma16(words[2 * half], b[:, :2], acc[half % sets, n])
                mma16(words[2 * half + 1], b[:, 2:], acc[half % sets, n])
        return
    if kind == "int4":
        q = block.reshape(32, 4, 4).astype(np.int64)
        a = (q & 15, q >> 4 if sets == 1 else q & 0xF0)
    else:
        q = block.reshape(2, 32, 4, 4)
        a = tuple((q.view(np.int8) if kind == "w8a8" else q).astype(np.int64))
    for n in range(tiles):
        b = x[address(n)[:, None] + np.arange(16)].view(np.int8).astype(np.int64).reshape(32, 4, 4)
        mma32(a[0], b[:, :2], acc[0, n])
        mma32(a[1], b[:, 2:], acc[sets - 1, n])


def add_group(total, value, records, groups, rows: int, scale_of) -> None:
    """add_group of gemv_products.cuh. total, value [tiles, 32, 2]; records uint32 [16]; groups {sum, scale} [rows, 2]."""
    for n in range(total.shape[0]):
        sums, scales = groups[np.minimum(T + 4 * n, rows - 1)].T
        for j in range(2):
            record = records[G + 8 * j].astype(np.int64)
            total[n, :, j] += (value[n, :, j] - (record >> 16) * sums) * scale_of(record & 0xFFFF) * scales


def scaled_unit(acc: np.ndarray, *, int4: bool) -> np.ndarray:
    """acc [sets, tiles, 32, 4] → value [sets, tiles, 32, 2]: both planes of x, and (int4 in two sets) of the weights."""
    sets = acc.shape[0]
    value = 256 * acc[..., 0::2] + acc[..., 1::2]
    if int4 and sets == 2:
        value[0] *= 16
    return value
