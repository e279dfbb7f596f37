"""Models of unusual shapes keep their captured steps and passes, and are near the float32 model."""

import pytest
import torch
from gpu_models import CUDA, PAGE, TINY, forced, make_engine, params, prompts, run

from flyweight.engine.graphs import unsupported_reason
from flyweight.models.decoder import Decoder
from flyweight.models.presets import PresetWeights

pytestmark = pytest.mark.gpu
BOUND = {"bf16": 0.03, "int4": 0.03, "w8a8": 0.1}  # relative error of the logits
SHAPES = {
    "16 query heads to a KV head": dict(num_attention_heads=32, num_key_value_heads=2, head_dim=64),
    "12 query heads to a KV head": dict(num_attention_heads=12, num_key_value_heads=1),
    "heads of 80": dict(num_attention_heads=4, head_dim=80),
    "heads of 96": dict(num_attention_heads=4, head_dim=96),
    "a vocabulary of 1,003": dict(vocab_size=1003),
    "all at once": dict(num_attention_heads=20, head_dim=96, vocab_size=1001),
}


def load(shape: str, scheme: str, dtype: torch.dtype = torch.bfloat16, **options) -> Decoder:
    weights = PresetWeights(TINY | SHAPES[shape], scheme, device=CUDA)
    return Decoder.load(weights, device=CUDA, dtype=dtype, **options)


@torch.inference_mode()
@pytest.mark.parametrize("scheme", BOUND)
@pytest.mark.parametrize("shape", SHAPES)
def test_captured_steps_of_odd_shapes_follow_the_float32_model(shape, scheme):
    decoder = load(shape, scheme)
    assert unsupported_reason(decoder, PAGE) is None
    tokens = torch.randint(10, 1000, (96,), generator=torch.Generator().manual_seed(1))
    got = torch.cat([logits.float() for logits in forced(decoder, tokens, 24)])
    want = load(shape, scheme, torch.float32, exact=True).forward_whole(tokens[None].to(CUDA))[0]
    assert got.shape == want.shape
    error = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.max() < BOUND[scheme]


@pytest.mark.parametrize("shape", SHAPES)
def test_odd_shapes_are_served_by_graphs(shape):
    decoder = load(shape, "int4")
    engine = make_engine(decoder)
    requests = [engine.submit(one, params(max_tokens=8))[0] for one in prompts(decoder.config, 5)]
    answers = run(engine, requests)
    assert engine.runner.steps is not None and engine.runner.steps.graphs
    assert engine.runner.passes is not None and engine.runner.passes.held
    assert all(len(one) == 8 and max(one) < decoder.config.vocab_size for one in answers)
