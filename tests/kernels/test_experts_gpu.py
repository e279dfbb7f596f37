"""Routing and the grouped linears of experts against float64, with loads from even to all tokens on
a few experts.

torch fills what it hands out uninitialized with NaN here, so an output that nobody writes is found.
"""

import dataclasses

import pytest
import torch
from gpu_linears import linear_of, make, relative_error

from flyweight import gpu
from flyweight.kernels import workspace
from flyweight.kernels.linear.experts import few
from flyweight.kernels.linear.experts.grouped import GroupedExperts
from flyweight.kernels.linear.experts.router import DeviceRouter
from flyweight.kernels.linear.experts.routing import Routing
from flyweight.kernels.linear.experts.stacked import stack, unsupported_reason
from flyweight.kernels.linear.experts.words import empty_words
from flyweight.kernels.linear.fused import Norm

pytestmark = pytest.mark.gpu
HIDDEN, WIDTH, EPSILON = 320, 192, 1e-6
KINDS = ["plain", "w8a8", "int4:64", "int4:32", "int8:64", "int8:channel", "mxfp4"]
# Two linears in turn: the reference rounds the norm to 16 bits first, the kernels do not; W8A8
# makes more of it, twice.
BOUND = {"plain": 3e-2, "w8a8": 8e-2}


@pytest.fixture(autouse=True)
def poisoned_memory():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def make_layer(kind, *, count=12, chosen=3, gate=True, normalize=False, dtype=torch.bfloat16):
    """(the layer, its weights one by one)"""
    tensors = [
        (make(kind, (2 * WIDTH, HIDDEN), 2 * i, dtype), make(kind, (HIDDEN, WIDTH), 2 * i, dtype))
        for i in range(count)
    ]
    gate_up = [linear_of(first, dtype=dtype, activation="silu") for first, _ in tensors]
    down = [linear_of(second, dtype=dtype) for _, second in tensors]
    reason = unsupported_reason(gate_up, gpu.of(0))
    if reason is not None and not gpu.of(0).has_warpgroups:
        pytest.skip(reason)
    assert reason is None
    ready = torch.zeros(1, dtype=torch.int32, device="cuda")
    router = torch.randn(count + gate, HIDDEN, device="cuda") * HIDDEN**-0.5
    routing = Routing(count, chosen, normalize)
    return GroupedExperts(
        stack(gate_up), stack(down), DeviceRouter(router, ready, routing)
    ), tensors


def make_input(tokens, load, dtype=torch.bfloat16):
    """Tokens that go anywhere, or all to the same experts: those whose router likes the first input
    best.
    """
    x = torch.randn(tokens, HIDDEN, device="cuda")
    if load == "one":
        x[:, 0] = 100
    return x.to(dtype), (1 + 0.1 * torch.randn(HIDDEN, device="cuda")).to(dtype)


def make_signs(tokens, load, dtype=torch.bfloat16):
    """Inputs of ±1: their norm is exact, so that no rounding decides between experts. Any, or all
    tokens nearly alike.
    """
    signs = (
        torch.randn(1 if load == "one" else tokens, HIDDEN, device="cuda")
        .sign()
        .expand(tokens, -1)
        .clone()
    )
    signs[:, :8] = torch.randn(tokens, 8, device="cuda").sign()
    return signs.to(dtype), (1 + 0.1 * torch.randn(HIDDEN, device="cuda")).to(dtype)


def experts_of(route):
    """[tokens, chosen]"""
    return route.expert_of[route.place.long() // route.tile].long()


def norm_of(x, norm):
    scaled = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPSILON)).to(
        x.dtype
    )
    return (scaled.float() * norm.float()).to(x.dtype)


def expected_route(layer, normed):
    logits = normed.double() @ layer.router.weight.double().T
    shares, chosen = (
        logits[:, : layer.router.routing.experts].softmax(-1).topk(layer.router.routing.chosen)
    )
    if layer.router.routing.normalize:
        shares = shares / shares.sum(-1, keepdim=True)
    return shares, chosen, logits[:, -1].sigmoid()


