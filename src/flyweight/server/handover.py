"""`serve --backend vllm|sglang`: the same folder and the same wishes, in the words of another
engine.

The process is replaced, not wrapped, so that signals, logs and exit codes are theirs. A wish they
have no word for is refused by name rather than dropped. `OPTIONS` is the whole translation.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

import typer

from flyweight.errors import MissingPackageError, OptionError, UnsupportedError, unknown

COMMANDS = {  # backend → how its server is started
    "vllm": ("-m", "vllm.entrypoints.openai.api_server"),
    "sglang": ("-m", "sglang.launch_server"),
}
OPTIONS: dict[str, dict[str, str]] = {  # backend → our option → theirs
    "vllm": {
        "model": "--model",
        "host": "--host",
        "port": "--port",
        "names": "--served-model-name",
        "max_model_len": "--max-model-len",
        "memory_fraction": "--gpu-memory-utilization",
        "max_num_seqs": "--max-num-seqs",
        "max_num_batched_tokens": "--max-num-batched-tokens",
        "dtype": "--dtype",
        "kv_dtype": "--kv-cache-dtype",
        "tensor_parallel": "--tensor-parallel-size",
        "pipeline_parallel": "--pipeline-parallel-size",
        "data_parallel": "--data-parallel-size",
        "quantization": "--quantization",
    },
    "sglang": {
        "model": "--model-path",
        "host": "--host",
        "port": "--port",
        "names": "--served-model-name",
        "max_model_len": "--context-length",
        "memory_fraction": "--mem-fraction-static",
        "max_num_seqs": "--max-running-requests",
        "max_num_batched_tokens": "--chunked-prefill-size",
        "dtype": "--dtype",
        "kv_dtype": "--kv-cache-dtype",
        "tensor_parallel": "--tp-size",
        "pipeline_parallel": "--pp-size",
        "data_parallel": "--dp-size",
        "quantization": "--quantization",
    },
}
NO_PREFIX_CACHE = {"vllm": "--no-enable-prefix-caching", "sglang": "--disable-radix-cache"}
# where a key need not be an argument, which other users could read
KEY_VARIABLES = {"vllm": "VLLM_API_KEY"}
OURS = {
    "allowed_host",
    "max_queue",
    "max_body_mb",
    "timeout",
    "engine_timeout",
    "drain",
    "strict",
    "allow_reset",
    "hide_cached_tokens",
    "log_format",
    "log_prompts",
    "tool_parser",
    "lazy",
    "max_loaded",
    "embeddings",
    "head",
    "vptq_books",
    "prompt_tokens_beside",
    "prompt_dtype",
    "offload",
    "native",
    "speculate",
    "turns",
}


def command(
    backend: str,
    model: str,
    *,
    prefix_cache: bool = True,
    keys: tuple[str, ...] = (),
    names: tuple[str, ...] = (),
    device: str | None = None,
    engine_arguments: tuple[str, ...] = (),
    **options: Any,
) -> tuple[list[str], dict[str, str]]:
    """(arguments after the interpreter, environment to add). `engine_arguments` come last, word for
    word.
    """
    if backend not in COMMANDS:
        raise OptionError(unknown("backend", backend, ["native", *COMMANDS]))
    words = OPTIONS[backend]
    if device not in (None, "cuda"):
        raise UnsupportedError(
            f"--device {device} cannot be handed over to {backend}; set CUDA_VISIBLE_DEVICES "
            "instead"
        )
    if len(keys) > 1:
        raise UnsupportedError(f"{backend} takes one API key, not {len(keys)}")
    if backend == "sglang" and len(names) > 1:
        raise UnsupportedError(f"sglang serves under one name, not {len(names)}")
    argv = [*COMMANDS[backend], words["model"], model]
    for name, value in options.items():
        if value is not None:
            argv += [words[name], str(value)]
    argv += [words["names"], *names] if names else []
    argv += [] if prefix_cache else [NO_PREFIX_CACHE[backend]]
    variable = KEY_VARIABLES.get(backend)
    if keys and variable is None:
        argv += ["--api-key", keys[0]]
    argv += engine_arguments
    return argv, {variable: keys[0]} if keys and variable else {}


def hand_over(backend: str, model: str, *, context: typer.Context, **options: Any) -> None:
    """Become that server. Options that only our own server has may not be set."""
    for name in OURS:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UnsupportedError(
                f"--{name.replace('_', '-')} is an option of the native server; {backend} has none "
                "like it"
            )
    argv, environment = command(backend, resolved(model), **options)
    if importlib.util.find_spec(backend) is None:
        raise MissingPackageError(
            f"--backend {backend} needs it installed beside flyweight: pip install {backend}"
        )
    plug_in = importlib.import_module(f"flyweight.plugins.{backend}.state")
    typer.echo(f"Flyweight's kernels and formats: {plug_in.state().text}", err=True)
    os.execve(sys.executable, [sys.executable, *argv], os.environ | environment)


def resolved(model: str) -> str:
    """A folder of ours by its path; a hub id as it is, since they have the same cache."""
    from flyweight.checkpoint.hub import PACKAGES, resolve

    return (
        str(resolve(model, dtype="float16"))
        if model in PACKAGES or model.endswith(".gguf")
        else model
    )
