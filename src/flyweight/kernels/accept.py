"""Where a drafting head goes on after a step that checked guesses: host side of cuda/accept.cu, and
the same by torch's ops.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight.kernels import jit

THREADS = 256


@dataclass(frozen=True, eq=False)
class ChainState:
    """What a head goes on from, a row a sequence."""

    hidden: Tensor  # [sequences, width]
    lengths: Tensor  # int32 [sequences]: places that the head has seen; 0: nobody is here
    tables: Tensor  # int32 [sequences, pages + 1]: a last page that no sequence has


@dataclass(frozen=True, eq=False)
class CheckedRows:
    """The rows of a step with guesses (`SharedRows`), and the tokens chosen after each."""

    chosen: Tensor  # int64 [rows]
    tokens: Tensor  # int64 [rows]
    before: Tensor  # int32 [rows]
    lengths: Tensor  # int32 [rows]
    tables: Tensor  # int32 [rows, pages]
    first: Tensor  # int64 [sequences]: the first row of each


def last_rows(chosen: Tensor, guesses: Tensor, first: Tensor) -> Tensor:
    """Of each sequence the last row whose guesses before it were right. `guesses` [rows]: the token
    guessed after each row; −1 where there is none, as after the last of a sequence.
    """
    wrong = (chosen != guesses).long()
    count = wrong.cumsum(0)
    return torch.searchsorted(count, (count - wrong)[first] + 1)


def accept(rows: CheckedRows, hidden: Tensor, state: ChainState) -> None:
    """Into the first rows of `state`, as many as `rows.first` has."""
    defines = {"WIDTH": hidden.shape[1], "THREADS": THREADS}
    kernel = jit.load("accept.cu", defines=defines).kernel("accept")
    args = (
        rows.chosen,
        rows.tokens,
        rows.before,
        rows.first,
        hidden,
        rows.lengths,
        rows.tables,
        state.hidden,
        state.lengths,
        state.tables,
        len(rows.chosen),
        rows.tables.shape[1],
        state.tables.shape[1],
    )
    kernel.launch(len(rows.first), THREADS, args, pdl=True)
