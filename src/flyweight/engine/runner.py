"""Runs a scheduled step: packs its tokens into a Batch, calls the decoder, samples.

It owns the memory of the KV cache and nothing of the policy. Everything about a step that a CUDA graph would have to
hold still (tokens, positions, slots, block tables) is made in one place, `pack`.
"""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy
import torch
from torch import Tensor

from flyweight.engine.batch import Batch, KVStorage
from flyweight.engine.request import Request, TokenLogprob
from flyweight.engine.sampling import Sampler, top_logprobs
from flyweight.engine.scheduler import Work
from flyweight.errors import ResourceError
from flyweight.models.decoder import Decoder

if TYPE_CHECKING:
    from flyweight.engine.graphs import DecodeGraphs

DEFAULT_FRACTION = {"cpu": 0.25, "cuda": 0.9}


class Model(Protocol):
    """The part of `models.decoder.Decoder` that the engine uses."""

    def forward(self, batch: Batch, caches: list[KVStorage]) -> Tensor: ...


@dataclass(frozen=True)
class CacheShape:
    """What one token costs in the KV cache."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class Result:
    """What a step gave one request: a token if its work samples, and the logprobs it asked for."""

    token: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


class Runner:
    def __init__(self, model: Model, shape: CacheShape, *, blocks: int, block_size: int, vocabulary: int, device: torch.device,
                 context: int):
        self.model = model
        self.context = context
        self.device = device
        self.block_size = block_size
        self.sampler = Sampler(vocabulary, device)
        size = (blocks, block_size, shape.kv_heads, shape.head_dim)
        self.caches = [KVStorage(zeros(size, shape.dtype, device), zeros(size, shape.dtype, device)) for _ in range(shape.layers)]

    @torch.inference_mode()
    def run(self, works: Sequence[Work]) -> list[Result]:
        batch, spans = self.pack(works)
        logits = self._logits(batch)  # [outputs, vocabulary]
        sampling = [i for i, work in enumerate(works) if work.samples]
        results = [Result()] * len(works)
        if sampling:
            last = [spans[i][1] - 1 for i in sampling]
            rows = logits if len(last) == len(logits) else logits[last]
            requests = [works[i].request for i in sampling]
            tokens = self.sampler.choose(allowed_only(rows, requests), requests)
            logprobs = self._logprobs(rows, tokens, [request.params.logprobs for request in requests])
            for i, token, logprob in zip(sampling, tokens.tolist(), logprobs, strict=True):
                results[i] = Result(token, logprob)
        for i, work in enumerate(works):
            if work.request.params.prompt_logprobs is not None and work.start < len(work.request.prompt) - 1:
                rows, follow = logits[spans[i][0] : spans[i][1]], self._following(work)
                found = self._logprobs(rows[: len(follow)], follow, [work.request.params.prompt_logprobs] * len(follow))
                results[i] = Result(results[i].token, results[i].logprob, [item for item in found if item])
        return results

    def _logits(self, batch: Batch) -> Tensor:
        """Through a captured step where every sequence has one new token and the model allows it."""
        count = len(batch.kv_lengths)
        if self.graphs is None or len(batch.tokens) != count or len(batch.output_rows) != count or count > self.graphs.largest:
            return self.model.forward(batch, self.caches)
        lengths = torch.tensor(batch.kv_lengths, dtype=torch.int32, device=self.device)
        return self.graphs.forward(batch.tokens, lengths, batch.block_tables)

    @functools.cached_property
    def graphs(self) -> DecodeGraphs | None:
        """Captured at the first step, or None, with the reason said once."""
        if self.device.type != "cuda" or not isinstance(self.model, Decoder):
            return None
        from flyweight.engine.graphs import DecodeGraphs, why_not

        reason = why_not(self.model, self.block_size)
        if reason is not None:
            warnings.warn(f"decode steps are not captured as CUDA graphs: {reason}", stacklevel=2)
            return None
        return DecodeGraphs(self.model, self.caches, context=self.context)

    def pack(self, works: Sequence[Work]) -> tuple[Batch, list[tuple[int, int]]]:
        """The batch, and which rows of the logits belong to each work."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        outputs: list[int] = []
        starts, spans = [0], []
        size = self.block_size
        for work in works:
            request, stop = work.request, work.start + work.count
            tokens += request.tokens[work.start : stop]
            positions += range(work.start, stop)
            slots += [request.blocks[at // size] * size + at % size for at in range(work.start, stop)]
            wanted = work.count if request.params.prompt_logprobs is not None else int(work.samples)
            spans.append((len(outputs), len(outputs) + wanted))
            outputs += range(len(tokens) - wanted, len(tokens))
            starts.append(len(tokens))
        widest = max(len(work.request.blocks) for work in works)
        tables = [work.request.blocks + [0] * (widest - len(work.request.blocks)) for work in works]
        integers = torch.tensor([tokens, positions, slots], dtype=torch.int64, device=self.device)
        return Batch(
            tokens=integers[0], positions=integers[1], slots=integers[2],
            block_tables=torch.tensor(tables, dtype=torch.int32, device=self.device), query_starts=starts,
            kv_lengths=[work.start + work.count for work in works],
            output_rows=torch.tensor(outputs, dtype=torch.int64, device=self.device),
        ), spans

    def _following(self, work: Work) -> Tensor:
        """The prompt tokens that come right after each of this chunk's."""
        stop = min(work.start + work.count + 1, len(work.request.prompt))
        return torch.tensor(work.request.prompt[work.start + 1 : stop], dtype=torch.int64, device=self.device)

    def _logprobs(self, logits: Tensor, tokens: Tensor, wanted: Sequence[int | None]) -> Sequence[TokenLogprob | None]:
        most = max((count for count in wanted if count is not None), default=None)
        if most is None:
            return [None] * len(wanted)
        chosen, best, ids = (tensor.tolist() for tensor in top_logprobs(logits, tokens, most))
        return [None if count is None else TokenLogprob(token, chosen[i], dict(zip(ids[i][:count], best[i], strict=False)))
                for i, (token, count) in enumerate(zip(tokens.tolist(), wanted, strict=True))]


def allowed_only(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Less what the requests' constraints forbid; the logits themselves are left for the logprobs."""
    masks = {row: mask for row, request in enumerate(requests) if request.constraint
             and (mask := request.constraint.allowed(request.tokens[len(request.prompt) :])) is not None}
    if not masks:
        return logits
    at = torch.tensor([*masks], device=logits.device)
    forbidden = ~torch.stack([*masks.values()]).to(logits.device)
    return logits.index_copy(0, at, logits.index_select(0, at).masked_fill(forbidden, -torch.inf))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, because masked slots are multiplied by 0, which only a finite number survives.

    On a CPU they come from calloc: a page of a large, mostly unused pool costs no memory until it is written.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(numpy.zeros(math.prod(shape) * dtype.itemsize, dtype=numpy.uint8)).view(dtype).view(shape)


def count_blocks(shape: CacheShape, *, block_size: int, device: torch.device, context: int, sequences: int,
                 memory_fraction: float | None) -> int:
    """As many as `sequences` full contexts need, or as the memory budget allows; at least one full context.

    The budget is a share of what is available on a CPU, and of the whole device, less what is in use, on a GPU.
    """
    fraction = DEFAULT_FRACTION[device.type] if memory_fraction is None else memory_fraction
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(free - (1 - fraction) * total)
    else:
        budget = int(available_memory() * fraction)
    block_bytes = shape.token_bytes * block_size
    longest = -(-context // block_size)
    if longest * block_bytes > budget:
        raise ResourceError(f"a context of {context} tokens needs {longest * block_bytes / 1e9:.2f} GB of KV cache, but "
                            f"memory_fraction {fraction} leaves {max(budget, 0) / 1e9:.2f} GB; lower max_model_len")
    return min(longest * sequences, budget // block_bytes)


def available_memory() -> int:
    """Bytes that this process may take without swapping."""
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
