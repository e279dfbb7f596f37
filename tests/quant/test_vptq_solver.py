"""VPTQ: the same bytes every time, never more bits than promised, and every step of it pays."""

import pytest
import torch

from flyweight.errors import OptionError
from flyweight.quant.kmeans import exact_sums, kmeans, nearest
from flyweight.quant.statistics import Statistics, layer_error
from flyweight.quant.vptq import ALLOWANCE, VPTQ, Solver, choose_shape, conjugate_gradients, vptq


def problem(rows=60, columns=64):
    generator = torch.Generator().manual_seed(3)
    statistics = Statistics(columns)
    mix = torch.eye(columns) + torch.randn(columns, columns, generator=generator) / columns**0.5
    statistics.add(
        torch.randn(500, columns, generator=generator) @ mix * torch.linspace(0.1, 3, columns)
    )
    return torch.randn(rows, columns, generator=generator) * 0.1, statistics


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(
    "shape",
    [(576, 576), (192, 576), (1536, 576), (576, 1536), (4096, 4096), (1024, 4096), (12288, 4096)],
)
def test_all_stored_bits_stay_within_the_allowance(bits, shape):
    chosen = choose_shape(VPTQ(bits=bits), *shape)
    assert bits - 0.1 <= chosen.stored_bits(*shape) <= bits + ALLOWANCE


def test_a_large_layer_gets_a_large_book():
    small, large = (
        choose_shape(VPTQ(bits=2), *shape).main for shape in ((256, 256), (12288, 4096))
    )
    assert small <= 1024 and large >= 16384


def test_a_layer_too_small_for_any_book_is_refused():
    with pytest.raises(OptionError, match="no codebook"):
        choose_shape(VPTQ(bits=4), 2, 4)


@pytest.mark.parametrize(
    "settings",
    [
        VPTQ(length=4, main=32, refits=1),
        VPTQ(length=4, main=16, residual=8, refits=1),
        VPTQ(length=8, main=16, normalize=False),
        VPTQ(length=4, main=16, residual=4, outliers=0.06, outlier_centroids=32, outlier_length=2),
    ],
)
def test_the_solver_knows_what_it_stored(settings):
    weight, statistics = problem()
    tensor = vptq(weight, statistics, settings)
    assert tensor.bits_per_weight == pytest.approx(settings.stored_bits(60, 64))
    solver = Solver(weight, statistics, settings)
    solver.make_books()
    solver.assign()
    for _ in range(settings.refits):
        solver.improve()
    back = torch.empty_like(solver.values).index_copy_(0, solver.order, solver.values).T[:60]
    torch.testing.assert_close(tensor.dequantize(), back, rtol=1e-5, atol=1e-6)


def test_two_runs_give_the_same_bytes_on_any_number_of_threads():
    weight, statistics = problem()
    settings, threads = VPTQ(length=4, main=32, residual=8, refits=1), torch.get_num_threads()
    first = vptq(weight, statistics, settings)
    again = vptq(weight, statistics, settings)
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.tensors().values(), again.tensors().values(), strict=True)
    )
    points, heft = (
        torch.randn(3000, 4, generator=torch.Generator().manual_seed(0)),
        torch.rand(3000),
    )
    try:
        torch.set_num_threads(1)
        alone = kmeans(points, heft, 16)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone, kmeans(points, heft, 16))


def test_refitting_and_reassigning_lower_the_error():
    weight, statistics = problem()
    errors = [
        layer_error(
            weight,
            vptq(weight, statistics, VPTQ(length=4, main=32, refits=n)).dequantize(),
            statistics.hessian,
        )
        for n in (0, 1, 3)
    ]
    assert errors[0] > errors[1] >= errors[2]


def test_books_that_the_file_cannot_hold_are_not_kept(monkeypatch):
    """Main and residual entries can grow without end against each other in a small layer."""
    weight, statistics = problem()
    kept = vptq(weight, statistics, VPTQ(length=4, main=16, residual=4, refits=0))
    monkeypatch.setattr(
        "flyweight.quant.vptq.conjugate_gradients",
        lambda apply, right, *_: torch.full_like(right, 1e6),
    )
    found = vptq(weight, statistics, VPTQ(length=4, main=16, residual=4, refits=1))
    assert torch.equal(found.codebook, kept.codebook) and found.dequantize().isfinite().all()


def test_choosing_both_entries_together_is_better_than_one_after_the_other():
    weight, statistics = problem()
    greedy, joint = (
        layer_error(
            weight,
            vptq(
                weight, statistics, VPTQ(length=4, main=16, residual=16, beam=beam, refits=0)
            ).dequantize(),
            statistics.hessian,
        )
        for beam in (1, 8)
    )
    assert joint < greedy


def test_outlier_columns_get_the_smallest_error():
    weight, statistics = problem()
    settings = VPTQ(length=8, main=16, outliers=0.125, outlier_length=2, outlier_centroids=256)
    tensor = vptq(weight, statistics, settings)
    miss = (tensor.dequantize() - weight).square().mean(0)
    loudest = statistics.order(True)[:8]
    assert miss[loudest].max() < miss.median()


def test_sums_do_not_depend_on_the_order_of_addition():
    values, index = (
        torch.randn(5000, 3) * torch.logspace(-6, 6, 5000)[:, None],
        torch.randint(7, (5000,)),
    )
    order = torch.randperm(5000)
    assert torch.equal(exact_sums(index, values, 7), exact_sums(index[order], values[order], 7))
    expected = torch.zeros(7, 3, dtype=torch.float64).index_add_(0, index, values.double())
    torch.testing.assert_close(
        exact_sums(index, values, 7).double(), expected, rtol=1e-5, atol=1e-5
    )


def test_sums_leave_the_determinism_of_everything_else_alone():
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        exact_sums(torch.tensor([0, 1]), torch.ones(2, 1), 2)
        assert (
            torch.are_deterministic_algorithms_enabled()
            and torch.is_deterministic_algorithms_warn_only_enabled()
        )
    finally:
        torch.use_deterministic_algorithms(False)


def test_kmeans_finds_well_separated_clusters():
    centres = torch.tensor([[0.0, 0], [10, 0], [0, 10], [10, 10]])
    points = centres[torch.arange(400) % 4] + 0.1 * torch.randn(
        400, 2, generator=torch.Generator().manual_seed(1)
    )
    book = kmeans(points, torch.ones(400), 4)
    assert nearest(centres, book)[1].max() < 0.01


def test_heavy_points_draw_the_centroids():
    points = torch.cat([torch.zeros(90, 2), torch.ones(10, 2)])
    weights = torch.cat([torch.ones(90), torch.full((10,), 1000.0)])
    book = kmeans(points + 0.01 * torch.randn(100, 2), weights, 1)
    assert book.mean() > 0.95


def test_conjugate_gradients_solve():
    matrix = torch.cov(torch.randn(12, 200)) + torch.eye(12)
    right = torch.randn(12, 1)
    found = conjugate_gradients(lambda x: matrix @ x, right, matrix.diagonal()[:, None], 30)
    torch.testing.assert_close(found, torch.linalg.solve(matrix, right), rtol=1e-3, atol=1e-4)
