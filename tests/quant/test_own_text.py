"""Samples that the original model writes itself, beside those of the calibration text."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from tiny_model import TEXT, make_tiny_model

from flyweight.checkpoint.reader import Checkpoint
from flyweight.errors import OptionError
from flyweight.quant.calibration import draw_samples
from flyweight.quant.own_text import openings, pieces, with_own_text
from flyweight.quant.quantize import quantize
from flyweight.quant.recipe import Recipe

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=2)


def samples_of(seed=0, bos=None):
    ids = list(range(4, 90)) * 4
    return draw_samples(ids, count=6, length=24, seed=seed, source="letters", bos=bos)


@pytest.fixture(scope="module")
def both(model):
    return with_own_text(samples_of(), model, share=1.5, device=CPU)


def rows(samples):
    return {tuple(row) for row in samples.tokens.tolist()}


def test_the_samples_of_the_text_stay_and_so_many_of_its_own_come_beside_them(both):
    assert both.tokens.shape == (6 + 9, 24) and both.own == 9
    assert rows(samples_of()) < rows(both)
    assert len(rows(both)) == 15  # each has a seed of its own
    assert both.facts()["own"] == 9 and "own" not in samples_of().facts()


def test_the_same_seed_writes_the_same_and_another_one_something_else(model, both):
    again = with_own_text(samples_of(), model, share=1.5, device=CPU)
    other = with_own_text(samples_of(seed=1), model, share=1.5, device=CPU)
    assert again.digest == both.digest
    assert not (rows(other) - rows(samples_of(seed=1))) & rows(both)


def test_what_it_writes_is_likelier_to_itself_than_text_drawn_blindly(model):
    """That is the point of it: not noise, but what the model knows."""
    from flyweight.models.decoder import Decoder

    decoder = Decoder.load(Checkpoint(model), device="cpu", dtype=torch.float32, exact=True)
    sure = with_own_text(samples_of(), model, share=4.0, device=CPU)
    own = torch.tensor(sorted(rows(sure) - rows(samples_of())))
    blind = torch.randint(4, 96, own.shape, generator=torch.Generator().manual_seed(0))

    def loss(tokens):
        losses = torch.log_softmax(decoder.forward_whole(tokens)[:, :-1].double(), -1)
        return float(-losses.gather(-1, tokens[:, 1:, None]).mean())

    assert loss(own) < loss(blind) - 0.05


def test_samples_that_hold_their_own_text_already_are_taken_as_they_are(model, both):
    assert with_own_text(both, model, share=1.5, device=CPU) is both
    assert with_own_text(samples_of(), model, share=0.0, device=CPU).own == 0


def test_openings_are_words_and_stand_behind_bos_where_texts_begin_with_it(model):
    checkpoint = Checkpoint(model)
    plain = openings(checkpoint, 400, 0, like=[5, 1, 7])
    special = set(checkpoint.tokenizer().all_special_ids)
    assert all(len(prompt) == 1 and prompt[0] not in special for prompt in plain)
    assert len({prompt[0] for prompt in plain}) > 60
    behind = openings(checkpoint, 9, 0, like=[1, 1])
    assert all(prompt[0] == 1 and len(prompt) == 2 for prompt in behind)


def test_every_second_sample_goes_on_from_a_piece_of_the_text(model):
    samples = samples_of(bos=1)
    text = [row[1:] for row in samples.tokens.tolist()]
    found = pieces(samples, 40, behind=1)
    size = len(found[0]) - 1
    places = [row[i : i + size] for row in text for i in range(len(row) - size + 1)]
    assert all(piece[0] == 1 and piece[1:] in places for piece in found)
    assert len({tuple(piece) for piece in found}) > 10
    both = with_own_text(samples_of(), model, share=1.5, device=CPU)
    own = [list(row) for row in rows(both) - rows(samples_of())]
    known = [row[i : i + 12] for row in samples_of().tokens.tolist() for i in range(13)]
    assert sum(row[:12] in known for row in own) >= len(own) // 2


def make(model, tmp_path, name, **keys):
    (tmp_path / "text.txt").write_text(TEXT)
    return quantize(
        model,
        output=tmp_path / name,
        recipe=Recipe.from_dict({"base": "gptq-int3"} | keys, name),
        calibration=str(tmp_path / "text.txt"),
        samples=4,
        length=32,
        device="cpu",
    ).output


def test_a_recipe_asks_for_it_and_the_note_says_so(model, tmp_path):
    plain = make(model, tmp_path, "plain")
    own = make(model, tmp_path, "own", own_text=2)
    facts = json.loads((own / "flyweight.json").read_text())
    assert facts["calibration"]["own"] == 8 and facts["calibration"]["samples"] == 12
    assert facts["recipe"]["own_text"] == 2.0
    name = "model.layers.0.mlp.up_proj"
    first, second = (Checkpoint(folder).linear(name).dequantize() for folder in (plain, own))
    assert not torch.equal(first, second)


def test_text_for_tuning_is_seen_by_nothing_before_it(model, tmp_path):
    keys = {"tune_text": 2, "tune_batch": 4, "tune_rate": 0.01}
    plain = make(model, tmp_path, "plain")
    unused = make(model, tmp_path, "unused", **keys)
    tuned = make(model, tmp_path, "tuned", **keys, tune_steps=4)
    wild = make(model, tmp_path, "wild", **keys | {"tune_rate": 9.0}, tune_steps=1)
    calibration = json.loads((tuned / "flyweight.json").read_text())["calibration"]
    assert (calibration["samples"], calibration["own"], calibration["tuning"]) == (12, 8, 8)
    name = "model.layers.1.mlp.up_proj"
    first, same, moved, refused = (
        Checkpoint(folder).linear(name).dequantize() for folder in (plain, unused, tuned, wild)
    )
    assert torch.equal(first, same) and not torch.equal(first, moved)
    assert torch.equal(first, refused)  # tuning that does not help: what the solvers gave is left


def test_what_needs_no_calibration_writes_nothing(model, tmp_path):
    output = make(model, tmp_path, "out", base="rtn-int4", own_text=2)
    assert json.loads((output / "flyweight.json").read_text())["calibration"] is None


@pytest.mark.parametrize("key", ["own_text", "tune_text"])
def test_less_than_nothing_is_refused(key):
    with pytest.raises(OptionError, match=f"{key} is 0 or more, not -1"):
        Recipe.from_dict({"base": "gptq-int4", key: -1}, "mine")
