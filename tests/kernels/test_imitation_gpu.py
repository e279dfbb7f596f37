"""A model through the code of older GPUs: only their PTX is loaded, and every launch fits the card
that it is planned for.
"""

import json
import os
import subprocess
import sys

import pytest

from flyweight.gpu import GPUS

pytestmark = pytest.mark.gpu
SCRIPT = """
import dataclasses, json, sys
from flyweight import LLM, SamplingParams
from flyweight.kernels import imitation, library

for scheme in sys.argv[1:]:
    llm = LLM(f"preset:tiny:{scheme}", max_num_seqs=64, max_model_len=1024)
    for count, length in ((1, 5), (8, 9), (17, 9), (64, 3), (2, 600)):
        prompts = [[7 + i] * length for i in range(count)]
        llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
print(json.dumps({"modules": [dataclasses.asdict(one) for one in library.loaded],
                  "launches": [dataclasses.asdict(one) for one in imitation.launches]}))
"""


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_89"])
def test_only_ptx_of_the_other_gpu_is_loaded_and_every_launch_fits_it(name):
    from flyweight.kernels.imitation import Launched

    schemes = ["bf16", "int4", "w8a8", "vptq", "sparse-int4"]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *schemes],
        env=os.environ | {"FLYWEIGHT_PRETEND": name},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {one["target"] for one in found["modules"]} == {name}, "no cubin among them"
    files = {one["file"] for one in found["modules"]}
    assert {"gemv.cu", "attention.cu", "rope.cu"} <= files
    assert not files & {"gemm.cu", "few.cu", "vptq_rows.cu", "prefill_attention.cu"}, "Hopper's own"
    launches = [Launched(**one) for one in found["launches"]]
    assert len(launches) > 30
    assert [one.refused_by(GPUS[name]) for one in launches if one.refused_by(GPUS[name])] == []
    assert all(one.resident(GPUS[name]) > 0 for one in launches)
