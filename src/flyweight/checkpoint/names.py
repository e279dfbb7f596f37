"""Names inside a decoder layer of tensors that no linear owns, as checkpoints spell them."""

from __future__ import annotations

ROUTER = "mlp.gate.weight"  # never quantized, as little as the gate of the shared expert
SHARED_GATE = "mlp.shared_expert_gate.weight"
