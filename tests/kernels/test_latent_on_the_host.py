"""Latent attention of decode steps, run on the CPU from its CUDA source, against float64."""

import host_cuda
import pytest
import torch
from latent_steps import check
from test_kernels_on_the_host import folder, host  # noqa: F401 (fixtures)

from flyweight.kernels.attention import latent
from flyweight.kernels.attention.latent import LatentShape

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")
SHAPE = LatentShape(heads=3, plain=32, rank=64, rope=32, value=32, page=16)


def test_rows_of_ragged_lengths_cut_into_runs(host, monkeypatch):  # noqa: F811
    monkeypatch.setattr(latent, "SHORTEST", 32)
    check(SHAPE, [1, 2, 0, 32, 33, 65, 230, 129, 16], splits=3, dtype=torch.bfloat16)


def test_more_heads_than_a_thread_block_takes(host):  # noqa: F811
    """And a rank of two pieces of each warp, and pages that are no power of two."""
    check(LatentShape(18, 64, 128, 64, 64, page=24), [1, 70], splits=2, dtype=torch.float16)
