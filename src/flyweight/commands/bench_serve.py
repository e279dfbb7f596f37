"""`flyweight bench serve`: a server, or an engine in process, under load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from flyweight.commands.bench_sweep import close, engine_options, resumable
from flyweight.commands.options import (
    Backends,
    Check,
    Device,
    Dtype,
    Extra,
    Json,
    KvDtype,
    Models,
    Name,
    Out,
    Quantization,
    Sampling,
    Seed,
    Speculate,
    TensorParallel,
    Threads,
    Url,
)
from flyweight.errors import OptionError


def serve(
    models: Models,
    backend: Backends = None,
    out: Out = Path("result.jsonl"),
    url: Url = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Requests a second, open loop (Poisson).")
    ] = None,
    burst: Annotated[
        int, typer.Option(min=1, help="Requests that arrive at once; the mean rate stays.")
    ] = 1,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: so many kept going; else the most.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Arrivals and lengths of real traffic: Azure CSV or Mooncake JSONL."),
    ] = None,
    time_scale: Annotated[
        float, typer.Option(min=1e-6, help="Run a trace so many times as fast.")
    ] = 1.0,
    requests: Annotated[
        int, typer.Option(min=1, help="How many (conversations, where they have turns).")
    ] = 100,
    dataset: Annotated[
        str, typer.Option(help="random, or a file: ShareGPT-like or MT-bench JSONL.")
    ] = "random",
    input: Annotated[int, typer.Option(min=1, help="Tokens of a random prompt.")] = 256,
    output: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 128,
    spread: Annotated[
        float, typer.Option(min=0, max=1, help="Random lengths vary by ± this share.")
    ] = 0.0,
    prefix: Annotated[
        int, typer.Option(min=0, help="Tokens that all random prompts begin with.")
    ] = 0,
    turns: Annotated[int, typer.Option(min=1, help="Turns of a random conversation.")] = 1,
    slo: Annotated[
        list[str] | None, typer.Option(help="ttft=MS, tpot=MS or e2e=MS; a good request meets all.")
    ] = None,
    find_max_rate: Annotated[
        bool, typer.Option("--find-max-rate", help="Search the highest rate that holds the SLO.")
    ] = False,
    attain: Annotated[
        float, typer.Option(min=0, max=1, help="Share of good requests that holds it.")
    ] = 0.95,
    processes: Annotated[int, typer.Option(min=1, help="Client processes (servers only).")] = 1,
    warm_up: Annotated[
        int, typer.Option(min=0, help="Requests before the run that do not count.")
    ] = 4,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds after which a request has failed.")
    ] = 600.0,
    samples: Annotated[
        bool, typer.Option(help="Write the times of every request beside the rows.")
    ] = True,
    seed: Seed = 0,
    check: Check = True,
    model_name: Name = None,
    device: Device = None,
    threads: Threads = None,
    dtype: Dtype = None,
    kv_dtype: KvDtype = None,
    speculate: Speculate = None,
    quantization: Quantization = None,
    tensor_parallel: TensorParallel = 1,
    option: Extra = None,
    sampling: Sampling = None,
    as_json: Json = False,
) -> None:
    """TTFT, TPOT, gaps and end-to-end times under load, as percentiles; goodput under a
    service-level objective.

    Open loop (--rate, --trace): requests arrive at their times whether or not the server keeps up,
    and TTFT counts from there. Closed loop (--concurrency, 1 if nothing is said): the next is sent
    when one is answered. `native` and `transformers` run in this process; the other backends over
    HTTP streaming, with prompts as token ids. Before the load the greedy tokens of each are
    compared with the first variant's, as in the other benches.

    Examples:

        flyweight bench serve preset:qwen3-8b:int4 --concurrency 1 --requests 20 --input 128
            --output 128

        flyweight bench serve my-model --backend openai --url http://localhost:8000 --rate 4 --slo
            ttft=500 --slo tpot=50

        flyweight bench serve ./my-model --backend native-server --find-max-rate --slo ttft=1000
            --processes 2

        flyweight bench serve my-model --backend openai --url http://localhost:8000 --trace
            azure.csv --time-scale 4
    """
    from flyweight.bench.serve import Load, ServeBench
    from flyweight.bench.serving import Objective

    load = Load(
        dataset,
        input,
        output,
        spread,
        prefix,
        turns,
        requests,
        trace,
        time_scale,
        burst,
        concurrency or (1 if rate is None and trace is None and not find_max_rate else None),
        seed,
    )
    objective = Objective.parse(slo or ())
    if trace and (rate or find_max_rate or dataset != "random"):
        raise OptionError(
            "--trace brings its own arrivals and lengths: no --rate, "
            "--find-max-rate or --dataset beside it"
        )
    if find_max_rate and objective.as_field() is None:
        raise OptionError(
            "--find-max-rate needs an objective, such as --slo ttft=500 --slo tpot=50"
        )
    from flyweight.bench.cases import make_cases
    from flyweight.bench.check import SelfCheck
    from flyweight.bench.rows import ResultFile, environment_row
    from flyweight.device import pick_device

    options = engine_options(
        device, dtype, quantization, tensor_parallel, url, option, kv_dtype, speculate, sampling
    )
    cases = make_cases(models, backend or ["openai" if url else "native"], options, name=model_name)
    file, rows = ResultFile(out), []
    place = pick_device(device)
    environment = environment_row(place, measure_bandwidth=False)

    def listen(text: str) -> None:
        typer.echo(text, err=True)

    checker = (
        SelfCheck(cases, place.type, file=file, environment=environment, listen=listen)
        if check
        else None
    )
    benches = [
        ServeBench(
            case,
            load,
            objective,
            file,
            environment,
            listen,
            processes=processes,
            warm_up=warm_up,
            timeout=timeout,
            check=checker,
            samples=samples,
        )
        for case in cases
    ]
    busy = [bench.case for bench in benches if find_max_rate or bench.missing([rate])]
    busy = checker.plan(busy) if checker else busy
    for bench in benches:
        with resumable(out):
            rows += (
                bench.search(rate or 1.0, attain)
                if find_max_rate
                else bench.run([rate], start=bench.case in busy)
            )
    for row in rows if as_json else ():
        typer.echo(json.dumps(row, ensure_ascii=False))
    close(rows, out, checker.missed if checker else ())
