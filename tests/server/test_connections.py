"""Connections that are many, slow or silent: each has a limit, and others are served all the
while."""

import json
import socket

import httpx
import pytest
from tiny_server import DEADLINE, ScriptedEngine, serving, wait_for

from flyweight.server import connections, gate
from flyweight.server.connections import ConnectionLimits

pytest.importorskip(
    "httptools", reason="uvicorn's fast protocol is not installed: pip install httptools"
)

REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def limits():
    return ConnectionLimits(total=8, per_client=6, header_bytes=2000)


@pytest.fixture(scope="module")
def server(tiny_folder, limits):
    with serving(tiny_folder, engine_class=ScriptedEngine, connections=limits) as running:
        yield running


@pytest.fixture(autouse=True)
def nobody_left(server, limits):
    """Each test begins and ends without connections."""
    server.client.close()
    server.client = httpx.Client(base_url=server.url, timeout=DEADLINE)
    wait_for(lambda: not limits.clients, "the connections to close")
    yield


def connect(server, data=b""):
    connection = socket.create_connection(
        ("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=DEADLINE
    )
    connection.sendall(data)
    return connection


def read(connection):
    """All that comes until the server closes it."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def read_until_closed(connection):
    """As above, where the server may close without reading all."""
    try:
        return read(connection)
    except ConnectionResetError:
        return b""


def error(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "data", [b"", b"\r\n", b"POST /v1/comp", REQUEST], ids=["nothing", "a line", "a part", "no end"]
)
def test_a_head_that_does_not_end_in_time_ends_the_connection(server, limits, monkeypatch, data):
    monkeypatch.setattr(limits, "header_seconds", 0.1)
    with connect(server, data) as connection:
        assert error(read(connection)) == (
            408,
            "the request's headers did not arrive within 0.1 seconds",
        )


def test_the_next_head_on_the_same_connection_has_its_time_too(server, limits, monkeypatch):
    monkeypatch.setattr(limits, "header_seconds", 0.1)
    with connect(server, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n") as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /hea")
        assert read(connection).startswith(b"HTTP/1.1 408")


def test_a_head_without_end_is_refused_at_its_limit(server):
    with connect(server, REQUEST + b"x-long: " + b"x" * 3000) as connection:
        assert error(read(connection)) == (431, "the request's headers have more than 2000 bytes")
    assert server.client.get("/health").status_code == 200


def test_a_body_that_does_not_arrive_is_refused_and_a_long_one_is_no_head(server, monkeypatch):
    assert server.post("/v1/completions", prompt="x" * 3000).status_code == 200
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.1)
    with connect(server, REQUEST + b'content-length: 100\r\n\r\n{"prompt"') as connection:
        assert error(read(connection)) == (
            408,
            "the request's body did not arrive within 0.1 seconds",
        )


def test_the_rest_of_a_body_that_was_refused_is_no_head_and_has_its_time(
    server, limits, monkeypatch
):
    size = server.service.settings.max_body + 100_000
    with connect(server, REQUEST + b"content-length: %d\r\n\r\n" % size) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")
        monkeypatch.setattr(limits, "header_seconds", 0.1)
        connection.sendall(b"x" * 50_000)
        assert b"HTTP/1.1" not in read_until_closed(connection), "one answer is enough"


def test_one_client_cannot_have_all_connections(server, limits):
    held = [connect(server) for _ in range(limits.per_client)]
    wait_for(lambda: limits.clients["127.0.0.1"] == limits.per_client, "all of them")
    with connect(server) as refused:
        status, message = error(read(refused))
        assert status == 503 and "too many connections" in message
    held.pop().close()
    wait_for(lambda: limits.clients["127.0.0.1"] < limits.per_client, "a place")
    assert server.client.get("/health").status_code == 200
    for connection in held:
        connection.close()


def test_a_reader_that_has_stopped_reading_is_cut_off(server, limits, monkeypatch):
    monkeypatch.setattr(limits, "stalled_seconds", 0.1)
    body = json.dumps(
        {"prompt": ScriptedEngine.endless, "stream": True, "max_tokens": 4000}
    ).encode()
    with connect(server, REQUEST + b"content-length: %d\r\n\r\n" % len(body) + body) as connection:
        assert connection.recv(10)
        (protocol,) = server.server.server_state.connections
        server.server.servers[0].get_loop().call_soon_threadsafe(
            protocol.pause_writing
        )  # as when its buffers are full
        wait_for(lambda: not limits.clients, "the end of the connection")
    wait_for(lambda: server.engine.in_flight == 0, "its request to be cancelled")


def test_as_many_connections_as_there_are_descriptors_but_for_a_reserve(monkeypatch):
    resource = pytest.importorskip("resource")
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: asked.append(limit))
    found = ConnectionLimits.of_this_process()
    assert (
        asked == [(4096, 4096)]
        and found.total == 4096 - connections.RESERVED
        and found.per_client == found.total // 2
    )
