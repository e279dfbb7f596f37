"""Steps of some requests, run exactly by the decoder and padded by whatever stands for captured
passes, over a cache each.
"""

from __future__ import annotations

import torch

from flyweight.batch import KVStorage
from flyweight.engine.memory import CacheShape
from flyweight.engine.packed import Padding, pack, padded_tokens
from flyweight.engine.request import Request, SamplingParams
from flyweight.engine.rows import Rows
from flyweight.engine.work import Work
from flyweight.models.decoder import Decoder


def request_of(prompt: list[int], number: int) -> Request:
    return Request(number, prompt, SamplingParams().with_defaults({}), seed=0, limit=4096)


class Story:
    """Eight requests with shuffled blocks. `forward` runs the padded batches; at first the decoder
    does.
    """

    def __init__(self, decoder: Decoder, *, tolerance: float, page: int = 4, length: int = 30):
        self.decoder, self.page, self.tolerance = decoder, page, tolerance
        pages = -(-length // page)
        self.rows = Rows(
            8, pages=pages, vocabulary=decoder.config.vocab_size, device=decoder.device
        )
        self.blocks = 8 * pages  # the one after them is for the padding
        self.exact, self.padded = self._caches(), self._caches()
        self.forward = lambda batch: decoder.forward(batch, self.padded)
        generator = torch.Generator().manual_seed(1)
        order = torch.randperm(self.blocks, generator=generator).tolist()
        self.requests = [
            request_of(
                torch.randint(
                    3, decoder.config.vocab_size, (length,), generator=generator
                ).tolist(),
                i,
            )
            for i in range(8)
        ]
        for request in self.requests:
            request.blocks = [order.pop() for _ in range(pages)]
        self.rows.enter(self.requests)

    def _caches(self) -> list[KVStorage]:
        shape = CacheShape.of(self.decoder.config, self.decoder.dtype)
        return [
            shape.storage(layer, self.blocks + 1, self.page, self.decoder.device)
            for layer in range(shape.layers)
        ]

    def step(self, *spans: tuple[int, int], into: torch.Tensor | None = None) -> None:
        """The next tokens of some requests, (request, tokens of it); both ways must agree, in the
        caches too.
        """
        works = [
            Work(self.requests[i], self.requests[i].computed, count, samples=True)
            for i, count in spans
        ]
        for work in works:
            work.request.computed += work.count
        exact, size = pack(works, self.rows, block_size=self.page), padded_tokens(works)
        assert size is not None and size >= len(exact.batch.tokens)
        padded = pack(
            works, self.rows, block_size=self.page, padding=Padding(size, self.blocks, into)
        )
        assert len(padded.batch.tokens) == size and torch.equal(padded.last, exact.last)
        want = self.decoder.forward(exact.batch, self.exact)
        assert want.shape == (len(spans), self.decoder.config.vocab_size) and want.std() > 0.1
        self._compare(self.forward(padded.batch), want)
        for one, other in zip(self.exact, self.padded, strict=True):
            self._compare(other.keys[: self.blocks], one.keys[: self.blocks])
            self._compare(other.values[: self.blocks], one.values[: self.blocks])

    def _compare(self, got: torch.Tensor, want: torch.Tensor) -> None:
        error = (got.float() - want.float()).norm() / want.float().norm()
        assert error <= self.tolerance, f"relative error {error:.2e}"
