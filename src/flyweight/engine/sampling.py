"""From logits to tokens, for all rows of a step at once, in plain tensor ops that run alike on CPU and GPU.

Choosing at random is argmax(logit / temperature + Gumbel noise), which draws from the softmax without normalizing.
The noise of a token is a hash of (seed, position, token id): the same seed gives the same text whatever else is in
the batch, there is no generator state to keep, and a CUDA graph can replay it. The trade-off: every candidate costs
a hash, about ten integer ops, where a generator would make one number a row.

The hot path has no data-dependent shape and no host read on CUDA. On the CPU, where a full sort of the vocabulary
costs more than a layer, the filters look at the best candidates first and at all only when those do not suffice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight.engine.request import Request, SamplingParams

MASK = 0xFFFFFFFF
PREFIX = 1024  # candidates that the CPU sorts before it sorts all
COLUMNS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class SamplingBatch:
    """The parameters of a step's rows. The two flags are facts the host knows, to choose the cheapest path."""

    greedy: bool  # every row: temperature 0
    filtered: bool  # some row: top_k, top_p or min_p
    limit: int  # most candidates any row can have
    values: Tensor  # float32 [len(COLUMNS), rows]
    top_k: Tensor  # int64 [rows]
    seeds: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]: of the token to be chosen
    bias: tuple[Tensor, Tensor, Tensor] | None  # (row, token id, value) of every biased logit
    seen: Tensor | None  # int32 [2, rows, vocabulary]: times in the prompt, times in the answer; None: no penalties

    def __getattr__(self, name: str) -> Tensor:
        if name not in COLUMNS:
            raise AttributeError(name)
        return self.values[COLUMNS.index(name)][:, None]  # [rows, 1]


def mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash (lowbias32), in int64 so that the shifts are logical."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def gumbel_noise(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Float32 [rows, ids]; ids [ids] or [rows, ids]."""
    low, high = seeds & MASK, (seeds >> 32) & MASK
    first = mix(mix(low) ^ (positions & MASK))[:, None]
    second = mix(mix(high ^ 0x9E3779B9) + positions & MASK)[:, None]
    bits = mix(mix(ids ^ first) + second & MASK)
    # A uniform number with full relative precision near 0, where the winners are, and never 0 or 1.
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return torch.log1p(-uniform).neg_().log_().neg_()


def apply_penalties(logits: Tensor, batch: SamplingBatch) -> Tensor:
    if batch.bias is not None:
        rows, ids, values = batch.bias
        logits = logits.index_put((rows, ids), values, accumulate=True)
    if batch.seen is None:
        return logits
    in_prompt, in_answer = batch.seen
    repeated = torch.where(logits > 0, logits / batch.repetition_penalty, logits * batch.repetition_penalty)
    logits = torch.where(in_prompt + in_answer > 0, repeated, logits)
    return logits - batch.frequency_penalty * in_answer - batch.presence_penalty * (in_answer > 0)


