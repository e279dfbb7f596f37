"""The VPTQ kernels against the float64 reference on fresh random weights, every output poisoned before."""

import math

import pytest
import torch

from flyweight.kernels import vptq
from flyweight.tensors import VectorQuant

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
BOOKS = [(4096, 256), (8192, 256), (4096, 512), (8192, 512), (256, None), (1024, 256)]
CASES = {
    "ragged": dict(shape=(1000, 576)),
    "ragged, many rows": dict(shape=(11008, 1536)),
    "ragged, wide": dict(shape=(192, 7392)),
    "outliers and permutation": dict(shape=(1000, 1600), outliers=64, permute=True),
    "vectors of 4": dict(shape=(1000, 1536), length=4, main=4096),
    "vectors of 16": dict(shape=(1008, 1536), length=16, main=4096, outliers=32, outlier_length=8),
    "vectors of 12, plain columns": dict(shape=(600, 1024), length=12, main=256, residual=None, normalize=False),
    "odd centroid counts": dict(shape=(512, 1024), main=3000, residual=200),
    "large codebook": dict(shape=(4096, 4096), main=65536),
    "large codebook, outliers, permutation": dict(shape=(1000, 2048), main=65536, residual=None, outliers=48, permute=True),
    "groups": dict(shape=(1024, 1536), groups=3, main=1024),
}


def product(weight, tensor, rows, launch=None, pdl=False):
    x = torch.randn(rows, tensor.in_features, device="cuda").to(weight.dtype)
    out = torch.full((rows, tensor.out_features), math.nan, device="cuda", dtype=weight.dtype)
    weight(x, out, launch=launch, pdl=pdl)
    expected = tensor.matmul_reference(x)
    return ((out.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_matches_the_reference(case, dtype):
    options = dict(case)
    tensor = VectorQuant.random(options.pop("shape"), seed=5, device="cuda", dtype=dtype, **options)
    weight = vptq.prepare(tensor, dtype=dtype)
    for rows in (1, 3) if dtype == torch.bfloat16 else (1,):
        assert product(weight, tensor, rows) < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 2, 4, 7, 16])
def test_rows(rows):
    tensor = VectorQuant.random((4096, 4096), seed=rows, device="cuda")
    assert product(vptq.prepare(tensor, dtype=torch.bfloat16), tensor, rows) < 1e-2


LAUNCHES = [vptq.Launch("staged"), vptq.Launch("staged", warps=16), vptq.Launch("staged", cluster=2),
            vptq.Launch("staged", cluster=4, processors=128), vptq.Launch("staged", cluster=2, split=True),
            vptq.Launch("staged", cluster=4, split=True, processors=128), vptq.Launch("staged", copies=2),
            vptq.Launch("direct", warps=4), vptq.Launch("direct", warps=16)]


@pytest.mark.parametrize("main, residual", BOOKS)
def test_every_launch_gives_the_same_weight(main, residual):
    tensor = VectorQuant.random((1544, 2048), seed=main, device="cuda", main=main, residual=residual)
    weight = vptq.prepare(tensor, dtype=torch.bfloat16)
    launches = LAUNCHES if (main, residual) == (8192, 256) else LAUNCHES[::3]
    for launch in launches:
        if launch.cluster > 1 and torch.cuda.get_device_capability() < (9, 0):
            continue
        assert product(weight, tensor, 1, launch) < 1e-2, launch


@pytest.mark.parametrize("shape, main", [((1024, 1024), 8192), ((4096, 4096), 8192), ((4096, 4096), 65536)])
def test_replays_of_a_dependent_chain_agree_bit_for_bit(shape, main):
    """y of one launch is the x of the next; with and without dependent launch, 200 poisoned replays."""
    tensor = VectorQuant.random(shape, seed=1, device="cuda", main=main)
    weight = vptq.prepare(tensor, dtype=torch.bfloat16)
    states = torch.zeros(5, 1, shape[0], device="cuda", dtype=torch.bfloat16)
    states[0].normal_()
    results = []
    for pdl in (False, True):
        weight(states[0], states[1], pdl=pdl)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            states[1:].fill_(math.nan)
            for i in range(4):
                weight(states[i], states[i + 1], pdl=pdl)
        for _ in range(200):
            graph.replay()
            results.append(states[1:].clone())
    assert all(torch.equal(result, results[0]) for result in results)
    assert not results[0].isnan().any()
