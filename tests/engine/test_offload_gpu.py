"""A model with layers in the host's memory answers as one that is all on the GPU, captured steps
included.
"""

import pytest
import torch

from flyweight import LLM, SamplingParams

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPTS = [[7 * i + j % 11 + 3 for j in range(5 + 40 * i)] for i in range(6)]


def answers(llm):
    return [
        [output.token_ids for output in llm.generate(prompts, GREEDY)]
        for prompts in (PROMPTS[:1], PROMPTS, PROMPTS[:3])
    ]


@pytest.mark.parametrize("scheme", ["bf16", "int4", "w8a8", "vptq"])
def test_tokens_are_those_of_a_model_that_is_all_there(scheme):
    options = dict(max_num_seqs=8, max_model_len=512, blocks=300)
    whole = LLM(f"preset:qwen3-0.6b:{scheme}", **options)
    expected, weights = answers(whole), whole.memory().weights
    del whole
    torch.cuda.empty_cache()
    for count in (1, 9):
        llm = LLM(f"preset:qwen3-0.6b:{scheme}", offload=count, **options)
        assert llm.memory().weights < weights
        assert llm.engine.runner.steps is not None, "steps are captured"
        assert answers(llm) == expected
        del llm
