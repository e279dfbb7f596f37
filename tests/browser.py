"""A headless Chromium, driven over its own debugging pipe: no package and no port needed."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

DEADLINE = 120.0  # seconds: a browser starts in one or two, and answers in milliseconds
# The browser reads commands from descriptor 3 and writes to 4; this puts the pipes there.
LAUNCH = """import fcntl, os, sys
pipes = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for pipe, place in zip(pipes, (3, 4)):
    os.dup2(pipe, place)
os.execv(sys.argv[3], sys.argv[3:])"""


def find_browser() -> str | None:
    return (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )


class Browser:
    """`page.js("document.title")`; promises are waited for. Errors and requests of the page are
    kept."""

    def __init__(self, command: str, profile: Path):
        ours, self.writes = os.pipe()
        self.reads, theirs = os.pipe()
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            "--no-first-run",
            "--disable-dev-shm-usage",
            "about:blank",
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(ours), str(theirs), command, *options],
            pass_fds=(ours, theirs),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ours)
        os.close(theirs)
        self.numbers, self.rest = itertools.count(1), b""
        self.session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.loaded: set[str] = set()  # documents whose load event has been
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def call(self, method: str, **parameters):
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters} | (
            {"sessionId": self.session} if self.session else {}
        )
        os.write(self.writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict:
        while b"\0" not in self.rest:
            assert select.select([self.reads], [], [], DEADLINE)[0], "the browser says nothing"
            part = os.read(self.reads, 1 << 16)
            assert part, "the browser ended"
            self.rest += part
        text, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(text)
        method, facts = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(
                facts["exceptionDetails"].get("exception", {}).get("description", "an exception")
            )
        elif method == "Log.entryAdded" and facts["entry"]["level"] == "error":
            self.errors.append(facts["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
        elif method == "Page.lifecycleEvent" and facts["name"] == "load":
            self.loaded.add(facts["loaderId"])
        return message

    def open(self, url: str) -> None:
        """Until this very document is loaded: the one before may have the same address."""
        self._go("about:blank")  # what the last document still has to say is its own
        self.errors.clear()
        self.requests.clear()
        self._go(url)

    def _go(self, url: str) -> None:
        loader = self.call("Page.navigate", url=url)["loaderId"]
        while loader not in self.loaded:
            self._next()

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )

    def js(self, code: str):
        result = self.call(
            "Runtime.evaluate",
            expression=code,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        deadline = time.monotonic() + DEADLINE
        while not self.js(condition):
            assert time.monotonic() < deadline, f"waited too long for {condition}"

    def key(self, key: str, code: str, *, alt: bool = False, text: str = "") -> None:
        number = {"Enter": 13, "Escape": 27}.get(key, ord(code[-1]))
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=code,
                modifiers=int(alt),
                windowsVirtualKeyCode=number,
                **({"text": text} if text and kind == "keyDown" else {}),
            )

    def write(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def picture(self, path: Path) -> None:
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=DEADLINE)
        os.close(self.writes)
        os.close(self.reads)
