"""`flyweight info`: what a model is, layer kind by layer kind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from flyweight.errors import CheckpointError, FlyweightError, OptionError

if TYPE_CHECKING:
    from torch import device as Device

    from flyweight.checkpoint.reader import Checkpoint
    from flyweight.kernels.linear.fused import FusedLinear
    from flyweight.kernels.native.weight import Weight as NativeWeight
    from flyweight.models.config import ModelConfig

ROWS = (
    1,
    2,
    3,
    5,
    9,
    17,
    33,
    65,
    129,
    257,
    513,
    1025,
    2049,
    4096,
    8192,
)  # where another kernel may be faster
PIPE_WIDTH = 110  # columns of the table where no terminal says


class Laid:
    """What a summary tells of a weight that is laid out: the kernels that multiply it here, and why
    these.
    """

    def __init__(self, linear: FusedLinear) -> None:
        self.kernel = f"{linear.kernel}{kernels_by_rows(linear)}"
        self.why = linear.why
        self.nbytes = linear.nbytes


class LaidNatively:
    """The same of a weight in the layout of the CPU's own kernels."""

    kernel = "native"

    def __init__(self, weight: NativeWeight) -> None:
        self.why = weight.why
        self.nbytes = weight.nbytes


def kernels_by_rows(linear: FusedLinear) -> str:
    """` (gemv, from 5 rows gemm_small)`, or nothing where one kernel multiplies any
    number of rows.
    """
    found: list[tuple[int, str]] = []
    for rows in ROWS:
        kernel = linear.kernel_for(rows)
        if not found or found[-1][1] != kernel:
            found.append((rows, kernel))
    if [kernel for _, kernel in found] == [linear.kernel]:
        return ""
    (_, first), *others = found
    return f" ({', '.join([first, *(f'from {rows} rows {kernel}' for rows, kernel in others)])})"


