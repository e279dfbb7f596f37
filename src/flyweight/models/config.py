"""ModelConfig: what the decoder needs to know, read strictly from a Hugging Face config.json.

Families differ by data, not by code: `FAMILIES` says which flags a model_type sets and which config
keys set the others. Keys that do not change the computation are ignored; keys that do are checked,
because a wrong guess here gives a model that runs and talks nonsense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from flyweight.errors import CheckpointError, UnsupportedError
from flyweight.models.plan import ModelPlan, RopeConfig

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Family:
    """A flag is fixed (True or False) or the name of the config key that holds it."""

    architecture: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    # "never" · "all": every layer, where sliding_window is set · "layers": as layer_types says
    window: str = "never"
    head_dim: int | None = None  # the default where the key is missing; None is hidden_size / heads
    moe: bool = False
    activations: tuple[str, ...] = ("silu",)  # that the family may have
    plan: Callable[[ModelConfig], ModelPlan] | None = None  # None: `standard.standard_plan`


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
    "qwen2_moe": Family("Qwen2MoeForCausalLM", qkv_bias=True, moe=True),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        moe=True,
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


# The keys of each kind of rope scaling: (needed, optional).
ROPE_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "llama3": (
        {"factor", "low_freq_factor", "high_freq_factor"},
        {"original_max_position_embeddings"},
    ),
    "yarn": (
        {"factor"},
        {
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        },
    ),
}


@dataclass(frozen=True)
class MoeConfig:
    experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int | None
    normalize_weights: bool
    dense_layers: tuple[int, ...]


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

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def context_length(self) -> int:
        """The longest sequence rope is made for: scaling by a factor stretches what the config
        states unscaled.
        """
        if self.rope.kind in ("linear", "dynamic"):
            return int(self.max_positions * self.rope["factor"])
        if self.rope.kind == "yarn":
            return max(
                self.max_positions,
                int(self.rope["original_max_position_embeddings"] * self.rope["factor"]),
            )
        return self.max_positions

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        model_type = data.get("model_type")
        if model_type not in FAMILIES:
            raise UnsupportedError(
                f"config.json: model_type {model_type!r} is not supported; known: "
                f"{', '.join(FAMILIES)}"
            )
        family = FAMILIES[model_type]
        activation = ACTIVATIONS.get(data.get("hidden_act", family.activations[0]))
        if activation not in family.activations:
            known = " or ".join(family.activations)
            raise UnsupportedError(
                f"config.json: hidden_act {data['hidden_act']!r} is not supported; only {known} is"
            )
        layers = _count(data, "num_hidden_layers")
        heads = _count(data, "num_attention_heads")
        hidden = _count(data, "hidden_size")
        kv_heads = _count(data, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads "
                f"{kv_heads}"
            )
        head_dim = _count(data, "head_dim", family.head_dim or hidden // heads)
        dtype = str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix(
            "torch."
        )
        if dtype not in DTYPES:
            raise UnsupportedError(
                f"config.json: dtype {dtype!r} is not supported; known: {', '.join(DTYPES)}"
            )
        max_positions = _count(data, "max_position_embeddings")
        return cls(
            model_type=model_type,
            hidden_size=hidden,
            intermediate_size=_count(data, "intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=_count(data, "vocab_size"),
            max_positions=max_positions,
            epsilon=_number(data, "rms_norm_eps", 1e-6),
            rope=_read_rope(data, head_dim, max_positions),
            qkv_bias=_flag(data, family.qkv_bias),
            o_bias=_flag(data, family.o_bias),
            mlp_bias=_flag(data, family.mlp_bias),
            qk_norm=family.qk_norm,
            tied_embeddings=_flag(data, "tie_word_embeddings"),
            windows=_read_windows(data, family, layers),
            dtype=DTYPES[dtype],
            bos_id=data.get("bos_token_id"),
            eos_ids=_ids(data.get("eos_token_id")),
            pad_id=data.get("pad_token_id"),
            moe=_read_moe(data, layers) if family.moe else None,
            activation=activation,
        )

    def to_dict(self) -> dict[str, Any]:
        """A config.json that this class and transformers read back to the same model."""
        family = FAMILIES[self.model_type]
        data: dict[str, Any] = dict(
            architectures=[family.architecture],
            model_type=self.model_type,
            hidden_act=next(
                name for name, activation in ACTIVATIONS.items() if activation == self.activation
            ),
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_positions,
            rms_norm_eps=self.epsilon,
            rope_theta=self.rope.theta,
            tie_word_embeddings=self.tied_embeddings,
            dtype=str(self.dtype).removeprefix("torch."),
            bos_token_id=self.bos_id,
            eos_token_id=self.eos_ids[0] if len(self.eos_ids) == 1 else list(self.eos_ids) or None,
            pad_token_id=self.pad_id,
        )
        if family.head_dim or self.head_dim * self.heads != self.hidden_size:
            data["head_dim"] = self.head_dim
        if self.rope.rotary_dim != self.head_dim:
            data["partial_rotary_factor"] = self.rope.rotary_dim / self.head_dim
        if self.rope.kind != "default":
            data["rope_scaling"] = {"rope_type": self.rope.kind, **dict(self.rope.scaling)}
        for field in ("qkv_bias", "o_bias", "mlp_bias"):
            if isinstance(key := getattr(family, field), str):
                data[key] = getattr(self, field)
        return data | self._window_keys(family) | self._moe_keys()

    def _window_keys(self, family: Family) -> dict[str, Any]:
        width = next((window for window in self.windows if window), None)
        if family.window == "all":
            return {"sliding_window": width}
        if family.window == "never" or width is None:
            return {}
        kinds = ["sliding_attention" if window else "full_attention" for window in self.windows]
        return {
            "use_sliding_window": True,
            "sliding_window": width,
            "layer_types": kinds,
            "max_window_layers": next(i for i, window in enumerate(self.windows) if window),
        }

    def _moe_keys(self) -> dict[str, Any]:
        if self.moe is None:
            return {}
        names = dict(
            experts="num_experts",
            experts_per_token="num_experts_per_tok",
            intermediate_size="moe_intermediate_size",
            shared_intermediate_size="shared_expert_intermediate_size",
            normalize_weights="norm_topk_prob",
        )
        values = asdict(self.moe)
        return {
            names[key]: value for key, value in values.items() if key in names and value is not None
        } | {"mlp_only_layers": list(self.moe.dense_layers)}


def _need(data: Mapping[str, Any], key: str, default: Any) -> Any:
    value = data.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json: {key!r} is missing")
    return value


def _count(data: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _need(data, key, default)
    if type(value) is not int or value < 1:
        raise CheckpointError(
            f"config.json: {key!r} must be a positive whole number, not {value!r}"
        )
    return value


def _number(data: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = _need(data, key, default)
    if type(value) not in (int, float) or value <= 0:
        raise CheckpointError(f"config.json: {key!r} must be a positive number, not {value!r}")
    return float(value)


def _flag(data: Mapping[str, Any], key: bool | str) -> bool:
    if isinstance(key, bool):
        return key
    value = data.get(key) or False
    if type(value) is not bool:
        raise CheckpointError(f"config.json: {key!r} must be true or false, not {value!r}")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(item) is not int for item in ids):
        raise CheckpointError(f"config.json: 'eos_token_id' must be token ids, not {value!r}")
    return tuple(ids)


def _read_rope(data: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeConfig:
    """Both spellings: rope_theta beside rope_scaling (transformers 4), everything in
    rope_parameters (transformers 5).
    """
    scaling = data.get("rope_scaling") or data.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise CheckpointError(f"config.json: 'rope_scaling' must be an object, not {scaling!r}")
    scaling = dict(scaling)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    theta = _number(
        {"rope_theta": scaling.pop("rope_theta", None) or data.get("rope_theta")},
        "rope_theta",
        10000.0,
    )
    partial = scaling.pop("partial_rotary_factor", None) or data.get("partial_rotary_factor") or 1.0
    rotary_dim = int(head_dim * partial)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise CheckpointError(
            f"config.json: partial_rotary_factor {partial} of head_dim {head_dim} is no even part "
            f"of it"
        )
    if kind not in ROPE_KEYS:
        raise UnsupportedError(
            f"config.json: rope scaling {kind!r} is not supported; known: {', '.join(ROPE_KEYS)}"
        )
    needed, optional = ROPE_KEYS[kind]
    # Other keys are dropped as transformers drops them: many configs carry leftovers of another
    # scaling.
    kept = {
        key: value
        for key, value in scaling.items()
        if key in needed | optional and value is not None
    }
    for key in needed:
        _number(kept, key)
    if "original_max_position_embeddings" in optional:
        kept.setdefault(
            "original_max_position_embeddings",
            data.get("original_max_position_embeddings") or max_positions,
        )
    return RopeConfig(theta, rotary_dim, kind, tuple(sorted(kept.items())))


def _read_windows(data: Mapping[str, Any], family: Family, layers: int) -> tuple[int | None, ...]:
    if family.window == "all":
        # stated as null; transformers takes 4096 where the key is missing
        full = not data.get("sliding_window", 4096)
        return (None if full else _count(data, "sliding_window", 4096),) * layers
    if not data.get("use_sliding_window"):
        return (None,) * layers
    if family.window == "never":
        raise UnsupportedError(
            f"config.json: use_sliding_window is not supported for {data['model_type']}"
        )
    width = _count(data, "sliding_window", 4096)
    first = data.get("max_window_layers", 28)
    if type(first) is not int:
        raise CheckpointError(
            f"config.json: 'max_window_layers' must be a whole number, not {first!r}"
        )
    kinds = data.get("layer_types") or [
        "full_attention" if i < first else "sliding_attention" for i in range(layers)
    ]
    if len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise CheckpointError(
            f"config.json: 'layer_types' must hold {layers} of full_attention or sliding_attention"
        )
    return tuple(width if kind == "sliding_attention" else None for kind in kinds)


def _read_moe(data: Mapping[str, Any], layers: int) -> MoeConfig:
    step = data.get("decoder_sparse_step", 1)
    dense = data.get("mlp_only_layers") or []
    shared = data.get("shared_expert_intermediate_size")
    experts = "num_experts" if data.get("num_experts") else "num_local_experts"
    return MoeConfig(
        experts=_count(data, experts),
        experts_per_token=_count(data, "num_experts_per_tok"),
        intermediate_size=_count(data, "moe_intermediate_size"),
        shared_intermediate_size=shared or None,
        normalize_weights=_flag(data, "norm_topk_prob"),
        dense_layers=tuple(i for i in range(layers) if i in dense or (i + 1) % step),
    )
