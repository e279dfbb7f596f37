"""Decode attention of the larger groups and of heads of 80 and 96 compiles for every architecture;
no GPU needed.
"""

from dataclasses import replace

import pytest

from flyweight.kernels import compiler
from flyweight.kernels.attention.decode import HeadShape

pytest.importorskip("cuda.core", reason="cuda-core is not installed")
pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

SHAPE = HeadShape(heads=32, kv_heads=2, head_dim=128, rotary=128, page=16, qk_norm=True)
CASES = [
    (SHAPE, dict(WARPS=8)),
    (replace(SHAPE, heads=22, head_dim=64, rotary=24, qk_norm=False), dict(WARPS=4, VECTORS=4)),
    (replace(SHAPE, head_dim=80, rotary=80, kv_heads=8), dict(WARPS=4, PACKED=2, ORDER=1)),
    (replace(SHAPE, heads=24, head_dim=96, rotary=48, window=128), dict(WARPS=8)),
]


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a"])
def test_head_shapes_compile_without_a_gpu(arch, tmp_path, monkeypatch):
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path))
    for shape, more in CASES:
        defines = shape.defines | dict(FP16=0, SHORTEST=256) | more
        assert compiler.compile_cubin("attention.cu", defines, arch)[:4] == b"\x7fELF"