def candidates(logits: Tensor, batch: SamplingBatch, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` best (logits, ids, keep) of each row, best first; keep says which ones all filters let through."""
    best, ids = logits.topk(count) if count < logits.shape[-1] else logits.sort(descending=True, stable=True)
    rank = torch.arange(count, device=logits.device)
    within = (rank < batch.top_k[:, None]) | (batch.top_k[:, None] == 0)
    probabilities = torch.exp(best - logits.logsumexp(-1, keepdim=True))
    # top_p is a share of what top_k leaves; where top_k is off that is everything, not just these candidates.
    whole = torch.where(batch.top_k[:, None] > 0, (probabilities * within).sum(-1, keepdim=True), 1.0)
    before = probabilities.cumsum(-1) - probabilities
    keep = within & ((before < batch.top_p * whole) | (batch.top_p >= 1)) & (best >= best[:, :1] + batch.min_p.log())
    keep[:, 0] = True
    return best, ids, keep


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Logits float32 [rows, vocabulary] → token ids int64 [rows]."""
    logits = apply_penalties(logits, batch)
    likeliest = logits.argmax(-1)
    if batch.greedy:
        return likeliest
    greedy = batch.temperature == 0
    logits = logits / torch.where(greedy, 1.0, batch.temperature)
    if not batch.filtered:
        ids = torch.arange(logits.shape[-1], device=logits.device)
        chosen = (logits + gumbel_noise(batch.seeds, batch.positions, ids)).argmax(-1)
        return torch.where(greedy[:, 0], likeliest, chosen)
    limit = min(batch.limit, logits.shape[-1])
    count = min(limit, PREFIX) if logits.device.type == "cpu" else limit
    best, ids, keep = candidates(logits, batch, count)
    if count < limit and (keep[:, -1] & ~greedy[:, 0]).any():  # the filters let still more through
        best, ids, keep = candidates(logits, batch, limit)
    noisy = torch.where(keep, best + gumbel_noise(batch.seeds, batch.positions, ids), -torch.inf)
    chosen = ids.gather(-1, noisy.argmax(-1, keepdim=True))[:, 0]
    return torch.where(greedy[:, 0], likeliest, chosen)


def top_logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the model itself: the given tokens' logprob [rows], and the best `count` as (logprobs, ids) [rows, count]."""
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(count, logits.shape[-1]))
    return logprobs.gather(-1, tokens[:, None])[:, 0], best.values, best.indices


class Sampler:
    """Makes the SamplingBatch of a step, and remembers which tokens the penalized requests have seen."""

    def __init__(self, vocabulary: int, device: torch.device):
        self.vocabulary = vocabulary
        self.device = device
        self.seen: dict[int, tuple[Tensor, int]] = {}  # request number → (counts [2, vocabulary], answer tokens counted)

    def choose(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        if all(only_greedy(request) for request in requests):
            return logits.argmax(-1)
        return sample(logits, self.batch(requests))

    def batch(self, requests: Sequence[Request]) -> SamplingBatch:
        params = [request.params for request in requests]
        penalized = any(map(is_penalized, params))
        bias = [entry for row, request in enumerate(requests) for entry in self._biases(row, request)]
        sampled = [item for item in params if item.temperature]
        return SamplingBatch(
            greedy=not sampled,
            filtered=any(item.top_k or item.top_p < 1 or item.min_p > 0 for item in sampled),  # type: ignore[operator]
            limit=max((item.top_k or self.vocabulary for item in sampled), default=1),
            values=torch.tensor([[getattr(item, name) for item in params] for name in COLUMNS],
                                dtype=torch.float32, device=self.device),
            top_k=self._integers([item.top_k for item in params]),
            seeds=self._integers([request.seed for request in requests]),
            positions=self._integers([len(request.tokens) for request in requests]),
            bias=self._bias_tensors(bias) if bias else None,
            seen=torch.stack([self._seen(request) for request in requests], dim=1) if penalized else None,
        )

    def forget(self, request: Request) -> None:
        self.seen.pop(request.number, None)

    def _integers(self, values: Sequence[int | None]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _bias_tensors(self, bias: list[tuple[int, int, float]]) -> tuple[Tensor, Tensor, Tensor]:
        rows, ids, values = zip(*bias, strict=True)
        return self._integers(rows), self._integers(ids), torch.tensor(values, dtype=torch.float32, device=self.device)

    def _biases(self, row: int, request: Request) -> list[tuple[int, int, float]]:
        found = [(row, token, value) for token, value in request.params.logit_bias.items()]
        if request.generated < request.params.min_tokens:
            found += [(row, token, -torch.inf) for token in request.end_ids]
        return found

    def _seen(self, request: Request) -> Tensor:
        if not is_penalized(request.params):
            return torch.zeros(2, self.vocabulary, dtype=torch.int32, device=self.device)
        if request.number not in self.seen:
            counts = torch.zeros(2, self.vocabulary, dtype=torch.int32, device=self.device)
            counts[0] = torch.bincount(self._integers(request.prompt), minlength=self.vocabulary)
            self.seen[request.number] = counts, 0
        counts, counted = self.seen[request.number]
        if new := request.tokens[len(request.prompt) + counted :]:
            counts[1] += torch.bincount(self._integers(new), minlength=self.vocabulary).int()
            self.seen[request.number] = counts, request.generated
        return counts


def is_penalized(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def only_greedy(request: Request) -> bool:
    """Nothing but argmax is needed."""
    params = request.params
    return not (params.temperature or params.logit_bias or is_penalized(params) or request.generated < params.min_tokens)


def seed_of(seed: int, index: int) -> int:
    """An independent 63-bit seed for request or sample number `index` (splitmix64)."""
    x = (seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return (x ^ (x >> 31)) % 2**63
