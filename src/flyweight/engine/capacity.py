"""What a model may hope for on this machine before it is loaded: room for its KV cache, and how
fast one sequence can go.

How fast is `flyweight.limit`'s formula, with an empty context; a bench adds the KV of the contexts
it has.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

import torch

from flyweight.checkpoint.summary import Summary
from flyweight.engine.memory import DEFAULT_FRACTION, CacheShape, available_memory
from flyweight.limit import decode_limit
from flyweight.machine import copy_bandwidth, device_name
from flyweight.models.config import ModelConfig


@dataclass(frozen=True)
class Capacity:
    device: str
    memory_bytes: int  # of the whole device, or of the machine
    # the engine's default share for weights and cache on a GPU, for the cache alone on a CPU
    kv_fraction: float
    kv_bytes: int  # left for the KV cache once the weights are there
    kv_bytes_per_token: int
    read_bytes_per_token: int  # of weights
    copy_gb_s: float
    on_cpu: bool
    state_bytes_per_sequence: int = 0  # of layers without keys and values

    @property
    def kv_tokens(self) -> int | None:
        """None: tokens take no memory, as every layer keeps a state."""
        return self.kv_bytes // self.kv_bytes_per_token if self.kv_bytes_per_token else None

    @property
    def limit_tok_s(self) -> float:
        """Of one sequence with a short context."""
        return decode_limit(weight_bytes=self.read_bytes_per_token, copy_gb_s=self.copy_gb_s) or 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "kv_tokens": self.kv_tokens,
            "limit_tok_s": round(self.limit_tok_s, 2),
        }


def capacity(
    summary: Summary,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    bandwidth: float | None = None,
) -> Capacity:
    """`bandwidth` in GB/s is measured where it is not given."""
    shape = CacheShape.of(config, dtype)
    fraction = DEFAULT_FRACTION[device.type]
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = free - (1 - fraction) * total - summary.memory
    else:
        total = physical_memory()
        budget = fraction * (available_memory() - summary.memory)
    return Capacity(
        device_name(device),
        total,
        fraction,
        max(0, int(budget)),
        shape.token_bytes,
        read_per_token(summary, config),
        bandwidth or round(copy_bandwidth(device), 1),
        on_cpu=device.type == "cpu",
        state_bytes_per_sequence=shape.state_bytes,
    )


def read_per_token(summary: Summary, config: ModelConfig) -> int:
    """Bytes of weights that one decoding step of one sequence reads. An embedding counts where it
    is the head too.
    """
    total = 0.0
    for group in summary.groups:
        if group.module == "embedding" and not summary.tied_embeddings:
            continue
        share = (
            config.moe.experts_per_token / config.moe.experts
            if config.moe and ".experts." in group.module
            else 1
        )
        total += group.memory * share
    return int(total)


def physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
