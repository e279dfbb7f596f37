"""What SGLang's sources say of the names that our plug-in touches.

    python tests/plugins/sglang_seams.py SITE > tests/plugins/sglang-0.5.23.json

SITE is the folder that holds `sglang/`. Nothing of it is imported: sources are only parsed, which
needs neither SGLang's dependencies nor a GPU.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

QUANTIZATION = "sglang.srt.layers.quantization"
SCHEMES = (
    f"{QUANTIZATION}.awq.schemes.awq_linear.AWQLinearScheme",
    f"{QUANTIZATION}.awq.schemes.awq_marlin.AWQMarlinLinearScheme",
    f"{QUANTIZATION}.gptq.schemes.gptq_marlin.GPTQMarlinLinearScheme",
    f"{QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_wNa16.CompressedTensorsWNA16",
    f"{QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_w8a8_int8"
    ".CompressedTensorsW8A8Int8",
)
CLASSES = (
    *SCHEMES,
    f"{QUANTIZATION}.awq.awq.AWQConfig",
    f"{QUANTIZATION}.awq.awq.AWQMarlinConfig",
    f"{QUANTIZATION}.gptq.gptq.GPTQMarlinConfig",
    "sglang.srt.layers.linear.LinearBase",
    "sglang.srt.layers.linear.RowParallelLinear",
    "sglang.srt.plugins.hook_registry.HookRegistry",
    "sglang.srt.plugins.hook_registry.HookType",
)
METHODS = ("process_weights_after_loading", "apply_weights", "register", "apply_hooks")


def class_of(site: Path, path: str) -> ast.ClassDef:
    module, _, name = path.rpartition(".")
    file = site / Path(*module.split(".")).with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    if not found:
        raise SystemExit(f"{file} has no class {name}")
    return found[0]


def describe(site: Path, path: str) -> dict[str, object]:
    """Arguments of the methods, attributes that it sets, parameters that it gives a layer."""
    tree = class_of(site, path)
    methods = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in METHODS:
            given = node.args
            methods[node.name] = [one.arg for one in (*given.posonlyargs, *given.args)]
    attributes = set()
    parameters = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                attributes.add(name)
            case ast.Call(
                func=ast.Attribute(attr="register_parameter"), args=[ast.Constant(value=name), *_]
            ):
                parameters.add(str(name))
    members = [
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.isupper()
    ]
    found = dict(
        methods=methods,
        attributes=sorted(attributes),
        parameters=sorted(parameters),
        members=members,
    )
    return {name: value for name, value in found.items() if value}


def record(site: Path) -> dict[str, object]:
    return {path: describe(site, path) for path in CLASSES}


if __name__ == "__main__":
    print(json.dumps(record(Path(sys.argv[1])), indent=1))
