"""The engine on a GPU: the same tokens as on the CPU, whatever the batch, wherever the two best logits are apart."""

import pytest
import torch

from flyweight import LLM, SamplingParams

pytestmark = pytest.mark.gpu
GAP = 0.05  # float16 and float32 may disagree on the best token below this difference of logits


def test_greedy_text_of_the_real_model_is_that_of_the_cpu(smollm2):
    prompts = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at"]
    params = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True, logprobs=2)
    on_cpu = LLM(smollm2, device="cpu").generate(prompts, params)
    gpu = LLM(smollm2, device="cuda", dtype=torch.float16, max_model_len=1024, max_num_seqs=8)
    assert gpu.engine.runner.steps is not None
    alone = [gpu.generate(prompt, params)[0] for prompt in prompts]
    for together in (gpu.generate(prompts, params), alone):
        for ours, theirs in zip(together, on_cpu, strict=True):
            pairs = zip(ours.completions[0].token_ids, theirs.completions[0].token_ids, strict=True)
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if first is not None:
                best = sorted(theirs.completions[0].logprobs[first].top.values())
                assert best[-1] - best[-2] < GAP
