"""Which kernels a model is evaluated with, and what is wrong with one that cannot be opened."""

import json

import pytest
import torch
from tiny_model import TEXT, make_tiny_model

from flyweight import LLM
from flyweight.errors import FlyweightError
from flyweight.kernels.native import library
from flyweight.models import native
from flyweight.quant.subject import NativeWhole, load_subject


@pytest.mark.skipif(library.why_not() is not None, reason=f"{library.why_not()}")
def test_a_cpu_evaluates_with_its_own_kernels_what_torch_would_find(tmp_path, monkeypatch):
    folder = str(make_tiny_model(tmp_path / "model"))
    found = load_subject(folder, TEXT, device="cpu", dtype=None)
    assert isinstance(found.decoder, NativeWhole)
    monkeypatch.setattr(native, "why_not", lambda config, dtype: "not here")
    plain = load_subject(folder, TEXT, device="cpu", dtype=None)
    assert not isinstance(plain.decoder, NativeWhole) and found.kv_dtype == plain.kv_dtype
    ids = torch.tensor(found.ids[:40]).view(2, 20)
    torch.testing.assert_close(
        found.decoder.forward_whole(ids), plain.decoder.forward_whole(ids), rtol=1e-4, atol=1e-4
    )


def rewrite(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(dtype="float99"), "dtype 'float99' is not supported"),
        (dict(head_dim=17), "head_dim 17"),
        (dict(rope_parameters=dict(rope_type="yarn")), "'factor' is missing"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_config_is_not_blamed_on_the_tokenizer(change, message, tmp_path):
    """transformers reads config.json, too, where it has to find out a tokenizer's class."""
    folder = make_tiny_model(tmp_path / "model")
    rewrite(folder / "config.json", **change)
    rewrite(folder / "tokenizer_config.json", tokenizer_class=None)
    for open_it in (load_subject, lambda name, *_, **options: LLM(name, **options)):
        with pytest.raises(FlyweightError, match=rf"config\.json: .*{message}"):
            open_it(str(folder), TEXT, device="cpu", dtype=None)


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "TokenizersBackend"])
def test_a_class_that_adds_nothing_needs_no_config(kind, tmp_path):
    """As transformers 4 and 5 call it."""
    folder = make_tiny_model(tmp_path / "model")
    rewrite(folder / "config.json", dtype="torch.bfloat16")  # we read it, transformers does not
    rewrite(folder / "tokenizer_config.json", tokenizer_class=kind)
    assert load_subject(str(folder), "Ann\n", device="cpu", dtype=None).ids == [37, 82, 82, 3]
