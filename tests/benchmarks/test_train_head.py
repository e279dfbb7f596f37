"""A head trained by the repository's script is one that the engine runs, and guesses better than
chance.
"""

import sys
from pathlib import Path

import pytest
import torch

from flyweight import LLM
from flyweight.models.presets import PRESETS, preset_config

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
train_head = pytest.importorskip("train_head")
drafter_answers = pytest.importorskip("drafter_answers")


@pytest.fixture
def preset():
    small = dict(
        num_hidden_layers=3,
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        head_dim=16,
        max_position_embeddings=256,
    )
    PRESETS["taught"] = preset_config("tiny") | small
    yield "preset:taught:fp32"
    del PRESETS["taught"]


def test_a_head_learns_what_its_model_says(preset, tmp_path):
    llm = LLM(preset, device="cpu", max_model_len=64, native=False)
    multiply = llm.decoder.head.fused.run
    # as sure of what it says as trained models are
    llm.decoder.head.fused.run = lambda x: 6 * multiply(x)
    prompts = torch.randint(2, 64, (128, 3), generator=torch.Generator().manual_seed(0)).tolist()
    answers = drafter_answers.answers_of(llm, prompts, 13, temperature=1.0)
    options = dict(vocabulary=48, batch=512, unroll=2, rate=4e-3, say=lambda text: None)
    lessons = train_head.lessons_of(llm, answers)
    first = train_head.train_head(llm, lessons, tmp_path, steps=5, **options)
    again = train_head.train_head(llm, lessons, tmp_path, steps=45, **options)
    assert again["steps"] == 45 and again["loss_before"] == pytest.approx(
        first["loss"], abs=1e-3
    ), "it goes on where it was"
    assert again["loss"] < 0.85 * first["loss_before"]
    assert again["right"][0] > 0.3, "one in 64 would be chance"

    guessing = LLM(preset, device="cpu", max_model_len=64, speculate=f"eagle3:{tmp_path}:2")
    guessing.engine.speculator.drafter.lookup.propose = lambda requests, most: {}  # the head alone
    asked = [answered.tokens[:8] for answered in answers[:: train_head.KEPT_BACK]]
    want, got = (
        one.generate(asked, max_tokens=16, temperature=0, ignore_eos=True)
        for one in (llm, guessing)
    )
    assert [one.completions[0].token_ids for one in got] == [
        one.completions[0].token_ids for one in want
    ]
    assert guessing.engine.speculator.figures()["acceptance_rate"] > 0.2


def test_no_answer_to_a_prompt_that_was_kept_back_is_taught():
    prompts = [[number % 40] for number in range(100)]
    answers = [drafter_answers.Answered(prompt, [i]) for i, prompt in enumerate(prompts)]
    taught, kept_back = train_head.divided(answers)
    assert len(taught) + len(kept_back) == 100 and len(kept_back) >= 6
    assert not {one.prompt[0] for one in taught} & {one.prompt[0] for one in kept_back}


def test_questions_that_came_to_no_end_are_cut_behind_a_sentence():
    cut = drafter_answers.SENTENCE.match
    assert cut("Who was it? He said 3.5 and then")[0] == "Who was it?"
    assert cut("Is it 3.5") is None
