"""SHA-256 of the tensor files that schemes make of the default model: the same bytes before and
after a change.

    git worktree add --detach ../before COMMIT
    PYTHONPATH=../before/src python benchmarks/workshop/quantized_digests.py --out before.json
    PYTHONPATH=src           python benchmarks/workshop/quantized_digests.py --against before.json

Only what both versions share is used: the function `flyweight.quantize` with keyword arguments. The
digest covers the `*.safetensors` files and config.json; flyweight.json names paths and versions.
Floating-point sums depend on the number of threads and on the CPU, so compare runs of one machine;
threads are set to one.

Schemes that search or learn are slow on a CPU. They run on the model's first layers, with a few
steps where they learn (`CASES`); `--layers 0 --steps 0` runs every scheme whole, as its users do.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import flyweight
from flyweight.checkpoint.hub import resolve


@dataclass(frozen=True)
class Case:
    scheme: str
    layers: int = 0  # decoder layers of the model that are kept; 0: all
    steps: int = 0  # of learning and tuning; 0: as many as the scheme says


CASES = (
    Case("rtn-int4"),
    Case("gptq-int4"),
    Case("awq-int4", layers=2, steps=6),
    Case("w8a8-smooth-gptq", layers=2, steps=6),
    Case("vptq-3bit", layers=2, steps=6),
    Case("int4-best", layers=2, steps=6),
)


def first_layers(source: Path, layers: int, folder: Path) -> Path:
    """The model cut after so many decoder layers, as a folder of its own."""
    if not layers:
        return source
    if folder.exists():
        return folder
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    for path in source.glob("*token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    kept: dict[str, torch.Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                parts = name.split(".")
                if "layers" not in parts or int(parts[parts.index("layers") + 1]) < layers:
                    kept[name] = file.get_tensor(name)
    save_file(kept, folder / "model.safetensors")
    return folder


def recipe_of(case: Case, folder: Path) -> Path | None:
    """The scheme with fewer steps, as a recipe file."""
    if not case.steps:
        return None
    import tomllib
    from importlib.resources import files

    schemes = files("flyweight.quant").joinpath("schemes.toml").read_text(encoding="utf-8")
    keys = tomllib.loads(schemes)[case.scheme]
    shorter = [f"{key} = {case.steps}" for key in ("learn_steps", "tune_steps") if key in keys]
    path = folder / f"{case.scheme}.toml"
    path.write_text("\n".join([f'base = "{case.scheme}"', *shorter]) + "\n")
    return path


def digests(case: Case, source: Path, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    model = first_layers(source, case.layers, work / f"layers-{case.layers}")
    output = work / case.scheme
    begun = time.perf_counter()
    flyweight.quantize(
        str(model),
        case.scheme,
        output,
        recipe=recipe_of(case, work),
        device=options.device,
        samples=options.samples,
        length=options.length,
        overwrite=True,
    )
    files = sorted([*output.glob("*.safetensors"), output / "config.json"])
    return {
        "layers": case.layers,
        "steps": case.steps,
        "samples": options.samples,
        "length": options.length,
        "seconds": round(time.perf_counter() - begun, 1),
        "files": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
    }


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """One line for each scheme that gives other bytes, or that only one of both has."""
    lines = []
    for scheme in sorted(found.keys() | expected.keys()):
        if scheme not in found or scheme not in expected:
            lines.append(f"{scheme}: not run {'here' if scheme not in found else 'before'}")
            continue
        for key in ("layers", "steps", "samples", "length", "files"):
            if found[scheme][key] != expected[scheme][key]:
                before = expected[scheme][key]
                lines.append(f"{scheme}: other {key}: {before} before, {found[scheme][key]} now")
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--schemes", nargs="*", default=[case.scheme for case in CASES])
    parser.add_argument("--layers", type=int, help="for every scheme, instead of what CASES says")
    parser.add_argument("--steps", type=int, help="for every scheme, instead of what CASES says")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="where the digests go")
    parser.add_argument(
        "--against", type=Path, help="digests of another version; exit 1 where they differ"
    )
    return parser.parse_args()


def main() -> int:
    options = parse()
    torch.set_num_threads(1)
    source = resolve(options.model)
    print(f"{flyweight.__file__}, torch {torch.__version__}", file=sys.stderr)
    usual = {case.scheme: case for case in CASES}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        for scheme in options.schemes:
            case = usual.get(scheme, Case(scheme))
            layers = case.layers if options.layers is None else options.layers
            steps = case.steps if options.steps is None else options.steps
            found[scheme] = digests(Case(scheme, layers, steps), source, Path(work), options)
            print(json.dumps({scheme: found[scheme]}), flush=True)
            if options.out:
                options.out.write_text(json.dumps(found, indent=1) + "\n")
    if options.against is None:
        return 0
    expected = json.loads(options.against.read_text())
    lines = differences(
        found, {scheme: expected[scheme] for scheme in expected if scheme in options.schemes}
    )
    print("\n".join(lines) if lines else f"the same bytes in {len(found)} schemes")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
