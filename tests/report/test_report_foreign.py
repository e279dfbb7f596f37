"""Result files of other tools: their figures under our names, what cannot be converted said in
flags."""

import json

import pytest

from flyweight.errors import ResultError
from flyweight.report.document import build
from flyweight.report.read import dump, read
from flyweight.report.render import terminal
from flyweight.report.view import View

SERVE = {
    "backend": "vllm",
    "model_id": "Qwen/Qwen3-8B",
    "num_prompts": 100,
    "request_rate": 4.0,
    "max_concurrency": None,
    "completed": 100,
    "duration": 25.0,
    "request_throughput": 4.0,
    "output_throughput": 512.0,
    "mean_ttft_ms": 31.0,
    "median_ttft_ms": 30.0,
    "p99_ttft_ms": 80.0,
    "median_tpot_ms": 5.0,
    "mean_tpot_ms": 5.1,
    "median_itl_ms": 4.9,
    "median_e2el_ms": 700.0,
}
SGLANG = {
    "backend": "sglang",
    "dataset_name": "random",
    "request_rate": float("inf"),
    "max_concurrency": 16,
    "completed": 64,
    "total_output_tokens_retokenized": 10,
    "median_ttft_ms": 20.0,
    "median_tpot_ms": 4.0,
    "median_e2e_latency_ms": 600.0,
}
BATCH = {
    "run_name": "w8a8",
    "batch_size": 8,
    "input_len": 256,
    "output_len": 128,
    "latency": 0.8,
    "output_throughput": 1400.0,
    "last_ttft": 0.1,
}
LLAMA = {
    "model_filename": "m.gguf",
    "model_type": "llama 135M Q4_K",
    "model_size": 10**8,
    "gpu_info": "H200",
    "n_prompt": 0,
    "n_gen": 128,
    "n_depth": 0,
    "avg_ns": 10**9,
    "avg_ts": 128.0,
    "samples_ns": [10**9] * 2,
    "samples_ts": [128.0] * 2,
}
STRATEGY = {"strategy": {"type_": "poisson", "rate": 2.0}, "backend": {"model": "m"}}
GUIDE = {
    "benchmarks": [
        {
            "start_time": 0,
            "config": STRATEGY,
            "metrics": {
                "time_to_first_token_ms": {
                    "successful": {"median": 25.0, "mean": 26.0, "percentiles": {"p99": 60.0}}
                },
                "inter_token_latency_ms": {"successful": {"median": 6.0, "mean": 6.1}},
                "time_per_output_token_ms": {"successful": {"median": 7.0, "mean": 7.1}},
                "request_latency": {"successful": {"median": 0.8, "mean": 0.9}},
            },
        }
    ]
}


def convert(tmp_path, value, lines: bool = False):
    path = tmp_path / "theirs.json"
    path.write_text(
        "".join(json.dumps(one) + "\n" for one in value) if lines else json.dumps(value)
    )
    results = read([path])
    again = tmp_path / "ours.jsonl"
    again.write_text(dump(results))
    assert read([again]).rows == results.rows, "converted rows are rows of our schema"
    assert terminal(build(View(results)))
    return results.rows


def test_vllm_serve(tmp_path):
    (row,) = convert(tmp_path, SERVE)
    assert (row["bench"], row["model"], row["rate"], row["arrivals"]) == (
        "serve",
        "Qwen/Qwen3-8B",
        4.0,
        "poisson",
    )
    assert row["ttft_ms"] == {"p50": 30.0, "mean": 31.0, "p99": 80.0} and row["e2e_s"][
        "p50"
    ] == pytest.approx(0.7)
    assert any("from sending" in flag for flag in row["flags"]) and row["checkpoint"] is None


def test_sglang_serve_lines_with_infinite_rate_are_a_closed_loop(tmp_path):
    rows = convert(tmp_path, [SGLANG, SGLANG | {"max_concurrency": 32}], lines=True)
    assert [(row["backend"], row["rate"], row["arrivals"], row["concurrency"]) for row in rows] == [
        ("sglang", None, "closed", 16),
        ("sglang", None, "closed", 32),
    ]
    assert rows[0]["e2e_s"]["p50"] == pytest.approx(0.6)


def test_sglang_one_batch_and_its_missing_first_token(tmp_path):
    good, bad = convert(tmp_path, [BATCH, BATCH | {"last_ttft": -1}], lines=True)
    assert (good["ttft_ms_last"], good["input_tok_s"], good["overall_tok_s"]) == pytest.approx(
        (100.0, 20480.0, 3840.0)
    )
    assert bad["input_tok_s"] is None and "the first token was not timed" in bad["flags"]


def test_llama_bench_keeps_its_samples(tmp_path):
    generation, prompt = convert(
        tmp_path, [LLAMA, LLAMA | {"n_prompt": 512, "n_gen": 0, "avg_ts": 512.0}]
    )
    assert generation["decode_tok_s"] == 128.0 and generation["decode_tok_s_samples"] == [
        128.0,
        128.0,
    ]
    assert prompt["input_tok_s"] == 512.0 and "decode_tok_s" not in prompt
    assert any("not a time to first token" in flag for flag in prompt["flags"])


def test_guidellm_tpot_is_its_inter_token_latency(tmp_path):
    (row,) = convert(tmp_path, GUIDE)
    assert (
        row["tpot_ms"] == {"p50": 6.0, "mean": 6.1}
        and row["ttft_ms"]["p99"] == 60.0
        and row["rate"] == 2.0
    )


def test_what_cannot_be_converted_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ResultError, match="says neither the batch nor the lengths"):
        convert(tmp_path, {"avg_latency": 1.0, "latencies": [1.0]})
