"""ModelConfig: what the decoder needs to know, read strictly from a Hugging Face config.json.

Families differ by data, not by code: `FAMILIES` says which flags a model_type sets and which config
keys set the others; `families/` adds those whose layers differ from Llama's. Keys that do not
change the computation are ignored; keys that do are checked (`refusals.py`), because a wrong guess
here gives a model that runs and talks nonsense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from flyweight.errors import CheckpointError, UnsupportedError
from flyweight.models import config_values as values
from flyweight.models.plan import ModelPlan, RopeConfig
from flyweight.models.refusals import check_switches, unknown_architecture

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class MoeConfig:
    experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int | None
    normalize_weights: bool
    dense_layers: tuple[int, ...]


Data = Mapping[str, Any]


def read_moe(data: Data, layers: int) -> MoeConfig:
    step = data.get("decoder_sparse_step", 1)
    dense = data.get("mlp_only_layers") or []
    shared = data.get("shared_expert_intermediate_size")
    experts = "num_experts" if data.get("num_experts") else "num_local_experts"
    return MoeConfig(
        experts=values.count(data, experts),
        experts_per_token=values.count(data, "num_experts_per_tok"),
        intermediate_size=values.count(data, "moe_intermediate_size"),
        shared_intermediate_size=shared or None,
        normalize_weights=values.flag(data, "norm_topk_prob"),
        dense_layers=tuple(i for i in range(layers) if i in dense or (i + 1) % step),
    )


def qwen_moe_keys(moe: MoeConfig) -> dict[str, Any]:
    """`read_moe`, the other way round."""
    names = dict(
        experts="num_experts",
        experts_per_token="num_experts_per_tok",
        intermediate_size="moe_intermediate_size",
        shared_intermediate_size="shared_expert_intermediate_size",
        normalize_weights="norm_topk_prob",
    )
    found = asdict(moe)
    return {
        names[key]: value for key, value in found.items() if key in names and value is not None
    } | {"mlp_only_layers": list(moe.dense_layers)}


@dataclass(frozen=True)
class Experts:
    """How a family's config.json states its experts, in both directions."""

    read: Callable[[Data, int], MoeConfig] = read_moe
    write: Callable[[MoeConfig], dict[str, Any]] = qwen_moe_keys


@dataclass(frozen=True)
class Family:
    """A flag is fixed (True or False) or the name of the config key that holds it.

    defaults     what transformers takes where a key is missing
    extras       keys that the family's plan alone reads, and their defaults
    reads        further keys that change the computation and are taken care of
    layer_types  which layers have a window where the key is missing (`window` "types")
    """

    architecture: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool | str = False
    # "never" · "all": every layer, where sliding_window is set · "layers": as layer_types says,
    # where use_sliding_window is set · "types": as layer_types says
    window: str = "never"
    layer_types: Callable[[Data, int], list[str]] = values.trailing
    # the default where the key is missing, or the key that says it; None is hidden_size / heads
    head_dim: int | str | None = None
    # whether `partial_rotary_factor` may be less than 1; others have no such key, or ignore it
    partial_rope: bool = False
    # of layers with a window, where they have a rope table of their own: the key of its base
    local_rope: str | None = None
    # which layers have a state in place of attention; None: none do
    state_layers: Callable[[Data, int], tuple[int, ...]] | None = None
    experts: Experts | None = None
    activation_key: str = "hidden_act"
    activations: tuple[str, ...] = ("silu", "gelu_tanh")  # that the family may have
    defaults: Data = field(default_factory=dict)
    extras: Data = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    plan: Callable[[ModelConfig], ModelPlan] | None = None  # None: `standard.standard_plan`

    @property
    def keys(self) -> set[str]:
        """Of config.json, that change the computation and that this family reads."""
        flags = (self.qkv_bias, self.o_bias, self.mlp_bias, self.qk_norm)
        named = {key for key in flags if isinstance(key, str)}
        return named | set(self.extras) | set(self.reads)


FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM", qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"
    ),
    "mistral": Family("MistralForCausalLM", window="all"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, window="layers"),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        window="layers",
        head_dim=128,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        qkv_bias="qkv_bias",
        experts=Experts(),
        defaults=dict(qkv_bias=True),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        experts=Experts(),
    ),
}

# config → plan
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}


