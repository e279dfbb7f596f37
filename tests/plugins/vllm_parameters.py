"""Parameters as vLLM holds them when it hands a layer to a kernel, made from a weight of ours."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from flyweight.packing import pack
from flyweight.tensors import IntGroup


def parameter(data, **dims):
    return SimpleNamespace(data=data.contiguous(), **dims)


def packed_zeros(weight: IntGroup):
    """[out / 8, groups] words along the outputs, or None."""
    if weight.zeros is None:
        return None
    return pack(weight.zeros.t().to(torch.int64), weight.bits).t()


def inputs_first(weight: IntGroup):
    """GPTQ's, and AWQ's once vLLM has turned its words round: codes and scales [in, out], zero
    points [out, groups].
    """
    zeros = packed_zeros(weight)
    return (
        parameter(weight.codes.t(), input_dim=0, output_dim=1, packed_dim=0),
        parameter(weight.scales.t(), input_dim=0, output_dim=1),
        zeros if zeros is None else parameter(zeros, input_dim=1, output_dim=0, packed_dim=0),
    )


def outputs_first(weight: IntGroup):
    """Those of compressed-tensors: everything [out, in]."""
    zeros = packed_zeros(weight)
    return (
        parameter(weight.codes, input_dim=1, output_dim=0, packed_dim=1),
        parameter(weight.scales, input_dim=1, output_dim=0),
        zeros if zeros is None else parameter(zeros, input_dim=1, output_dim=0, packed_dim=0),
    )


LAYOUTS = {"gptq and awq": inputs_first, "compressed-tensors": outputs_first}


def assert_near(found, expected):
    """By the size of all results: on some CPUs torch's op for 4 bits rounds x to bfloat16."""
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < 1e-2, f"relative error {error:.2e}"
