"""Fused decode steps in CUDA graphs against the same model in float32, token by token."""

import pytest
import torch
from tuning import retune

from flyweight import gpu
from flyweight.batch import Batch, KVStorage
from flyweight.engine.graphs import DecodeGraphs, unsupported_reason
from flyweight.engine.rows import Rows
from flyweight.models.decoder import Decoder
from flyweight.models.presets import PresetWeights

pytestmark = pytest.mark.gpu
PAGE = 16
# Relative error of the logits: W8A8 rounds activations at other places than the float32 run does
BOUND = {"bf16": 0.03, "int4": 0.03, "w8a16": 0.03, "w8a8": 0.1}


def whole_batch(tokens, table):
    positions = torch.arange(len(tokens), device="cuda")
    return Batch(
        tokens=tokens,
        positions=positions,
        slots=table.long()[positions // PAGE] * PAGE + positions % PAGE,
        block_tables=table[None],
        query_starts=[0, len(tokens)],
        kv_lengths=[len(tokens)],
        output_rows=positions,
    )


@pytest.mark.parametrize("separate", [None, "asked for"])
@pytest.mark.parametrize("scheme", BOUND)
@pytest.mark.parametrize(
    ("preset", "dtype"),
    [
        ("smollm2-135m", torch.float16),
        ("qwen3-0.6b", torch.bfloat16),
        ("qwen2-0.5b", torch.bfloat16),
    ],
)
def test_fused_decode_follows_the_float32_model(preset, dtype, scheme, separate):
    device = torch.device("cuda", 0)
    tokens = torch.randint(
        10, 1000, (90,), device=device, generator=torch.Generator(device).manual_seed(1)
    )
    reference = Decoder.load(
        PresetWeights(preset, scheme, device=device), device=device, dtype=torch.float32, exact=True
    )
    want = reference.forward_whole(tokens[None])[0]
    decoder = Decoder.load(PresetWeights(preset, scheme, device=device), device=device, dtype=dtype)
    assert unsupported_reason(decoder, PAGE) is None
    config = decoder.config
    caches = [
        KVStorage(
            *(
                torch.zeros(64, PAGE, config.kv_heads, config.head_dim, dtype=dtype, device=device)
                for _ in range(2)
            )
        )
        for _ in range(config.layers)
    ]
    rows = Rows(2, pages=8, vocabulary=config.vocab_size, device=device)
    graphs = DecodeGraphs(decoder, caches, rows, separate=separate)
    table = torch.randperm(64, device=device)[:8].int()
    got = [decoder.forward(whole_batch(tokens[:66], table), caches)]
    rows.tables[:] = table
    for i in range(66, 90):  # alone, then beside a row that nobody uses
        rows.tokens[0], rows.lengths[0] = tokens[i], i + 1
        got.append(graphs.logits(1 + i % 2)[:1].float())
    if gpu.of(0).has_warpgroups:  # elsewhere shared memory may not do for one kernel
        assert all(step.decode.separate == separate for step in graphs.steps.values())
    error = (torch.cat(got) - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.max() < BOUND[scheme]


@pytest.mark.parametrize("scheme", ["bf16", "int4", "w8a16", "w8a8", "vptq"])
def test_x_that_is_packed_ahead_changes_no_bit(scheme, monkeypatch):
    """Of a prefill, and of steps of 20 and 64 rows, of which some are not in use. VPTQ's biases are
    summed in another order.
    """
    device = torch.device("cuda", 0)
    decoder = Decoder.load(
        PresetWeights("qwen3-0.6b", scheme, device=device), device=device, dtype=torch.bfloat16
    )
    config, results = decoder.config, []
    tokens = torch.randint(
        10, 1000, (300,), device=device, generator=torch.Generator(device).manual_seed(1)
    )
    tables = torch.arange(64 * 2, device=device).view(64, 2).int()
    for ahead in (False, True):
        retune(monkeypatch, packed_ahead=ahead)
        caches = [
            KVStorage(
                *(
                    torch.zeros(
                        128,
                        PAGE,
                        config.kv_heads,
                        config.head_dim,
                        dtype=torch.bfloat16,
                        device=device,
                    )
                    for _ in range(2)
                )
            )
            for _ in range(config.layers)
        ]
        found = [
            decoder.forward(
                whole_batch(tokens, torch.arange(100, 119, device=device).int()), caches
            )
        ]
        rows = Rows(64, pages=2, vocabulary=config.vocab_size, device=device)
        graphs = DecodeGraphs(decoder, caches, rows)
        rows.tables[:64] = tables
        for count in (20, 64):
            for step in range(20):
                rows.tokens[:count], rows.lengths[:count] = tokens[step : step + count], step + 1
                rows.lengths[7] = 0
                used = torch.arange(count, device=device) != 7
                found.append(graphs.logits(count)[used].clone())
        results.append(found)
    for want, got in zip(*results, strict=True):
        if scheme == "vptq":
            assert (got.float() - want.float()).norm() / want.float().norm() < 0.03
        else:
            assert torch.equal(got, want)
