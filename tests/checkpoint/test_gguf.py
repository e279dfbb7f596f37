import contextlib
import functools
import math
import os
import re
import struct

import gguf
import numpy as np
import pytest
import torch
from gguf_files import tiny_model, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flyweight.checkpoint import Checkpoint
from flyweight.checkpoint.gguf import GGUF
from flyweight.checkpoint.gguf_import import convert
from flyweight.errors import CheckpointError, FlyweightError, UnsupportedError

TOKENS = torch.arange(2, 40)[None]


def logits(folder, **options):
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
            .eval()(TOKENS)
            .logits
        )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_converted_model_computes_what_the_original_does(tmp_path, family, tied):
    model = tiny_model(family, tied=tied)
    path = write_gguf(tmp_path / "model.gguf", model)
    folder = convert(path, tmp_path / "out", dtype=torch.float32)
    checkpoint = Checkpoint(folder)
    assert (
        checkpoint.config["tie_word_embeddings"] is tied
        and checkpoint.has("lm_head.weight") is not tied
    )
    assert checkpoint.config["model_type"] == family
    for name, tensor in model.state_dict().items():
        if not (tied and name == "lm_head.weight"):
            assert torch.equal(checkpoint.tensor(name), tensor), name
    checkpoint.check_used()
    with torch.no_grad():
        assert torch.allclose(logits(folder), model(TOKENS).logits, atol=1e-5)


def test_llama_with_biases_turns_their_rows_back_too(tmp_path):
    model = tiny_model("llama", attention_bias=True)
    checkpoint = Checkpoint(
        convert(write_gguf(tmp_path / "model.gguf", model), tmp_path / "out", dtype=torch.float32)
    )
    assert checkpoint.config["attention_bias"] is True
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(checkpoint.tensor(name), tensor), name


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_quantized_file_gives_the_values_that_transformers_reads_from_it(tmp_path, family):
    model = tiny_model(
        family, head_dim=128 if family == "qwen3" else 32
    )  # transformers knows no other size in Qwen3 files
    path = write_gguf(tmp_path / "model.gguf", model, quantize=gguf.GGMLQuantizationType.Q8_0)
    folder = convert(path, tmp_path / "out", dtype=torch.float32)
    assert torch.allclose(logits(folder), logits(tmp_path, gguf_file="model.gguf"), atol=1e-4)


def test_float16_is_the_default_and_half_the_size(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    half, full = (
        Checkpoint(convert(path, tmp_path / "half")),
        Checkpoint(convert(path, tmp_path / "full", dtype=torch.float32)),
    )
    assert half.nbytes * 2 == full.nbytes and half.config["torch_dtype"] == "float16"
    for name in full.names():
        assert torch.equal(half.tensor(name), full.tensor(name).half())


def test_config_takes_its_numbers_from_the_metadata(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tiny_model("qwen3", rope_theta=5e5))
    config = Checkpoint(convert(path, tmp_path / "out")).config
    wanted = dict(
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=265,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        bos_token_id=1,
        eos_token_id=0,
    )
    assert {key: config[key] for key in wanted} == wanted


def test_sampling_and_end_of_turn_go_to_the_generation_config(tmp_path):
    path = write_gguf(
        tmp_path / "model.gguf",
        tiny_model("llama"),
        tokenizer__ggml__eot_token_id=1,
        general__sampling__temp=0.5,
        general__sampling__top_k=20,
    )
    assert Checkpoint(convert(path, tmp_path / "out")).generation_config == {
        "bos_token_id": 1,
        "eos_token_id": [0, 1],
        "temperature": 0.5,
        "top_k": 20,
        "do_sample": True,
    }


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_is_kept(tmp_path, kind):
    path = write_gguf(
        tmp_path / "model.gguf",
        tiny_model("llama"),
        llama__rope__scaling__type=kind,
        llama__rope__scaling__factor=4.0,
        llama__rope__scaling__original_context_length=32,
    )
    assert Checkpoint(convert(path, tmp_path / "out")).config["rope_scaling"] == {
        "rope_type": kind,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }


def llama3_factors(factor=32.0, theta=10000.0, head_dim=32):
    """As llama.cpp's converter computes them."""
    factors = []
    for frequency in 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def test_llama3_rope_factors_become_its_settings(tmp_path):
    path = write_gguf(
        tmp_path / "model.gguf", tiny_model("llama"), extra={"rope_freqs.weight": llama3_factors()}
    )
    checkpoint = Checkpoint(convert(path, tmp_path / "out"))
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert not checkpoint.has("rope_freqs.weight")


def test_rope_factors_of_another_kind_are_refused(tmp_path):
    path = write_gguf(
        tmp_path / "model.gguf",
        tiny_model("llama"),
        extra={"rope_freqs.weight": llama3_factors() * 1.5},
    )
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight"):
        convert(path, tmp_path / "out")


# -- what can be wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["blk.1.attn_k.weight", "output_norm.weight", "blk.0.attn_q_norm.weight", "token_embd.weight"],
)
def test_a_missing_tensor_is_named(tmp_path, name):
    path = write_gguf(tmp_path / "model.gguf", tiny_model("qwen3"), skip={name})
    with pytest.raises(CheckpointError, match=rf"model\.gguf: tensor '{name}' is missing"):
        convert(path, tmp_path / "out")


def test_a_missing_bias_is_named(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tiny_model("qwen2"), skip={"blk.1.attn_v.bias"})
    with pytest.raises(CheckpointError, match=r"blk\.1\.attn_v\.bias"):
        convert(path, tmp_path / "out")


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path):
    path = write_gguf(
        tmp_path / "model.gguf",
        tiny_model("llama"),
        skip={"blk.1.ffn_up.weight"},
        extra={"blk.1.ffn_up.weight": np.ones((64, 95), np.float32)},
    )
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight.*\[64, 95\].*\[64, 96\]"):
        convert(path, tmp_path / "out")


