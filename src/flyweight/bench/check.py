"""Every speed run checks itself: are these the tokens that the model's weights mean?

Two questions, and the fields of a row that answer them (of tokens that were drawn at random
`drawn.py` answers the first one):

`check_*`      Is this engine right? The greedy answers of the run itself, of its own batch and
               lengths, are held against the model's weights by `bench/exact.py`, which rounds
               activations as the format says. After the first token and the last ones of each
               answer the engine's choice may be behind the reference's best by rounding alone:
               `check_loss` is by how much, in standard deviations of the logits, on average,
               `check_loss_worst` that of the worst sequence of `check_sequences`. `check_bound` is
               what the format's own rounding can explain (tensors/rounding.py). More is a failure:
               the row says so, is in no table, and the command ends with exit code 1.
`agreement*`   Does this scheme still choose the baseline's tokens? A fixed prompt set is answered
               by the baseline, and each case chooses the next token after every beginning of those
               answers. It tells of quality, and fails nothing. Random weights that each scheme
               draws for itself have nothing in common with a baseline; there it is the share of
               equal choices of the first question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight.backends.base import Backend
from flyweight.backends.native import Native
from flyweight.bench import drawn
from flyweight.bench.cases import Case, Listen, attempt
from flyweight.bench.exact import Reference
from flyweight.bench.facts import comparable
from flyweight.bench.rows import ResultFile, Row, make_row, rounded
from flyweight.bench.timing import random_prompts, seed_from
from flyweight.device import pick_device
from flyweight.errors import ResultError
from flyweight.report.rows import FAILED_CHECK

# prompts of the baseline's set, their tokens, tokens of their answers: seconds on either device
SIZES = {"cuda": (8, 32, 16), "cpu": (2, 16, 8)}
REFERENCE_TOKENS = {"cuda": 1 << 17, "cpu": 1 << 11}  # of all sequences that are held against it
POSITIONS = 8  # of each answer: its first token and its last ones
DRAWN = 256  # of all answers together, where tokens are drawn: one says little
CLEAR = 0.1  # natural log: what lies nearer is called a tie in `agreement_clear`
WORST = 4.0  # bounds that one sequence may be off: it has few tokens to average over
CHECKED = ("native", "native-server")  # engines that are ours to be right
# others fill a preset with weights of their own
OURS = (*CHECKED, "transformers", "transformers-compiled")
ENGINE_TYPES = ("float32", "float16", "bfloat16")  # other types are of stored keys and values
BASELINE: Row = {"agreement": None, "agreement_with": "it is the baseline"}
WEIGHTS = "the same weights, dequantized"
Tokens = list[tuple[int, ...]]  # an answer of each prompt


def answers(backend: Backend, prompts: Sequence[Sequence[int]], output: int) -> Tokens:
    found = [one.token_ids for one in backend.generate(prompts, output).answers]
    if any(len(tokens) != output for tokens in found):
        raise ResultError("the engine does not tell the ids of all its tokens")
    return found


@dataclass(frozen=True)
class Expected:
    """The baseline's own free answers; `gaps` are None where it does not tell logprobs."""

    choices: Tokens
    gaps: list[list[float]] | None = None

    @classmethod
    def of_baseline(
        cls, backend: Backend, prompts: Sequence[Sequence[int]], output: int
    ) -> Expected:
        if isinstance(backend, Native):
            return cls(*backend.choices(prompts, output))
        return cls(answers(backend, prompts, output))

    def agreement(self, backend: Backend, prompts: Sequence[Sequence[int]]) -> Row:
        output = len(self.choices[0])
        before = 0
        for ours, theirs in zip(answers(backend, prompts, output), self.choices, strict=True):
            pairs = zip(ours, theirs, strict=True)
            before += next((i for i, (one, other) in enumerate(pairs) if one != other), output)
        equal: list[tuple[bool, float]] = []  # the same token, and how clear the choice was
        for at in range(output):
            begun = [
                [*prompt, *tokens[:at]]
                for prompt, tokens in zip(prompts, self.choices, strict=True)
            ]
            for i, (token,) in enumerate(answers(backend, begun, 1)):
                gap = self.gaps[i][at] if self.gaps else 0.0
                equal.append((token == self.choices[i][at], gap))
        return shares(equal) | {"agreement_free": before / len(equal)}


def shares(equal: Sequence[tuple[bool, float]]) -> Row:
    """Of (the same token, how clear the choice was)."""
    found: Row = {
        "agreement": sum(same for same, _ in equal) / len(equal),
        "agreement_tokens": len(equal),
    }
    clear = [same for same, gap in equal if gap >= CLEAR]
    if clear:
        found |= {
            "agreement_clear": sum(clear) / len(clear),
            "agreement_clear_tokens": len(clear),
        }
    return found