def register(model_type: str, family: Family) -> None:
    """A family from outside of this file."""
    if model_type in FAMILIES:
        raise ValueError(f"there is a family {model_type} already")
    FAMILIES[model_type] = family


@dataclass(frozen=True)
class ModelConfig:
    model_type: str
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    epsilon: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    windows: tuple[int | None, ...]  # of each layer; None sees everything
    dtype: torch.dtype
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    moe: MoeConfig | None = None
    activation: str = "silu"
    local_rope: RopeConfig | None = None  # of layers with a window, where they have their own
    extra: tuple[tuple[str, Any], ...] = ()  # what the family's plan alone reads
    state_layers: tuple[int, ...] = ()  # layers with a state in place of attention

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def context_length(self) -> int:
        """The longest sequence rope is made for: scaling by a factor stretches what the config
        states unscaled. Where queries grow from some position on, sequences end before it.
        """
        # Gemma 3, whose layers with a window have a rope of their own, states what it has stretched
        if self.rope.kind in ("linear", "dynamic") and self.local_rope is None:
            return int(self.max_positions * self.rope["factor"])
        if self.rope.get(values.GROWING):
            return int(self.rope["original_max_position_embeddings"])
        if self.rope.kind == "yarn":
            return max(
                self.max_positions,
                int(self.rope["original_max_position_embeddings"] * self.rope["factor"]),
            )
        return self.max_positions

    @classmethod
    def from_dict(cls, given: Data) -> ModelConfig:
        model_type = given.get("model_type")
        if model_type not in FAMILIES:
            raise UnsupportedError(unknown_architecture(given, FAMILIES))
        family = FAMILIES[model_type]
        check_switches(given, family.keys)
        data = {**family.defaults, **given}
        layers = values.count(data, "num_hidden_layers")
        heads = values.count(data, "num_attention_heads")
        hidden = values.count(data, "hidden_size")
        kv_heads = values.count(data, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads "
                f"{kv_heads}"
            )
        if isinstance(family.head_dim, str):
            head_dim = values.count(data, family.head_dim)
        else:
            head_dim = values.count(data, "head_dim", family.head_dim or hidden // heads)
        max_positions = values.count(data, "max_position_embeddings")
        rope, local_rope = values.read_ropes(data, head_dim, max_positions, local=family.local_rope)
        if rope.rotary_dim != head_dim and not family.partial_rope:
            raise UnsupportedError(
                f"config.json: rope over a part of each head (partial_rotary_factor) is not "
                f"supported for model_type {model_type}"
            )
        return cls(
            model_type=model_type,
            hidden_size=hidden,
            intermediate_size=values.count(data, "intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=values.count(data, "vocab_size"),
            max_positions=max_positions,
            epsilon=values.number(data, "rms_norm_eps", 1e-6),
            rope=rope,
            qkv_bias=values.flag(data, family.qkv_bias),
            o_bias=values.flag(data, family.o_bias),
            mlp_bias=values.flag(data, family.mlp_bias),
            qk_norm=values.flag(data, family.qk_norm),
            tied_embeddings=values.flag(data, "tie_word_embeddings"),
            windows=_read_windows(data, family, layers),
            dtype=_read_dtype(data),
            bos_id=data.get("bos_token_id"),
            eos_ids=values.token_ids(data.get("eos_token_id")),
            pad_id=data.get("pad_token_id"),
            moe=family.experts.read(data, layers) if family.experts else None,
            activation=_read_activation(data, family),
            local_rope=local_rope,
            extra=tuple(
                (key, values.extra(data, key, default)) for key, default in family.extras.items()
            ),
            state_layers=family.state_layers(data, layers) if family.state_layers else (),
        )

    def __getitem__(self, key: str) -> Any:
        """A value that this family alone has."""
        return dict(self.extra)[key]

    def get(self, key: str) -> Any:
        """The same, None where the family has no such value."""
        return dict(self.extra).get(key)

    def to_dict(self) -> dict[str, Any]:
        """A config.json that this class and transformers read back to the same model."""
        family = FAMILIES[self.model_type]
        data: dict[str, Any] = dict(
            architectures=[family.architecture],
            model_type=self.model_type,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_positions,
            rms_norm_eps=self.epsilon,
            tie_word_embeddings=self.tied_embeddings,
            dtype=str(self.dtype).removeprefix("torch."),
            bos_token_id=self.bos_id,
            eos_token_id=self.eos_ids[0] if len(self.eos_ids) == 1 else list(self.eos_ids) or None,
            pad_token_id=self.pad_id,
        )
        data[family.activation_key] = next(
            name for name, activation in ACTIVATIONS.items() if activation == self.activation
        )
        if family.head_dim or self.head_dim * self.heads != self.hidden_size:
            data["head_dim"] = self.head_dim
        for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm"):
            if isinstance(key := getattr(family, name), str):
                data[key] = getattr(self, name)
        for key, value in self.extra:
            data[key] = list(value) if isinstance(value, tuple) else value
        experts = family.experts.write(self.moe) if family.experts and self.moe else {}
        return data | self._rope_keys() | self._window_keys(family) | experts

    def _rope_keys(self) -> dict[str, Any]:
        partial = self.rope.rotary_dim / self.head_dim
        if self.local_rope is not None:
            pairs = {values.FULL: self.rope, values.SLIDING: self.local_rope}
            return {"rope_parameters": {kind: _rope_dict(rope) for kind, rope in pairs.items()}}
        data: dict[str, Any] = {"rope_theta": self.rope.theta}
        if partial != 1 or "partial_rotary_factor" in FAMILIES[self.model_type].defaults:
            data["partial_rotary_factor"] = partial
        if self.rope.kind != "default":
            data["rope_scaling"] = _rope_dict(self.rope)
            data["rope_scaling"].pop("rope_theta")
        return data

    def _window_keys(self, family: Family) -> dict[str, Any]:
        width = next((window for window in self.windows if window), None)
        if family.window == "all":
            return {"sliding_window": width}
        kinds = [values.SLIDING if window else values.FULL for window in self.windows]
        if family.state_layers is not None:
            for index in self.state_layers:
                kinds[index] = values.LINEAR
            return {"layer_types": kinds}
        if family.window == "types":
            return {"sliding_window": width, "layer_types": kinds}
        if family.window == "never" or width is None:
            return {}
        return {
            "use_sliding_window": True,
            "sliding_window": width,
            "layer_types": kinds,
            "max_window_layers": next(i for i, window in enumerate(self.windows) if window),
        }


def sizes(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: Any
) -> dict[str, Any]:
    """The keys that every config.json has, for presets."""
    return dict(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **more,
    )


def _rope_dict(rope: RopeConfig) -> dict[str, Any]:
    numbers = {key: list(v) if isinstance(v, tuple) else v for key, v in rope.scaling}
    return {"rope_type": rope.kind, "rope_theta": rope.theta, **numbers}


def _read_activation(data: Data, family: Family) -> str:
    name = data.get(family.activation_key)
    activation = family.activations[0] if name is None else ACTIVATIONS.get(name)
    if activation not in family.activations:
        known = " or ".join(family.activations)
        raise UnsupportedError(
            f"config.json: {family.activation_key} {name!r} is not supported; only {known} is"
        )
    return activation


def _read_dtype(data: Data) -> torch.dtype:
    name = str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedError(
            f"config.json: dtype {name!r} is not supported; known: {', '.join(DTYPES)}"
        )
    return DTYPES[name]


def _read_windows(data: Data, family: Family, layers: int) -> tuple[int | None, ...]:
    if family.window == "all":
        # stated as null; transformers takes 4096 where the key is missing
        full = not data.get("sliding_window", 4096)
        return (None if full else values.count(data, "sliding_window", 4096),) * layers
    if family.window == "types":
        kinds = values.layer_types(data, family.layer_types(data, layers), layers)
        return values.windows_of(data, kinds)
    if not data.get("use_sliding_window"):
        if family.window == "layers" and values.SLIDING in (data.get("layer_types") or ()):
            raise UnsupportedError(
                "config.json: 'layer_types' names layers with a window, and 'use_sliding_window' "
                "says that there are none"
            )
        return (None,) * layers
    if family.window == "never":
        raise UnsupportedError(
            f"config.json: use_sliding_window is not supported for {data['model_type']}"
        )
    kinds = values.layer_types(data, family.layer_types(data, layers), layers)
    return values.windows_of({"sliding_window": 4096} | dict(data), kinds)
