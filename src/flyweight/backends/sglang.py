"""SGLang: its own server, started on the same model folder."""

from __future__ import annotations

import os
import sys

from flyweight.backends.base import EngineOptions, Limits
from flyweight.backends.servers import Server, flags
from flyweight.backends.vllm import model_folder
from flyweight.plugins.sglang import SETTING


class Sglang(Server):
    name = "sglang"
    package = "sglang"

    def __init__(self, model: str, options: EngineOptions):
        os.environ[SETTING] = "off"  # rows of this backend are what SGLang does by itself
        super().__init__(model, options)

    def command(self, folder: str, limits: Limits, port: int) -> list[str]:
        return serve_command(folder, self.options, limits=limits, port=port)


def serve_command(
    model: str, options: EngineOptions, *, limits: Limits | None = None, port: int = 30000
) -> list[str]:
    """`sglang.launch_server`; with limits (a benchmark) the prefix cache is off."""
    folder, more = model_folder(model)
    given = {
        "model-path": folder,
        "port": port,
        "tp-size": options.tensor_parallel,
        "dtype": options.dtype,
        "quantization": options.quantization,
        "load-format": more.get("load_format"),
        "skip-tokenizer-init": more.get("skip_tokenizer_init"),
    }
    if limits:
        given |= {
            "context-length": limits.context,
            "max-running-requests": limits.batch,
            "disable-radix-cache": True,
        }
    given |= {name.replace("_", "-"): value for name, value in options.extra.items()}
    return [sys.executable, "-m", "sglang.launch_server", *flags(given)]
