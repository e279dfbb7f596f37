"""Which modules of a compressed-tensors folder have which scheme: `config_groups`, `targets`,
`ignore`, both ways.

A target is a module name, `re:` and a pattern, or a class; names win over classes, as in the
package itself. Every module that a checkpoint quantizes is a `Linear`, so that is the only class
with a meaning here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flyweight.checkpoint.formats.base import Layers, Settings, dense_of, group_labels, short
from flyweight.errors import CheckpointError, UnsupportedError
from flyweight.tensors import Float8, Int8Channel, IntGroup, QuantTensor

# of the package whose layout is written; before 0.17 some widths were packed with gaps
VERSION = "0.20.0"
NVFP4 = "nvfp4-pack-quantized"
LAYOUTS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "dense",
    "mixed-precision",
    NVFP4,
)
STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True)
class Scheme:
    """How one group of modules is quantized."""

    bits: int
    float8: bool = False
    symmetric: bool = True
    group: int | None = None  # None: one scale per output or per tensor
    block: int | None = None
    activation: str = "none"  # as in Float8
    symmetric_input: bool = True
    packed: bool = True
    padded_words: bool = False
    # NVFP4; what is asked for activations is not done: 16 bits are only more precise
    float4: bool = False

    def group_size(self, columns: int) -> int:
        return columns if self.group is None else self.group


@dataclass(frozen=True)
class Groups:
    schemes: tuple[tuple[tuple[str, ...], Scheme], ...] = ()  # targets and their scheme
    ignore: tuple[str, ...] = ()
    quantized_cache: bool = False  # scales for K and V lie in the files

    @classmethod
    def parse(cls, settings: Settings) -> Groups:
        layout = settings.choice("format", LAYOUTS, "dense")
        cache = bool(settings.get("kv_cache_scheme", dict, {}))
        _refuse_what_changes_the_numbers(settings)
        old = _version(settings.get("version", str, VERSION)) < (0, 17)
        schemes = []
        for name in settings.get("config_groups", dict):
            group = settings.part("config_groups").part(name)
            schemes.append(
                (
                    _targets(group, "targets"),
                    _scheme(group, group.choice("format", LAYOUTS, layout), old=old),
                )
            )
        return cls(tuple(schemes), _targets(settings, "ignore"), cache)

    def of(self, prefix: str) -> Scheme | None:
        if any(_named(prefix, target) for target in self.ignore):
            return None
        for fits in (_named, _is_class):
            for targets, scheme in self.schemes:
                if any(fits(prefix, target) for target in targets):
                    return scheme
        return None


def _named(prefix: str, target: str) -> bool:
    return (
        re.match(target[3:], prefix) is not None if target.startswith("re:") else target == prefix
    )


def _is_class(_prefix: str, target: str) -> bool:
    return target == "Linear"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d{1,6}", text)[:2])


def _targets(settings: Settings, key: str) -> tuple[str, ...]:
    targets = settings.get(key, list, [])
    for target in targets:
        try:
            if not isinstance(target, str):
                raise CheckpointError(
                    f"{settings.where}: `{key}` holds {short(target)}, names are wanted"
                )
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
        except (re.error, RecursionError, OverflowError) as error:
            raise CheckpointError(
                f"{settings.where}: `{key}` has {short(target)}, no regular expression ({error})"
            ) from error
    return tuple(targets)


def _refuse_what_changes_the_numbers(settings: Settings) -> None:
    if settings.values.get("transform_config"):
        raise UnsupportedError(
            f"{settings.where}: `transform_config` asks for rotations at run "
            f"time, which are not done here"
        )
    sparsity = settings.get("sparsity_config", dict, {})
    Settings(sparsity, f"{settings.where}: sparsity_config").choice(
        "format", ("dense", "sparse-24-bitmask"), "dense"
    )


def _scheme(group: Settings, layout: str, *, old: bool) -> Scheme:
    weights = group.part("weights")
    if layout == NVFP4:
        if weights.get("group_size", int, 16) != 16:
            raise UnsupportedError(f"{weights.where}: `group_size` of {NVFP4} is 16")
        return Scheme(weights.bits("num_bits", (4,), 4), float4=True)
    kind = weights.choice("type", ("int", "float"), "int")
    bits = weights.bits("num_bits", (8,) if kind == "float" else tuple(range(2, 9)), 8)
    if (kind == "int" and layout == "float-quantized") or (
        kind == "float" and layout in ("int-quantized", "pack-quantized")
    ):
        raise CheckpointError(f"{group.where}: format {layout} does not fit weights of type {kind}")
    size = weights.get("group_size", int, None)
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.choice("strategy", STRATEGIES, default)
    block = _block(weights) if strategy == "block" else None
    if (strategy == "block" and kind == "int") or (strategy == "group" and kind == "float"):
        raise UnsupportedError(
            f"{weights.where}: strategy {strategy} of {kind} weights is not handled"
        )
    if strategy == "group" and (size is None or size < 1):
        raise CheckpointError(f"{weights.where}: `group_size` is {size}; above zero is wanted")
    activation, symmetric_input = _activation(group, kind)
    packed = layout == "pack-quantized"
    if packed and activation != "none":
        raise UnsupportedError(
            f"{group.where}: quantized activations with packed weights are not handled"
        )
    return Scheme(
        bits,
        kind == "float",
        weights.get("symmetric", bool, True),
        size if strategy == "group" else None,
        block,
        activation,
        symmetric_input,
        packed,
        old,
    )


def _block(weights: Settings) -> int:
    structure = weights.values.get("block_structure")
    sizes = structure.split("x") if isinstance(structure, str) else structure
    if (
        not isinstance(sizes, list)
        or len(sizes) != 2
        or str(sizes[0]) != str(sizes[1])
        or not str(sizes[0]).isdecimal()
        or not 0 < int(sizes[0]) <= 1 << 20
    ):
        raise UnsupportedError(
            f"{weights.where}: `block_structure` is {short(structure)}; square "
            f"blocks ([128, 128]) are read"
        )
    return int(sizes[0])


def _activation(group: Settings, kind: str) -> tuple[str, bool]:
    """The kind of activation quantization as Float8 names it, and whether it is symmetric."""
    if group.values.get("output_activations"):
        raise UnsupportedError(f"{group.where}: quantized outputs are not handled")
    if group.values.get("input_activations") is None:
        return "none", True
    inputs = group.part("input_activations")
    strategy = inputs.choice("strategy", ("token", "tensor", "group"), "tensor")
    if (
        inputs.choice("type", ("int", "float"), "int") != kind
        or inputs.bits("num_bits", (8,), 8) != 8
    ):
        raise UnsupportedError(
            f"{inputs.where}: activations and weights of different types are not handled"
        )
    dynamic, symmetric = inputs.get("dynamic", bool, False), inputs.get("symmetric", bool, True)
    found = {(True, "token"): "token", (False, "tensor"): "static", (True, "group"): "group"}.get(
        (dynamic, strategy)
    )
    grouped_right = found != "group" or (
        kind == "float" and inputs.get("group_size", int, 128) == 128
    )
    if found is None or not grouped_right or (not symmetric and found != "static"):
        words = f"{'dynamic' if dynamic else 'static'} {'symmetric' if symmetric else 'asymmetric'}"
        raise UnsupportedError(
            f"{inputs.where}: {words} activations per {strategy} are not handled"
        )
    return found, symmetric


# -- writing ---------------------------------------------------------------------------------------


def describe(layers: Layers, ignore: Iterable[str]) -> dict[str, Any]:
    """`quantization_config`. One scheme targets every Linear; several name their modules."""
    sizes = group_labels(layers)
    members: dict[str, list[str]] = {}
    for prefix, tensor in layers.items():
        members.setdefault(json.dumps(_group(dense_of(tensor), sizes.get(prefix, -1))), []).append(
            prefix
        )
    groups = {
        f"group_{i}": {"targets": ["Linear"] if len(members) == 1 else names} | json.loads(text)
        for i, (text, names) in enumerate(members.items())
    }
    layouts = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "version": VERSION,
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": list(ignore),
        "sparsity_config": {},
        "transform_config": {},
        "config_groups": groups,
    }


def _group(tensor: QuantTensor, group_size: int) -> dict[str, Any]:
    inputs = None
    if isinstance(tensor, IntGroup):
        layout = "pack-quantized"
        weights = _arguments(
            "int",
            "channel" if group_size == -1 else "group",
            bits=tensor.bits,
            symmetric=tensor.zeros is None,
            group_size=None if group_size == -1 else group_size,
        )
    elif isinstance(tensor, Int8Channel):
        layout, weights = "int-quantized", _arguments("int", "channel")
        inputs = (
            _arguments("int", "token", dynamic=True)
            if tensor.input_scale is None
            else _arguments("int", "tensor", symmetric=tensor.input_zero is None)
        )
    elif isinstance(tensor, Float8):
        layout = "float-quantized"
        strategy = (
            "block" if tensor.block else "tensor" if tensor.scales.numel() == 1 else "channel"
        )
        weights = _arguments("float", strategy, block=tensor.block)
        inputs = {
            "none": None,
            "token": _arguments("float", "token", dynamic=True),
            "static": _arguments("float", "tensor"),
            "group": _arguments("float", "group", dynamic=True, group_size=128),
        }[tensor.activation]
    else:
        raise UnsupportedError(
            f"the compressed-tensors format has no place for {tensor.kind} weights"
        )
    return {
        "format": layout,
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }


def _arguments(
    kind: str,
    strategy: str,
    *,
    bits: int = 8,
    symmetric: bool = True,
    dynamic: bool = False,
    group_size: int | None = None,
    block: int | None = None,
) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": group_size,
        "block_structure": [block, block] if block else None,
        "dynamic": dynamic,
        "actorder": None,
    }
