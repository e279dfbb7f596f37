"""Multi-head latent attention (`plan.LatentPlan`): one row of the cache for all heads of a token.

    queries   q x, or q_b(norm(q_a x))                       [tokens, heads, plain + rope]
    row       norm(latent) | turned rope part of the key     [tokens, rank + rope]

Prompts expand the rows of their sequence: kv_b makes keys and values of every head, and attention
is the usual one. Steps of one token each read the rows as they are. With kv_b of a head cut into
its keys K [plain, rank] and its values V [value, rank],

    score = q · (K row)  = (Kᵀ q) · row        out = V (Σ share · row)

so a query is taken into the space of rows (`absorb`), all heads share one key of rank + rope
numbers whose first `rank` are its value, and what comes out is taken back (`release`). K and V are
kept in the model's type whatever kv_b is stored in: they multiply single vectors, head by head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from flyweight.batch import Batch, KVStorage
from flyweight.kernels import reference
from flyweight.kernels.attention import torch_runs
from flyweight.kernels.linear.fused import Norm
from flyweight.models.layers import Linear
from flyweight.models.plan import LatentPlan, LayerPlan

Rows = tuple[Tensor, Tensor]  # cos and sin of a step, from `rope_rows`


class Latent:
    """What one layer's latent attention has beside qkv and o."""

    def __init__(
        self,
        plan: LatentPlan,
        heads: int,
        *,
        norms: dict[str, Norm],
        linears: dict[str, Linear],
        device: torch.device | str,
        dtype: torch.dtype,
    ):
        self.plan = plan
        self.heads = heads
        self.device = torch.device(device)
        self.dtype = dtype
        self.norm = norms[plan.norm.name]
        self.query_norm = None if plan.query_norm is None else norms[plan.query_norm.name]
        self.query_b = None if plan.query_b is None else linears[plan.query_b.name]
        self.kv_b = linears[plan.kv_b.name]

    @classmethod
    def load(
        cls,
        layer: LayerPlan,
        linears: dict[str, Linear],
        tensor: Callable[[str, int], Tensor],
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> Latent | None:
        """None: the layer's heads have keys and values of their own."""
        plan = layer.attention.latent
        if plan is None:
            return None
        norms = {
            norm.name: Norm(tensor(f"{norm.name}.weight", width), plan.epsilon)
            for norm, width in plan.norms
        }
        heads = layer.attention.heads
        return cls(plan, heads, norms=norms, linears=linears, device=device, dtype=dtype)

    @functools.cached_property
    def absorbed(self) -> tuple[Tensor, Tensor]:
        """K [heads, plain, rank] and V [heads, value, rank]. Multiplied with the identity, kv_b
        gives its weight, whatever holds it.
        """
        plan = self.plan
        with torch.inference_mode():
            identity = torch.eye(plan.rank, dtype=self.dtype, device=self.device)
            whole = self.kv_b(identity).view(plan.rank, self.heads, -1)
            keys, values = whole.split_with_sizes([plan.plain_dim, plan.value_dim], -1)
            return keys.permute(1, 2, 0).contiguous(), values.permute(1, 2, 0).contiguous()

    def prepare(self) -> None:
        """Make K and V now, while the memory that they take is counted."""
        assert self.absorbed

    @property
    def nbytes(self) -> int:
        """Of K and V."""
        outputs = self.heads * (self.plan.plain_dim + self.plan.value_dim)
        return outputs * self.plan.rank * self.dtype.itemsize

    def queries_and_rows(self, projected: Tensor, turn: Rows) -> tuple[Tensor, Tensor]:
        """What qkv gives, [..., tokens, outputs] → queries [..., tokens, heads, plain + rope] and
        rows [..., tokens, rank + rope], both turned.
        """
        plan = self.plan
        width = plan.rank + plan.rope_dim
        first, compressed = projected.split([projected.shape[-1] - width, width], -1)
        if self.query_b is not None and self.query_norm is not None:
            first = self.query_b(self._normed(first, self.query_norm))
        queries = first.unflatten(-1, (self.heads, plan.query_dim))
        latent, rope = compressed.split([plan.rank, plan.rope_dim], -1)
        turned = reference.rotate(queries[..., plan.plain_dim :], *turn)
        queries = torch.cat([queries[..., : plan.plain_dim], turned], -1)
        key = reference.rotate(rope[..., None, :], *turn)[..., 0, :]
        return queries, torch.cat([self._normed(latent, self.norm), key], -1)

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        # a part of a row: kernels want their input whole
        return self.kv_b.fused.ops.normalize(x.contiguous(), norm)

    def expand(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [..., tokens, heads, plain + rope] and values [..., heads, value] of rows."""
        plan = self.plan
        made = self.kv_b(rows[..., : plan.rank].contiguous()).unflatten(-1, (self.heads, -1))
        keys, values = made.split([plan.plain_dim, plan.value_dim], -1)
        rope = rows[..., None, plan.rank :].expand(*keys.shape[:-1], plan.rope_dim)
        return torch.cat([keys, rope], -1), values

    def absorb(self, queries: Tensor) -> Tensor:
        """[tokens, heads, plain + rope] → [tokens, heads, rank + rope]"""
        plain, rope = queries.split([self.plan.plain_dim, self.plan.rope_dim], -1)
        inside = torch.bmm(plain.transpose(0, 1), self.absorbed[0]).transpose(0, 1)
        return torch.cat([inside, rope], -1)

    def release(self, mixed: Tensor) -> Tensor:
        """[tokens, heads, rank] → [tokens, heads, value]"""
        return torch.bmm(mixed.transpose(0, 1), self.absorbed[1].mT).transpose(0, 1)

    # -- attention -------------------------------------------------------------------------

    def attend_whole(self, projected: Tensor, turn: Rows, scale: float) -> Tensor:
        """Sequences [batch, tokens, outputs of qkv] from their first token on → [batch, tokens,
        heads, value].
        """
        queries, rows = self.queries_and_rows(projected, turn)
        keys, values = self.expand(rows)
        return reference.causal_attention(queries, keys, values, scale=scale)

    def attend_paged(
        self,
        projected: Tensor,
        turn: Rows,
        scale: float,
        *,
        batch: Batch,
        cache: KVStorage,
        pieces: Callable[[], list[reference.Piece]],
    ) -> Tensor:
        """Packed tokens [tokens, outputs of qkv] → [tokens, heads, value]; their rows are written
        to the cache first. `pieces` are asked for where something is read from there: a prompt
        alone that begins here has all of its rows, and so can be captured.
        """
        queries, rows = self.queries_and_rows(projected, turn)
        cache.write_rows(rows, batch.slots)
        if batch.begins_alone and len(rows) > 1:
            return self._attend_own(queries, rows, scale)
        parts = [
            self._attend_own(queries[piece.begin : piece.end], rows[piece.begin : piece.end], scale)
            if piece.causal
            else self._attend_piece(queries[piece.begin : piece.end], cache, piece, scale)
            for piece in pieces()
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_own(self, queries: Tensor, rows: Tensor, scale: float) -> Tensor:
        """A sequence from its first token on."""
        keys, values = self.expand(rows)
        if torch_runs.takes_last(queries):
            query, keys, values = (x.transpose(0, 1) for x in (queries, keys, values))
            return torch_runs.attend_last(query, keys, values, scale).transpose(0, 1)
        whole = queries[None], keys[None], values[None]
        return reference.causal_attention(*whole, scale=scale)[0]

    def _attend_piece(
        self, queries: Tensor, cache: KVStorage, piece: reference.Piece, scale: float
    ) -> Tensor:
        """Queries of sequences that began before, over what is cached of them."""
        slots = cache.keys.flatten(0, 2)  # one kv head
        rows = slots[piece.rows].view(piece.sequences, -1, slots.shape[-1])
        if piece.end - piece.begin == piece.sequences:
            # one token each: all heads are the queries of one head
            inside = self.absorb(queries)[:, None]
            values = rows[:, None, :, : self.plan.rank]
            mixed = F.scaled_dot_product_attention(
                inside, rows[:, None], values, piece.mask, scale=scale
            )
            return self.release(mixed[:, 0])
        keys, values = (x.transpose(1, 2) for x in self.expand(rows))
        if torch_runs.takes_last(queries):
            ours = queries.transpose(0, 1)
            return torch_runs.attend_last(ours, keys[0], values[0], scale).transpose(0, 1)
        out = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys,
            values,
            piece.mask,
            scale=scale,
        )
        return out[0].transpose(0, 1)
