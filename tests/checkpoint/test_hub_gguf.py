"""`owner/name:Q4_K_M`: one GGUF file out of a hub repository, here a folder that the hub library is
made to take for one."""

import fnmatch
import shutil

import huggingface_hub
import pytest
from gguf import GGMLQuantizationType
from gguf_files import tiny_model, write_gguf

from flyweight.checkpoint import Checkpoint, hub
from flyweight.errors import CheckpointError, OptionError


class Hub:
    """One repository: what it holds, and what was fetched."""

    def __init__(self, root, cache):
        self.root, self.cache, self.asked = root, cache, []

    @property
    def files(self):
        return [
            str(path.relative_to(self.root))
            for path in sorted(self.root.rglob("*"))
            if path.is_file()
        ]

    def list_repo_files(self, repository):
        if repository != "owner/name":
            raise type("RepositoryNotFoundError", (Exception,), {})()
        return self.files

    def snapshot_download(self, repository, *, allow_patterns):
        for name in self.files:
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                self.asked.append(name)
                (self.cache / name).parent.mkdir(parents=True, exist_ok=True)
                if not (self.cache / name).exists():
                    shutil.copy2(self.root / name, self.cache / name)
        return str(self.cache)


@pytest.fixture
def server(tmp_path, monkeypatch):
    from huggingface_hub import constants

    root = tmp_path / "repository"
    (root / "deep").mkdir(parents=True)
    write_gguf(root / "Name-Q4_0.gguf", tiny_model("llama"), quantize=GGMLQuantizationType.Q4_0)
    write_gguf(root / "name.q8_0.gguf", tiny_model("llama"), quantize=GGMLQuantizationType.Q8_0)
    for name in (
        "README.md",
        "mmproj-Q8_0.gguf",
        "deep/Name-Q5_K_M-00001-of-00002.gguf",
        "deep/Name-Q5_K_M-00002-of-00002.gguf",
    ):
        (root / name).write_text("")
    fake = Hub(root, tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path / "cache"))
    return fake


@pytest.mark.parametrize(
    ("wanted", "file", "kind"),
    [("Q4_0", "Name-Q4_0.gguf", "Q4_0"), ("q8_0", "name.q8_0.gguf", "Q8_0")],
)
def test_the_file_that_was_asked_for_is_fetched_alone_and_kept(server, wanted, file, kind):
    folder = hub.resolve(f"owner/name:{wanted}")
    checkpoint = Checkpoint(folder)
    assert checkpoint.entries["model.layers.0.mlp.up_proj.weight"].dtype == kind
    assert set(server.asked) == {file}
    assert hub.resolve(f"owner/name:{wanted}") == folder


def test_a_type_that_is_not_there_names_those_that_are(server):
    with pytest.raises(OptionError, match=r"owner/name.*unknown GGUF type 'Q4_1'.*Q4_0"):
        hub.resolve("owner/name:Q4_1")
    assert server.asked == []


def test_a_repository_that_is_not_there_is_one_clear_line(server):
    with pytest.raises(CheckpointError, match="no hub model is called 'owner/other'"):
        hub.resolve("owner/other:Q4_0")


def test_all_parts_of_a_split_file_are_chosen(server):
    names = [name for name in server.files if name.endswith(".gguf")]
    assert hub.choose_gguf("owner/name", names, "Q5_K_M") == [
        name for name in names if "Q5_K_M" in name
    ]


def test_a_repository_without_gguf_says_so():
    with pytest.raises(OptionError, match="no GGUF files; leave out :Q4_0"):
        hub.choose_gguf("owner/name", [], "Q4_0")
