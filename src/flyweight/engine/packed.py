"""Scheduled work as the decoder takes it: all sequences' new tokens one after the other, and everything about them.

All integers of a step go to the device in one copy. A token that the step before samples, and the host has not read,
is taken from its row there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from torch import Tensor

from flyweight.engine.batch import Batch
from flyweight.engine.rows import Rows
from flyweight.engine.scheduler import Work
from flyweight.engine.transfer import upload


@dataclass(frozen=True)
class Packed:
    batch: Batch
    spans: list[tuple[int, int]]  # which rows of the logits belong to each work
    last: Tensor  # int64: the rows of the logits that are sampled from
    rows: Tensor  # int64: where those sequences are in `Rows`
    lengths: Tensor  # int32: what they will have, the sampled token counted


def pack(works: Sequence[Work], rows: Rows, *, block_size: int) -> Packed:
    pieces = [describe(work, block_size) for work in works]
    starts = [0, *numpy.cumsum([work.count for work in works]).tolist()]
    kv_lengths = [work.start + work.count for work in works]
    spans, outputs = spans_of(works, starts)
    sampling = [i for i, work in enumerate(works) if work.samples]
    unread = [i for i, work in enumerate(works) if work.start + work.count > len(work.request.tokens)]

    def rows_of(chosen: Sequence[int]) -> list[int]:
        return [rows.row_of[works[i].request.number] for i in chosen]

    longs = [*(numpy.concatenate(column) for column in zip(*pieces, strict=True)), outputs, [spans[i][1] - 1 for i in sampling],
             rows_of(sampling), [starts[i + 1] - 1 for i in unread], rows_of(unread)]
    ints = [tables(works), [kv_lengths[i] + 1 for i in sampling]]
    tokens, positions, slots, output_rows, last, at, unread_at, unread_rows, block_tables, lengths = upload(
        rows.device, *(numpy.asarray(item, dtype=numpy.int64) for item in longs),
        *(numpy.asarray(item, dtype=numpy.int32) for item in ints))
    if unread:
        tokens.index_copy_(0, unread_at, rows.tokens.index_select(0, unread_rows))
    batch = Batch(tokens=tokens, positions=positions, slots=slots, block_tables=block_tables, query_starts=starts,
                  kv_lengths=kv_lengths, output_rows=output_rows)
    return Packed(batch, spans, last, at, lengths)


def describe(work: Work, block_size: int) -> tuple[Any, Any, Any]:
    """Token ids (0 for one that is not known here), positions and slots."""
    request, stop, first = work.request, work.start + work.count, work.start // block_size
    known, at = request.tokens[work.start : stop], numpy.arange(work.start, stop)
    blocks = numpy.array(request.blocks[first : -(-stop // block_size)])
    return known + [0] * (work.count - len(known)), at, blocks[at // block_size - first] * block_size + at % block_size


def spans_of(works: Sequence[Work], starts: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """The tokens whose logits are wanted, and which of them belong to each work: the last one, or all of a prompt's."""
    spans: list[tuple[int, int]] = []
    outputs: list[int] = []
    for work, end in zip(works, starts[1:], strict=True):
        wanted = work.count if work.request.params.prompt_logprobs is not None else int(work.samples)
        spans.append((len(outputs), len(outputs) + wanted))
        outputs += range(end - wanted, end)
    return spans, outputs


def tables(works: Sequence[Work]) -> numpy.ndarray:
    """The works' blocks, padded with 0: int32 [works, most blocks]."""
    padded = numpy.zeros((len(works), max(len(work.request.blocks) for work in works)), dtype=numpy.int32)
    for row, work in zip(padded, works, strict=True):
        row[: len(work.request.blocks)] = work.request.blocks
    return padded


def following(work: Work) -> list[int]:
    """The prompt tokens that come right after each of this chunk's."""
    return work.request.prompt[work.start + 1 : work.start + work.count + 1]
