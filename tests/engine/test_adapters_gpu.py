"""Adapters in captured steps: the same answers as by torch's products, any mix of adapters in one
graph.
"""

import pytest
import torch
from adapter_files import write_adapter

from flyweight import LLM
from flyweight.batch import NOBODY
from flyweight.kernels.linear.delta import Delta
from flyweight.models import presets
from flyweight.models.config import ModelConfig
from flyweight.models.standard import plan_of

pytestmark = pytest.mark.gpu
SIZES = dict(
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
PROMPTS = [[5, 9, 2, 44, 17, 3], [8, 21, 30], [12, 7, 7, 90, 41]]


def shapes_of(config):
    """{module: shape} of all linears."""
    found = {}
    for layer in plan_of(ModelConfig.from_dict(config)).layers:
        for group in layer.groups:
            for name, size in zip(group.linears, group.sizes, strict=True):
                found[layer.prefix + name] = (size, group.in_features)
    return found


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    config = (
        presets.PRESETS["qwen3-0.6b"] | SIZES | dict(vocab_size=512, max_position_embeddings=256)
    )
    monkeypatch.setitem(presets.PRESETS, "tiny-adapted", config)
    for seed, name in enumerate(("red", "blue"), 1):
        write_adapter(tmp_path / name, shapes_of(config), seed=seed, rank=8 * seed, lora_alpha=8)
    return {name: tmp_path / name for name in ("red", "blue")}


def logprobs(llm, names):
    outputs = llm.generate(
        PROMPTS, temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, adapter=names
    )
    return [
        (out.token_ids, [one.logprob for one in out.completions[0].logprobs]) for out in outputs
    ]


@pytest.mark.parametrize("scheme", ["bf16", "int4"])
def test_captured_steps_of_any_mix_give_what_torch_gives(tiny, scheme, monkeypatch):
    llm = LLM(f"preset:tiny-adapted:{scheme}", device="cuda", blocks=64, adapters=tiny)
    assert llm.engine.runner.steps is not None
    mixes = (["red", None, "blue"], ["blue", "blue", "red"], [None, None, None])
    found = [logprobs(llm, names) for names in mixes]
    assert llm.engine.runner.steps.graphs
    monkeypatch.setattr(Delta, "takes", lambda self, x: False)
    other = LLM(f"preset:tiny-adapted:{scheme}", device="cuda", blocks=64, adapters=tiny)
    for names, ours in zip(mixes, found, strict=True):
        for (tokens, mine), (others, theirs) in zip(ours, logprobs(other, names), strict=True):
            # of bfloat16 in three layers; after which two equally good tokens may differ
            assert abs(mine[0] - theirs[0]) < 0.15
            if tokens == others:
                assert max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) < 0.3
    assert found[0][0] != found[2][0] and found[0][2] != found[2][2]


@pytest.mark.parametrize("scheme", ["bf16", "int4"])
def test_one_row_gets_its_adapter_inside_the_linears(tiny, scheme, monkeypatch):
    """The same answers as by torch's products, again and again, with and without an adapter by
    turns.
    """
    llm = LLM(f"preset:tiny-adapted:{scheme}", device="cuda", blocks=64, adapters=tiny)
    monkeypatch.setattr(Delta, "in_the_linear", lambda self, slots: None)
    other = LLM(f"preset:tiny-adapted:{scheme}", device="cuda", blocks=64, adapters=tiny)

    def answer(engine, name):
        out = engine.generate(
            [PROMPTS[0]], temperature=0, max_tokens=12, ignore_eos=True, logprobs=1, adapter=name
        )[0]
        return out.token_ids, [one.logprob for one in out.completions[0].logprobs]

    names = ("red", None, "blue", "blue", "red", None)
    theirs = [answer(other, name) for name in names]
    monkeypatch.undo()
    ours = [answer(llm, name) for name in names]
    for (tokens, mine), (others, them) in zip(ours, theirs, strict=True):
        assert abs(mine[0] - them[0]) < 0.15
        if tokens == others:
            assert max(abs(a - b) for a, b in zip(mine, them, strict=True)) < 0.3
    assert ours[0] == ours[4] and ours[1] == ours[5] and ours[2] == ours[3] and ours[0] != ours[1]
    steps = llm.engine.runner.steps
    assert steps.steps[1].decode.separate is None, "attention stays behind q, k and v"
    assert steps.unadapted.steps[1].decode.separate is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("sizes", "inputs", "rows"),
    [((4096, 1024, 1024), 4096, 1), ((12288, 12288), 4096, 4), ((4096,), 12288, 16)],
)
def test_the_kernel_adds_what_torch_adds(sizes, inputs, rows, dtype, monkeypatch):
    from flyweight.kernels.dispatch import decoder_ops
    from flyweight.kernels.linear.fused import Norm

    torch.manual_seed(0)
    made = dict(device="cuda", dtype=dtype)
    a = torch.randn(3, len(sizes), 16, inputs, **made) * inputs**-0.5
    delta = Delta(a, torch.randn(3, 16, sum(sizes), **made), sizes, decoder_ops("cuda"))
    x, residual = torch.randn(rows, inputs, **made), torch.randn(rows, sum(sizes), **made)
    norm = Norm(1 + 0.1 * torch.randn(inputs, **made), 1e-6)
    slots = torch.tensor(
        [(2, NOBODY, 0, 1)[row % 4] for row in range(rows)], dtype=torch.int32, device="cuda"
    )
    assert delta.takes(x)
    got = delta.add(x, slots, norm=norm, residual=residual)
    monkeypatch.setattr(Delta, "takes", lambda self, x: False)
    want = delta.add(x, slots, norm=norm, residual=residual)
    assert ((got.double() - want.double()).norm() / want.double().norm()).item() < 1e-2
