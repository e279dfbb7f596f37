"""By which names a server answers."""

import socket

import pytest
from tiny_server import ScriptedEngine, serving

from flyweight.server.hosts import Hosts, hostname, reaches_others
from flyweight.server.refusals import HostRefused


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8000",
        "localhost",
        "LOCALHOST:80",
        "a.localhost:1",
        "[::1]:8000",
        "[fe80::1%25eth0]",
        "192.168.1.7:8000",
        "localhost.",
        socket.gethostname(),
        "assistant.lan:8000",
        "",
    ],
)
def test_addresses_own_names_and_those_that_were_given_are_served(host):
    Hosts(["Assistant.LAN"], keys=False).check(host.encode())


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "[evil.example]",
        "notlocalhost",
        "1.2.3",
        "127.0.0.1@evil.example",
        "\xff",
    ],
)
def test_other_names_are_refused(host):
    with pytest.raises(HostRefused, match="is not known as"):
        Hosts(["assistant.lan"], keys=False).check(host.encode("latin-1"))


def test_with_a_key_or_a_star_any_name_is_served():
    Hosts([], keys=True).check(b"evil.example")
    Hosts(["*"], keys=False).check(b"evil.example")


def test_a_page_under_another_name_reads_nothing(tiny_folder):
    with serving(
        tiny_folder, engine_class=ScriptedEngine, allowed_hosts=("assistant.lan",)
    ) as running:
        for path in ("/", "/v1/models", "/health", "/metrics"):
            answer = running.client.get(path, headers={"host": "evil.example"})
            assert (
                answer.status_code == 403 and answer.json()["error"]["code"] == "host_not_allowed"
            )
            assert running.client.get(path, headers={"host": "assistant.lan"}).status_code == 200
        assert "--allowed-host evil.example" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("host", "others"),
    [
        ("127.0.0.1", False),
        ("127.8.0.1", False),
        ("::1", False),
        ("localhost", False),
        ("0.0.0.0", True),
        ("::", True),
        ("192.168.1.7", True),
        ("gpu.lan", True),
    ],
)
def test_which_addresses_other_machines_reach(host, others):
    assert reaches_others(host) is others


def test_ports_and_brackets_are_no_part_of_a_name():
    assert [hostname(host) for host in ("a.b:80", "[::1]:80", "[::1]", "A.", "a")] == [
        "a.b",
        "::1",
        "::1",
        "a",
        "a",
    ]
