"""The tokenizer without transformers: the same tokens, or none at all."""

import json
import shutil
import subprocess
import sys

import pytest

from flyweight.checkpoint.reader import Checkpoint
from flyweight.engine.tokenizer import BareTokenizer, Tokenizer, tokenizer_of
from flyweight.quant.subject import encode, tokens_of

TEXTS = [
    "The capital of France is",
    " two  spaces, a\ttab and\n\n lines ",
    "3.14159 in 2026: naïve café, Ωmega, 漢字, 🦜👩‍🚀",
    "<|im_start|>user\nhello<|im_end|>\n",
    "",
]


def test_text_becomes_the_tokens_of_transformers_and_comes_back(smollm2):
    checkpoint = Checkpoint(smollm2)
    bare, full = tokenizer_of(checkpoint), Tokenizer(checkpoint.tokenizer())
    assert (
        isinstance(bare, BareTokenizer)
        and bare.end_id == full.end_id
        and bare.markers == full.markers
    )
    for text in TEXTS:
        for special in (True, False):
            tokens = bare.encode(text, special=special)
            assert tokens == full.encode(text, special=special)
            assert bare.decode(tokens) == full.decode(tokens)
    messages = [{"role": "user", "content": "hello"}]
    assert bare.encode_chat(messages) == full.encode_chat(messages)


def test_texts_to_measure_on_become_the_same_tokens_without_transformers(smollm2):
    checkpoint = Checkpoint(smollm2)
    assert checkpoint.bare_tokenizer() is not None
    for text in TEXTS:
        assert tokens_of(checkpoint, text) == encode(checkpoint.tokenizer(), text)


CHANGES = [
    {"tokenizer_class": "LlamaTokenizer"},
    {"add_bos_token": True},
    {"eos_token": "<|never seen|>"},
    {"bos_token": {"content": "<|im_start|>"}},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_what_transformers_might_change_is_left_to_it(smollm2, tmp_path, change):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{smollm2}/{name}", tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(f"{smollm2}/model.safetensors")
    assert Checkpoint(tmp_path).bare_tokenizer() is not None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | change))
    assert Checkpoint(tmp_path).bare_tokenizer() is None


def test_the_default_model_completes_a_prompt_without_transformers(smollm2):
    program = (
        "import sys; from flyweight import LLM; llm = LLM(sys.argv[1], max_model_len=64, "
        "device='cpu');"
        "llm.generate('One, two,', max_tokens=2); print('transformers' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, str(smollm2)], capture_output=True, text=True, check=True
    )
    assert answer.stdout == "False\n"
