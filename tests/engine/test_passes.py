"""Padded passes: which size a step runs as, that padding changes no logits, and that a pass reads
nothing but its fixed places.

Without a GPU a captured pass is played: its replay runs the ops of CUDA devices, interpreted, over
the very tensors that were there at its capture. Whatever it reads that a later step does not write
there again gives other logits.
"""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from padded_story import Story, request_of

from flyweight.engine import passes
from flyweight.engine.packed import PART_SIZES, SIZES, padded_tokens
from flyweight.engine.work import Work
from flyweight.gpu import GPUS
from flyweight.kernels import dispatch
from flyweight.kernels.linear import gemm
from flyweight.kernels.linear.format import FORMATS
from flyweight.kernels.linear.gemm_shape import LEAST_TOKENS, Product, shape_for
from flyweight.kernels.linear.tiles import Matrix
from flyweight.models import decoder as decoders
from flyweight.models import layer as layers
from flyweight.models.decoder import Decoder
from flyweight.models.presets import PRESETS, PresetWeights

TINY = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
)
CONFIG = PRESETS["qwen3-0.6b"] | TINY | dict(head_dim=16)
WINDOWED = (
    PRESETS["qwen2-0.5b"]
    | TINY
    | dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)
)
counts = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 2500)), min_size=1, max_size=40)


def load(config, dtype):
    return Decoder.load(PresetWeights(config, "fp32"), device="cpu", dtype=dtype)


def works_of(spans):
    return [
        Work(request_of([0], i), start, count, samples=True)
        for i, (start, count) in enumerate(spans)
    ]


@given(counts)
def test_a_step_runs_as_the_next_size_or_is_not_captured(spans):
    total, size = sum(count for _, count in spans), padded_tokens(works_of(spans))
    assert (size is None) == (total > SIZES[-1])
    if size is not None:
        answers = any(count == 1 for _, count in spans)
        sizes = (
            SIZES
            if answers or total > PART_SIZES[-1] or (len(spans) == 1 and not spans[0][0])
            else PART_SIZES
        )
        assert size == min(each for each in sizes if each >= total)


