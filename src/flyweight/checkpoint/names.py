"""Names inside a decoder layer of tensors that no linear owns, as checkpoints spell them, and sizes
that they leave out.
"""

from __future__ import annotations

ROUTER = "mlp.gate.weight"  # never quantized, as little as the gate of the shared expert
SHARED_GATE = "mlp.shared_expert_gate.weight"
ROUTER_CORRECTION = "mlp.gate.e_score_correction_bias"
# of Mixtral and MiniMax-M2
BLOCK_ROUTER = "block_sparse_moe.gate.weight"
BLOCK_ROUTER_CORRECTION = "block_sparse_moe.e_score_correction_bias"

# families whose q_proj gives a gate beside each query
GATED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")

# head_dim of families whose config.json need not state it; of others it is hidden_size / heads
HEAD_DIMS = {
    "qwen3": 128,
    "glm": 128,
    "glm4": 128,
    "gemma": 256,
    "gemma2": 256,
    "gemma3_text": 256,
    "gpt_oss": 64,
    "qwen3_next": 256,
    "qwen3_5_text": 256,
    "qwen3_5_moe_text": 256,
}
