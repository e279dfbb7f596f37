"""The next token of each row on the device, whatever it asks for: host side of cuda/sample.cu.

One launch for any mix of rows. What they ask for is data in a table (`SampleTable`), so a new mix
needs no new kernel and no new graph; `sample_reference.py` says in float64 what is kept.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.kernels import jit

# Thread blocks of a row by the most rows for which all rows run at once, where the GPU has clusters
# (8: the most that every such GPU runs). Parts of the GPU with 16 to 18 processors hold whole ones.
CLUSTERS = {8: 8, 24: 4, 64: 2}
THREADS = 1024
MOST_BIASES = 320  # entries of a row's sparse list; as in the kernel
SHARED = 40 * 1024  # bytes, rounded up
TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
# Rows of `SampleTable.values` and `integers`, as in the kernel.
COLUMNS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
INTEGERS = ("top_k", "seed", "biases")


def unsupported_reason(device: torch.device) -> str | None:
    """None, or why the kernel cannot run there."""
    if device.type != "cuda":
        return "no CUDA device"
    if gpu.of(device).major < 8:
        return "the kernel needs a GPU of compute capability 8.0 or newer"
    return None


class When(enum.Enum):
    ALONE = enum.auto()  # the table's lengths count the tokens already
    AFTER_GREEDY = enum.auto()  # so they do; rows that only want the likeliest token have it
    IN_STEP = enum.auto()  # as its last kernel; lengths get the tokens counted, 0 stays 0


@dataclass(frozen=True, eq=False)
class Guessed:
    """Rows of a step that checks guesses."""

    tokens: Tensor  # int64 [at least the rows of the launch]
    before: Tensor  # int32 [as many]: how many of each row's last tokens are guesses


@dataclass(frozen=True, eq=False)
class SampleTable:
    """What the running sequences ask for, one row each; a row is read when it is sampled."""

    tokens: Tensor  # int64 [rows]: get the chosen ones
    lengths: Tensor  # int32 [rows]: with the token to be chosen (IN_STEP: without)
    values: Tensor  # float32 [COLUMNS, rows]
    integers: Tensor  # int64 [INTEGERS, rows]
    bias: tuple[Tensor, Tensor, Tensor] | None  # [rows, MOST_BIASES]: id (rising), value, end
    seen: tuple[Tensor, Tensor] | None  # [rows, vocabulary]: bool in prompt, int32 in answer
    # of a launch that checks guesses: penalties count those before a row, and not what it chooses
    guessed: Guessed | None = None


@dataclass(frozen=True, eq=False)
class Masks:
    """What some rows of a launch may choose from."""

    bits: Tensor  # uint8 [masks, bytes], the lowest bit first
    of_row: Tensor  # int32 [rows of the launch]: which mask, or -1


@dataclass(frozen=True)
class Plan:
    cluster: int
    threads: int

    @classmethod
    def of(cls, rows: int, device: gpu.Gpu) -> Plan:
        if device.major < 9:
            return cls(1, THREADS)
        return cls(next((size for most, size in CLUSTERS.items() if rows <= most), 1), THREADS)


class Sampler:
    """For one vocabulary; `plan` is chosen for the GPU unless given."""

    def __init__(self, vocabulary: int, device: torch.device, *, plan: Plan | None = None) -> None:
        self.vocabulary = vocabulary
        self.device = device
        self.forced = plan

    def __call__(
        self,
        logits: Tensor,
        table: SampleTable,
        *,
        rows: Tensor | None = None,
        positions: Tensor | None = None,
        masks: Masks | None = None,
        chosen: Tensor | None = None,
        bounds: Tensor | None = None,
        when: When = When.ALONE,
    ) -> None:
        """Logits [n, at least vocabulary] choose tokens of the table's `rows` (int64 [n]; None: its
        first n), also written to `chosen`. Penalties count them.

        `positions` int64 [n]: of the tokens, where the table's lengths do not say it; these tokens
        go to `chosen` alone.
        `bounds` int64 [n], for tests: the last token kept as (ordered logit, ~id); 0: all are kept.
        """
        plan = self.plan_for(len(logits))
        bias = table.bias or (None, None, None)
        seen = table.seen or (None, None)
        args = (
            logits,
            rows,
            table.tokens if positions is None else None,
            table.lengths,
            positions,
            table.values,
            table.integers,
            *bias,
            *seen,
            table.guessed and table.guessed.tokens,
            table.guessed and table.guessed.before,
            masks and masks.bits,
            masks and masks.of_row,
            chosen,
            bounds,
            logits.stride(0),
            len(table.tokens),
            masks.bits.shape[1] if masks else 0,
            int(when is When.AFTER_GREEDY),
            int(when is When.IN_STEP),
        )
        self._kernel(logits.dtype, plan).launch(
            len(logits) * plan.cluster,
            plan.threads,
            args,
            shared=SHARED,
            pdl=when is When.IN_STEP,
            cluster=plan.cluster,
        )

    def prepare(self, *dtypes: torch.dtype) -> None:
        """Compile, or load, what logits of these types need."""
        for dtype in dtypes:
            for rows in (*CLUSTERS, max(CLUSTERS) + 1):
                self._kernel(dtype, self.plan_for(rows))

    def plan_for(self, rows: int) -> Plan:
        return self.forced or Plan.of(rows, gpu.of(self.device))

    def _kernel(self, dtype: torch.dtype, plan: Plan) -> jit.Kernel:
        defines = {
            "VOCAB": self.vocabulary,
            "TYPE": TYPES[dtype],
            "CLUSTER": plan.cluster,
            "THREADS": plan.threads,
        }
        return jit.load("sample.cu", defines=defines).kernel("sample")
