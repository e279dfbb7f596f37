"""What the stand-in for a GPU finds: an address that is not aligned, and that every thread runs."""

import host_cuda
import pytest
import torch

from flyweight.kernels import compiler

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no g++ for this machine")

KERNEL = """
#include "common.cuh"
extern "C" __global__ void number(u32* out) {
  u32 most = __reduce_max_sync(~0u, threadIdx.x);
  out[blockIdx.x * blockDim.x + threadIdx.x] = blockIdx.x << 8 | most;
}
extern "C" __global__ void read_two(const u16* in, u32* out, int at) {
  if (threadIdx.x == 0) *out = *(const u32*)(in + at);
}
"""


@pytest.fixture
def load(tmp_path, folder, monkeypatch):
    (tmp_path / "rope.cu").write_text(KERNEL)  # of the files whose addresses are checked
    monkeypatch.setattr(compiler, "SOURCES", tmp_path)
    return lambda name: host_cuda.Host(folder).load("rope.cu").kernel(name)


def test_all_threads_of_all_blocks_run_together(load):
    out = torch.zeros(2 * 64, dtype=torch.int32)
    load("number").launch(2, 64, (out,))
    warps = [31, 63, 256 + 31, 256 + 63]
    assert out.view(4, 32).tolist() == [[one] * 32 for one in warps]


def test_an_address_that_is_not_aligned_is_named_by_its_line(load):
    values, out = torch.tensor([1, 0, 2, 0], dtype=torch.int16), torch.zeros(1, dtype=torch.int32)
    kernel = load("read_two")
    kernel.launch(1, 32, (values, out, 2))
    assert out.item() == 2
    with pytest.raises(AssertionError, match=r"misaligned address: .*in \+ at"):
        kernel.launch(1, 32, (values, out, 1))
