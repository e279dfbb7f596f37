"""Answers that must fit a JSON schema or another grammar: which tokens may come next, from llguidance.

A grammar becomes an automaton over the bytes of the vocabulary once; each sample walks a copy of it. `grammar_kinds.py`
says which kinds there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from flyweight.engine.grammar_kinds import missing, translate
from flyweight.errors import RequestError

KEPT = 64  # schemas; the same few come again and again


class Grammars:
    """Compiles schemas for one vocabulary. `Grammars(…)(schema)` gives a maker of constraints, one for each sample."""

    def __init__(self, tokenizer: Any, vocabulary: int, end_ids: Iterable[int]):
        try:
            import llguidance.hf
        except ImportError as error:
            raise missing() from error
        self.vocabulary = vocabulary
        self.end_ids = sorted(end_ids)
        self.matcher = llguidance.LLMatcher
        self.tokens = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=self.end_ids)
        self.compile = functools.lru_cache(maxsize=KEPT)(self._compile)

    def __call__(self, schema: str) -> Callable[[], GrammarConstraint]:
        matcher = self.compile(schema)
        return lambda: GrammarConstraint(matcher.deep_copy(), self.vocabulary, self.end_ids)

    def _compile(self, schema: str) -> Any:
        kind, grammar = translate(schema)
        matcher = self.matcher(self.tokens, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"{kind} cannot be followed: {matcher.get_error().strip().splitlines()[0]}")
        return matcher


class GrammarConstraint:
    def __init__(self, matcher: Any, vocabulary: int, end_ids: Sequence[int]):
        self.matcher, self.vocabulary, self.end_ids = matcher, vocabulary, end_ids
        self.consumed = 0
        self.error: str | None = None

    def allowed(self, generated: Sequence[int]) -> Tensor:
        """Bool [vocabulary]; when the answer is complete, only its end."""
        self.matcher.consume_tokens(list(generated[self.consumed :]))
        self.consumed = len(generated)
        if self.matcher.is_error():  # it outgrew its limits: end this answer rather than the step that others share
            self.error = f"the grammar cannot be followed any further: {self.matcher.get_error()}"
            return torch.zeros(self.vocabulary, dtype=torch.bool).index_fill_(0, torch.tensor(self.end_ids), True)
        bits = numpy.frombuffer(self.matcher.compute_bitmask(), dtype=numpy.uint8)
        return torch.from_numpy(numpy.unpackbits(bits, bitorder="little")[: self.vocabulary].astype(bool))
