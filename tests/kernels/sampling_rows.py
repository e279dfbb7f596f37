"""Tables of requests for the sampling kernel, and the tokens that it says it keeps."""

from dataclasses import dataclass, field

import numpy
import torch

from flyweight.kernels.sample import COLUMNS, MOST_BIASES, SampleTable
from flyweight.kernels.sample_reference import Filters


@dataclass(frozen=True)
class Asked:
    """What one row asks for."""

    filters: Filters = field(default_factory=Filters)
    seed: int = 0
    length: int = 9
    bias: tuple = ()  # (id, value, end), ids rising
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


def table_of(asked, vocabulary, device="cpu"):
    rows = len(asked)
    values = torch.tensor(
        [
            [
                row.filters.temperature,
                row.filters.top_p,
                row.filters.min_p,
                row.repetition,
                row.presence,
                row.frequency,
            ]
            for row in asked
        ]
    ).T.contiguous()
    assert len(values) == len(COLUMNS)
    integers = torch.tensor(
        [[row.filters.top_k, row.seed, len(row.bias)] for row in asked]
    ).T.contiguous()
    bias = [
        torch.zeros(rows, MOST_BIASES, dtype=kind)
        for kind in (torch.int64, torch.float32, torch.int64)
    ]
    for i, row in enumerate(asked):
        for j, entry in enumerate(row.bias):
            for tensor, value in zip(bias, entry, strict=True):
                tensor[i, j] = value
    seen = (
        torch.zeros(rows, vocabulary, dtype=torch.bool),
        torch.zeros(rows, vocabulary, dtype=torch.int32),
    )
    lengths = torch.tensor([row.length for row in asked], dtype=torch.int32)
    parts = torch.full((rows,), -1), lengths, values, integers, tuple(bias), seen

    def move(part):
        return tuple(x.to(device) for x in part) if isinstance(part, tuple) else part.to(device)

    return SampleTable(*map(move, parts))


def words_of(logits):
    """Int64 numpy of uint64 [vocabulary]: the kernel's order of tokens."""
    bits = logits.float().cpu().numpy().view(numpy.uint32)
    keys = numpy.where(bits >> 31, ~bits, bits | numpy.uint32(0x80000000)).astype(numpy.uint64)
    ids = numpy.arange(len(bits), dtype=numpy.uint32)
    return keys << numpy.uint64(32) | (~ids).astype(numpy.uint64)


def kept_by(bound, logits):
    """Bool [vocabulary]: what top_k and top_p keep by the kernel's bound."""
    words = words_of(logits)
    allowed = torch.from_numpy(words >= numpy.int64(bound).view(numpy.uint64))
    return allowed & (logits.float().cpu() > -torch.inf)
