"""Result files of vLLM, SGLang, llama-bench and guidellm as rows of ours.

Their definitions are converted to ours where they can be, and the row's `flags` say where they
cannot: vLLM, SGLang and guidellm count TTFT from sending a request and not from its scheduled
arrival; guidellm's time per output token includes the first token, so that its inter-token latency
is our TPOT. None of them names the weights: the checkpoint is unknown, and such rows never join a
quality.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flyweight.errors import ResultError
from flyweight.report.rows import SCHEMA, Results, Row, join

SENT = "TTFT is from sending the request, not from its scheduled arrival"
UNNAMED = "scheme and checkpoint are not in the file"
PERCENT = {"median": "p50", "mean": "mean", "p90": "p90", "p95": "p95", "p99": "p99"}
Fields = dict[str, Any]


def block(record: Fields, name: str, *, scale: float = 1.0) -> dict[str, float] | None:
    """{p50, mean, …} from keys like `median_ttft_ms`."""
    found = {
        ours: record[f"{theirs}_{name}"] * scale
        for theirs, ours in PERCENT.items()
        if record.get(f"{theirs}_{name}") is not None
    }
    return found or None


def rate_of(record: Fields) -> Fields:
    rate = record.get("request_rate")
    finite = isinstance(rate, (int, float)) and rate != float("inf")
    return {
        "rate": rate if finite else None,
        "arrivals": "poisson" if finite else "closed",
        "concurrency": record.get("max_concurrency"),
    }


def serve(record: Fields, *, tool: str) -> tuple[str, Fields]:
    """vLLM's and SGLang's serving benchmarks write nearly the same keys."""
    return "serve", {
        "model": record.get("model_id")
        or (record.get("server_info") or {}).get("model_path")
        or "not told",
        "backend": record.get("backend") or record.get("endpoint_type") or tool,
        **rate_of(record),
        "dataset": record.get("dataset_name"),
        "requests": record.get("num_prompts") or record.get("completed"),
        "completed": record.get("completed"),
        "duration_s": record.get("duration"),
        "input_tokens": record.get("total_input_tokens"),
        "output_tokens": record.get("total_output_tokens"),
        "ttft_ms": block(record, "ttft_ms"),
        "ttft_sent_ms": block(record, "ttft_ms"),
        "tpot_ms": block(record, "tpot_ms"),
        "gap_ms": block(record, "itl_ms"),
        "e2e_s": block(record, "e2el_ms", scale=1e-3)
        or block(record, "e2e_latency_ms", scale=1e-3),
        "request_s": record.get("request_throughput"),
        "goodput_s": record.get("request_goodput"),
        "output_tok_s": record.get("output_throughput"),
        "total_tok_s": record.get("total_token_throughput") or record.get("total_throughput"),
        "flags": [SENT, UNNAMED],
    }


def vllm_throughput(record: Fields) -> tuple[str, Fields]:
    return "throughput", {
        "model": "not told",
        "backend": "vllm",
        "prompts": record["num_requests"],
        "qps": record["requests_per_second"],
        "total_tok_s": record["tokens_per_second"],
        "flags": [UNNAMED, "input and output lengths are not in the file"],
    }


def sglang_one_batch(record: Fields) -> tuple[str, Fields]:
    batch, length, output = record["batch_size"], record["input_len"], record["output_len"]
    latency = record.get("latency", record.get("total_latency"))
    first = record.get("last_ttft", record.get("prefill_latency"))
    flags = [UNNAMED, "decode speed is from the last first token to the end of the batch"]
    first = first if first and first > 0 else None
    if first is None:
        flags.append("the first token was not timed")
    return "latency", {
        "model": record.get("run_name") or "not told",
        "backend": "sglang",
        "workload": None,
        "batch": batch,
        "input": length,
        "output": output,
        "latency_s": latency,
        "ttft_ms_last": 1e3 * first if first else None,
        "decode_tok_s": record.get("output_throughput", record.get("median_decode_throughput")),
        "input_tok_s": batch * length / first if first else None,
        "overall_tok_s": batch * (length + output) / latency,
        "flags": flags,
    }


def llama_bench(record: Fields) -> tuple[str, Fields]:
    prompt, generated, depth = record["n_prompt"], record["n_gen"], record.get("n_depth", 0)
    seconds = [nanoseconds / 1e9 for nanoseconds in record.get("samples_ns", [record["avg_ns"]])]
    common = {
        "model": record.get("model_filename", "not told"),
        "backend": "llama.cpp",
        "scheme": record.get("model_type"),
        "size_gb": record["model_size"] / 1e9 if record.get("model_size") else None,
        "kv_dtype": record.get("type_k"),
        "latency_s": sum(seconds) / len(seconds),
        "latency_s_samples": seconds,
        "batch": 1,
    }
    if prompt and not generated:
        return "latency", common | {
            "workload": "prompt processing",
            "input": depth + prompt,
            "output": 0,
            "input_tok_s": record["avg_ts"],
            "flags": ["no token is sampled after the prompt: not a time to first token"],
        }
    rate = record["avg_ts"] if not prompt else None
    flags = (
        ["the clock starts after the context: decoding only"]
        if not prompt
        else ["prompt and decoding are one figure"]
    )
    samples = record.get("samples_ts") if not prompt else None
    return "latency", common | {
        "workload": "generation",
        "input": depth + prompt,
        "output": generated,
        "decode_tok_s": rate,
        "decode_tok_s_samples": samples,
        "flags": flags,
    }


def guidellm(record: Fields) -> tuple[str, Fields]:
    metrics, config = record["metrics"], record.get("config") or record.get("args") or {}
    strategy = config.get("strategy") or {}

    def spread(name: str) -> dict[str, float] | None:
        good = (metrics.get(name) or {}).get("successful") or {}
        percentiles = good.get("percentiles") or {}
        found = {
            "p50": good.get("median"),
            "mean": good.get("mean"),
            **{key: percentiles.get(key) for key in ("p90", "p95", "p99")},
        }
        return {key: value for key, value in found.items() if value is not None} or None

    def mean(name: str) -> float | None:
        return (spread(name) or {}).get("mean")

    return "serve", {
        "model": (config.get("backend") or {}).get("model") or config.get("model") or "not told",
        "backend": "openai",
        "rate": strategy.get("rate"),
        "concurrency": strategy.get("streams") or strategy.get("max_concurrency"),
        "arrivals": strategy.get("type_"),
        "ttft_ms": spread("time_to_first_token_ms"),
        "ttft_sent_ms": spread("time_to_first_token_ms"),
        "tpot_ms": spread("inter_token_latency_ms"),
        "e2e_s": spread("request_latency"),
        "request_s": mean("requests_per_second"),
        "output_tok_s": mean("output_tokens_per_second"),
        "total_tok_s": mean("tokens_per_second"),
        "flags": [
            SENT,
            UNNAMED,
            "TPOT is guidellm's inter-token latency; its time per output token includes the first",
        ],
    }


# tool, keys that tell it, reader
TOOLS: tuple[tuple[str, tuple[str, ...], Callable[[Fields], tuple[str, Fields]]], ...] = (
    (
        "sglang",
        ("median_ttft_ms", "total_output_tokens_retokenized"),
        lambda record: serve(record, tool="sglang"),
    ),
    ("vllm", ("median_ttft_ms", "request_throughput"), lambda record: serve(record, tool="vllm")),
    ("vllm", ("requests_per_second", "tokens_per_second", "num_requests"), vllm_throughput),
    ("sglang", ("run_name", "batch_size", "input_len", "output_len"), sglang_one_batch),
    ("llama-bench", ("n_prompt", "n_gen", "avg_ns", "avg_ts"), llama_bench),
    ("guidellm", ("metrics", "run_stats"), guidellm),
    ("guidellm", ("metrics", "start_time"), guidellm),
)


def records_of(text: str) -> Iterator[Fields]:
    """One JSON value or one a line; lists and guidellm's list of benchmarks are opened."""
    try:
        values = [json.loads(text)]
    except json.JSONDecodeError:
        try:
            values = [json.loads(line) for line in text.splitlines() if line.strip()]
        except json.JSONDecodeError:
            return
    for value in values:
        inner = (
            value.get("benchmarks")
            if isinstance(value, dict) and isinstance(value.get("benchmarks"), list)
            else value
        )
        yield from (
            one for one in (inner if isinstance(inner, list) else [inner]) if isinstance(one, dict)
        )


