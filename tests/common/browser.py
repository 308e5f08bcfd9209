"""A real browser for tests: Debian's chromium without a window, driven by its DevTools protocol over a pipe.

The protocol is JSON between zero bytes (https://chromedevtools.github.io/devtools-protocol), so it needs nothing but
the browser itself; a driver such as playwright would bring a browser of its own, some 150 MB, for each checkout.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WHY_NOT = f"no browser here: none of {', '.join(NAMES)} is installed (Debian: apt install chromium)"


def find() -> str | None:
    """The browser's path."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in one process. Events are kept by their method's name."""

    def __init__(self, profile: Path) -> None:
        self.events: dict[str, list[dict[str, Any]]] = {}
        to_it, ours = os.pipe()
        theirs, from_it = os.pipe()
        words = [
            str(find()),
            "--headless=new",
            "--no-sandbox",  # the tests may run as root, and the page is our own
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            ["sh", "-c", f'exec "$@" 3</dev/fd/{to_it} 4>/dev/fd/{from_it}', "sh", *words],
            pass_fds=(to_it, from_it),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_it)
        os.close(from_it)
        self._to, self._from, self._rest, self._number = ours, theirs, b"", 0
        self._session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End the browser."""
        with contextlib.suppress(OSError):
            os.close(self._to)  # it ends when its pipe does
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
        os.close(self._from)

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the protocol; its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        for found in self._messages():
            if found.get("id") == self._number:
                assert "error" not in found, (method, found["error"])
                return found["result"]
        raise AssertionError(f"the browser ended in {method}")

    def open(self, url: str, *, width: int = 1280, height: int = 900, scheme: str = "light", media: str = "") -> None:
        """Load a page and wait for it."""
        self.events.clear()
        is_phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        self.call("Page.navigate", url=url)
        for _ in self._messages():
            if "Page.loadEventFired" in self.events:
                return

    def run(self, script: str) -> Any:
        """The value of an expression."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key."""
        code = {"Tab": 9, "Enter": 13}[key]
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                modifiers=8 if shift else 0,
                **({"text": "\r"} if key == "Enter" and kind == "keyDown" else {}),
            )

    def said(self) -> list[str]:
        """What the console has shown: messages, exceptions, refusals of the page's policy."""
        found = [str(e["entry"]["text"]) for e in self.events.get("Log.entryAdded", [])]
        found += [str(e["args"]) for e in self.events.get("Runtime.consoleAPICalled", [])]
        return found + [str(e["exceptionDetails"]) for e in self.events.get("Runtime.exceptionThrown", [])]

    def requested(self) -> list[str]:
        """Addresses that were asked for."""
        return [e["request"]["url"] for e in self.events.get("Network.requestWillBeSent", [])]

    def _messages(self, timeout_s: float = 30) -> Iterator[dict[str, Any]]:
        end = time.monotonic() + timeout_s
        while True:
            while b"\0" in self._rest:
                line, _, self._rest = self._rest.partition(b"\0")
                message = json.loads(line)
                if "method" in message:
                    self.events.setdefault(message["method"], []).append(message["params"])
                yield message
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the browser has not answered for {timeout_s:g} s"
            held = os.read(self._from, 1 << 16)
            if not held:
                return
            self._rest += held
