"""`flyweight bench kernel` on a GPU: graph replay of every format, the chain, attention, and
torch's own kernels."""

import pytest
import torch

from flyweight import gpu
from flyweight.bench import attention, chain, kernels
from flyweight.bench.kernels import FORMATS, Case, measure_case

pytestmark = pytest.mark.gpu
BF16 = 1e-2


def case(format, **options):
    given = (
        dict(rows=1, in_features=1024, out_features=768, dtype=torch.bfloat16, books=(4096, 256))
        | options
    )
    return Case(format, **given)


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_timed_cold_and_hot_and_is_right(format, rows):
    row = next(
        measure_case(
            case(format, rows=rows),
            device=torch.device("cuda"),
            peers=[],
            samples=10,
            bandwidth=4000.0,
        )
    )
    # without float8 products x stays in 16 bits, and the format's own rounding of it is missing
    narrow = format != "fp8" or gpu.of(0).has_float8
    assert row["relative_error"] <= (BF16 if narrow else row["error_bound"])
    assert row["us_hot"] > 0 and row["host_us"] > 0
    assert 0 < row["us_p10"] <= row["us"] <= row["us_p90"]
    assert (row["us_alone"] is not None) == gpu.of(0).has_dependent_launch


@pytest.mark.parametrize(
    ("format", "peer"),
    [
        ("w4a16", "torch._weight_int4pack_mm"),
        ("w8a8", "torch._int_mm"),
        ("fp8", "torch._scaled_mm"),
        ("w8a8-2:4", "cusparselt"),
    ],
)
def test_a_peer_of_torch_runs_or_says_why_not(format, peer):
    rows = list(
        measure_case(
            case(format, rows=32),
            device=torch.device("cuda"),
            peers=[peer],
            samples=1,
            bandwidth=4000.0,
        )
    )
    assert rows[1]["kernel"] == peer
    assert (
        rows[1]["reason"] if rows[1]["status"] == "skipped" else rows[1]["relative_error"] <= BF16
    )


def test_copies_lie_in_memory_of_their_own():
    tensor = FORMATS["vptq"](case("vptq"), (768, 1024), torch.device("cuda"))
    one = kernels.find_candidates(case("vptq"), tensor, [])[0][0]
    x = torch.randn(1, 1024, device="cuda").bfloat16()
    again = one.again()
    mine, other = (
        {t.data_ptr() for t in kernels.tensors_of(run) if t.numel() > 1} for run in (one.run, again)
    )
    assert mine and not mine & other and torch.equal(one.run(x), again(x))


@pytest.mark.parametrize("format", ["bf16", "w4a16", "w8a16", "w8a8", "vptq"])
def test_a_dependent_chain_is_close_to_float64(format):
    row = next(
        chain.measure_chain(
            "qwen3-0.6b", case(format), device=torch.device("cuda"), samples=3, bandwidth=4000.0
        )
    )
    assert row["relative_error"] <= 3 * BF16 and row["torch_us"] > 0


@pytest.mark.parametrize("batch", [1, 16])
def test_decode_attention_is_close_to_float64(batch):
    row = next(
        attention.measure_attention(
            "qwen3-8b",
            batch=batch,
            context=2048,
            dtype=torch.bfloat16,
            samples=3,
            device=torch.device("cuda"),
            bandwidth=4000.0,
        )
    )
    assert row["relative_error"] <= BF16 and row["gb_s"] > 0
