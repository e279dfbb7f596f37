"""Scheduled work as the decoder takes it: all sequences' new tokens one after the other, and
everything about them.

All integers of a step go to the device in one copy. A token that the step before samples, and the
host has not read, is taken from its row there.

A step may be padded to a size that comes again (`Padding`), for a captured pass. The padding is
tokens like any others, whose keys and values go to a block that no sequence owns: the rest of the
only sequence where it begins in this step (nothing before them sees later tokens), else one more
sequence. So no kernel has to know of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from torch import Tensor

from flyweight.batch import NOBODY, Batch, SequenceState
from flyweight.engine.rows import Rows
from flyweight.engine.work import Work
from flyweight.transfer import upload

# Tokens of a padded step: whole tiles of the matrix kernels. Beyond, the device is busy for longer
# than launching takes, and cuBLAS is slower when captured (2,048 tokens of Qwen3-8B in bf16: 51.6
# instead of 49.7 ms).
SIZES = (16, 32, 64, 128, 256, 320, *range(384, 1025, 128))
# and of parts of prompts without answers: few, so that all kinds of such passes can be captured
# before the first request
PART_SIZES = (64, 128, 256, 384, 512)


@dataclass(frozen=True)
class Packed:
    batch: Batch
    spans: list[tuple[int, int]]  # which rows of the logits belong to each work
    # int64: the rows of the logits that are sampled from, one for each output of a work
    last: Tensor
    rows: Tensor  # int64: where those sequences are in `Rows`
    lengths: Tensor  # int32: what they will have, the sampled token counted


@dataclass(frozen=True)
class Padding:
    """Make the step `tokens` long; what has to be written goes to `block`."""

    tokens: int
    block: int
    # where a captured pass finds its integers: tokens, positions, slots, block tables
    into: Tensor | None = None


def pack(
    works: Sequence[Work], rows: Rows, *, block_size: int, padding: Padding | None = None
) -> Packed:
    pieces = [describe(work, block_size) for work in works]
    counts, kv_lengths = [work.count for work in works], [work.start + work.count for work in works]
    starts = [0, *itertools.accumulate(counts)]
    spans, outputs = spans_of(works, starts)
    sampling = [i for i, work in enumerate(works) if work.samples]
    unread = [
        i for i, work in enumerate(works) if work.start + work.known > len(work.request.tokens)
    ]
    unread_at = [starts[i] + works[i].known - 1 for i in unread]
    next_lengths = [
        kv_lengths[i] + 1 - guess for i in sampling for guess in reversed(range(works[i].outputs))
    ]
    last_rows = [
        row for i in sampling for row in range(spans[i][1] - works[i].outputs, spans[i][1])
    ]
    sampled_works = [i for i in sampling for _ in range(works[i].outputs)]
    blocks = [work.request.blocks for work in works]
    if padding and (more := padding.tokens - starts[-1]):
        pieces.append(filler(more, padding.block, block_size))
        if begins_alone(works):
            starts[-1] = kv_lengths[-1] = padding.tokens
            blocks[-1] = blocks[-1] + [padding.block] * (
                -(-padding.tokens // block_size) - len(blocks[-1])
            )
        else:
            starts.append(padding.tokens)
            kv_lengths.append(more)
            blocks.append([padding.block] * -(-more // block_size))

    def rows_of(chosen: Sequence[int]) -> list[int]:
        return [rows.row_of[works[i].request.number] for i in chosen]

    columns = [numpy.concatenate(column) for column in zip(*pieces, strict=True)]
    adapters = [slots_of(works, counts, len(columns[0]))] if rows.adapters is not None else []
    states = [states_of(works, starts)] if rows.states is not None else []
    others = [outputs, last_rows, rows_of(sampled_works), unread_at, rows_of(unread)]
    (
        tokens,
        positions,
        slots,
        *beside,
        tables,
        output_rows,
        last,
        at,
        unread_places,
        unread_rows,
        lengths,
    ) = upload(
        rows.device,
        *columns,
        *adapters,
        *states,
        table_of(blocks),
        *(numpy.array(item, dtype=numpy.int64) for item in others),
        numpy.array(next_lengths, dtype=numpy.int32),
        into=padding.into if padding else None,
    )
    if unread:
        tokens.index_copy_(0, unread_places, rows.tokens.index_select(0, unread_rows))
    batch = Batch(
        tokens=tokens,
        positions=positions,
        slots=slots,
        block_tables=tables,
        query_starts=starts,
        kv_lengths=kv_lengths,
        output_rows=output_rows,
        adapters=beside[0] if adapters else None,
        states=beside[-1] if states else None,
    )
    return Packed(batch, spans, last, at, lengths)


def slots_of(works: Sequence[Work], counts: Sequence[int], tokens: int) -> numpy.ndarray:
    """Of the adapter of each token; the padding has none."""
    slots = numpy.full(tokens, NOBODY, dtype=numpy.int32)
    found = numpy.repeat(
        numpy.array([work.request.adapter for work in works], dtype=numpy.int32), counts
    )
    slots[: len(found)] = found
    return slots


def states_of(works: Sequence[Work], starts: Sequence[int]) -> numpy.ndarray:
    """`Batch.states`; the padding has none."""
    uses = [work.state for work in works]
    rows = [
        SequenceState(begin, work.count, work.start, use.source, use.slot, use.mark, use.mark_slot)
        for work, begin, use in zip(works, starts, uses, strict=False)
        if use is not None
    ]
    assert len(rows) == len(works), "the scheduler has given no slots"
    return numpy.array(rows, dtype=numpy.int32)


def begins_alone(works: Sequence[Work]) -> bool:
    return len(works) == 1 and works[0].start == 0


def padded_tokens(works: Sequence[Work]) -> int | None:
    """The size that a step is padded to; None: more tokens than any."""
    count = sum(work.count for work in works)
    parts = not begins_alone(works) and all(work.known > 1 for work in works)
    sizes = PART_SIZES if parts and count <= PART_SIZES[-1] else SIZES
    return next((size for size in sizes if count <= size), None)


# token ids, positions and slots, int64
Columns = tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]


def describe(work: Work, block_size: int) -> Columns:
    """A token id that is not known here is 0."""
    request, stop, first = work.request, work.start + work.count, work.start // block_size
    tokens, at = numpy.zeros(work.count, dtype=numpy.int64), numpy.arange(work.start, stop)
    known = request.tokens[work.start : work.start + work.known]
    tokens[: len(known)] = known
    tokens[work.known :] = list(work.drafts)
    blocks = numpy.array(request.blocks[first : -(-stop // block_size)])
    return (
        tokens,
        at + request.rope_row,
        blocks[at // block_size - first] * block_size + at % block_size,
    )


def filler(count: int, block: int, block_size: int) -> Columns:
    zeros = numpy.zeros(count, dtype=numpy.int64)
    return zeros, zeros, block * block_size + numpy.arange(count) % block_size


def spans_of(
    works: Sequence[Work], starts: Sequence[int]
) -> tuple[list[tuple[int, int]], list[int]]:
    """The tokens whose logits are wanted, and which of them belong to each work: the last one, or
    all of a prompt's.
    """
    spans: list[tuple[int, int]] = []
    outputs: list[int] = []
    for work, end in zip(works, starts[1:], strict=True):
        wanted = work.count if work.request.params.prompt_logprobs is not None else work.outputs
        spans.append((len(outputs), len(outputs) + wanted))
        outputs += range(end - wanted, end)
    return spans, outputs


def table_of(blocks: Sequence[Sequence[int]]) -> numpy.ndarray:
    """The sequences' blocks, padded with 0: int32 [sequences, most blocks]."""
    padded = numpy.zeros((len(blocks), max(map(len, blocks))), dtype=numpy.int32)
    for row, listed in zip(padded, blocks, strict=True):
        row[: len(listed)] = listed
    return padded


def following(work: Work) -> list[int]:
    """The prompt tokens that come right after each of this chunk's."""
    return work.request.prompt[work.start + 1 : work.start + work.count + 1]
