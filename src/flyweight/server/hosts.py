"""By which names this server may be called: what keeps a web page from reaching it through its own
visitors.

A page of `evil.example` may let that name point at 127.0.0.1 (DNS rebinding): to the browser its
own server answers, and the page reads everything. The `Host` header gives it away. An address
instead of a name cannot be rebound, and whoever sends a key is no page; so addresses, this
machine's own names and those of `--allowed-host` are served, and with an API key any name.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable

from flyweight.server.refusals import HostRefused

ANY = "*"


class Hosts:
    def __init__(self, allowed: Iterable[str], *, keys: bool):
        own = socket.gethostname().lower()
        self.names = {
            "localhost",
            own,
            own.partition(".")[0],
            f"{own}.local",
            *(name.lower() for name in allowed),
        }
        self.any = keys or ANY in self.names

    def check(self, header: bytes) -> None:
        """Raises HostRefused. A request without the header is not a browser's."""
        if self.any or not header:
            return
        name = hostname(header.decode("latin-1"))
        if name in self.names or name.endswith(".localhost") or is_address(name):
            return
        shown = name[:80]
        raise HostRefused(
            f"this server is not known as {shown!r}; call it by its address, or start it with "
            f"--allowed-host {shown}"
        )


def hostname(host: str) -> str:
    """Without the port: `[::1]:8000` → `::1`."""
    bracketed = re.fullmatch(r"\[([^\]]*)\](:\d*)?", host.strip())
    name = bracketed[1] if bracketed else host.strip().partition(":")[0]
    return name.rstrip(".").lower()


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])  # an IPv6 address may name its interface
    except ValueError:
        return False
    return True


def reaches_others(host: str) -> bool:
    """Whether an address to listen on can be reached from other machines."""
    return host != "localhost" and not (
        is_address(host) and ipaddress.ip_address(host.partition("%")[0]).is_loopback
    )
