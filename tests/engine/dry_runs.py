"""What test_ahead.py runs in processes of its own: a process that has pretended a GPU is good for
nothing else.
"""

import torch

from flyweight.engine import ahead
from flyweight.engine.graphs import DecodeGraphs
from flyweight.engine.memory import dummy_batch
from flyweight.engine.rows import SIZES, Rows
from flyweight.gpu import GPUS
from flyweight.kernels import jit
from flyweight.kernels.dry_run import DEVICE, dry_run
from flyweight.models.decoder import Decoder

MOST = 1100  # tokens of a pass
# every number of rows that has a kernel of its own, the borders behind them, and some between
PASSES = (*range(1, 18), 24, *range(31, 36), *range(36, MOST, 142), 1023, 1024)
TARGET = ahead.Target(GPUS["sm_90a"], sequences=64, tokens=MOST)


def wanted_and_asked(model):
    """The kernels found ahead, and those of them or others that whole models ask for when they
    run.
    """
    found = set(ahead.wanted_by(model, TARGET))
    jit.wanted.clear()
    forget()
    with dry_run(TARGET.gpu):
        weights = ahead.open_weights(model)
        decoder = Decoder.load(weights, device=DEVICE, dtype=torch.bfloat16)
        decode(decoder)
        for tokens in PASSES:
            batch = dummy_batch(tokens, context=4096, block_size=16, device=DEVICE)
            decoder.hidden(batch, ahead.make_caches(decoder))
            decoder.logits(
                torch.empty(tokens, decoder.config.hidden_size, dtype=decoder.dtype, device=DEVICE)
            )
    return found, set(jit.wanted)


def evaluate(model, prompt_dtype):
    """The kernel of each linear, whether it has one in 8 bits, and whether 300 rows go through
    it.
    """
    with dry_run(TARGET.gpu):
        weights = ahead.open_weights(model)
        decoder = Decoder.load(weights, device=DEVICE, dtype=torch.bfloat16, exact=True)
        decoder.narrow_prompts(prompt_dtype)
        linears = [linear.fused for block in decoder.blocks for linear in block.linears.values()]
        products = [
            one(torch.empty(300, one.shape[1], dtype=torch.bfloat16, device=DEVICE))
            for one in linears
        ]
        shapes = {
            (300, one.shape[0]) == tuple(y.shape) for one, y in zip(linears, products, strict=True)
        }
        return [(one.kernel, one.run_many is not None) for one in linears], shapes


def columns_in_order(model):
    """Whether VPTQ's layouts take the columns of x as they are, by a dry run and by values."""
    from flyweight.kernels.vptq.choose_layout import lay_out

    found = [
        lay_out(
            ahead.open_weights(model).linear("model.layers.0.mlp.down_proj"), dtype=torch.bfloat16
        ).source
        is None
    ]
    with dry_run(TARGET.gpu):
        decoder = Decoder.load(
            ahead.open_weights(model), device=DEVICE, dtype=torch.bfloat16, layers=[0]
        )
        return [*found, decoder.blocks[0].linears["down"].fused.layout.source is None]


def forget():
    """What was asked for once is asked for again."""
    from flyweight.kernels.attention import prefill, rope
    from flyweight.kernels.vptq import decode

    for module in (prefill, rope, decode):
        module._kernel.cache_clear()


def decode(decoder):
    """As `DecodeGraphs.capture` does, qkv and attention in one kernel where they can be, and
    apart.
    """
    config = decoder.config
    rows = Rows(TARGET.sequences, pages=64, vocabulary=config.vocab_size, device=DEVICE)
    graphs = DecodeGraphs(decoder, ahead.make_caches(decoder), rows)
    assert graphs.sizes == [size for size in SIZES if size <= TARGET.sequences]
    with decoder.active():
        for size in graphs.sizes:
            step = graphs.step(size)
            step.launch()
            step.advance()


def wanted_by(model, part=0, parts=1):
    return ahead.wanted_by(
        model, ahead.Target(GPUS["sm_90a"], sequences=16, tokens=64), part=part, parts=parts
    )


def wanted_by_some(model):
    """By a step of 8 answers, and one of 5 which runs as 8, and by prompts of 60 tokens, which are
    padded to 64.
    """
    target = ahead.Target(GPUS["sm_90a"], sequences=8, tokens=64, steps=(5, 8), passes=(60,))
    return target.pass_sizes(64), ahead.wanted_by(model, target)


def two_kernels():
    """Small ones."""
    return {
        jit.Wanted("token.cu", (("FP16", 0), ("THREADS", 256), ("WIDTH", width)), None)
        for width in (256, 512)
    }
