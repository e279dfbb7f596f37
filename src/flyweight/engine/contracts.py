"""What a runner runs and who follows it: models, steps and passes that were captured, and heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from flyweight.batch import Batch, KVStorage
from flyweight.engine.packed import Packed
from flyweight.engine.speculation.shared_rows import SharedRows
from flyweight.engine.work import Work


class Model(Protocol):
    """The part of `models.decoder.Decoder` that the engine uses."""

    def forward(self, batch: Batch, caches: list[KVStorage]) -> Tensor: ...


class DecodeSteps(Protocol):
    """Whole decode steps prepared for the rows of a `Rows`, such as `graphs.DecodeGraphs`."""

    largest: int  # most rows

    def logits(self, count: int) -> Tensor:
        """[count, vocabulary] of one step of the first `count` rows, which stay as they are."""

    def advance(self, count: int) -> Tensor:
        """The same, and the rows take their likeliest tokens."""

    def sample(self, count: int) -> Tensor:
        """The same, and the rows take tokens by temperature and filters, where
        `Rows.samples_in_step`.
        """

    def warm_up(self, *, advances: bool = True) -> None:
        """Prepare steps of every size ahead of the first request; not `advances`: their logits
        alone.
        """


class Passes(Protocol):
    """Whole steps of any mix prepared for some sizes, such as `passes.PassGraphs`."""

    @property
    def inputs(self) -> Tensor | None:
        """Where a padded step's integers go."""

    def padded_tokens(self, works: Sequence[Work]) -> int | None:
        """The size that the step runs as; None: it does not fit any."""

    def forward(self, batch: Batch) -> Tensor:
        """As the model's, of a batch padded to that size."""

    def warm_up(self) -> None:
        """Prepare those that most requests need ahead of the first one."""

    def warm_up_parts(self) -> None:
        """And those of prompts in turns with answers."""

    def warm_up_long(self, most: int) -> None:
        """And whatever longer passes, of up to so many tokens, need."""

    patient: bool  # whether others are prepared when nobody waits
    alone: bool  # whether only prompts alone, from their first token, are prepared at all

    def rest(self) -> bool:
        """Nobody is there: prepare one of those; whether there was one."""


class Follower(Protocol):
    """Who reads the hidden states of a step (models/taps.py) once its tokens are chosen."""

    def wants(self, works: Sequence[Work]) -> bool:
        """Whether it follows a step of such answers."""

    def after_pass(self, works: Sequence[Work], packed: Packed, tokens: Tensor) -> None:
        """`tokens`: chosen after the rows that sample."""

    def after_rows(self, works: Sequence[Work], rows: SharedRows, tokens: Tensor) -> None: ...

    def skipped(self, works: Sequence[Work]) -> None:
        """A step that left none."""
