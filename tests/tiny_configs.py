"""Configs of models so small that a test makes one of random weights in milliseconds."""

from flyweight.models.presets import PRESETS

# for engines: a vocabulary of 60 and a context of 128
LLAMA = PRESETS["smollm2-135m"] | dict(
    vocab_size=60,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)

# for the CPU's kernels: layers of several groups, and outputs that are no multiple of eight
NATIVE = dict(
    model_type="llama",
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=129,
    max_position_embeddings=512,
    hidden_act="silu",
    dtype="float32",
    tie_word_embeddings=True,
)

# what the two below have in common
_FLOAT32 = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    hidden_act="silu",
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    dtype="float32",
    tie_word_embeddings=True,
    head_dim=16,
)

# for servers and files: a vocabulary of bytes and eight more
BYTES = _FLOAT32 | dict(
    max_position_embeddings=4096,
    bos_token_id=256,
    eos_token_id=257,
    vocab_size=264,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)

# for quantization: a vocabulary of printable letters, and layers of several groups
LETTERS = _FLOAT32 | dict(
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)

# the linears of a layer of any of them
LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
