"""Chromium without a window, driven over its DevTools protocol, for tests of the web page."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
_PATIENCE_S = 120


class Page:
    """One open page.

    Attributes:
        complaints: What the page wrote to its console as warnings or errors, refusals of its
            content policy included.
    """

    def __init__(self, socket: Any) -> None:
        self._socket, self._last = socket, 0
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Send a command and wait for its result."""
        self._last += 1
        self._socket.send(json.dumps({"id": self._last, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=_PATIENCE_S))
            self._note(message)
            if message.get("id") == self._last:
                assert "error" not in message, message
                return message["result"]

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        entry = params.get("entry", {})
        if message.get("method") == "Log.entryAdded" and entry["level"] in ("warning", "error"):
            self.complaints.append(f"{entry['text']} {entry.get('url', '')}")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression, `!!...` for a node, is true; gives its value."""
        deadline = time.monotonic() + _PATIENCE_S
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"{expression} never held"
            time.sleep(0.05)
        return value

    def open(self, url: str, *, width: int = 900, height: int = 900, is_dark: bool = False) -> None:
        """Load a page at a size, and wait for its scripts."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def press(self, key: str, *, text: str = "", shift: bool = False) -> None:
        """Press and release a key."""
        event = {"key": key, "modifiers": 8 if shift else 0}
        if key == "Enter":
            text = "\r"
            event |= {"windowsVirtualKeyCode": 13}
        elif key == "Tab":
            event |= {"windowsVirtualKeyCode": 9}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def screenshot(self, file: Path) -> None:
        """Save the whole page as a PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A fresh browser with one empty page; its files go to a folder."""
    arguments = ["--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}"]
    arguments += ["--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")  # Chromium refuses to run as root with it
    process = subprocess.Popen(
        [CHROMIUM, *arguments, "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        ready = profile / "DevToolsActivePort"
        deadline = time.monotonic() + _PATIENCE_S
        while not (ready.is_file() and ready.read_text().strip()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        port = int(ready.read_text().split()[0])
        address = f"http://127.0.0.1:{port}/json/new?about:blank"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(address, method="PUT"), timeout=60) as response:
            socket = json.load(response)["webSocketDebuggerUrl"]
        with connect(socket, max_size=None, proxy=None) as opened:
            yield Page(opened)
    finally:
        process.terminate()
        process.wait(timeout=60)
