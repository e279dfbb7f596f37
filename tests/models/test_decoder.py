import dataclasses

import pytest
import torch
from model_helpers import (
    MODELS,
    DictWeights,
    assert_same_logits,
    load,
    run_paged,
    tokens_of,
    transformers_model,
)
from tiny_configs import LINEARS

from flyweight.batch import Batch, KVStorage
from flyweight.errors import CheckpointError
from flyweight.kernels import reference
from flyweight.models.config import FAMILIES, ModelConfig
from flyweight.models.decoder import Decoder
from flyweight.models.layer import Block
from flyweight.models.standard import plan_of
from flyweight.tensors import Plain


@pytest.fixture(scope="module", params=MODELS)
def pair(request):
    model = transformers_model(request.param)
    return model, load(model)


def reference_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def test_whole_sequences_match_transformers(pair):
    model, decoder = pair
    tokens = torch.tensor([tokens_of(33), tokens_of(33, seed=1)])
    with torch.no_grad():
        assert_same_logits(decoder.forward_whole(tokens), model(tokens).logits)


@pytest.mark.parametrize(
    "chunk", [1, 5, 64, [7, 3, 1]], ids=["token by token", "chunks", "one prefill", "uneven chunks"]
)
def test_paged_runs_match_transformers(pair, chunk):
    model, decoder = pair
    tokens = tokens_of(21)
    assert_same_logits(run_paged(decoder, [tokens], chunk)[0], reference_logits(model, tokens))


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_packed_sequences_equal_each_alone(pair, chunk):
    model, decoder = pair
    sequences = [tokens_of(count, seed=count) for count in (9, 17, 1, 12)]
    for found, tokens in zip(run_paged(decoder, sequences, chunk), sequences, strict=True):
        assert_same_logits(found, reference_logits(model, tokens))


def test_pages_that_follow_each_other_are_read_in_place(monkeypatch):
    """Both ways of reading pages, alone and in a run of decoding sequences, give the same
    logits."""
    model = transformers_model("mistral window")
    decoder, sequences = load(model), [tokens_of(count, seed=count) for count in (9, 23, 14)]
    for long in (1, 12, 512):
        monkeypatch.setattr(reference, "LONG", long)
        for found, tokens in zip(
            run_paged(decoder, sequences, [8, 1], shuffled=False), sequences, strict=True
        ):
            assert_same_logits(found, reference_logits(model, tokens))


