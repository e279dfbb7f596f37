"""Two processes on one GPU both finish, with the tokens of one alone: under MPS, and one after the
other as without it.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu
SECONDS = 240  # in which two processes that do not wait for each other for ever are surely done
SCRIPT = """
import json
from flyweight import LLM, SamplingParams, gpu, gpu_share
llm = LLM("preset:qwen3-0.6b:int4", max_num_seqs=16, max_model_len=512)
tokens = []
for count in (1, 2, 5, 16) * 3:
    prompts = [[11 * i + j % 13 + 3 for j in range(5 + 9 * i)] for i in range(count)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
    tokens.append([output.token_ids for output in outputs])
share = {"mps": gpu_share.of(0).mps, "processors": gpu.of(0).processors}
print(json.dumps({"tokens": tokens, **share}))
"""


def start(**variables):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process):
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.fixture
def mps(tmp_path):
    """A control daemon of our own; its variables for the processes that are to use it."""
    if (command := shutil.which("nvidia-cuda-mps-control")) is None:
        pytest.skip("nvidia-cuda-mps-control is not installed: MPS was not tried")
    folders = {
        "CUDA_MPS_PIPE_DIRECTORY": tmp_path / "pipe",
        "CUDA_MPS_LOG_DIRECTORY": tmp_path / "log",
    }
    variables = {name: str(folder) for name, folder in folders.items()}
    for folder in folders.values():
        folder.mkdir()
    done = subprocess.run(
        [command, "-d"], env=os.environ | variables, capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        pytest.skip(f"MPS cannot be started here: {done.stderr or done.stdout}")
    yield variables
    subprocess.run([command], input="quit\n", env=os.environ | variables, text=True, timeout=60)


def test_two_processes_under_mps_both_finish(mps):
    found = [finish(process) for process in [start(**mps), start(**mps)]]
    if not all(one["mps"] for one in found):
        pytest.skip(
            "the daemon runs, but the driver gives processes no MPS context: MPS was not tried"
        )
    assert found[0]["tokens"] == found[1]["tokens"] == finish(start())["tokens"]


def test_processes_with_half_of_the_gpu_each_plan_for_half_of_it(mps):
    limited = mps | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
    found = [finish(process) for process in [start(**limited), start(**limited)]]
    if not all(one["mps"] for one in found):
        pytest.skip(
            "the daemon runs, but the driver gives processes no MPS context: MPS was not tried"
        )
    alone = finish(start())
    assert all(one["processors"] <= alone["processors"] // 2 + 1 for one in found)


def test_two_processes_that_share_its_time_both_finish():
    found = [finish(process) for process in [start(), start()]]
    assert found[0]["tokens"] == found[1]["tokens"]
