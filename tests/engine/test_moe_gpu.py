"""Mixtures of experts in the engine: captured steps are those of the same launches, and near those
of float32.
"""

import pytest
import torch
from gpu_models import CUDA, make_engine, params, prompts, run

from flyweight import gpu
from flyweight.batch import KVStorage
from flyweight.engine.graphs import DecodeGraphs, unsupported_reason
from flyweight.engine.rows import Rows
from flyweight.kernels.linear.experts import words
from flyweight.models.decoder import Decoder
from flyweight.models.presets import PRESETS, PresetWeights

pytestmark = pytest.mark.gpu
PAGE = 16
SIZES = dict(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=128,
)
MODELS = {
    "qwen2": PRESETS["qwen2-57b-a14b"]
    | SIZES
    | dict(shared_expert_intermediate_size=384, mlp_only_layers=[1]),
    "qwen3": PRESETS["qwen3-30b-a3b"] | SIZES | dict(head_dim=64),
}
# a token near a tie between experts may be far off
BOUND = {"bf16": 0.1, "int4": 0.1, "w8a16": 0.1, "w8a8": 0.2}


def load(model, scheme, dtype=torch.bfloat16, **options):
    return Decoder.load(
        PresetWeights(MODELS[model], scheme, device=CUDA), device=CUDA, dtype=dtype, **options
    )


@torch.inference_mode()
@pytest.mark.parametrize("scheme", BOUND)
@pytest.mark.parametrize("model", MODELS)
def test_captured_steps_with_experts_are_those_of_the_launches_and_of_float32(model, scheme):
    decoder = load(model, scheme)
    reason = unsupported_reason(decoder, PAGE)
    if reason is not None and not gpu.of(0).has_warpgroups:
        pytest.skip(reason)
    assert reason is None
    config, steps = decoder.config, 24
    tokens = torch.randint(
        10, 1000, (32, steps), device=CUDA, generator=torch.Generator(CUDA).manual_seed(1)
    )
    want = load(model, scheme, torch.float32, exact=True).forward_whole(tokens)
    for size in (1, 8, 32):
        caches = [
            KVStorage(
                *(
                    torch.zeros(
                        64, PAGE, config.kv_heads, config.head_dim, dtype=decoder.dtype, device=CUDA
                    )
                    for _ in range(2)
                )
            )
            for _ in range(config.layers)
        ]
        rows = Rows(size, pages=2, vocabulary=config.vocab_size, device=CUDA)
        rows.tables[:] = torch.arange(2 * size, dtype=torch.int32, device=CUDA).view(size, 2)
        graphs, errors = DecodeGraphs(decoder, caches, rows, sizes=(size,)), []
        for i in range(steps):
            rows.tokens[:], rows.lengths[:] = tokens[:size, i], i + 1
            got = graphs.logits(size).float()
            with decoder.active():
                graphs.steps[size].launch()
            assert torch.equal(graphs.steps[size].logits.float(), got)
            errors.append((got - want[:size, i]).norm(dim=-1) / want[:size, i].norm(dim=-1))
        assert torch.cat(errors).median() < BOUND[scheme]


@torch.inference_mode()
def test_steps_have_the_same_bits_whoever_chooses_among_many_experts(monkeypatch):
    """The route's last thread block, or every thread block of the experts' first linear by the
    router's words.
    """
    many = MODELS["qwen3"] | dict(hidden_size=2048, num_experts=256, num_experts_per_tok=8)
    decoder = Decoder.load(
        PresetWeights(many, "int4", device=CUDA), device=CUDA, dtype=torch.bfloat16
    )
    grouped = [block.mlp.grouped for block in decoder.blocks]
    if any(one is None or one._words_plan(gpu.of(0)) is None for one in grouped):
        pytest.skip("these experts are chosen by the route here")
    config = decoder.config
    ways = []
    for least in (words.MANY_EXPERTS, 1 << 30):
        monkeypatch.setattr(words, "MANY_EXPERTS", least)
        caches = [
            KVStorage(
                *(
                    torch.zeros(
                        8, PAGE, config.kv_heads, config.head_dim, dtype=decoder.dtype, device=CUDA
                    )
                    for _ in range(2)
                )
            )
            for _ in range(config.layers)
        ]
        rows = Rows(1, pages=2, vocabulary=config.vocab_size, device=CUDA)
        rows.tables[:] = torch.arange(2, dtype=torch.int32, device=CUDA)
        rows.tokens[:], rows.lengths[:] = 1, 1
        graphs = DecodeGraphs(decoder, caches, rows, sizes=(1,))
        graphs.logits(1)  # captures
        ways.append((rows, graphs))
    for step in range(512):
        found = []
        for rows, graphs in ways:
            rows.tokens[:], rows.lengths[:] = 3 + step * 7919 % 990, 1 + step % 24
            found.append([graphs.logits(1).clone() for _ in range(2)])
        assert all(torch.equal(found[0][0], one) for pair in found for one in pair), step
    assert all(
        (one.words.view(torch.int32) == -1).all() and int(one.router.ready) == 0 for one in grouped
    )


@pytest.mark.parametrize("scheme", ["bf16", "int4"])
def test_the_engine_answers_alike_with_and_without_graphs(scheme):
    decoder = load("qwen2", scheme)
    answers = []
    for captured in (True, False):
        engine = make_engine(decoder)
        if not captured:
            engine.runner.steps = None
        requests = [
            request
            for prompt in prompts(decoder.config, 8, longest=60)
            for request in engine.submit(prompt, params(max_tokens=24))
        ]
        answers.append(run(engine, requests))
    pairs = (zip(*both, strict=True) for both in zip(*answers, strict=True))
    same = [one == other for both in pairs for one, other in both]
    assert sum(same) > 0.5 * len(same)  # rounding may part ways at a tie, and then for good