@pytest.mark.parametrize("load", ["any", "one"])
@pytest.mark.parametrize(
    ("count", "chosen", "gate", "normalize"),
    [(12, 3, True, False), (60, 4, False, True), (128, 8, True, True), (512, 10, True, True)],
)
def test_every_token_has_a_place_with_each_of_its_experts(count, chosen, gate, normalize, load):
    layer, _ = make_layer("plain", count=count, chosen=chosen, gate=gate, normalize=normalize)
    for tokens in (1, 2, 3, 4, 8, 17, 100, 1000):
        x, norm = make_signs(tokens, load)
        route = layer.route(x, norm=Norm(norm, EPSILON))
        shares, wanted, gates = expected_route(layer, norm_of(x, norm))
        tiles, place = int(route.tiles), route.place.long()
        assert 0 < tiles <= len(route.expert_of) and int(place.max()) < tiles * route.tile
        assert torch.equal(experts_of(route), wanted)
        assert (route.shares - shares).abs().max() < 1e-5
        assert len(place.unique()) == place.numel()
        token = torch.arange(tokens, device="cuda")[:, None].expand_as(place)
        if route.source is None:
            assert torch.equal(place % route.tile, token)
        else:
            assert torch.equal(route.source[place].long(), token)
            assert int((route.source[: tiles * route.tile] >= 0).sum()) == place.numel()
        if gate:
            assert (route.gates - gates).abs().max() < 1e-5
        assert not workspace.current(x.device).bytes("route tickets", 4 * -(-tokens // 8) + 4).any()


def test_of_equal_experts_the_first_is_chosen():
    layer, _ = make_layer("plain", count=60, chosen=5, gate=False)
    layer.router.weight[1::2] = layer.router.weight[::2]
    for tokens in (4, 100):
        x, norm = make_signs(tokens, "any")
        chosen = experts_of(layer.route(x, norm=Norm(norm, EPSILON)))
        assert (chosen[:, ::2] % 2 == 0).all() and torch.equal(chosen[:, 1::2], chosen[:, :4:2] + 1)


def test_rows_that_nobody_uses_need_no_expert():
    layer, _ = make_layer("plain", count=60, chosen=4)
    for tokens, used in ((8, 3), (32, 17), (4, 0)):
        x, norm = make_signs(tokens, "any")
        lengths = (torch.arange(tokens, device="cuda") < used).int()
        out = torch.full_like(x, float("nan"))
        route = layer.route(x, norm=Norm(norm, EPSILON), lengths=lengths)
        # the first row is there in any case
        wanted = expected_route(layer, norm_of(x, norm))[1][: max(used, 1)]
        assert set(route.expert_of[: int(route.tiles)].tolist()) == set(wanted.flatten().tolist())
        layer.combine(layer.multiply(x, route, norm=Norm(norm, EPSILON)), route, x, out, shared=x)
        assert torch.equal(out[max(used, 1) :], x[max(used, 1) :]) and out.isfinite().all()


@pytest.mark.parametrize("load", ["any", "one"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_adds_up_its_experts_by_their_shares(kind, load):
    (layer, tensors), bound = make_layer(kind), BOUND.get(kind, BOUND["plain"])
    for tokens in (1, 2, 4, 8, 9, 40, 333):
        x, norm = make_input(tokens, load)
        shared, out = torch.randn_like(x), torch.full_like(x, float("nan"))
        route = layer.route(x, norm=Norm(norm, EPSILON))
        y = layer.multiply(x, route, norm=Norm(norm, EPSILON))
        layer.combine(y, route, x, out, shared=shared)
        normed, chosen, shares = norm_of(x, norm), experts_of(route), route.shares.double()
        want = route.gates.double()[:, None] * shared.double()
        for expert, (first, second) in enumerate(tensors):
            token, choice = (chosen == expert).nonzero().T
            if not len(token):
                continue
            gate, up = first.matmul_reference(normed[token]).chunk(2, -1)
            product = second.matmul_reference((torch.nn.functional.silu(gate) * up).to(x.dtype))
            got = y[route.place[token, choice].long()]
            assert relative_error(got, product) < bound, f"{tokens} tokens, expert {expert}"
            want[token] += shares[token, choice, None] * product
        assert relative_error(out.double() - x.double(), want) < bound, f"{tokens} tokens"


@pytest.mark.parametrize("kind", ["plain", "int4:64", "w8a8"])
def test_a_captured_layer_follows_its_input_and_repeats_its_bits(kind):
    layer, _ = make_layer(kind, dtype=torch.float16)
    for tokens in (2, 24):
        x, norm = make_input(tokens, "any", torch.float16)
        out = torch.empty_like(x)

        def run(x=x, norm=norm, out=out):
            route = layer.route(x, norm=Norm(norm, EPSILON))
            layer.combine(
                layer.multiply(x, route, norm=Norm(norm, EPSILON)), route, x, out, shared=x
            )

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for _ in range(20):  # other experts every time
            x.copy_(torch.randn_like(x))
            graph.replay()
            replayed = out.clone()
            run()
            assert torch.equal(out, replayed)


@pytest.mark.hopper
def test_the_choices_of_one_token_are_added_up_at_once(monkeypatch):
    """Two layers by turns, as layers may not follow themselves; a shared expert, and more experts
    than one warp chooses from.
    """
    count, chosen, hidden, width = 300, 10, 2048, 512
    tensors = [
        (make("int4:128", (2 * width, hidden), i), make("int4:128", (hidden, width), i))
        for i in range(4)
    ]

    def layer():
        first = [linear_of(tensors[i % 4][0], activation="silu") for i in range(count + 1)]
        second = [linear_of(tensors[i % 4][1]) for i in range(count + 1)]
        router = torch.randn(count + 1, hidden, device="cuda") * hidden**-0.5
        ready = torch.zeros(1, dtype=torch.int32, device="cuda")
        stacked = stack(first), stack(second)
        shared = first[-1], second[-1]
        words = empty_words(len(router), chosen + 1, router.device)
        chooser = DeviceRouter(router, ready, Routing(count, chosen, normalize=True), joined=1)
        return GroupedExperts(*stacked, chooser, shared, words)

    layers = [layer(), layer()]
    assert few.sum_plan(layers[0].down.matrix, chosen + 1, gpu.of(0)) is not None
    norm = Norm((1 + 0.1 * torch.randn(hidden, device="cuda")).bfloat16(), EPSILON)
    x = torch.randn(1, hidden, device="cuda").bfloat16()

    def run(layers, out):
        out.copy_(x)
        for one in layers:
            one.project(out, out, norm=norm)

    with monkeypatch.context() as patch:
        patch.setattr(few, "sum_plan", lambda *_: None)
        want = torch.empty_like(x)
        run(layers, want)
    out, firsts = torch.empty_like(x), []
    for way in (layers, [dataclasses.replace(one, words=None) for one in layers]):
        run(way, out)
        first = out.clone()
        assert (
            relative_error(first, want.double()) < 8e-3
            and relative_error(first - x, (want - x).double()) < 0.1
        )
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(way, out)
        for _ in range(200):
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, first)
        firsts.append(first)
    assert torch.equal(*firsts), "whoever chooses"
    assert all(
        int(one.router.ready) == 0 and (one.words.view(torch.int32) == -1).all() for one in layers
    )


def test_choices_by_words_follow_their_input():
    """Other experts at every replay: each finds the words of its own token."""
    count, chosen, hidden, width = 512, 10, 2048, 512
    tensors = [
        (make("int4:128", (2 * width, hidden), i), make("int4:128", (hidden, width), i))
        for i in range(8)
    ]
    first = [linear_of(tensors[i % 8][0], activation="silu") for i in range(count)]
    second = [linear_of(tensors[i % 8][1]) for i in range(count)]
    stacked = stack(first), stack(second)
    layers = []
    for _ in range(3):
        router = torch.randn(count, hidden, device="cuda") * hidden**-0.5
        ready = torch.zeros(1, dtype=torch.int32, device="cuda")
        words = empty_words(count, chosen, router.device)
        chooser = DeviceRouter(router, ready, Routing(count, chosen, normalize=True))
        layers.append(GroupedExperts(*stacked, chooser, words=words))
    norm = Norm((1 + 0.1 * torch.randn(hidden, device="cuda")).bfloat16(), EPSILON)
    x, out = torch.randn(2, 1, hidden, device="cuda").bfloat16()

    def run():
        out.copy_(x)
        for one in layers:
            one.project(out, out, norm=norm)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    by_words, layers = layers, [dataclasses.replace(one, words=None) for one in layers]
    for _ in range(100):
        x.copy_(torch.randn_like(x))
        graph.replay()
        replayed = out.clone()
        run()
        assert torch.equal(out, replayed)
    assert all((one.words.view(torch.int32) == -1).all() for one in by_words)
