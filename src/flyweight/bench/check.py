"""Every speed run checks itself: does this engine, with this scheme, still choose the baseline's tokens?

A fixed prompt set is answered greedily by the baseline. Then each case chooses the next token after every beginning of
those answers, so that one different token does not drag all later ones along: `agreement` is the share of equal choices,
and `agreement_clear` the same where the baseline's two best logprobs are CLEAR or more apart, because between two tokens
that are as good as equal any rounding decides. `agreement_free` is how much of its own free answer is equal before the
first difference. Random weights that each scheme draws for itself have nothing in common with a bf16 baseline; such a case
is compared with its own weights dequantized, after every beginning of its own answers: that checks the kernels. What it
was compared with is in the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flyweight.backends.base import Backend
from flyweight.backends.native import Native
from flyweight.bench.cases import Case, Listen, attempt
from flyweight.bench.facts import comparable
from flyweight.bench.rows import ResultFile, Row, make_row, rounded
from flyweight.bench.timing import random_prompts, seed_from
from flyweight.device import pick_device
from flyweight.errors import ResultError
from flyweight.report.rows import FAILED_CHECK

SIZES = {"cuda": (8, 32, 16), "cpu": (2, 16, 8)}  # prompts, their tokens, tokens of their answers: seconds on either device
CLEAR = 0.1  # natural log
OURS = ("native", "native-server", "transformers", "transformers-compiled")  # others fill a preset with weights of their own
BASELINE: Row = {"agreement": None, "agreement_with": "it is the baseline"}
Tokens = list[tuple[int, ...]]  # an answer of each prompt


def answers(backend: Backend, prompts: Sequence[Sequence[int]], output: int) -> Tokens:
    found = [one.token_ids for one in backend.generate(prompts, output).answers]
    if any(len(tokens) != output for tokens in found):
        raise ResultError("the engine does not tell the ids of all its tokens")
    return found


@dataclass(frozen=True)
class Expected:
    """What is to be chosen after every beginning of `begun`; `gaps` are None where the engine does not tell logprobs."""

    begun: Tokens
    choices: Tokens
    gaps: list[list[float]] | None = None

    @classmethod
    def of_baseline(cls, backend: Backend, prompts: Sequence[Sequence[int]], output: int) -> Expected:
        """Its free answers."""
        tokens, gaps = backend.choices(prompts, output) if isinstance(backend, Native) else (
            answers(backend, prompts, output), None)
        return cls(tokens, tokens, gaps)

    @classmethod
    def of_weights(cls, model: str, backend: Backend, prompts: Sequence[Sequence[int]], output: int) -> Expected:
        """The choices of a preset's weights, dequantized, in the course of this engine's own answers."""
        begun, options = answers(backend, prompts, output), backend.options
        sequences = [[*prompt, *tokens] for prompt, tokens in zip(prompts, begun, strict=True)]
        device = pick_device(options.device)
        # on a CPU keys and values may have fewer bits than all else
        dtype = options.dtype if device.type == "cpu" else backend.kv_dtype or options.dtype
        logits = exact_logits(model, sequences, device=device, dtype=dtype)
        best = logits[:, -output - 1 : -1].topk(2)
        gaps = (best.values[..., 0] - best.values[..., 1]).tolist()
        return cls(begun, [tuple(tokens) for tokens in best.indices[..., 0].tolist()], gaps)

    def agreement(self, backend: Backend, prompts: Sequence[Sequence[int]]) -> Row:
        output = len(self.begun[0])
        before = sum(next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), output)
                     for a, b in zip(answers(backend, prompts, output), self.choices, strict=True))
        equal: list[tuple[bool, float]] = []  # the same token, and how clear the choice was
        for at in range(output):
            begun = [[*prompt, *tokens[:at]] for prompt, tokens in zip(prompts, self.begun, strict=True)]
            for i, (token,) in enumerate(answers(backend, begun, 1)):
                equal.append((token == self.choices[i][at], self.gaps[i][at] if self.gaps else 0.0))
        clear = [same for same, gap in equal if gap >= CLEAR]
        told = {"agreement_clear": sum(clear) / len(clear), "agreement_clear_tokens": len(clear)} if clear else {}
        return {"agreement": sum(same for same, _ in equal) / len(equal), "agreement_free": before / len(equal),
                "agreement_tokens": len(equal)} | told


@torch.inference_mode()
def exact_logits(model: str, sequences: Sequence[Sequence[int]], *, device: torch.device, dtype: str | None) -> torch.Tensor:
    """Of every token, [sequences, tokens, vocabulary], each product being that with the dequantized weight.

    Only one block is there at a time, and nothing is generated, so that it fits beside the engine that is checked: embedding,
    head and a block in 16 bits are 7 GB for Qwen2-72B (and 4 GB more while a linear is dequantized) and 6 GB for 57B-A14B.
    """
    from flyweight.engine.llm import choose_dtype, open_model
    from flyweight.models.decoder import Decoder
    from flyweight.models.layer import Block

    weights, _ = open_model(model, device)
    computed = choose_dtype(dtype, weights.config, device)
    decoder = Decoder.load(weights, device=device, dtype=computed, exact=True, layers=())
    tokens = torch.tensor(sequences, device=device)
    hidden, context = decoder.embedding(tokens), decoder.whole(tokens.shape[1])
    for index in range(decoder.config.layers):
        hidden = Block.load(weights, decoder.config, index, device=device, dtype=computed, exact=True).forward(hidden, context)
    return decoder.logits(hidden)


class SelfCheck:
    """The baseline's answers, made when its case is loaded, and the comparison of the others with them.

    Timed rows of a case carry what its check gave. Where they are all in the file already and none of them does, as after
    `--no-check`, the case is started for the check alone, which then is a row of its own.
    """

    def __init__(self, cases: Sequence[Case], device: str, *, file: ResultFile, environment: Row, listen: Listen):
        self.cases, self.baseline, self.file, self.environment, self.listen = cases, cases[0], file, environment, listen
        count, length, self.output = SIZES[device]
        self.shape = (count, length + self.output)  # batch, context: what the check needs room for
        vocabulary = self.baseline.facts.vocabulary
        self.prompts = random_prompts(count, length, vocabulary=vocabulary, seed=seed_from("agreement"))
        self.expected: Expected | None = None
        for case in cases:  # what is known before anything is loaded
            if is_drawn(case) and case.backend.name not in OURS:
                case.checked = {"agreement": None, "agreement_with": "nothing: random weights of its own"}
        if not is_drawn(self.baseline) and not any(map(self.needs_baseline, cases)):
            self.baseline.checked = BASELINE

    def needs_baseline(self, case: Case) -> bool:
        drawn_elsewhere = is_drawn(case) and not {case.backend.name, self.baseline.backend.name} <= set(OURS)
        return case is not self.baseline and not drawn_elsewhere and comparable(case.facts, self.baseline.facts)

    def plan(self, busy: Sequence[Case]) -> list[Case]:
        """Which to start: those with work, those whose rows lack a check, and the baseline where one of them needs it."""
        self.record(*(case for case in self.cases if case.checked and case not in busy))
        due = [case for case in self.cases if case in busy or self.file.unchecked(**case.key())]
        if self.baseline not in due and any(map(self.needs_baseline, due)):
            due = [self.baseline, *due]
        return due

    def check(self, case: Case) -> None:
        """Fills `case.checked`; a check that fails is told in the row, and the speed is measured all the same."""
        if not case.running or case.checked:
            return
        self.listen(f"checking the tokens of {case.title}")
        found, fault = attempt(lambda: self._compare(case))
        case.checked = found or {"agreement": None, "agreement_with": FAILED_CHECK + (fault["reason"] if fault else "")}

    def record(self, *cases: Case) -> None:
        """A row of its own for each that has timed rows of which none tells, and none of this run."""
        for case in cases:
            key = case.key()
            if not self.file.unchecked(**key) or self.file.went_well(**key, environment=self.environment["id"]):
                continue
            told = str(case.checked.get("agreement_with"))
            fault = case.fault or ({"status": "failed", "reason": told} if told.startswith(FAILED_CHECK) else {})
            row = make_row("agreement", self.environment["id"], **rounded(case.fields() | case.checked | fault))
            self.file.add(self.environment, row)
            words = f"{row['status']}: {row['reason']}" if fault else f"same tokens {row['agreement']} as {told}"
            self.listen(f"{case.title}: {words}")

    def _compare(self, case: Case) -> Row:
        if case is self.baseline and any(map(self.needs_baseline, self.cases)):
            self.expected = Expected.of_baseline(case.backend, self.prompts, self.output)
        if self.needs_baseline(case):
            if self.expected is None:
                raise ResultError("the baseline gave no answers")
            return self.expected.agreement(case.backend, self.prompts) | {"agreement_with": self.baseline.title}
        if not is_drawn(case):
            return BASELINE
        try:
            found = Expected.of_weights(case.model, case.backend, self.prompts, self.output)
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # what it took is not the engine's
        return found.agreement(case.backend, self.prompts) | {"agreement_with": "the same weights, dequantized"}


def is_drawn(case: Case) -> bool:
    return str(case.facts.checkpoint).startswith("random:")
