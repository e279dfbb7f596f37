"""Where the memory goes: weights, the workspace of a step, captured graphs, and all that is left to
the KV cache.

On a GPU the workspace is measured: one prefill pass of as many tokens as a step may have runs
before the cache is made, over a cache of one layer that all layers share. It also compiles and
tunes what the first request would wait for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flyweight.batch import Batch, KVStorage, StateShape, StateStorage, fresh_states
from flyweight.errors import ResourceError
from flyweight.kv_format import SCALE_BYTES, KVFormat
from flyweight.models.config import ModelConfig
from flyweight.models.decoder import Decoder
from flyweight.models.plan import LayerPlan
from flyweight.models.standard import plan_of
from flyweight.shortage import size_text

DEFAULT_FRACTION = {"cpu": 0.25, "cuda": 0.9}
# bytes that the driver takes for launches, and the allocator for odd ends
GRAPH_OVERHEAD = 384 << 20


@dataclass(frozen=True)
class CacheShape:
    """What one token costs in the KV cache."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    format: KVFormat | None = None  # of 8-bit codes
    # scales of keys and values by layer, where a checkpoint gives them
    fixed: tuple[tuple[float, float], ...] | None = None
    # numbers of a key that are its value: then there are no values beside keys
    latent: int | None = None
    states: StateShape | None = None  # of layers that have a state in place of keys and values
    state_layers: tuple[int, ...] = ()
    beside: int = 0  # bytes of a token in the cache of a head that guesses

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        dtype: torch.dtype,
        format: KVFormat | None = None,
        fixed: tuple[tuple[float, float], ...] | None = None,
    ) -> CacheShape:
        """Of a model's layers."""
        layers = plan_of(config).layers
        attention = layers[0].attention
        latent = attention.latent.rank if attention.latent else None
        states = {layer.delta.shape.state for layer in layers if layer.delta is not None}
        assert len(states) <= 1, "layers with states of several shapes"
        return cls(
            config.layers,
            attention.kv_heads,
            attention.head_dim,
            dtype,
            format,
            fixed,
            latent,
            next(iter(states), None),
            config.state_layers,
        )

    @property
    def state_bytes(self) -> int:
        """What one sequence costs beside its tokens."""
        return 0 if self.states is None else len(self.state_layers) * self.states.nbytes(self.dtype)

    @property
    def head_bytes(self) -> int:
        """Of a key or value of one head."""
        if self.format is None:
            return self.head_dim * self.dtype.itemsize
        return self.head_dim * self.format.dtype.itemsize + SCALE_BYTES

    @property
    def token_bytes(self) -> int:
        layers = self.layers - len(self.state_layers)
        return (
            2 if self.latent is None else 1
        ) * layers * self.kv_heads * self.head_bytes + self.beside

    @property
    def dtype_name(self) -> str:
        return (
            self.format.name if self.format is not None else str(self.dtype).removeprefix("torch.")
        )

    def storage(
        self, layer: int, blocks: int, block_size: int, device: torch.device, *, slots: int = 0
    ) -> KVStorage:
        """The cache of one layer; `slots`: of states, where it keeps them."""
        if self.states is not None and layer in self.state_layers:
            nothing = KVStorage.zeros((blocks, block_size, 0, self.head_dim), self.dtype, device)
            return replace(
                nothing, state=StateStorage.zeros(self.states, slots, self.dtype, device)
            )
        size = (blocks, block_size, self.kv_heads, self.head_dim)
        fixed = self.fixed[layer] if self.fixed else None
        return KVStorage.zeros(size, self.dtype, device, self.format, fixed, latent=self.latent)

    def shared(
        self, blocks: int, block_size: int, device: torch.device, *, slots: int = 0
    ) -> list[KVStorage]:
        """A cache for each layer, all of one kind the same: for passes of which nothing is read
        again.
        """
        kinds = {layer in self.state_layers: layer for layer in range(self.layers)}
        made = {
            kind: self.storage(layer, blocks, block_size, device, slots=slots)
            for kind, layer in kinds.items()
        }
        return [made[layer in self.state_layers] for layer in range(self.layers)]


@dataclass(frozen=True)
class Memory:
    """Bytes. `workspace` is the measured peak of a step beside weights and cache; 0 where it was
    not measured.
    """

    weights: int
    workspace: int
    graphs: int
    kv: int
    kv_tokens: int
    states: int = 0  # of layers without keys and values
    state_slots: int = 0

    def __str__(self) -> str:
        parts = [
            f"{name} {size_text(size)}"
            for name, size in (
                ("weights", self.weights),
                ("graphs", self.graphs),
                ("workspace", self.workspace),
            )
            if size
        ]
        if self.state_slots:
            parts.append(f"states {size_text(self.states)} for {self.state_slots} sequences")
        return ", ".join([*parts, f"KV cache {size_text(self.kv)} for {self.kv_tokens:,} tokens"])


def plan_memory(
    shape: CacheShape,
    *,
    weights: int,
    workspace: int,
    graphs: int,
    blocks: int | None,
    block_size: int,
    device: torch.device,
    context: int,
    sequences: int,
    memory_fraction: float | None,
) -> Memory:
    """What is left beside weights, workspace and graphs goes to states and then to the KV cache, of
    so many blocks where their number is given.
    """
    slots = count_states(
        shape,
        device=device,
        sequences=sequences,
        memory_fraction=memory_fraction,
        reserved=(workspace, graphs),
    )
    held = slots * shape.state_bytes
    blocks = blocks or count_blocks(
        shape,
        block_size=block_size,
        device=device,
        context=context,
        sequences=sequences,
        memory_fraction=memory_fraction,
        reserved=(workspace, graphs, held),
    )
    kv_tokens = blocks * block_size
    kv = kv_tokens * shape.token_bytes
    return Memory(weights, workspace, graphs, kv, kv_tokens, held, slots)