@dataclass(frozen=True)
class Verdict:
    """What a run's own tokens were worth by the reference: fields of its row."""

    fields: Row

    @classmethod
    def of(cls, tokens: Tensor, logits: Tensor, bound: float) -> Verdict:
        """`tokens` [sequences, positions], `logits` [sequences, positions, vocabulary]."""
        best = logits.topk(2).values
        chosen = logits.gather(-1, tokens[..., None])[..., 0]
        loss = (best[..., 0] - chosen) / logits.std(-1)
        equal = list(
            zip(
                (chosen == best[..., 0]).flatten().tolist(),
                (best[..., 0] - best[..., 1]).flatten().tolist(),
                strict=True,
            )
        )
        told: Row = {
            "check_loss": float(loss.mean()),
            "check_loss_worst": float(loss.mean(-1).max()),
            "check_bound": bound,
            "check_sequences": len(tokens),
        }
        return cls(shares(equal) | told)

    @property
    def missed(self) -> str | None:
        """None, or why the row is no figure of this model; NaN is a miss."""
        bound = self.fields["check_bound"]
        loss, worst = self.fields["check_loss"], self.fields["check_loss_worst"]
        surprise = abs(self.fields.get("check_surprise", 0.0))
        expected = self.fields.get("check_surprise_bound", 0.0)
        if loss <= bound and worst <= WORST * bound and surprise <= expected:
            return None
        if loss <= bound and worst <= WORST * bound:
            return (
                f"wrong tokens: they are {surprise:.3g} nats off what draws of this distribution "
                f"have on average; chance and rounding explain {expected:.3g}"
            )
        return (
            f"wrong tokens: they are {loss:.3g} deviations of the logits behind the best on "
            f"average, {worst:.3g} in the worst sequence; this format's rounding explains "
            f"{bound:.3g} and {WORST * bound:.3g}"
        )


def spread(count: int, most: int) -> list[int]:
    """Indices of at most so many of `count`, the first and the last among them."""
    if count <= most:
        return list(range(count))
    if most == 1:
        return [count - 1]
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def computed_type(backend: Backend, device: torch.device) -> str | None:
    """On a CPU keys and values may have fewer bits than all else."""
    if device.type != "cpu" and backend.kv_dtype in ENGINE_TYPES:
        return backend.kv_dtype
    return backend.options.dtype


