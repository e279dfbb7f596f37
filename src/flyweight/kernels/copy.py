"""What memory gives to some of a GPU's SMs: host side of cuda/copy.cu.

An imitation of a smaller GPU (`imitation.py`) has fewer SMs than the GPU that is here, and fewer
SMs have fewer bytes on their way. Shares of its bandwidth are told of both: of a copy by all SMs,
and of one by as many as the imitation has.
"""

from __future__ import annotations

import torch

from flyweight import gpu
from flyweight.kernels import jit

THREADS = 1024
AHEAD = 8
SIZE = 1 << 30  # bytes, far beyond any cache
PIECE = 16 * THREADS * AHEAD


def bandwidth(device: torch.device, blocks: int, *, rounds: int = 5) -> float:
    """GB/s of a copy by so many thread blocks, one on an SM each; bytes read and written both
    counted, the best of the rounds.
    """
    source = torch.ones(SIZE, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    kernel = jit.load("copy.cu", defines={"THREADS": THREADS, "AHEAD": AHEAD}).kernel("copy")
    alone = gpu.of(device).shared_excluding
    milliseconds = []
    for _ in range(rounds + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        kernel.launch(blocks, THREADS, (source, target, SIZE // PIECE), shared=alone)
        end.record()
        end.synchronize()
        milliseconds.append(begin.elapsed_time(end))
    return 2 * SIZE / min(milliseconds[1:]) / 1e6
