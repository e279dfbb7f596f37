"""Every speed run checks itself: does this engine, with this scheme, still choose the baseline's tokens?

A fixed prompt set is answered greedily by the baseline. Then each case chooses the next token after every beginning of
those answers, so that one different token does not drag all later ones along: `agreement` is the share of equal choices.
`agreement_free` is how much of its own free answer is equal before the first difference. Random weights that each scheme
draws for itself have nothing in common with a bf16 baseline; the native engine is then compared with itself, computing
every product with the dequantized weight (`exact`): that checks the kernels. What it was compared with is in the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flyweight.backends.base import Backend, Limits
from flyweight.bench.cases import Case, Listen, attempt
from flyweight.bench.facts import comparable
from flyweight.bench.rows import Row
from flyweight.bench.timing import random_prompts, seed_from

SIZES = {"cuda": (8, 32, 16), "cpu": (2, 16, 8)}  # prompts, their tokens, tokens of their answers: seconds on either device
Tokens = list[tuple[int, ...]]


def agreement(backend: Backend, prompts: Sequence[Sequence[int]], expected: Tokens) -> Row:
    output = len(expected[0])
    free = [one.token_ids for one in backend.generate(prompts, output).answers]
    same = [next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), output)
            for a, b in zip(free, expected, strict=True)]
    equal, count = 0, len(prompts) * output
    for length in range(output):
        begun = [[*prompt, *tokens[:length]] for prompt, tokens in zip(prompts, expected, strict=True)]
        chosen = backend.generate(begun, 1).answers
        equal += sum(one.token_ids[:1] == tokens[length : length + 1] for one, tokens in zip(chosen, expected, strict=True))
    return {"agreement": equal / count, "agreement_free": sum(same) / count, "agreement_tokens": count}


class SelfCheck:
    """The baseline's answers, made when its case is loaded, and the comparison of the others with them."""

    def __init__(self, baseline: Case, device: str):
        self.baseline = baseline
        count, length, self.output = SIZES[device]
        self.shape = (count, length + self.output)  # batch, context: what the check needs room for
        self.prompts = random_prompts(count, length, vocabulary=baseline.facts.vocabulary, seed=seed_from("agreement"))
        self.expected: Tokens | None = None

    def check(self, case: Case, listen: Listen) -> None:
        """Fills `case.checked`; a check that fails is told in the row, and the speed is measured all the same."""
        if not case.running or case.checked:
            return
        listen(f"checking the tokens of {case.title}")
        found, fault = attempt(lambda: self._compare(case))
        case.checked = found or {"agreement": None, "agreement_with": f"failed: {fault['reason'] if fault else ''}"}

    def answer(self, backend: Backend) -> Tokens:
        return [one.token_ids for one in backend.generate(self.prompts, self.output).answers]

    def _compare(self, case: Case) -> Row:
        from flyweight.backends.native import Native

        base = self.baseline
        if case is base:
            self.expected = self.answer(case.backend)
        if self.expected is not None and case is not base and comparable(case.facts, base.facts):
            return agreement(case.backend, self.prompts, self.expected) | {"agreement_with": base.title}
        if isinstance(case.backend, Native) and str(case.facts.checkpoint).startswith("random:"):
            options = case.backend.options
            exact = Native(case.backend.model, replace(options, extra=options.extra | {"exact": True}))
            try:
                exact.start(Limits.of([self.shape]))
                expected = self.answer(exact)
            finally:
                exact.stop()
            return agreement(case.backend, self.prompts, expected) | {"agreement_with": "the same weights, dequantized"}
        return {"agreement": None, "agreement_with": "it is the baseline" if case is base else "nothing: other random weights"}
