"""Numbers that were measured, one TOML file for each GPU, and the rules for GPUs that have none.

A file says from how many rows on which kernel is the fastest for a format, and what kernels' plans
are estimated with. It names the rows that each table came from; what it does not say is as in its
`base`. A GPU without a file takes the numbers of the one file that is nearest (they are ratios
between parts of a kernel, which change little from GPU to GPU), never those of Hopper elsewhere or
the other way round, and leaves out every route to a kernel that it cannot run (`choose.py`); all
sizes of shared memory are computed from the device (`gpu.py`), so that every plan fits.
"""

from __future__ import annotations

import functools
import os
import tomllib
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flyweight.gpu import Gpu

FOLDER = Path(__file__).parent
NEVER = 1 << 62
HOPPER = 9  # major capability: the one generation with warpgroup products


@dataclass(frozen=True)
class Route:
    """From `rows` on `kernel` is the fastest, for linears that meet the conditions (h200.toml)."""

    rows: int
    kernel: str
    why: str
    small: bool = False
    deep: bool = False
    no_residual: bool = False
    gated: bool = False


@dataclass(frozen=True)
class Ring:
    """How gemv_cluster.cu streams weights: `teams` of warps share a stage, `late` rounds are
    fetched when x is there, `deep` rounds are held where inputs come in turns.
    """

    sets: int  # of 8 rows
    teams: int
    late: int
    deep: int


@dataclass(frozen=True, eq=False)
class FormatNumbers:
    """What was measured of one weight format."""

    source: str
    routes: tuple[Route, ...]
    gemv_warps: int
    gemm_rate: float
    gemm_tiles: str
    gemm_cluster_rows: tuple[int, int]  # most rows in clusters: of small linears, of large ones
    expert_rows: int
    gemv_late_stages: int | None = None
    gemv_stage_bytes: int | None = None  # where a format wants others than most
    ticket_rows: int = 0
    gemv_kept: int = 0  # stages that warps fetch into registers, where launches overlap by counters
    attention_rows: int = NEVER
    splitk_cycles: tuple[float, float] | None = None
    splitk_wide_rows: tuple[int, ...] = ()
    small_cycles: tuple[float, float] | None = None
    cluster_rings: tuple[Ring, ...] = ()
    cluster_whole_ring: Ring | None = None
    # in layers all of whose kernels leave each other room; None: where that has not been measured
    cluster_layer_ring: Ring | None = None
    gemm_halves_inputs: bool = False  # tiles whose inputs two CTAs share pay
    gemm_one_tile_per_sm: bool = False  # of up to 64 rows; of other formats nobody knows yet
    gemm_square_pairs_only: bool = False
    # CTAs of clusters for each SM; 0: as many as there are tiles, twice
    gemm_cluster_room: float = 0.0
    gemm_wide_outputs: int = NEVER  # from so many outputs on a CTA of a cluster has two warpgroups
    # tokens up to which stages are long: beside another kernel, alone
    gemm_long_stages: tuple[int, int] = (0, 0)
    # from so many on three warpgroups have no registers for their sums
    gemm_register_tokens: int = 192
    gemm_team_tokens: tuple[int, int] = (1, 0)  # from, to: two teams share a lone tile
    gemm_exchange_alone: bool = False  # separate places for sums pay only where nothing else runs
    gemm_exchange_inputs: int = NEVER
    gemm_early_in_steps: bool = False  # steps gain by fetching few stages before x is there
    int16_always: bool = False
    int16_small_linears: bool = False


@dataclass(frozen=True, eq=False)
class GemvNumbers:
    source: str
    late_stages: int
    split_margin: float
    stage_bytes: int
    slots: int  # tiles of one row between two meetings of the warps
    own_bytes: int  # that a warp copies for itself at a time; 0: a producer warp copies
    prefetch_bytes: int  # to L2 by each SM, while a linear waits for its inputs
    balance_margin: float  # tiles of the busiest CTA by the mean from which on CTAs share tiles


@dataclass(frozen=True, eq=False)
class SplitkNumbers:
    source: str
    weight_byte: float
    input: float
    sum_word: float
    hand_over: float
    per_slice: float
    tile: tuple[float, float]
    most_slices: int


@dataclass(frozen=True, eq=False)
class SmallNumbers:
    source: str
    weight_byte: float
    l2_byte: float
    step: float
    sum_word: float
    hand_over: float
    start: float
    most_slices: int


@dataclass(frozen=True, eq=False)
class GemmNumbers:
    source: str
    line_us: float
    sliced_us: dict[int, float]
    converted: float
    tiles: dict[str, tuple[tuple[int, int, float], ...]]


@dataclass(frozen=True)
class MmaTile:
    """A thread block of gemm_mma.cu: warps side by side along outputs and tokens, 16 · `per_warp`
    outputs and 8 · `columns` tokens of a warp.
    """

    out_warps: int
    token_warps: int
    per_warp: int
    columns: int
    ctas: int  # on an SM
    speed: float  # of the format's rate
    beside: bool = False  # one to an SM, with room for the next kernel's: `ctas` is 2
    formats: tuple[str, ...] = ()  # that it is for; all

    @property
    def blocks(self) -> int:
        """Of a launch, on an SM."""
        return 1 if self.beside else self.ctas

    @property
    def outputs(self) -> int:
        return 16 * self.out_warps * self.per_warp

    @property
    def tokens(self) -> int:
        return 8 * self.token_warps * self.columns

    @property
    def threads(self) -> int:
        return 32 * self.out_warps * self.token_warps