def info(
    model: Annotated[str, typer.Argument(help="A name, a folder, a hub id or a GGUF file.")],
    offload: Annotated[
        int,
        typer.Option(min=0, help="How fast it could be with so many layers in the host's memory."),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a model is: shape, size, scheme, bits per weight and kernels by kind of layer.

    And what this machine can do with it: the memory left for the KV cache, and the speed that one
    sequence cannot exceed (bytes of weights read for each token over the measured copy bandwidth).

    Examples:

        flyweight info smollm2-135m

        flyweight info ./my-quantized-model --json

        flyweight info Qwen/Qwen3-8B --offload 12
    """
    import torch

    from flyweight.checkpoint.hub import resolve
    from flyweight.checkpoint.reader import Checkpoint
    from flyweight.engine.capacity import capacity
    from flyweight.models.config import ModelConfig

    name, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    device = torch.device(name)
    checkpoint = Checkpoint(resolve(model))
    reason = "they are for a CPU" if device.type == "cuda" else why_not_native(checkpoint)
    summary = summarize_for(checkpoint, device, native=reason is None)
    machine = None
    why_not = None
    try:
        config = ModelConfig.from_dict(checkpoint.config)
        check_size(checkpoint, config)
        machine = capacity(
            summary,
            config,
            device=device,
            dtype=torch.float16 if reason is None else dtype,
        )
    except (
        FlyweightError
    ) as error:  # an architecture that is not run here still has files to describe
        why_not = str(error)
    executor = None if device.type == "cuda" else executor_words(reason)
    streamed = _offload_plan(summary, machine, offload, device)
    if as_json:
        facts = summary.to_dict() | {
            "machine": machine and machine.to_dict(),
            "runs": machine is not None,
            "why_not": why_not,
            "executor": executor,
            "offload": streamed and streamed.to_dict(),
        }
        typer.echo(json.dumps(facts))
    else:
        _show(summary, machine, why_not, executor, streamed)


def _offload_plan(summary: Any, machine: Any, layers: int, device: Any) -> Any:
    """What was asked for or, of a model that does not fit a GPU, what would do."""
    from flyweight.engine.offload_plan import needed, plan
    from flyweight.kernels.offload import host_bandwidth

    if machine is None or device.type != "cuda":
        if layers:
            raise OptionError(
                "--offload moves layers out of a GPU's memory, and there is no GPU here"
            )
        return None
    if not layers and not machine.kv_bytes:
        layers = needed(
            summary, machine, int(summary.memory - machine.kv_fraction * machine.memory_bytes)
        )
    return plan(summary, machine, layers, bus_gb_s=host_bandwidth(device)) if layers > 0 else None


def check_size(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Whether the files are of a model as large as config.json says: who loads them checks all."""
    numbers = [re.search(r"\blayers\.(\d+)\.", name) for name in checkpoint.names()]
    layers = 1 + max((int(number[1]) for number in numbers if number), default=-1)
    if 0 < layers < config.layers:
        raise CheckpointError(
            f"the files have {layers} layers, and config.json speaks of {config.layers}"
        )
    name = "model.embed_tokens.weight"
    if checkpoint.has(name) and config.hidden_size not in checkpoint.shape(name):
        raise CheckpointError(
            f"the embedding is {' × '.join(map(str, checkpoint.shape(name)))}, and config.json "
            f"speaks of a hidden size of {config.hidden_size}"
        )


def why_not_native(checkpoint: Checkpoint) -> str | None:
    """None where the CPU's own kernels run this model."""
    import torch

    from flyweight.models.config import ModelConfig
    from flyweight.models.native import why_not

    try:
        return why_not(ModelConfig.from_dict(checkpoint.config), torch.float32)
    except FlyweightError as error:
        return str(error)


def executor_words(reason: str | None) -> str:
    from flyweight.models.native import describe

    return describe() if reason is None else f"torch (no native kernels: {reason})"


def summarize_for(checkpoint: Checkpoint, device: Device, *, native: bool) -> Any:
    import torch

    from flyweight.checkpoint.summary import summarize
    from flyweight.kernels.dispatch import prepare
    from flyweight.kernels.native.weight import pack

    if native:
        return summarize(checkpoint, lambda tensor: LaidNatively(pack(tensor)))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return summarize(
        checkpoint,
        lambda tensor: Laid(prepare(tensor.to(device), dtype=dtype)),
        itemsize=dtype.itemsize,
    )


def _show(
    summary: Any, machine: Any, why_not: str | None, executor: str | None, streamed: Any = None
) -> None:
    bits = ", ".join(f"{scheme} {bits:.2f}" for scheme, bits in summary.bits_by_scheme().items())
    tied = "tied" if summary.tied_embeddings else "not tied"
    facts = {
        "architecture": f"{summary.architecture}, {summary.layers} layers, hidden "
        f"{summary.hidden_size}, {summary.heads} heads / {summary.kv_heads} KV heads",
        "parameters": f"{summary.parameters / 1e6:,.1f} M, {summary.dtype}, embeddings {tied}",
        "quantization": summary.quantization or "none",
        "runs here": f"no: {why_not}" if why_not else "yes",
        "bits per weight": f"{summary.linear_bits:.2f} in the layers, {summary.file_bits:.2f} "
        f"over the whole file ({bits})",
        "vocabulary": f"{summary.vocabulary:,}" if summary.vocabulary else "?",
        "context": f"{summary.context_length:,} tokens" if summary.context_length else "?",
        "on disk": f"{decimal(summary.disk)} in {summary.folder}",
        "in memory": f"{decimal(summary.memory)} of weights, as laid out for the kernels below",
    } | (_machine_facts(machine) if machine else {})
    if machine and executor:
        facts["runs on"] = executor
    if streamed is not None:
        facts["offload"] = (
            f"--offload {streamed.layers}: {streamed.layers} of {streamed.of} layers "
            f"({decimal(streamed.host_bytes)}) in the host's memory free "
            f"{decimal(streamed.freed_bytes)}; at most {streamed.limit_tok_s:,.1f} tokens/s, "
            f"{streamed.bus_gb_s:,.1f} GB/s measured over the bus"
        )
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for name, value in facts.items():
        console.print(f"{name:<16} {value}")
    console.print()
    width = console.width if console.is_terminal else PIPE_WIDTH
    Console(highlight=False, markup=False, width=width).print(_table(summary))
    named = {
        (group.kernel.partition(" ")[0], group.why) for group in summary.groups if group.kernel
    }
    for kernel, why in sorted(named):
        console.print(f"\n{kernel}: {why}")


def _machine_facts(machine: Any) -> dict[str, str]:
    kind = "no GPU here, all on the CPU" if machine.on_cpu else "GPU"
    memory = "RAM" if machine.on_cpu else "GPU memory"
    states = machine.state_bytes_per_sequence
    beside = f", less {decimal(states)} of states a sequence" if states else ""
    cache = f"{decimal(machine.kv_bytes)} left"
    if machine.kv_tokens is None:
        cache += f": {decimal(states)} of states a sequence, nothing for each token"
    else:
        each = decimal(machine.kv_bytes_per_token)
        cache += f": {machine.kv_tokens:,} tokens of {each}{beside}"
    return {
        "machine": f"{machine.device}, {decimal(machine.memory_bytes)} of {memory} ({kind})",
        "KV cache": cache,
        "speed limit": f"{machine.limit_tok_s:,.1f} tokens/s at batch 1, before any context: "
        f"{decimal(machine.read_bytes_per_token)} of weights read for each token, "
        f"{machine.copy_gb_s:,.1f} GB/s measured by a copy",
    }


def _table(summary: Any) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for heading in ("layers", "module", "scheme", "shape", "bits", "size", "kernel"):
        table.add_column(
            heading,
            justify="right" if heading in ("bits", "size") else "left",
            no_wrap=heading in ("shape", "bits", "size"),
            overflow="fold",
        )
    for group in summary.groups:
        table.add_row(
            ranges(group.layers),
            group.module,
            group.scheme,
            " × ".join(map(str, group.shape)),
            f"{group.bits_per_weight:.2f}",
            decimal(group.nbytes),
            group.kernel,
        )
    return table


def ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 → `0-2, 5`"""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
