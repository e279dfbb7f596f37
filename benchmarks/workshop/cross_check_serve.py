"""Do two clients agree? `bench serve` and vLLM's `vllm bench serve`, by turns, against this
package's server.

    python benchmarks/workshop/cross_check_serve.py OUT.jsonl --vllm PYTHON [--model smollm2-135m]
        [--rounds 4] [--requests 8]

PYTHON is an interpreter that has vLLM; one request at a time, the same lengths, greedy, end of text
ignored. On a machine with other work two runs never meet the same weather, so each client is held
against the server's own times of the very requests it sent (its log tells TTFT and time per token
of each): the two ratios are what must agree within 5 %. Rows are those of each client, with the
server's figures beside them. vLLM's client sends text, ours token ids, so TTFT differs more the
shorter the prompt is (5.8 % in a first try with 32 tokens, which was outside the bound).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from flyweight.backends.base import EngineOptions, Limits
from flyweight.backends.servers import NativeServer
from flyweight.bench.rows import ResultFile, environment_row, make_row, rounded
from flyweight.checkpoint.hub import resolve
from flyweight.report.read import read_one

LINE = re.compile(
    r"request_id=.*completion_tokens=(\d+) .*ttft_ms=([\d.]+) "
    r"predicted_per_token_ms=([\d.]+)"
)
THEIRS = """import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""


def ask(
    client: str, server: NativeServer, options: argparse.Namespace, seed: int, folder: Path
) -> dict[str, Any]:
    """The row of one client's run."""
    out = folder / f"{client}-{seed}.json"
    if client == "flyweight":
        words = [
            sys.executable,
            "-m",
            "flyweight",
            "bench",
            "serve",
            options.model,
            "--url",
            server.url,
            "--concurrency",
            1,
            "--requests",
            options.requests,
            "--input",
            options.input,
            "--output",
            options.output,
            "--seed",
            seed,
            "-o",
            out,
        ]
    else:
        words = [
            options.vllm,
            "-c",
            THEIRS,
            "--backend",
            "openai",
            "--base-url",
            server.url,
            "--endpoint",
            "/v1/completions",
            "--model",
            server.model,
            "--tokenizer",
            resolve(options.model),
            "--dataset-name",
            "random",
            "--random-input-len",
            options.input,
            "--random-output-len",
            options.output,
            "--random-range-ratio",
            0,
            "--num-prompts",
            options.requests,
            "--max-concurrency",
            1,
            "--ignore-eos",
            "--temperature",
            0,
            "--seed",
            seed,
            "--save-result",
            "--result-dir",
            folder,
            "--result-filename",
            out.name,
        ]
    subprocess.run([str(word) for word in words], check=True, capture_output=True)
    return read_one(out).rows[-1]


def server_times(server: NativeServer, options: argparse.Namespace) -> dict[str, float]:
    """Means of the last requests of a run; what came before them warmed up."""
    found = [match for line in server.log.read_text().splitlines() if (match := LINE.search(line))]
    whole = [match for match in found if int(match[1]) == options.output][-options.requests :]
    return {
        "server_ttft_ms": statistics.fmean(float(match[2]) for match in whole),
        "server_tpot_ms": statistics.fmean(float(match[3]) for match in whole),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--vllm", required=True, metavar="PYTHON")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    server = NativeServer(options.model, EngineOptions(device=options.device))
    environment, file = environment_row(options.device), ResultFile(options.out)
    file.append([environment])
    ratios: dict[str, list[tuple[float, float]]] = {"flyweight": [], "vllm": []}
    server.start(Limits(2, 4 * (options.input + options.output), None))
    try:
        with tempfile.TemporaryDirectory() as folder:
            for seed in range(options.rounds):
                for client, found in ratios.items():
                    row = ask(client, server, options, seed, Path(folder))
                    times = server_times(server, options)
                    ttft, tpot = (row[name]["mean"] for name in ("ttft_ms", "tpot_ms"))
                    found.append((ttft / times["server_ttft_ms"], tpot / times["server_tpot_ms"]))
                    told = {
                        name: value
                        for name, value in row.items()
                        if name not in ("samples", "environment")
                    } | times
                    told |= {
                        "client": client,
                        "backend": f"native-server, asked by {client}",
                        "model": options.model,
                        "seed": seed,
                    }
                    file.append([rounded(make_row("serve", environment["id"]) | told)])
                    print(
                        f"{client}: TTFT {found[-1][0]:.4f}, TPOT {found[-1][1]:.4f} of the "
                        f"server's own",
                        flush=True,
                    )
    finally:
        server.stop()
    medians = {
        client: [statistics.median(part) for part in zip(*found, strict=True)]
        for client, found in ratios.items()
    }
    apart = [ours / theirs for ours, theirs in zip(*medians.values(), strict=True)]
    print(
        json.dumps(
            {"flyweight ÷ vllm": {"ttft": round(apart[0], 4), "tpot": round(apart[1], 4)}},
            ensure_ascii=False,
        )
    )
    sys.exit(
        0 if all(abs(ratio - 1) <= 0.05 for ratio in apart) else "they differ by more than 5 %"
    )


if __name__ == "__main__":
    main()
