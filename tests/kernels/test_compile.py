"""Every CUDA source compiles for every architecture it promises, with NVRTC alone: no GPU and no
nvcc needed.
"""

import io
import re

import pytest
import torch

from flyweight.gpu import GPUS
from flyweight.kernels import compiler, jit
from flyweight.kernels.attention import prefill
from flyweight.kernels.linear import gemm, gemv_cluster, tiles
from flyweight.kernels.linear.format import FORMATS
from flyweight.kernels.linear.gemm_shape import Product, shape_for
from flyweight.kernels.linear.tiles import Matrix, TiledWeight
from flyweight.kernels.vptq import rows as vptq_rows
from flyweight.kernels.vptq.choose_layout import lay_out
from flyweight.tensors import IntGroup, VectorQuant

pytest.importorskip("cuda.core", reason="cuda-core is not installed")
pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")
HOPPER = {"gemm.cu", "few.cu", "prefill_attention.cu", "vptq_rows.cu"}  # without a body elsewhere
SEARCH = dict(FP16=1, STEPS=16, REACH=15, WARPS=16)
LINEAR = dict(FP16=0, SCALE_FP16=0, KDIM=4096, NDIM=6144, GROUP=128)
GEMV = LINEAR | dict(
    ROWS=1,
    NORM=1,
    EPILOGUE=0,
    BIAS=0,
    WARPS=16,
    STAGES=4,
    STAGE_BLOCKS=16,
    SLOTS=3,
    HELD=2,
    SHARED_BYTES=220_000,
)
GEMM = LINEAR | dict(
    EPILOGUE=0, BIAS=0, TOKENS=64, WGS=2, SB=2, STAGES=2, SPLIT=1, LOADERS=4, CLUSTER=1, STAGED=64
)
BATCH = dict(
    ROWS=32,
    ROUND=8,
    PER_WARP=2,
    COLUMN_WARPS=2,
    SLICES=4,
    STAGES=3,
    LOADERS=4,
    EPILOGUE=0,
    BIAS=0,
    SHARED_BYTES=220_000,
)
HEADS = dict(
    FP16=0,
    HEADS=32,
    KV_HEADS=8,
    HEAD_DIM=128,
    ROTARY=128,
    PAGE=16,
    QK_NORM=1,
    WINDOW=0,
    WARPS=8,
    SHORTEST=64,
)
PREFILL = dict(FP16=0, HEADS=32, KV_HEADS=8, KEYS=128, WGS=2, STAGES=2)
FUSED = GEMV | HEADS | dict(HEAD_CTAS=16, WARPS=16)
# as GPUs before Hopper run linears of few rows
OLDER = dict(WARPS=8, STAGE_BLOCKS=16, OWN_COPIES=1, OWN_UNITS=1, BY_COUNTERS=1)
# their inputs of a tile in registers, and sums where inputs were
HELD_INPUTS = dict(HELD_INPUTS=1, SLOTS=4)
# x in registers
REGISTERS = dict(ROWS=8, WARPS=8, STAGES=3, STAGE_BLOCKS=32, SLOTS=2, IN_REGISTERS=1)
MMA = LINEAR | dict(
    EPILOGUE=0,
    BIAS=0,
    OUT_WARPS=2,
    TOKEN_WARPS=2,
    PER_WARP=1,
    COLUMNS=2,
    SB=1,
    STAGES=3,
    SPLIT=1,
    CTAS=1,
)
FEW = dict(
    FORMAT=1,
    BIAS=0,
    EPILOGUE=1,
    SETS=1,
    WARPS=16,
    TEAM=16,
    ROUND=6,
    STAGES=4,
    HELD=2,
    SHARED_BYTES=112 << 10,
)
# inputs that do not come out even
RAGGED = FEW | dict(KDIM=18944, NDIM=3584, BESIDE=1, TEAM=8, ROUND=4, STAGES=12)
# a norm over several turns
TURNS = FEW | dict(KDIM=5120, NDIM=34816, NORM=1, EPILOGUE=2, BESIDE=1, WARPS=10, TEAM=10, ROUND=33)
SIXTEEN = FEW | dict(SETS=2, TEAM=8, STAGES=8, HELD=4)
# codes in planes: as Q4_K, Q6_K, IQ4_XS, Q3_K, NVFP4, integers of 3 bits
Q4_K = dict(FORMAT=8, GROUP=256, BITS=4, RECORD_KIND=4, SUBGROUP=32, MIDDLE=0, CODING=0)
Q6_K = dict(FORMAT=8, GROUP=256, BITS=6, RECORD_KIND=3, SUBGROUP=16, MIDDLE=32, CODING=0)
PLANES = [
    Q4_K,
    Q6_K,
    Q6_K | dict(BITS=4, RECORD_KIND=7, SUBGROUP=32, MIDDLE=0, CODING=1),
    dict(FORMAT=8, GROUP=256, BITS=3, RECORD_KIND=7, SUBGROUP=16, MIDDLE=4, CODING=0),
    dict(FORMAT=8, GROUP=512, BITS=4, RECORD_KIND=6, SUBGROUP=16, MIDDLE=0, CODING=2),
    dict(FORMAT=8, GROUP=128, BITS=3, RECORD_KIND=1, SUBGROUP=128, MIDDLE=0, CODING=0),
]
# hashes of overlapping bits, a scale a row and one for 128 inputs
TRELLIS = dict(FORMAT=8, BITS=2, RECORD_KIND=0, SUBGROUP=4096, GROUP=4096, MIDDLE=0, CODING=3)
TRELLIS_GROUPS = TRELLIS | dict(BITS=3, SUBGROUP=128, GROUP=128)
CASES = [
    ("gemv.cu", GEMV | TRELLIS | dict(APART=1, EPILOGUE=2, BIAS=1, SLOTS=2)),
    ("gemv.cu", GEMV | OLDER | TRELLIS_GROUPS | dict(ROWS=8, SLOTS=2, STAGES=3, OWN_UNITS=1)),
    ("gemv_split.cu", GEMV | TRELLIS | dict(ROWS=8, WARPS=8, SLOTS=2, SLICES=4)),
    ("qkv_attention.cu", FUSED | TRELLIS),
    ("gemm.cu", GEMM | TRELLIS | dict(SB=2, FP16=1)),
    ("gemm_mma.cu", MMA | TRELLIS_GROUPS | dict(SB=2)),
    ("untile.cu", LINEAR | TRELLIS | dict(INTERLEAVED=0, LOOK_UP=1)),
    ("attention.cu", HEADS | dict(KV8=1)),
    ("trellis_search.cu", SEARCH | dict(STATE=18, FRESH=8, CIRCLES=32)),
    ("trellis_search.cu", SEARCH | dict(STATE=20, FRESH=12, CIRCLES=8)),
    *(("gemv.cu", GEMV | planes | dict(SCALE_FP16=1)) for planes in PLANES),
    ("gemv.cu", GEMV | OLDER | Q4_K | dict(ROWS=8, SLOTS=2, STAGE_BLOCKS=8, STAGES=3)),
    ("gemv_split.cu", GEMV | Q6_K | dict(ROWS=8, WARPS=8, SLOTS=2, SLICES=4)),
    ("qkv_attention.cu", FUSED | Q4_K),
    *(
        ("gemm.cu", GEMM | planes | dict(FP16=i % 2, SCALE_FP16=1))
        for i, planes in enumerate(PLANES)
    ),
    ("gemm_mma.cu", MMA | Q6_K),
    ("untile.cu", LINEAR | Q4_K | dict(INTERLEAVED=1)),
    ("untile.cu", LINEAR | Q6_K | dict(INTERLEAVED=0, LOOK_UP=1)),
    ("qkv_attention.cu", FUSED | dict(FORMAT=1, KV8=2)),
    ("rope.cu", HEADS | dict(KV8=1)),
    *(("untile.cu", LINEAR | dict(FORMAT=1, INTERLEAVED=into % 2, INTO=into)) for into in (3, 4)),
    *(("gemv.cu", GEMV | dict(FORMAT=kind)) for kind in range(4)),
    ("gemv.cu", GEMV | dict(FORMAT=1, FP16=1, SCALE_FP16=1, ROWS=8, EPILOGUE=2, BIAS=1, SLOTS=2)),
    ("gemv.cu", GEMV | dict(FORMAT=2, KDIM=576, NDIM=1000, GROUP=32, EPILOGUE=1, STAGE_BLOCKS=9)),
    *(("gemv.cu", GEMV | dict(FORMAT=4, WARPS=8, STATIC=static)) for static in (0, 1)),
    *(("gemv.cu", GEMV | dict(FORMAT=kind, SPARSE=1)) for kind in (1, 2, 3)),
    ("gemv.cu", GEMV | dict(FORMAT=2, SPARSE=1, GROUP=32, ROWS=8, SLOTS=2)),
    ("gemv.cu", GEMV | dict(FORMAT=1, SPARSE=1, SYMMETRIC=1, ROWS=8, SLOTS=2)),
    (
        "gemv_split.cu",
        GEMV | dict(FORMAT=1, SPARSE=1, SYMMETRIC=1, ROWS=8, WARPS=8, SLOTS=2, SLICES=4),
    ),
    *(
        ("batch.cu", LINEAR | BATCH | dict(FORMAT=kind, SPARSE=1, SYMMETRIC=kind % 2))
        for kind in (1, 2, 3)
    ),
    *(
        ("gemv_split.cu", GEMV | dict(FORMAT=kind, ROWS=8, WARPS=8, SLOTS=2, SLICES=4))
        for kind in range(3)
    ),
    (
        "gemv_split.cu",
        GEMV
        | dict(
            FORMAT=1,
            KDIM=7392,
            NDIM=1000,
            GROUP=32,
            ROWS=16,
            WARPS=8,
            SLOTS=1,
            SLICES=11,
            EPILOGUE=1,
            STAGES=2,
            STAGE_BLOCKS=6,
            BIAS=1,
        ),
    ),
    *(
        (
            "gemv.cu",
            GEMV | REGISTERS | dict(FORMAT=kind, FP16=kind - 1, SCALE_FP16=kind - 1, EPILOGUE=2),
        )
        for kind in (1, 2)
    ),
    ("qkv_attention.cu", FUSED | REGISTERS | dict(FORMAT=2)),
    ("qkv_attention.cu", FUSED | REGISTERS | dict(FORMAT=1, CHUNK=8)),
    ("qkv_attention.cu", FUSED | REGISTERS | dict(FORMAT=1, CHUNK=8, TOGETHER=1)),
    (
        "qkv_attention.cu",
        FUSED | REGISTERS | dict(FORMAT=1, ROWS=4, CHUNK=4, TOGETHER=1, BESIDE=1, SPREAD=2),
    ),
    (
        "qkv_attention.cu",
        FUSED | dict(FORMAT=1, ROWS=4, STAGES=3, CHUNK=4, TOGETHER=1, KV8=1, WINDOW=128),
    ),
    ("gemv.cu", GEMV | OLDER | dict(FORMAT=1, BALANCED=1, PREFETCHED=8)),
    ("gemv.cu", GEMV | OLDER | dict(FORMAT=2, BALANCED=1, KEPT=3)),
    ("gemv.cu", GEMV | OLDER | dict(FORMAT=1, BALANCED=1) | HELD_INPUTS),
    ("gemv_split.cu", GEMV | OLDER | dict(FORMAT=2, ROWS=8, SLOTS=2, SLICES=4)),
    ("qkv_attention.cu", FUSED | OLDER | dict(FORMAT=1) | HELD_INPUTS),
    ("qkv_attention.cu", FUSED | OLDER | dict(FORMAT=2, HEAD_CTAS=13)),
    ("few.cu", LINEAR | FEW),
    ("few.cu", LINEAR | FEW | dict(NORM=1, EPILOGUE=2)),
    ("few.cu", LINEAR | FEW | dict(NORM=1, EPILOGUE=2, SPREAD=2)),
    (
        "few.cu",
        LINEAR
        | FEW
        | dict(KDIM=12288, NDIM=4096, FP16=1, SCALE_FP16=1, EPILOGUE=0, BIAS=1, ROUND=4),
    ),
    ("few.cu", LINEAR | SIXTEEN),
    ("few.cu", LINEAR | RAGGED),
    ("few.cu", LINEAR | TURNS),
    ("few.cu", LINEAR | FEW | dict(FORMAT=2, TEAM=8, STAGES=6)),
    (
        "few.cu",
        LINEAR
        | FEW
        | dict(
            FORMAT=2, SETS=2, TEAM=4, STAGES=7, HELD=4, FP16=1, SCALE_FP16=1, EPILOGUE=0, BIAS=1
        ),
    ),
    ("few.cu", LINEAR | FEW | dict(FORMAT=3, TEAM=4, STAGES=12, HELD=0)),
    (
        "few.cu",
        LINEAR | SIXTEEN | dict(KDIM=12288, NDIM=4096, FP16=1, SCALE_FP16=1, BIAS=1, ROUND=4),
    ),
    *(("batch.cu", LINEAR | BATCH | dict(FORMAT=kind)) for kind in range(4)),
    (
        "batch.cu",
        LINEAR
        | BATCH
        | dict(
            FORMAT=1,
            KDIM=7392,
            NDIM=1000,
            GROUP=32,
            ROWS=16,
            PER_WARP=1,
            COLUMN_WARPS=1,
            SLICES=1,
            EPILOGUE=1,
            BIAS=1,
        ),
    ),
    *(
        (
            "batch_pack.cu",
            dict(FORMAT=kind, FP16=0, KDIM=4096, GROUP=128, NORM=1, ROWS=32, PARTS=4, WARPS=8),
        )
        for kind in range(4)
    ),
    ("untile.cu", LINEAR | dict(FORMAT=4, INTERLEAVED=0)),
    *(
        ("untile.cu", LINEAR | dict(FORMAT=kind, SPARSE=1, INTERLEAVED=kind % 2))
        for kind in (1, 2, 3)
    ),
    ("gemm.cu", GEMM | dict(FORMAT=4)),
    ("gemm.cu", GEMM | dict(FORMAT=4, TOKENS=256, SPLIT=0)),
    *(("gemm.cu", GEMM | dict(FORMAT=kind, SPARSE=1)) for kind in (1, 2, 3)),
    (
        "pack.cu",
        dict(FP16=0, KDIM=4096, SB=2, NORM=1, QUANTIZE=2, STATIC=1, ORDER=0, ROWS=8, WARPS=16),
    ),
    ("pack.cu", dict(FP16=0, KDIM=4096, SB=2, NORM=0, QUANTIZE=0, ORDER=2, ROWS=1, WARPS=8)),
    *(
        (
            "pack.cu",
            dict(FP16=0, KDIM=4096, SB=4, NORM=norm, QUANTIZE=3, ORDER=1, ROWS=1, WARPS=4, PARTS=4),
        )
        for norm in (0, 1)
    ),
    ("gemm.cu", GEMM | dict(FORMAT=1, TOKENS=16, WGS=3, SPLIT=0, STAGED=0, IN_PLANES=1)),
    (
        "gemm.cu",
        GEMM
        | dict(
            FORMAT=2, TOKENS=32, WGS=1, SB=4, SPLIT=2, CLUSTER=2, STAGED=0, IN_PLANES=1, SYMMETRIC=1
        ),
    ),
    (
        "gemm.cu",
        GEMM | dict(FORMAT=4, TOKENS=32, WGS=1, SB=4, SPLIT=2, CLUSTER=2, STAGED=0, APART=1),
    ),
    *(("untile.cu", LINEAR | dict(FORMAT=kind, INTERLEAVED=kind % 2)) for kind in range(4)),
    *(("gemm_mma.cu", MMA | dict(FORMAT=kind)) for kind in (3, 4)),
    *(
        ("gemm_mma.cu", MMA | dict(FORMAT=kind, X_ROWS=1, FP16=kind % 2, SCALE_FP16=kind % 2))
        for kind in range(3)
    ),
    *(
        (
            "gemm_mma.cu",
            MMA | dict(FORMAT=kind, X_ROWS=int(kind == 0), PER_WARP=4, STAGES=3, AHEAD=1),
        )
        for kind in (0, 3)
    ),
    *(("gemm_mma.cu", MMA | dict(FORMAT=kind, SPARSE=1, EPILOGUE=1)) for kind in (1, 3)),
    ("gemm_mma.cu", MMA | dict(FORMAT=1, EPILOGUE=2, SPLIT=0, EXPERTS=1)),
    *(("gemm.cu", GEMM | dict(FORMAT=kind)) for kind in range(4)),
    (
        "gemm.cu",
        GEMM | dict(FORMAT=2, KDIM=7392, GROUP=32, TOKENS=16, WGS=4, SPLIT=0, EPILOGUE=1, STAGED=0),
    ),
    *(
        ("gemm.cu", GEMM | dict(FORMAT=kind, SPLIT=2, CLUSTER=6, STAGED=0, LOADERS=1))
        for kind in (0, 2)
    ),
    *(("gemm.cu", GEMM | dict(FORMAT=kind, SPLIT=3, CLUSTER=3, STAGED=0)) for kind in (1, 3)),
    *(
        ("gemm.cu", GEMM | dict(FORMAT=1, TOKENS=128, WGS=3, SPLIT=split, CLUSTER=2, STAGED=0))
        for split in (2, 3)
    ),
    *(
        ("gemm.cu", GEMM | dict(FORMAT=kind, TOKENS=256, SPLIT=0, EPILOGUE=2, BIAS=1))
        for kind in (1, 3)
    ),
    *(
        ("gemm.cu", GEMM | dict(FORMAT=kind, TOKENS=256, SPLIT=0, EPILOGUE=2, PACKED=2, ORDER=kind))
        for kind in (0, 1)
    ),
    *(
        ("gemm.cu", GEMM | dict(FORMAT=kind, TOKENS=tokens, SPLIT=0, EPILOGUE=kind, STAGED=32))
        for kind, tokens in ((0, 224), (1, 160), (2, 192))
    ),
    (
        "gemm.cu",
        GEMM
        | dict(FORMAT=1, SPLIT=2, CLUSTER=6, STAGED=0, LOADERS=2, EPILOGUE=2, PACKED=4, ORDER=1),
    ),
    *(
        (
            "pack.cu",
            dict(
                FP16=0,
                KDIM=4096,
                SB=2,
                NORM=1,
                QUANTIZE=quantize,
                ORDER=1,
                ROWS=1 + 7 * quantize,
                WARPS=8 << quantize,
            ),
        )
        for quantize in (0, 1)
    ),
    *(
        (
            "pack.cu",
            dict(FP16=1, KDIM=12288, SB=2, NORM=0, QUANTIZE=1, ORDER=0, ROWS=rows, WARPS=3 * rows),
        )
        for rows in (8, 4)
    ),
    # DeepSeek-V2-Lite's and V3's
    *(
        (
            "latent.cu",
            dict(
                FP16=half,
                HEADS=heads,
                PLAIN=128,
                RANK=512,
                ROPE=64,
                VALUE=128,
                PAGE=16,
                SHORTEST=64,
            ),
        )
        for heads, half in ((16, 0), (128, 1))
    ),
    ("rope.cu", HEADS),
    ("rope.cu", HEADS | dict(HEAD_DIM=80, ROTARY=40, QK_NORM=0, FP16=1)),
    *(
        ("prefill_attention.cu", PREFILL | dict(PAGE=page, BOX=box, HEAD_DIM=size))
        for page, box, size in ((0, 128, 128), (16, 16, 64))
    ),
    *(("attention.cu", HEADS | dict(WARPS=4, PACKED=2, ORDER=order)) for order in (0, 1)),
    ("attention.cu", HEADS | dict(CHUNK=8)),
    (
        "attention.cu",
        HEADS | dict(HEADS=64, HEAD_DIM=64, ROTARY=64, QK_NORM=0, SINKS=1, WINDOW=128),
    ),
    ("attention.cu", HEADS | dict(HEADS=16, HEAD_DIM=256, ROTARY=256, QK_NORM=0, SOFT_CAP=1)),
    (
        "attention.cu",
        HEADS | dict(HEADS=9, KV_HEADS=3, HEAD_DIM=64, ROTARY=64, QK_NORM=0, FP16=1, WINDOW=128),
    ),
    *(("qkv_attention.cu", FUSED | dict(FORMAT=kind)) for kind in (0, 3)),
    ("qkv_attention.cu", FUSED | dict(FORMAT=1, ROWS=8, SLOTS=2, BIAS=1, QK_NORM=0, STAGES=6)),
    (
        "qkv_attention.cu",
        FUSED
        | dict(
            FORMAT=0,
            FP16=1,
            KDIM=576,
            NDIM=960,
            WARPS=8,
            STAGE_BLOCKS=9,
            HEADS=9,
            KV_HEADS=3,
            HEAD_DIM=64,
            ROTARY=32,
            HEAD_CTAS=20,
            WINDOW=128,
        ),
    ),
    ("qkv_attention.cu", FUSED | dict(FORMAT=4, WARPS=8)),
    # gpt-oss's and GLM-4.5's
    (
        "qkv_attention.cu",
        FUSED
        | dict(
            FORMAT=0,
            KDIM=2880,
            NDIM=5120,
            WARPS=8,
            STAGE_BLOCKS=8,
            BIAS=1,
            QK_NORM=0,
            HEADS=64,
            HEAD_DIM=64,
            ROTARY=64,
            WINDOW=128,
            SINKS=1,
        ),
    ),
    ("qkv_attention.cu", FUSED | dict(FORMAT=1, NDIM=14336, HEADS=96, ROTARY=64, ITEMS=2)),
    *(
        (
            "experts.cu",
            GEMV | dict(FORMAT=kind, NORM=0, EPILOGUE=0, PER_SLOT=1, AHEAD=1, KDIM=2560, NDIM=3584),
        )
        for kind in range(5)
    ),
    (
        "experts.cu",
        GEMV
        | dict(
            FORMAT=1,
            EPILOGUE=2,
            PER_SLOT=0,
            AHEAD=0,
            KDIM=3584,
            NDIM=5120,
            ROWS=8,
            SLOTS=2,
            STAGE_BLOCKS=28,
        ),
    ),
    *(
        ("gemm.cu", GEMM | dict(FORMAT=kind, TOKENS=16, SPLIT=0, STAGED=0, EPILOGUE=2, EXPERTS=1))
        for kind in (0, 4)
    ),
    (
        "gemm.cu",
        GEMM
        | dict(
            FORMAT=1, TOKENS=16, WGS=4, SB=4, STAGES=5, SPLIT=0, STAGED=0, EPILOGUE=2, EXPERTS=1
        ),
    ),
    (
        "pack.cu",
        dict(FP16=0, KDIM=3584, SB=2, NORM=1, QUANTIZE=0, ORDER=1, ROWS=8, WARPS=8, TILE=16),
    ),
    (
        "route.cu",
        dict(
            FP16=0,
            KDIM=3584,
            EXPERTS=64,
            CHOSEN=8,
            GATE=1,
            NORMALIZE=0,
            ROWS=1,
            TILE=1,
            BY_TOKEN=1,
            EARLY=1,
        ),
    ),
    (
        "route.cu",
        dict(
            FP16=1,
            KDIM=2048,
            EXPERTS=60,
            CHOSEN=4,
            GATE=0,
            NORMALIZE=1,
            ROWS=8,
            TILE=128,
            BY_TOKEN=0,
            EARLY=0,
        ),
    ),
    # DeepSeek-V3's, GLM-4.5's with its ungated shared expert, and gpt-oss's
    (
        "route.cu",
        dict(
            FP16=0,
            KDIM=7168,
            EXPERTS=256,
            CHOSEN=8,
            GATE=0,
            NORMALIZE=1,
            ROWS=8,
            TILE=16,
            BY_TOKEN=0,
            SIGMOID=1,
            BIASED=1,
            GROUPS=8,
            CHOSEN_GROUPS=4,
            SHARED=1,
        ),
    ),
    (
        "route.cu",
        dict(
            FP16=0,
            KDIM=4096,
            EXPERTS=128,
            CHOSEN=8,
            GATE=0,
            NORMALIZE=1,
            ROWS=1,
            TILE=1,
            BY_TOKEN=1,
            SIGMOID=1,
            BIASED=1,
            SHARED=1,
        ),
    ),
    (
        "route.cu",
        dict(
            FP16=0,
            KDIM=2880,
            EXPERTS=32,
            CHOSEN=4,
            GATE=0,
            NORMALIZE=1,
            ROWS=1,
            TILE=1,
            BY_TOKEN=1,
            BIASED=1,
        ),
    ),
    (
        "experts.cu",
        GEMV
        | dict(
            FORMAT=1,
            EPILOGUE=4,
            BIAS=1,
            PER_SLOT=0,
            AHEAD=0,
            KDIM=2880,
            NDIM=5760,
            GROUP=64,
            SLOTS=2,
            STAGE_BLOCKS=15,
        ),
    ),
    (
        "route.cu",
        dict(
            FP16=0,
            KDIM=2048,
            EXPERTS=512,
            CHOSEN=10,
            GATE=1,
            NORMALIZE=1,
            ROWS=1,
            TILE=1,
            BY_TOKEN=1,
            JOINED=1,
            SHARED=0,
        ),
    ),
    (
        "route.cu",
        dict(
            FP16=0,
            KDIM=2048,
            EXPERTS=512,
            CHOSEN=10,
            GATE=1,
            NORMALIZE=1,
            ROWS=1,
            TILE=1,
            BY_TOKEN=1,
            RING=4,
            LOGITS_ALONE=1,
        ),
    ),
    *(
        (
            "experts.cu",
            GEMV
            | dict(
                FORMAT=1,
                EPILOGUE=2,
                PER_SLOT=0,
                KDIM=2048,
                NDIM=1024,
                EXPERTS=512,
                CHOSEN=10,
                GATE=1,
                NORMALIZE=1,
                CHOOSES=1,
                JOINED=joined,
            ),
        )
        for joined in (0, 1)
    ),
    (
        "experts_sum.cu",
        GEMV
        | dict(
            FORMAT=1,
            KDIM=5632,
            NDIM=2048,
            NORM=0,
            EPILOGUE=1,
            STAGES=16,
            STAGE_BLOCKS=8,
            SLOTS=1,
            SLOT_BLOCKS=8,
            CHOOSES=513,
        ),
    ),
    (
        "experts_sum.cu",
        GEMV
        | dict(
            FORMAT=1,
            KDIM=5632,
            NDIM=2048,
            NORM=0,
            EPILOGUE=1,
            STAGES=16,
            STAGE_BLOCKS=8,
            SLOTS=1,
            SLOT_BLOCKS=8,
        ),
    ),
    (
        "qkv_attention.cu",
        FUSED
        | dict(
            FORMAT=1,
            KDIM=2048,
            NDIM=9216,
            HEADS=16,
            KV_HEADS=2,
            HEAD_DIM=256,
            ROTARY=64,
            HEAD_CTAS=66,
            GATED=1,
        ),
    ),
    (
        "gated_delta.cu",
        dict(
            FP16=0, KEY_HEADS=16, VALUE_HEADS=32, KEY_DIM=128, VALUE_DIM=128, WIDTH=4, THREADS=512
        ),
    ),
    ("attention.cu", HEADS | dict(HEADS=16, KV_HEADS=2, HEAD_DIM=256, ROTARY=64, WARPS=4, GATED=1)),
    *(("add_normed.cu", dict(FP16=norm, KDIM=3840, NORM=norm)) for norm in (0, 1)),
    ("gather.cu", dict(FP16=0, KDIM=12288)),
    ("gemv.cu", GEMV | dict(FORMAT=1, INDEXED=1)),
    # float8 in blocks
    ("gemv.cu", GEMV | dict(FORMAT=7, GROUP=128)),
    ("gemm.cu", GEMM | dict(FORMAT=7, GROUP=128)),
    ("gemm_mma.cu", MMA | dict(FORMAT=7, GROUP=128, SPLIT=0)),
    ("untile.cu", LINEAR | dict(FORMAT=7, GROUP=128, INTERLEAVED=1)),
    # MXFP4
    ("gemv.cu", GEMV | dict(FORMAT=6, GROUP=32, SLOTS=2)),
    (
        "experts.cu",
        GEMV
        | dict(
            FORMAT=6,
            GROUP=32,
            EPILOGUE=4,
            BIAS=1,
            PER_SLOT=0,
            AHEAD=0,
            KDIM=2880,
            NDIM=5760,
            SLOTS=2,
            STAGE_BLOCKS=15,
        ),
    ),
    (
        "gemm.cu",
        GEMM
        | dict(
            FORMAT=6,
            GROUP=32,
            KDIM=2880,
            NDIM=5760,
            SB=1,
            TOKENS=16,
            SPLIT=0,
            STAGED=0,
            EPILOGUE=4,
            BIAS=1,
            EXPERTS=1,
        ),
    ),
    ("gemm.cu", GEMM | dict(FORMAT=6, GROUP=32, FP16=1)),
    ("gemm_mma.cu", MMA | dict(FORMAT=6, GROUP=32, EPILOGUE=4, BIAS=1, SPLIT=0, EXPERTS=1)),
    ("untile.cu", LINEAR | dict(FORMAT=6, GROUP=32, INTERLEAVED=1)),
    # other activations than silu
    ("gemv.cu", GEMV | dict(FORMAT=1, EPILOGUE=3)),
    ("batch.cu", LINEAR | BATCH | dict(FORMAT=1, EPILOGUE=3)),
    (
        "gemm.cu",
        GEMM
        | dict(FORMAT=1, SPLIT=2, CLUSTER=6, STAGED=0, LOADERS=2, EPILOGUE=3, PACKED=4, ORDER=1),
    ),
    ("qkv_attention.cu", FUSED | dict(FORMAT=3, SPARSE=1, WARPS=8)),
    ("token.cu", dict(FP16=0, WIDTH=151936, THREADS=256)),
    ("accept.cu", dict(WIDTH=4096, THREADS=256)),
    ("guesses.cu", dict(THREADS=64)),
    (
        "delta.cu",
        dict(
            FP16=0,
            INPUTS=4096,
            OUTPUTS=6144,
            RANK=16,
            PARTS=3,
            END1=4096,
            END2=5120,
            NORM=1,
            GATED=0,
            RESIDUAL=0,
            EARLY=0,
            THREADS=256,
        ),
    ),
    (
        "delta.cu",
        dict(
            FP16=1,
            INPUTS=28672,
            OUTPUTS=8192,
            RANK=64,
            PARTS=1,
            END1=8192,
            END2=8192,
            NORM=0,
            GATED=1,
            RESIDUAL=1,
            EARLY=1,
            THREADS=256,
        ),
    ),
    ("sample.cu", dict(VOCAB=50257, TYPE=2, CLUSTER=1, THREADS=1024)),
    ("sample.cu", dict(VOCAB=151936, TYPE=0, CLUSTER=8, THREADS=1024)),
    ("qkv_attention.cu", FUSED | dict(FORMAT=2, NDIM=8192, HEADS=16, HEAD_DIM=256, ROTARY=64)),
]


