"""From logits to tokens, for all rows of a step at once, in plain tensor ops that run alike on CPU
and GPU. Where there is a CUDA GPU one kernel does the same from the same table (kernels/sample.py);
these ops are for every other device, and for drafts.

Choosing at random is argmax(logit / temperature + Gumbel noise), which draws from the softmax
without normalizing. The noise of a token is a hash of (seed, position, token id): the same seed
gives the same text whatever else is in the batch, there is no generator state to keep, and a CUDA
graph can replay it. The trade-off: every candidate costs a hash, about ten integer ops, where a
generator would make one number a row.

The parameters of the running requests stay on the device, one row each (`SamplingTable`); which ops
a step needs is its `Mode`, known to the host. No shape depends on data and nothing is read back. On
the CPU, where a full sort of the vocabulary costs more than a layer, the filters look at the best
candidates first and at all only when those do not suffice.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from flyweight.engine.request import Request, SamplingParams
from flyweight.kernels.sample import COLUMNS, INTEGERS, MOST_BIASES, SampleTable
from flyweight.transfer import upload

MASK = 0xFFFFFFFF
PREFIX = 1024  # candidates that the CPU sorts before it sorts all
CANDIDATES = (64, 1024)  # so many are sorted where top_k allows; else the whole vocabulary
FOREVER = 2**62


@dataclass(frozen=True)
class Mode:
    """The most that any row of a step asks for: decides which ops run."""

    random: bool = False  # some row: a temperature
    # best tokens that top_k, top_p and min_p choose from; 0: no row has a filter
    candidates: int = 0
    biased: bool = False  # some row: logit_bias or min_tokens
    penalized: bool = False

    @classmethod
    def of(cls, request: Request, vocabulary: int) -> Mode:
        params = request.params
        filtered = params.temperature and (params.top_k or params.top_p < 1 or params.min_p > 0)  # type: ignore[operator]
        limit = params.top_k or vocabulary
        count = (
            next((size for size in CANDIDATES if limit <= size < vocabulary), vocabulary)
            if filtered
            else 0
        )
        return cls(bool(params.temperature), count, bool(biases(request)), is_penalized(params))

    def join(self, other: Mode, vocabulary: int) -> Mode:
        unlimited = (self.random and not self.candidates) or (other.random and not other.candidates)
        count = max(self.candidates, other.candidates)
        return Mode(
            self.random or other.random,
            vocabulary if count and unlimited else count,
            self.biased or other.biased,
            self.penalized or other.penalized,
        )


GREEDY = Mode()


@dataclass(frozen=True)
class SamplingBatch:
    """The parameters of a step's rows."""

    mode: Mode
    values: Tensor  # float32 [len(COLUMNS), rows]
    top_k: Tensor  # int64 [rows]
    seeds: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]: of the token to be chosen
    # [rows, MOST_BIASES]: token id, value, the position where it ends
    bias: tuple[Tensor, Tensor, Tensor] | None
    seen: tuple[Tensor, Tensor] | None  # [rows, vocabulary]: in the prompt, times in the answer

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
        ids, values, ends = batch.bias
        logits = logits.scatter_add(
            1, ids, torch.where(batch.positions[:, None] < ends, values, 0.0)
        )
    if batch.seen is None:
        return logits
    in_prompt, in_answer = batch.seen
    repeated = torch.where(
        logits > 0, logits / batch.repetition_penalty, logits * batch.repetition_penalty
    )
    logits = torch.where(in_prompt | (in_answer > 0), repeated, logits)
    return logits - batch.frequency_penalty * in_answer - batch.presence_penalty * (in_answer > 0)