def attention_width(layer: LayerPlan) -> int:
    """Numbers of a token between a layer's first linear and its o; latent attention writes queries,
    keys and values once more, side by side.
    """
    latent = layer.attention.latent
    groups = latent.groups if latent else ()
    expanded = 2 * sum(sum(group.sizes) for group in groups)
    return sum(layer.qkv.sizes) + expanded + layer.o.in_features


def graph_bytes(decoder: Decoder, rows: int, tokens: int) -> int:
    """What captured steps of so many rows and passes of so many tokens will take.

    Steps: activations, logits in both types, and room to sort them. Passes: activations, in memory
    that all of them share.
    """
    config = decoder.config
    mixed = max(attention_width(layer) for layer in plan_of(config).layers)
    widths = 2 * config.hidden_size + 2 * config.intermediate_size + mixed
    if config.moe is not None:  # rows of experts, packed and not; as many again may fill up tiles
        widths += (
            4 * config.moe.experts_per_token * (config.hidden_size + config.moe.intermediate_size)
        )
        widths += config.moe.shared_intermediate_size or 0
    logits = rows * config.vocab_size * (decoder.dtype.itemsize + 24)
    return GRAPH_OVERHEAD + (rows + tokens) * widths * decoder.dtype.itemsize + logits


def dummy_batch(tokens: int, *, context: int, block_size: int, device: torch.device) -> Batch:
    """A prefill step of so many tokens, in sequences as long as the context allows; all share the
    first blocks.
    """
    lengths = [context] * (tokens // context) + ([tokens % context] if tokens % context else [])
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    blocks = torch.arange(-(-lengths[0] // block_size), dtype=torch.int32, device=device)
    return Batch(
        tokens=torch.zeros_like(positions),
        positions=positions,
        slots=positions,
        block_tables=blocks.repeat(len(lengths), 1),
        query_starts=starts,
        kv_lengths=lengths,
        output_rows=torch.tensor(starts[1:], device=device) - 1,
        states=fresh_states(lengths, device),
    )


def measure_workspace(
    decoder: Decoder, shape: CacheShape, *, tokens: int, context: int, block_size: int
) -> int:
    """Peak bytes of a prefill step of `tokens` tokens on a GPU, weights and cache aside."""
    device = decoder.device
    batch = dummy_batch(tokens, context=min(context, tokens), block_size=block_size, device=device)
    caches = shape.shared(
        -(-min(context, tokens) // block_size), block_size, device, slots=len(batch.kv_lengths)
    )
    decoder.forward(batch, caches)  # whatever is compiled or allocated once is no part of a step
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    decoder.forward(batch, caches)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del caches, batch
    torch.cuda.empty_cache()
    return peak


def count_blocks(
    shape: CacheShape,
    *,
    block_size: int,
    device: torch.device,
    context: int,
    sequences: int,
    memory_fraction: float | None,
    reserved: Sequence[int] = (),
) -> int:
    """As many as `sequences` full contexts need, or as the memory budget allows; at least one full
    context.

    The budget is a share of what is available on a CPU; of the whole device, less what is in use or
    reserved, on a GPU.
    """
    fraction = DEFAULT_FRACTION[device.type] if memory_fraction is None else memory_fraction
    budget = cache_budget(device, fraction, reserved)
    longest = -(-context // block_size)
    if not shape.token_bytes:  # every layer keeps a state: blocks are numbers without memory
        return longest * sequences
    block_bytes = shape.token_bytes * block_size
    if longest * block_bytes > budget:
        fits = max(budget, 0) // block_bytes * block_size
        raise ResourceError(
            f"a context of {context} tokens needs {longest * block_bytes / 1e9:.2f} GB of KV "
            f"cache, but memory_fraction {fraction} leaves {max(budget, 0) / 1e9:.2f} GB, enough "
            f"for {fits:,} tokens; lower max_model_len"
        )
    return min(longest * sequences, budget // block_bytes)


def cache_budget(device: torch.device, fraction: float, reserved: Sequence[int]) -> int:
    if device.type != "cuda":
        return int(available_memory() * fraction) - sum(reserved)
    free, total = torch.cuda.mem_get_info(device)
    return int(free - (1 - fraction) * total) - sum(reserved)


def count_states(
    shape: CacheShape,
    *,
    device: torch.device,
    sequences: int,
    memory_fraction: float | None,
    reserved: Sequence[int] = (),
) -> int:
    """Slots of states: one for each of the sequences and some for copies that prefixes are found
    by, in at most half of the budget; at least one.
    """
    if shape.states is None:
        return 0
    fraction = DEFAULT_FRACTION[device.type] if memory_fraction is None else memory_fraction
    budget = max(0, cache_budget(device, fraction, reserved))
    slots = min(sequences + sequences // 4 + 4, budget // 2 // shape.state_bytes)
    if slots < 1:
        raise ResourceError(
            f"the state of one sequence needs {shape.state_bytes / 1e9:.2f} GB, "
            f"but memory_fraction {fraction} leaves "
            f"{budget / 1e9:.2f} GB for states and KV cache; raise memory_fraction"
        )
    return slots


def available_memory() -> int:
    """Bytes that this process may take without swapping."""
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            return next(
                int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable")
            )
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
