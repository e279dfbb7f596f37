"""A GGUF file kept as it is: no second copy of its weights on disk, none in more bits in memory."""

import gguf
import pytest
import torch
from gguf_files import tiny_model, write_gguf
from gguf_random import BLOCK_TYPES, random_blocks

from flyweight.checkpoint import Checkpoint
from flyweight.checkpoint.convert import convert
from flyweight.checkpoint.gguf import GGUF, parts_of
from flyweight.checkpoint.gguf_blocks import TYPES, read_blocks
from flyweight.checkpoint.hub import resolve
from flyweight.errors import CheckpointError, OptionError
from flyweight.kernels.native import library
from flyweight.tensors import IntGroup, Plain

Types = gguf.GGMLQuantizationType
SMALL = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # those that the gguf package can make


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    library.why_not()  # loads the kernels: to compile them into a cache of its own takes long
    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_every_type_means_exactly_what_the_gguf_package_says(name):
    raw = random_blocks(name, 24, 512)
    kind = TYPES[BLOCK_TYPES[name]]
    assert Types(BLOCK_TYPES[name]).name == name
    assert gguf.GGML_QUANT_SIZES[Types[name]] == (kind.inputs, kind.nbytes)
    weight = read_blocks(kind, torch.from_numpy(raw))
    assert torch.equal(weight.dequantize(), torch.from_numpy(gguf.dequantize(raw, Types[name])))
    assert weight.nbytes == raw.nbytes and weight.shape == (24, 512)


@pytest.mark.parametrize("name", SMALL)
def test_a_file_is_run_in_its_own_bits(tmp_path, cache, name):
    """Weights are those that a float32 folder of the file has, and nothing is written out."""
    path = write_gguf(
        tmp_path / "model.gguf", tiny_model("llama", tied=False), quantize=Types[name]
    )
    checkpoint = Checkpoint(resolve(path))
    exact = Checkpoint(resolve(path, dtype="float32"))
    assert checkpoint.format.name == "gguf" and not list((cache / "gguf").rglob("*.safetensors"))
    for prefix in (
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.k_proj",
        "model.layers.0.mlp.down_proj",
        "lm_head",
        "model.embed_tokens",
    ):
        weight = checkpoint.linear(prefix)
        assert not isinstance(weight, Plain) and weight.bits_per_weight < 9
        assert torch.equal(weight.dequantize(), exact.tensor(f"{prefix}.weight")), prefix
    assert checkpoint.nbytes < path.stat().st_size
    assert sum(file.lstat().st_size for file in resolve(path).iterdir()) < 40_000  # a link, no copy


def test_q4_0_and_q8_0_are_integers_that_every_kernel_knows(tmp_path):
    for name, bits in (("Q4_0", 4), ("Q8_0", 8)):
        path = write_gguf(tmp_path / f"{name}.gguf", tiny_model("qwen2"), quantize=Types[name])
        weight = Checkpoint(resolve(path)).linear("model.layers.0.mlp.up_proj")
        assert isinstance(weight, IntGroup)
        assert (weight.bits, weight.group_size, weight.zeros, weight.scales.dtype) == (
            bits,
            32,
            None,
            torch.float16,
        )