def check_tokens(
    case: Case, prompts: Sequence[Sequence[int]], found: Tokens, *, device: torch.device
) -> Verdict:
    """The tokens that a run has given, teacher forced: each is judged after those before it."""
    backend = case.backend
    output = len(found[0])
    length = len(prompts[0])
    rows = spread(len(found), max(1, REFERENCE_TOKENS[device.type] // (length + output)))
    sequences = [[*prompts[row], *found[row]] for row in rows]
    options = backend.options
    filters = drawn.filters_of(options.sampling)
    most = max(POSITIONS, DRAWN // len(rows)) if options.sampling else POSITIONS
    judged = sorted({0, *range(max(0, output - most + 1), output)})
    try:
        reference = Reference.open(
            case.model,
            device=device,
            dtype=computed_type(backend, device),
            head=options.extra.get("head"),
        )
        # the token at i is chosen by the logits of the one before it
        logits, meter = reference.logits(sequences, [length + at - 1 for at in judged])
        tokens = torch.tensor([[found[row][at] for at in judged] for row in rows])
        bound = reference.noise(meter, backend.kv_dtype)
        tokens = tokens.to(logits.device)
        if not options.sampling:
            return Verdict.of(tokens, logits, bound)
        assert filters is not None, "whoever asks has looked"
        return Verdict(drawn.judge(tokens, logits, filters, bound))
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what it took is not the engine's


class SelfCheck:
    """The baseline's answers, made when its case is loaded, the comparison of the others with them,
    and the check of each run's own tokens.

    Where all timed rows of a case are in the file already and none of them tells, as after
    `--no-check`, the case is started for the check alone, which then is a row of its own.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        device: str,
        *,
        file: ResultFile,
        environment: Row,
        listen: Listen,
    ):
        self.cases = cases
        self.baseline = cases[0]
        self.file = file
        self.environment = environment
        self.listen = listen
        self.device = device
        self.missed: list[str] = []  # a line for each check that failed
        count, length, self.output = SIZES[device]
        self.shape = (count, length + self.output)  # batch, context: what the set needs room for
        self.prompts = random_prompts(
            count, length, vocabulary=self.baseline.facts.vocabulary, seed=seed_from("agreement")
        )
        self.expected: Expected | None = None
        for case in cases:  # what is known before anything is loaded
            if case.sampling:
                case.checked = {"agreement": None, "agreement_with": "nothing: tokens are drawn"}
            elif is_drawn(case) and case.backend.name not in OURS:
                told = "nothing: random weights of its own"
                case.checked = {"agreement": None, "agreement_with": told}
        own = is_drawn(self.baseline) or self.baseline.sampling
        if not own and not any(map(self.needs_baseline, cases)):
            self.baseline.checked = BASELINE

    def needs_baseline(self, case: Case) -> bool:
        if case is self.baseline or case.sampling or (is_drawn(case) and is_ours(case)):
            return False
        names = {case.backend.name, self.baseline.backend.name}
        drawn_elsewhere = is_drawn(case) and not names <= set(OURS)
        return not drawn_elsewhere and comparable(case.facts, self.baseline.facts)

    def compares(self, case: Case) -> bool:
        """Whether the prompt set is to be answered by it."""
        if case.checked:
            return False
        if case is self.baseline:
            return self.expected is None and any(map(self.needs_baseline, self.cases))
        return self.needs_baseline(case)

    def plan(self, busy: Sequence[Case]) -> list[Case]:
        """Which to start: those with work, those whose rows lack a check, and the baseline where
        one of them needs it.
        """
        known = [case for case in self.cases if case.checked and case not in busy]
        self.record(*known)
        due = [case for case in self.cases if case in busy or self.lacks(case)]
        if self.baseline not in due and any(map(self.needs_baseline, due)):
            due = [self.baseline, *due]
        return due

    def lacks(self, case: Case) -> bool:
        """Whether it has timed rows, none of which tells, and none of this run."""
        key = case.key()
        mine = self.file.went_well(**key, environment=self.environment["id"])
        return self.file.unchecked(**key) and not mine

    def compare(self, case: Case) -> None:
        """Fills `case.checked`; where there is no comparison the row says why, and the speed is
        measured all the same.
        """
        if not case.running or not self.compares(case):
            return
        self.listen(f"comparing the tokens of {case.title}")
        found, fault = attempt(lambda: self._compare(case))
        case.checked = failed_check(fault) if found is None else found

    def check(self, case: Case, prompts: Sequence[Sequence[int]], tokens: Tokens) -> Row:
        """Fields for the rows of a run that gave these tokens, status and reason where they are
        wrong.
        """
        if not is_ours(case):
            return {}
        if case.sampling and drawn.filters_of(case.backend.options.sampling) is None:
            return {"check_with": "nothing: penalties depend on what was said before"}
        self.listen(f"checking the tokens of {case.title}")
        device = torch.device(self.device)
        device = pick_device(case.backend.options.device) if device.type == "cuda" else device
        verdict, fault = attempt(lambda: self._check(case, prompts, tokens, device))
        if verdict is None:
            failed = failed_check(fault)
            told = {"check_with": failed["agreement_with"]}
            return told | (failed if is_drawn(case) else {})
        fields = verdict.fields | {"check_with": WEIGHTS, "agreement_with": WEIGHTS}
        if case.sampling or not is_drawn(case):  # there `agreement` is that with the baseline
            fields = {name: fields[name] for name in fields if name.startswith("check_")}
        if verdict.missed:
            self.missed.append(f"{case.title}: {verdict.missed}")
            self.listen(self.missed[-1])
            fields |= {"status": "failed", "reason": verdict.missed}
        return rounded(fields)

    def record(self, *cases: Case) -> None:
        """A row of its own for each that has timed rows of which none tells. Where the check
        failed, those rows are no figures either.
        """
        for case in cases:
            if not self.lacks(case):
                continue
            told = str(case.checked.get("agreement_with"))
            fault = case.fault or {}
            if told.startswith(FAILED_CHECK):
                fault = {"status": "failed", "reason": told}
            fields = case.fields() | case.checked | fault
            row = make_row("agreement", self.environment["id"], **rounded(fields))
            timed = self.file.went_well(**case.key())
            self.file.add(self.environment, row)
            if row["status"] == "ok":
                self.listen(f"{case.title}: same tokens {row['agreement']} as {told}")
                continue
            self.listen(f"{case.title}: {row['status']}: {row['reason']}")
            if "check_loss" in row:
                failed = {"status": "failed", "reason": row["reason"]}
                self.file.amend(one | failed for one in timed)

    def _check(
        self, case: Case, prompts: Sequence[Sequence[int]], tokens: Tokens, device: torch.device
    ) -> Verdict:
        if any(len(one) != len(tokens[0]) or not one for one in tokens):
            raise ResultError("the engine does not tell the ids of all its tokens")
        return check_tokens(case, prompts, tokens, device=device)

    def _compare(self, case: Case) -> Row:
        if case is self.baseline:
            self.expected = Expected.of_baseline(case.backend, self.prompts, self.output)
            return {} if is_drawn(case) else BASELINE
        if self.expected is None:
            raise ResultError("the baseline gave no answers")
        found = self.expected.agreement(case.backend, self.prompts)
        return found | {"agreement_with": self.baseline.title}


def failed_check(fault: Row | None) -> Row:
    reason = fault["reason"] if fault else ""
    return {"agreement": None, "agreement_with": FAILED_CHECK + reason}


def is_drawn(case: Case) -> bool:
    return str(case.facts.checkpoint).startswith("random:")


def is_ours(case: Case) -> bool:
    return case.backend.name in CHECKED
