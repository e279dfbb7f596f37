"""Gated DeltaNet in plain torch: the reference of its kernels, and what a CPU runs.

Of a head with the state S [key_dim, value_dim], token by token:

    q, k, v = silu(conv(q, k, v)),  q, k of length 1,  q / √key_dim
    S = exp(g) · S,  g = −exp(A_log) · softplus(a + dt_bias)
    S = S + k ⊗ β · (v − Sᵀ k),  β = σ(b)
    out = norm(Sᵀ q) · silu(z)

Prompts go by chunks of CHUNK tokens. Within a chunk the corrections u = β · (v − Sᵀ k) are the
solution of a triangular system: u_i depends on those before it by β_i · k_i · k_j, decayed in
between. So a chunk costs a few products of matrices, and the state is read and written once:

    L u = β · v − β · exp(G) · (k S),    L = 1 + tril(β · k kᵀ · exp(G_i − G_j), −1)
    out = exp(G) · (q S) + tril(q kᵀ · exp(G_i − G_j)) u
    S' = exp(G_last) · S + (k · exp(G_last − G))ᵀ u,    G: g summed up from the chunk's first token
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from flyweight.batch import Batch, SequenceState, StateStorage, sequence_states
from flyweight.kernels.gated_delta.shape import NORM_EPSILON, DeltaShape, DeltaWeights

CHUNK = 64


def delta_whole(projected: Tensor, weights: DeltaWeights) -> Tensor:
    """Sequences [batch, tokens, projected] from their first token on → [batch, tokens, outputs]."""
    shape = weights.shape
    mixed = wide(projected[..., : shape.channels])
    history = mixed.new_zeros(*mixed.shape[:-2], shape.width - 1, shape.channels)
    mixed = convolve(torch.cat([history, mixed], -2), weights)
    parts = split(mixed, projected, weights)
    state = mixed.new_zeros(*mixed.shape[:-2], shape.value_heads, shape.key_dim, shape.value_dim)
    out, _ = run_chunks(*parts, state)
    return finish(out, projected, weights)


def delta_paged(
    projected: Tensor, cache: StateStorage, batch: Batch, weights: DeltaWeights
) -> Tensor:
    """Packed tokens [tokens, projected] of many sequences → [tokens, outputs]. Tokens of nobody
    come out as zeros.
    """
    shape = weights.shape
    assert batch.states is not None
    out = projected.new_zeros(len(projected), shape.outputs)
    listed = sequence_states(batch.states)
    single = [one for one in listed if one.tokens == 1 and one.source == one.slot]
    if single:
        rows = torch.tensor([one.begin for one in single], device=out.device)
        slots = torch.tensor([one.slot for one in single], device=out.device)
        starts = torch.tensor([one.start for one in single], device=out.device)
        out[rows] = delta_step(projected[rows], cache, slots, starts, weights)
    for one in listed:
        if one.tokens > 1 or one.source != one.slot:
            own = slice(one.begin, one.begin + one.tokens)
            out[own] = _run_sequence(projected[own], cache, one, weights)
    return out


def delta_step(
    projected: Tensor, cache: StateStorage, slots: Tensor, positions: Tensor, weights: DeltaWeights
) -> Tensor:
    """One token of each row's sequence: [rows, projected] → [rows, outputs]."""
    shape = weights.shape
    mixed = projected[:, : shape.channels]
    before = positions[:, None] - torch.arange(shape.width - 1, 0, -1, device=positions.device)
    history = cache.conv[slots[:, None], before % shape.width] * (before >= 0)[..., None]
    cache.conv[slots, positions % shape.width] = mixed
    mixed = convolve(torch.cat([wide(history), wide(mixed[:, None])], 1), weights)
    parts = split(mixed, projected[:, None], weights)
    out, state = run_chunks(*parts, cache.recurrent[slots])
    cache.recurrent[slots] = state
    return finish(out, projected[:, None], weights)[:, 0]


