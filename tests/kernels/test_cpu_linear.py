import pytest
import torch

from flyweight.kernels import cpu, cpu_integer
from flyweight.kernels.cpu import CpuLinear
from flyweight.kernels.dispatch import prepare, without_native
from flyweight.kernels.native import library
from flyweight.tensors import (
    Float4,
    Float8,
    Int8Channel,
    IntBlock,
    IntGroup,
    Plain,
    Sparse24,
    VectorQuant,
)


@pytest.fixture(params=["packed", "as it lies", "little memory"])
def layout(request, monkeypatch):
    if request.param == "packed" and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(cpu, "has_packing", lambda: request.param != "as it lies")
    monkeypatch.setattr(
        cpu, "memory_available", lambda: 100.0 if request.param == "little memory" else 1e12
    )
    return request.param


@pytest.mark.parametrize("shape", [(96, 64), (1, 7), (33, 130)])
def test_every_number_of_rows_gives_the_same_product(layout, shape):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator)
    linear = CpuLinear(weight)
    for size in [(1,), (3,), (4,), (17,), (255,), (256,), (2, 5), ()]:
        x = torch.randn(*size, shape[1], generator=generator)
        torch.testing.assert_close(
            linear(x), (x.double() @ weight.double().T).float(), rtol=1e-4, atol=1e-4
        )


def test_the_copy_is_made_when_first_needed_and_only_with_memory_to_spare(layout):
    linear = CpuLinear(torch.randn(32, 32))
    linear(torch.randn(1, 32))
    assert not linear.tried
    linear(torch.randn(2, 32))
    assert (linear.packed is not None) == (layout == "packed")


def test_a_tall_weight_laid_down_by_columns_gives_the_same_product(layout):
    weight = torch.randn(1024, 256)
    linear = CpuLinear(weight)
    assert linear.weight.stride() == (1, 1024) and torch.equal(linear.weight, weight)
    for rows in (1, 3, 8, 300):
        x = torch.randn(rows, 256)
        torch.testing.assert_close(
            linear(x), (x.double() @ weight.double().T).float(), rtol=1e-4, atol=1e-4
        )


def relative_error(run, tensor, *size):
    x = torch.randn(*size, tensor.matrix_shape[1])
    expected = tensor.matmul_reference(x)
    out = run(x)
    assert out.shape == expected.shape and out.dtype == x.dtype
    return float((out - expected).norm() / expected.norm())


@pytest.fixture
def fast(monkeypatch):
    """torch's choices on a processor with vector code for integers."""
    if not cpu.has_half():
        pytest.skip("FBGEMM does not run here")
    monkeypatch.setattr(cpu, "has_integers", lambda: True)
    with without_native():
        yield


def test_fbgemm_is_not_run_on_processors_that_may_lack_its_instructions(monkeypatch):
    # as torch calls ARM's without SVE
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    for tensor in (
        Plain.random((48, 64)),
        Int8Channel.random((48, 64)),
        IntGroup.random((48, 64), group_size=32),
    ):
        with without_native():
            prepared = prepare(tensor, dtype=torch.float32)
        assert prepared.kernel == "torch.linear" and relative_error(prepared, tensor, 3) < 1e-3


SIZES = [(1,), (2,), (9,), (65,), (2, 3), ()]


