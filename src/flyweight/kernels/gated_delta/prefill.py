"""Prompts and mixed steps through a gated DeltaNet layer, by chunks of 64 tokens, in Triton.

What is computed is in `reference.py`. Five kernels follow each other:

    _convolve   silu(conv(q, k, v)) of all tokens
    _remember   the last inputs of the convolution go to the states' slots
    _invert     of each chunk and head: L⁻¹, by substitution, row after row (all chunks at once)
    _scan       of each sequence, head and part of its values: chunk after chunk; the state stays in
                registers
    _finish     norm and gate

A sequence's chunks are counted from its first token of the step, and anew from its mark, where the
state is written to a second slot: so every program finds its chunk from `Batch.states` alone, and
nothing has to come back to the host. Limit: `_scan` runs as many programs as there are heads and
parts, each of which goes through its sequence alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flyweight.batch import Batch, StateStorage, fresh_states
from flyweight.kernels.gated_delta.reference import CHUNK
from flyweight.kernels.gated_delta.shape import NORM_EPSILON, DeltaShape, DeltaWeights

VALUES = 32  # columns of a state that one program of `_scan` has
TOKENS = 16  # that one program of `_convolve` has
CHANNELS = 128
FIELDS = tl.constexpr(7)  # of `batch.SequenceState`


@triton.jit
def _sequence(states, index):
    row = states + index * FIELDS
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)


@triton.jit
def _chunk(states, index, chunk, count, SIZE: tl.constexpr):
    """Where a chunk of a sequence begins and ends; chunks that are not there are empty."""
    mark = tl.load(states + index * FIELDS + 5)
    before = (mark + SIZE - 1) // SIZE
    first = tl.where(chunk < before, chunk * SIZE, mark + (chunk - before) * SIZE)
    last = tl.where(chunk < before, tl.minimum(first + SIZE, mark), tl.minimum(first + SIZE, count))
    return first, last


@triton.jit(do_not_specialize_on_alignment=["states"])
def _convolve(
    projected,
    conv,
    weight,
    states,
    out,
    stride,
    CHANNELS_ALL: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    begin, count, start, source, _ = _sequence(states, tl.program_id(0))
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    live = (token < count) & (channel < CHANNELS_ALL)
    sums = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
    for back in tl.static_range(WIDTH):
        at = token - back
        inside = live & (at >= 0)
        row = projected + (begin + at).to(tl.int64) * stride
        x = tl.load(row + channel, mask=inside, other=0.0)
        position = start + at
        older = live & (at < 0) & (position >= 0) & (source >= 0)
        held = conv + (source.to(tl.int64) * WIDTH + (position + WIDTH) % WIDTH) * CHANNELS_ALL
        y = tl.load(held + channel, mask=older, other=0.0)
        factor = tl.load(
            weight + (WIDTH - 1 - back) * CHANNELS_ALL + channel,
            mask=channel < CHANNELS_ALL,
            other=0.0,
        )
        sums += (x.to(tl.float32) + y.to(tl.float32)) * factor
    sums = sums / (1.0 + tl.exp(-sums))
    place = out + (begin + token).to(tl.int64) * CHANNELS_ALL + channel
    tl.store(place, sums.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize_on_alignment=["states"])
def _remember(
    projected,
    conv,
    states,
    stride,
    CHANNELS_ALL: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """A step's own end, and its mark: positions of this step come from the projections, older ones
    from the slot where the sequence came from.
    """
    index = tl.program_id(0)
    begin, count, start, source, slot = _sequence(states, index)
    mark = tl.load(states + index * FIELDS + 5)
    mark_slot = tl.load(states + index * FIELDS + 6)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    live = channel < CHANNELS_ALL
    # the mark first: the end may overwrite what it copies
    for marked in tl.static_range(1, -1, -1):
        tokens = mark if marked else count
        to = mark_slot if marked else slot
        wanted = (mark > 0) if marked else (count > 0)
        for back in tl.static_range(1, WIDTH):
            at = tokens - back
            row = (start + at + WIDTH) % WIDTH
            fresh = live & wanted & (at >= 0)
            older = live & wanted & (at < 0) & (start + at >= 0) & (source >= 0) & (source != to)
            x = tl.load(
                projected + (begin + at).to(tl.int64) * stride + channel, mask=fresh, other=0.0
            )
            held = conv + (source.to(tl.int64) * WIDTH + row) * CHANNELS_ALL + channel
            y = tl.load(held, mask=older, other=0.0)
            target = conv + (to.to(tl.int64) * WIDTH + row) * CHANNELS_ALL + channel
            tl.store(target, tl.where(fresh, x, y), mask=fresh | older)


@triton.jit
def _decays(
    projected, decay, step_bias, rows, live, head, stride, HEADS: tl.constexpr, GATES: tl.constexpr
):
    """Log decays summed up over a chunk, and β."""
    own = projected + rows * stride + GATES
    b = tl.load(own + head, mask=live, other=0.0).to(tl.float32)
    a = tl.load(own + HEADS + head, mask=live, other=0.0).to(tl.float32) + tl.load(step_bias + head)
    soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    logs = tl.where(live, tl.load(decay + head) * soft, 0.0)
    beta = tl.where(live, 1.0 / (1.0 + tl.exp(-b)), 0.0)
    return tl.cumsum(logs, 0), beta


@triton.jit
def _unit(mixed, rows, live, first, stride, epsilon, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """[tokens, SIZE] of length 1."""
    column = tl.arange(0, BLOCK)[None, :]
    x = tl.load(
        mixed + rows[:, None] * stride + first + column,
        mask=live[:, None] & (column < SIZE),
        other=0.0,
    ).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) + epsilon)[:, None]


@triton.jit(do_not_specialize_on_alignment=["states"])
def _invert(
    mixed,
    projected,
    decay,
    step_bias,
    states,
    inverses,
    stride,
    epsilon,
    HEADS: tl.constexpr,
    SHARING: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    CHANNELS_ALL: tl.constexpr,
    GATES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    chunk = tl.program_id(1)
    head = tl.program_id(2)
    begin, count, _, _, _ = _sequence(states, index)
    first, last = _chunk(states, index, chunk, count, SIZE)
    if first >= last:
        return
    token = tl.arange(0, SIZE)
    live = first + token < last
    rows = (begin + first + token).to(tl.int64)
    key = _unit(
        mixed, rows, live, KEYS + head // SHARING * KEY_DIM, CHANNELS_ALL, epsilon, KEY_DIM, BLOCK
    )
    sums, beta = _decays(projected, decay, step_bias, rows, live, head, stride, HEADS, GATES)
    # transposed, so that a row of L lies along the tokens that it multiplies
    products = tl.dot(key, tl.trans(key), input_precision="tf32")
    lower = token[:, None] < token[None, :]
    between = tl.exp(tl.where(lower, sums[None, :] - sums[:, None], 0.0))
    system = tl.where(lower, products * between * beta[None, :], 0.0)
    found = tl.where(token[:, None] == token[None, :], 1.0, 0.0)
    for i in range(1, SIZE):
        factors = tl.sum(tl.where(token[None, :] == i, system, 0.0), 1)
        row = tl.sum(factors[:, None] * found, 0)
        found -= tl.where(token[:, None] == i, row[None, :], 0.0)
    number = ((index * tl.num_programs(1) + chunk) * HEADS + head).to(tl.int64)
    place = inverses + number * SIZE * SIZE
    tl.store(place + token[:, None] * SIZE + token[None, :], found)


@triton.jit(do_not_specialize_on_alignment=["states"])
def _scan(
    mixed,
    projected,
    decay,
    step_bias,
    states,
    inverses,
    recurrent,
    out,
    chunks,
    stride,
    epsilon,
    scale,
    HEADS: tl.constexpr,
    SHARING: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    CHANNELS_ALL: tl.constexpr,
    GATES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
):
    index = tl.program_id(0)
    head = tl.program_id(1)
    column = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    begin, count, _, source, slot = _sequence(states, index)
    mark = tl.load(states + index * FIELDS + 5)
    mark_slot = tl.load(states + index * FIELDS + 6)
    token = tl.arange(0, SIZE)
    dimension = tl.arange(0, BLOCK)
    held = (dimension < KEY_DIM)[:, None] & (column < VALUE_DIM)[None, :]
    of_head = head * KEY_DIM * VALUE_DIM + dimension[:, None] * VALUE_DIM + column[None, :]
    whole = HEADS * KEY_DIM * VALUE_DIM
    state = tl.load(
        recurrent + source.to(tl.int64) * whole + of_head, mask=held & (source >= 0), other=0.0
    )
    total = (mark + SIZE - 1) // SIZE + (count - mark + SIZE - 1) // SIZE
    for chunk in range(0, total):
        first, last = _chunk(states, index, chunk, count, SIZE)
        live = first + token < last
        rows = (begin + first + token).to(tl.int64)
        key_at = head // SHARING * KEY_DIM
        query = _unit(mixed, rows, live, key_at, CHANNELS_ALL, epsilon, KEY_DIM, BLOCK) * scale
        key = _unit(mixed, rows, live, KEYS + key_at, CHANNELS_ALL, epsilon, KEY_DIM, BLOCK)
        value_at = mixed + rows[:, None] * CHANNELS_ALL + 2 * KEYS + head * VALUE_DIM
        shown = live[:, None] & (column < VALUE_DIM)[None, :]
        value = tl.load(value_at + column[None, :], mask=shown, other=0.0).to(tl.float32)
        sums, beta = _decays(projected, decay, step_bias, rows, live, head, stride, HEADS, GATES)
        grown = tl.exp(sums)[:, None]
        wanted = beta[:, None] * (value - grown * tl.dot(key, state))
        place = inverses + ((index * chunks + chunk) * HEADS + head).to(tl.int64) * SIZE * SIZE
        inverse = tl.load(place + token[:, None] * SIZE + token[None, :])
        change = tl.dot(inverse, wanted)
        upto = token[:, None] >= token[None, :]
        between = tl.where(upto, tl.exp(tl.where(upto, sums[:, None] - sums[None, :], 0.0)), 0.0)
        weights = tl.dot(query, tl.trans(key)) * between
        result = grown * tl.dot(query, state) + tl.dot(weights, change)
        to = out + rows[:, None] * (HEADS * VALUE_DIM) + head * VALUE_DIM
        tl.store(to + column[None, :], result, mask=shown)
        end = tl.sum(tl.where(token == SIZE - 1, sums, 0.0), 0)
        left = key * tl.exp(end - sums)[:, None]
        state = tl.exp(end) * state + tl.dot(tl.trans(left), change)
        if last == mark:
            tl.store(recurrent + mark_slot.to(tl.int64) * whole + of_head, state, mask=held)
    if count > 0:
        tl.store(recurrent + slot.to(tl.int64) * whole + of_head, state, mask=held)


@triton.jit
def _finish(
    sums,
    projected,
    norm,
    out,
    stride,
    epsilon,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    live = column < VALUE_DIM
    at = token * (HEADS * VALUE_DIM) + head * VALUE_DIM + column
    x = tl.load(sums + at, mask=live, other=0.0)
    gate_at = projected + token * stride + GATE + head * VALUE_DIM + column
    z = tl.load(gate_at, mask=live, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) / VALUE_DIM + epsilon)
    x *= tl.load(norm + column, mask=live, other=0.0)
    tl.store(out + at, (x * z / (1.0 + tl.exp(-z))).to(out.dtype.element_ty), mask=live)


def delta_paged(
    projected: Tensor, cache: StateStorage, batch: Batch, weights: DeltaWeights
) -> Tensor:
    """Packed tokens [tokens, projected] of many sequences → [tokens, outputs]."""
    assert batch.states is not None
    counts = [end - begin for begin, end in itertools.pairwise(batch.query_starts)]
    return run(projected, cache, batch.states, counts, weights)


def delta_whole(projected: Tensor, weights: DeltaWeights) -> Tensor:
    """Sequences [batch, tokens, projected] from their first token on → [batch, tokens, outputs]."""
    count, tokens, _ = projected.shape
    device = projected.device
    cache = StateStorage.zeros(weights.shape.state, count, projected.dtype, device)
    lengths = [tokens] * count
    flat = projected.reshape(count * tokens, -1)
    return run(flat, cache, fresh_states(lengths, device), lengths, weights).view(count, tokens, -1)


def run(
    projected: Tensor,
    cache: StateStorage,
    states: Tensor,
    counts: Sequence[int],
    weights: DeltaWeights,
) -> Tensor:
    """`counts`: tokens of each sequence, as `states` has them on the device."""
    shape = weights.shape
    device = projected.device
    sequences = len(counts)
    longest = max(counts)
    tokens, stride = projected.shape[0], projected.stride(0)
    blocks = triton.cdiv(shape.channels, CHANNELS)
    mixed = torch.empty(tokens, shape.channels, dtype=projected.dtype, device=device)
    common = dict(CHANNELS_ALL=shape.channels, WIDTH=shape.width, CHANNELS=CHANNELS)
    _convolve[sequences, triton.cdiv(longest, TOKENS), blocks](
        projected, cache.conv, weights.conv, states, mixed, stride, TOKENS=TOKENS, **common
    )
    _remember[sequences, blocks](projected, cache.conv, states, stride, **common)
    sums = _scanned(projected, mixed, cache, states, longest, weights)
    out = torch.empty(tokens, shape.outputs, dtype=projected.dtype, device=device)
    _finish[tokens, shape.value_heads](
        sums,
        projected,
        weights.norm,
        out,
        stride,
        weights.epsilon,
        HEADS=shape.value_heads,
        VALUE_DIM=shape.value_dim,
        GATE=shape.channels,
        BLOCK=triton.next_power_of_2(shape.value_dim),
        num_warps=1,
    )
    return out


def _scanned(
    projected: Tensor,
    mixed: Tensor,
    cache: StateStorage,
    states: Tensor,
    longest: int,
    weights: DeltaWeights,
) -> Tensor:
    """Sᵀ q of all tokens, [tokens, outputs] in float32; the states move on."""
    shape = weights.shape
    device = projected.device
    sequences = len(states)
    # a mark begins a chunk of its own
    chunks = triton.cdiv(longest, CHUNK) + 1
    inverses = torch.empty(
        sequences, chunks, shape.value_heads, CHUNK, CHUNK, dtype=torch.float32, device=device
    )
    sums = torch.zeros(len(projected), shape.outputs, dtype=torch.float32, device=device)
    numbers = constants_of(shape)
    first = (mixed, projected, weights.decay, weights.step_bias, states, inverses)
    stride = projected.stride(0)
    _invert[sequences, chunks, shape.value_heads](*first, stride, NORM_EPSILON, **numbers)
    _scan[sequences, shape.value_heads, triton.cdiv(shape.value_dim, VALUES)](
        *first,
        cache.recurrent,
        sums,
        chunks,
        stride,
        NORM_EPSILON,
        shape.key_dim**-0.5,
        VALUE_DIM=shape.value_dim,
        VALUES=VALUES,
        num_stages=1,
        **numbers,
    )
    return sums


def constants_of(shape: DeltaShape) -> dict[str, int]:
    return dict(
        HEADS=shape.value_heads,
        SHARING=shape.sharing,
        KEY_DIM=shape.key_dim,
        KEYS=shape.keys,
        CHANNELS_ALL=shape.channels,
        GATES=shape.channels + shape.outputs,
        SIZE=CHUNK,
        BLOCK=max(16, triton.next_power_of_2(shape.key_dim)),
    )
