"""The solvers' fused kernels against the plain torch of the CPU."""

import pytest
import torch
from tiny_model import make_tiny_model

from flyweight.quant.gptq import GPTQ, gptq, walk
from flyweight.quant.grid import Integers
from flyweight.quant.kmeans import nearest
from flyweight.quant.quantize import quantize
from flyweight.quant.recipe import Recipe, find
from flyweight.quant.statistics import Statistics, layer_error
from flyweight.quant.vptq import VPTQ, Books, vptq

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def few_threads():
    """What runs on the CPU here is tiny: many threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(rows, columns):
    """A weight and correlated inputs, the same on every device."""
    inputs = random(4 * columns, columns, seed=1) @ (
        random(columns, columns, seed=2) / columns**0.5 + torch.eye(columns)
    )
    return random(rows, columns), inputs


def statistics_of(inputs, device):
    statistics = Statistics(inputs.shape[1], device)
    statistics.add(inputs.to(device))
    return statistics


@pytest.mark.parametrize("descent", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("columns", "outputs"), [(128, 96), (64, 33), (100, 70)])
def test_a_block_of_columns_is_walked_as_on_the_cpu(columns, outputs, masked, descent):
    matrix = random(columns, columns, seed=3) * 0.03
    matrix = matrix @ matrix.T + torch.eye(columns)
    scales, zeros = (
        random(columns, outputs, seed=4).abs() * 0.1 + 0.2,
        torch.full((columns, outputs), 8.0),
    )
    kept = random(columns, outputs, seed=5) > 0 if masked else None
    values = random(columns, outputs, seed=6) if descent else None
    tile = random(columns, outputs)
    on_cpu = walk(tile, matrix, scales, zeros, steps=15, kept=kept, values=values)
    moved = [None if t is None else t.cuda() for t in (tile, matrix, scales, zeros, kept, values)]
    on_gpu = walk(*moved[:4], steps=15, kept=moved[4], values=moved[5])
    same = (on_cpu[0] == on_gpu[0].cpu()).all(
        0
    )  # an output whose tie fell the other way differs from there on
    assert same.float().mean() > 0.95
    torch.testing.assert_close(on_gpu[1].cpu()[:, same], on_cpu[1][:, same], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("points", "length", "entries"),
    [(5000, 8, 4096), (70, 8, 65536), (300, 4, 700), (1000, 1, 16), (64, 16, 512)],
)
def test_the_nearest_centroids_are_those_of_float64(points, length, entries):
    x, book = random(points, length), random(entries, length, seed=1)
    index, distance = nearest(x.cuda(), book.cuda())
    exact = torch.cdist(x.double(), book.double()).square()
    chosen = exact.gather(1, index.cpu()[:, None])[:, 0]
    torch.testing.assert_close(chosen, exact.amin(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(distance.cpu().double(), exact.amin(1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("descent", [False, True])
@pytest.mark.parametrize(
    ("length", "entries", "residuals"),
    [(8, 65536, 256), (4, 2048, 2), (4, 256, 16), (4, 512, 0), (2, 256, 16)],
)
def test_a_block_of_vectors_is_walked_as_well_as_on_the_cpu(length, entries, residuals, descent):
    columns, count = 48, 70
    matrix = random(columns, columns, seed=3) * 0.05
    matrix = matrix @ matrix.T + torch.eye(columns)
    main, residual = (
        random(entries, length, seed=1),
        random(residuals, length, seed=2) * 0.3 if residuals else None,
    )
    tile, values = (
        random(columns, count * length),
        random(columns, count * length, seed=4) if descent else None,
    )
    norms, found = dict(scale=random(columns, seed=5).abs() + 0.5, bias=random(columns, seed=6)), {}
    for device in ("cpu", "cuda"):
        placed = [
            None if t is None else t.to(device) for t in (main, residual, tile, matrix, values)
        ]
        books, indices = (
            Books(*placed[:2], beam=4),
            torch.zeros(2, columns, count, dtype=torch.int64, device=device),
        )
        rounded, errors = books.walk(
            *placed[2:4],
            **{name: value.to(device) for name, value in norms.items()},
            first=indices[0],
            second=indices[1],
            values=placed[4],
        )
        decoded = books.decode(indices[0], indices[1] if residuals else None).flatten(1).cpu()
        expected = decoded * norms["scale"][:, None] + norms["bias"][:, None]
        torch.testing.assert_close(rounded.cpu(), expected, rtol=1e-4, atol=1e-5)
        found[device] = errors.cpu().square().mean()
    assert found["cuda"] < 1.02 * found["cpu"]


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (Integers(ranges="importance"), GPTQ()),
        (Integers(bits=8, group_size=-1), GPTQ(act_order=False)),
        (Integers(symmetric=False), GPTQ(sweeps=2)),
    ],
)
def test_gptq_is_as_good_as_on_the_cpu(settings, options):
    weight, inputs = layer(192, 256)
    errors = {}
    for device in ("cpu", "cuda"):
        found = (
            gptq(weight.to(device), statistics_of(inputs, device), settings, options)
            .dequantize()
            .cpu()
        )
        errors[device] = layer_error(weight, found, statistics_of(inputs, "cpu").hessian)
    assert errors["cuda"] < 1.02 * errors["cpu"]


@pytest.mark.parametrize("shape", [VPTQ(length=8, main=256, residual=16), VPTQ(length=4, main=64)])
def test_vptq_is_as_good_as_on_the_cpu_and_gives_the_same_bytes_twice(shape):
    weight, inputs = layer(256, 96)
    hessian = statistics_of(inputs, "cpu").hessian
    errors = [
        layer_error(
            weight,
            vptq(weight.to(device), statistics_of(inputs, device), shape).dequantize().cpu(),
            hessian,
        )
        for device in ("cpu", "cuda", "cuda")
    ]
    assert errors[1] == errors[2]
    assert errors[1] < 1.05 * errors[0]


@pytest.mark.parametrize(
    "scheme",
    [
        "gptq-int4",
        "awq-int4",
        "w8a8-smooth",
        "w8a8-smooth-gptq",
        "w4a16-sparse-gptq",
        "vptq-3bit",
        "int4-best",
        "fp8-static",
    ],
)
def test_every_kind_of_scheme_runs_on_a_gpu(scheme, tmp_path):
    model = make_tiny_model(tmp_path / "model")
    recipe = find(scheme)
    changes = {"learn_steps": min(4, recipe.learn_steps), "tune_steps": min(3, recipe.tune_steps)}
    summary = quantize(
        model,
        recipe=Recipe.from_dict(recipe.to_dict() | changes, scheme),
        output=tmp_path / "out",
        device="cuda",
        samples=4,
        length=64,
    )
    assert summary.finished
    assert summary.worst[1] < 0.5