# whose products are instructions of their own in each format
PRODUCTS = {"gemv.cu", "batch.cu", "gemm_mma.cu"}


def cases_of(arch):
    """Those with a body there. Architectures differ in a few functions of the headers, which every
    case of a file calls alike: sm_90a compiles all, sm_80 one of each file and one for each format
    of the products, sm_89 what it has beyond sm_80: float8. The others have one of each file.
    """
    if arch == "sm_90a":
        return CASES
    found = [case for case in CASES if case[0] not in HOPPER]
    if arch == "sm_89":
        return [case for case in found if case[1].get("FORMAT") in (4, 5) or "KV8" in case[1]]

    def kind(file, defines):
        kinds = ("OWN_COPIES", "IN_REGISTERS", "KV8") if arch == "sm_80" else ()
        formats = ("FORMAT",) if arch == "sm_80" and file in PRODUCTS else ()
        return file, *map(defines.get, (*kinds, *formats))

    return [*{kind(*case): case for case in found}.values()]


# a file at a time: all of one architecture in one test would take minutes of one core
BY_FILE = {
    f"{arch}-{name}": (arch, [case for case in cases_of(arch) if case[0] == name])
    for arch in ARCHITECTURES
    for name in dict.fromkeys(file for file, _ in cases_of(arch))
}


