"""The adapter under the real lm-eval, on task files of our own: nothing is downloaded."""

import json
import math
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from tiny_model import make_tiny_model

from flyweight import LLM, SamplingParams
from flyweight.quant.lm_eval import evaluate_tasks, score_continuation
from flyweight.quant.subject import load_subject

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-eval"),
]

ROWS = [
    {
        "question": f"What walks over the {place} hill?",
        "choices": ["Ann", "a stone", "nobody"],
        "answer": i % 3,
    }
    for i, place in enumerate(("green", "old", "far", "steep"))
]
TASKS = {
    "own_choice": """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
""",
    "own_rolling": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
""",
    "own_answer": """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer_text}}"
generation_kwargs:
  until: ["?"]
  max_gen_toks: 6
metric_list:
  - metric: exact_match
""",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def results(model, tmp_path_factory):
    """All three kinds of task in one run; the answers that are expected are what the engine itself
    says."""
    folder = tmp_path_factory.mktemp("tasks")
    engine = LLM(str(model), device="cpu")
    params = SamplingParams(max_tokens=6, temperature=0, stop=["?"])
    answers = [engine.generate([row["question"]], params)[0].text for row in ROWS]
    answers[0] += "!"  # one that is wrong
    rows = [row | {"answer_text": answer} for row, answer in zip(ROWS, answers, strict=True)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, body in TASKS.items():
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: "
            f"{folder / 'rows.jsonl'}\ntest_split: test\n{body}"
        )
    return evaluate_tasks(str(model), list(TASKS), folder=str(folder), device="cpu")


@pytest.fixture(scope="module")
def subject(model):
    return load_subject(str(model), "a", device="cpu", dtype=None)


def encode(subject, text):
    return subject.checkpoint.tokenizer().encode(text, add_special_tokens=False)


def test_a_choice_is_right_where_its_likelihood_is_highest(results, subject):
    right = 0
    for row in ROWS:
        context = encode(subject, row["question"])
        scores = [
            score_continuation(subject.decoder, context, encode(subject, f" {choice}"))[0]
            for choice in row["choices"]
        ]
        right += scores.index(max(scores)) == row["answer"]
    assert results["own_choice"]["acc,none"] == pytest.approx(right / len(ROWS))


def test_rolling_likelihood_is_that_of_the_whole_text(results, subject):
    tokenizer = subject.checkpoint.tokenizer()
    start = tokenizer.bos_token_id if subject.bos is not None else tokenizer.eos_token_id
    texts = [row["question"] for row in ROWS]
    total = sum(
        score_continuation(subject.decoder, [start], encode(subject, text))[0] for text in texts
    )
    assert results["own_rolling"]["bits_per_byte,none"] == pytest.approx(
        -total / math.log(2) / sum(map(len, texts))
    )


def test_generation_gives_the_engines_own_answers(results):
    assert results["own_answer"]["exact_match,none"] == pytest.approx((len(ROWS) - 1) / len(ROWS))
