"""Drives a headless Chromium over its DevTools pipe: enough to open a page, use it and look at it.

Chromium is the system's own (Debian: ``apt-get install chromium``); nothing is downloaded. Messages
are JSON, each ended by a zero byte, written to the browser's file descriptor 3 and read from 4.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_TIMEOUT_S = 60
# Key names that the protocol wants with their code numbers.
_KEYS = {"Tab": 9, "Enter": 13, "End": 35, "Home": 36, "ArrowUp": 38, "ArrowDown": 40, " ": 32}

# Puts the pipes where the browser looks for them; the copies keep one from covering the other.
_START = """
import os, sys
read, write = (os.dup(int(fd)) for fd in sys.argv[1:3])
while min(read, write) < 5:
    read, write = os.dup(read), os.dup(write)
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """A running browser with one page."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        #: What the page reported as an error, and every address it asked for.
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False

    def start(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        # Without this a page in the background is told of a focus later, or never.
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def open(self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file at a width, in a light or a dark system theme."""
        self.errors.clear()
        self.requests.clear()
        self.resize(width, height)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])
        self._loaded = False
        self.call("Page.navigate", url=page.as_uri())
        end = time.monotonic() + _TIMEOUT_S
        while not self._loaded:
            self._take(end)

    def resize(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        got = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in got:
            raise AssertionError(got["exceptionDetails"])
        return got["result"].get("value")

    def press(self, key: str) -> None:
        code = _KEYS[key]
        text = {"Enter": "\r", " ": " "}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                windowsVirtualKeyCode=code,
                **({"text": text} if text and kind == "keyDown" else {}),
            )

    def click(self, selector: str) -> None:
        """Click the middle of the first element that a selector finds."""
        at = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def hover(self, selector: str) -> None:
        """Move the pointer over the first element that a selector finds."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **self._middle(selector))

    def screenshot(self, path: Path, *, whole: bool = True) -> Path:
        got = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))
        path.write_bytes(base64.b64decode(got["data"]))
        return path

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF")["data"])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command of the protocol and return its answer."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + _TIMEOUT_S
        while True:
            answer = self._take(end)
            if answer.get("id") == number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _middle(self, selector: str) -> dict[str, float]:
        x, y = self.evaluate(f"""(() => {{
            const found = document.querySelector({json.dumps(selector)});
            found.scrollIntoView({{block: "center", behavior: "instant"}});
            const box = found.getBoundingClientRect();
            return [box.left + box.width / 2, box.top + box.height / 2];
        }})()""")
        return {"x": x, "y": y}

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        width, height = self.evaluate("[innerWidth, document.documentElement.scrollHeight]")
        return {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}}

    def _take(self, end: float) -> dict[str, Any]:
        """Read one message, and note what it says of the page."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            chunk = os.read(self._read, 1 << 20) if ready else b""
            if not chunk:
                raise TimeoutError("the browser does not answer")
            self._buffer += chunk
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        said = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown":
                self.errors.append(str(said["exceptionDetails"]))
            case "Log.entryAdded" if said["entry"]["level"] in ("error", "warning"):
                self.errors.append(str(said["entry"]))
            case "Network.requestWillBeSent":
                self.requests.append(said["request"]["url"])
        return message


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start Chromium with an empty profile in this folder; end it afterwards."""
    assert CHROMIUM is not None
    to_child, write = os.pipe()
    read, from_child = os.pipe()
    arguments = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",  # there is nothing foreign on our own pages, and containers run as root
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--hide-scrollbars",
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", _START, str(to_child), str(from_child), *arguments],
        pass_fds=(to_child, from_child),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_child)
    os.close(from_child)
    try:
        running = Browser(write, read)
        running.start()
        yield running
        running.call("Browser.close")
    finally:
        process.terminate()
        process.wait(timeout=_TIMEOUT_S)
        os.close(write)
        os.close(read)