@dataclass(frozen=True, eq=False)
class MmaNumbers:
    """Of gemm_mma.cu. A rate is tokens · outputs · inputs that an SM does in a microsecond."""

    source: str
    rates: dict[str, float]
    bandwidth: float  # bytes of weights in a microsecond
    line_us: float  # handing sums over, and each trip to memory for them
    line_slower: float  # than whole tiles, where these are large
    trip_us: float
    beside_us: float  # gained by beginning while the kernel before runs
    aligned_us: float  # gained for each 1,024 sums of a tile, where tiles end with thread blocks
    tile_us: float
    tiles: tuple[MmaTile, ...]


@dataclass(frozen=True, eq=False)
class StepNumbers:
    source: str
    route_inputs: int
    small_weights: int
    packed_ahead: bool
    prefill_attention: bool
    overlapping_expert_rows: int


@dataclass(frozen=True, eq=False)
class Tuning:
    """All numbers of one GPU."""

    name: str
    capability: tuple[int, int]
    processors: int
    clock: int
    steps: StepNumbers
    gemv: GemvNumbers
    splitk: SplitkNumbers
    small: SmallNumbers
    gemm: GemmNumbers
    mma: MmaNumbers
    formats: dict[str, FormatNumbers]


@functools.cache
def of(gpu: Gpu) -> Tuning:
    """The numbers for a GPU: those measured on this machine (`flyweight doctor --tune`), its own
    file's, or those of the nearest GPU that has one.
    """
    for one in _local():
        if (one.capability, one.processors) == ((gpu.major, gpu.minor), gpu.processors):
            return one
    return min(
        _files(),
        key=lambda one: (
            (one.capability[0] == HOPPER) != gpu.has_warpgroups,
            one.capability != (gpu.major, gpu.minor),
            abs(one.processors - gpu.processors),
        ),
    )


def is_measured(gpu: Gpu) -> bool:
    """Whether a file has the numbers of such a GPU."""
    found = of(gpu)
    return (found.capability, found.processors) == ((gpu.major, gpu.minor), gpu.processors)


@functools.cache
def _files() -> tuple[Tuning, ...]:
    return tuple(read(path) for path in sorted(FOLDER.glob("*.toml")))


def local_folder() -> Path:
    """Where `flyweight doctor --tune` writes."""
    root = os.environ.get("FLYWEIGHT_CACHE") or Path.home() / ".cache" / "flyweight"
    return Path(root) / "tuned"


def local_files() -> list[Path]:
    return sorted(local_folder().glob("*.toml"))


@functools.cache
def _local() -> tuple[Tuning, ...]:
    """Files of another version of this package are left out, which is said."""
    found = []
    for path in local_files():
        try:
            found.append(read(path))
        except (KeyError, TypeError, ValueError, OSError) as error:
            warnings.warn(
                f"{path} is not used ({type(error).__name__}: {error}); "
                "`flyweight doctor --tune` writes it anew",
                stacklevel=2,
            )
    return tuple(found)


def forget() -> None:
    """Read the files again: one has been written."""
    of.cache_clear()
    _files.cache_clear()
    _local.cache_clear()


def read(path: Path) -> Tuning:
    data = _tables(path)
    gemm = dict(data["gemm"])
    gemm["sliced_us"] = {int(key): value for key, value in gemm["sliced_us"].items()}
    gemm["tiles"] = {name: tuple(map(tuple, rows)) for name, rows in gemm["tiles"].items()}
    return Tuning(
        name=data["gpu"]["name"],
        capability=tuple(data["gpu"]["capability"]),
        processors=data["gpu"]["processors"],
        clock=data["gpu"]["clock"],
        steps=StepNumbers(**data["steps"]),
        gemv=GemvNumbers(**data["gemv"]),
        splitk=SplitkNumbers(**_frozen(data["gemv_splitk"])),
        small=SmallNumbers(**data["gemm_small"]),
        gemm=GemmNumbers(**gemm),
        mma=_mma(data["gemm_mma"]),
        formats={name: _format(table) for name, table in data["formats"].items()},
    )


def _tables(path: Path) -> dict[str, Any]:
    """Of a file, over those of its `base`, which is one of ours."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    base = data.pop("base", None)
    return data if base is None else _merged(_tables(FOLDER / base), data)


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    found = dict(under)
    for name, value in over.items():
        both = isinstance(value, dict) and isinstance(under.get(name), dict)
        found[name] = _merged(under[name], value) if both else value
    return found


def _mma(table: dict[str, Any]) -> MmaNumbers:
    rows = table["tiles"]
    tiles = tuple(MmaTile(*row[:7], *(tuple(formats) for formats in row[7:])) for row in rows)
    return MmaNumbers(**table | {"tiles": tiles})


def _format(table: dict[str, Any]) -> FormatNumbers:
    table = _frozen(table)
    table["routes"] = tuple(Route(**route) for route in table["routes"])
    table["cluster_rings"] = tuple(Ring(**ring) for ring in table.get("cluster_rings", ()))
    for name in ("cluster_whole_ring", "cluster_layer_ring"):
        if name in table:
            table[name] = Ring(**table[name])
    unknown = table.keys() - {field.name for field in fields(FormatNumbers)}
    if unknown:
        raise ValueError(f"no such number of a format: {', '.join(sorted(unknown))}")
    return FormatNumbers(**table)


def _frozen(table: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
