"""An engine whose KV cache holds 8-bit codes: however a prompt is cut, found again or computed
twice, its answer stays the same.
"""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_configs import LLAMA

from flyweight import LLM, SamplingParams
from flyweight.checkpoint.formats.base import CheckpointNotice
from flyweight.errors import CheckpointError, OptionError
from flyweight.kernels.native import library
from flyweight.kv_format import FP8
from flyweight.models import presets
from flyweight.models.random_folder import write_preset

PROMPTS = [[(7 * i + 3 * k) % 60 for i in range(n)] for k, n in enumerate((45, 22, 33))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(presets.PRESETS, "tiny", LLAMA | dict(head_dim=16))


def engine(kv_dtype, **options):
    defaults = dict(blocks=64, block_size=4, max_num_batched_tokens=256, kv_dtype=kv_dtype)
    return LLM("preset:tiny:fp32", **(defaults | options))


def answers(llm, prompts=PROMPTS):
    return [output.token_ids for output in llm.generate(prompts, GREEDY)]


@pytest.fixture(params=["fp8", "int8"])
def kv_dtype(request):
    return request.param


@pytest.fixture
def alone(kv_dtype):
    """What each prompt gives in an engine of its own, in one piece."""
    return [answers(engine(kv_dtype, prefix_cache=False), [prompt])[0] for prompt in PROMPTS]


def test_the_cache_holds_codes_and_costs_half(kv_dtype):
    llm = engine(kv_dtype)
    cache = llm.engine.runner.caches[0]
    assert llm.kv_dtype == kv_dtype and cache.keys.dtype.itemsize == 1
    answers(llm)
    assert (cache.eight.scales > 0).any() and cache.keys.view(torch.uint8).any()
    wide = engine("model", native=False).memory()
    # 64 bytes of a head in float32, or 16 and a scale
    assert llm.memory().kv * 64 == wide.kv * 18 and llm.memory().kv_tokens == wide.kv_tokens


def test_prompts_cut_into_chunks_beside_answers(kv_dtype, alone):
    assert answers(engine(kv_dtype, max_num_batched_tokens=8, max_num_seqs=4)) == alone


def test_prompts_found_in_the_prefix_cache(kv_dtype, alone):
    llm = engine(kv_dtype)
    longer = PROMPTS[0] + alone[0][:5]
    assert answers(llm) == alone
    outputs = llm.generate([PROMPTS[0], longer], GREEDY)
    assert [output.completions[0].cached_tokens for output in outputs] == [44, 48]
    assert outputs[0].token_ids == alone[0]
    assert outputs[1].token_ids[:7] == alone[0][5:]


def test_requests_that_lose_their_blocks_and_begin_again(kv_dtype, alone):
    llm = engine(kv_dtype, blocks=32, prefix_cache=False, max_model_len=64)
    prepared = [llm.prepare(prompt, GREEDY) for prompt in PROMPTS]
    requests = [one for p in prepared for one in llm.engine.submit(p.tokens, p.params)]
    while llm.engine.busy:
        llm.engine.step()
    assert sum(request.preemptions for request in requests) > 0
    assert [request.tokens[len(request.prompt) :] for request in requests] == alone


def test_an_unknown_type_is_named():
    with pytest.raises(OptionError, match="unknown kv_dtype 'fp9'; did you mean 'fp8'"):
        engine("fp9")


@pytest.mark.skipif(library.why_not() is not None, reason=f"{library.why_not()}")
def test_native_kernels_give_the_tokens_of_torch(kv_dtype):
    native, torch = (engine(kv_dtype, native=own, exact=True) for own in (True, False))
    assert native.executor.startswith("native") and torch.executor.startswith("torch")
    assert native.kv_dtype == torch.kv_dtype == kv_dtype
    assert answers(native) == answers(torch)


@pytest.fixture
def with_scales(tmp_path):
    """A function that writes a compressed-tensors checkpoint with a `kv_cache_scheme`."""

    def write(scale=0.02, **changes):
        folder = write_preset("preset:tiny:w8a8", tmp_path / "model", overwrite=True)
        tensors = load_file(folder / "model.safetensors")
        for layer in range(LLAMA["num_hidden_layers"]):
            for name in ("k_scale", "v_scale"):
                place = f"model.layers.{layer}.self_attn.{name}"
                tensors[place] = torch.tensor([scale * (1 + layer)])
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
        config["quantization_config"]["kv_cache_scheme"] = scheme | changes
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


def loaded(folder, **options):
    return LLM(folder, blocks=16, block_size=4, **options)


def test_scales_of_a_checkpoint_are_used(with_scales):
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointNotice)
        llm = loaded(with_scales())
    assert llm.kv_dtype == "fp8"
    caches = llm.engine.runner.caches
    assert [cache.eight.format for cache in caches] == [FP8, FP8]
    assert [cache.eight.fixed for cache in caches] == [pytest.approx((s, s)) for s in (0.02, 0.04)]
    llm.generate([PROMPTS[1]], GREEDY)
    used = caches[1].eight.scales[caches[1].eight.scales > 0]
    assert set(used.tolist()) == {torch.tensor(0.04).bfloat16().item()}


def test_a_user_may_ask_for_another_type_than_the_checkpoint(with_scales):
    folder = with_scales()
    assert loaded(folder, kv_dtype="model").engine.runner.caches[0].eight is None
    other = loaded(folder, kv_dtype="int8").engine.runner.caches[0].eight
    assert other.format.name == "int8" and other.fixed is None, "its scales are those of fp8"
    assert loaded(folder, kv_dtype="fp8").engine.runner.caches[0].eight.fixed is not None


def test_a_scheme_without_a_kernel_keeps_the_type_of_activations(with_scales):
    with pytest.warns(CheckpointNotice, match="more precise"):
        llm = loaded(with_scales(num_bits=4), native=False)
    assert llm.kv_dtype == "float32"


def test_a_scale_that_is_none_is_named(with_scales):
    with pytest.raises(
        CheckpointError, match=r"self_attn\.k_scale: one positive scale is expected"
    ):
        loaded(with_scales(scale=0.0))
