import pytest
import torch

from flyweight.kernels import cpu
from flyweight.kernels.cpu import CpuLinear


@pytest.fixture(params=["packed", "as it lies", "little memory"])
def layout(request, monkeypatch):
    if request.param == "packed" and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(cpu, "packing_pays", lambda: request.param != "as it lies")
    monkeypatch.setattr(cpu, "memory_available", lambda: 100.0 if request.param == "little memory" else 1e12)
    return request.param


@pytest.mark.parametrize("shape", [(96, 64), (1, 7), (33, 130)])
def test_every_number_of_rows_gives_the_same_product(layout, shape):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator)
    linear = CpuLinear(weight)
    for size in [(1,), (3,), (4,), (17,), (255,), (256,), (2, 5), ()]:
        x = torch.randn(*size, shape[1], generator=generator)
        torch.testing.assert_close(linear(x), (x.double() @ weight.double().T).float(), rtol=1e-4, atol=1e-4)


def test_the_copy_is_made_when_first_needed_and_only_with_memory_to_spare(layout):
    linear = CpuLinear(torch.randn(32, 32))
    linear(torch.randn(3, 32))
    assert not linear.tried
    linear(torch.randn(4, 32))
    assert (linear.packed is not None) == (layout == "packed")


def test_the_measurement_answers_on_any_build():
    assert cpu.packing_pays() in (True, False)


def test_a_build_without_packing_goes_without(monkeypatch):
    def missing(weight):
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")

    monkeypatch.setattr(cpu, "pack", missing)
    assert cpu.packing_pays.__wrapped__() is False


def test_a_tall_weight_laid_down_by_columns_gives_the_same_product(monkeypatch, layout):
    monkeypatch.setattr(cpu, "columns_pay", lambda: True)
    weight = torch.randn(1024, 256)
    linear = CpuLinear(weight)
    assert linear.weight.stride() == (1, 1024) and torch.equal(linear.weight, weight)
    for rows in (1, 3, 8, 300):
        x = torch.randn(rows, 256)
        torch.testing.assert_close(linear(x), (x.double() @ weight.double().T).float(), rtol=1e-4, atol=1e-4)
