import json
import os
import signal

import pytest
import torch

from flyweight.checkpoint import Checkpoint, CheckpointWriter
from flyweight.checkpoint.writer import previous_of
from flyweight.errors import OptionError, ResourceError

CONFIG = {"model_type": "llama"}


def tensors(count=6):
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{i}.weight": torch.randn(10, 10, generator=generator) for i in range(count)}


def write(target, count=6, **options):
    with CheckpointWriter(target, 1000, **options) as writer:  # two tensors of 400 bytes to a shard
        for name, tensor in tensors(count).items():
            writer.add(name, tensor)
        return writer.finish(CONFIG)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_written_is_what_is_read(tmp_path):
    checkpoint = Checkpoint(write(tmp_path / "out"))
    assert checkpoint.config == CONFIG
    assert [file.name for file in checkpoint.files] == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    for name, tensor in tensors().items():
        assert torch.equal(checkpoint.tensor(name), tensor)
    checkpoint.check_used()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 6 * 400
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_one_shard_needs_no_index(tmp_path):
    assert set(contents(write(tmp_path / "out", 2))) == {"config.json", "model.safetensors"}


def test_a_tensor_larger_than_a_shard_gets_its_own(tmp_path):
    with CheckpointWriter(tmp_path / "out", 100) as writer:
        for name, tensor in tensors(2).items():
            writer.add(name, tensor)
        writer.finish(CONFIG)
    assert len(Checkpoint(tmp_path / "out").files) == 2


def test_tensors_that_share_memory_or_are_not_contiguous_are_stored_apart(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    with CheckpointWriter(tmp_path / "out") as writer:
        for name, tensor in {
            "whole": base,
            "same": base,
            "rows": base[1:],
            "turned": base.T,
            "part": base[:, :2],
        }.items():
            writer.add(name, tensor)
        writer.finish(CONFIG)
    checkpoint = Checkpoint(tmp_path / "out")
    assert torch.equal(checkpoint.tensor("turned"), base.T) and torch.equal(
        checkpoint.tensor("same"), base
    )
    assert torch.equal(checkpoint.tensor("part"), base[:, :2]) and torch.equal(
        checkpoint.tensor("rows"), base[1:]
    )


def test_tokenizer_and_generation_config_are_carried_along_and_pickles_are_not(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    carried = {
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "LICENSE",
    }
    for name in (
        *carried,
        "pytorch_model.bin",
        "model.safetensors",
        "modeling_own.py",
        "config.json",
    ):
        (source / name).write_text("{}")
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add("a", torch.zeros(1))
        writer.finish(CONFIG, source=source)
    assert set(contents(tmp_path / "out")) == carried | {"model.safetensors", "config.json"}
    assert Checkpoint(tmp_path / "out").config == CONFIG


def test_nothing_is_there_until_finish(tmp_path):
    with CheckpointWriter(tmp_path / "out", 100) as writer:
        for name, tensor in tensors().items():
            writer.add(name, tensor)
        assert not (tmp_path / "out").exists()
        writer.finish(CONFIG)
    assert (tmp_path / "out").exists()


def test_a_failed_run_leaves_nothing_behind(tmp_path):
    with pytest.raises(RuntimeError), CheckpointWriter(tmp_path / "out", 100) as writer:
        writer.add("a", torch.zeros(100))
        writer.flush()
        raise RuntimeError("the caller failed")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept_unless_told(tmp_path):
    write(tmp_path / "out", 2)
    before = contents(tmp_path / "out")
    with pytest.raises(OptionError, match=r"out exists already.*--overwrite"):
        write(tmp_path / "out", 4)
    assert contents(tmp_path / "out") == before
    write(tmp_path / "out", 4, overwrite=True)
    assert len(Checkpoint(tmp_path / "out").names()) == 4
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_an_empty_folder_may_be_filled(tmp_path):
    (tmp_path / "out").mkdir()
    assert len(Checkpoint(write(tmp_path / "out")).names()) == 6


def test_an_overwrite_that_fails_keeps_the_old_folder(tmp_path):
    write(tmp_path / "out", 2)
    before = contents(tmp_path / "out")
    with pytest.raises(RuntimeError), CheckpointWriter(tmp_path / "out", overwrite=True) as writer:
        writer.add("a", torch.zeros(1))
        raise RuntimeError("the caller failed")
    assert contents(tmp_path / "out") == before


def test_an_overwrite_cut_off_between_its_renames_is_undone(tmp_path):
    write(tmp_path / "out", 2)
    os.rename(tmp_path / "out", tmp_path / ".out.previous")
    (tmp_path / ".out.partial").mkdir()  # the new one, which was not renamed
    with pytest.raises(OptionError, match="exists already"):
        CheckpointWriter(tmp_path / "out")
    assert len(Checkpoint(tmp_path / "out").names()) == 2


def killed_after(target, count, **options):
    """A process that adds `count` tensors and dies at once, as by `kill -9`."""
    child = os.fork()
    if child == 0:
        signal.alarm(
            120
        )  # a lock that another thread held when this process was copied is never released
        try:
            writer = CheckpointWriter(target, 1000, **options)
            for name, tensor in list(tensors().items())[:count]:
                writer.add(name, tensor)
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)  # rather than go on with the other tests
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("count", range(7))
def test_a_killed_run_resumes_to_the_same_bytes(tmp_path, count):
    killed_after(tmp_path / "out", count, resume=True)
    assert not (tmp_path / "out").exists() and (tmp_path / ".out.partial").exists()
    with CheckpointWriter(tmp_path / "out", 1000, resume=True) as writer:
        assert len(writer.finished) == max(count - 1, 0) // 2 * 2  # whole shards of two
        for name, tensor in tensors().items():
            writer.add(
                name, torch.full_like(tensor, float("nan")) if name in writer.finished else tensor
            )
        writer.finish(CONFIG)
    assert contents(tmp_path / "out") == contents(write(tmp_path / "straight"))
    assert not (tmp_path / ".out.partial").exists()


def test_a_killed_run_starts_over_without_resume(tmp_path):
    killed_after(tmp_path / "out", 5)
    assert contents(write(tmp_path / "out")) == contents(write(tmp_path / "straight"))


def test_flush_makes_what_was_added_safe(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        CheckpointWriter(tmp_path / "out", resume=True) as writer,
    ):
        writer.add("a", torch.zeros(1))
        writer.flush()
        writer.add("b", torch.zeros(1))
        raise KeyboardInterrupt
    with CheckpointWriter(tmp_path / "out", resume=True) as writer:
        assert writer.finished == {"a"}


def test_a_run_killed_while_finishing_resumes(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        CheckpointWriter(tmp_path / "out", 1000, resume=True, fingerprint="x") as writer,
    ):
        for name, tensor in tensors().items():
            writer.add(name, tensor)
        writer.flush()
        writer._name_shards()
        raise KeyboardInterrupt
    write(tmp_path / "out", resume=True, fingerprint="x")
    assert contents(tmp_path / "out") == contents(write(tmp_path / "straight"))


def test_work_of_another_recipe_is_not_continued(tmp_path):
    killed_after(tmp_path / "out", 5, resume=True, fingerprint="int4")
    with pytest.raises(OptionError, match=r"\.out\.partial.*another recipe"):
        CheckpointWriter(tmp_path / "out", resume=True, fingerprint="int8")
    with CheckpointWriter(tmp_path / "out", resume=True, fingerprint="int4") as writer:
        assert len(writer.finished) == 4


def test_two_writers_of_one_folder_do_not_mix(tmp_path):
    with (
        CheckpointWriter(tmp_path / "out", resume=True),
        pytest.raises(ResourceError, match="another process"),
    ):
        CheckpointWriter(tmp_path / "out", resume=True)


def test_a_full_disk_is_one_clear_line_and_loses_nothing(tmp_path):
    resource = pytest.importorskip("resource")
    write(tmp_path / "out", 2)
    before = contents(tmp_path / "out")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with (
            pytest.raises(ResourceError, match=r"cannot write model-00002.safetensors") as caught,
            CheckpointWriter(tmp_path / "out", overwrite=True, resume=True) as writer,
        ):
            writer.add("small", torch.zeros(10))
            writer.flush()
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (2000, limits[1])
            )  # the second shard does not fit
            writer.add("large", torch.zeros(10_000))
            writer.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value) and "--resume" in str(caught.value)
    assert contents(tmp_path / "out") == before
    with CheckpointWriter(tmp_path / "out", overwrite=True, resume=True) as writer:
        assert writer.finished == {"small"}


