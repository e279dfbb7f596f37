"""What Prometheus reads at /metrics. Gauges are read from the engine when asked for; nothing is
computed per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from flyweight.server.engine_client import EngineClient
from flyweight.server.ticket import Ticket

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class Metrics:
    def __init__(self, engine: EngineClient):
        self.registry = registry = CollectorRegistry()
        self.engine = engine
        self.responses = Counter(
            "flyweight_http_responses",
            "Responses by path and status.",
            ["path", "status"],
            registry=registry,
        )
        self.errors = Counter(
            "flyweight_request_errors",
            "Requests refused or failed, by code.",
            ["code"],
            registry=registry,
        )
        self.finished = Counter(
            "flyweight_samples", "Finished samples by reason.", ["finish_reason"], registry=registry
        )
        self.prompt = Counter(
            "flyweight_prompt_tokens", "Prompt tokens of answered requests.", registry=registry
        )
        self.cached = Counter(
            "flyweight_cached_prompt_tokens",
            "Of these, found in the prefix cache.",
            registry=registry,
        )
        self.answer = Counter("flyweight_generation_tokens", "Generated tokens.", registry=registry)
        self.queue = histogram(registry, "queue", "Arrival to the first step of a sample.", SECONDS)
        self.ttft = histogram(registry, "time_to_first_token", "Arrival to first token.", SECONDS)
        self.tpot = histogram(
            registry, "time_per_output_token", "Mean gap between a sample's tokens.", TOKEN_SECONDS
        )
        self.e2e = histogram(registry, "request_latency", "Arrival to last token.", SECONDS)
        registry.register(EngineGauges(engine))

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def record(self, ticket: Ticket) -> None:
        """Once, when a request is over, however it ended."""
        for sample in ticket.samples:
            self.finished.labels(sample.finish_reason or "abandoned").inc()
            if sample.first is None or sample.last is None:
                continue
            self.answer.inc(sample.tokens)
            self.ttft.observe(sample.first - ticket.arrival)
            self.e2e.observe(sample.last - ticket.arrival)
            if sample.started is not None:
                self.queue.observe(max(0.0, sample.started - ticket.arrival))
            if sample.tokens > 1:
                self.tpot.observe((sample.last - sample.first) / (sample.tokens - 1))
        for sample in ticket.samples[:: ticket.n]:
            if sample.first is not None:
                self.prompt.inc(sample.prompt_tokens)
                self.cached.inc(sample.cached)


def histogram(
    registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...]
) -> Histogram:
    return Histogram(f"flyweight_{name}_seconds", text, buckets=buckets, registry=registry)


class EngineGauges:
    """Read at the moment of the scrape."""

    def __init__(self, engine: EngineClient):
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        load, engine = self.engine.load, self.engine
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "up": ("1 when the engine is ready.", lambda: engine.available),
            "samples_in_flight": ("Samples that run or wait.", lambda: engine.in_flight),
            "samples_running": ("Samples in the current batch.", lambda: load.running),
            "samples_waiting": (
                "Samples in the queue.",
                lambda: max(load.waiting, engine.in_flight - load.running),
            ),
            "kv_blocks": ("Blocks of the KV cache.", lambda: load.blocks),
            "kv_blocks_used": (
                "Of these, held by samples.",
                lambda: load.blocks - load.free_blocks,
            ),
            "kv_usage_ratio": (
                "Share of the KV cache that is held.",
                lambda: (load.blocks - load.free_blocks) / max(1, load.blocks),
            ),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"flyweight_{name}", text, value=float(value()))
        counters = {
            "engine_steps": load.steps,
            "engine_restarts": engine.restarts,
            "preemptions": load.preemptions,
            "drafted_tokens": load.drafted,
            "accepted_draft_tokens": load.accepted,
        }
        for name, count in counters.items():
            yield CounterMetricFamily(f"flyweight_{name}", name.replace("_", " "), value=count)
