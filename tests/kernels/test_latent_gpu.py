"""Latent attention of decode steps on a GPU, against float64, at the shapes of DeepSeek-V2-Lite and
V3.
"""

import pytest
import torch
from latent_steps import check

from flyweight.kernels.attention import torch_runs
from flyweight.kernels.attention.latent import LatentShape

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("heads", [16, 128, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [[600], [1, 17, 0, 64, 65, 128, 333, 512, 640]], ids=len)
def test_a_step_is_what_float64_makes_of_it(heads, dtype, lengths):
    check(
        LatentShape(heads, 128, 512, 64, 128, page=16),
        lengths,
        splits=None,
        dtype=dtype,
        device="cuda",
    )


@pytest.mark.parametrize(("new", "older"), [(70, 0), (130, 333), (256, 0), (128, 128)])
def test_prompts_attend_to_what_is_before_them(new, older):
    """Values narrower than keys; queries are the last tokens. They lie as latent.py makes them:
    token by token, values beside keys.
    """
    torch.manual_seed(0)
    query = torch.randn(new, 16, 192, device="cuda").bfloat16().transpose(0, 1)
    keys = torch.randn(older + new, 16, 192, device="cuda").bfloat16().transpose(0, 1)
    values = torch.randn(older + new, 16, 256, device="cuda").bfloat16()[..., 128:].transpose(0, 1)
    assert torch_runs.takes_last(query)
    scores = query.double() @ keys.double().mT * 192**-0.5
    hidden = torch.ones(new, older + new, dtype=torch.bool, device="cuda").triu(older + 1)
    want = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values.double()
    got = torch_runs.attend_last(query, keys, values, 192**-0.5)
    assert ((got.double() - want).norm() / want.norm()).item() < 8e-3
