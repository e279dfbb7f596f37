"""Other people's serving benchmarks against our server, beside our own client: do they run, and do
they say the same?

    python benchmarks/workshop/serve_clients.py --vllm "vllm bench serve" --sglang "python
        bench_serving.py" --guidellm guidellm \
        [--model smollm2-135m] [--rounds 5] [-o benchmarks/cpu/serve_clients.jsonl]

Each client is a command line, so that it can live in an environment of its own. All ask one server
for the same work (random prompts, fixed lengths, greedy, so many at once), one after the other, in
every round in another order; their result files are read as `flyweight report` reads them, which
converts definitions. What else the machine does changes from run to run, so each client's medians
are divided by those that the server itself wrote down for the very same requests (`of_server`, the
median of the rounds), and these are compared: `against_ours` is a client's share by that of
`flyweight bench serve`. Fails if a request of any client failed.
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

sys.path.insert(0, str(Path(__file__).parents[1]))
from http_stream import about, server

from flyweight.bench.rows import environment_row, make_row
from flyweight.checkpoint.hub import resolve
from flyweight.report.read import read_one

# in a row, in the server's log
FIGURES = {"ttft_sent_ms": "ttft_ms", "tpot_ms": "predicted_per_token_ms"}


def ours(given: argparse.Namespace, url: str, folder: Path, result: Path) -> list[str]:
    return [
        given.model,
        "--backend",
        "openai",
        "--url",
        url,
        "--input",
        given.input,
        "--output",
        given.output_tokens,
        "--requests",
        given.requests,
        "--concurrency",
        given.concurrency,
        "--warm-up",
        1,
        "-o",
        result,
    ]


def vllm(given: argparse.Namespace, url: str, folder: Path, result: Path) -> list[str]:
    return [
        "--backend",
        "openai",
        "--base-url",
        url,
        "--endpoint",
        "/v1/completions",
        "--model",
        given.name,
        "--tokenizer",
        folder,
        "--dataset-name",
        "random",
        "--random-input-len",
        given.input,
        "--random-output-len",
        given.output_tokens,
        "--num-prompts",
        given.requests,
        "--max-concurrency",
        given.concurrency,
        "--num-warmups",
        1,
        "--ignore-eos",
        "--temperature",
        0,
        "--disable-tqdm",
        "--save-result",
        "--result-dir",
        result.parent,
        "--result-filename",
        result.name,
    ]


def sglang(given: argparse.Namespace, url: str, folder: Path, result: Path) -> list[str]:
    return [
        "--backend",
        "sglang-oai",
        "--base-url",
        url,
        "--model",
        given.name,
        "--tokenizer",
        folder,
        "--dataset-name",
        "random-ids",
        "--random-input-len",
        given.input,
        "--random-output-len",
        given.output_tokens,
        "--random-range-ratio",
        1,
        "--num-prompts",
        given.requests,
        "--max-concurrency",
        given.concurrency,
        "--warmup-requests",
        1,
        "--disable-tqdm",
        "--output-file",
        result,
    ]


def guidellm(given: argparse.Namespace, url: str, folder: Path, result: Path) -> list[str]:
    return [
        "run",
        "--backend",
        f"kind=openai_http,target={url},model={given.name},request_format=/v1/completions",
        "--tokenizer",
        f"kind=hf_auto,model={folder}",
        "--profile",
        f"kind=concurrent,streams={given.concurrency}",
        "--data",
        f"kind=synthetic_text,prompt_tokens={given.input},output_tokens={given.output_tokens}",
        "--constraint",
        f"kind=max_requests,count={given.requests}",
        "--output",
        f"kind=json,path={result}",
        "--disable-console",
    ]


Arguments = Callable[[argparse.Namespace, str, Path, Path], list[Any]]
CLIENTS: dict[str, Arguments] = {
    "flyweight": ours,
    "vllm": vllm,
    "sglang": sglang,
    "guidellm": guidellm,
}


def measure(
    name: str, given: argparse.Namespace, url: str, folder: Path, log: Path
) -> dict[str, tuple[float, float]]:
    """(the client's median, the server's own) of each figure, of one run."""
    begin = log.stat().st_size
    with tempfile.TemporaryDirectory() as place:
        result = Path(place) / ("result.json" if name != "flyweight" else "result.jsonl")
        command = [
            *shlex.split(getattr(given, name)),
            *map(str, CLIENTS[name](given, url, folder, result)),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not result.exists():
            said = done.stdout[-2000:] + done.stderr[-3000:]
            raise SystemExit(f"{name} ended with {done.returncode}:\n{shlex.join(command)}\n{said}")
        row = read_one(result).rows[0]
    answered = requests(log, begin)[-given.requests :]  # those to warm up came first
    if row.get("completed") not in (None, given.requests) or any(
        one["status"] != 200 for one in answered
    ):
        raise SystemExit(
            f"{name}: {row.get('completed')} of {given.requests} requests were answered"
        )
    found = {
        mine: (row[mine]["p50"], statistics.median(one[its] for one in answered))
        for mine, its in FIGURES.items()
    }
    print(
        name,
        {figure: f"{mine:.1f} ms, the server {its:.1f}" for figure, (mine, its) in found.items()},
        flush=True,
    )
    return found


def requests(log: Path, begin: int) -> list[dict[str, Any]]:
    """What the server wrote down about answers since then."""
    with log.open() as file:
        file.seek(begin)
        events = [json.loads(line) for line in file if line.startswith("{")]
    return [
        event
        for event in events
        if event["event"] == "request" and event["path"] == "/v1/completions"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--flyweight", default=f"{sys.executable} -m flyweight.cli bench serve")
    for name in ("vllm", "sglang", "guidellm"):
        parser.add_argument(f"--{name}", help="its command, where it is to run")
    parser.add_argument(
        "--version", action="append", default=[], help="NAME=VERSION of a client, for the rows"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--input", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument(
        "--flag", action="append", default=[], help="what is wrong with this run, for the row"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path(__file__).parents[1] / "cpu" / "serve_clients.jsonl",
    )
    given = parser.parse_args()
    given.name = Path(given.model).name  # what the server calls it
    names = [name for name in CLIENTS if getattr(given, name)]
    runs: dict[str, list[dict[str, tuple[float, float]]]] = {name: [] for name in names}
    with (
        tempfile.NamedTemporaryFile() as log,
        server(given.model, "--no-prefix-cache", "--max-model-len", "512", log=log.name) as served,
    ):
        for turn in range(given.rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                url = f"http://127.0.0.1:{served.port}"
                runs[name].append(measure(name, given, url, resolve(given.model), Path(log.name)))
    rows = [environment := environment_row(served.facts["device"])]
    versions, shares = (
        dict(pair.split("=", 1) for pair in given.version),
        dict[str, dict[str, float]](),
    )
    for name in names:
        samples = {
            figure: [mine / its for mine, its in (run[figure] for run in runs[name])]
            for figure in FIGURES
        }
        shares[name] = {figure: statistics.median(values) for figure, values in samples.items()}
        against = {
            figure: share / shares["flyweight"][figure] for figure, share in shares[name].items()
        }
        found = {
            "of_server": {figure: round(share, 4) for figure, share in shares[name].items()},
            "against_ours": {figure: round(share, 4) for figure, share in against.items()},
            "of_server_samples": {
                figure: [round(value, 4) for value in values] for figure, values in samples.items()
            },
        }
        rows.append(
            make_row(
                "serve",
                environment["id"],
                **about(given.model),
                client=name,
                client_version=versions.get(name),
                concurrency=given.concurrency,
                arrivals="closed",
                requests=given.requests * given.rounds,
                completed=given.requests * given.rounds,
                failed=0,
                sampling="greedy",
                dataset=f"random {given.input} in, {given.output_tokens} out",
                flags=given.flag,
                **found,
                **{
                    figure: {
                        "p50": round(statistics.median(run[figure][0] for run in runs[name]), 3)
                    }
                    for figure in FIGURES
                },
            )
        )
        print(name, json.dumps(found["against_ours"]))
    given.output.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
