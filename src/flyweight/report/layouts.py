"""Which columns each table has, which metric each workload is about, and which direction is better:
data only.

`seed` layouts have exactly the columns of the documents that this package reproduces; `full` ones
say more, and say in the header what a ratio is of.
"""

from __future__ import annotations

from flyweight.report.blocks import Column

LAYOUTS = ("full", "seed")
# the first of these that is there, else none
BASELINES = ("bf16", "original", "fp16", "fp32", "transformers")

AGREEMENT = (  # beside every speed of a model
    Column("Same tokens", "agreement", ".3f", optional=True),
    Column("where the choice is clear", "agreement_clear", ".3f", optional=True),
    Column("as", "agreement_with", optional=True),
)
KERNEL = {
    "seed": (
        Column("batch_size", "rows"),
        Column("in_features", "in_features"),
        Column("out_features", "out_features"),
        Column("main_centroids", "main_centroids", optional=True),
        Column("residual_centroids", "residual_centroids", optional=True),
        Column("{format} (ms)", "ms", ".4f"),
        Column("torch (ms)", "torch_ms", ".4f"),
        Column("ratio", "ratio", ".2f"),
    ),
    "full": (
        Column("kernel", "kernel", optional=True),
        Column("chain", "chain", optional=True),
        Column("rows", "rows"),
        Column("context", "context", optional=True),
        Column("bits/weight", "bits_per_weight", ".2f", optional=True),
        Column("in", "in_features", optional=True),
        Column("out", "out_features", optional=True),
        Column("group", "group_size", optional=True),
        Column("vector", "vector_length", optional=True),
        Column("main centroids", "main_centroids", optional=True),
        Column("residual centroids", "residual_centroids", optional=True),
        Column("{format} (µs)", "us", ".2f"),
        Column("p10", "us_p10", ".2f", optional=True),
        Column("p90", "us_p90", ".2f", optional=True),
        Column("hot L2 (µs)", "us_hot", ".2f", optional=True),
        Column("alone (µs)", "us_alone", ".2f", optional=True),
        Column("torch {torch_name} (µs)", "torch_us", ".2f", optional=True),
        Column("ratio {format} ÷ torch (< 1 is faster)", "ratio", ".2f", optional=True),
        Column("speed-up over torch (×)", "speedup", ".2f", optional=True),
        Column("GB/s", "gb_s", ".0f", optional=True),
        Column("of bandwidth", "share_of_bandwidth", ".0%", optional=True),
        Column("relative error", "relative_error", ".1e", optional=True),
        Column("host, outside a graph (µs)", "host_us", ".1f", optional=True),
    ),
}
LATENCY = {
    "seed": (
        Column("Model", "code_label"),
        Column("Runs", "runs"),
        Column("Latency (s)", "latency_s", "±.2f"),
        Column("Output Throughput (tok/s)", "decode_tok_s", "±.2f"),
        Column("Overall Throughput (tok/s)", "overall_tok_s", "±.2f"),
        Column("Input Throughput (tok/s)", "input_tok_s", "±.2f", absent="0.00"),
    ),
    "full": (
        Column("Variant", "label"),
        Column("Backend", "backend"),
        Column("Runs", "runs"),
        Column("Latency (s)", "latency_s", "±.3f"),
        Column("TTFT (ms)", "ttft_ms", "±.1f", optional=True),
        Column("TTFT, last (ms)", "ttft_ms_last", "±.1f", optional=True),
        Column("TPOT (ms)", "tpot_ms", "±.2f", optional=True),
        Column("Decode (tok/s)", "decode_tok_s", "±.1f"),
        Column("Overall (tok/s)", "overall_tok_s", "±.1f"),
        Column("Input (tok/s)", "input_tok_s", "±.1f", optional=True),
        Column("of the limit", "share_of_limit", ".0%", optional=True),
        Column("Peak (GB)", "allocated_gb", ".2f", optional=True),
        Column("Size (GB)", "size_gb", ".2f", optional=True),
        *AGREEMENT,
        Column("Speed-up in {about} over {baseline} (×)", "speedup", ".2f", optional=True),
    ),
}
SPEED = {
    "seed": (
        Column("Model", "model"),
        Column("Input Length", "input"),
        Column("Quantization", "scheme"),
        Column("GPU Num", "gpus"),
        Column("Speed(tokens/s)", "output_tok_s", ".2f"),
        Column("GPU Memory(GB)", "allocated_gb", ".2f", optional=True),
        Column("Setting", "setting", optional=True),
    ),
    "full": (
        Column("Model", "label_model"),
        Column("Input length", "input"),
        Column("Quantization", "scheme"),
        Column("GPUs", "gpus", optional=True),
        Column("Speed, prefill included (tokens/s)", "output_tok_s", "±.2f"),
        Column("Decode only (tokens/s)", "decode_tok_s", "±.2f", optional=True),
        Column("Output", "output"),
        Column("Peak memory (GB)", "allocated_gb", ".2f", optional=True),
        Column("Reserved (GB)", "reserved_gb", ".2f", optional=True),
        Column("Setting", "setting", optional=True),
        *AGREEMENT,
        Column("Speed-up over {baseline} (×)", "speedup", ".2f", optional=True),
    ),
}
THROUGHPUT = {
    "seed": (
        Column("Model", "model"),
        Column("Quantization", "scheme"),
        Column("# Prompts", "prompts"),
        Column("QPS", "qps", ".2f"),
        Column("Tokens/s", "total_tok_s", ".2f"),
    ),
    "full": (
        Column("Model", "label_model"),
        Column("Backend", "backend"),
        Column("Quantization", "scheme"),
        Column("Prompts", "prompts"),
        Column("Input", "input"),
        Column("Output", "output"),
        Column("QPS", "qps", ".2f"),
        Column("Output tokens/s", "output_tok_s", ".1f", optional=True),
        Column("Input and output tokens/s", "total_tok_s", ".1f"),
        *AGREEMENT,
        Column("Speed-up over {baseline} (×)", "speedup", ".2f", optional=True),
    ),
}
SERVE = {  # one line each; the table has a column per backend
    "seed": (
        Column("Backend", "backend"),
        Column("Model", "model"),
        Column("TTFT", "ttft_ms", ".2f", unit="ms"),
        Column("TPOT", "tpot_ms", ".2f", unit="ms"),
    ),
    "full": (
        Column("Backend", "backend"),
        Column("Model", "label_model"),
        Column("Quantization", "scheme"),
        Column("Arrivals", "arrivals", optional=True),
        Column("Rate (requests/s)", "rate", optional=True),
        Column("Concurrency", "concurrency", optional=True),
        Column("Requests", "requests", optional=True),
        Column("TTFT p50 (ms)", "ttft_ms", ".2f"),
        Column("TTFT p90 (ms)", "ttft_ms_p90", ".2f", optional=True),
        Column("TTFT p99 (ms)", "ttft_ms_p99", ".2f", optional=True),
        Column("TPOT p50 (ms)", "tpot_ms", ".2f"),
        Column("TPOT p90 (ms)", "tpot_ms_p90", ".2f", optional=True),
        Column("TPOT p99 (ms)", "tpot_ms_p99", ".2f", optional=True),
        Column("End to end p50 (s)", "e2e_s", ".2f", optional=True),
        Column("Requests/s", "request_s", ".2f", optional=True),
        Column("Goodput (requests/s)", "goodput_s", ".2f", optional=True),
        Column("Output (tok/s)", "output_tok_s", ".1f", optional=True),
        Column("Failed", "failed", optional=True),
        Column("Client lag (ms)", "client_lag_ms", optional=True),
        *AGREEMENT,
        Column("Decode speed-up over {baseline} (×)", "speedup", ".2f", optional=True),
    ),
}
PROFILE = {
    "seed": (
        Column("Name", "operator"),
        Column("Self CPU %", "host_share"),
        Column("Self CPU", "host_self"),
        Column("CPU total %", "host_total_share"),
        Column("CPU total", "host_total"),
        Column("CPU time avg", "host_mean"),
        Column("Self CUDA", "device_self"),
        Column("Self CUDA %", "device_share"),
        Column("CUDA total", "device_total"),
        Column("CUDA time avg", "device_mean"),
        Column("CPU Mem", "host_memory"),
        Column("Self CPU Mem", "host_self_memory"),
        Column("CUDA Mem", "device_memory"),
        Column("Self CUDA Mem", "device_self_memory"),
        Column("# of Calls", "calls"),
    ),
    "full": (
        Column("Operator or kernel", "operator"),
        Column("Phase", "phase", optional=True),
        Column("Device self", "device_self", optional=True),
        Column("Device share", "device_share", optional=True),
        Column("Device total", "device_total", optional=True),
        Column("Device mean", "device_mean", optional=True),
        Column("Host self", "host_self"),
        Column("Host share", "host_share"),
        Column("Host total", "host_total"),
        Column("Device memory", "device_memory", optional=True),
        Column("Host memory", "host_memory", optional=True),
        Column("Calls", "calls"),
    ),
}
QUALITY = (
    Column("Scheme", "scheme"),
    Column("Perplexity", "perplexity", ".3f", optional=True),
    Column("standard error", "perplexity_error", ".3f", optional=True),
    Column("of the original", "perplexity_original", ".3f", optional=True),
    Column("KL", "kl", ".4f", optional=True),
    Column("its error", "kl_error", ".4f", optional=True),
    Column("Same top token", "top1_agreement", ".1%", optional=True),
    Column("Model", "label_model"),
    Column("Size (GB)", "size_gb", ".3f", optional=True),
    Column("Bits per weight, layers", "bits_per_weight", ".2f", optional=True),
    Column("whole file", "file_bits_per_weight", ".2f", optional=True),
    Column("Tool", "tool", optional=True),
    Column("Seed", "seed", optional=True),
    Column("Text", "text", optional=True),
    Column("Window", "window", optional=True),
    Column("Tokens", "tokens", optional=True),
    Column("Checkpoint", "checkpoint"),
)
CHECKS = (
    Column("Check", "check"),
    Column("Model", "label_model"),
    Column("Format", "scheme"),
    Column("Setting", "setting", optional=True),
    Column("Kernel", "kernel", optional=True),
    Column("Positions", "positions", optional=True),
    Column("Mean error, prefill", "error_prefill", ".1e", optional=True),
    Column("decode", "error_decode", ".1e", optional=True),
    Column("bound", "bound", ".2g"),
    Column("Same likeliest token", "same_argmax", optional=True),
    Column("Requests", "requests", optional=True),
    Column("Tokens", "tokens", optional=True),
    Column("Parted", "parted", optional=True),
    Column("Not the best", "not_the_best", optional=True),
    Column("Preempted", "preempted", optional=True),
    Column("Largest gap at a difference", "largest_gap_at_difference", ".3f", optional=True),
    Column("Agrees", "agrees"),
)
QUANTIZE = (
    Column("Model", "label_model"),
    Column("Scheme", "scheme"),
    Column("Device", "device", optional=True),
    Column("Calibration tokens", "calibration_tokens", optional=True),
    Column("Seconds", "seconds", ".1f"),
    Column("Peak GPU (GB)", "peak_gpu_gb", ".2f", optional=True),
    Column("Peak host (GB)", "peak_host_gb", ".2f", optional=True),
)
SANITIZE = (
    Column("Kernel", "kernel"),
    Column("Check", "check"),
    Column("Found", "found", "d"),
    Column("Relative error", "relative_error", ".4f", optional=True),
    Column("Tool", "tool", optional=True),
)
FAILURES = (
    Column("Bench", "bench"),
    Column("Kernel", "kernel", optional=True),
    Column("Model", "model", optional=True),
    Column("Scheme", "scheme", optional=True),
    Column("Backend", "backend", optional=True),
    Column("Status", "status"),
    Column("Reason", "reason"),
)

METRICS = {  # metric → (what it is called, its unit, whether more is better)
    "decode_tok_s": ("decode speed", "tok/s", True),
    "ttft_ms_last": ("time to first token", "ms", False),
    "ttft_ms": ("time to first token", "ms", False),
    "latency_s": ("latency", "s", False),
    "overall_tok_s": ("overall throughput", "tok/s", True),
}
ABOUT = {  # workload → the metrics it is about, the first that was measured counts
    "interactive": ("latency_s",),
    "decode_bound": ("decode_tok_s",),
    "prefill_bound": ("ttft_ms_last", "ttft_ms", "latency_s"),
    "long_context": ("ttft_ms_last", "ttft_ms", "latency_s"),
    "medium_batch": ("overall_tok_s",),
    "base": ("overall_tok_s",),
    "high_concurrency": ("overall_tok_s",),
}


def about(workload: str | None, *, batch: int, input: int, output: int) -> tuple[str, ...]:
    """The metrics of a workload; one without a known name is judged by its shape."""
    if workload in ABOUT:
        return ABOUT[workload]
    shape = "base" if batch > 1 else "prefill_bound" if input >= 16 * output else "decode_bound"
    return ABOUT[shape]
