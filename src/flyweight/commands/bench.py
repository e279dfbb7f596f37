"""`flyweight bench WHAT`: the table of benchmarks, each importing its own module only when it is
used.
"""

from __future__ import annotations

BENCHES = {  # what → (module:function, one line of help)
    "latency": (
        "flyweight.commands.bench_sweep:latency",
        "Variants × workloads × repeats: latency, TTFT, TPOT.",
    ),
    "speed": (
        "flyweight.commands.bench_sweep:speed",
        "Tokens per second and memory by input length.",
    ),
    "throughput": (
        "flyweight.commands.bench_sweep:throughput",
        "Many prompts at once: requests and tokens per second.",
    ),
    "serve": (
        "flyweight.commands.bench_serve:serve",
        "A server or an engine under load: percentiles and goodput.",
    ),
    "step": (
        "flyweight.commands.bench_step:step",
        "Where the time of a decode step goes: kernels, gaps, the host.",
    ),
    "kernel": (
        "flyweight.commands.bench_kernel:kernel",
        "Linears and attention, one kernel at a time, against torch and peers.",
    ),
}
