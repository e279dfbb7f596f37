"""A head in fewer bits than its file has: right values, its own table, nothing else changed."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "quant"))
from tiny_model import make_tiny_model

from flyweight.checkpoint.reader import Checkpoint
from flyweight.engine.llm import LLM
from flyweight.errors import OptionError
from flyweight.models.decoder import Decoder
from flyweight.models.narrow_head import narrow_head, nearest
from flyweight.models.presets import PRESETS, PresetWeights
from flyweight.tensors import IntGroup

TINY = PRESETS["tiny"]


def load(weights):
    return Decoder.load(weights, device="cpu", dtype=torch.float32, exact=True)


@pytest.mark.parametrize(("bits", "bound"), [(8, 1.15 / 255), (4, 2 / 15)])
@pytest.mark.parametrize("columns", [256, 192, 96, 50])
def test_every_weight_is_near_what_was_stored(bits, bound, columns):
    weight = torch.randn(70, columns, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    weight[4] = weight[4].abs() + 1  # a range that does not hold zero
    found = nearest(weight, bits)
    largest = weight.abs().amax(1, keepdim=True)
    assert found.shape == weight.shape
    assert ((found.dequantize() - weight).abs() <= largest * bound + 1e-6).all()
    assert not found.dequantize()[3].any()


def test_rows_rounded_in_parts_are_those_rounded_at_once(monkeypatch):
    weight = torch.randn(64, 128)
    whole = nearest(weight, 8)
    monkeypatch.setattr("flyweight.models.narrow_head.AT_ONCE", 1024)
    assert torch.equal(nearest(weight, 8).dequantize(), whole.dequantize())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["int8", "int4"])
def test_only_the_head_changes(tied, head):
    weights = PresetWeights(TINY | {"tie_word_embeddings": tied})
    stored = load(weights)
    narrow = load(narrow_head(weights, head))
    shared = tied and head == "int8"
    table = narrow_head(weights, head).linear("model.embed_tokens" if shared else "lm_head")
    assert table.bits_per_weight < (8.3 if head == "int8" else 4.5)
    if shared:  # the model reads what the head's table says
        every = torch.arange(stored.config.vocab_size)
        assert torch.equal(narrow.embedding(every), table.dequantize())
    else:
        assert torch.equal(narrow.embedding.weight, stored.embedding.weight)
    tokens = torch.randint(0, stored.config.vocab_size, (1, 12))
    error = (narrow.forward_whole(tokens) - stored.forward_whole(tokens)).norm()
    assert 0 < error < (0.02 if head == "int8" else 0.2) * stored.forward_whole(tokens).norm()


def test_a_tied_head_that_is_written_twice_is_read_and_shared(tmp_path):
    folder = make_tiny_model(tmp_path / "model", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    decoder = load(narrow_head(Checkpoint(folder), "int8"))
    assert isinstance(decoder.embedding.weight, IntGroup)


def test_a_head_that_is_stored_in_as_few_bits_stays():
    class Stored(PresetWeights):
        def linear(self, prefix):
            found = super().linear(prefix)
            return nearest(found.dequantize(), 4) if prefix == "lm_head" else found

    weights = Stored(TINY | {"tie_word_embeddings": False})
    wanted = weights.linear("lm_head")
    assert torch.equal(
        narrow_head(weights, "int8").linear("lm_head").dequantize(), wanted.dequantize()
    )


def test_an_unknown_head_is_refused_with_the_nearest_name():
    with pytest.raises(OptionError, match="int8"):
        LLM("preset:tiny", device="cpu", head="int9", blocks=8, max_model_len=64)


def test_the_engine_runs_with_a_narrow_head():
    llm = LLM("preset:tiny", device="cpu", head="int8", blocks=8, max_model_len=64)
    assert (
        len(llm.generate([[1, 2, 3]], max_tokens=4, temperature=0)[0].completions[0].token_ids) == 4
    )


def test_a_folder_may_ask_for_a_narrow_head_and_the_user_for_the_stored_one():
    weights = PresetWeights(TINY | {"served_head": "int8"})
    assert narrow_head(weights, None).linear("model.embed_tokens").bits_per_weight < 8.3
    assert narrow_head(weights, "stored") is weights
    assert narrow_head(weights, "int4").linear("lm_head").bits_per_weight < 4.5
