"""On layers of the default model: no solver does worse than rounding to nearest."""

import dataclasses

import pytest
import torch

from flyweight.checkpoint.reader import Checkpoint
from flyweight.kernels import reference
from flyweight.models.attention import Whole
from flyweight.models.config import ModelConfig
from flyweight.models.rope import rope_tables
from flyweight.quant.calibration import BUILT_IN, read_text
from flyweight.quant.recipe import Layer
from flyweight.quant.solve import solve_group
from flyweight.quant.statistics import layer_error
from flyweight.quant.work import WorkBlock


@pytest.fixture(scope="module")
def block(smollm2):
    """The first block, and the statistics of its inputs over 512 tokens of the built-in text."""
    source, device = Checkpoint(smollm2), torch.device("cpu")
    config = ModelConfig.from_dict(source.config)
    ids = torch.tensor(
        source.tokenizer().encode(read_text(BUILT_IN), add_special_tokens=False, verbose=False)[
            :512
        ]
    )
    x = torch.nn.functional.embedding(
        ids.view(2, 256), source.tensor("model.embed_tokens.weight").float()
    )
    work = WorkBlock.load(source, config, 0, device=device, dtype=torch.float32)
    # The default model comes from a four-bit file; scaled rows and columns lie on no grid.
    generator = torch.Generator().manual_seed(0)
    for weight in work.weights.values():
        weight *= torch.exp(0.3 * torch.randn(weight.shape[1], generator=generator))
    context = Whole(256, rope_tables(config, device), reference)
    with torch.no_grad():
        return work, work.statistics([x], context, work.groups)


INTEGERS = dict(bits=4, group_size=64)


@pytest.mark.parametrize(
    ("solver", "nearest"),
    [
        (Layer("gptq", **INTEGERS), Layer("rtn", **INTEGERS)),
        (
            Layer("gptq", ranges="importance", sweeps=1, symmetric=False, **INTEGERS),
            Layer("rtn", symmetric=False, **INTEGERS),
        ),
        (Layer("awq", **INTEGERS), Layer("rtn", **INTEGERS)),
        (
            Layer("gptq", bits=8, group_size=-1, activations="int8"),
            Layer("rtn", bits=8, group_size=-1, activations="int8"),
        ),
        (Layer("vptq", bits=3, refits=0), Layer("rtn", bits=3, group_size=64)),
    ],
    ids=["gptq", "gptq-best", "awq", "w8a8-gptq", "vptq"],
)
@pytest.mark.parametrize("group", ["o", "qkv"])
def test_no_solver_is_worse_than_rounding(group, solver, nearest, block):
    work, statistics = block
    chosen = next(item for item in work.groups if item.name == group)
    weights = [work.weights[name] for name in chosen.linears][-1:]

    def error(layer):
        with torch.no_grad():
            made = solve_group(weights, [layer], statistics[group], dtype=torch.float16)
        return layer_error(weights[0], made[0].dequantize(), statistics[group].hessian), made[
            0
        ].bits_per_weight

    (found, bits), (baseline, limit) = error(solver), error(nearest)
    assert found < baseline
    assert bits <= limit + 0.06


def test_siblings_solved_together_are_what_each_is_alone(block):
    work, statistics = block
    layer = dataclasses.replace(Layer("gptq", **INTEGERS), ranges="importance")
    weights = [work.weights[f"self_attn.{name}_proj"] for name in "kv"]
    together = solve_group(weights, [layer, layer], statistics["qkv"], dtype=torch.float16)
    alone = [
        solve_group([weight], [layer], statistics["qkv"], dtype=torch.float16)[0]
        for weight in weights
    ]
    for joint, single in zip(together, alone, strict=True):
        assert (
            joint.values() != single.values()
        ).float().mean() < 0.01  # sums of other widths round differently
