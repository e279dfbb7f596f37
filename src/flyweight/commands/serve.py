"""`flyweight serve`: a model behind the OpenAI API."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any

import typer

from flyweight import garbage
from flyweight.commands.generate import Context, Device, Dtype, Threads
from flyweight.errors import MissingPackageError, OptionError

KEY_VARIABLE = "FLYWEIGHT_API_KEY"


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A name, a folder, a hub id or a GGUF file.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free one.")] = 8000,
    api_key: Annotated[list[str] | None, typer.Option(
        help=f"Clients must send it; may be repeated. {KEY_VARIABLE} is safer: it shows in no process list.")] = None,
    served_name: Annotated[list[str] | None, typer.Option(help="What clients call the model; may be repeated.")] = None,
    max_model_len: Context = None,
    memory_fraction: Annotated[float | None, typer.Option(min=0, max=1, help="Share of the memory for the KV cache.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Most answers at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens in one step.")] = None,
    prefix_cache: Annotated[bool, typer.Option(help="Reuse the KV cache of prompts that begin alike.")] = True,
    device: Device = None,
    threads: Threads = None,
    dtype: Dtype = None,
    max_queue: Annotated[int, typer.Option(min=0, help="Answers that may wait; more are refused with 429.")] = 256,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Largest request; larger ones are refused with 413.")] = 8.0,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds an answer may take, waiting included.")] = 600.0,
    drain: Annotated[float, typer.Option(min=1, help="Seconds that answers in flight get after SIGTERM.")] = 120.0,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse unknown fields instead of warning.")] = False,
    allow_reset: Annotated[bool, typer.Option("--allow-reset", help="Open /reset_prefix_cache without an API key.")] = False,
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts into the log, where they stay.")] = False,
    backend: Annotated[str, typer.Option(help="native, or hand over to an installed vllm or sglang.")] = "native",
    tensor_parallel: Annotated[int | None, typer.Option(min=1, help="GPUs to split the model over (vllm, sglang).")] = None,
    quantization: Annotated[str | None, typer.Option(help="By the engine's own name, such as awq_marlin (vllm, sglang).")] = None,
) -> None:
    """Serve a model over HTTP, as the OpenAI API does; / is a page to chat with it, /docs lists the endpoints.

    Examples:

        flyweight serve smollm2-135m

        flyweight serve ./my-model --host 0.0.0.0 --port 8080 --served-name assistant --max-model-len 4096

        flyweight serve Qwen/Qwen3-32B --backend vllm --tensor-parallel 4 --memory-fraction 0.9
    """
    engine = {"max_model_len": max_model_len, "memory_fraction": memory_fraction, "max_num_seqs": max_num_seqs,
              "max_num_batched_tokens": max_num_batched_tokens, "prefix_cache": prefix_cache, "device": device, "dtype": dtype}
    keys = tuple(api_key or ()) or tuple(filter(None, [os.environ.get(KEY_VARIABLE)]))
    if "" in keys:
        raise OptionError("--api-key is empty; leave it out to serve everybody")
    if backend != "native":
        from flyweight.server.handover import hand_over

        hand_over(backend, model, context=context, host=host, port=port, keys=keys, names=tuple(served_name or ()),
                  tensor_parallel=tensor_parallel, quantization=quantization, **engine)
        return
    if (tensor_parallel or 1) > 1 or quantization:
        raise OptionError("--tensor-parallel and --quantization are for --backend vllm or sglang: the native engine runs on one "
                          "GPU, and takes the quantization from the model's own files")
    run(model, engine, host=host, port=port, log_format=log_format, api_keys=keys, names=tuple(served_name or ()), strict=strict,
        max_queue=max_queue, max_body=int(max_body_mb * 2**20), timeout=timeout, drain=drain, allow_reset=allow_reset,
        log_prompts=log_prompts)


def run(model: str, engine: dict[str, Any], *, host: str, port: int, log_format: str, **options: Any) -> None:
    try:
        from flyweight.server import logs
        from flyweight.server.run import Server, listen
    except ImportError as error:
        raise MissingPackageError(f"serving needs {error.name}: pip install 'flyweight[serve]'") from error
    from flyweight.server.settings import Settings

    logs.configure(log_format)
    listener = listen(host, port)
    root, tokenizer = open_tokenizer(model)
    settings = Settings(model=root, engine={name: value for name, value in engine.items() if value is not None},
                        **options | {"names": options["names"] or (served_as(model),)})
    server = Server(settings, listener, tokenizer=tokenizer)
    address = listener.getsockname()
    logs.log("listening", url=f"http://{host if ':' not in host else f'[{host}]'}:{address[1]}", model=settings.served[0],
             api_key="needed" if settings.api_keys else "none", port=address[1], pid=os.getpid())
    garbage.settle()
    server.run_all()
    logs.log("stopped")


def served_as(model: str) -> str:
    """A path's last part, and any other name as it is: clients need not know this machine's folders."""
    return model if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not os.path.exists(model) else os.path.basename(model.rstrip("/"))


def open_tokenizer(model: str) -> tuple[str, Any]:
    """(what the engine is to load, tokenizer): a name is resolved once, so that a download has one progress bar."""
    if model.startswith("preset:"):
        return model, None
    from flyweight.checkpoint.hub import resolve
    from flyweight.checkpoint.reader import Checkpoint
    from flyweight.engine.tokenizer import Tokenizer

    folder = resolve(model)
    return str(folder), Tokenizer(Checkpoint(folder).tokenizer())
