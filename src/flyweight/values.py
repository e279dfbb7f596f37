"""Questions about the values of a tensor, for code that may also run on tensors without any.

Torch's fake and meta tensors have a shape, a type and a device but no bytes; a dry run (`gpu.py`)
is made of them. A choice that depends on values says here what is taken for granted where there are
none.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor


def has_values(tensor: Tensor) -> bool:
    fake = sys.modules.get("torch._subclasses.fake_tensor")  # not imported: nobody has made one
    return not tensor.is_meta and (fake is None or not isinstance(tensor, fake.FakeTensor))


def same(one: Tensor, other: Tensor) -> bool:
    """torch.equal, taken for granted where there are no values."""
    return not has_values(one) or torch.equal(one, other)


def known(value: Tensor, otherwise: bool) -> bool:
    """bool(value), or `otherwise` where there are no values."""
    return bool(value) if has_values(value) else otherwise