def recognize(text: str) -> Callable[[Path, str], Results] | None:
    """The reader of a file of another tool; None for rows of ours and for what is not known."""
    first = next(records_of(text), {})
    if "schema" in first or not first:
        return None
    return (
        read
        if "avg_latency" in first or any(all(key in first for key in keys) for _, keys, _ in TOOLS)
        else None
    )


def read(path: Path, text: str) -> Results:
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    rows: list[Row] = []
    environments: dict[str, Row] = {}
    for index, record in enumerate(records_of(text)):
        if "avg_latency" in record:
            raise ResultError(
                f"{path}: vLLM's latency file says neither the batch nor the lengths; it cannot be "
                "converted"
            )
        found = next(
            (
                (tool, convert)
                for tool, keys, convert in TOOLS
                if all(key in record for key in keys)
            ),
            None,
        )
        if found is None:
            raise ResultError(f"{path}: record {index + 1} is of no known tool")
        tool, convert = found
        identity = f"{digest}-{tool}"
        device = record.get("gpu_info") or record.get("cpu_info")
        environments[identity] = make(
            "environment",
            identity,
            identity,
            id=identity,
            device=device,
            tool=tool,
            document=path.name,
            build=record.get("build_commit"),
        )
        try:
            bench, fields = convert(record)
        except (KeyError, TypeError, ZeroDivisionError) as error:
            what = f"record {index + 1} of {tool} cannot be read ({type(error).__name__}: {error})"
            raise ResultError(f"{path}: {what}") from error
        rows.append(
            make(
                bench,
                f"{digest}-{index}",
                identity,
                time=record.get("test_time") or record.get("date"),
                **{"scheme": "not told", "checkpoint": None, "weights": None, **fields},
            )
        )
    return join([Results(tuple(rows), environments)])


def make(
    bench: str, run_id: str, environment: str, *, time: str | None = None, **fields: Any
) -> Row:
    return {
        "schema": SCHEMA,
        "bench": bench,
        "run_id": run_id,
        "time": time,
        "environment": environment,
        "status": "ok",
        **fields,
    }
