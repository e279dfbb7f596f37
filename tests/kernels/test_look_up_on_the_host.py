"""Rows of a head's tiles, as an embedding that is tied to it looks them up: the kernel's own
source, run on the CPU.
"""

import host_cuda
import pytest
import torch
from test_kernels_on_the_host import host, linear_of, make  # noqa: F401 (fixtures)

from flyweight import gpu
from flyweight.kernels.dry_run import DEVICE, dry_run
from flyweight.models.layers import Embedding, Linear
from flyweight.tensors import IntBlock, Plain, merge

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")


@pytest.mark.parametrize("weight", ["int8:64", "int8:32", "int4:64"])
def test_rows_are_those_of_the_weight(weight):
    tensor = make(weight, (90, 320), 1)
    linear = linear_of(tensor)
    assert linear.looks_up
    rows = torch.tensor([0, 7, 8, 15, 16, 63, 89, 7])
    out = torch.empty(len(rows), 320, dtype=torch.bfloat16)
    linear.look_up(rows, out)
    assert torch.equal(out, tensor.dequantize()[rows].bfloat16())


@pytest.mark.parametrize(("bits", "mins", "blocks"), [(5, False, 1), (4, True, 8), (6, False, 4)])
def test_rows_of_a_gguf_file_are_those_of_the_weight(bits, mins, blocks):
    options = dict(bits=bits, group_size=32, mins=mins, groups_of_block=blocks)
    tensor = IntBlock.random((90, 512), 1, **options)
    linear = linear_of(tensor)
    assert linear.looks_up
    rows = torch.tensor([0, 7, 8, 15, 16, 63, 89, 7])
    out = torch.empty(len(rows), 512, dtype=torch.bfloat16)
    linear.look_up(rows, out)
    assert torch.equal(out, tensor.dequantize()[rows].bfloat16())


def test_a_table_of_its_own_keeps_its_bits_and_has_a_kernel():
    with dry_run(gpu.GPUS["sm_90a"]):
        tensor = IntBlock.random((96, 512), 1, bits=5, group_size=32, mins=False).to(DEVICE)
        table = Embedding(tensor, dtype=torch.bfloat16)
        plain = Embedding(Plain.random((96, 512), 1).to(DEVICE), dtype=torch.bfloat16)
    assert table.table is not None and table.weight is None
    assert table.nbytes == tensor.nbytes
    assert plain.table is None


def test_an_embedding_shares_the_table_of_its_head():
    tensor = make("int8:64", (96, 320), 1)
    head = Linear.__new__(Linear)
    head.fused = linear_of(tensor)
    shared = Embedding(tensor, 2.0, dtype=torch.bfloat16, head=head)
    own = Embedding(tensor, 2.0, dtype=torch.bfloat16)
    tokens = torch.tensor([[3, 95], [0, 17]])
    assert shared.nbytes == 0 and own.nbytes == merge([tensor])[0].nbytes
    assert torch.equal(shared(tokens), own(tokens))
    out = torch.empty(4, 320, dtype=torch.bfloat16)
    shared.write(tokens.flatten(), out)
    assert torch.equal(out.view(2, 2, -1), own(tokens))


def test_weights_of_other_formats_are_not_looked_up_in():
    assert not linear_of(make("plain", (40, 320))).looks_up