@pytest.mark.parametrize(("arch", "cases"), BY_FILE.values(), ids=BY_FILE.keys())
def test_kernels_compile_without_a_gpu(arch, cases, tmp_path, monkeypatch):
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path))
    for file, defines in cases:
        assert compiler.compile_cubin(file, defines, arch)[:4] == b"\x7fELF"


def test_kernels_without_a_body_before_hopper_are_known():
    found = {
        path.name
        for path in compiler.SOURCES.glob("*.cu")
        if re.search(r"#if __CUDA_ARCH__ >= 900", path.read_text())
    }
    assert found == HOPPER


@pytest.mark.parametrize("device", GPUS.values(), ids=GPUS.keys())
def test_kernels_without_a_body_for_a_gpu_are_not_planned_for_it(device, monkeypatch):
    weight = tiles.prepare(IntGroup.random((4096, 4096), group_size=128), dtype=torch.bfloat16)
    vectors = (
        lay_out(VectorQuant.random((64, 512), main=256, residual=256), dtype=torch.bfloat16),
    )
    heads = prefill.Heads(32, 8, 128, torch.bfloat16)
    monkeypatch.setattr(prefill.gpu, "of", lambda _: device)
    planned = {
        "gemm.cu": gemm.unsupported_reason(weight.matrix, 64, device) is None,
        "few.cu": gemv_cluster.unsupported_reason(weight, 8, device) is None,
        "vptq_rows.cu": vptq_rows.takes(vectors, 8, device),
        "prefill_attention.cu": prefill.takes(heads, torch.device("cuda", 0), prefill.BASE_2),
    }
    assert planned == dict.fromkeys(HOPPER, device.major == 9)


