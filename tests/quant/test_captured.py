"""A step that is launched as one graph does what it does kernel by kernel."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from tiny_model import make_tiny_model

from flyweight.checkpoint.reader import Checkpoint
from flyweight.kernels import reference
from flyweight.kernels.linear.fused import Norm
from flyweight.models.attention import Whole
from flyweight.models.config import ModelConfig
from flyweight.models.rope import rope_tables
from flyweight.quant.captured import Captured
from flyweight.quant.recipe import Recipe
from flyweight.quant.rounding import SAME_GRADIENTS
from flyweight.quant.rtn import rtn
from flyweight.quant.tune import Chain, Predictions, TunedBlock, Tuning, graphs_fit, steps_of
from flyweight.quant.work import WorkBlock

STEPS = 6
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = pytest.param("cuda", marks=gpu)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_every_call_runs_on_its_own_tensors(device):
    total = torch.zeros(3, device=device)
    run = Captured(lambda x, share: total.add_(x * share), forget=lambda: None)
    for step in range(4):
        x = torch.full((3,), float(step), device=device)
        run(x, torch.full((), 2.0, device=device))
    assert total.tolist() == [12.0] * 3
    assert (run.graph is not None) == (device == "cuda")


@pytest.mark.parametrize("device", [CUDA])
def test_what_cannot_be_captured_runs_as_it_is_and_says_so(device):
    total, forgotten = torch.zeros(3, device=device), []

    def run(x):
        total.add_(x * float(x.sum()))  # the host waits for it

    captured = Captured(run, forget=lambda: forgotten.append(1))
    captured(torch.ones(3, device=device))
    with pytest.warns(UserWarning, match="one by one"):
        captured(torch.ones(3, device=device))
    captured(torch.ones(3, device=device))
    assert total.tolist() == [9.0] * 3 and forgotten == [1]


def chain_of(folder, device, dtype, *, rounding, symmetric):
    source = Checkpoint(folder)
    config = ModelConfig.from_dict(source.config)
    context = Whole(12, rope_tables(config, device), reference)
    layer = Recipe.from_dict(
        {"base": "rtn-int4", "bits": 3, "group_size": 32, "symmetric": symmetric}, "x"
    ).layer.integers(torch.float16)
    works = []
    for index in range(2):
        work = WorkBlock.load(source, config, index, device=device, dtype=dtype)
        work.quantized = {name: rtn(weight, layer) for name, weight in work.weights.items()}
        works.append(work)
    settings = Tuning(steps=STEPS, rate=0.01, rounding=rounding)
    blocks = [TunedBlock(work, context, settings) for work in works]
    norm, head = (
        source.tensor(name).to(device, dtype)
        for name in ("model.norm.weight", "model.embed_tokens.weight")
    )
    return Chain(works, Predictions(Norm(norm, config.epsilon), head), context), blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("rounding", "symmetric"), [(0.0, True), (3.0, True), (3.0, False)])
@pytest.mark.parametrize("device", [CUDA])
def test_captured_steps_of_tuning_are_the_eager_ones(
    device, rounding, symmetric, keep, dtype, tmp_path
):
    folder = make_tiny_model(tmp_path / "tiny", num_hidden_layers=2)
    generator = torch.Generator().manual_seed(0)
    batches = [
        [torch.randn(2, 12, 64, generator=generator).to(device, dtype) for _ in range(2)]
        for _ in range(STEPS)
    ]
    made = []
    for captured in (False, True):
        chain, blocks = chain_of(
            folder, torch.device(device), dtype, rounding=rounding, symmetric=symmetric
        )
        run = steps_of(chain, blocks, keep=keep)
        with torch.no_grad(), SAME_GRADIENTS():
            assert graphs_fit(blocks, batches[0][0])  # on the main stream, as `tune` asks
            for step, (x, wanted) in enumerate(batches):
                share = torch.full((), 1 - step / STEPS, device=device)
                if captured:
                    run(x, wanted, share)
                else:
                    chain.step(blocks, x, wanted, share, keep=keep)
        assert not captured or run.graph is not None
        made.append([part for block in blocks for part in block.parts.values()])
    moved = 0
    for eager, graphed in zip(*made, strict=True):
        torch.testing.assert_close(
            graphed.moves["scales"].value(), eager.moves["scales"].value(), rtol=1e-4, atol=1e-7
        )
        moved += int((graphed.moves["scales"].move != 0).sum())
        if rounding:
            torch.testing.assert_close(graphed.codes, eager.codes, rtol=1e-3, atol=1e-3)
    assert moved
