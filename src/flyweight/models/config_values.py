"""Single values of a config.json, each checked by its key: numbers, flags, rope, windows.

A wrong guess here gives a model that runs and talks nonsense, so what is missing, of another type
or of an unknown kind is an error that names the key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flyweight.errors import CheckpointError, UnsupportedError
from flyweight.models.plan import RopeConfig

Data = Mapping[str, Any]

# Queries grow with their position, from original_max_position_embeddings on: up to there they do
# not, and so long may a sequence be (`ModelConfig.context_length`).
GROWING = "llama_4_scaling_beta"
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
            GROWING,
        },
    ),
    "longrope": (
        {"short_factor", "long_factor"},
        {"original_max_position_embeddings", "attention_factor", "factor"},
    ),
}
OLD_NAMES = {"su": "longrope"}  # of Phi-3's first files
FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"


def need(data: Data, key: str, default: Any = None) -> Any:
    value = data.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json: {key!r} is missing")
    return value


def count(data: Data, key: str, default: int | None = None) -> int:
    value = need(data, key, default)
    if type(value) is not int or value < 1:
        raise CheckpointError(
            f"config.json: {key!r} must be a positive whole number, not {value!r}"
        )
    return value


def number(data: Data, key: str, default: float | None = None) -> float:
    value = need(data, key, default)
    if type(value) not in (int, float) or value <= 0:
        raise CheckpointError(f"config.json: {key!r} must be a positive number, not {value!r}")
    return float(value)


def flag(data: Data, key: bool | str) -> bool:
    if isinstance(key, bool):
        return key
    value = data.get(key) or False
    if type(value) is not bool:
        raise CheckpointError(f"config.json: {key!r} must be true or false, not {value!r}")
    return value


def token_ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(item) is not int for item in ids):
        raise CheckpointError(f"config.json: 'eos_token_id' must be token ids, not {value!r}")
    return tuple(ids)


def extra(data: Data, key: str, default: Any) -> Any:
    """A value that one family alone reads: a number, a flag, a list of numbers, or null; a word
    where its default is one.
    """
    value = data.get(key, default)
    if isinstance(default, str):
        if not isinstance(value, str):
            raise CheckpointError(f"config.json: {key!r} must be a word, not {value!r}")
        return value
    if isinstance(value, list | tuple):
        if any(type(item) not in (int, float, bool) for item in value):
            raise CheckpointError(f"config.json: {key!r} must hold numbers, not {value!r}")
        return tuple(value)
    if value is not None and type(value) not in (int, float, bool):
        raise CheckpointError(f"config.json: {key!r} must be a number, not {value!r}")
    return value


# -- rope ------------------------------------------------------------------------------------


def read_rope(data: Data, head_dim: int, max_positions: int) -> RopeConfig:
    """Both spellings: rope_theta beside rope_scaling (transformers 4), everything in
    rope_parameters (transformers 5).
    """
    scaling = data.get("rope_scaling") or data.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise CheckpointError(f"config.json: 'rope_scaling' must be an object, not {scaling!r}")
    if FULL in scaling or SLIDING in scaling:
        raise UnsupportedError(
            f"config.json: 'rope_parameters' by kind of layer are not supported for "
            f"{data['model_type']}"
        )
    scaling = dict(scaling)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    kind = OLD_NAMES.get(kind, kind)
    scaling.pop("type", None)
    theta = number(
        {"rope_theta": scaling.pop("rope_theta", None) or data.get("rope_theta")},
        "rope_theta",
        10000.0,
    )
    partial = scaling.pop("partial_rotary_factor", None) or data.get("partial_rotary_factor")
    if partial is None and data.get("rotary_dim"):  # of MiniMax-M2's files
        partial = count(data, "rotary_dim") / head_dim
    partial = partial or 1.0
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
    if scaling.get(GROWING) and kind != "yarn":
        raise UnsupportedError(
            f"config.json: {GROWING!r} (queries that grow with their position) is not supported "
            f"with rope scaling {kind!r}"
        )
    kept = kept_scaling(data, kind, scaling, rotary_dim=rotary_dim, max_positions=max_positions)
    return RopeConfig(theta, rotary_dim, kind, tuple(sorted(kept.items())))


def kept_scaling(
    data: Data, kind: str, scaling: Data, *, rotary_dim: int, max_positions: int
) -> dict[str, Any]:
    """The numbers of a kind of scaling. Other keys are dropped as transformers drops them: many
    configs carry leftovers of another scaling.
    """
    needed, optional = ROPE_KEYS[kind]
    kept = {
        key: value
        for key, value in scaling.items()
        if key in needed | optional and value is not None
    }
    for key in sorted(needed):
        if kind == "longrope":
            kept[key] = factors(kept, key, rotary_dim // 2)
        else:
            number(kept, key)
    if "original_max_position_embeddings" in optional:
        kept.setdefault(
            "original_max_position_embeddings",
            data.get("original_max_position_embeddings") or max_positions,
        )
    return kept


def factors(scaling: Data, key: str, length: int) -> tuple[float, ...]:
    """One divisor for each frequency."""
    found = need(scaling, key)
    if not isinstance(found, list | tuple) or len(found) != length:
        raise CheckpointError(f"config.json: rope scaling {key!r} must be a list of {length}")
    return tuple(number({key: one}, key) for one in found)


def read_ropes(
    data: Data, head_dim: int, max_positions: int, *, local: str | None
) -> tuple[RopeConfig, RopeConfig | None]:
    """The table of layers that see everything, and that of layers with a window where a family has
    two. `local`: the key that holds the second base in files of transformers 4.
    """
    if local is None:
        return read_rope(data, head_dim, max_positions), None
    nested = data.get("rope_parameters") or {}
    if FULL in nested or SLIDING in nested:
        # a scaling beside them is of the layers that see everything, as transformers has it
        pairs = {FULL: dict(nested.get(FULL) or {}) | dict(data.get("rope_scaling") or {})}
        pairs[SLIDING] = dict(nested.get(SLIDING) or {})
    else:
        pairs = {FULL: dict(data.get("rope_scaling") or nested), SLIDING: {}}
    plain = {
        key: value
        for key, value in data.items()
        if key not in ("rope_scaling", "rope_parameters", "rope_theta")
    }
    bases = {FULL: data.get("rope_theta"), SLIDING: data.get(local)}
    found = [
        read_rope(
            plain | {"rope_parameters": {"rope_theta": bases[kind]} | pairs[kind]},
            head_dim,
            max_positions,
        )
        for kind in (FULL, SLIDING)
    ]
    return found[0], found[1]


# -- windows ---------------------------------------------------------------------------------


def layer_types(data: Data, default: Sequence[str], layers: int, other: str = SLIDING) -> list[str]:
    kinds = data.get("layer_types") or list(default)
    if len(kinds) != layers or set(kinds) - {FULL, other}:
        raise CheckpointError(
            f"config.json: 'layer_types' must hold {layers} of full_attention or {other}"
        )
    return kinds


def state_layers(data: Data, layers: int) -> tuple[int, ...]:
    """As Qwen3-Next has it: every so many layers one of attention."""
    interval = count(data, "full_attention_interval", 4)
    usual = [LINEAR if (index + 1) % interval else FULL for index in range(layers)]
    kinds = layer_types(data, usual, layers, LINEAR)
    return tuple(index for index, kind in enumerate(kinds) if kind == LINEAR)


def windows_of(data: Data, kinds: Sequence[str]) -> tuple[int | None, ...]:
    if SLIDING not in kinds:
        return (None,) * len(kinds)
    width = count(data, "sliding_window")
    return tuple(width if kind == SLIDING else None for kind in kinds)


def one_in(interval: int, layers: int) -> list[str]:
    """Every so many layers one sees everything."""
    return [SLIDING if (index + 1) % interval else FULL for index in range(layers)]


def trailing(data: Data, layers: int) -> list[str]:
    """As Qwen has it: windows from `max_window_layers` on."""
    first = data.get("max_window_layers", 28)
    if type(first) is not int:
        raise CheckpointError(
            f"config.json: 'max_window_layers' must be a whole number, not {first!r}"
        )
    return [FULL if index < first else SLIDING for index in range(layers)]
