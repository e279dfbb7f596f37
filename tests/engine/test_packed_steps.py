"""Which kernels a layer launches, and what they hand to each other, where x is packed ahead: no GPU
needed.
"""

from types import SimpleNamespace

import pytest
import torch
from tuning import retune

from flyweight import gpu
from flyweight.batch import KVStorage
from flyweight.gpu import GPUS
from flyweight.kernels import dispatch, jit, reference
from flyweight.kernels.linear.tiled import TiledLinear
from flyweight.models.attention import PromptStage
from flyweight.models.buffers import Buffers, StepRows
from flyweight.models.decode_step import DecodeStep, pairs_of
from flyweight.models.decoder import Decoder
from flyweight.models.presets import PRESETS, PresetWeights

CPU = torch.device("cpu")
PAGES = 2


def tiled(tensor, *, dtype, bias=None, activation=None, **options):
    return TiledLinear(tensor, dtype=dtype, ops=reference, bias=bias, activation=activation)


@pytest.fixture
def launches(monkeypatch):
    """(name, arguments) of every launch, on what says it is a Hopper GPU. Nothing is computed."""
    found = []
    monkeypatch.setattr(
        jit,
        "load",
        lambda file, **options: SimpleNamespace(
            kernel=lambda name: SimpleNamespace(
                launch=lambda grid, block, args, **more: found.append((name, args))
            )
        ),
    )
    monkeypatch.setattr(gpu, "of", lambda device: GPUS["sm_90a"])
    monkeypatch.setattr(dispatch, "prepare", tiled)
    return found


def decoder_of(scheme):
    config = PRESETS["tiny"] | dict(hidden_size=512, intermediate_size=1024, head_dim=128)
    return Decoder.load(PresetWeights(config, scheme, device=CPU), device=CPU, dtype=torch.bfloat16)


def step_of(decoder, rows):
    config = decoder.config
    caches = [
        KVStorage(*torch.zeros(2, 8, 16, config.kv_heads, config.head_dim).bfloat16())
        for _ in range(config.layers)
    ]
    lengths = torch.ones(rows, dtype=torch.int32)
    places = StepRows(
        torch.zeros(rows, dtype=torch.int64), lengths, torch.zeros(rows, PAGES, dtype=torch.int32)
    )
    buffers = Buffers(rows, dtype=decoder.dtype, device=CPU)
    return DecodeStep(decoder, caches, places, buffers, pairs=pairs_of(decoder))


PACK, PRODUCT = ["pack", "gemm"], ["gemm"]


@pytest.mark.parametrize(
    ("scheme", "ahead", "o", "down"),
    [
        ("bf16", True, PRODUCT, PRODUCT),
        ("bf16", False, PACK, PACK),
        ("int4", True, PRODUCT, PRODUCT),
        ("w8a8", True, PACK, PACK),
    ],
)
def test_a_step_of_64_rows_packs_what_no_kernel_before_has_packed(
    launches, monkeypatch, scheme, ahead, o, down
):
    retune(monkeypatch, packed_ahead=ahead)
    decoder = decoder_of(scheme)
    step_of(decoder, 64).launch()
    layer = [*PACK, "attention", *o, *PACK, *down]
    assert [name for name, _ in launches] == ["embed", *layer * decoder.config.layers, *PACK]
    if ahead and scheme != "w8a8":
        attention, product, _, gate_up, last = (args for _, args in launches[3:8])
        assert attention[8] is product[3] and attention[-1] == 64 // 8, (
            "attention writes what o reads"
        )
        assert gate_up[7] is last[3] and gate_up[3] is not last[3], (
            "gate/up writes what down reads, and reads something else"
        )


class Nothing(PromptStage):
    """Attention that is left out."""

    def __init__(self, rows, width):
        self.attended = torch.zeros(rows, width).bfloat16()

    def mix(self, block, qkv):
        return self.attended


def test_a_prefill_packs_ahead_what_down_reads(launches, monkeypatch):
    retune(monkeypatch, packed_ahead=True)
    decoder, hidden = decoder_of("bf16"), torch.zeros(300, 512).bfloat16()
    decoder.blocks[0].run(hidden, Nothing(300, 4 * 128))
    assert [name for name, _ in launches] == [*PACK, *PACK, *PACK, *PRODUCT]
