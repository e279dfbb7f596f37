"""GPTQ: rows packed along in_features, so the stored words are the transposed codes of an IntGroup,
nothing to repack.

    qweight int32 [K·b/32, N] · qzeros int32 [G, N·b/32] · scales fp16 [G, N] · g_idx int32 [K]

Version 1 stores each zero point less one, version 2 as it is; files with the wrong label exist, and
a symmetric one shows which it is, because all its zero points are 2^(b−1). GPTQModel takes other
numbers off zero points of 3 bits (ONES_OF_GPTQMODEL). Engines run 4 and 8 bits; 2 and 3 are read
only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from flyweight.checkpoint.formats.base import (
    FLOATS,
    INT32,
    Format,
    Layers,
    Settings,
    Source,
    dense_of,
    fault,
    group_labels,
    most_common,
    notice,
    present,
    rounded_scales,
    take,
)
from flyweight.errors import CheckpointError
from flyweight.packing import pack, packed_words, unpack
from flyweight.tensors import IntGroup, QuantTensor

READABLE_BITS = (2, 3, 4, 5, 6, 8)
# What GPTQModel (6.0 and 7.7 at least) takes off each three words of 3-bit zero points, as if it
# were a one in each: it is 4, 1 or 2, by the place. As int32.
ONES_OF_GPTQMODEL = (0x24924924, 0x92492492 - 2**32, 0x49249249)


@dataclass(frozen=True)
class Gptq(Format):
    """`bits` to `overrides` are of the file that is read; writing takes them from the tensors."""

    name: ClassVar[str] = "gptq"
    marks: ClassVar[tuple[str, ...]] = ("qweight",)
    suffixes: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales", "g_idx")
    version2: bool = False
    bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    act_order: bool = False
    by_gptqmodel: bool = False
    overrides: tuple[tuple[re.Pattern[str], Settings], ...] = field(default=())

    @classmethod
    def parse(cls, settings: Settings) -> Gptq:
        key = "checkpoint_format" if "checkpoint_format" in settings.values else "format"
        version = settings.choice(key, ("gptq", "gptq_v2"), "gptq")
        dynamic = settings.get("dynamic", dict, {})
        made_by = str(settings.get("meta", dict, {}).get("quantizer"))
        rules = []
        for pattern, change in dynamic.items():
            if not pattern.startswith("-:"):
                try:
                    rules.append(
                        (
                            re.compile(pattern.removeprefix("+:")),
                            Settings(change or {}, f"{settings.where}: {pattern}"),
                        )
                    )
                except (re.error, RecursionError) as error:
                    raise CheckpointError(
                        f"{settings.where}: `dynamic` has {pattern!r}, no valid pattern ({error})"
                    ) from error
        return cls(
            version == "gptq_v2",
            settings.bits("bits", READABLE_BITS),
            settings.group_size("group_size"),
            settings.get("sym", bool, True),
            settings.get("desc_act", bool, False),
            "gptqmodel" in made_by.lower(),
            tuple(rules),
        )

    def scheme(self, prefix: str) -> tuple[int, int, bool]:
        """Bits, group size and symmetry of one module, `dynamic` rules included."""
        rule = next((change for pattern, change in self.overrides if pattern.match(prefix)), None)
        if rule is None:
            return self.bits, self.group_size, self.symmetric
        return (
            rule.bits("bits", READABLE_BITS, self.bits),
            rule.group_size("group_size", self.group_size),
            rule.get("sym", bool, self.symmetric),
        )

    # -- reading -----------------------------------------------------------------------------------

    def read(self, checkpoint: Source, prefix: str) -> QuantTensor | None:
        if not present(checkpoint, prefix, self):
            return None
        bits, group_size, symmetric = self.scheme(prefix)
        qweight = take(checkpoint, f"{prefix}.qweight", dtypes=INT32, shape=(None, None))
        words, rows = qweight.shape
        g_idx = None
        if checkpoint.has(f"{prefix}.g_idx"):
            g_idx = take(
                checkpoint, f"{prefix}.g_idx", dtypes=(torch.int32, torch.int64), shape=(None,)
            )
        columns = words * 32 // bits if g_idx is None else len(g_idx)
        if not rows or not columns or columns * bits % 32 or words < packed_words(columns, bits):
            raise fault(
                checkpoint,
                f"'{prefix}.qweight' has shape {[words, rows]}, no fit for {columns} inputs of "
                f"{bits} bits (counted by '{prefix}.g_idx' where it is there)",
            )
        if words > packed_words(columns, bits):
            notice(
                checkpoint,
                "qweight is padded beyond the inputs that g_idx counts; the padding is dropped",
            )
            qweight = qweight[: packed_words(columns, bits)]
        group_size = columns if group_size == -1 else group_size
        groups = -(-columns // group_size)
        scales = take(checkpoint, f"{prefix}.scales", dtypes=FLOATS, shape=(groups, rows))
        zeros = self._zeros(
            checkpoint, prefix, bits=bits, shape=(groups, rows), symmetric=symmetric
        )
        g_idx = (
            None
            if g_idx is None
            else self._act_order(checkpoint, prefix, g_idx, group_size=group_size, groups=groups)
        )
        return IntGroup(
            qweight.T.contiguous(), scales.T.contiguous(), zeros, bits, group_size, columns, g_idx
        )

    def _zeros(
        self, checkpoint: Source, prefix: str, *, bits: int, shape: tuple[int, int], symmetric: bool
    ) -> Tensor | None:
        """uint8 [rows, groups], or None where every zero point is the middle of a
        symmetric weight.
        """
        groups, rows = shape
        qzeros = take(checkpoint, f"{prefix}.qzeros", dtypes=INT32, shape=(groups, None))
        if qzeros.shape[1] < packed_words(rows, bits):
            raise fault(
                checkpoint,
                f"tensor '{prefix}.qzeros' has shape {list(qzeros.shape)}, but {rows} outputs of "
                f"{bits} bits take {packed_words(rows, bits)} words; is `bits` right?",
            )
        words = qzeros[:, : packed_words(rows, bits)]
        stored = unpack(words, bits, rows)
        read = {"2": stored, "1": (stored + 1) & ((1 << bits) - 1)}
        if bits == 3:
            ones = torch.tensor(ONES_OF_GPTQMODEL, dtype=torch.int32, device=words.device)
            ones = ones.repeat(-(-words.shape[1] // 3))[: words.shape[1]]
            read["1 of GPTQModel"] = unpack(words + ones, bits, rows)
        way = "2" if self.version2 else "1"
        if way == "1" and bits == 3 and self.by_gptqmodel:
            way = "1 of GPTQModel"
        if symmetric:
            for other in (way, *read):
                if bool((read[other] == 1 << (bits - 1)).all()):
                    if other != way:
                        notice(
                            checkpoint,
                            f"labelled GPTQ version {way}, but its zero points are those of "
                            f"version {other}: read as such",
                        )
                    return None
        return read[way].T.contiguous().to(torch.uint8)

    def _act_order(
        self, checkpoint: Source, prefix: str, g_idx: Tensor, *, group_size: int, groups: int
    ) -> Tensor | None:
        in_order = torch.arange(len(g_idx), dtype=torch.int32) // group_size
        g_idx = g_idx.to(torch.int32).cpu()
        if torch.equal(g_idx, in_order):
            return None
        if int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
            raise fault(
                checkpoint,
                f"'{prefix}.g_idx' points outside the {groups} groups; is `group_size` right?",
            )
        if len(g_idx.unique()) < groups:
            if self.act_order:
                raise fault(checkpoint, f"'{prefix}.g_idx' leaves groups unused: it is damaged")
            notice(
                checkpoint,
                "g_idx is not filled in and desc_act is false: columns are taken in order",
            )
            return None
        return g_idx

    # -- writing -----------------------------------------------------------------------------------

    def refuses(self, tensor: QuantTensor) -> str | None:
        if not isinstance(tensor, IntGroup):
            return f"a {tensor.kind} weight would have to be quantized again (integer groups only)"
        rows, columns = tensor.matrix_shape
        if tensor.bits not in (4, 8):
            return (
                f"engines run GPTQ files of 4 and 8 bits, not {tensor.bits}; compressed-tensors "
                f"holds them"
            )
        if rows * tensor.bits % 32 or columns * tensor.bits % 32:
            return (
                f"{rows} × {columns} weights of {tensor.bits} bits do not fill whole words of 32 "
                f"bits"
            )
        if (
            tensor.zeros is not None
            and not self.version2
            and not tensor.zeros.is_meta
            and not bool(tensor.zeros.all())
        ):
            return "a zero point of 0 overflows in version 1; use gptq_v2 or compressed-tensors"
        return rounded_scales(tensor.scales)

    def pack(self, tensor: IntGroup) -> dict[str, Tensor]:
        groups, rows = tensor.groups, tensor.matrix_shape[0]
        zeros = (
            torch.full((rows, groups), 1 << (tensor.bits - 1))
            if tensor.zeros is None
            else tensor.zeros.int()
        )
        stored = zeros.T.to(tensor.codes.device) - (0 if self.version2 else 1)
        return {
            "qweight": tensor.codes.T,
            "qzeros": pack(stored, tensor.bits),
            "scales": tensor.scales.T.to(torch.float16),
            "g_idx": tensor.group_of_column().to(torch.int32),
        }

    def config(
        self, layers: Layers, ignore: Iterable[str] = (), *, biased: Iterable[str] = ()
    ) -> dict[str, Any]:
        dense = {prefix: dense_of(tensor) for prefix, tensor in layers.items()}
        sizes = group_labels(dense)
        schemes = {
            prefix: (tensor.bits, sizes[prefix], tensor.zeros is None)
            for prefix, tensor in dense.items()
            if isinstance(tensor, IntGroup)
        }
        common = most_common(schemes.values())
        rules: dict[str, Any] = {
            f"+:^{re.escape(prefix)}$": dict(
                zip(("bits", "group_size", "sym"), scheme, strict=True)
            )
            for prefix, scheme in schemes.items()
            if scheme != common
        }
        rules.update({f"-:^{re.escape(prefix)}$": {} for prefix in ignore if prefix != "lm_head"})
        act_order = any(
            isinstance(tensor, IntGroup) and tensor.g_idx is not None for tensor in dense.values()
        )
        config = {
            "quant_method": "gptq",
            "bits": common[0],
            "group_size": common[1],
            "desc_act": act_order,
            "sym": common[2],
            "lm_head": "lm_head" in layers,
            "checkpoint_format": "gptq_v2" if self.version2 else "gptq",
        }
        return config | ({"dynamic": rules} if rules else {})
