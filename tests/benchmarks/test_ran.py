"""A row is of older code where a file that it ran has changed, and only there."""

import subprocess
import sys
from pathlib import Path

import clean_process
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "workshop"))

import covered
import ran
import traced_dry_run

from flyweight.report.rows import REQUIRED

H200 = "NVIDIA H200"
FOLDERS = (
    "kernels",
    "kernels/native",
    "kernels/vptq",
    "engine",
    "models",
    "models/families",
    "quant",
    "server",
    "report",
    "plugins",
    "backends",
)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Changes a file, commits it and says whether a row of the commit before is still of this
    code.
    """

    def git(*words):
        return subprocess.run(
            ["git", "-c", "user.name=n", "-c", "user.email=e", *words],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    def after(path, row, device=H200):
        before = git("rev-parse", "HEAD")
        place = Path("src/flyweight", path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(place.read_text() + "2" if place.exists() else "1")
        git("add", ".")
        git("commit", "-qm", path)
        return covered.changed(before, ran.code_of(row, device))

    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    for folder in FOLDERS:
        Path("src/flyweight", folder).mkdir(parents=True, exist_ok=True)
        Path("src/flyweight", folder, "a.py").write_text("1")
    git("add", ".")
    git("commit", "-qm", "first")
    return after


def latency(**more):
    return {"bench": "latency", "model": "qwen3-8b", "scheme": "int4", "backend": "native"} | more


@pytest.mark.parametrize(
    "path",
    [
        "kernels/a.py",
        "kernels/cuda/gemv.cu",
        "kernels/tuned/h200.toml",
        "engine/a.py",
        "models/a.py",
    ],
)
@pytest.mark.parametrize(
    "row",
    [
        latency(),
        latency(backend="native (kv_dtype=fp8)"),
        latency(bench="speed"),
        latency(bench="throughput"),
        latency(bench="serve"),
        {
            "bench": "quality",
            "check": "served",
            "tool": "flyweight",
            "model": "smollm2-135m",
            "scheme": "awq-int4",
        },
        {"bench": "quality", "tool": "needle", "model": "smollm2-135m"},
        {"bench": "quality", "tool": "flyweight", "model": "smollm2-135m", "kv_dtype": "int8"},
    ],
    ids=lambda row: (
        row if isinstance(row, str) else f"{row['bench']}-{row.get('backend') or row.get('tool')}"
    ),
)
def test_speed_and_real_weights_of_ours_are_of_kernels_engine_and_models(repository, row, path):
    assert repository(path, row).startswith("changed: ")


def test_a_gpus_row_is_not_of_what_only_a_cpu_runs(repository):
    for path in (
        "kernels/native/a.py",
        "kernels/native/source/product.c",
        "kernels/cpu.py",
        "models/native.py",
    ):
        assert repository(path, latency()) == "the same", path
        assert repository(path, latency(), device="Neoverse-N1").startswith("changed: "), path


def test_a_row_is_not_of_formats_and_families_that_it_has_not(repository):
    for path in ("kernels/vptq/a.py", "kernels/cuda/vptq_rows.cu"):
        assert repository(path, latency()) == "the same"
        assert repository(path, latency(scheme="vptq")) == "changed: kernels"
        assert (
            repository(path, {"bench": "kernel", "format": "vptq", "kernel": "vptq"})
            == "changed: kernels"
        )
    assert repository("models/families/gemma.py", latency()) == "the same"
    assert repository("models/families/gemma.py", latency(model="gemma-3-12b")) == "changed: models"


def test_numbers_of_older_gpus_are_of_their_own_rows(repository):
    assert repository("kernels/tuned/sm_80.toml", latency()) == "the same"
    assert (
        repository("kernels/tuned/sm_80.toml", latency(), device=f"{H200} as sm_80 (108 SMs)")
        == "changed: kernels"
    )


def test_another_engines_row_is_of_that_engine_and_of_what_drives_it(repository):
    for backend in (
        "vllm",
        "vllm (awq, gpu_memory_utilization=0.6)",
        "transformers",
        "transformers-compiled",
    ):
        row = latency(backend=backend)
        for path in ("kernels/a.py", "engine/a.py", "models/a.py", "plugins/a.py", "server/a.py"):
            assert repository(path, row) == "the same", (backend, path)
        assert (
            repository(f"backends/{backend.split()[0].split('-')[0]}.py", row)
            == "changed: backends"
        )


def test_our_kernels_in_another_engine_are_of_ours(repository):
    for path in ("kernels/a.py", "plugins/a.py", "models/a.py"):
        assert repository(path, latency(backend="vllm-plugin")).startswith("changed: ")


def test_other_tools_rows_are_of_no_solver_of_ours(repository):
    theirs = {
        "bench": "quality",
        "tool": "llm-compressor",
        "model": "smollm2-135m",
        "scheme": "rtn-int4",
        "kv_dtype": "float32",
    }
    ours = theirs | {"tool": "flyweight"}
    assert repository("quant/gptq.py", theirs) == "the same"
    assert (
        repository("quant/gptq.py", ours)
        == repository("quant/evaluate.py", theirs)
        == "changed: quant"
    )
    assert repository("quant/gptq.py", theirs | {"bench": "quantize"}) == "none of ours"
    assert (
        repository("kernels/a.py", {"bench": "kernel", "format": "w4a16", "kernel": "vllm.marlin"})
        == "none of ours"
    )


def test_every_bench_has_code_that_its_figures_are_of():
    assert set(ran.PACKAGES) == set(REQUIRED) - {"environment"}


@pytest.mark.parametrize(
    "model, name",
    [
        ("preset:tiny:int4", "smollm2-135m"),
        ("preset:tiny-moe:w8a8", "smollm2-135m"),
        ("preset:qwen3-8b:int4", "qwen3-8b"),
        ("preset:qwen3-4b:bf16", "qwen3-4b"),
    ],
)
def test_nothing_that_is_left_out_is_called_for_a_gpu(model, name):
    row = latency(model=name, scheme=model.rpartition(":")[2])
    left = ran.left_out(row, H200)
    assert (ran.OF_ODD_SHAPES[0] in left) == (name in ran.EVEN)
    assert set(ran.ON_A_CPU) | set(ran.OF_VPTQ) | set(ran.OF_FAMILIES) <= set(left)
    with clean_process.pool() as pool:
        called, sources = pool.submit(traced_dry_run.files_called, model).result()
    assert "src/flyweight/models/decoder.py" in called and "gemm.cu" in {
        path.rpartition("/")[2] for path in sources
    }
    assert traced_dry_run.among(called | sources, left) == []


def test_what_a_format_is_left_out_for_is_called_by_that_format():
    with clean_process.pool() as pool:
        called, sources = pool.submit(traced_dry_run.files_called, "preset:tiny:vptq").result()
    assert {
        path.rpartition("/")[0] for path in traced_dry_run.among(called | sources, ran.OF_VPTQ)
    } == {"src/flyweight/kernels/vptq", "src/flyweight/kernels/cuda"}


@pytest.mark.parametrize(
    "preset",
    [
        "qwen1.5-32b",
        "qwen2-0.5b",
        "qwen2-57b-a14b",
        "qwen2-72b",
        "qwen3-4b",
        "qwen3-8b",
        "smollm2-135m",
    ],
)
def test_models_that_need_no_family_have_none(preset):
    from flyweight.models.config import ModelConfig
    from flyweight.models.families import ALL
    from flyweight.models.presets import preset_config

    assert preset.startswith(ran.STANDARD)
    config = preset_config(preset)
    assert config["model_type"] not in ALL and ModelConfig.from_dict(config).layers
