"""What test_every_gpu.py runs in processes of its own: a process that has pretended a GPU is good
for nothing else.
"""

from dataclasses import dataclass

import torch

from flyweight.engine import ahead
from flyweight.engine.graphs import DecodeGraphs, unsupported_reason
from flyweight.engine.rows import SIZES, Rows
from flyweight.kernels import jit
from flyweight.kernels.attention import prefill, rope
from flyweight.kernels.dry_run import DEVICE, dry_run
from flyweight.kernels.linear.tiles import ACTIVATIONS
from flyweight.kernels.vptq import decode
from flyweight.models.decoder import Decoder
from flyweight.models.presets import PresetWeights, preset_config

MOST_ROWS = 64  # of a captured step
PASSES = (3, 40, 300, 2048)  # tokens


@dataclass(frozen=True)
class Launch:
    """What a kernel asks of a GPU, and where."""

    file: str
    threads: int
    shared: int
    cluster: int
    blocks: int
    place: str


class Recorded:
    """A module and a kernel of it that write their launches down."""

    def __init__(self, file, launches, place, defines=()):
        self.file, self.launches, self.place = file, launches, place
        if file == "gemm.cu" and "PACKED" in defines:  # what static_asserts of the kernel ask for
            assert defines["EPILOGUE"] in ACTIVATIONS.values(), place()
            assert defines["NDIM"] // 2 % (64 * defines["PACKED"]) == 0, place()

    def kernel(self, name):
        return self

    def launch(self, grid, block, args, *, shared=0, pdl=False, cluster=None):
        sizes = (grid,) if isinstance(grid, int) else grid
        blocks = 1
        for size in sizes:
            blocks *= size
        self.launches.add(Launch(self.file, block, shared, cluster or 1, blocks, self.place()))


def launches_on(gpu, models):
    """All launches of decode steps and passes of preset:scheme pairs on a GPU, and steps that are
    not captured.
    """
    found, uncaptured, here = set(), {}, ["loading"]
    record(found, here)
    with dry_run(gpu):
        for model in models:
            decoder = ahead.load(f"preset:{model}", None)
            reason = unsupported_reason(decoder, ahead.PAGE)
            if reason is None:
                for size in run_steps(decoder):
                    here[0] = f"{model}, a step of {size}"
            else:
                uncaptured[model] = reason
            for tokens in PASSES:
                here[0] = f"{model}, a pass of {tokens}"
                ahead.run_pass(decoder, tokens)
    return found, uncaptured


def families_on(gpu, models):
    """The same of a few sizes, with few experts."""
    found, uncaptured, here = set(), {}, ["loading"]
    record(found, here)
    with dry_run(gpu):
        for model in models:
            preset, scheme = model.split(":")
            config = preset_config(preset)
            config |= {
                key: min(16, config[key])
                for key in ("num_local_experts", "n_routed_experts", "num_experts")
                if key in config
            }
            weights = PresetWeights(config, scheme)
            decoder = Decoder.load(
                weights, device=DEVICE, dtype=torch.bfloat16, layers=ahead.layers_of(weights)
            )
            reason = unsupported_reason(decoder, ahead.PAGE)
            if reason is not None:
                uncaptured[model] = reason
                continue
            for size in run_steps(decoder, (1, 8, 64)):
                here[0] = f"{model}, a step of {size}"
            here[0] = f"{model}, a pass"
            ahead.run_pass(decoder, 300)
    return found, uncaptured


def record(found, here):
    jit.load = lambda file, **options: Recorded(
        file, found, lambda: here[0], options.get("defines", ())
    )
    for module in (prefill, rope, decode):  # which keep the kernels of other runs
        module._kernel.cache_clear()


def run_steps(decoder, sizes=None):
    """Every size that is captured, or some; each is told before it runs."""
    kinds, decoder.blocks = decoder.blocks, decoder.blocks * min(2, decoder.config.layers)
    caches, pages = ahead.make_caches(decoder), -(-decoder.config.context_length // ahead.PAGE)
    rows = Rows(
        MOST_ROWS,
        pages=pages,
        vocabulary=decoder.config.vocab_size,
        device=decoder.device,
        states=0 if decoder.config.state_layers else None,
    )
    graphs = DecodeGraphs(decoder, caches, rows)
    assert graphs.sizes == [size for size in SIZES if size <= MOST_ROWS]
    with decoder.active():
        for size in sizes or graphs.sizes:
            yield size
            graphs.step(size).launch()
            graphs.step(size).advance()
    decoder.blocks = kinds