def test_a_tensor_without_a_place_is_refused(tmp_path):
    router = {"blk.0.ffn_gate_inp.weight": np.ones((4, 96), np.float32)}
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"), extra=router)
    with pytest.raises(UnsupportedError, match=r"blk\.0\.ffn_gate_inp\.weight"):
        convert(path, tmp_path / "out")


@pytest.mark.parametrize("value", [float("nan"), 1e6])
def test_values_that_float16_cannot_hold_are_refused(tmp_path, value):
    model = tiny_model("llama")
    model.model.norm.weight.data[3] = value
    path = write_gguf(tmp_path / "model.gguf", model)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*float16"):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("keep", [2, 10, 200, 3000, 0.5, 0.99])
def test_a_truncated_file_is_one_clear_line(tmp_path, keep):
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(CheckpointError, match=r"model\.gguf") as caught:
        convert(path, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_another_kind_of_file_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        convert(tmp_path / "model.gguf", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "nearest"), [("mamba", ""), ("gemma4", "; the nearest that is: gemma3")]
)
def test_an_unknown_architecture_is_named(tmp_path, name, nearest):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        UnsupportedError, match=f"architecture '{name}' is not supported{nearest}; known: llama"
    ):
        convert(tmp_path / "model.gguf", tmp_path / "out")


def test_a_missing_number_is_named(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"llama.block_cound"))
    with pytest.raises(CheckpointError, match=r"llama\.block_count"):
        convert(path, tmp_path / "out")


def test_an_absurd_number_of_layers_ends_at_the_first_missing_one(tmp_path):
    model = tiny_model("llama")
    model.config.num_hidden_layers = 4_000_000_000
    with pytest.raises(CheckpointError, match=r"'blk\.2\.attn_norm\.weight' is missing"):
        convert(write_gguf(tmp_path / "model.gguf", model), tmp_path / "out")


def test_a_number_that_is_none_is_named(tmp_path):
    model = tiny_model("llama")
    model.config.rms_norm_eps = 0.0
    with pytest.raises(UnsupportedError, match=r"layer_norm_rms_epsilon.*above zero"):
        convert(write_gguf(tmp_path / "model.gguf", model), tmp_path / "out")


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(place=st.integers(0, 7000), value=st.integers(0, 255))
def test_one_wrong_byte_is_a_clear_error_or_harmless(tmp_path, whole_file, place, value):
    damaged = bytearray(whole_file)
    damaged[place] = value
    (tmp_path / "damaged.gguf").write_bytes(damaged)
    with contextlib.suppress(FlyweightError):
        Checkpoint(convert(tmp_path / "damaged.gguf", tmp_path / "out", overwrite=True))


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory):
    """7 kB of metadata, then the tensors."""
    return write_gguf(
        tmp_path_factory.mktemp("whole") / "model.gguf", tiny_model("qwen2", num_hidden_layers=1)
    ).read_bytes()


def test_one_part_of_a_split_file_is_refused(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"), split__count=3)
    with pytest.raises(UnsupportedError, match="llama-gguf-split"):
        convert(path, tmp_path / "out")


# -- the default model -----------------------------------------------------------------------------


def test_the_default_model_knows_the_capital_of_france(smollm2):
    from transformers import AutoModelForCausalLM

    checkpoint = Checkpoint(smollm2)
    tokenizer = checkpoint.tokenizer()
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    prompt = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert tokenizer.decode(model(prompt).logits[0, -1].argmax()) == " Paris"


def header(*fields, tensors=0, count=None):
    """A GGUF file of metadata only: (name, type, packed value) each."""
    data = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(fields) if count is None else count)
    for name, kind, value in fields:
        data += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value
    return data


def array(kind, count, data=b""):
    return struct.pack("<IQ", kind, count) + data


@pytest.mark.parametrize(
    ("data", "claim"),
    [
        (
            header(("tokenizer.ggml.scores", 9, array(6, 2**40))),
            "arrays of 1,099,511,627,776 entries",
        ),
        (header(("tokenizer.ggml.scores", 9, array(6, 1_000_000))), "something of 4,000,000 bytes"),
        (header(("tokenizer.ggml.tokens", 9, array(8, 1_000_000))), "1,000,000 array entries"),
        (
            header(
                (
                    "a",
                    9,
                    functools.reduce(lambda inner, _: array(9, 1, inner), range(5), array(4, 0)),
                )
            ),
            "arrays within arrays",
        ),
        (header(("a", 8, struct.pack("<Q", 2**62))), "a string of 4,611,686,018,427,387,904 bytes"),
        (header(("a", 8, struct.pack("<Q", 1000))), "something of 1,000 bytes"),
        (header(("a", 99, b"")), "a value of unknown type 99"),
        (header(count=2**60), "1,152,921,504,606,846,976 metadata fields"),
        (header(tensors=2**60), "1,152,921,504,606,846,976 tensors"),
        (
            header(tensors=1) + struct.pack("<QI", 0, 2**31) + bytes(64),
            "a tensor of 2147483648 dimensions",
        ),
    ],
    ids=range(10),
)
def test_a_header_may_not_claim_more_than_the_file_holds(tmp_path, data, claim):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(
        CheckpointError,
        match=re.escape(f"truncated or damaged GGUF file: its header claims {claim}"),
    ):
        GGUF(path)


def test_only_regular_files_are_opened(tmp_path):
    """A pipe would be waited for until somebody writes into it."""
    pipe = tmp_path / "model.gguf"
    os.mkfifo(pipe)
    with pytest.raises(CheckpointError, match=r"model\.gguf: not a regular file"):
        GGUF(pipe)
