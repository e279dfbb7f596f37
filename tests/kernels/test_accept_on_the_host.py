"""accept.cu, run on the CPU: the rows that torch's ops find."""

import host_cuda
import pytest
import torch

from flyweight.kernels.accept import ChainState, CheckedRows, accept, last_rows

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")


def test_a_head_goes_on_from_the_last_right_row(monkeypatch, folder):
    host_cuda.pretend(monkeypatch, folder)
    tokens = torch.tensor([9, 4, 5, 7, 1, 1, 2, 0])
    chosen = torch.tensor([4, 5, 6, 1, 1, 3, 8, 0])  # all right; one row; one right of two; and a row of padding
    before = torch.tensor([0, 1, 2, 0, 0, 1, 2, 0], dtype=torch.int32)
    first = torch.tensor([0, 3, 4])
    lengths = torch.tensor([30, 31, 32, 7, 15, 16, 17, 0], dtype=torch.int32)
    tables = torch.arange(24, dtype=torch.int32).view(8, 3)
    hidden = torch.randn(8, 16).bfloat16()
    state = ChainState(torch.zeros(8, 16).bfloat16(), torch.zeros(8, dtype=torch.int32), torch.full((8, 4), 99, dtype=torch.int32))
    accept(CheckedRows(chosen, tokens, before, lengths, tables, first), hidden, state)
    want = [2, 3, 5]
    assert torch.equal(state.hidden[:3], hidden[want]) and not state.hidden[3:].any()
    assert state.lengths.tolist() == [32, 7, 16, 0, 0, 0, 0, 0]
    assert torch.equal(state.tables[:3, :3], tables[want]) and (state.tables[:, 3] == 99).all()
    following = torch.where(before.roll(-1) > 0, tokens.roll(-1), -1)
    assert last_rows(chosen, following, first).tolist() == want
