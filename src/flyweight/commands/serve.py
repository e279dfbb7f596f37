"""`flyweight serve`: a model behind the OpenAI API."""

from __future__ import annotations

import logging
import os
import re
from typing import Annotated, Any

import typer

from flyweight import garbage
from flyweight.commands.generate import adapters_of
from flyweight.commands.options import (
    Adapter,
    Context,
    Device,
    Dtype,
    Head,
    KvDtype,
    Native,
    Offload,
    PromptDtype,
    Speculate,
    Threads,
    VptqBooks,
)
from flyweight.errors import MissingPackageError, OptionError, unknown

KEY_VARIABLE = "FLYWEIGHT_API_KEY"


def serve(
    context: typer.Context,
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="A name, a folder, a hub id or a GGUF file; several share one address.",
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free one.")
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Clients must send it; may be repeated. {KEY_VARIABLE} is safer: it shows in no "
            f"process list."
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name that clients call this server by, beside its addresses; may be repeated. "
            "* for any."
        ),
    ] = None,
    served_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; may be repeated.")
    ] = None,
    max_model_len: Context = None,
    memory_fraction: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of the memory for the KV cache.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Most answers at once.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens in one step.")
    ] = None,
    prompt_tokens_beside: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of prompts, most tokens between two steps of answers, or in one step beside "
            "them: fewer make gaps smaller, first tokens later. Default: 512, without turns 4096; "
            "on a CPU as many as keep gaps within three times the usual one, at most 512.",
        ),
    ] = None,
    turns: Annotated[
        bool | None,
        typer.Option(
            "--turns/--no-turns",
            help="On a GPU: answers and prompts in steps of their own, in turns; without, prompts "
            "run beside answers in one step: first tokens earlier, gaps several times as "
            "long. Default: in turns, unless tokens are guessed.",
            show_default=False,
        ),
    ] = None,
    adapter: Adapter = None,
    prefix_cache: Annotated[
        bool, typer.Option(help="Reuse the KV cache of prompts that begin alike.")
    ] = True,
    device: Device = None,
    threads: Threads = None,
    dtype: Dtype = None,
    kv_dtype: KvDtype = None,
    prompt_dtype: PromptDtype = None,
    head: Head = None,
    vptq_books: VptqBooks = None,
    native: Native = None,
    lazy: Annotated[
        bool,
        typer.Option("--lazy", help="Of several models: load each when it is first asked for."),
    ] = False,
    max_loaded: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of several models: most in memory at once; as many as there is room for "
            "otherwise.",
        ),
    ] = None,
    offload: Offload = 0,
    speculate: Speculate = None,
    max_queue: Annotated[
        int, typer.Option(min=0, help="Answers that may wait; more are refused with 429.")
    ] = 256,
    max_body_mb: Annotated[
        float, typer.Option(min=0.001, help="Largest request; larger ones are refused with 413.")
    ] = 8.0,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds an answer may take, waiting included.")
    ] = 600.0,
    engine_timeout: Annotated[
        float,
        typer.Option(
            min=1,
            help="Seconds without progress of a step after which the engine is ended and "
            "started again.",
        ),
    ] = 30.0,
    drain: Annotated[
        float, typer.Option(min=1, help="Seconds that answers in flight get after SIGTERM.")
    ] = 120.0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse unknown fields instead of warning.")
    ] = False,
    allow_reset: Annotated[
        bool, typer.Option("--allow-reset", help="Open /reset_prefix_cache without an API key.")
    ] = False,
    hide_cached_tokens: Annotated[
        bool,
        typer.Option(
            "--hide-cached-tokens",
            help="Do not tell clients how much of a prompt was in the cache.",
        ),
    ] = False,
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write prompts into the log, where they stay.")
    ] = False,
    tool_parser: Annotated[
        str | None,
        typer.Option(
            help="Format of tool calls: harmony, hermes, llama, mistral or qwen_coder; the chat "
            "template shows it otherwise."
        ),
    ] = None,
    embeddings: Annotated[
        str | None,
        typer.Option(help="Open /v1/embeddings; how tokens become one vector: mean or last."),
    ] = None,
    backend: Annotated[
        str, typer.Option(help="native, or hand over to an installed vllm or sglang.")
    ] = "native",
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, help="GPUs to split the model over (vllm, sglang).")
    ] = None,
    pipeline_parallel: Annotated[
        int | None,
        typer.Option(min=1, help="Stages of layers, one after the other (vllm, sglang)."),
    ] = None,
    data_parallel: Annotated[
        int | None,
        typer.Option(min=1, help="Copies of the model, each on GPUs of its own (vllm, sglang)."),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(help="By the engine's own name, such as awq_marlin (vllm, sglang)."),
    ] = None,
    engine_argument: Annotated[
        list[str] | None,
        typer.Option(
            help="A word for the engine's own command line, such as =--nnodes=2 (vllm, sglang); "
            "again for more."
        ),
    ] = None,
) -> None:
    """Serve models over HTTP, as the APIs of OpenAI, Anthropic and Ollama do; / is a page to chat,
    /docs lists the endpoints.

    Examples:

        flyweight serve smollm2-135m

        flyweight serve ./my-model --host 0.0.0.0 --port 8080 --served-name assistant
            --max-model-len 4096

        flyweight serve smollm2-135m ./my-model --max-loaded 1

        flyweight serve ./my-model --adapter sql=./sql-lora --adapter poems=./poems-lora

        flyweight serve Qwen/Qwen3-32B --backend vllm --tensor-parallel 4 --memory-fraction 0.9
    """
    engine: dict[str, Any] = {
        "max_model_len": max_model_len,
        "memory_fraction": memory_fraction,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "prefix_cache": prefix_cache,
        "device": device,
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "prompt_dtype": prompt_dtype,
        "head": head,
        "vptq_books": vptq_books,
        "native": native,
        "prompt_tokens_beside": prompt_tokens_beside,
    }
    if turns is not None and backend != "native":
        raise OptionError(
            f"--turns is for the native engine; {backend} has options of its own for it"
        )
    if turns is not None:
        engine["turns"] = turns
    if offload and backend == "native":
        engine["offload"] = offload
    if speculate and backend != "native":
        raise OptionError(
            f"--speculate is for the native engine; {backend} has options of its own for it"
        )
    if speculate:
        from flyweight.engine.speculation.option import Speculation

        Speculation.parse(speculate)  # refused before a model is loaded
        engine["speculate"] = speculate
    if adapter:
        if backend != "native" or len(models) > 1:
            raise OptionError("--adapter is for one model of the native engine")
        engine["adapters"] = adapters_of(adapter)
    keys = tuple(api_key or ()) or tuple(filter(None, [os.environ.get(KEY_VARIABLE)]))
    if "" in keys:
        raise OptionError("--api-key is empty; leave it out to serve everybody")
    if backend != "native":
        from flyweight.server.handover import hand_over

        if len(models) > 1:
            raise OptionError(f"--backend {backend} serves one model, not {len(models)}")
        hand_over(
            backend,
            models[0],
            context=context,
            host=host,
            port=port,
            keys=keys,
            names=tuple(served_name or ()),
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            data_parallel=data_parallel,
            quantization=quantization,
            engine_arguments=tuple(engine_argument or ()),
            **engine,
        )
        return
    several = max(tensor_parallel or 1, pipeline_parallel or 1, data_parallel or 1) > 1
    if several or quantization or engine_argument:
        raise OptionError(
            "--tensor-parallel, --pipeline-parallel, --data-parallel, --quantization and "
            "--engine-argument are for --backend vllm or sglang: the native engine runs on one "
            "GPU, and takes the quantization from the model's own files"
        )
    if embeddings not in (None, "mean", "last"):
        raise OptionError(unknown("--embeddings", embeddings or "", ["mean", "last"]))
    if len(models) > 1 and served_name:
        raise OptionError("--served-name is for one model; several are called by their own names")
    run(
        models,
        engine,
        host=host,
        port=port,
        log_format=log_format,
        api_keys=keys,
        allowed_hosts=tuple(allowed_host or ()),
        names=tuple(served_name or ()),
        strict=strict,
        max_queue=max_queue,
        max_body=int(max_body_mb * 2**20),
        timeout=timeout,
        engine_timeout=engine_timeout,
        drain=drain,
        allow_reset=allow_reset,
        hide_cached_tokens=hide_cached_tokens,
        log_prompts=log_prompts,
        tool_parser=tool_parser,
        lazy=lazy,
        max_loaded=max_loaded,
        embeddings=embeddings,
    )


