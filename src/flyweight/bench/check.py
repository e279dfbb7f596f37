"""Every speed run checks itself: does this engine, with this scheme, still choose the baseline's tokens?

A fixed prompt set is answered greedily by the baseline. Then each case chooses the next token after every beginning of
those answers, so that one different token does not drag all later ones along: `agreement` is the share of equal choices,
and `agreement_clear` the same where the baseline's two best logprobs are CLEAR or more apart, because between two tokens
that are as good as equal any rounding decides. `agreement_free` is how much of its own free answer is equal before the
first difference. Random weights that each scheme draws for itself have nothing in common with a bf16 baseline; the native
engine is then compared with itself, computing every product with the dequantized weight (`exact`): that checks the
kernels. What it was compared with is in the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flyweight.backends.base import Backend, Limits
from flyweight.backends.native import Native
from flyweight.bench.cases import Case, Listen, attempt
from flyweight.bench.facts import comparable
from flyweight.bench.rows import Row
from flyweight.bench.timing import random_prompts, seed_from

SIZES = {"cuda": (8, 32, 16), "cpu": (2, 16, 8)}  # prompts, their tokens, tokens of their answers: seconds on either device
CLEAR = 0.1  # natural log
STEP_TOKENS = 512  # of the exact engine: its prompts are short, and planning for long ones takes longer than the check


@dataclass(frozen=True)
class Expected:
    """The answers to agree with; `gaps` are None where the engine does not tell logprobs."""

    tokens: list[tuple[int, ...]]
    gaps: list[list[float]] | None = None

    @classmethod
    def of(cls, backend: Backend, prompts: Sequence[Sequence[int]], output: int) -> Expected:
        if isinstance(backend, Native):
            return cls(*backend.choices(prompts, output))
        return cls([one.token_ids for one in backend.generate(prompts, output).answers])

    def agreement(self, backend: Backend, prompts: Sequence[Sequence[int]]) -> Row:
        output = len(self.tokens[0])
        free = [one.token_ids for one in backend.generate(prompts, output).answers]
        before = sum(next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), output)
                     for a, b in zip(free, self.tokens, strict=True))
        equal: list[tuple[bool, float]] = []  # the same token, and how clear the choice was
        for at in range(output):
            begun = [[*prompt, *tokens[:at]] for prompt, tokens in zip(prompts, self.tokens, strict=True)]
            for i, one in enumerate(backend.generate(begun, 1).answers):
                equal.append((one.token_ids[0] == self.tokens[i][at], self.gaps[i][at] if self.gaps else 0.0))
        clear = [same for same, gap in equal if gap >= CLEAR]
        told = {"agreement_clear": sum(clear) / len(clear), "agreement_clear_tokens": len(clear)} if clear else {}
        return {"agreement": sum(same for same, _ in equal) / len(equal), "agreement_free": before / len(equal),
                "agreement_tokens": len(equal)} | told


class SelfCheck:
    """The baseline's answers, made when its case is loaded, and the comparison of the others with them."""

    def __init__(self, baseline: Case, device: str):
        self.baseline = baseline
        count, length, self.output = SIZES[device]
        self.shape = (count, length + self.output)  # batch, context: what the check needs room for
        self.prompts = random_prompts(count, length, vocabulary=baseline.facts.vocabulary, seed=seed_from("agreement"))
        self.expected: Expected | None = None
        self.dequantized: dict[str, Expected] = {}  # by model: two variants may be the same random weights

    def check(self, case: Case, listen: Listen) -> None:
        """Fills `case.checked`; a check that fails is told in the row, and the speed is measured all the same."""
        if not case.running or case.checked:
            return
        listen(f"checking the tokens of {case.title}")
        found, fault = attempt(lambda: self._compare(case))
        case.checked = found or {"agreement": None, "agreement_with": f"failed: {fault['reason'] if fault else ''}"}

    def _compare(self, case: Case) -> Row:
        base = self.baseline
        if case is base:
            self.expected = Expected.of(case.backend, self.prompts, self.output)
        if self.expected is not None and case is not base and comparable(case.facts, base.facts):
            return self.expected.agreement(case.backend, self.prompts) | {"agreement_with": base.title}
        if isinstance(case.backend, Native) and str(case.facts.checkpoint).startswith("random:"):
            model = case.backend.model
            if model not in self.dequantized:
                self.dequantized[model] = self._answer_exactly(case.backend)
            found = self.dequantized[model].agreement(case.backend, self.prompts)
            return found | {"agreement_with": "the same weights, dequantized"}
        return {"agreement": None, "agreement_with": "it is the baseline" if case is base else "nothing: other random weights"}

    def _answer_exactly(self, backend: Native) -> Expected:
        extra = backend.options.extra | {"exact": True, "max_num_batched_tokens": STEP_TOKENS}
        exact = Native(backend.model, replace(backend.options, extra=extra))
        try:
            exact.start(Limits.of([self.shape]))
            return Expected.of(exact, self.prompts, self.output)
        finally:
            exact.stop()
