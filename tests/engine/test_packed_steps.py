"""Which kernels a layer launches, and what they hand to each other, where x is packed ahead: no GPU needed."""

from types import SimpleNamespace

import pytest
import torch

from flyweight.batch import KVStorage
from flyweight.engine.graphs import Activations, Step, rope_pairs
from flyweight.engine.rows import Rows
from flyweight.kernels import choices, dispatch, gemm, gemv, jit
from flyweight.kernels.cuda_linear import CudaLinear
from flyweight.models.decoder import Decoder
from flyweight.models.presets import PRESETS, PresetWeights

CPU = torch.device("cpu")


@pytest.fixture
def launches(monkeypatch):
    """(name, arguments) of every launch, on what says it is a Hopper GPU. Nothing is computed."""
    found = []
    monkeypatch.setattr(jit, "load", lambda file, **options: SimpleNamespace(kernel=lambda name: SimpleNamespace(
        launch=lambda grid, block, args, **more: found.append((name, args)))))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(dispatch, "prepare", lambda tensor, *, dtype, bias, gated, **options: SimpleNamespace(
        run=CudaLinear(tensor, dtype=dtype, bias=bias, gated=gated), adds_bias=True, kernel="", nbytes=0))
    caches = (gemv.processors, gemm.kernels, gemm._why_not)
    for cache in caches:
        cache.cache_clear()
    yield found
    for cache in caches:
        cache.cache_clear()


def decoder_of(scheme):
    config = PRESETS["tiny"] | dict(hidden_size=512, intermediate_size=1024, head_dim=128)
    return Decoder.load(PresetWeights(config, scheme, device=CPU), device=CPU, dtype=torch.bfloat16)


PACK, PRODUCT = ["pack", "gemm"], ["gemm"]


@pytest.mark.parametrize(("scheme", "ahead", "o", "down"), [("bf16", True, PRODUCT, PRODUCT), ("bf16", False, PACK, PACK),
                                                            ("int4", True, PRODUCT, PRODUCT), ("w8a8", True, PACK, PACK)])
def test_a_step_of_64_rows_packs_what_no_kernel_before_has_packed(launches, monkeypatch, scheme, ahead, o, down):
    monkeypatch.setattr(choices, "PACKED_AHEAD", ahead)
    decoder = decoder_of(scheme)
    config = decoder.config
    caches = [KVStorage(*torch.zeros(2, 8, 16, config.kv_heads, config.head_dim).bfloat16()) for _ in range(config.layers)]
    rows = Rows(64, pages=2, vocabulary=config.vocab_size, device=CPU)
    Step(decoder, caches, rows, size=64, rope=rope_pairs(*decoder.tables), activations=Activations(decoder, 64)).launch()
    layer = [*PACK, "attention", *o, *PACK, *down]
    assert [name for name, _ in launches] == ["embed", *layer * config.layers, *PACK]
    if ahead and scheme != "w8a8":
        attention, product, _, gate_up, last = (args for _, args in launches[3:8])
        assert attention[8] is product[3] and attention[-1] == 64 // 8, "attention writes what o reads"
        assert gate_up[7] is last[3] and gate_up[3] is not last[3], "gate/up writes what down reads, and reads something else"


def test_a_prefill_packs_ahead_what_down_reads(launches, monkeypatch):
    monkeypatch.setattr(choices, "PACKED_AHEAD", True)
    decoder, hidden = decoder_of("bf16"), torch.zeros(300, 512).bfloat16()
    block = decoder.blocks[0]
    monkeypatch.setattr(block, "attend", lambda qkv, context: torch.zeros(300, 4 * 128).bfloat16())
    block.fused(hidden, None)
    assert [name for name, _ in launches] == [*PACK, *PACK, *PACK, *PRODUCT]
