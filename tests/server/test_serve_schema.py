"""Schemathesis against our own OpenAPI document: whatever it sends, no answer is a server error."""

import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from tiny_server import DEADLINE, ScriptedEngine, serving

schemathesis = pytest.importorskip(
    "schemathesis", reason="the API fuzzer is not installed: pip install schemathesis"
)

EXAMPLES = int(os.environ.get("FLYWEIGHT_FUZZ", "12"))  # per operation; raise it for a long run


@pytest.fixture(scope="module")
def server(tiny_folder):
    with serving(tiny_folder, engine_class=ScriptedEngine, allow_reset=True) as running:
        yield running


@pytest.fixture(scope="module")
def operations(server):
    return {
        f"{item.ok().method.upper()} {item.ok().path}": item.ok()
        for item in schemathesis.openapi.from_url(
            f"{server.url}/openapi.json", timeout=DEADLINE
        ).get_all_operations()
    }


def test_every_endpoint_is_described(operations):
    assert {name.split()[1] for name in operations} >= {
        "/v1/models",
        "/v1/models/{name}",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/tokenize",
        "/detokenize",
        "/health",
        "/live",
        "/ready",
        "/metrics",
        "/reset_prefix_cache",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/api/chat",
        "/api/generate",
        "/api/tags",
        "/api/show",
    }


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *[
            (f"POST {path}", mode)
            for path in (
                "/v1/completions",
                "/v1/chat/completions",
                "/tokenize",
                "/detokenize",
                "/v1/responses",
                "/v1/messages",
                "/v1/messages/count_tokens",
                "/api/chat",
                "/api/generate",
                "/api/show",
            )
            for mode in ("POSITIVE", "NEGATIVE")
        ],
        *[
            (f"GET {path}", "POSITIVE")
            for path in (
                "/v1/models",
                "/v1/models/{name}",
                "/health",
                "/live",
                "/ready",
                "/metrics",
            )
        ],
        ("POST /v1/embeddings", "POSITIVE"),
        ("POST /reset_prefix_cache", "POSITIVE"),
    ],
)
def test_nothing_that_can_be_sent_breaks_the_server(server, operations, name, mode):
    strategy = operations[name].as_strategy(generation_mode=schemathesis.GenerationMode[mode])
    statuses = []

    @settings(
        max_examples=EXAMPLES, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(case=strategy)
    def send(case):
        statuses.append(case.call(base_url=server.url, timeout=DEADLINE).status_code)

    send()
    assert statuses and not [status for status in statuses if status >= 500]
