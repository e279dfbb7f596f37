import contextlib
import json
import os
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from flyweight.checkpoint import Checkpoint
from flyweight.checkpoint.formats import CheckpointNotice
from flyweight.errors import CheckpointError, UnsupportedError
from flyweight.tensors import Plain

PREFIX = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(tmp_path):
    """One shard with two tensors."""
    tensors = {
        f"{PREFIX}.weight": torch.randn(8, 4),
        "model.norm.weight": torch.ones(4, dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    """Two shards with an index."""
    save_file({"a.weight": torch.randn(2, 2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b.weight": torch.randn(2, 2)}, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "config.json").write_text("{}")
    write_index(
        tmp_path,
        {
            "a.weight": "model-00001-of-00002.safetensors",
            "b.weight": "model-00002-of-00002.safetensors",
        },
    )
    return tmp_path


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_raw(path, header, data=b""):
    """A safetensors file with any header, true or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def fails(folder, *parts, error=CheckpointError):
    """Opening and reading everything fails with a message of one line that holds all of `parts`."""
    with pytest.raises(error) as caught:
        checkpoint = Checkpoint(folder)
        for name in checkpoint.names():
            checkpoint.tensor(name)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def test_tensors_come_in_their_stored_type_and_are_counted_as_used(folder):
    checkpoint = Checkpoint(folder)
    assert set(checkpoint.names()) == {f"{PREFIX}.weight", "model.norm.weight"}
    assert checkpoint.shape("model.norm.weight") == (4,) and checkpoint.has("model.norm.weight")
    assert checkpoint.unused() == checkpoint.names()
    assert checkpoint.tensor("model.norm.weight").dtype == torch.bfloat16
    assert checkpoint.unused() == [f"{PREFIX}.weight"]
    weight = checkpoint.linear(PREFIX)
    assert isinstance(weight, Plain) and weight.shape == (8, 4)
    checkpoint.check_used()


def test_a_tensor_is_a_view_of_the_file_and_not_a_copy(folder):
    checkpoint = Checkpoint(folder)
    first, second = (checkpoint.tensor(f"{PREFIX}.weight") for _ in range(2))
    assert first.data_ptr() == second.data_ptr()


def test_shards_are_joined_by_the_index(sharded):
    checkpoint = Checkpoint(sharded)
    assert checkpoint.names() == ["a.weight", "b.weight"]
    assert checkpoint.nbytes == 32
    assert [file.name for file in checkpoint.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_files_beside_the_index_are_not_read(sharded):
    (sharded / "consolidated.safetensors").write_bytes(b"something else")
    assert Checkpoint(sharded).names() == ["a.weight", "b.weight"]


def test_a_whole_file_beside_the_shards_is_told(sharded):
    (sharded / "model.safetensors").write_bytes(b"of another day")
    with pytest.warns(CheckpointNotice, match="would read model.safetensors, which is there too"):
        assert Checkpoint(sharded).names() == ["a.weight", "b.weight"]


def test_the_hash_depends_on_every_weight_and_on_nothing_else(sharded):
    before = Checkpoint(sharded).hash()
    (sharded / "config.json").write_text('{"other": 1}')
    assert Checkpoint(sharded).hash() == before
    save_file({"b.weight": torch.full((2, 2), 0.5)}, sharded / "model-00002-of-00002.safetensors")
    assert Checkpoint(sharded).hash() != before


def test_unused_tensors_are_named_with_a_guess(folder):
    checkpoint = Checkpoint(folder)
    checkpoint.tensor("model.norm.weight")
    with pytest.raises(
        CheckpointError,
        match=rf"model.safetensors: without a place.*{PREFIX}.weight.*num_hidden_layers",
    ):
        checkpoint.check_used()
    checkpoint.check_used(ignore=["*.q_proj.*"])


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("model.layers.0.mlp.up_proj.qweight", "quantization_config"),
        ("model.layers.0.mlp.up_proj.bias", "a bias"),
        ("model.layers.0.mlp.experts.3.up_proj.weight", "mixture-of-experts"),
        ("visual.blocks.0.weight", "vision"),
        ("base.lora_A.weight", "adapter"),
        ("something.weight", "not a part"),
    ],
)
def test_the_guess_fits_the_tensor(tmp_path, name, guess):
    save_file({name: torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=guess):
        Checkpoint(tmp_path).check_used()


def test_rope_tables_of_old_exports_may_stay_unused(tmp_path):
    save_file(
        {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text("{}")
    Checkpoint(tmp_path).check_used()


# -- what can be wrong -----------------------------------------------------------------------------


def test_missing_folder(tmp_path):
    fails(tmp_path / "nowhere", "nowhere", "no such folder")


def test_missing_config(folder):
    (folder / "config.json").unlink()
    fails(folder, "no config.json")


@pytest.mark.parametrize("text", ["{", "", "[1]", "\x00", '{"a": ' * 5000])
def test_bad_config_json(folder, text):
    (folder / "config.json").write_text(text)
    fails(folder, "config.json", "JSON")


def test_truncated_shard_names_file_and_tensor(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-5])
    fails(folder, "model.safetensors", "truncated", ".weight'", f"{len(data):,}")


@pytest.mark.parametrize("keep", [0, 4, 8, 20])
def test_shard_cut_within_its_header(folder, keep):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:keep])
    fails(folder, "model.safetensors", "truncated")


@pytest.mark.parametrize(
    "header",
    [
        b"{not json",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32"}}',
        b"\xff\xfe" * 20,
        b"[" * 99_999,
        b'{"a": {"dtype": "F32", "shape": 3, "data_offsets": [0, 4]}}',
    ],
)
def test_bad_header(folder, header):
    write_raw(folder / "model.safetensors", header, b"\0" * 64)
    fails(folder, "model.safetensors", "header")


@settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(place=st.integers(0, 200), value=st.integers(0, 255))
def test_one_wrong_byte_is_a_clear_error_or_harmless(folder, place, value):
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[place] = value
    (folder / "damaged").mkdir(exist_ok=True)
    (folder / "damaged" / "config.json").write_text("{}")
    (folder / "damaged" / "model.safetensors").write_bytes(data)
    with contextlib.suppress(CheckpointError):
        checkpoint = Checkpoint(folder / "damaged")
        assert {name: tuple(checkpoint.tensor(name).shape) for name in checkpoint.names()} == {
            name: checkpoint.shape(name) for name in checkpoint.names()
        }


def test_shape_that_does_not_fit_its_bytes(folder):
    write_raw(
        folder / "model.safetensors",
        {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}},
        b"\0" * 4,
    )
    fails(folder, "model.safetensors", "damaged")


def test_a_huge_shape_allocates_nothing(folder):
    header = {"a": {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 1 << 62]}}
    write_raw(folder / "model.safetensors", header, b"\0" * 8)
    fails(folder, "model.safetensors", "truncated", "'a'")


def test_unknown_dtype(folder):
    write_raw(
        folder / "model.safetensors",
        {"a": {"dtype": "F7", "shape": [1], "data_offsets": [0, 1]}},
        b"\0",
    )
    fails(folder, "model.safetensors", "damaged")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nan_and_infinity(folder, value, dtype):
    weight = torch.zeros(7, 5)
    weight[3, 2] = value
    save_file({"bad.weight": weight.to(dtype)}, folder / "model.safetensors")
    fails(folder, "model.safetensors", "'bad.weight'", "NaN or infinity")


def test_nan_in_float8(folder):
    save_file(
        {"bad.weight": torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)},
        folder / "model.safetensors",
    )
    fails(folder, "'bad.weight'", "NaN")


def test_wrong_shape_names_both(folder):
    checkpoint = Checkpoint(folder)
    with pytest.raises(
        CheckpointError, match=r"model.safetensors.*'model.norm.weight'.*\[4\].*\[6\]"
    ):
        checkpoint.expect("model.norm.weight", (6,))
    assert checkpoint.expect("model.norm.weight", (4,)).shape == (4,)


def test_missing_tensor_names_the_nearest(folder):
    with pytest.raises(
        CheckpointError, match=r"'model.norms.weight' is missing.*'model.norm.weight'"
    ):
        Checkpoint(folder).tensor("model.norms.weight")


def test_shards_without_their_index(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    fails(sharded, "2 safetensors shards", "model.safetensors.index.json")
    (sharded / "model-00002-of-00002.safetensors").unlink()
    fails(sharded, "1 safetensors shard", "model.safetensors.index.json")


def test_index_with_a_missing_shard(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    fails(sharded, "index.json", "model-00002-of-00002.safetensors", "'b.weight'", "missing")


def test_index_that_names_a_tensor_no_shard_has(sharded):
    write_index(
        sharded,
        {
            "a.weight": "model-00001-of-00002.safetensors",
            "c.weight": "model-00002-of-00002.safetensors",
        },
    )
    fails(sharded, "index.json", "'c.weight'", "model-00002-of-00002.safetensors")


def test_tensor_in_two_shards(sharded):
    save_file(
        {"a.weight": torch.zeros(2, 2), "b.weight": torch.zeros(2, 2)},
        sharded / "model-00002-of-00002.safetensors",
    )
    fails(
        sharded,
        "model-00002-of-00002.safetensors",
        "'a.weight'",
        "also in model-00001-of-00002.safetensors",
    )


@pytest.mark.parametrize(
    "content", ["{", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 3}}']
)
def test_bad_index(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    fails(sharded, "model.safetensors.index.json")


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "weights.bin"])
def test_index_cannot_lead_out_of_the_folder(sharded, file):
    write_index(sharded, {"a.weight": file})
    fails(sharded, "index.json", "'a.weight'", "same folder")


def test_pickles_are_refused_with_what_to_do(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    fails(folder, "pytorch_model.bin", "pickle", "save_pretrained")


def test_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    fails(folder, "no weights", "copy them beside config.json")


def test_quantized_tensors_without_a_config_are_an_error(folder):
    save_file(
        {f"{PREFIX}.weight": torch.zeros(8, 4, dtype=torch.int8)}, folder / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"q_proj\.weight.*quantization_config"):
        Checkpoint(folder).linear(PREFIX)


def test_an_unknown_quantization_method_is_an_error(folder):
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "gtpq"}}')
    with pytest.raises(UnsupportedError, match="gptq"):
        Checkpoint(folder).linear(PREFIX)


def test_code_that_comes_with_a_model_is_never_run(folder):
    (folder / "config.json").write_text(
        '{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}'
    )
    (folder / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["evil.Tokenizer", null]}}'
    )
    (folder / "evil.py").write_text("raise SystemExit('it ran')")
    checkpoint = Checkpoint(folder)
    assert checkpoint.tensor("model.norm.weight").shape == (4,)
    with pytest.raises(CheckpointError, match="tokenizer cannot be loaded"):
        checkpoint.tokenizer()


def test_missing_tokenizer_is_one_clear_line(folder):
    with pytest.raises(CheckpointError, match="tokenizer") as caught:
        Checkpoint(folder).tokenizer()
    assert "\n" not in str(caught.value)


def test_generation_config_is_read_where_there_is_one(folder):
    assert Checkpoint(folder).generation_config == {}
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    assert Checkpoint(folder).generation_config == {"temperature": 0.6}


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
)
def test_a_pipe_in_the_folder_is_named_and_never_opened(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name}: not a regular file"):
        Checkpoint(folder)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_a_folder_without_a_tokenizer_says_what_to_copy(folder, kind):
    """Of some kinds transformers would make a tokenizer without a single word."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": kind}))
    with pytest.raises(CheckpointError, match=r"there is no tokenizer; copy tokenizer\.json"):
        Checkpoint(folder).tokenizer()
