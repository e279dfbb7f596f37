"""A preset of a few thousand weights: every engine can load it in no time."""

from flyweight.models import presets

CONFIG = presets.PRESETS["smollm2-135m"] | dict(
    vocab_size=90,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    dtype="float32",
)


def add_tiny(monkeypatch):
    monkeypatch.setitem(presets.PRESETS, "tiny", CONFIG)
