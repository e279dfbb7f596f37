"""GGUF files that we write, opened by llama.cpp (pip install xllamacpp)."""

import pytest

pytestmark = pytest.mark.interop
xllamacpp = pytest.importorskip("xllamacpp")


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_llama_cpp_opens_our_files_and_answers(kind, smollm2, tmp_path, monkeypatch):
    """llama.cpp rounds activations, so only the first words are compared: a wrong tokenizer or row
    order would lose them."""
    from flyweight import LLM
    from flyweight.checkpoint.gguf_export import export

    monkeypatch.setenv("FLYWEIGHT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    export(smollm2, path, kind=kind)
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 128
    asked = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    theirs = xllamacpp.Server(params).handle_completions(asked)["choices"][0]["text"]
    ours = LLM(str(path), device="cpu").generate(asked["prompt"], max_tokens=8, temperature=0)
    text = ours[0].text if isinstance(ours, list) else ours.text
    assert text.startswith(" Paris.") and theirs.startswith(" Paris.")