def candidates(logits: Tensor, batch: SamplingBatch, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` best (logits, ids, keep) of each row, best first; keep says which ones all
    filters let through.
    """
    best, ids = (
        logits.topk(count)
        if count < logits.shape[-1]
        else logits.sort(descending=True, stable=True)
    )
    rank = torch.arange(count, device=logits.device)
    within = (rank < batch.top_k[:, None]) | (batch.top_k[:, None] == 0)
    probabilities = torch.exp(best - logits.logsumexp(-1, keepdim=True))
    # top_p is a share of what top_k leaves; where top_k is off that is everything, not just these
    # candidates.
    whole = torch.where(
        batch.top_k[:, None] > 0, (probabilities * within).sum(-1, keepdim=True), 1.0
    )
    before = probabilities.cumsum(-1) - probabilities
    keep = (
        within
        & ((before < batch.top_p * whole) | (batch.top_p >= 1))
        & (best >= best[:, :1] + batch.min_p.log())
    )
    keep[:, 0] = True
    return best, ids, keep


def likeliest(logits: Tensor) -> Tensor:
    """The ids of the largest logits [rows, vocabulary]: on a CPU by numpy, whose argmax takes a
    tenth of the time of torch's.
    """
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Logits float32 [rows, vocabulary] → token ids int64 [rows]."""
    mode = batch.mode
    logits = apply_penalties(logits, batch)
    first = likeliest(logits)
    if not mode.random:
        return first
    greedy = batch.temperature == 0
    logits = logits / torch.where(greedy, 1.0, batch.temperature)
    if not mode.candidates:
        ids = torch.arange(logits.shape[-1], device=logits.device)
        chosen = likeliest(logits + gumbel_noise(batch.seeds, batch.positions, ids))
        return torch.where(greedy[:, 0], first, chosen)
    limit = min(mode.candidates, logits.shape[-1])
    count = min(limit, PREFIX) if logits.device.type == "cpu" else limit
    best, ids, keep = candidates(logits, batch, count)
    if count < limit and (keep[:, -1] & ~greedy[:, 0]).any():  # the filters let still more through
        best, ids, keep = candidates(logits, batch, limit)
    noisy = torch.where(keep, best + gumbel_noise(batch.seeds, batch.positions, ids), -torch.inf)
    chosen = ids.gather(-1, noisy.argmax(-1, keepdim=True))[:, 0]
    return torch.where(greedy[:, 0], first, chosen)


def top_logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the model itself: the given tokens' logprob [rows], and the best `count` as (logprobs,
    ids) [rows, count].
    """
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(count, logits.shape[-1]))
    return logprobs.gather(-1, tokens[:, None])[:, 0], best.values, best.indices


class SamplingTable:
    """What the running requests ask for, one row each, on the device. Rows of requests that are
    gone hold any numbers.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device):
        self.rows, self.vocabulary, self.device = rows, vocabulary, device
        self.values = torch.ones(len(COLUMNS), rows, device=device)
        self.integers = torch.zeros(len(INTEGERS), rows, dtype=torch.int64, device=device)
        self.biased: set[int] = set()  # rows whose entries in `bias` are not all zero

    @functools.cached_property
    def bias(self) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.rows, MOST_BIASES
        return (
            torch.zeros(shape, dtype=torch.int64, device=self.device),
            torch.zeros(shape, device=self.device),
            torch.zeros(shape, dtype=torch.int64, device=self.device),
        )

    @functools.cached_property
    def seen(self) -> tuple[Tensor, Tensor]:
        """Made for the first request with a penalty: 5 bytes for each row and token of the
        vocabulary.
        """
        shape = self.rows, self.vocabulary
        return torch.zeros(shape, dtype=torch.bool, device=self.device), torch.zeros(
            shape, dtype=torch.int32, device=self.device
        )

    def enter(self, rows: Sequence[int], requests: Sequence[Request]) -> None:
        """Requests whose tokens are all known take these rows."""
        params = [request.params for request in requests]
        at, values, integers = upload(
            self.device,
            numpy.array(rows, dtype=numpy.int64),
            numpy.array(
                [[getattr(item, name) for item in params] for name in COLUMNS], numpy.float32
            ),
            numpy.array(
                [
                    [item.top_k for item in params],
                    [request.seed for request in requests],
                    [len(biases(request)) for request in requests],
                ],
                dtype=numpy.int64,
            ),
        )
        self.values.index_copy_(1, at, values)
        self.integers.index_copy_(1, at, integers)
        for row, request in zip(rows, requests, strict=True):
            if (entries := biases(request)) or row in self.biased:
                self._enter_biases(row, entries)
            if is_penalized(request.params):
                self._enter_history(row, request)

    def _enter_biases(self, row: int, entries: list[tuple[int, float, int]]) -> None:
        columns = list(zip(*entries, strict=True)) or [(), (), ()]
        for kept, column, kind in zip(
            self.bias, columns, (numpy.int64, numpy.float32, numpy.int64), strict=True
        ):
            padded = numpy.zeros(MOST_BIASES, kind)
            padded[: len(column)] = column
            kept[row] = upload(self.device, padded)[0]
        (self.biased.add if entries else self.biased.discard)(row)

    def _enter_history(self, row: int, request: Request) -> None:
        prompt, answer = (
            numpy.bincount(numpy.array(part, dtype=numpy.int64), minlength=self.vocabulary)
            for part in (request.prompt, request.tokens[len(request.prompt) :])
        )
        in_prompt, in_answer = upload(self.device, prompt > 0, answer.astype(numpy.int32))
        self.seen[0][row], self.seen[1][row] = in_prompt, in_answer

    def move(self, sources: Tensor, targets: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Rows of requests that take the places of others."""
        for tensor in (self.values, self.integers):
            tensor.index_copy_(1, targets, tensor.index_select(1, sources))
        for tensor in (
            *(self.bias if "bias" in vars(self) else ()),
            *(self.seen if "seen" in vars(self) else ()),
        ):
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))
        moved = {target for source, target in pairs if source in self.biased}
        self.biased = (self.biased - {target for _, target in pairs}) | moved

    def for_kernel(self, tokens: Tensor, lengths: Tensor) -> SampleTable:
        """As the kernel takes it; rows that nobody uses may hold anything."""
        bias = self.bias if "bias" in vars(self) else None
        return SampleTable(
            tokens,
            lengths,
            self.values,
            self.integers,
            bias,
            self.seen if "seen" in vars(self) else None,
        )

    def batch(self, mode: Mode, positions: Tensor, rows: slice | Tensor) -> SamplingBatch:
        def pick(tensor: Tensor, dimension: int) -> Tensor:
            if isinstance(rows, slice):
                return tensor[rows] if dimension == 0 else tensor[:, rows]
            return tensor.index_select(dimension, rows)

        bias = tuple(pick(tensor, 0) for tensor in self.bias) if mode.biased else None
        seen = tuple(pick(tensor, 0) for tensor in self.seen) if mode.penalized else None
        top_k, seeds, _ = pick(self.integers, 1)
        return SamplingBatch(mode, pick(self.values, 1), top_k, seeds, positions, bias, seen)  # type: ignore[arg-type]

    def count(self, mode: Mode, tokens: Tensor, rows: slice | Tensor) -> None:
        """Remember the chosen tokens where penalties want to know them."""
        if not mode.penalized:
            return
        answers = self.seen[1]
        if isinstance(rows, slice):
            answers[rows].scatter_add_(
                1, tokens[:, None], torch.ones_like(tokens[:, None], dtype=torch.int32)
            )
        else:
            answers.view(-1).index_add_(
                0, rows * self.vocabulary + tokens, torch.ones_like(tokens, dtype=torch.int32)
            )


def biases(request: Request) -> list[tuple[int, float, int]]:
    """(token id, what its logit gets, the position from which on it gets that no more),
    ids rising.
    """
    params = request.params
    found = [(token, value, FOREVER) for token, value in params.logit_bias.items()]
    if params.min_tokens:
        found += [
            (token, -torch.inf, len(request.prompt) + params.min_tokens)
            for token in request.end_ids
        ]
    return sorted(found, key=lambda entry: entry[0])


def is_penalized(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )


def seed_of(seed: int, index: int) -> int:
    """An independent 63-bit seed for request or sample number `index` (splitmix64)."""
    x = (seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return (x ^ (x >> 31)) % 2**63
