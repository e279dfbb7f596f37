"""Trellis codes (tensors/trellis.py), as they are: a format of this package.

trellis int32 [ceil(N / 16), K / 64, 32, bits] · scales [N, 1], or [N, ceil(K / 128)]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from flyweight.checkpoint.formats.base import (
    FLOATS,
    INT32,
    Format,
    Layers,
    Settings,
    Source,
    fault,
    present,
    take,
)
from flyweight.errors import UnsupportedError
from flyweight.tensors import QuantTensor, Trellis
from flyweight.tensors.trellis import LANES, STATE_BITS, TILE

VERSION = 1  # of the hash and of the order of the bits


@dataclass(frozen=True)
class TrellisFormat(Format):
    name: ClassVar[str] = "trellis"
    marks: ClassVar[tuple[str, ...]] = ("trellis",)
    suffixes: ClassVar[tuple[str, ...]] = ("trellis", "scales")

    @classmethod
    def parse(cls, settings: Settings) -> TrellisFormat:
        version = settings.get("version", int)
        if version != VERSION:
            raise UnsupportedError(
                f"{settings.where}: `version` is {version}; {VERSION} can be read"
            )
        return cls()

    def read(self, checkpoint: Source, prefix: str) -> QuantTensor | None:
        if not present(checkpoint, prefix, self):
            return None
        words = take(checkpoint, f"{prefix}.trellis", dtypes=INT32, shape=(None, None, LANES, None))
        tiles, blocks, _, bits = words.shape
        scales = take(checkpoint, f"{prefix}.scales", dtypes=FLOATS, shape=(None, None))
        rows, groups = scales.shape
        if bits not in STATE_BITS or blocks < 1:
            raise fault(
                checkpoint,
                f"'{prefix}.trellis' has shape {list(words.shape)}: trellises of 2 and 3 bits in "
                "blocks of 64 inputs are read",
            )
        if -(-rows // TILE) != tiles or groups not in (1, -(-blocks // 2)):
            raise fault(
                checkpoint,
                f"'{prefix}.scales' has shape {list(scales.shape)}, no fit for {tiles} tiles of "
                f"{TILE} outputs and {blocks} blocks of 64 inputs",
            )
        return Trellis(words, scales)

    def refuses(self, tensor: QuantTensor) -> str | None:
        if isinstance(tensor, Trellis):
            return None
        return f"a {tensor.kind} weight would have to be quantized again (trellises only)"

    def pack(self, tensor: Trellis) -> dict[str, Tensor]:
        return {"trellis": tensor.words, "scales": tensor.scales}

    def config(
        self, layers: Layers, ignore: Iterable[str] = (), *, biased: Iterable[str] = ()
    ) -> dict[str, Any]:
        bits = sorted({tensor.bits for tensor in layers.values() if isinstance(tensor, Trellis)})
        return {
            "quant_method": "trellis",
            "version": VERSION,
            "bits": bits[0] if len(bits) == 1 else bits,
            "modules_to_not_convert": list(ignore) or None,
        }