def run(
    models: list[str],
    engine: dict[str, Any],
    *,
    host: str,
    port: int,
    log_format: str,
    **options: Any,
) -> None:
    try:
        from flyweight.server import logs
        from flyweight.server.hosts import reaches_others
        from flyweight.server.run import Server, listen
    except ImportError as error:
        raise MissingPackageError(
            f"serving needs {error.name}: pip install 'flyweight[serve]'"
        ) from error
    from flyweight.server.registry import registered

    logs.configure(log_format)
    listener = listen(host, port)
    served = [settings_of(model, engine, options) for model in models]
    (settings, tokenizer), *others = served
    names = [name for one, _ in served for name in one.served]
    if len(set(names)) < len(names):
        raise OptionError(
            f"two of the models would be called {max(names, key=names.count)!r}; "
            f"give folders of different names"
        )
    server = Server(settings, listener, tokenizer=tokenizer, others=others)
    address = listener.getsockname()
    logs.log(
        "listening",
        url=f"http://{host if ':' not in host else f'[{host}]'}:{address[1]}",
        model=", ".join(names),
        api_key="needed" if settings.api_keys else "none",
        port=address[1],
        pid=os.getpid(),
    )
    if reaches_others(host) and not settings.api_keys:
        logs.log(
            "no_api_key",
            level=logging.WARNING,
            host=host,
            meaning=f"everybody who can reach this address can use the server; set "
            f"{KEY_VARIABLE}, or listen on 127.0.0.1",
        )
    garbage.settle()
    url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{address[1]}"
    with registered(
        {
            "url": url,
            "port": address[1],
            "models": names,
            "folders": [one.model for one, _ in served],
        }
    ):
        server.run_all()
    logs.log("stopped")


def settings_of(model: str, engine: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Any]:
    """(settings, tokenizer) of one model."""
    from flyweight.server.settings import Settings

    root, tokenizer = open_tokenizer(model)
    given = {name: value for name, value in engine.items() if value is not None}
    return Settings(
        model=root, engine=given, **options | {"names": options["names"] or (served_as(model),)}
    ), tokenizer


def served_as(model: str) -> str:
    """A path's last part, and any other name as it is: clients need not know this machine's
    folders.
    """
    return (
        model
        if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not os.path.exists(model)
        else os.path.basename(model.rstrip("/"))
    )


def open_tokenizer(model: str) -> tuple[str, Any]:
    """(what the engine is to load, tokenizer): a name is resolved once, so that a download has one
    progress bar.
    """
    if model.startswith("preset:"):
        return model, None
    from flyweight.checkpoint.hub import resolve
    from flyweight.checkpoint.reader import Checkpoint
    from flyweight.engine.tokenizer import Tokenizer

    folder = resolve(model)
    return str(folder), Tokenizer(Checkpoint(folder).tokenizer())
