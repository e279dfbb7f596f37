"""The ends of a decode step against torch: embeddings, and the likeliest token."""

import pytest
import torch

from flyweight.kernels.token import GreedyChoice, embed

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 151936), (8, 49152), (4, 1000), (2, 8)])
def test_the_first_of_the_largest_logits_is_chosen_again_and_again(rows, vocab, dtype):
    choice, tokens = GreedyChoice(rows, DEVICE), torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    lengths = torch.tensor([5, 0, 7, 1, 2, 0, 3, 9][:rows], dtype=torch.int32, device=DEVICE)
    for scale in (1, 100, -1):
        logits = (torch.randn(rows, vocab, device=DEVICE) * scale).to(dtype)
        if scale == -1:
            logits = -logits.abs() - 1
        want = torch.where(lengths > 0, lengths + 1, 0)
        choice(logits, tokens, lengths)
        values = logits.float()
        first = (values == values.max(-1, keepdim=True).values).int().argmax(-1)
        assert torch.equal(tokens, first) and torch.equal(lengths, want.int())


def test_embeddings_are_copied_row_by_row():
    table = torch.randn(1000, 576, device=DEVICE).bfloat16()
    tokens = torch.tensor([999, 0, 17, 17], device=DEVICE)
    hidden = torch.full((4, 576), float("nan"), device=DEVICE).bfloat16()
    embed(table, tokens, hidden)
    assert torch.equal(hidden, table[tokens])
