"""Solvers: pure functions of weight and statistics. None may do worse than rounding to nearest."""

import pytest
import torch

from flyweight.quant.awq import awq_round, clip, output_error, round_weight, search_scales
from flyweight.quant.fp8 import FP8, fp8
from flyweight.quant.gptq import GPTQ, gptq
from flyweight.quant.grid import Integers, fit_group_size, make_grid
from flyweight.quant.noise import Adam, Least, weight_noise
from flyweight.quant.rtn import rtn, to_int8_channel
from flyweight.quant.smoothquant import balanced, search_alpha, smooth_scales
from flyweight.quant.sparsegpt import prune24
from flyweight.quant.statistics import (
    NonFiniteError,
    Statistics,
    inverse_factor,
    layer_error,
    quadratic,
)
from flyweight.quant.vptq import VPTQ, vptq
from flyweight.tensors import Sparse24, quantize_int8_rows


def inputs(columns: int, tokens: int = 700, seed: int = 0) -> torch.Tensor:
    """Correlated channels of very different loudness, as in real models."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    loud = torch.exp(torch.randn(columns, generator=generator))
    return torch.randn(tokens, columns, generator=generator) @ mix * loud


def problem(
    rows: int = 48, columns: int = 96, seed: int = 0
) -> tuple[torch.Tensor, Statistics, torch.Tensor]:
    x = inputs(columns, seed=seed)
    statistics = Statistics(columns)
    for part in x.split(100):
        statistics.add(part)
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed + 1)) * 0.05
    return weight, statistics, x


def error(weight, tensor, statistics):
    return layer_error(weight, tensor.dequantize(), statistics.hessian)


def test_the_least_error_wins_and_of_equal_ones_the_first():
    least = Least(torch.tensor(2.0), torch.tensor(0.0), torch.zeros(3))
    for number, found in enumerate((3.0, 1.0, 1.0, float("nan")), start=1):
        candidate = (torch.tensor(float(number)), torch.full((3,), float(number)))
        least.offer(torch.tensor(found), *candidate)
    assert [one.tolist() for one in least.candidate] == [2.0, [2.0] * 3]
    assert float(least.error) == 1.0


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("ranges", ["minmax", "fourth", "importance"])
def test_every_integer_solver_is_at_least_as_good_as_rounding(bits, symmetric, ranges):
    weight, statistics, _ = problem()
    settings = Integers(bits, 32, symmetric, ranges)
    nearest = error(weight, rtn(weight, settings), statistics)
    for options in (GPTQ(), GPTQ(act_order=False), GPTQ(sweeps=2)):
        assert error(weight, gptq(weight, statistics, settings, options), statistics) <= nearest
    assert error(weight, awq_round(weight, statistics, settings), statistics) <= nearest


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("ranges", ["fourth", "importance"])
def test_a_searched_range_has_no_larger_error_in_any_group(symmetric, ranges):
    weight, statistics, _ = problem()
    errors = []
    for tried in ("minmax", ranges):
        found = rtn(weight, Integers(4, 32, symmetric, tried), statistics.importance)
        squares = (found.dequantize() - weight).square()
        weights = squares if ranges == "fourth" else statistics.importance
        errors.append((squares * weights).unflatten(1, (-1, 32)).sum(-1))
    least, searched = errors
    # columns without inputs count a little in the search, and not here
    assert (searched <= least * (1 + 1e-3)).all() and searched.sum() < 0.95 * least.sum()


def test_a_range_without_calibration_cuts_no_outlier():
    """A weight of six deviations among 128: the least squares cut it by up to a quarter."""
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    weight[:, 7] = 6
    kept = rtn(weight, Integers(4, 128, ranges="fourth")).dequantize()[:, 7]
    assert kept.min() > 5


def test_each_refinement_lowers_the_error_of_the_one_before():
    weight, statistics, _ = problem()
    plain = Integers(4, 32, True, "minmax")
    searched = Integers(4, 32, True, "importance")
    figures = [
        error(weight, tensor, statistics)
        for tensor in (
            rtn(weight, plain),
            gptq(weight, statistics, plain, GPTQ()),
            gptq(weight, statistics, searched, GPTQ()),
            gptq(weight, statistics, searched, GPTQ(sweeps=3)),
        )
    ]
    assert figures == sorted(figures, reverse=True)


def naive_gptq(weight, hessian, settings, ridge):
    """The method as the paper states it: after each column, the exact minimizer over all columns
    still free."""
    weight, grid = weight.double().clone(), make_grid(weight, settings)
    scales, zeros = (tensor.double() for tensor in grid.expand())
    columns = weight.shape[1]
    hessian = hessian.double() + ridge * torch.eye(columns, dtype=torch.float64)
    codes = torch.zeros_like(weight)
    for i in range(columns):
        codes[:, i] = torch.clamp(
            torch.round(weight[:, i] / scales[:, i]) + zeros[:, i], 0, 2**settings.bits - 1
        )
        miss = weight[:, i] - (codes[:, i] - zeros[:, i]) * scales[:, i]
        if i + 1 < columns:
            rest = hessian[i + 1 :, i + 1 :]
            weight[:, i + 1 :] += torch.outer(miss, torch.linalg.solve(rest, hessian[i + 1 :, i]))
    return codes


def test_gptq_finds_the_codes_of_the_naive_method():
    weight, statistics, _ = problem(rows=12, columns=24)
    settings = Integers(4, -1, True)  # one group: the grid does not depend on when it is made
    found = gptq(weight, statistics, settings, GPTQ(act_order=False)).values()
    expected = naive_gptq(weight, statistics.hessian, settings, statistics.ridge(0.01))
    assert (found != expected).float().mean() < 0.02  # ties fall either way in float32


def test_act_order_keeps_the_columns_and_groups_in_their_places():
    weight, statistics, _ = problem()
    tensor = gptq(weight, statistics, Integers(8, 32), GPTQ(act_order=True))
    assert tensor.g_idx is None
    assert (tensor.dequantize() - weight).abs().max() < 0.02


def test_rounding_has_the_scales_of_compressed_tensors():
    weight = torch.tensor([[0.75, -1.5, 0.3, 0.0], [0.2, 0.1, 0.4, 0.6]])
    symmetric = rtn(weight, Integers(4, 4, scale_dtype=torch.float32))
    torch.testing.assert_close(symmetric.scales, torch.tensor([[1.5 / 7.5], [0.6 / 7.5]]))
    assert symmetric.integers()[0].tolist() == [4, -8, 2, 0] or symmetric.integers()[
        0
    ].tolist() == [4, -7, 2, 0]
    asymmetric = rtn(weight, Integers(4, 4, symmetric=False, scale_dtype=torch.float32))
    torch.testing.assert_close(asymmetric.scales, torch.tensor([[2.25 / 15], [0.6 / 15]]))
    assert asymmetric.zeros.flatten().tolist() == [10, 0]  # the range always holds zero


def test_scales_are_what_the_file_holds():
    weight, statistics, _ = problem()
    for dtype in (torch.float16, torch.bfloat16):
        tensor = gptq(
            weight,
            statistics,
            Integers(4, 32, ranges="importance", scale_dtype=dtype),
            GPTQ(sweeps=1),
        )
        assert tensor.scales.dtype == dtype
        assert error(weight, tensor, statistics) < error(
            weight, rtn(weight, Integers(4, 32, scale_dtype=dtype)), statistics
        )


def test_a_zero_weight_stays_zero():
    weight, statistics, _ = problem()
    for symmetric in (True, False):
        for tensor in (
            rtn(weight * 0, Integers(4, 32, symmetric, "importance")),
            gptq(weight * 0, statistics, Integers(4, 32, symmetric), GPTQ(sweeps=1)),
        ):
            assert not tensor.dequantize().any()


def test_group_size_adapts_to_the_width():
    assert fit_group_size(128, [576, 1536]) == 64
    assert fit_group_size(128, [4096, 12288]) == 128
    assert fit_group_size(128, [30]) == -1


def test_dead_columns_are_quantized_to_zero():
    weight, _, x = problem()
    x[:, [3, 40]] = 0
    statistics = Statistics(96)
    statistics.add(x)
    tensor = gptq(weight, statistics, Integers(4, 32), GPTQ())
    assert not tensor.dequantize()[:, [3, 40]].any()


def test_a_singular_hessian_is_damped_until_it_works():
    x = inputs(64)[:8]  # eight tokens, 64 columns
    statistics = Statistics(64)
    statistics.add(x)
    weight = torch.randn(16, 64)
    assert torch.isfinite(
        gptq(weight, statistics, Integers(4, 32), GPTQ(damping=0.0)).dequantize()
    ).all()


def test_damping_grows_where_samples_are_few():
    few, many = Statistics(64), Statistics(64)
    x = inputs(64, tokens=20_000)
    few.add(x[:500])
    many.add(x)
    assert few.ridge(0.01) / few.importance.mean() == pytest.approx(64 / 500)
    assert many.ridge(0.01) / many.importance.mean() == pytest.approx(0.01)


def test_the_factor_is_that_of_the_inverse():
    hessian = torch.cov(inputs(40).T)
    upper = inverse_factor(hessian, 0.1)
    assert torch.equal(upper, upper.triu())
    torch.testing.assert_close(
        upper.T @ upper, torch.linalg.inv(hessian + 0.1 * torch.eye(40)), rtol=1e-3, atol=1e-4
    )


def test_statistics_do_not_depend_on_how_tokens_are_cut():
    x = inputs(32)
    whole, parts = Statistics(32), Statistics(32)
    whole.add(x)
    for part in x.split(7):
        parts.add(part)
    torch.testing.assert_close(whole.hessian, parts.hessian)
    assert torch.equal(whole.largest, parts.largest) and whole.tokens == parts.tokens


def test_non_finite_inputs_are_named():
    statistics = Statistics(8)
    statistics.add(torch.full((2, 8), float("inf")))
    with pytest.raises(NonFiniteError, match=r"layers\.3.*NaN or infinity"):
        statistics.check("model.layers.3")


def test_awq_scales_lower_the_error_and_fold_away():
    weight, statistics, x = problem()
    settings = Integers(4, 32, symmetric=False)
    ratio, scales = search_scales(statistics, [weight], settings)
    assert ratio > 0
    torch.testing.assert_close(
        (x / scales) @ (weight * scales).T, x @ weight.T, rtol=1e-4, atol=1e-4
    )
    scaled = awq_round(weight * scales, statistics.scaled(scales), settings).dequantize() / scales
    assert layer_error(weight, scaled, statistics.hessian) < error(
        weight, rtn(weight, settings), statistics
    )


def test_ranges_at_eight_bits_are_tried_finely_enough_to_matter():
    weight, statistics, _ = problem()
    settings = Integers(8, -1)
    clipped = error(weight, awq_round(weight, statistics, settings), statistics)
    assert clipped < 0.8 * error(weight, rtn(weight, settings), statistics)


def test_statistics_follow_a_scaling_without_another_pass():
    _, statistics, x = problem()
    scales = torch.linspace(0.5, 2, 96)
    again = Statistics(96)
    again.add(x / scales)
    scaled = statistics.scaled(scales)
    for name in ("hessian", "mean_absolute", "largest", "importance"):
        torch.testing.assert_close(
            getattr(scaled, name), getattr(again, name), rtol=1e-4, atol=1e-4
        )


def int8_error(x, weight, scales):
    """Of int8 tokens and channels, with `scales` between them."""
    codes, steps = quantize_int8_rows(x / scales)
    rows, row_steps = quantize_int8_rows(weight * scales)
    return ((codes * steps) @ (rows * row_steps).T - x @ weight.T).square().mean()


def sizes(x):
    return x.square().mean(0), x.abs().amax(0)


@pytest.mark.parametrize("gated", [False, True])
def test_balanced_scales_fold_away_and_leave_less_error_on_tokens_they_have_not_seen(gated):
    weight, _, x = problem()
    x[:, 5] *= 60  # one outlier channel
    x[:, 7:20] *= 4
    seen, fresh = x.chunk(2)
    _, scales = balanced(*sizes(seen), [weight[:30], weight[30:]], gated=gated)
    torch.testing.assert_close(
        (x / scales) @ (weight * scales).T, x @ weight.T, rtol=1e-3, atol=1e-3
    )
    assert int8_error(fresh, weight, scales) < 0.5 * int8_error(fresh, weight, torch.ones(96))
    torch.testing.assert_close(scales.log().mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(balanced(*sizes(3 * seen), [weight], gated=gated)[1], scales)


def test_a_channel_that_one_token_alone_has_loud_gets_a_scale_for_it_but_behind_a_gate():
    weight, _, x = problem()
    loud = x.clone()
    loud[0, 5] = 100 * x.abs().max()
    grown = [
        balanced(*sizes(loud), [weight], gated=gated)[1][5]
        / balanced(*sizes(x), [weight], gated=gated)[1][5]
        for gated in (False, True)
    ]
    assert grown[0] > 3 * grown[1]


def test_balanced_scales_let_dead_columns_be():
    weight, _, x = problem()
    x[:, 3], weight[:, 8] = 0, 0
    _, scales = balanced(*sizes(x), [weight])
    assert scales[3] == scales[8] == 1
    assert torch.isfinite(scales).all() and scales.min() > 0
    nothing = torch.zeros(96)
    assert torch.equal(balanced(nothing, nothing, [weight])[1], torch.ones(96))


def test_channels_that_another_text_makes_loud_cost_less_behind_a_gate():
    weight, _, x = problem()
    x = x * torch.linspace(-2, 2, 96).exp()
    other = x.flip(1)  # loud is quiet and quiet is loud
    gated, plain = (balanced(*sizes(x), [weight], gated=gated)[1] for gated in (True, False))
    assert int8_error(x, weight, gated) < int8_error(x, weight, torch.ones(96))
    assert int8_error(other, weight, gated) < 0.5 * int8_error(other, weight, plain)


def test_weights_alone_are_smoothed_only_as_far_as_it_helps_them():
    weight, statistics, x = problem()
    x[:, 5] *= 60
    found = output_error(statistics, [weight], Integers(8, -1))
    alpha, scales = search_alpha(
        found, [x.abs().amax(0)], [weight]
    )  # sizes that say nothing of what the weights need
    assert (
        found(scales)
        <= found(torch.ones(96))
        < found(smooth_scales(x.abs().amax(0), [weight], 0.5))
    )
    assert alpha == 0 or found(scales) < found(torch.ones(96))


@pytest.mark.parametrize("group_size", [-1, 32])
def test_expected_noise_of_weights_is_what_rounding_makes(group_size):
    weight, statistics, _ = problem(rows=400)
    settings = Integers(
        8, group_size, symmetric=False
    )  # symmetric, a group's largest may be half a step off besides
    noise = weight_noise(
        weight, statistics.importance, group_size=settings.group_columns(96), symmetric=False
    )
    for scales in (torch.ones(96), statistics.importance.pow(0.25)):
        difference = (
            round_weight(weight * scales, settings) / scales - weight
        ).square() * statistics.importance
        assert float(noise(scales)) / 255**2 / 12 == pytest.approx(
            float(difference.sum()), rel=0.05
        )


def pattern_holds(weight: torch.Tensor) -> bool:
    return bool(((weight != 0).unflatten(1, (-1, 4)).sum(-1) <= 2).all())


@pytest.mark.parametrize("symmetric", [True, False])
def test_two_of_four_survive_every_later_step(symmetric):
    weight, statistics, _ = problem()
    settings = Integers(4, 32, symmetric, "importance")
    pruned, mask, joint = prune24(weight, statistics, settings=settings)
    assert (
        pattern_holds(pruned)
        and pattern_holds(joint.dequantize())
        and bool((mask.unflatten(1, (-1, 4)).sum(-1) == 2).all())
    )
    pruned, mask, _ = prune24(weight, statistics)
    scales = torch.linspace(0.5, 2, 96)
    for tensor in (
        gptq(pruned, statistics, settings, GPTQ(sweeps=2), mask=mask, target=weight),
        awq_round(pruned * scales, statistics.scaled(scales), settings),
        rtn(pruned, settings),
    ):
        assert pattern_holds(tensor.dequantize())
        packed = Sparse24.from_dense(tensor)
        assert packed is not None and torch.equal(packed.dequantize(), tensor.dequantize())


def test_pruning_by_second_moments_beats_pruning_by_size():
    weight, statistics, _ = problem()
    pruned, _, _ = prune24(weight, statistics)
    groups = weight.unflatten(1, (-1, 4))
    kept = torch.zeros_like(groups).scatter_(-1, groups.abs().topk(2, -1).indices, 1.0)
    by_size = (groups * kept).flatten(1)
    assert layer_error(weight, pruned, statistics.hessian) < layer_error(
        weight, by_size, statistics.hessian
    )


def test_int8_channels_are_the_same_numbers():
    weight, _, _ = problem()
    tensor = rtn(weight, Integers(8, -1, scale_dtype=torch.float32))
    assert torch.equal(to_int8_channel(tensor).dequantize(), tensor.dequantize())


@pytest.mark.parametrize("scales", ["channel", "tensor"])
@pytest.mark.parametrize("activation", ["token", "static", "none"])
def test_float8_is_close_and_its_input_scale_covers_the_input(scales, activation):
    weight, statistics, x = problem()
    tensor = fp8(weight, FP8(scales, activation), statistics)
    assert error(weight, tensor, statistics) < 2e-3
    if activation == "static":
        torch.testing.assert_close(tensor.input_scale * 448, x.abs().max().reshape(1))


@pytest.mark.parametrize("scales", ["channel", "tensor"])
def test_float8_scales_are_chosen_for_the_least_error(scales):
    weight, _, _ = problem(rows=256)
    made = fp8(weight, FP8(scales))
    whole = (
        weight.abs().amax(1, keepdim=True) if scales == "channel" else weight.abs().amax()
    ) / 448
    plain = (weight / whole).to(torch.float8_e4m3fn).float() * whole
    before, after = ((values - weight).square().sum(1) for values in (plain, made.dequantize()))
    assert after.sum() < (0.95 if scales == "channel" else 1) * before.sum()
    assert scales == "tensor" or (after <= before).all()


def test_vptq_beats_rounding_at_three_bits():
    weight, statistics, _ = problem(rows=128, columns=128)
    tensor = vptq(weight, statistics, VPTQ(bits=3))
    rounded = rtn(weight, Integers(3, 32))
    assert tensor.bits_per_weight <= 3.3 < rounded.bits_per_weight
    assert error(weight, tensor, statistics) < error(weight, rounded, statistics)


def test_rounding_some_rows_at_a_time_gives_the_same_bytes(monkeypatch):
    weight, settings = torch.randn(40, 256), Integers(bits=4, group_size=64)
    whole = rtn(weight, settings)
    monkeypatch.setattr("flyweight.quant.rtn.AT_ONCE", 7 * 256)
    parts = rtn(weight, settings)
    assert all(
        torch.equal(tensor, parts.tensors()[name]) for name, tensor in whole.tensors().items()
    )


def test_an_error_without_statistics_is_that_of_the_weight():
    weight = torch.randn(8, 64)
    quantized = weight + 0.1 * torch.randn_like(weight)
    assert layer_error(weight, quantized, None) == pytest.approx(
        layer_error(weight, quantized, torch.eye(64)), rel=1e-5
    )


def test_clipping_lowers_the_error_of_every_row_even_where_inputs_have_a_mean():
    generator = torch.Generator().manual_seed(0)
    statistics = Statistics(96)
    statistics.add(
        torch.randn(400, 96, generator=generator) + 2
    )  # errors of one sign add up from group to group
    weight = (
        torch.randn(24, 96, generator=generator).abs()
        * torch.rand(24, 96, generator=generator) ** 2
    )
    settings = Integers(3, 16, symmetric=False)
    rows = [
        ((made.dequantize() - weight) @ statistics.hessian * (made.dequantize() - weight)).sum(1)
        for made in (
            awq_round(weight, statistics, settings, clipped=clipped) for clipped in (True, False)
        )
    ]
    assert (rows[0] <= rows[1] * (1 + 1e-5)).all() and rows[0].sum() < 0.8 * rows[1].sum()


def test_products_with_a_symmetric_matrix_are_those_of_its_half():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(700, 530, generator=generator)
    rows = torch.randn(5, 530, generator=generator)
    matrix = x.T @ x
    wanted = ((rows.double() @ matrix.double()) * rows).sum(1)
    torch.testing.assert_close(quadratic(rows, matrix).double(), wanted, rtol=1e-5, atol=0)


def test_statistics_of_single_columns_are_the_diagonal_of_all():
    x = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    whole, single = Statistics(24), Statistics(24, products=False)
    for statistics in (whole, single):
        statistics.add(x)
        statistics.check("a layer")
    scales = torch.linspace(0.5, 2, 24)
    for one, other in ((whole, single), (whole.scaled(scales), single.scaled(scales))):
        torch.testing.assert_close(one.importance, other.importance)
        assert torch.equal(one.largest, other.largest)


def test_our_adam_steps_as_torchs():
    ours, theirs = (torch.tensor([1.0, -2.0, 3.0], requires_grad=True) for _ in range(2))
    optimizer, reference = Adam(ours, 0.05), torch.optim.Adam([theirs], lr=0.05)
    for _ in range(5):
        optimizer.step(torch.autograd.grad(ours.pow(4).sum(), ours)[0])
        reference.zero_grad()
        theirs.pow(4).sum().backward()
        reference.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("group_size", [-1, 32])
def test_clipping_stays_on_the_device_of_the_weight(group_size):
    """On meta, where a tensor of another device is an error as it is on a GPU, and nothing is
    computed."""
    grid = clip(
        torch.empty(8, 64, device="meta"),
        Statistics.uniform(64, "meta"),
        Integers(bits=8, group_size=group_size),
    )
    assert grid.scales.device.type == "meta" and grid.scales.shape == (
        8,
        1 if group_size < 0 else 2,
    )
