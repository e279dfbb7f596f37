"""Compile the Triton kernels for the architectures in argv, as at Qwen3-8B's sizes. No GPU is
needed; run by a test.
"""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flyweight.kernels import triton_ops
from flyweight.kernels.attention import tiles
from flyweight.kernels.attention import triton as triton_attention
from flyweight.kernels.gated_delta import prefill
from flyweight.kernels.gated_delta.shape import DeltaShape
from flyweight.quant.triton import columns, nearest, vectors

FLOAT, SCALES, TABLE = "*bf16", "*fp32", "*i32"
NORM = dict(x=FLOAT, weight=FLOAT, out=FLOAT)
ROPE = dict(
    qkv=FLOAT,
    cos=SCALES,
    sin=SCALES,
    slots="*i64",
    norm=FLOAT,
    keys=FLOAT,
    values=FLOAT,
    HEADS=32,
    KV_HEADS=8,
    HEAD_DIM=128,
    HALF=64,
    BLOCK=64,
    REST_BLOCK=1,
    HEAD_BLOCK=16,
)
ATTEND = dict(
    query=FLOAT,
    keys=FLOAT,
    values=FLOAT,
    out=FLOAT,
    tables=TABLE,
    tiles=TABLE,
    GROUP=4,
    HEAD_DIM=128,
    BLOCK=128,
    PAGE=16,
    WINDOW=0,
    CODES=0,
    SOFT_CAP=0.0,
    key_scales=None,
    value_scales=None,
)
CODED = dict(key_scales="*bf16", value_scales="*bf16")
PARTS = dict(parts=SCALES, sums=SCALES)
COLUMN = dict(values_at=SCALES, matrix_at=SCALES, scale_at=SCALES, bias_at=SCALES)
FOUND = dict(least_at=SCALES, index_at=TABLE, parts="i32")
NEAREST = (
    COLUMN
    | FOUND
    | dict(
        points_at=SCALES,
        high_at="*fp16",
        low_at="*fp16",
        squares_at=SCALES,
        COLUMN=True,
        DESCENT=True,
        KEEP=1,
        VECTORS=64,
        ENTRIES=128,
        WIDTH=16,
    )
)
PAIR = (
    COLUMN
    | FOUND
    | dict(
        tile_at=SCALES,
        main_at=SCALES,
        residual_at=SCALES,
        first_at="*i64",
        second_at="*i64",
        rounded_at=SCALES,
        errors_at=SCALES,
        BEAM=4,
        LENGTH=8,
        WIDE=8,
        PARTS=64,
        RESIDUALS=256,
        DESCENT=True,
        VECTORS=16,
        LATER=16,
    )
)
WALK = dict(
    tile_at=SCALES,
    matrix_at=SCALES,
    scales_at=SCALES,
    zeros_at=SCALES,
    kept_at="*i8",
    values_at=SCALES,
    codes_at=SCALES,
    errors_at=SCALES,
    DESCENT=True,
    MASKED=True,
    COLUMNS=128,
    OUTPUTS=32,
)


def row(size: int, **changes) -> dict:
    return triton_ops._shape_of(size) | changes


def tile(size: int) -> dict:
    shape = tiles.LARGE[size]
    return dict(
        ROWS=shape.rows, COLUMNS=shape.columns, num_warps=shape.warps, num_stages=shape.stages
    )


CASES = [
    (triton_ops._norm, NORM | row(4096)),
    (triton_ops._norm, NORM | row(20480)),
    (triton_ops._silu_mul, dict(gate_up=FLOAT, out=FLOAT, SIZE=12288, BLOCK=1024)),
    (triton_ops._rope_norm_write, ROPE),
    (triton_attention._attend, ATTEND | tile(128)),
    *(
        (
            triton_attention._attend,
            ATTEND | tile(128) | CODED | dict(keys=codes, values=codes, CODES=number),
        )
        for number, codes in ((1, "*u8"), (2, "*i8"))
    ),
    (triton_attention._attend, ATTEND | tile(256) | dict(HEAD_DIM=256, BLOCK=256)),
    (
        triton_attention._attend,
        ATTEND | tile(128) | PARTS | dict(ROWS=16, GROUP=7, HEAD_DIM=96, WINDOW=4096),
    ),
    (triton_attention._attend, ATTEND | tile(128) | dict(sinks=FLOAT, SOFT_CAP=72.0)),
    (nearest._nearest, NEAREST),
    (nearest._nearest, NEAREST | dict.fromkeys(COLUMN) | dict(COLUMN=False, DESCENT=False)),
    (vectors._pair, PAIR),
    (
        vectors._pair,
        PAIR
        | dict(
            values_at=None, residual_at=None, BEAM=1, RESIDUALS=0, LENGTH=3, WIDE=4, DESCENT=False
        ),
    ),
    (columns._walk, WALK),
    (
        triton_attention._add_parts,
        PARTS | dict(merges=TABLE, out=FLOAT, GROUP=4, HEAD_DIM=128, BLOCK=128, ROWS=16),
    ),
]
DELTA = dict(
    mixed=FLOAT,
    projected=FLOAT,
    decay=SCALES,
    step_bias=SCALES,
    states=TABLE,
    inverses=SCALES,
    recurrent=SCALES,
    conv=FLOAT,
    weight=SCALES,
    sums=SCALES,
    norm=SCALES,
    out=FLOAT,
)
CHANNELS = DELTA | dict(
    CHANNELS_ALL=8192, WIDTH=4, TOKENS=prefill.TOKENS, CHANNELS=prefill.CHANNELS
)
CHUNKS = DELTA | prefill.constants_of(DeltaShape(16, 32, 128, 128, 4)) | dict(VALUE_DIM=128)
CASES += [
    (prefill._convolve, CHANNELS),
    (prefill._remember, CHANNELS),
    (prefill._invert, CHUNKS),
    (prefill._scan, CHUNKS | dict(VALUES=prefill.VALUES, num_stages=1, out=SCALES)),
    (prefill._finish, DELTA | dict(HEADS=32, VALUE_DIM=128, GATE=8192, BLOCK=128, num_warps=1)),
]
# others are int32, pointers without a name None
NUMBERS = dict.fromkeys(("epsilon", "query_scale", "scale", "steps"), "fp32")


def compile_case(kernel, given: dict, arch: int) -> bytes:
    options = {
        name: given[name]
        for name in ("num_warps", "num_stages", "enable_fp_fusion")
        if name in given
    }
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = given.get(parameter.name)
        pointer = parameter.name.endswith("_at") or parameter.name in (
            "scales",
            "parts",
            "sums",
            "sinks",
            "norm",
            "key_scales",
            "value_scales",
        )
        if pointer and value is None:
            constants[(i,)], signature[parameter.name] = None, "constexpr"
        elif isinstance(value, str):
            signature[parameter.name], attributes[(i,)] = value, [["tt.divisibility", 16]]
        elif parameter.is_constexpr:
            constants[(i,)], signature[parameter.name] = value, "constexpr"
        else:
            signature[parameter.name] = NUMBERS.get(parameter.name, "i32")
    return triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", arch, 32),
        options=options,
    ).asm["cubin"]


# Triton's own compiler knows the differences between architectures: of all but the last one case of
# each kernel is enough.
FEW = list({kernel.__name__: (kernel, given) for kernel, given in CASES}.values())
*before, last = map(int, sys.argv[1:])
for arch, cases in [*((arch, FEW) for arch in before), (last, CASES)]:
    for kernel, given in cases:
        assert compile_case(kernel, given, arch)[:4] == b"\x7fELF"
    print(len(cases), "compiled for", arch)