def _run_sequence(
    projected: Tensor, cache: StateStorage, one: SequenceState, weights: DeltaWeights
) -> Tensor:
    shape = weights.shape
    mixed = projected[:, : shape.channels]
    history = cache.history(one.source, one.start)
    together = torch.cat([history.to(mixed.dtype), mixed])
    query, key, value, decay, beta = split(convolve(wide(together), weights), projected, weights)
    state = cache.initial(one.source)
    cuts = [0, one.mark, one.tokens] if 0 < one.mark < one.tokens else [0, one.tokens]
    outs = []
    for begin, end in itertools.pairwise(cuts):
        q, k, v, g, b = (part[:, begin:end] for part in (query, key, value, decay, beta))
        out, state = run_chunks(q, k, v, g, b, state)
        outs.append(out)
        if end == one.mark:
            cache.keep(one.mark_slot, state, together[: end + shape.width - 1], one.start + end)
    cache.keep(one.slot, state, together, one.start + one.tokens)
    return finish(torch.cat(outs, 1), projected, weights)


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def convolve(x: Tensor, weights: DeltaWeights) -> Tensor:
    """[..., width − 1 + tokens, channels] → silu of [..., tokens, channels]."""
    tokens = x.shape[-2] - weights.shape.width + 1
    parts = [x[..., i : i + tokens, :] * row for i, row in enumerate(weights.conv)]
    return F.silu(torch.stack(parts).sum(0))


def split(
    mixed: Tensor, projected: Tensor, weights: DeltaWeights
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys [..., value_heads, tokens, key_dim], values [… value_dim], log decays and β
    [..., value_heads, tokens], of float32.
    """
    shape = weights.shape
    query, key, value = mixed.split([shape.keys, shape.keys, shape.outputs], -1)
    query = _heads(_unit(query, shape) * shape.key_dim**-0.5, shape)
    key = _heads(_unit(key, shape), shape)
    value = value.unflatten(-1, (shape.value_heads, -1)).transpose(-2, -3)
    begin = shape.channels + shape.outputs
    b, a = wide(projected[..., begin:]).split(shape.value_heads, -1)
    decay = weights.decay * F.softplus(a + weights.step_bias)
    return query, key, value, decay.transpose(-1, -2), b.sigmoid().transpose(-1, -2)


def _unit(x: Tensor, shape: DeltaShape) -> Tensor:
    """Heads [..., key_heads, key_dim] of length 1."""
    x = x.unflatten(-1, (shape.key_heads, shape.key_dim))
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()


def _heads(x: Tensor, shape: DeltaShape) -> Tensor:
    """Key heads [..., tokens, key_heads, key_dim] as those of each value head, before tokens."""
    return x.repeat_interleave(shape.sharing, -2).transpose(-2, -3)


def run_chunks(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """[..., heads, tokens, …] → [..., heads, tokens, value_dim], and the state after them."""
    outs = []
    for begin in range(0, query.shape[-2], CHUNK):
        span = slice(begin, begin + CHUNK)
        q, k, v = (x[..., span, :] for x in (query, key, value))
        b = beta[..., span, None]
        sums = decay[..., span].cumsum(-1)
        between = (sums[..., :, None] - sums[..., None, :]).tril().exp().tril()
        grown = sums.exp()[..., None]
        system = (b * k @ k.transpose(-1, -2)) * between
        wanted = b * (v - grown * (k @ state))
        # the diagonal is taken as ones
        u = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outs.append(grown * (q @ state) + ((q @ k.transpose(-1, -2)) * between) @ u)
        last = sums[..., -1:]
        left = k * (last - sums).exp()[..., None]
        state = last.exp()[..., None] * state + left.transpose(-1, -2) @ u
    return torch.cat(outs, -2), state


def finish(out: Tensor, projected: Tensor, weights: DeltaWeights) -> Tensor:
    """norm(out) · silu(z): [..., heads, tokens, value_dim] → [..., tokens, outputs]."""
    shape = weights.shape
    z = wide(projected[..., shape.channels : shape.channels + shape.outputs])
    out = out.transpose(-2, -3)
    out = out * (out.square().mean(-1, keepdim=True) + weights.epsilon).rsqrt() * weights.norm
    return (out.flatten(-2) * F.silu(z)).to(projected.dtype)
