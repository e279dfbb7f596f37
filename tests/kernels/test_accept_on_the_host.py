"""accept.cu and guesses.cu, run on the CPU: what torch's ops find."""

import host_cuda
import pytest
import torch

from flyweight.kernels.accept import ChainState, CheckedRows, accept, last_rows
from flyweight.kernels.guesses import GuessedRows, KernelHandover, SequenceRows, TorchHandover

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")


def test_a_head_goes_on_from_the_last_right_row(monkeypatch, folder):
    host_cuda.pretend(monkeypatch, folder)
    tokens = torch.tensor([9, 4, 5, 7, 1, 1, 2, 0])
    # all right; one row; one right of two; and a row of padding
    chosen = torch.tensor([4, 5, 6, 1, 1, 3, 8, 0])
    before = torch.tensor([0, 1, 2, 0, 0, 1, 2, 0], dtype=torch.int32)
    first = torch.tensor([0, 3, 4])
    lengths = torch.tensor([30, 31, 32, 7, 15, 16, 17, 0], dtype=torch.int32)
    tables = torch.arange(24, dtype=torch.int32).view(8, 3)
    hidden = torch.randn(8, 16).bfloat16()
    state = ChainState(
        torch.zeros(8, 16).bfloat16(),
        torch.zeros(8, dtype=torch.int32),
        torch.full((8, 4), 99, dtype=torch.int32),
    )
    accept(CheckedRows(chosen, tokens, before, lengths, tables, first), hidden, state)
    want = [2, 3, 5]
    assert torch.equal(state.hidden[:3], hidden[want]) and not state.hidden[3:].any()
    assert state.lengths.tolist() == [32, 7, 16, 0, 0, 0, 0, 0]
    assert torch.equal(state.tables[:3, :3], tables[want]) and (state.tables[:, 3] == 99).all()
    following = torch.where(before.roll(-1) > 0, tokens.roll(-1), -1)
    assert last_rows(chosen, following, first).tolist() == want


def test_sequences_go_on_from_the_last_right_guess(monkeypatch, folder):
    host_cuda.pretend(monkeypatch, folder)
    # all right; no guess; one right of two; its last row counts no guess
    chosen = torch.tensor([4, 5, 6, 1, 1, 3, 8])
    found = []
    for kind in (KernelHandover, TorchHandover):
        rows = GuessedRows(
            tokens=torch.tensor([9, 4, 5, 0, 0, 1, 2]),
            lengths=torch.tensor([30, 31, 32, 7, 15, 16, 17], dtype=torch.int32),
            before=torch.tensor([0, 1, 2, 0, 0, 1, 2], dtype=torch.int32),
            guesses=torch.tensor([4, 5, -1, -1, 1, 2, -1]),
            at=torch.tensor([2, 2, 2, 0, 3, 3, 3]),
            first=torch.tensor([0, 3, 4, 0]),
            unread=torch.tensor([3, 4, 0]),
            unread_at=torch.tensor([0, 3, 0]),
        )
        sequences = SequenceRows(
            torch.tensor([70, 71, 72, 73]), torch.tensor([1, 2, 3, 4], dtype=torch.int32)
        )
        handover = kind(rows, sequences)
        handover.take(2)
        assert rows.tokens.tolist() == [9, 4, 5, 70, 73, 1, 2]
        handover.go_on(chosen, 3)
        found.append((sequences.tokens.tolist(), sequences.lengths.tolist()))
    assert found == [([1, 71, 6, 3], [8, 2, 33, 17])] * 2


def test_rows_become_those_of_the_guesses_behind_them(monkeypatch, folder):
    """All right; none; one right of two. Rows of padding stay nobody's."""
    host_cuda.pretend(monkeypatch, folder)
    chosen = torch.tensor([4, 5, 6, 1, 1, 3, 8])
    guesses = torch.tensor([[60, 61, 62, 63], [70, 71, 72, 73]])
    found = []
    for kind in (KernelHandover, TorchHandover):
        rows = GuessedRows(
            tokens=torch.tensor([9, 4, 5, 0, 0, 1, 2, 0]),
            lengths=torch.tensor([30, 31, 32, 7, 15, 16, 17, 0], dtype=torch.int32),
            before=torch.tensor([0, 1, 2, 0, 0, 1, 2, 0], dtype=torch.int32),
            guesses=torch.zeros(8, dtype=torch.int64),
            at=torch.zeros(8, dtype=torch.int64),
            first=torch.tensor([0, 3, 4, 0]),
            unread=torch.zeros(8, dtype=torch.int64),
            unread_at=torch.zeros(8, dtype=torch.int64),
        )
        kind(
            rows, SequenceRows(torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int32))
        ).guess_on(chosen, guesses, 3)
        found.append((rows.tokens.tolist(), rows.lengths.tolist()))
    assert found == [([6, 60, 70, 1, 3, 62, 72, 0], [33, 34, 35, 8, 17, 18, 19, 0])] * 2


def test_what_a_step_ends_with_is_counted(monkeypatch, folder):
    """All right; no guess; one right of two: up to the token behind the last right one."""
    host_cuda.pretend(monkeypatch, folder)
    chosen = torch.tensor([4, 5, 4, 1, 1, 3, 8])
    for kind in (KernelHandover, TorchHandover):
        rows = GuessedRows(
            tokens=torch.tensor([9, 4, 5, 0, 0, 1, 2, 0]),
            lengths=torch.tensor([30, 31, 32, 7, 15, 16, 17, 0], dtype=torch.int32),
            before=torch.tensor([0, 1, 2, 0, 0, 1, 2, 0], dtype=torch.int32),
            guesses=torch.zeros(8, dtype=torch.int64),
            at=torch.tensor([2, 2, 2, 0, 3, 3, 3, 0]),
            first=torch.tensor([0, 3, 4, 0]),
            unread=torch.zeros(8, dtype=torch.int64),
            unread_at=torch.zeros(8, dtype=torch.int64),
        )
        nobody = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
        times = torch.zeros(4, 10, dtype=torch.int32)
        times[2, 5] = 1
        kind(rows, SequenceRows(*nobody)).count(chosen, times, 3)
        want = torch.zeros_like(times)
        want[2, 4], want[2, 5], want[0, 1], want[3, 1], want[3, 3] = 2, 2, 1, 1, 1
        assert torch.equal(times, want)