@pytest.mark.parametrize("shape", [(96, 64), (1, 7), (33, 130), (192, 576)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_16_bits_stay_in_16_bits_and_give_the_float32_product(fast, shape, dtype):
    tensor = Plain.random(shape, dtype=dtype)
    prepared = prepare(tensor, dtype=torch.float32)
    assert (
        prepared.kernel == "fbgemm.fp16"
        and "exact" in prepared.why
        and prepared.nbytes == 2 * tensor.weight.numel()
    )
    assert max(relative_error(prepared, tensor, *size) for size in SIZES) < 1e-6


@pytest.mark.parametrize(
    "case", ["a weight that needs float32", "a range too wide", "exact", "no FBGEMM"]
)
def test_other_weights_and_machines_take_the_float32_path(fast, monkeypatch, case):
    weight = torch.randn(48, 64).half().float()
    if case == "a weight that needs float32":
        weight[5, 7] = 1 + 2**-12
    if case == "a range too wide":
        weight[0, 0], weight[0, 1] = 2.0**100, 2.0**-100
    if case == "no FBGEMM":
        monkeypatch.setattr(cpu, "has_half", lambda: False)
    tensor = Plain(weight)
    prepared = prepare(tensor, dtype=torch.float32, exact=case == "exact")
    assert prepared.kernel == "torch.linear"
    assert max(relative_error(prepared, tensor, *size) for size in SIZES) < 1e-6


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_every_part_of_a_weight_is_asked_whether_it_fits_16_bits(monkeypatch, rows):
    monkeypatch.setattr(cpu, "COMPARED", rows * 64)
    weight = torch.randn(100, 64).bfloat16().float() * 2.0**-20
    assert cpu.half_shift(weight.half().float()) == 0
    assert cpu.half_shift(weight) > 0
    weight[-1, -1] = torch.finfo(torch.float16).max * 4  # too far from the others to bring both in
    assert cpu.half_shift(weight) is None
    assert cpu.half_shift(torch.zeros(0, 64)) == cpu.half_shift(torch.zeros(2, 64)) == 0


def test_a_processor_without_vector_code_for_integers_dequantizes_once(fast, monkeypatch):
    monkeypatch.setattr(cpu, "has_integers", lambda: False)
    for tensor in (Int8Channel.random((48, 64)), IntGroup.random((48, 64), group_size=32)):
        prepared = prepare(tensor, dtype=torch.float32)
        assert prepared.kernel == "fbgemm.fp16" and "dequantized once" in prepared.why
        assert max(relative_error(prepared, tensor, *size) for size in SIZES) < 1e-3


@pytest.mark.parametrize("shape", [(96, 64), (1, 7), (33, 130), (1000, 576)])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.skipif(
    not cpu_integer.sums_exactly(), reason="this processor cannot sum products of int8 exactly"
)
def test_w8a8_is_summed_in_integers_and_means_the_same(fast, shape, exact):
    tensors = [Int8Channel.random(shape), *([Sparse24.random(shape)] if shape[1] % 4 == 0 else [])]
    for tensor in tensors:
        prepared = prepare(tensor, dtype=torch.float32, exact=exact)
        assert prepared.kernel == "torch.int_mm" and prepared.shape == shape
        assert max(relative_error(prepared, tensor, *size) for size in SIZES) < 1e-6
    assert torch.equal(prepared(torch.zeros(2, shape[1])), torch.zeros(2, shape[0]))


@pytest.mark.parametrize("exact", [True, False])
def test_a_processor_that_cuts_integer_sums_off_dequantizes_w8a8(fast, monkeypatch, exact):
    monkeypatch.setattr(cpu_integer, "sums_exactly", lambda: False)
    tensor = Int8Channel.random((96, 64))
    prepared = prepare(tensor, dtype=torch.float32, exact=exact)
    assert prepared.kernel == ("torch.linear" if exact else "fbgemm.fp16")
    assert max(relative_error(prepared, tensor, *size) for size in SIZES) < (
        1e-6 if exact else 1e-3
    )


@pytest.mark.parametrize(
    "options",
    [
        dict(bits=4, group_size=64),
        dict(bits=4, group_size=32, symmetric=True),
        dict(bits=8, group_size=-1, symmetric=True),
    ],
)
def test_weight_only_integers_take_torchs_op_for_few_rows(fast, options):
    tensor = IntGroup.random((192, 576), **options)
    prepared = prepare(tensor, dtype=torch.float32)
    assert prepared.kernel == f"torch.int{options['bits']}pack" and "bfloat16" in prepared.why
    few, many = [size for size in SIZES if size not in ((9,), (65,))], [(9,), (65,)]
    # bfloat16 inputs
    assert 1e-4 < max(relative_error(prepared, tensor, *size) for size in few) < 1e-2
    # weights rounded to float16
    assert max(relative_error(prepared, tensor, *size) for size in many) < 1e-3
    exact = prepare(tensor, dtype=torch.float32, exact=True)
    assert (
        exact.kernel == "torch.linear"
        and max(relative_error(exact, tensor, *size) for size in SIZES) < 1e-6
    )


@pytest.mark.parametrize(
    "tensor",
    [
        IntGroup.random((33, 64), group_size=32),
        IntGroup.random((48, 72), group_size=24),
        IntGroup.random((48, 96), group_size=64),
        IntGroup.random((48, 64), group_size=32, act_order=True),
        IntGroup.random((48, 72), bits=8, group_size=-1, symmetric=True),
        IntGroup.random((48, 64), bits=8, group_size=32),
        IntGroup.random((48, 64), bits=3, group_size=32),
        Float8.random((48, 64)),
        VectorQuant.random((48, 64)),
    ],
    ids=lambda tensor: f"{tensor.kind} {tensor.shape}",
)
def test_whatever_torchs_ops_cannot_take_is_dequantized_once(fast, tensor):
    prepared = prepare(tensor, dtype=torch.float32)
    assert prepared.kernel == "fbgemm.fp16" and "dequantized once" in prepared.why
    assert max(relative_error(prepared, tensor, *size) for size in SIZES) < 1e-3


def test_two_and_three_rows_take_the_way_of_four(monkeypatch):
    """Else a batch of two can take several times as long as one of four."""
    weight = torch.randn(24, 16)
    taken = []
    monkeypatch.setattr(cpu, "has_packing", lambda: True)
    monkeypatch.setattr(cpu, "memory_available", lambda: 1e12)
    monkeypatch.setattr(cpu, "pack", lambda weight: weight)
    monkeypatch.setattr(
        cpu, "run_packed", lambda x, packed: (taken.append(len(x)), x @ packed.T)[1]
    )
    linear = cpu.CpuLinear(weight)
    for rows in (1, 2, 3, 4, cpu.MANY_ROWS):
        x = torch.randn(rows, 16)
        assert torch.allclose(linear(x), x @ weight.T, atol=1e-5)
    assert taken == [2, 3, 4]


@pytest.mark.skipif(library.why_not() is not None, reason="no C compiler")
@pytest.mark.parametrize(
    "options",
    [
        dict(bits=4, group_size=32),
        dict(bits=8, group_size=32, symmetric=True),
        dict(bits=3, group_size=64),
        dict(bits=4, group_size=32, act_order=True),
    ],
    ids=str,
)
def test_integers_keep_their_bits_where_sums_may_be_rounded(options):
    """A linear of Gemma, or an expert, in AWQ, GPTQ or a GGUF file: torch's op would keep floats
    besides.
    """
    tensor = IntGroup.random((96, 128), **options)
    prepared = prepare(tensor, dtype=torch.float32)
    assert prepared.kernel == "native" and prepared.nbytes < 1.2 * tensor.nbytes
    assert max(relative_error(prepared, tensor, *size) for size in SIZES) < 1e-2
    exact = prepare(tensor, dtype=torch.float32, exact=True)
    assert (
        exact.kernel == "torch.linear"
        and max(relative_error(exact, tensor, *size) for size in SIZES) < 1e-6
    )


@pytest.mark.skipif(library.why_not() is not None, reason="no C compiler")
def test_groups_that_the_native_kernels_cannot_read_go_through_torch():
    assert prepare(IntGroup.random((48, 72), group_size=24), dtype=torch.float32).kernel != "native"


@pytest.mark.skipif(library.why_not() is not None, reason="no C compiler")
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    "tensor",
    [Float4.random((96, 128), 1), IntBlock.random((96, 256), 1, bits=4, groups_of_block=8)],
    ids=lambda tensor: tensor.kind,
)
def test_codes_that_torch_cannot_multiply_keep_their_bits(tensor, exact):
    """What an expert of gpt-oss is, or of a GGUF file."""
    prepared = prepare(tensor, dtype=torch.float32, exact=exact)
    assert prepared.kernel == "native" and prepared.nbytes < 1.2 * tensor.nbytes
    for rows in (1, 5):
        assert relative_error(prepared, tensor, rows) < (1e-5 if exact else 1e-2)
    with without_native():
        assert prepare(tensor, dtype=torch.float32).kernel != "native"