@pytest.mark.parametrize(("name", "tied"), [("Q4_1", True), ("Q5_0", False), ("Q8_0", True)])
def test_the_native_kernels_answer_as_transformers_does(tmp_path, name, tied):
    from transformers import AutoModelForCausalLM

    from flyweight.models import native

    if library.why_not():
        pytest.skip(library.why_not())
    model = tiny_model(
        "llama",
        tied=tied,
        hidden_size=256,
        intermediate_size=256,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    path = write_gguf(tmp_path / "model.gguf", model, quantize=Types[name])
    checkpoint = Checkpoint(resolve(path))
    decoder = native.load(checkpoint, exact=True)
    stored = sum(entry.nbytes for entry in checkpoint.entries.values() if len(entry.shape) == 2)
    assert decoder.nbytes <= 1.03 * stored  # in memory as on disk
    tokens = torch.arange(2, 40)
    reference = AutoModelForCausalLM.from_pretrained(
        resolve(path, dtype="float32"), dtype=torch.float32
    ).eval()
    with torch.no_grad():
        expected = reference(tokens[None]).logits[0]
    assert torch.allclose(
        whole_prompt(decoder, tokens), expected, atol=1e-4 * float(expected.abs().max())
    )


def whole_prompt(decoder, tokens):
    from flyweight.batch import Batch, KVStorage

    config = decoder.config
    count = len(tokens)
    pages = [
        KVStorage(
            torch.zeros(4, 16, config.kv_heads, config.head_dim),
            torch.zeros(4, 16, config.kv_heads, config.head_dim),
        )
        for _ in range(config.layers)
    ]
    places = torch.arange(count)
    batch = Batch(
        tokens=tokens,
        positions=places,
        slots=places,
        block_tables=torch.arange(4, dtype=torch.int32)[None],
        query_starts=[0, count],
        kv_lengths=[count],
        output_rows=places,
    )
    return decoder.forward(batch, pages)


def test_it_can_still_be_written_out_as_an_ordinary_folder(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"), quantize=Types.Q4_1)
    convert(resolve(path), tmp_path / "plain", format="plain", dtype="float32")
    plain, exact = Checkpoint(tmp_path / "plain"), Checkpoint(resolve(path, dtype="float32"))
    assert plain.format is None and plain.names() != []
    for name in exact.names():
        assert torch.equal(plain.tensor(name).float(), exact.tensor(name)), name


def test_integers_of_a_gguf_go_into_other_formats_without_loss(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"), quantize=Types.Q4_0)
    convert(resolve(path), tmp_path / "packed", format="compressed-tensors")
    packed, kept = Checkpoint(tmp_path / "packed"), Checkpoint(resolve(path))
    assert packed.tensor("model.embed_tokens.weight").dtype == torch.float16
    for part in ("self_attn.q_proj", "mlp.down_proj"):
        weights = [one.linear(f"model.layers.0.{part}") for one in (packed, kept)]
        assert torch.equal(weights[0].dequantize(), weights[1].dequantize())
    packed.linear("model.layers.1.mlp.up_proj")


# -- several files ---------------------------------------------------------------------------------


def split(path, folder, count=3):
    """As llama.cpp's gguf-split does: the metadata in the first part, some tensors in each."""
    reader = gguf.GGUFReader(path)
    folder.mkdir()
    for number in range(count):
        part = folder / f"model-{number + 1:05}-of-{count:05}.gguf"
        writer = gguf.GGUFWriter(part, "llama")
        writer.add_uint16("split.count", count)
        writer.add_uint16("split.no", number)
        for name, field in reader.fields.items() if number == 0 else ():
            if not name.startswith("GGUF.") and name != "general.architecture":
                kind, *inner = field.types
                writer.add_key_value(
                    name, field.contents(), kind, sub_type=inner[0] if inner else None
                )
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return folder


def test_a_folder_of_parts_is_one_model(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"), quantize=Types.Q8_0)
    folder = split(path, tmp_path / "parts")
    assert [part.name for part in parts_of(folder / "model-00002-of-00003.gguf")] == sorted(
        p.name for p in folder.iterdir()
    )
    whole, parts = Checkpoint(resolve(path)), Checkpoint(resolve(folder))
    assert set(parts.names()) == set(whole.names()) and len(parts.files) == 3
    for name in whole.names():
        assert torch.equal(parts.tensor(name), whole.tensor(name)), name
    assert set(GGUF(folder / "model-00001-of-00003.gguf").tensors) == set(GGUF(path).tensors)


def test_a_missing_part_is_named(tmp_path):
    folder = split(write_gguf(tmp_path / "model.gguf", tiny_model("llama")), tmp_path / "parts")
    (folder / "model-00002-of-00003.gguf").unlink()
    with pytest.raises(
        CheckpointError, match=r"one of 3 parts, of which model-00002-of-00003\.gguf is missing"
    ):
        resolve(folder)


def test_of_several_models_in_a_folder_one_must_be_named(tmp_path):
    (tmp_path / "two").mkdir()
    for name in ("a", "b"):
        write_gguf(tmp_path / "two" / f"{name}.gguf", tiny_model("llama"))
    with pytest.raises(OptionError, match=r"several models: a\.gguf, b\.gguf"):
        resolve(tmp_path / "two")
    assert Checkpoint(resolve(tmp_path / "two" / "b.gguf")).has("model.norm.weight")


# -- faults ----------------------------------------------------------------------------------------


def test_scales_that_are_no_numbers_are_refused(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"), quantize=Types.Q8_0)
    checkpoint = Checkpoint(resolve(path))
    shard = checkpoint._shards[checkpoint.files[0]]
    at = shard.table["model.layers.0.mlp.up_proj.weight"].offset
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(b"\xff\x7f")
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight' holds NaN"):
        Checkpoint(resolve(path)).linear("model.layers.0.mlp.up_proj")


def test_a_file_that_has_gone_away_is_one_clear_line(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    folder = resolve(path)
    path.unlink()
    with pytest.raises(CheckpointError, match="no such file or folder"):
        resolve(path)
    with pytest.raises(CheckpointError, match=r"model\.gguf.*gone"):
        Checkpoint(folder)
