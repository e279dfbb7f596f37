"""What a model folder holds, told per kind of layer: scheme, shape, true bits per weight, and the
kernel it would get.

Layers that look alike in the headers (same tensors, types and shapes) are one group, and only one
of them is read, so a summary of a large model costs as much as one of its blocks.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from flyweight.checkpoint.names import (
    BLOCK_ROUTER,
    BLOCK_ROUTER_CORRECTION,
    ROUTER,
    ROUTER_CORRECTION,
    SHARED_GATE,
)
from flyweight.checkpoint.reader import Checkpoint
from flyweight.checkpoint.shard import Entry
from flyweight.tensors import (
    Float8,
    Int8Channel,
    IntBlock,
    IntGroup,
    Plain,
    QuantTensor,
    Sparse24,
    VectorQuant,
)

LINEAR = re.compile(
    r"(?P<prefix>(?:.*\.layers\.(?P<layer>\d+)\.)?"
    r"(?P<module>[\w.]*?_proj(?:_\w+)?|[\w.]*\.experts\.\d+\.w[123]|lm_head))\.(?P<part>.+)"
)
ROUTERS = (
    ROUTER,
    SHARED_GATE,
    ROUTER_CORRECTION,
    BLOCK_ROUTER,
    BLOCK_ROUTER_CORRECTION,
)


class Chosen(Protocol):
    """What a summary tells of the kernel that a weight would get; `kernels.dispatch` makes them."""

    @property
    def kernel(self) -> str: ...

    @property
    def why(self) -> str: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Group:
    """Linear layers of one kind, or (without layers) what is not a linear."""

    module: str  # self_attn.q_proj, mlp.experts.*.up_proj, embedding
    scheme: str
    count: int
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    parameters: int
    nbytes: int
    kernel: str = ""
    why: str = ""
    memory: int = 0  # bytes once laid out for its kernel

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.parameters


@dataclass(frozen=True)
class Summary:
    folder: str
    architecture: str
    layers: int | None
    hidden_size: int | None
    heads: int | None
    kv_heads: int | None
    vocabulary: int | None
    context_length: int | None
    tied_embeddings: bool
    dtype: str
    quantization: str | None
    parameters: int
    disk: int  # bytes of all files
    groups: tuple[Group, ...]

    @property
    def memory(self) -> int:
        return sum(group.memory for group in self.groups)

    @property
    def linear_bits(self) -> float:
        """Bits per weight of the decoder's linears: what a scheme is called by."""
        return bits_per_weight(
            [group for group in self.groups if group.layers] or list(self.groups)
        )

    @property
    def file_bits(self) -> float:
        """Bits per weight of everything, embedding, head and norms included: what a
        download costs.
        """
        return bits_per_weight(list(self.groups))

    def bits_by_scheme(self) -> dict[str, float]:
        """Bits per weight of each scheme, metadata included, all its layers together."""
        schemes = {group.scheme for group in self.groups}
        members = {
            scheme: [group for group in self.groups if group.scheme == scheme]
            for scheme in sorted(schemes)
        }
        return {
            scheme: 8 * sum(g.nbytes for g in found) / sum(g.parameters for g in found)
            for scheme, found in members.items()
        }

    def to_dict(self) -> dict[str, Any]:
        bits = {scheme: round(bits, 3) for scheme, bits in self.bits_by_scheme().items()}
        groups = [
            asdict(group) | {"bits_per_weight": round(group.bits_per_weight, 3)}
            for group in self.groups
        ]
        return asdict(self) | {
            "memory": self.memory,
            "bits_per_weight": bits,
            "groups": groups,
            "linear_bits_per_weight": round(self.linear_bits, 3),
            "file_bits_per_weight": round(self.file_bits, 3),
        }


def bits_per_weight(groups: list[Group]) -> float:
    return (
        8
        * sum(group.nbytes for group in groups)
        / max(1, sum(group.parameters for group in groups))
    )


def summarize(
    checkpoint: Checkpoint,
    prepare: Callable[[QuantTensor], Chosen] | None = None,
    *,
    itemsize: int | None = None,
) -> Summary:
    """`prepare` chooses a kernel, `itemsize` is that of what is not a linear at run time.

    Without them the groups name no kernel and take the memory they take on disk.
    """
    linears: dict[Any, list[re.Match[str]]] = defaultdict(list)
    others: dict[str, list[Entry]] = defaultdict(list)
    parts: dict[str, dict[str, Entry]] = defaultdict(dict)
    matches = {}
    for name, entry in checkpoint.entries.items():
        match = LINEAR.fullmatch(name)
        if match and match["part"] != "bias":
            parts[match["prefix"]][match["part"]] = entry
            matches[match["prefix"]] = match
        else:
            others[_kind_of(name)].append(entry)
    for prefix, match in matches.items():
        module = re.sub(r"\.\d+\.", ".*.", match["module"])
        linears[
            module, tuple(sorted((part, e.dtype, e.shape) for part, e in parts[prefix].items()))
        ].append(match)
    groups = [_plain_group(module, entries, itemsize) for module, entries in others.items()]
    groups += [
        _linear_group(checkpoint, module, found, prepare) for (module, _), found in linears.items()
    ]
    order = ("embedding", "norms", "self_attn", "mlp", "lm_head")
    groups.sort(
        key=lambda group: next(
            (i for i, start in enumerate(order) if group.module.startswith(start)), len(order)
        )
    )
    return _summary(checkpoint, tuple(groups))


