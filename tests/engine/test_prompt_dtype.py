"""8-bit prompts for 4-bit weights: long passes round x to 8 bits, short ones stay as they are."""

import clean_process
import dry_runs
import pytest
import torch

from flyweight import LLM, SamplingParams
from flyweight.errors import OptionError
from flyweight.kernels.linear import prompts
from flyweight.models.decoder import Decoder
from flyweight.models.presets import PresetWeights
from flyweight.quant.evaluate import compare

LONG = [(7 * i + 3) % 16384 for i in range(prompts.FEW_ROWS + 44)]
SHORT = LONG[:40]


def engine(scheme="int4", **options):
    return LLM(f"preset:tiny:{scheme}", blocks=64, max_model_len=512, native=False, **options)


def first_logprobs(llm, prompt):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=8, ignore_eos=True)
    (output,) = llm.generate([prompt], params)
    return output.completions[0].logprobs


def test_long_prompts_are_rounded_and_short_ones_are_not():
    plain = engine()
    narrow = engine(decoder=None, prompt_dtype="int8")
    assert first_logprobs(narrow, SHORT) == first_logprobs(plain, SHORT), "not a bit differs"
    ours, theirs = (first_logprobs(llm, LONG)[0] for llm in (narrow, plain))
    assert ours.top != theirs.top
    shared = ours.top.keys() & theirs.top.keys()
    assert len(shared) >= 4 and all(abs(ours.top[t] - theirs.top[t]) < 0.1 for t in shared)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_predictions_stay_close(kind, dtype):
    weights = PresetWeights("tiny", "int4")
    plain, narrow = (Decoder.load(weights, device="cpu", dtype=dtype, exact=True) for _ in range(2))
    narrow.narrow_prompts(kind)
    _, agreement = compare(plain, narrow, LONG, window=len(LONG))
    assert 0 < agreement.kl < (2e-3 if kind == "int8" else 2e-2)
    _, agreement = compare(plain, narrow, SHORT, window=len(SHORT))
    assert agreement.kl == 0


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_an_evaluation_on_a_gpu_multiplies_them_through_torch(kind):
    with clean_process.pool() as pool:
        products, right = pool.submit(dry_runs.evaluate, "preset:tiny:int4", kind).result()
    assert products == [("torch.linear", True)] * len(products) and len(products) > 3
    assert right == {True}


def test_a_weight_in_8_bits_means_nearly_the_same():
    tensor = PresetWeights("tiny", "int4").linear("model.layers.0.mlp.down_proj")
    dense = tensor.dequantize()
    for kind, most in (("int8", 0.01), ("fp8", 0.03)):
        found = prompts.in_eight_bits(dense, kind).dequantize()
        assert 0 < (found - dense).norm() / dense.norm() < most


def test_wrong_types_and_models_are_named():
    with pytest.raises(OptionError, match="unknown prompt_dtype 'int9'; did you mean 'int8'"):
        engine(prompt_dtype="int9")
    with pytest.raises(OptionError, match="prompt_dtype int8 is for models with 4-bit weights"):
        engine("w8a8", prompt_dtype="int8")
    with pytest.raises(OptionError, match="leave it out, or leave out offload"):
        engine(prompt_dtype="int8", offload=1)
