"""Latent attention of decode steps on a GPU, against float64, at the shapes of DeepSeek-V2-Lite and V3."""

import pytest
import torch
from latent_steps import check

from flyweight.kernels.attention.latent import LatentShape

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("heads", [16, 128, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [[600], [1, 17, 0, 64, 65, 128, 333, 512, 640]], ids=len)
def test_a_step_is_what_float64_makes_of_it(heads, dtype, lengths):
    check(LatentShape(heads, 128, 512, 64, 128, page=16), lengths, splits=None, dtype=dtype, device="cuda")
