"""GGUF files that we write: read again by the gguf package and by ourselves."""

import gguf
import pytest
import torch
from gguf_files import tiny_model, write_gguf

from flyweight.checkpoint import Checkpoint
from flyweight.checkpoint.convert import convert
from flyweight.checkpoint.gguf_encode import ENCODERS
from flyweight.checkpoint.gguf_export import export
from flyweight.checkpoint.hub import resolve
from flyweight.errors import OptionError, UnsupportedError

Types = gguf.GGMLQuantizationType


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folder_of(tmp_path, family="llama", **options):
    """An ordinary folder with a tokenizer."""
    path = write_gguf(
        tmp_path / "source.gguf",
        tiny_model(family, **options),
        pre="smollm" if family == "llama" else "qwen2",
    )
    return resolve(path, dtype="float16")


@pytest.mark.parametrize("kind", ENCODERS)
def test_rounding_is_near_the_weights_and_read_alike_by_the_gguf_package(kind):
    weight = torch.randn(24, 512) * 0.02
    weight[3, 32:64] = 0
    raw = ENCODERS[kind](weight)
    read = torch.from_numpy(gguf.dequantize(raw.numpy(), Types[kind]))
    error = float((read - weight).norm() / weight.norm())
    assert error < {"Q8_0": 0.006, "Q6_K": 0.03, "Q4_K": 0.1, "Q4_0": 0.1}[kind]
    assert bool((read[3, 32:64] == 0).all())
    if kind in ("Q8_0", "Q4_0"):  # as good as the package's own
        theirs = torch.from_numpy(
            gguf.dequantize(gguf.quantize(weight.numpy(), Types[kind]), Types[kind])
        )
        assert error < 1.02 * float((theirs - weight).norm() / weight.norm())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_file_holds_the_weights_and_the_tokenizer_of_its_folder(tmp_path, family, tied):
    source = folder_of(tmp_path, family, tied=tied)
    export(source, tmp_path / "out.gguf")
    written, original = Checkpoint(resolve(tmp_path / "out.gguf")), Checkpoint(source)
    assert set(written.names()) == set(original.names())
    for name in original.names():
        assert torch.equal(written.tensor(name).float(), original.tensor(name).float()), name
    same = (
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_theta",
        "vocab_size",
        "max_position_embeddings",
        "tie_word_embeddings",
        "eos_token_id",
        "bos_token_id",
    )
    assert {key: written.config[key] for key in same} == {key: original.config[key] for key in same}
    text = "hello world 123, <think> or"
    ids = [one.tokenizer().encode(text) for one in (written, original)]
    assert ids[0] == ids[1]
    assert written.tokenizer().chat_template == original.tokenizer().chat_template


@pytest.mark.parametrize(
    ("kind", "linear"),
    [("F16", "F16"), ("Q8_0", "Q8_0"), ("Q4_0", "Q4_0"), ("Q6_K", "Q6_K"), ("Q4_K", "Q4_K")],
)
def test_types_that_are_asked_for(tmp_path, kind, linear):
    source = folder_of(tmp_path, hidden_size=256, intermediate_size=512, num_attention_heads=8)
    result = export(source, tmp_path / "out.gguf", kind=kind)
    types = {
        tensor.name: tensor.tensor_type.name
        for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors
    }
    assert types["blk.0.ffn_up.weight"] == linear and types["output_norm.weight"] == "F32"
    assert types["token_embd.weight"] == ("F16" if kind == "F16" else "Q8_0")
    assert result.modules[linear] >= 14 and result.bytes_after < result.bytes_before * 1.02
    stored, read = (
        Checkpoint(resolve(one)).linear("model.layers.1.self_attn.q_proj").dequantize()
        for one in (source, tmp_path / "out.gguf")
    )
    assert float((stored - read).norm() / stored.norm()) < 0.12


def test_integers_are_written_without_loss(tmp_path):
    for kind in ("Q4_0", "Q8_0", "Q4_1", "Q5_0", "Q5_1"):
        path = write_gguf(tmp_path / f"{kind}.gguf", tiny_model("llama"), quantize=Types[kind])
        export(resolve(path), tmp_path / f"again-{kind}.gguf")
        first, again = (
            {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
            for file in (path, tmp_path / f"again-{kind}.gguf")
        )
        for name, tensor in first.items():
            assert (
                again[name].tensor_type == tensor.tensor_type
                and (again[name].data == tensor.data).all()
            ), name


def test_another_format_of_the_same_integers_becomes_the_same_file(tmp_path):
    path = write_gguf(tmp_path / "q.gguf", tiny_model("llama"), quantize=Types.Q4_0)
    convert(resolve(path), tmp_path / "packed", format="compressed-tensors")
    export(tmp_path / "packed", tmp_path / "again.gguf")
    for prefix in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        weights = [
            Checkpoint(resolve(one)).linear(prefix).dequantize()
            for one in (path, tmp_path / "again.gguf")
        ]
        assert torch.equal(*weights)


def test_what_would_be_lost_is_said_and_nothing_is_left(tmp_path):
    source = folder_of(tmp_path)
    float32 = resolve(tmp_path / "source.gguf", dtype="float32")
    with pytest.raises(
        UnsupportedError, match="float32 weights do not all fit into F16; --dtype F16 rounds"
    ):
        export(float32, tmp_path / "out.gguf")
    with pytest.raises(OptionError, match=r"unknown GGUF type 'Q4_M'.*Q4_K"):
        export(source, tmp_path / "out.gguf", kind="Q4_M")
    with pytest.raises(OptionError, match=r"ends in \.gguf"):
        export(source, tmp_path / "out")
    (tmp_path / "there.gguf").write_text("")
    with pytest.raises(OptionError, match="--overwrite"):
        export(source, tmp_path / "there.gguf")
    with pytest.raises(OptionError, match="is the model that is read"):
        export(resolve(tmp_path / "source.gguf"), tmp_path / "source.gguf", overwrite=True)
    assert not [
        path.name
        for path in tmp_path.iterdir()
        if "partial" in path.name or path.name == "out.gguf"
    ]


def test_llama3_rope_scaling_is_written_as_factors(tmp_path):
    import json

    source = folder_of(tmp_path)
    config = json.loads((source / "config.json").read_text())
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    (source / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling}))
    export(source, tmp_path / "out.gguf")
    assert Checkpoint(resolve(tmp_path / "out.gguf")).config["rope_scaling"] == scaling