@given(st.integers(LEAST_TOKENS + 1, SIZES[-1]))  # the least pass is twice the least tile
def test_padding_gives_the_matrix_kernels_nothing_more_to_do(count):
    size = padded_tokens(works_of([(0, count)]))
    assert gemm.padded_rows(size) == gemm.padded_rows(count)
    matrix = Matrix(FORMATS["w8a8"], 4096, 4096, 64)
    shape = shape_for(Product(matrix, gemm.padded_rows(count)), GPUS["sm_90a"])
    assert -(-size // shape.tokens) == -(-count // shape.tokens)


STEPS = [  # prompts alone, prompts together, chunks beside answers, answers alone
    [(0, 13)],
    [(1, 9)],
    [(2, 16)],
    [(0, 1), (5, 6), (1, 2), (2, 1)],
    [(1, 1), (6, 5), (0, 3), (2, 1)],
    [(0, 1), (3, 4), (1, 1), (2, 1)],
    [(7, 25)],
]


@pytest.mark.parametrize("config", [CONFIG, WINDOWED])
def test_padding_changes_no_logits_and_writes_to_no_block_of_a_sequence(config):
    story = Story(load(config, torch.float32), tolerance=1e-4)
    for spans in [*STEPS, [(3, 5), (4, 7)], [(7, 4), (0, 1)], [(4, 16)], [(6, 2), (3, 2)]]:
        story.step(*spans)


LATENT = (
    PRESETS["deepseek-v2-lite"]
    | TINY
    | dict(
        num_key_value_heads=2,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        eos_token_id=1,
    )
)


@torch.inference_mode()
def test_prompts_of_latent_attention_are_captured_where_they_are_alone(monkeypatch):
    """Their rows are in hand: nothing is read of the cache, and nothing cut up on the host."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(
        passes.PassGraphs, "_capture", lambda self, batch, plans: Played(self, batch, plans)
    )
    monkeypatch.setattr(Played, "made", 0)
    story = Story(load(LATENT, torch.float32), tolerance=1e-4)
    assert passes.alone_reason(story.decoder) and not passes.alone_reason(
        load(CONFIG, torch.float32)
    )
    graphs = passes.PassGraphs(story.decoder, story.padded, story.rows, alone=True)
    graphs.warm_up_parts()
    assert not graphs.held and graphs.padded_tokens(works_of([(3, 9)])) is None
    story.forward = graphs.forward
    for spans in ([(0, 13)], [(1, 16)], [(2, 9)]):
        assert graphs.padded_tokens(works_of([(0, count) for _, count in spans])) == 16
        graphs.inputs.fill_(0x7F)
        story.step(*spans, into=graphs.inputs)
    assert Played.made == len(graphs.held) == 1


class Played:
    """A captured pass without a GPU: only the tensors that were there at its capture."""

    made = 0

    def __init__(self, graphs, batch, plans):
        plans = {window: copy.copy(plan) for window, plan in plans.items()}
        states = graphs.states[: len(batch.tokens)]
        self.replay = lambda: states.copy_(graphs.decoder.hidden(batch, graphs.caches, plans))
        Played.made += 1


@pytest.fixture
def played(monkeypatch, request):
    """Captures are played, and decoders that are loaded once this is called get the ops of CUDA
    devices.
    """
    attention = pytest.importorskip(
        "flyweight.kernels.attention.plan", reason="triton is not installed"
    )
    request.getfixturevalue("interpreted_loops")
    from flyweight.kernels import cuda_ops

    # so that whole prompts of both ways are among the small steps here
    monkeypatch.setattr(attention, "FRESH_FROM", 10)
    monkeypatch.setattr(attention, "SHORTEST_PART", 8)
    monkeypatch.setattr(attention, "_processors", lambda device: 16)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(
        passes.PassGraphs, "_capture", lambda self, batch, plans: Played(self, batch, plans)
    )
    monkeypatch.setattr(Played, "made", 0)

    def play():
        for module in (decoders, layers, dispatch):
            monkeypatch.setattr(module, "decoder_ops", lambda device: cuda_ops)

    return play


interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton compiles here: CPU tensors are for the interpreter"
)


@interpreted
# an empty tile divides 0 by 0, and writes nothing
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "config, dtype",
    [(CONFIG | dict(num_hidden_layers=1), torch.float16), (WINDOWED, torch.float32)],
)
def test_a_captured_pass_serves_every_step_of_its_kind(config, dtype, played, monkeypatch):
    story = Story(load(config, dtype), tolerance=1e-4 if dtype == torch.float32 else 3e-2)
    played()
    graphs = passes.PassGraphs(load(config, dtype), story.padded, story.rows)
    story.forward = graphs.forward
    for spans in STEPS:
        graphs.inputs.fill_(0x7F)  # what a step leaves unwritten is no index of anything
        story.step(*spans, into=graphs.inputs)
    kinds = len(graphs.held)
    assert 2 <= Played.made < kinds < len(STEPS), "some passes came again, and some only once"


@interpreted
def test_warmed_up_passes_take_the_first_prompts(played, monkeypatch):
    monkeypatch.setattr(passes, "SIZES", (16, 32))
    config = CONFIG | dict(num_hidden_layers=1)
    story = Story(load(config, torch.float16), tolerance=3e-2)
    played()
    graphs = passes.PassGraphs(load(config, torch.float16), story.padded, story.rows)
    graphs.warm_up()
    assert Played.made == 2 and not story.padded[0].keys[: story.blocks].any(), (
        "no sequence's block was written to"
    )
    story.forward = graphs.forward
    for spans in ([(0, 13)], [(1, 25)]):
        story.step(*spans, into=graphs.inputs)
    assert Played.made == len(graphs.held) == 2


@pytest.fixture
def large_graphs(monkeypatch):
    """Passes of a model with the heads of Qwen3-8B, of which nothing is computed."""
    attention = pytest.importorskip(
        "flyweight.kernels.attention.plan", reason="triton is not installed"
    )
    monkeypatch.setattr(attention, "_processors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(passes.PassGraphs, "_capture", lambda self, batch, plans: "captured")
    config = SimpleNamespace(heads=32, hidden_size=8, windows=[None])
    decoder = SimpleNamespace(
        config=config,
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        taps=None,
        active=contextlib.nullcontext,
        hidden=lambda *_: None,
    )
    cache = SimpleNamespace(keys=torch.empty(4, 16, 8, 128), dtype=torch.bfloat16, block_size=16)
    return passes.PassGraphs(
        decoder, [cache], SimpleNamespace(capacity=8, pages=1024, adapters=None)
    )


@torch.inference_mode()
def test_parts_of_prompts_are_of_kinds_that_were_captured_before_the_first_request(large_graphs):
    large_graphs.warm_up_parts()
    kinds = len(large_graphs.held)
    assert kinds <= 12 and all(one.graph for one in large_graphs.held.values())
    for ends in ([], [(3, 4000)], [(40, 600)], [(200, 8000), (7, 0)], [(2, 60), (9, 1500)]):
        for total in (*range(217, 512, 13), 512):
            begun = total - sum(new for new, _ in ends)
            parts = [
                (length, cached)
                for length, cached in (*ends, (begun, 16 if not ends else 0))
                if length
            ]
            size = padded_tokens(works_of([(cached, new) for new, cached in parts]))
            parts += [(size - total, 0)] if size > total else []
            starts = [sum(new for new, _ in parts[:i]) for i in range(len(parts) + 1)]
            large_graphs._find(
                SimpleNamespace(
                    begins_alone=False,
                    tokens=torch.zeros(size),
                    kv_lengths=[new + cached for new, cached in parts],
                    query_starts=starts,
                    block_tables=torch.zeros(len(parts), 1024),
                )
            )
    assert len(large_graphs.held) == kinds, "none had to be launched one by one"


def test_longer_passes_are_compiled_by_one_layer_and_touch_nobodys_pages(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    ran, run = [], layers.Block.run

    def noted(block, hidden, *args, **options):
        ran.append((block.index, len(hidden)))
        return run(block, hidden, *args, **options)

    monkeypatch.setattr(layers.Block, "run", noted)
    story = Story(load(CONFIG, torch.float16), tolerance=1)
    before = [cache.keys[:-1].clone() for cache in story.padded]
    passes.PassGraphs(story.decoder, story.padded, story.rows).warm_up_long(1700)
    assert ran == [(0, 1280), (0, 1536)], "what is up to 1,024 is captured, and longer is no pass"
    assert all(
        torch.equal(cache.keys[:-1], keys) for cache, keys in zip(story.padded, before, strict=True)
    )


def test_a_server_captures_mixed_steps_when_nobody_waits(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    made = []
    monkeypatch.setattr(
        passes.PassGraphs, "_capture", lambda self, batch, plans: made.append(len(batch.tokens))
    )
    monkeypatch.setattr(passes.PassGraphs, "_plans", lambda self, batch: {})
    story = Story(load(CONFIG, torch.float16), tolerance=1)
    graphs = passes.PassGraphs(story.decoder, story.padded, story.rows)
    graphs.patient = True
    monkeypatch.setattr(
        graphs.decoder, "hidden", lambda batch, *_: torch.zeros(len(batch.tokens), 32)
    )

    def run(size):
        graphs.hidden(
            SimpleNamespace(begins_alone=False, tokens=torch.zeros(size), kv_lengths=[size - 1, 1])
        )

    run(16)
    assert not graphs.rest(), "it came once"
    run(16)
    assert made == [] and graphs.rest() and made == [16] and not graphs.rest()
    for _ in range(passes.INSISTENT):
        assert made == [16]
        run(32)
    assert made == [16, 32], "it kept coming"


def test_the_pass_that_was_not_used_for_longest_gives_way(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(passes.PassGraphs, "_capture", lambda self, batch, plans: None)
    monkeypatch.setattr(passes, "MOST", 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    story = Story(load(CONFIG, torch.float16), tolerance=1)
    graphs = passes.PassGraphs(story.decoder, story.padded, story.rows)
    monkeypatch.setattr(
        graphs.decoder, "hidden", lambda batch, *_: torch.zeros(len(batch.tokens), 32)
    )
    for size in (16, 32, 16, 64):
        graphs.hidden(
            SimpleNamespace(begins_alone=True, tokens=torch.zeros(size), kv_lengths=[size])
        )
    assert list(graphs.held) == [(16,), (64,)]
