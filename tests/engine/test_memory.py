"""The memory budget: what is counted, what is measured, what is left for the KV cache."""

import pytest
import torch
from tiny_configs import LLAMA

from flyweight import LLM
from flyweight.batch import KVStorage
from flyweight.engine import memory
from flyweight.engine.memory import CacheShape, Memory, count_blocks, dummy_batch
from flyweight.errors import ResourceError
from flyweight.models.decoder import Decoder
from flyweight.models.presets import PRESETS, PresetWeights

SHAPE = CacheShape(layers=2, kv_heads=2, head_dim=8, dtype=torch.float32)


def test_a_model_says_where_its_memory_goes(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", LLAMA)
    found = LLM("preset:tiny:fp32", blocks=64, block_size=4, native=False).memory()
    layer = (32 + 32) * 32 + 32 * 32 + 3 * 48 * 32
    assert found == Memory(
        weights=4 * (60 * 32 + 2 * layer),
        workspace=0,
        graphs=0,
        kv=256 * SHAPE.token_bytes,
        kv_tokens=256,
    )
    assert str(found) == "weights 0.07 MB, KV cache 0.07 MB for 256 tokens"
    assert str(Memory(5_520_000_000, 10**9, 3 * 10**8, 11 * 10**10, 745_654)) == (
        "weights 5.52 GB, graphs 0.30 GB, workspace 1.00 GB, KV cache 110.00 GB for 745,654 tokens"
    )


@pytest.mark.parametrize(("tokens", "context"), [(40, 64), (64, 64), (100, 32)])
def test_the_measured_pass_is_one_that_the_decoder_can_run(tokens, context):
    decoder = Decoder.load(PresetWeights(LLAMA, "fp32"), device="cpu", dtype=torch.float32)
    batch = dummy_batch(
        tokens, context=min(context, tokens), block_size=16, device=torch.device("cpu")
    )
    assert (
        len(batch.tokens) == batch.query_starts[-1] == tokens and max(batch.kv_lengths) <= context
    )
    cache = KVStorage(*(torch.zeros(4, 16, 2, 8) for _ in range(2)))
    assert decoder.forward(batch, [cache] * 2).shape == (len(batch.kv_lengths), 60)


def test_the_cache_gets_what_the_fraction_leaves_but_no_more_than_all_sequences_can_use(
    monkeypatch,
):
    monkeypatch.setattr(memory, "available_memory", lambda: 1000 * 16 * SHAPE.token_bytes)
    options = dict(block_size=16, device=torch.device("cpu"), context=160)
    assert count_blocks(SHAPE, **options, sequences=1000, memory_fraction=0.5) == 500
    assert count_blocks(SHAPE, **options, sequences=3, memory_fraction=0.5) == 30
    with pytest.raises(ResourceError, match="enough for 144 tokens; lower max_model_len"):
        count_blocks(SHAPE, **options, sequences=3, memory_fraction=0.0095)


def test_on_a_gpu_workspace_and_graphs_are_taken_off_first(monkeypatch):
    block = 16 * SHAPE.token_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (800 * block, 1000 * block))
    options = dict(
        block_size=16, device=torch.device("cuda"), context=160, sequences=1000, memory_fraction=0.9
    )
    assert count_blocks(SHAPE, **options) == pytest.approx(700, abs=1)
    assert count_blocks(SHAPE, **options, reserved=(50 * block, 30 * block)) == pytest.approx(
        620, abs=1
    )
