"""The op on a GPU: right for every number of rows, captured, and cut for two ranks."""

import pytest
import torch
from vllm_parameters import LAYOUTS

from flyweight.kernels import workspace
from flyweight.kernels.linear.repeated import NOT_REPEATED
from flyweight.plugins import ahead, layouts, op
from flyweight.plugins.shards import inputs_of, outputs_of
from flyweight.tensors import Float8, Int8Channel, IntGroup, Sparse24, VectorQuant

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE = (1536, 1024)
ROWS = (1, 2, 3, 8, 17, 64, 300, 4096, 16384)
WEIGHTS = {
    "int4": lambda: IntGroup.random(SHAPE, 0, "cuda", dtype=torch.float16),
    "int8": lambda: IntGroup.random(SHAPE, 0, "cuda", bits=8, group_size=-1, symmetric=True),
    "w8a8": lambda: Int8Channel.random(SHAPE, 0, "cuda"),
    "fp8": lambda: Float8.random(SHAPE, 0, "cuda"),
    "2:4 int4": lambda: Sparse24.random(SHAPE, 0, "cuda", inner=IntGroup, group_size=128),
    "2:4 w8a8": lambda: Sparse24.random(SHAPE, 0, "cuda"),
    "vptq": lambda: VectorQuant.random(SHAPE, 0, "cuda", main=4096, residual=None),
}
# activations in 8 bits: a rank rounds its own inputs, so that sums differ from those of the whole
ROUNDED = {"w8a8": 2e-2, "2:4 w8a8": 2e-2, "fp8": 6e-2}


@pytest.fixture(autouse=True)
def compiled_when_used(monkeypatch):
    """Few rows are asked for here: not the kernels of all that an engine might."""
    monkeypatch.setenv(ahead.SETTING, "off")


def hold(tensor, dtype=torch.float16):
    return op.hold(op.prepare([tensor], dtype=dtype), tensor.device)


def error(found, expected):
    """Relative, by the size of all results."""
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_layer_as_vllm_has_loaded_it(layout, dtype):
    weight = IntGroup.random(SHAPE, 0, "cuda", dtype=dtype)
    read = layouts.integers(*LAYOUTS[layout](weight), bits=4, group=128, inputs=SHAPE[1])
    key = hold(read, dtype)
    for rows in ROWS:
        x = torch.randn(rows, SHAPE[1], dtype=dtype, device="cuda")
        y = op.linear(x, key, SHAPE[0])
        assert y.dtype == dtype
        assert error(y, weight.matmul_reference(x)) < (2e-3 if dtype == torch.float16 else 1e-2)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_two_ranks_make_the_whole(kind):
    whole = WEIGHTS[kind]()
    outputs = [hold(outputs_of(whole, rank, 2, where="w")) for rank in range(2)]
    inputs = [hold(inputs_of(whole, rank, 2, where="w")) for rank in range(2)]
    half = SHAPE[1] // 2
    for rows in (1, 8, 64, 300):
        x = torch.randn(rows, SHAPE[1], dtype=torch.float16, device="cuda")
        expected = whole.matmul_reference(x)
        side_by_side = torch.cat([op.linear(x, key, SHAPE[0] // 2) for key in outputs], 1)
        assert error(side_by_side, expected) < 3e-3
        parts = [x[:, :half], x[:, half:]]
        added = sum(
            op.linear(part, key, SHAPE[0]).double() for part, key in zip(parts, inputs, strict=True)
        )
        assert error(added, expected) < ROUNDED.get(kind, 3e-3)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_captured_layer_follows_its_input(kind):
    """As vLLM does it: each size runs once, is captured, and replayed with other values."""
    whole = WEIGHTS[kind]()
    key = hold(whole)
    for rows in (1, 8, 64, 256):
        x = torch.randn(rows, SHAPE[1], dtype=torch.float16, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            op.linear(x, key, SHAPE[0])
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = op.linear(x, key, SHAPE[0]) * 2
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert error(y, 2 * whole.matmul_reference(x)) < 3e-3


@pytest.mark.parametrize("kind", ["int4", "int8", "w8a8", "fp8", "2:4 int4", "2:4 w8a8"])
def test_layers_of_a_shape_repeat_each_others_launches(kind):
    """Each size is noted by the first layer and repeated by the second, then captured."""
    make = WEIGHTS[kind]
    whole = [make(), make().map(lambda one: one.flip(0).contiguous())]
    keys = [hold(one) for one in whole]
    here = workspace.current(torch.device("cuda", torch.cuda.current_device()))
    here.products.clear()
    for rows in (1, 2, 8, 17, 64, 300, 1024, 4096):
        for _ in range(2):
            for tensor, key in zip(whole, keys, strict=True):
                x = torch.randn(rows, SHAPE[1], dtype=torch.float16, device="cuda")
                y = op.linear(x, key, SHAPE[0])
                assert error(y, tensor.matmul_reference(x)) < 3e-3, rows
    assert any(product is not NOT_REPEATED for product in here.products.values())


def test_a_bias_is_part_of_the_product():
    weight = WEIGHTS["int4"]()
    bias = torch.randn(SHAPE[0], dtype=torch.float16, device="cuda")
    held = op.prepare([weight], dtype=torch.float16, bias=bias)
    assert held.adds_bias
    key = op.hold(held, weight.device)
    for rows in (1, 64):
        x = torch.randn(rows, SHAPE[1], dtype=torch.float16, device="cuda")
        assert error(op.linear(x, key, SHAPE[0]), weight.matmul_reference(x) + bias) < 2e-3


def test_the_compiler_takes_it():
    keys = [hold(IntGroup.random(SHAPE, seed, "cuda", dtype=torch.float16)) for seed in range(2)]

    @torch.compile(fullgraph=True, dynamic=True)
    def layer(x, key):
        return torch.nn.functional.silu(op.linear(x, key, SHAPE[0]))

    for rows in (1, 16, 100):
        x = torch.randn(rows, SHAPE[1], dtype=torch.float16, device="cuda")
        for key in keys:
            expected = torch.nn.functional.silu(op.linear(x, key, SHAPE[0]))
            torch.testing.assert_close(layer(x, key), expected, rtol=1e-2, atol=1e-2)
