"""A kernel that waits for what never comes ends, and its process knows which one it was."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu
SCRIPT = """
import torch
from flyweight.kernels import jit, stall
defines = dict(FP16=0, SCALE_FP16=0, KDIM=2560, NDIM=3584, GROUP=128, ROWS=1, NORM=0, EPILOGUE=0)
defines |= dict(BIAS=0, WARPS=8, STAGES=2, STAGE_BLOCKS=16, SLOTS=3, HELD=2, SHARED_BYTES=90_000)
defines |= dict(FORMAT=1, PER_SLOT=1, AHEAD=1)
kernel = jit.load("experts.cu", defines=defines).kernel("experts")
room = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
# where the router would write how many experts are in use
slots = torch.zeros(1, dtype=torch.int32, device="cuda")
given = (room, room, room, room, None, None, room, room, slots, 1e-6)
kernel.launch(1, 32 * 9, given, shared=90_000)
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print(stall.explain(error))
else:
    print("it ended by itself")
"""


def test_a_wait_without_an_end_is_ended_and_named():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120
    )
    assert "experts.cu (thread block 0) waited ten seconds" in done.stdout, (
        done.stdout + done.stderr[-2000:]
    )
