"""The op of a layer of experts on a GPU: right for every number of tokens, captured, and cut for
two ranks.
"""

import pytest
import torch
from expert_layers import choose, cut, error, expected, make

from flyweight.kernels.linear.experts.chosen import ChosenExperts
from flyweight.plugins import ahead, experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
COUNT, CHOSEN, HIDDEN, WIDTH = 12, 3, 512, 256
DTYPE = torch.bfloat16
FEW_AND_MANY = (2, 64)
GROUPED = ("int4", "int3", "w8a8", "2:4 int4", "2:4 w8a8")
ALL = (*GROUPED, "vptq", "mixed")
# activations in 8 bits: a rank rounds its own inputs, so that sums differ from those of the whole
BOUND = {"w8a8": 8e-2, "2:4 w8a8": 8e-2}


@pytest.fixture(autouse=True)
def compiled_when_used(monkeypatch):
    """Few tokens are asked for here: not the kernels of all that an engine might."""
    monkeypatch.setenv(ahead.SETTING, "off")


def hold(members):
    layer = experts.prepare(members, activation="silu", chosen=CHOSEN, dtype=DTYPE)
    return layer, experts.hold(layer, torch.device("cuda", 0))


def make_input(tokens):
    x = torch.randn(tokens, HIDDEN, dtype=DTYPE, device="cuda")
    return x, *choose(tokens, COUNT, CHOSEN, "cuda")


@pytest.mark.parametrize("kind", ALL)
def test_two_ranks_add_up_to_the_whole(kind):
    members = make(kind, COUNT, HIDDEN, WIDTH, device="cuda", dtype=DTYPE)
    layer, whole = hold(members)
    assert isinstance(layer, ChosenExperts) == (kind in GROUPED)
    assert kind != "vptq" or len(layer.stacked) == 2
    ranks = [hold(cut(members, rank, 2))[1] for rank in range(2)]
    bound = BOUND.get(kind, 2e-2)
    for tokens in FEW_AND_MANY:
        x, shares, ids = make_input(tokens)
        wanted = expected(members, x, shares, ids)
        found = experts.experts(x, whole, shares, ids)
        assert found.isfinite().all() and error(found, wanted) < bound, tokens
        added = sum(experts.experts(x, key, shares, ids).double() for key in ranks)
        assert error(added, wanted) < bound, tokens


@pytest.mark.parametrize("kind", ["int4", "vptq"])
def test_every_number_of_tokens(kind):
    """On both sides of what is captured: more are counted on the host, where experts run alone."""
    members = make(kind, COUNT, HIDDEN, WIDTH, device="cuda", dtype=DTYPE)
    _, key = hold(members)
    for tokens in (1, 4, 5, 8, 300, 700):
        x, shares, ids = make_input(tokens)
        found = experts.experts(x, key, shares, ids)
        assert error(found, expected(members, x, shares, ids)) < 2e-2, tokens


@pytest.mark.parametrize("kind", ["int4", "vptq"])
def test_experts_of_another_rank_count_nothing(kind):
    members = make(kind, COUNT, HIDDEN, WIDTH, device="cuda", dtype=DTYPE)
    _, key = hold(members)
    for tokens in FEW_AND_MANY:
        x, shares, ids = make_input(tokens)
        elsewhere = torch.where(ids % 2 == 0, -1, ids)
        found = experts.experts(x, key, shares, elsewhere)
        assert error(found, expected(members, x, shares, elsewhere)) < 2e-2 or not found.any()
        assert not experts.experts(x, key, shares, torch.full_like(ids, -1)).any()


@pytest.mark.parametrize("kind", ["int4", "2:4 int4", "vptq", "mixed"])
def test_a_captured_layer_follows_its_input_and_its_experts(kind):
    """As vLLM does it: each size runs once, is captured, and replayed with other choices."""
    members = make(kind, COUNT, HIDDEN, WIDTH, device="cuda", dtype=DTYPE)
    _, key = hold(members)
    for tokens in FEW_AND_MANY:
        x, shares, ids = make_input(tokens)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            experts.experts(x, key, shares, ids)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = experts.experts(x, key, shares, ids) * 2
        for _ in range(3):
            for kept, new in zip((x, shares, ids), make_input(tokens), strict=True):
                kept.copy_(new)
            graph.replay()
            assert error(y, 2 * expected(members, x, shares, ids)) < 2e-2, tokens


def test_a_layer_may_follow_itself():
    """Nothing of a call may be left over when the next one begins."""
    members = make("int4", COUNT, HIDDEN, WIDTH, device="cuda", dtype=DTYPE)
    _, key = hold(members)
    x, shares, ids = make_input(2)
    first = experts.experts(x, key, shares, ids)
    for _ in range(50):
        assert torch.equal(experts.experts(x, key, shares, ids), first)
