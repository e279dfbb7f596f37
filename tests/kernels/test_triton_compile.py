"""Every Triton kernel compiles for the architectures it promises, without a GPU: in a process that
does not interpret.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")


ARCHITECTURES = ["80", "90"]


def test_kernels_compile_without_a_gpu(tmp_path):
    environment = os.environ | dict(
        TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path), PYTHONPATH=os.pathsep.join(sys.path)
    )
    script = Path(__file__).with_name("compile_triton.py")
    done = subprocess.run(
        [sys.executable, script, *ARCHITECTURES], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(f"compiled for {arch}" in done.stdout for arch in ARCHITECTURES)
