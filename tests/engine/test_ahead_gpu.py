"""On a GPU nothing is left to compile after `flyweight compile`."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

COMPILE = """
import functools
from flyweight.commands.compile import pick_gpu
from flyweight.engine.ahead import Target, wanted_by
from flyweight.kernels.precompile import precompile
if __name__ == "__main__":
    gpu, architecture = pick_gpu(None, None)
    jobs = [functools.partial(wanted_by, MODEL, Target(gpu, sequences=64, tokens=2048))]
    precompile(jobs, architecture, listen=print)
"""
RUN = """
from flyweight import LLM, SamplingParams
llm = LLM(MODEL, max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4096)
llm.warm_up()
for count, length in ((1, 5), (3, 40), (17, 9), (64, 3), (2, 1500)):
    prompts = [[7 + i] * length for i in range(count)]
    llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    drawn = dict(max_tokens=2, temperature=0.8, top_k=5, prompt_logprobs=1, ignore_eos=True)
    llm.generate(prompts[:1], SamplingParams(**drawn))
"""


@pytest.mark.parametrize(
    "model",
    ["preset:tiny:int4", "preset:tiny:w8a8", "preset:tiny:vptq", "preset:tiny-moe:int4-sym"],
)
def test_a_start_after_compiling_ahead_compiles_nothing(model, tmp_path):
    def run(name, code):
        script = tmp_path / name  # in a file: processes that it starts import it again
        script.write_text(f"MODEL = {model!r}\n{code}")
        subprocess.run(
            [sys.executable, script],
            env=os.environ | {"FLYWEIGHT_CACHE": str(tmp_path)},
            check=True,
            timeout=500,
        )
        return {path.name for path in (tmp_path / "kernels").iterdir()}

    before = run("compile_ahead.py", COMPILE)
    assert run("start.py", RUN) - before == set()
