"""Tokenizers rebuilt from GGUF metadata, against transformers' own classes and against the
published word patterns."""

import pytest
from gguf_files import BYTE, CONTROL, UNKNOWN, byte_level_vocabulary, tiny_model, write_gguf
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flyweight.checkpoint import Checkpoint, gguf_tokenizer
from flyweight.checkpoint.gguf_import import convert
from flyweight.checkpoint.gguf_tokenizer import write_tokenizer
from flyweight.errors import CheckpointError, UnsupportedError

TEXTS = [
    "hello world",
    "  two  spaces ",
    "it's we'll I'M",
    "tab\tand\n\n\nlines\r\n",
    "x1 23 4567.89",
    "日本語 ½ ² é 🙂",
    "a_b-c(d)[e]{f}",
    "<|start|>hello<|end|>",
    "<think>\nhm</think>",
    "",
    " ",
    "\n",
]


def byte_level(pre, **options):
    tokens, types, merges = byte_level_vocabulary()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in options.items()},
    }


def sentencepiece(**options):
    words = [
        "▁",
        "h",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "he",
        "ll",
        "hell",
        "hello",
        "▁hello",
        "▁w",
        "or",
        "▁wor",
        "ld",
        "▁world",
    ]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *words]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[1] * len(words)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(words))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in options.items()},
    }


def build(metadata, folder):
    write_tokenizer(metadata, folder, file=folder / "model.gguf")
    return PreTrainedTokenizerFast.from_pretrained(folder)


def pieces(tokenizer, text):
    """The words a text is cut into before any merge."""
    return [word for word, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
def test_byte_level_tokens_are_those_of_transformers(tmp_path, pre):
    path = write_gguf(
        tmp_path / "model.gguf", tiny_model("llama"), pre=pre, tokenizer__ggml__add_bos_token=False
    )
    ours = Checkpoint(convert(path, tmp_path / "out")).tokenizer()
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("smollm", "a 12 b", ["a", "Ġ", "1", "2", "Ġb"]),  # every digit alone, its space too
        ("qwen2", "a 12 b", ["a", "Ġ", "1", "2", "Ġb"]),
        ("llama-bpe", "a 12345 b", ["a", "Ġ", "123", "45", "Ġb"]),  # in threes from the left
        ("gpt-2", "a 12 b", ["a", "Ġ12", "Ġb"]),
        ("smollm", "I'm (x)", ["I", "'m", "Ġ(", "x", ")"]),
        ("gpt-2", "I'M", ["I", "'", "M"]),
        ("qwen2", "I'M", ["I", "'M"]),  # contractions whatever their case
        ("qwen2", "(x)\n\n", ["(x", ")ĊĊ"]),
        ("gpt-4o", "HelloWorld don't 1234", ["Hello", "World", "Ġdon't", "Ġ", "123", "4"]),
        ("glm4", "I'm 1234", ["I", "'m", "Ġ", "123", "4"]),
        ("tekken", "HelloWorld don't 12", ["Hello", "World", "Ġdon", "'t", "Ġ", "1", "2"]),
        ("qwen35", "कि 12", ["à¤ķà¤¿", "Ġ", "1", "2"]),  # a vowel sign belongs to its letter
        ("qwen2", "कि 12", ["à¤ķ", "à¤¿", "Ġ", "1", "2"]),
        ("deepseek-llm", "a b12\n!?", ["a", "Ġb", "12", "Ċ", "!?"]),
        ("deepseek-v3", "a 1234 .x(y", ["a", "Ġ", "123", "4", "Ġ.", "x", "(y"]),
    ],
)
def test_words_are_cut_as_the_authors_of_each_pattern_do(tmp_path, pre, text, words):
    assert pieces(build(byte_level(pre), tmp_path), text) == words


def test_an_unknown_word_pattern_is_an_error_and_not_a_guess(tmp_path):
    with pytest.raises(
        UnsupportedError, match=r"model\.gguf: unknown word pattern 'qwen-2'; did you mean 'qwen2'"
    ):
        build(byte_level("qwen-2"), tmp_path)


def test_special_tokens_stay_whole_and_fillers_are_left_out(tmp_path):
    tokenizer = build(byte_level("qwen2"), tmp_path)
    assert tokenizer.encode("<|start|>he<|end|>") == [1, tokenizer.convert_tokens_to_ids("he"), 0]
    assert tokenizer.decode([1, 0], skip_special_tokens=True) == ""
    think = tokenizer.convert_tokens_to_ids("<think>")
    assert (
        tokenizer.encode("<think>") == [think]
        and tokenizer.decode([think], skip_special_tokens=True) == "<think>"
    )
    assert "[PAD0]" not in tokenizer.get_vocab()
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|start|>",
        "<|end|>",
        None,
    )


