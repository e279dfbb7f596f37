"""Whole steps through the native executor against the torch decoder, on tiny random models.

Exact steps of weight-only formats differ by float32 rounding. Formats that round x differ where
a value lies on the edge between two codes: one step of 127 (int8) or of 16 (float8) of single
values, which three layers of a random model turn into percents of the logits. The same holds for
x in 8 bits by group.
"""

from dataclasses import replace

import pytest
import torch
from tiny_configs import NATIVE

from flyweight.batch import Batch, KVStorage
from flyweight.engine.core import Engine
from flyweight.engine.memory import CacheShape
from flyweight.engine.request import SamplingParams
from flyweight.errors import UnsupportedError
from flyweight.kernels.native import library
from flyweight.kernels.native.executor import NativeDecoder
from flyweight.kv_format import KV_FORMATS, KVFormat
from flyweight.models.config import FAMILIES as KNOWN
from flyweight.models.decoder import Decoder
from flyweight.models.native import read_parts
from flyweight.models.presets import PresetWeights

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=f"{library.why_not()}")

FAMILIES = {
    "llama": NATIVE,
    "llama, untied, biases": NATIVE
    | dict(tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    "llama, part of the head turned": NATIVE | dict(partial_rotary_factor=0.5),
    "mistral with a window": NATIVE | dict(model_type="mistral", sliding_window=9),
    "qwen2": NATIVE | dict(model_type="qwen2", tie_word_embeddings=False),
    "qwen3": NATIVE | dict(model_type="qwen3", head_dim=24),
    "one kv head for all": NATIVE | dict(num_attention_heads=8, num_key_value_heads=1, head_dim=8),
}
EXACT = ("fp32", "fp16", "bf16", "int4", "int4-sym", "int8", "w8a16", "vptq", "sparse-int4")
ROUNDED = ("w8a8", "fp8", "sparse-w8a8")
PAGES, BLOCK = 24, 16
STEPS = (  # (cached tokens, new tokens) of each sequence
    [(0, 37), (0, 1), (0, 5)],  # prompts
    [(37, 1), (1, 1), (5, 20)],  # single tokens beside a part of a prompt that goes on
    [(38, 1), (2, 1), (25, 1)],
    [(39, 40)],
)


@pytest.fixture(autouse=True)
def llama_turns_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the kernels can; of the families that they run none does so far."""
    monkeypatch.setitem(KNOWN, "llama", replace(KNOWN["llama"], partial_rope=True))


def caches(
    config: dict,
    dtype: torch.dtype = torch.float32,
    format: KVFormat | None = None,
    fixed: tuple[float, float] | None = None,
) -> list[KVStorage]:
    heads = config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    shape = (PAGES, BLOCK, heads, size)
    return [
        KVStorage.zeros(shape, dtype, torch.device("cpu"), format, fixed)
        for _ in range(config["num_hidden_layers"])
    ]


def make_batch(sequences: list[tuple[int, int]], outputs: list[int] | None = None) -> Batch:
    """Sequence i has pages of its own, in no order."""
    tokens, positions, slots, starts = [], [], [], [0]
    tables = torch.stack([torch.arange(i, PAGES, 3).flip(0) for i in range(len(sequences))]).int()
    for i, (start, count) in enumerate(sequences):
        for position in range(start, start + count):
            tokens.append((position * 7 + i) % 129)
            positions.append(position)
            slots.append(int(tables[i, position // BLOCK]) * BLOCK + position % BLOCK)
        starts.append(starts[-1] + count)
    wanted = [end - 1 for end in starts[1:]] if outputs is None else outputs
    return Batch(
        torch.tensor(tokens),
        torch.tensor(positions),
        torch.tensor(slots),
        tables,
        starts,
        [start + count for start, count in sequences],
        torch.tensor(wanted, dtype=torch.int64),
    )


def largest_difference(
    config: dict, scheme: str, *, exact: bool, kv: torch.dtype = torch.float32, **options
) -> float:
    """Of the logits' norm, over all steps."""
    torch_decoder = Decoder.load(
        PresetWeights(config, scheme), device="cpu", dtype=torch.float32, exact=True
    )
    native = NativeDecoder(read_parts(PresetWeights(config, scheme), exact=exact, **options))
    theirs, ours = caches(config), caches(config, kv)
    found = 0.0
    for sequences in STEPS:
        batch = make_batch(sequences)
        expected = torch_decoder.forward(batch, theirs)
        logits = native.forward(batch, ours)
        assert logits.shape == expected.shape
        found = max(found, float((logits - expected).norm() / expected.norm()))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_logits_of_the_torch_decoder(family: str):
    assert largest_difference(FAMILIES[family], "fp32", exact=True) < 1e-5


@pytest.mark.parametrize("scheme", EXACT)
def test_every_weight_only_format_is_exact_where_asked(scheme: str):
    assert largest_difference(NATIVE, scheme, exact=True) < 1e-5


@pytest.mark.parametrize("scheme", ROUNDED)
def test_formats_that_round_x_round_it_alike(scheme: str):
    assert largest_difference(NATIVE, scheme, exact=True) < 0.03


@pytest.mark.parametrize("scheme", ["int4", "int4-sym", "int8", "w8a16"])
def test_x_in_8_bits_costs_percents_of_random_logits(scheme: str):
    assert 1e-4 < largest_difference(NATIVE, scheme, exact=False) < 0.05


@pytest.mark.parametrize("kv, most", [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_the_cache_may_be_in_16_bits(kv: torch.dtype, most: float):
    assert largest_difference(NATIVE, "fp32", exact=True, kv=kv) < most


@pytest.mark.parametrize("fixed", [None, (0.01, 0.03)], ids=["found", "given"])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_the_cache_may_be_in_8_bits(name: str, fixed: tuple[float, float] | None):
    """One layer writes the very codes and scales of the torch cache, but for values on an edge."""
    config = NATIVE | dict(num_hidden_layers=1)
    weights = PresetWeights(config, "fp32")
    torch_decoder = Decoder.load(weights, device="cpu", dtype=torch.float32, exact=True)
    native = NativeDecoder(read_parts(weights, exact=True))
    theirs, ours = (caches(config, format=KV_FORMATS[name], fixed=fixed) for _ in range(2))
    for sequences in STEPS:
        batch = make_batch(sequences)
        expected = torch_decoder.forward(batch, theirs)
        logits = native.forward(batch, ours)
        assert (logits - expected).norm() < 2e-3 * expected.norm()
    assert theirs[0].eight is not None and ours[0].eight is not None
    assert torch.equal(ours[0].eight.scales == 0, theirs[0].eight.scales == 0)
    scales = ours[0].eight.scales.float()
    assert torch.allclose(scales, theirs[0].eight.scales.float(), rtol=0.01)
    for side in ("keys", "values"):
        codes, wanted = (getattr(cache[0], side).view(torch.uint8) for cache in (ours, theirs))
        assert wanted.count_nonzero() > 1000
        assert (codes != wanted).float().mean() < 0.002


def test_codes_of_nan_are_nan():
    pages = caches(NATIVE, format=KV_FORMATS["fp8"])
    parts = read_parts(PresetWeights(NATIVE, "fp32"), exact=True)
    parts.layers[0].qkv[2].tensors["data"].fill_(0xFF)  # float32 of such bytes is NaN
    logits = NativeDecoder(parts).forward(make_batch([(0, 3)]), pages)
    assert logits.isnan().all()


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_in_8_bits_is_near_the_one_of_the_file(tied: bool):
    config = NATIVE | dict(tie_word_embeddings=tied)
    assert largest_difference(config, "fp32", exact=True, head_bits=8) < 0.03


def test_gate_and_up_may_take_x_differently():
    weights = PresetWeights(NATIVE, "int4")
    exact, mixed = (read_parts(weights, exact=True) for _ in range(2))
    pairs = zip(mixed.layers, read_parts(weights).layers, strict=True)
    layers = [replace(layer, gate=rounded.gate) for layer, rounded in pairs]
    mixed = replace(mixed, layers=layers)
    batch = make_batch([(0, 37)])
    logits = [NativeDecoder(parts).forward(batch, caches(NATIVE)) for parts in (exact, mixed)]
    assert 0 < (logits[0] - logits[1]).norm() / logits[0].norm() < 0.03


def test_logits_of_every_token_can_be_asked_for_and_of_none():
    weights = PresetWeights(NATIVE, "fp32")
    torch_decoder = Decoder.load(weights, device="cpu", dtype=torch.float32)
    native = NativeDecoder(read_parts(weights, exact=True))
    theirs, ours = caches(NATIVE), caches(NATIVE)
    part = make_batch([(0, 20)], outputs=[])
    assert native.forward(part, ours).shape == (0, 129)
    torch_decoder.forward(part, theirs)
    rest = make_batch([(20, 7)], outputs=[6, 0, 3])
    assert torch.allclose(
        native.forward(rest, ours), torch_decoder.forward(rest, theirs), atol=1e-5
    )


@pytest.mark.parametrize("change", [lambda caches: caches[:-1], lambda caches: caches + caches[:1]])
def test_another_number_of_caches_than_of_layers_is_refused(change):
    native = NativeDecoder(read_parts(PresetWeights(NATIVE, "fp32")))
    with pytest.raises(ValueError, match=r"\d KV caches for 3 layers; give one a layer"):
        native.forward(make_batch([(0, 3)]), change(caches(NATIVE)))


def test_nan_stays_in_its_sequence():
    weights = PresetWeights(NATIVE, "int4")
    native = NativeDecoder(read_parts(weights))
    pages = caches(NATIVE)
    pages[0].keys[int(make_batch([(0, 1), (0, 1)]).block_tables[1, 0])] = float("nan")
    batch = make_batch([(3, 1), (3, 1)])
    logits = native.forward(batch, pages)
    assert logits[0].isfinite().all()
    assert logits[1].isnan().all()


def generate(model, prompts: list[list[int]], **options) -> list[list[int]]:
    shape = CacheShape(layers=3, kv_heads=2, head_dim=16, dtype=torch.float32)
    engine = Engine(
        model,
        shape,
        vocabulary=129,
        device=torch.device("cpu"),
        max_model_len=128,
        blocks=64,
        **options,
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True).with_defaults({})
    requests = [engine.submit(prompt, params)[0] for prompt in prompts]
    while engine.busy:
        engine.step()
    return [request.tokens[len(request.prompt) :] for request in requests]


def test_the_engine_runs_it_like_any_model():
    """Batches, prompts in parts and shared prefixes give the tokens of the torch decoder."""
    weights = PresetWeights(NATIVE, "fp32")
    prompts = [
        [(7 * i + k) % 129 for k in range(length)] for i, length in enumerate((3, 40, 17, 1))
    ]
    prompts.append(prompts[1] + [5, 6])  # begins like another one
    expected = generate(Decoder.load(weights, device="cpu", dtype=torch.float32), prompts)
    native = NativeDecoder(read_parts(weights, exact=True))
    assert generate(native, prompts) == expected
    assert generate(native, prompts, max_num_batched_tokens=16, max_num_seqs=3) == expected


def test_what_it_does_not_run_is_said():
    moe = PresetWeights("tiny-moe")
    with pytest.raises(UnsupportedError, match="mixtures of experts"):
        read_parts(moe)
