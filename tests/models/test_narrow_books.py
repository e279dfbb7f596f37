"""Codebooks of VPTQ in bytes (`--vptq-books`): who gets them, and that nothing else changes."""

import pytest
import torch

from flyweight.engine.llm import LLM
from flyweight.errors import OptionError
from flyweight.models.narrow_books import narrow_books
from flyweight.models.presets import PRESETS, PresetWeights
from flyweight.tensors import ByteVectorQuant, VectorQuant

CPU, GPU = torch.device("cpu"), torch.device("cuda")
DOWN = "model.layers.0.mlp.down_proj"


def weights(name="tiny", scheme="vptq"):
    return PresetWeights(PRESETS[name], scheme)


def test_codebooks_are_rounded_where_it_is_asked_for_and_nowhere_else():
    stored = weights()
    assert narrow_books(stored, None, GPU) is stored
    assert narrow_books(stored, "stored", GPU) is stored
    assert narrow_books(stored, "int8", GPU) is not stored
    with pytest.raises(OptionError, match="--vptq-books"):
        narrow_books(stored, "int4", GPU)


def test_bytes_stand_for_the_values_that_every_kernel_sees():
    stored, narrow = weights(), narrow_books(weights(), "int8", CPU)
    before, after = stored.linear(DOWN), narrow.linear(DOWN)
    assert isinstance(after, ByteVectorQuant)
    assert torch.equal(after.codebook, before.with_books(after.books).codebook)
    loss = (after.dequantize() - before.dequantize()).norm() / before.dequantize().norm()
    assert 0 < loss < 0.02
    assert after.nbytes == before.nbytes
    name = "model.layers.0.input_layernorm.weight"
    assert torch.equal(narrow.tensor(name), stored.tensor(name))
    assert narrow.has(name)


def test_other_weights_and_experts_stay_as_they_are():
    assert not isinstance(
        narrow_books(weights(scheme="int4"), "int8", CPU).linear(DOWN), VectorQuant
    )
    expert = narrow_books(weights("tiny-moe"), "int8", CPU).linear(
        "model.layers.0.mlp.experts.0.down_proj"
    )
    assert isinstance(expert, VectorQuant)
    assert not isinstance(expert, ByteVectorQuant)


def test_a_model_without_such_weights_says_so_where_bytes_are_asked_for():
    LLM("preset:tiny:int4", device="cpu", native=False)
    with pytest.raises(OptionError, match="this model has none"):
        LLM("preset:tiny:int4", device="cpu", vptq_books="int8")


def test_an_engine_reads_the_rounded_codebooks():
    prompts = [[5, 9, 2, 77, 31]]
    rounded = narrow_books(weights(), "int8", CPU).linear(DOWN).dequantize()
    llm = LLM("preset:tiny:vptq", device="cpu", native=False, exact=True, vptq_books="int8")
    down = llm.decoder.blocks[0].mlp.down
    x = torch.eye(rounded.shape[1])[:4]
    torch.testing.assert_close(down(x), rounded.T[:4], rtol=1e-4, atol=1e-5)
    assert len(llm.generate(prompts, max_tokens=3)[0].token_ids) == 3