def test_qwen_composes_accents_first(tmp_path):
    tokenizer = build(byte_level("qwen2"), tmp_path)
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


def test_llama3_takes_a_known_word_whole(tmp_path):
    metadata = byte_level("llama-bpe", add_bos_token=False)
    metadata["tokenizer.ggml.tokens"][-1], metadata["tokenizer.ggml.token_type"][-1] = (
        "xyz",
        1,
    )  # no merge leads to it
    tokenizer = build(metadata, tmp_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("xyz")) == ["xyz"]


@pytest.mark.parametrize(
    ("pre", "options", "frame"),
    [
        ("llama-bpe", {}, [1, "x"]),
        ("llama-bpe", {"add_bos_token": False}, ["x"]),
        ("qwen2", {}, ["x"]),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, [1, "x", 0]),
    ],
)
def test_begin_and_end_tokens_are_added_as_the_file_says(tmp_path, pre, options, frame):
    tokenizer = build(byte_level(pre, **options), tmp_path)
    x = tokenizer.convert_tokens_to_ids("x")
    assert tokenizer.encode("x") == [x if part == "x" else part for part in frame]
    assert tokenizer.encode("x", add_special_tokens=False) == [x]


def test_the_chat_template_is_carried_along(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    tokenizer = Checkpoint(convert(path, tmp_path / "out")).tokenizer()
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        == "<|start|>hi<|end|>"
    )


# -- sentencepiece ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hello world", ["<s>", "▁hello", "▁world"]),
        ("hell", ["<s>", "▁", "hell"]),
        ("x", ["<s>", "▁", "<0x78>"]),  # unknown: byte by byte
        ("é", ["<s>", "▁", "<0xC3>", "<0xA9>"]),
        (" hello", ["<s>", "▁", "▁hello"]),
        ("hello</s>", ["<s>", "▁hello", "</s>"]),
    ],
)
def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path, text, tokens):
    tokenizer = build(sentencepiece(), tmp_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == tokens


@pytest.mark.parametrize("text", ["hello world", "é 🙂", "  hello", "h\nw"])
def test_sentencepiece_gives_the_text_back(tmp_path, text):
    tokenizer = build(sentencepiece(), tmp_path)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_sentencepiece_without_a_leading_space(tmp_path):
    tokenizer = build(sentencepiece(add_space_prefix=False, add_bos_token=False), tmp_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hello world")) == ["hello", "▁world"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


# -- what can be wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "unknown tokenizer 'bert'"),
        ({"tokenizer.ggml.tokens": []}, "0 tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "1 types"),
        ({"tokenizer.ggml.scores": [1.0]}, "1 scores"),
    ],
)
def test_bad_metadata_is_named(tmp_path, change, message):
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        build(sentencepiece() | change, tmp_path)


# -- the default model -----------------------------------------------------------------------------


def test_the_default_model_tokenizes_as_published(smollm2):
    tokenizer = Checkpoint(smollm2).tokenizer()
    assert tokenizer.encode("Hello 12 world") == [19556, 216, 33, 34, 905]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token_id == 2


def test_many_special_tokens_are_added_at_once(tmp_path, monkeypatch):
    """One by one, each would go through all that were added before: a file full of them would take
    days."""
    calls = []

    class Counting:
        def __init__(self, model):
            object.__setattr__(self, "inner", Tokenizer(model))

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def __setattr__(self, name, value):
            setattr(self.inner, name, value)

        def add_special_tokens(self, tokens):
            calls.append(len(tokens))
            return self.inner.add_special_tokens(tokens)

    monkeypatch.setattr(gguf_tokenizer, "Tokenizer", Counting)
    tokens, types, merges = byte_level_vocabulary()
    extra = [f"<|{i}|>" for i in range(500)]
    write_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": [*tokens, *extra],
            "tokenizer.ggml.token_type": [*types, *[CONTROL] * 500],
            "tokenizer.ggml.merges": merges,
        },
        tmp_path,
        file=tmp_path / "model.gguf",
    )
    assert calls == [502]
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("he<|499|>").tokens == ["he", "<|499|>"]


def test_a_token_of_a_megabyte_is_refused(tmp_path):
    """Llama 2's kind tries every way to cut a token in two."""
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["a", "a" * 1_000_000],
        "tokenizer.ggml.scores": [0.0, 1.0],
    }
    with pytest.raises(
        CheckpointError, match="a token of 1,000,000 characters; at most 2048 are taken"
    ):
        write_tokenizer(metadata, tmp_path, file=tmp_path / "model.gguf")
