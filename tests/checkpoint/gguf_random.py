"""Random blocks of every GGUF type, with scales that a model might have."""

import numpy as np

from flyweight.checkpoint.gguf_blocks import TYPES

HALVES = {  # type → where its float16 numbers begin in a block
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}
BLOCK_TYPES = {kind.name: number for number, kind in TYPES.items() if kind.read is not None}


def random_blocks(
    name: str, rows: int, columns: int, seed: int = 0, exponent: int = 6
) -> np.ndarray:
    """uint8 [rows, bytes]; every float16 in it is between 2^(exponent − 15) and eight times
    that."""
    kind = TYPES[BLOCK_TYPES[name]]
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, (rows, columns // kind.inputs, kind.nbytes), dtype=np.uint8)
    for at in HALVES[name]:
        raw[..., at + 1] = raw[..., at + 1] & 0x83 | exponent << 2
    if name == "MXFP4":  # an exponent of 8 bits
        raw[..., 0] = raw[..., 0] % 16 + 118
    return raw.reshape(rows, -1)
