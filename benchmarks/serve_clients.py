"""Other people's serving benchmarks against our server, beside our own client: do they run, and do they say the same?

    python benchmarks/serve_clients.py --vllm "vllm bench serve" --sglang "python bench_serving.py" --guidellm guidellm \
        [--model smollm2-135m] [--rounds 5] [-o benchmarks/cpu/serve_clients.jsonl]

Each client is a command line, so that it can live in an environment of its own. All ask one server for the same work
(random prompts, fixed lengths, greedy, so many at once), one after the other, in every round in another order; their result
files are read as `flyweight report` reads them, which converts definitions. A figure is the median of the rounds; `ratio` is
the median of each round's own, against `flyweight bench serve` in the same round. Fails if a request of any client failed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from http_stream import about, server

from flyweight.bench.rows import environment_row, make_row
from flyweight.checkpoint.hub import resolve
from flyweight.report.read import read_one

FIGURES = ("ttft_sent_ms", "tpot_ms")


def ours(given: argparse.Namespace, url: str, folder: Path, result: Path) -> list[str]:
    return [given.model, "--backend", "openai", "--url", url, "--input", given.input, "--output", given.output_tokens,
            "--requests", given.requests, "--concurrency", given.concurrency, "--warm-up", 1, "-o", result]


def vllm(given: argparse.Namespace, url: str, folder: Path, result: Path) -> list[str]:
    return ["--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions", "--model", given.name,
            "--tokenizer", folder, "--dataset-name", "random", "--random-input-len", given.input,
            "--random-output-len", given.output_tokens, "--num-prompts", given.requests, "--max-concurrency", given.concurrency,
            "--num-warmups", 1, "--ignore-eos", "--temperature", 0, "--disable-tqdm", "--save-result",
            "--result-dir", result.parent, "--result-filename", result.name]


def sglang(given: argparse.Namespace, url: str, folder: Path, result: Path) -> list[str]:
    return ["--backend", "sglang-oai", "--base-url", url, "--model", given.name, "--tokenizer", folder,
            "--dataset-name", "random-ids", "--random-input-len", given.input, "--random-output-len", given.output_tokens,
            "--random-range-ratio", 1, "--num-prompts", given.requests, "--max-concurrency", given.concurrency,
            "--warmup-requests", 1, "--disable-tqdm", "--output-file", result]


def guidellm(given: argparse.Namespace, url: str, folder: Path, result: Path) -> list[str]:
    return ["run", "--backend", f"kind=openai_http,target={url},model={given.name},request_format=/v1/completions",
            "--tokenizer", f"kind=hf_auto,model={folder}", "--profile", f"kind=concurrent,streams={given.concurrency}",
            "--data", f"kind=synthetic_text,prompt_tokens={given.input},output_tokens={given.output_tokens}",
            "--constraint", f"kind=max_requests,count={given.requests}", "--output", f"kind=json,path={result}",
            "--disable-console"]


Arguments = Callable[[argparse.Namespace, str, Path, Path], list[Any]]
CLIENTS: dict[str, Arguments] = {"flyweight": ours, "vllm": vllm, "sglang": sglang, "guidellm": guidellm}


def measure(name: str, given: argparse.Namespace, url: str, folder: Path, round_: int) -> dict[str, Any]:
    """One client's row of one run."""
    with tempfile.TemporaryDirectory() as place:
        result = Path(place) / ("result.json" if name != "flyweight" else "result.jsonl")
        arguments = CLIENTS[name](given, url, folder, result) + (["--seed", round_] if name != "guidellm" else [])
        command = [*shlex.split(getattr(given, name)), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not result.exists():
            said = done.stdout[-2000:] + done.stderr[-3000:]
            raise SystemExit(f"{name} ended with {done.returncode}:\n{shlex.join(command)}\n{said}")
        row = read_one(result).rows[0]
    if row.get("completed") not in (None, given.requests):
        raise SystemExit(f"{name}: {row['completed']} of {given.requests} requests were answered")
    print(f"round {round_} {name}: " + ", ".join(f"{figure} p50 {row[figure]['p50']:.2f}" for figure in FIGURES), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--flyweight", default=f"{sys.executable} -m flyweight.cli bench serve")
    for name in ("vllm", "sglang", "guidellm"):
        parser.add_argument(f"--{name}", help="its command, where it is to run")
    parser.add_argument("--version", action="append", default=[], help="NAME=VERSION of a client, for the rows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--input", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--flag", action="append", default=[], help="what is wrong with this run, for the row")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "cpu" / "serve_clients.jsonl")
    given = parser.parse_args()
    given.name = Path(given.model).name  # what the server calls it
    names = [name for name in CLIENTS if getattr(given, name)]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with server(given.model, "--no-prefix-cache", "--max-model-len", "512") as served:
        for round_ in range(given.rounds):
            for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
                runs[name].append(measure(name, given, f"http://127.0.0.1:{served.port}", resolve(given.model), round_))
    environment = environment_row(served.facts["device"])
    rows = [environment]
    versions = dict(pair.split("=", 1) for pair in given.version)
    for name in names:
        medians = {figure: [row[figure]["p50"] for row in runs[name]] for figure in FIGURES}
        ratios = {figure: [mine / row[figure]["p50"] for mine, row in zip(medians[figure], runs["flyweight"], strict=True)]
                  for figure in FIGURES}
        figures = {figure: {"p50": round(statistics.median(medians[figure]), 3)} for figure in FIGURES}
        rows.append(make_row(
            "serve", environment["id"], **about(given.model), client=name, client_version=versions.get(name),
            concurrency=given.concurrency, arrivals="closed", requests=given.requests * given.rounds,
            completed=given.requests * given.rounds, failed=0, sampling="greedy",
            dataset=f"random {given.input} in, {given.output_tokens} out", flags=given.flag, **figures,
            ratio={figure: round(statistics.median(values), 4) for figure, values in ratios.items()},
            ratio_samples={figure: [round(value, 4) for value in values] for figure, values in ratios.items()}))
        print(name, json.dumps({"ratio": rows[-1]["ratio"]} | figures))
    given.output.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