def _kind_of(name: str) -> str:
    """Of a tensor that is not a linear's own."""
    if "embed_tokens" in name:
        return "embedding"
    if ".experts." in name and not name.endswith("bias"):
        return f"mlp.experts.* ({name.rpartition('.')[2]}, in one tensor)"
    return "routers" if name.endswith(ROUTERS) or ".mlp.router." in name else "norms, biases"


def _summary(checkpoint: Checkpoint, groups: tuple[Group, ...]) -> Summary:
    config = checkpoint.config
    architectures = config.get("architectures") or [config.get("model_type", "unknown")]
    stated = (config.get("quantization_config") or {}).get("quant_method")
    return Summary(
        folder=str(checkpoint.folder),
        architecture=architectures[0],
        layers=config.get("num_hidden_layers"),
        hidden_size=config.get("hidden_size"),
        heads=config.get("num_attention_heads"),
        kv_heads=config.get("num_key_value_heads", config.get("num_attention_heads")),
        vocabulary=config.get("vocab_size"),
        context_length=config.get("max_position_embeddings"),
        tied_embeddings=not any(name.startswith("lm_head.") for name in checkpoint.entries),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        quantization=checkpoint.format.name if checkpoint.format else stated,
        parameters=sum(group.parameters for group in groups),
        disk=sum(path.stat().st_size for path in checkpoint.folder.iterdir() if path.is_file()),
        groups=groups,
    )


def _plain_group(module: str, entries: list[Entry], itemsize: int | None) -> Group:
    numbers = sum(math.prod(entry.shape) for entry in entries)
    size = sum(entry.nbytes for entry in entries)
    shape = entries[0].shape if len(entries) == 1 else ()
    scheme = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}.get(
        entries[0].dtype, entries[0].dtype
    )
    return Group(
        module,
        scheme,
        len(entries),
        (),
        shape,
        numbers,
        size,
        memory=numbers * itemsize if itemsize else size,
    )


def _linear_group(
    checkpoint: Checkpoint,
    module: str,
    found: list[re.Match[str]],
    prepare: Callable[[QuantTensor], Chosen] | None,
) -> Group:
    tensor = checkpoint.linear(found[0]["prefix"])
    count, prepared = len(found), prepare(tensor) if prepare else None
    return Group(
        module,
        describe(tensor),
        count,
        tuple(sorted({int(match["layer"]) for match in found if match["layer"]})),
        tensor.shape,
        count * math.prod(tensor.shape),
        count * tensor.nbytes,
        prepared.kernel if prepared else "",
        prepared.why if prepared else "",
        count * (prepared.nbytes if prepared else tensor.nbytes),
    )


def describe(tensor: QuantTensor) -> str:
    """A scheme in a few words."""
    match tensor:
        case Plain():
            return str(tensor.weight.dtype).removeprefix("torch.")
        case IntGroup():
            size = (
                "channel"
                if tensor.group_size >= tensor.in_features
                else f"group {tensor.group_size}"
            )
            extras = (", zeros" if tensor.zeros is not None else "") + (
                ", act-order" if tensor.g_idx is not None else ""
            )
            return f"int{tensor.bits} {size}{extras}"
        case IntBlock():
            extras = (", table" if tensor.table else "") + (
                ", minima" if tensor.mins is not None else ""
            )
            return f"int{tensor.bits} group {tensor.group_size}{extras}"
        case Int8Channel():
            return f"w8a8 {'dynamic' if tensor.input_scale is None else 'static'}"
        case Float8():
            return (
                f"fp8 {f'block {tensor.block}' if tensor.block else 'channel'}, activations "
                f"{tensor.activation}"
            )
        case Sparse24():
            return f"2:4 {describe(tensor.inner)}"
        case VectorQuant():
            books = f"{tensor.codebook.shape[-2]}" + (
                f"+{tensor.residual.shape[-2]}" if tensor.residual is not None else ""
            )
            return f"vptq v{tensor.length} k{books}"
    return tensor.kind