@pytest.mark.parametrize("kind", ["plain", "int4", "int8", "w8a8", "fp8"])
def test_products_of_many_rows_have_registers_enough(kind, monkeypatch):
    """Where they do not, the compiler keeps sums in memory or does one product after the other:
    right, and twice as slow.
    """
    from cuda.core import Program, ProgramOptions

    def load(file, *, defines, registers=None):
        if file == "gemm.cu":
            flags = [(name, str(value)) for name, value in defines.items()]
            options = ProgramOptions(
                std="c++17",
                arch="sm_90a",
                max_register_count=registers,
                define_macro=flags,
                ptxas_options="-v",
            )
            log = io.StringIO()
            Program(compiler.source_of(file), code_type="c++", options=options).compile(
                "cubin", logs=log
            )
            assert (
                "serialized" not in log.getvalue() and " 0 bytes stack frame" in log.getvalue()
            ), (shape, log.getvalue())
        return jit.Unlaunched()

    monkeypatch.setattr(jit, "load", load)
    for outputs, inputs, rows in (
        (4096, 12288, 16),
        (24576, 4096, 32),
        (6144, 4096, 32),
        (4096, 4096, 64),
        (6144, 4096, 256),
        (4096, 12288, 512),
        (24576, 4096, 2048),
    ):
        matrix = Matrix(FORMATS[kind], outputs, inputs, 128 if FORMATS[kind].grouped else inputs)
        shape = shape_for(Product(matrix, rows), GPUS["sm_90a"])
        weight = TiledWeight(
            matrix, torch.empty(0), torch.bfloat16, symmetric=FORMATS[kind].grouped
        )
        gemm.kernels(weight, shape, gemm.Packing(8, 8, 1), gemm.Ends())


def test_a_cubin_is_compiled_once_and_then_read_from_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path))
    file, defines = CASES[6]
    cubin = compiler.compile_cubin(file, defines, "sm_80")
    (stored,) = (tmp_path / "kernels").iterdir()
    stored.write_bytes(b"from disk")
    assert compiler.compile_cubin(file, defines, "sm_80") == b"from disk"
    assert compiler.compile_cubin(file, defines, "sm_90a") not in (b"from disk", cubin)


def test_a_source_that_does_not_compile_shows_the_compilers_log(tmp_path, monkeypatch):
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path))
    with pytest.raises(
        compiler.KernelError, match=r"gemv\.cu does not compile for sm_90a with FORMAT=1(.|\n)*KDIM"
    ):
        compiler.compile_cubin("gemv.cu", {"FORMAT": 1}, "sm_90a")
    assert not (tmp_path / "kernels").exists()