def test_prefill_and_decode_share_a_step():
    """Continuous batching: sequence 0 decodes while sequence 1 is still being read."""
    model = transformers_model("mistral window")
    decoder, first, second = load(model), tokens_of(10), tokens_of(6, seed=1)
    config = decoder.config
    caches = [
        KVStorage(
            torch.zeros(8, 4, config.kv_heads, config.head_dim),
            torch.zeros(8, 4, config.kv_heads, config.head_dim),
        )
        for _ in range(config.layers)
    ]
    tables = torch.tensor([[3, 1, 6], [5, 2, 0]], dtype=torch.int32)

    def batch(spans, outputs):
        at = [(i, p) for i, (start, stop) in spans.items() for p in range(start, stop)]
        starts = [0]
        for start, stop in spans.values():
            starts.append(starts[-1] + stop - start)
        return Batch(
            torch.tensor([(first, second)[i][p] for i, p in at]),
            torch.tensor([p for _, p in at]),
            torch.tensor([int(tables[i, p // 4]) * 4 + p % 4 for i, p in at]),
            tables[list(spans)],
            starts,
            [stop for _, stop in spans.values()],
            torch.tensor(outputs),
        )

    decoder.forward(batch({0: (0, 8)}, [7]), caches)
    decoder.forward(batch({0: (8, 9), 1: (0, 3)}, [0]), caches)
    found = decoder.forward(batch({1: (3, 6), 0: (9, 10)}, [2, 3]), caches)
    assert_same_logits(found[0], reference_logits(model, second)[-1])
    assert_same_logits(found[1], reference_logits(model, first)[-1])


@pytest.mark.parametrize("wanted", [[5], [0, 3], []])
def test_only_the_wanted_rows_go_on_from_the_last_attention(wanted):
    """Their logits are those of a run that asks for all, and so are the keys and values of every
    token."""
    decoder, seen, found, caches = load(transformers_model("llama")), [], [], []
    for outputs in (list(range(6)), wanted):
        cache = [KVStorage(torch.zeros(2, 8, 2, 8), torch.zeros(2, 8, 2, 8)) for _ in range(3)]
        batch = Batch(
            torch.tensor(tokens_of(6)),
            torch.arange(6),
            torch.arange(6),
            torch.zeros(1, 1, dtype=torch.int32),
            [0, 6],
            [6],
            torch.tensor(outputs, dtype=torch.int64),
        )
        found.append(decoder.forward(batch, cache))
        caches.append(torch.stack([torch.stack([each.keys, each.values]) for each in cache]))
        for linear in (decoder.blocks[-1].qkv, decoder.blocks[-1].linears["down"], decoder.head):
            linear.watch = lambda x: seen.append(x.shape[0])
    torch.testing.assert_close(found[1], found[0][wanted], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(caches[1], caches[0], rtol=1e-5, atol=1e-6)
    assert seen == ([6, len(wanted), len(wanted)] if wanted else [6])


def test_dynamic_rope_beyond_the_trained_length_is_what_token_by_token_gives():
    model = transformers_model("llama dynamic", max_position_embeddings=16)
    tokens = tokens_of(24)
    with torch.no_grad():
        cache, rows = None, []
        for token in tokens:
            out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache, rows = out.past_key_values, [*rows, out.logits[0, 0]]
    decoder = load(model)
    assert decoder.config.context_length == 32
    for chunk in (1, 24):
        assert_same_logits(run_paged(decoder, [tokens], chunk)[0], torch.stack(rows))


def test_partial_rotary_is_a_rope_whose_last_waves_stand_still(monkeypatch):
    """transformers' Llama turns whole heads only: still waves, and dimensions paired the other way,
    say the same."""
    monkeypatch.setitem(
        FAMILIES, "llama", dataclasses.replace(FAMILIES["llama"], partial_rope=True)
    )
    model = transformers_model("llama", head_dim=16)
    weights = DictWeights.of(model)
    weights.config["rope_parameters"] = dict(
        rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5
    )
    rotary = model.model.rotary_emb
    rotary.inv_freq = torch.cat([10000.0 ** -(torch.arange(0, 8, 2) / 8), torch.zeros(4)])
    order = torch.tensor(
        [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]
    )  # dimension i of ours in a whole rope's head
    for name in list(weights.tensors):
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weights.tensors[name] = (
                weights.tensors[name].unflatten(0, (-1, 16))[:, order].flatten(0, 1)
            )
    decoder, tokens = Decoder.load(weights, device="cpu", dtype=torch.float32), tokens_of(20)
    assert decoder.config.rope.rotary_dim == 8
    assert_same_logits(run_paged(decoder, [tokens], 6)[0], reference_logits(model, tokens))


def test_blocks_load_alone_and_run_whole_sequences():
    model = transformers_model("qwen3")
    weights, whole = DictWeights.of(model), load(model)
    config = ModelConfig.from_dict(weights.config)
    ends = Decoder.load(weights, device="cpu", dtype=torch.float32, layers=())
    hidden = ends.embedding(torch.tensor([tokens_of(9), tokens_of(9, seed=1)]))
    with torch.inference_mode():
        for index in range(config.layers):
            block = Block.load(weights, config, index, device="cpu", dtype=torch.float32)
            hidden = block.forward(hidden, ends.whole(9))
        logits = ends.logits(hidden)
    assert_same_logits(
        logits, whole.forward_whole(torch.tensor([tokens_of(9), tokens_of(9, seed=1)]))
    )


def test_no_tokens_have_no_logits_and_cost_no_head(monkeypatch):
    decoder = load(transformers_model("qwen3"))
    monkeypatch.setattr(decoder, "head", None)  # kernels cannot be launched for no rows
    assert decoder.logits(torch.empty(0, decoder.config.hidden_size)).shape == (0, 97)


def test_watching_a_block_shows_the_input_of_every_linear():
    model = transformers_model("llama odd heads")
    decoder, expected, seen = load(model), {}, {}
    layer = model.model.layers[1]
    for name in LINEARS:
        layer.get_submodule(name).register_forward_pre_hook(
            lambda _, inputs, name=name: expected.update({name: inputs[0]})
        )
    tokens = torch.tensor([tokens_of(8)])
    with torch.no_grad():
        model(tokens)
    decoder.blocks[1].watch(lambda group, x: seen.update(dict.fromkeys(group.linears, x)))
    decoder.forward_whole(tokens)
    assert (
        set(seen)
        == set(LINEARS)
        == {name for name, part in layer.named_modules() if isinstance(part, torch.nn.Linear)}
    )
    for name in LINEARS:
        torch.testing.assert_close(seen[name], expected[name], rtol=1e-4, atol=1e-5)
    seen.clear()
    decoder.blocks[1].watch(None)
    decoder.forward_whole(tokens)
    assert not seen


def test_groups_name_the_source_of_each_input():
    """Scaling a source's output channels down and its linears' input channels up leaves the
    function as it was."""
    model = transformers_model("llama", num_key_value_heads=6)
    tokens, state = tokens_of(12), model.state_dict()
    expected = reference_logits(model, tokens).clone()
    for index in range(3):
        for group in plan_of(ModelConfig.from_dict(model.config.to_dict())).layers[index].groups:
            source = state[f"model.layers.{index}.{group.source}.weight"]
            factors = (
                torch.rand(source.shape[0], generator=torch.Generator().manual_seed(index)) + 0.5
            )
            source.div_(factors if source.ndim == 1 else factors[:, None])
            for name in group.linears:
                state[f"model.layers.{index}.{name}.weight"].mul_(factors)
    assert_same_logits(run_paged(load(model), [tokens], 12)[0], expected)


# -- strict loading --------------------------------------------------------------------------------


def weights_of(name, **changes):
    return DictWeights.of(transformers_model(name, **changes))


def failing_load(weights, match):
    with pytest.raises(CheckpointError, match=match):
        Decoder.load(weights, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.2.self_attn.q_proj.bias",
        "model.norm.weight",
        "model.layers.0.self_attn.k_norm.weight",
        "model.embed_tokens.weight",
    ],
)
def test_a_missing_tensor_is_named(name):
    weights = weights_of("qwen3 tied, biases")
    del weights.tensors[name]
    failing_load(weights, name.removesuffix(".weight"))


def test_an_extra_tensor_is_an_error():
    weights = weights_of("llama")
    weights.tensors["model.layers.3.input_layernorm.weight"] = torch.ones(48)
    failing_load(weights, r"model\.layers\.3\.input_layernorm")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.input_layernorm.weight",
        "lm_head.weight",
        "model.embed_tokens.weight",
    ],
)
def test_a_misshapen_tensor_is_named_with_both_shapes(name):
    weights = weights_of("llama")
    weights.tensors[name] = weights.tensors[name][:-1]
    failing_load(weights, rf"{name.removesuffix('.weight')}.*does not fit")


def test_a_tied_head_may_be_stored_twice_but_not_differ():
    weights = weights_of("llama tied, biases")
    weights.tensors["lm_head.weight"] = weights.tensors["model.embed_tokens.weight"].clone()
    Decoder.load(weights, device="cpu", dtype=torch.float32)
    weights.tensors["lm_head.weight"][5, 5] += 1
    failing_load(weights, "lm_head.weight differs")


def test_a_bias_that_the_config_does_not_promise_is_used():
    """GPTQ tools write o_proj.bias into models that have none."""
    weights, tokens = weights_of("llama"), torch.tensor([tokens_of(6)])

    def logits():
        return Decoder.load(weights, device="cpu", dtype=torch.float32).forward_whole(tokens)

    plain = logits()
    weights.tensors["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(48)
    assert torch.equal(logits(), plain)
    weights.tensors["model.layers.0.self_attn.o_proj.bias"] = torch.ones(48)
    assert not torch.allclose(logits(), plain)


def test_half_precision_stays_near_single():
    model = transformers_model("qwen3")
    tokens = torch.tensor([tokens_of(16)])
    half = Decoder.load(DictWeights.of(model), device="cpu", dtype=torch.bfloat16).forward_whole(
        tokens
    )
    full = load(model).forward_whole(tokens)
    assert half.dtype == torch.float32 and (half - full).norm() / full.norm() < 0.03


def test_kernels_of_every_linear_are_known():
    decoder = load(transformers_model("llama"))
    for block in decoder.blocks:
        assert [linear.sizes for linear in block.linears.values()] == [
            (48, 16, 16),
            (48,),
            (80, 80),
            (48,),
        ]
        assert all(
            segment.kernel and segment.why
            for linear in block.linears.values()
            for segment in linear.segments
        )
    assert decoder.head.nbytes == Plain(decoder.embedding.weight).nbytes
