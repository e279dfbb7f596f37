"""VPTQ with its codebooks in bytes: the kernels' own sources, run on the CPU, against the float64
reference.
"""

import dataclasses

import host_cuda
import pytest
import torch
from test_kernels_on_the_host import error
from test_vptq_on_the_host import host, reference  # noqa: F401 (a fixture)

from flyweight import gpu
from flyweight.kernels import reference as ops
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.vptq import decode, gather_plan
from flyweight.kernels.vptq import linear as vptq
from flyweight.kernels.vptq.choose_layout import takes_byte_books
from flyweight.kernels.vptq.parts import Ends
from flyweight.tensors import VectorQuant
from flyweight.tensors.vector import entries, packed

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")
BOOKS = dict(main=256, residual=256)


def make(*shapes, dtype=torch.bfloat16, bias=None, **options):
    """The weights as their bytes mean them, and one linear of all."""
    tensors = [
        VectorQuant.random(shape, seed, dtype=dtype, **options).in_bytes()
        for seed, shape in enumerate(shapes)
    ]
    return tensors, vptq.join(
        [vptq.prepare(tensor, dtype=dtype, ops=ops) for tensor in tensors], bias
    )


@pytest.mark.parametrize(
    "options",
    [dict(main=8192, residual=256), dict(main=300, residual=16), dict(main=64, residual=None)],
)
def test_the_sums_of_two_books_are_the_bytes_that_stand_for_them(options):
    tensor = VectorQuant.random((64, 512), 3, **options)
    books = tensor.byte_books()
    main, extra = tensor.split_indices()
    sums = packed(books.main)[0, main].view(*main.shape, 2, 4).view(torch.int32).long()
    if extra is not None:
        sums = (
            sums + packed(books.residual)[0, extra].view(*main.shape, 2, 4).view(torch.int32).long()
        )
    # as the kernel adds them up
    octets = torch.stack([sums >> 8 * i & 0xFF for i in range(4)], -1).flatten(-3)
    meant = entries((books.main * books.step + books.least), main)
    if extra is not None:
        meant = meant + entries(books.residual * books.step, extra)
    torch.testing.assert_close(
        octets * books.step[0, 0] + books.least[0, 0], meant, rtol=1e-4, atol=1e-6
    )
    loss = (
        tensor.in_bytes().dequantize() - tensor.dequantize()
    ).norm() / tensor.dequantize().norm()
    assert loss < 0.02


CASES = {
    "q, k and v": dict(shapes=[(72, 512), (24, 512), (600, 512)], **BOOKS),
    "ragged": dict(shapes=[(21, 190), (300, 190)], main=300, residual=200),
    "no residual, plain columns": dict(
        shapes=[(40, 256)], main=256, residual=None, normalize=False
    ),
    "permuted": dict(shapes=[(40, 700)], permute=True, **BOOKS),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_one_row_two_rows_and_many_multiply_the_same_weight(case):
    options = dict(case)
    tensors, weight = make(*options.pop("shapes"), **options)
    for rows in (1, 2, 5):  # in bytes, in bytes, by warpgroup products
        x = torch.randn(rows, tensors[0].in_features).bfloat16()
        out = torch.full((rows, weight.out_features), float("nan")).bfloat16()
        assert error(weight.project(x, out), reference(tensors, x)) < (5e-3 if rows < 3 else 1e-2)
    out = torch.full((20, weight.out_features), float("nan")).bfloat16()
    x = torch.randn(20, tensors[0].in_features).bfloat16()
    decode.multiply(weight.parts, x, out)
    assert error(out, reference(tensors, x)) < 1e-2


def test_small_multiprocessors_hold_fewer_copies_of_the_residual_book():
    books = dict(main=8192, residual=256)
    large, small = (
        gather_plan.choose(make((1024, 4096), **books)[1].parts, 1, gpu.GPUS[name], plain=False)
        for name in ("sm_90a", "sm_89")  # 227 and 99 KB
    )
    assert (
        large.launch.kernel == small.launch.kernel == "bytes"
        and large.launch.copies == 16 > small.launch.copies
    )


@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.bfloat16), (2, torch.float16)])
def test_norm_bias_and_residual_are_fused(rows, dtype):
    bias = torch.randn(88).to(dtype)
    tensors, weight = make((64, 300), (24, 300), permute=True, bias=bias, dtype=dtype, **BOOKS)
    x, norm = torch.randn(rows, 300).to(dtype), (1 + 0.1 * torch.randn(300)).to(dtype)
    residual = torch.randn(rows, 88).to(dtype)
    normed = (
        x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * norm.double()
    )
    want = (
        torch.cat([normed @ tensor.dequantize(torch.float64).T for tensor in tensors], -1)
        + bias.double()
        + residual.double()
    )
    assert (
        error(weight.project(x, residual.clone(), norm=Norm(norm, 1e-6), residual=residual), want)
        < 5e-3
    )


@pytest.mark.parametrize("columns", [512, 4608])
def test_gate_and_up_are_multiplied_where_x_is_read(columns):
    tensors, weight = make((64, columns), **BOOKS)
    gate, up = torch.randn(2, 1, columns).bfloat16()
    x, residual = torch.cat([gate, up], -1), torch.randn(1, 64).bfloat16()
    want = ops.gate(x.double(), "silu") @ tensors[0].dequantize(torch.float64).T + residual.double()
    assert error(weight.multiply(x, residual, Ends(gated="silu", residual=residual)), want) < 5e-3


def test_every_launch_and_the_other_kernels_read_items_of_this_kind(monkeypatch):
    tensors, weight = make((136, 512), **BOOKS)
    x = torch.randn(1, 512).bfloat16()
    launches = [
        gather_plan.Launch("bytes", warps=8, copies=2),
        gather_plan.Launch("staged"),
        gather_plan.Launch("direct", warps=2),
    ]
    for launch in launches:
        out = torch.full((1, 136), float("nan")).bfloat16()
        assert error(weight(x, out, launch=launch), reference(tensors, x)) < 1e-2, launch
    # no warpgroup products
    monkeypatch.setattr(gpu, "of", lambda _: dataclasses.replace(host_cuda.HOST, major=8))
    x = torch.randn(6, 512).bfloat16()
    assert (
        error(weight(x, torch.full((6, 136), float("nan")).bfloat16()), reference(tensors, x))
        < 1e-2
    )


def test_an_outlier_of_x_and_a_row_of_zeros_are_no_trouble():
    tensors, weight = make((72, 512), **BOOKS)
    x = torch.randn(2, 512).bfloat16()
    x[0, 7] = 2000
    x[1] = 0
    out = weight.project(x, torch.full((2, 72), float("nan")).bfloat16())
    assert error(out[:1], reference(tensors, x[:1])) < 5e-3
    assert torch.equal(out[1], torch.zeros(72).bfloat16())


def test_what_the_kernel_cannot_hold_keeps_its_codebooks():
    assert takes_byte_books(VectorQuant.random((16, 256)))
    for options in (
        dict(outliers=16),
        dict(main=16384),
        dict(residual=512),
        dict(groups=2, main=64),
        dict(length=4, main=256),
    ):
        assert not takes_byte_books(VectorQuant.random((16, 256), **options)), options
