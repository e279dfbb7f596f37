"""`flyweight doctor`: whether this machine runs Flyweight well, and what to put into a
bug report.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from flyweight.commands.options import Device, Threads
from flyweight.errors import OptionError

FAILED = 1  # exit code: a check did not hold


def doctor(
    device: Device = None,
    threads: Threads = None,
    arch: Annotated[
        str | None,
        typer.Option(
            help="Only show which kernels a GPU would get that is not here: sm_80, sm_89, …"
        ),
    ] = None,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="Measure which kernel is the fastest here; later runs use it."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this machine in half a minute: versions, GPU, kernels, speed, exactness, disk.

    Shows which kernel every weight format gets for 1, 8, 64 and 2,048 rows and why, the copy
    bandwidth and how much of it products of one row reach, and the error of every kernel on ragged
    shapes against float64. Exit code 1 where a check fails. Put the output into bug reports.

    --tune times every kernel on this GPU (some minutes, most of them compiling) and writes a TOML
    file into the cache, which later runs use. Send it with a pull request to
    src/flyweight/kernels/tuned/, and all owners of such a GPU have it.

    Examples:

        flyweight doctor

        flyweight doctor --json

        flyweight doctor --arch sm_89

        flyweight doctor --tune
    """
    if arch is not None:
        return show_planned(arch, as_json=as_json)
    from flyweight.bench.doctor import examine
    from flyweight.cpu import use_threads
    from flyweight.device import pick_device

    use_threads(threads)
    chosen = pick_device(device)
    if tune:
        return run_tuning(chosen, as_json=as_json)
    found = examine(chosen, listen=say)
    typer.echo(json.dumps(found, indent=1) if as_json else "\n".join(screen(found)))
    if not found["ok"]:
        raise typer.Exit(FAILED)


def say(stage: str) -> None:
    if sys.stderr.isatty():
        typer.echo(f"doctor: {stage} …", err=True)


def run_tuning(device: Any, *, as_json: bool) -> None:
    from flyweight.bench.tune import tune

    if device.type != "cuda":
        raise OptionError(
            "--tune measures GPUs, and there is none here; CPU kernels need no numbers"
        )
    path = tune(device, listen=say)
    typer.echo(
        json.dumps({"tuned": str(path)}) if as_json else f"written: {path}; later runs use it"
    )


def show_planned(arch: str, *, as_json: bool) -> None:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    from flyweight.bench.doctor import planned_table
    from flyweight.gpu import by_name

    card = by_name(arch)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        table = pool.submit(planned_table, card).result()
    if as_json:
        typer.echo(json.dumps({"arch": arch, "kernels": table}, indent=1))
    else:
        typer.echo("\n".join([f"{arch}: planned, not run", *kernel_lines(table)]))


# -- one screen ----------------------------------------------------------------------------


def screen(found: dict[str, Any]) -> list[str]:
    lines = [*software_lines(found["software"]), *hardware_lines(found["hardware"])]
    if "kernels" in found:
        lines += ["", *kernel_lines(found["kernels"])]
    if "speed" in found:
        lines += ["", *speed_lines(found["speed"])]
    cache = found["cache"]
    tuned = f", tuned: {', '.join(cache['tuned'])}" if cache["tuned"] else ""
    lines.append(
        f"cache {cache['folder']}: {cache['kernels']} kernels, {cache['megabytes']} MB, "
        f"{cache['free_gb']} GB free{tuned}"
    )
    return [*lines, "", *check_lines(found["checks"])]


def software_lines(facts: dict[str, Any]) -> list[str]:
    commit = f" ({facts['commit']})" if facts["commit"] else ""
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    return [
        f"Flyweight {facts['flyweight'] or 'from source'}{commit}, Python {facts['python']}, "
        f"torch {facts['torch']}, CUDA {facts['cuda'] or 'none'}",
        facts["platform"],
        packages,
        f"Triton: {facts['triton']}; kernels in C for the CPU: {facts['native']}",
        f"inside vLLM: {facts['vllm_plugin']}; inside SGLang: {facts['sglang_plugin']}",
    ]


def hardware_lines(facts: dict[str, Any]) -> list[str]:
    host = f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gb']} GB"
    if "architecture" not in facts:
        return [f"{host}, {facts['instructions']}"]
    return [
        host,
        f"{facts['name']}: {facts['architecture']}, {facts['processors']} SMs, "
        f"{facts['shared_memory_kb']} KB of shared memory a block, {facts['gpu_memory_gb']} GB "
        f"({facts['gpu_memory_free_gb']} free), driver {facts['driver']}, clocks {facts['clocks']}",
        f"MIG {facts['mig']}, MPS {'on' if facts['mps'] else 'off'}; routes between kernels: "
        f"{facts['tuned']}",
    ]


def kernel_lines(table: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A line for each format, and the reasons below, each once."""
    rows = [one["rows"] for one in next(iter(table.values()))]
    widths = [max(len(row[i]["kernel"]) for row in table.values()) for i in range(len(rows))]
    widths = [max(width, len(heading(count))) for width, count in zip(widths, rows, strict=True)]
    names = max(map(len, table))
    head = "  ".join(f"{heading(count):<{w}}" for count, w in zip(rows, widths, strict=True))
    lines = [f"{'':<{names}}  {head}".rstrip()]
    for name, row in table.items():
        cells = "  ".join(f"{one['kernel']:<{w}}" for one, w in zip(row, widths, strict=True))
        lines.append(f"{name:<{names}}  {cells}".rstrip())
    reasons = dict.fromkeys((one["kernel"], one["why"]) for row in table.values() for one in row)
    return [*lines, *(f"  {kernel}: {why}" for kernel, why in reasons)]


def heading(count: int) -> str:
    return f"{count:,} row{'s' * (count > 1)}"


def speed_lines(facts: dict[str, Any]) -> list[str]:
    parts = [f"copies {facts['copy_gb_s']:,} GB/s"]
    for name, one in facts.items():
        if isinstance(one, dict):
            parts.append(f"{name} at one row {one['gb_s']:,} GB/s ({one['share']:.0%})")
    return ["; ".join(parts)]


def check_lines(checks: list[dict[str, Any]]) -> list[str]:
    failed = [one for one in checks if not one["ok"]]
    lines = [f"FAILED {one['name']}: {one['detail']}" for one in failed]
    held = [one["name"] for one in checks if one["ok"]]
    errors = [one["detail"] for one in checks if one["ok"] and one["name"].startswith("numerics")]
    if errors:
        lines.append(f"exact: {len(errors)} formats, at most {max(errors, key=first_number)}")
    lines.append(f"{len(held)} of {len(checks)} checks held")
    return lines


def first_number(text: str) -> float:
    return float(text.split()[0])