def test_adding_a_name_twice_is_a_mistake(tmp_path):
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add("a", torch.zeros(1))
        with pytest.raises(ValueError, match="twice"):
            writer.add("a", torch.zeros(1))


def test_transformers_loads_what_is_written(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
        )
    )
    model.save_pretrained(tmp_path / "source")
    source = Checkpoint(tmp_path / "source")
    with CheckpointWriter(tmp_path / "out", 20_000) as writer:
        for name in source.names():
            writer.add(name, source.tensor(name))
        writer.finish(source.config, source=source.folder)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(10)[None]
    assert len(Checkpoint(tmp_path / "out").files) > 1
    assert all(
        torch.equal(weight, loaded.state_dict()[name])
        for name, weight in model.state_dict().items()
    )
    torch.testing.assert_close(loaded(tokens).logits, model.eval()(tokens).logits)


def leave_previous(target):
    """What a kill after the second rename of an overwrite leaves: the new folder, and the old one
    under another name."""
    old = previous_of(target)
    old.mkdir()
    (old / "config.json").write_text('{"old": true}')
    return old


def test_an_old_folder_left_by_a_kill_after_the_second_rename_is_cleaned_up(tmp_path):
    target = tmp_path / "model"
    for number in range(3):
        with CheckpointWriter(target, overwrite=True) as writer:
            assert not previous_of(target).exists(), "at the start, not after hours of work"
            writer.add("a", torch.full((2,), float(number)))
            writer.finish({"number": number})
        leave_previous(target)
    assert json.loads((target / "config.json").read_text()) == {"number": 2}


def test_an_old_folder_is_not_resurrected_when_the_new_one_was_deleted(tmp_path):
    target = tmp_path / "model"
    old = leave_previous(target)
    with CheckpointWriter(target) as writer:  # without overwrite: there is nothing
        writer.add("a", torch.ones(2))
        assert not target.exists() and old.exists(), (
            "nothing is lost before the new one is complete"
        )
        writer.finish({"new": True})
    assert json.loads((target / "config.json").read_text()) == {"new": True} and not old.exists()


def test_a_torn_note_of_unfinished_shards_is_one_clear_line(tmp_path):
    target = tmp_path / "model"
    with CheckpointWriter(target, resume=True) as writer:
        writer.add("a", torch.ones(2))
        writer.flush()
    (writer.staging / "resume.json").write_text('{"finger')
    with pytest.raises(
        OptionError, match=r"resume\.json: damaged .* run without --resume to start over"
    ):
        CheckpointWriter(target, resume=True)
    CheckpointWriter(target).__exit__(None, None, None)
