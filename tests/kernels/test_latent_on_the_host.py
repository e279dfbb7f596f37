"""Latent attention of decode steps, run on the CPU from its CUDA source, against float64."""

import host_cuda
import pytest
import torch
from latent_steps import check
from test_kernels_on_the_host import host  # noqa: F401 (fixtures)

from flyweight.kernels.attention.latent import LatentShape

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")


def test_rows_of_ragged_lengths_cut_into_runs():
    """With more heads than a thread block takes, and pages that are no power of two."""
    shape = LatentShape(heads=17, plain=32, rank=64, rope=32, value=32, page=24)
    check(shape, [1, 0, 97, 33], splits=2, dtype=torch.bfloat16)
