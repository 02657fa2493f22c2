"""Drives Chromium by its DevTools protocol over two pipes, for the tests of the page.

Messages are JSON objects, each ended by a NUL. The browser reads them from its file descriptor 3
and writes them to 4.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
)
PATIENCE = 120  # seconds to wait for an answer; no test asserts on time


def find_browser() -> str | None:
    """Returns the path of a Chromium on PATH, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One browser with one tab; a context that ends it.

    `errors` are the uncaught exceptions and the errors that the console showed so far.
    """

    def __init__(self, *, width: int = 1280, height: int = 800) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []  # addresses that the page asked for
        self._count, self._buffer = 0, b""
        self._profile = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        command = [
            find_browser() or NAMES[0],
            *FLAGS,
            f"--user-data-dir={self._profile.name}",
            "about:blank",
        ]
        reads, self._to = os.pipe()
        self._from, writes = os.pipe()
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "bash", *command],
            pass_fds=(reads, writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, EOFError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol and returns its result; takes note of events."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._count:
            self._note(answer.get("method"), answer.get("params", {}))
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._from], [], [], PATIENCE)[0]:
                raise TimeoutError("the browser does not answer")
            if not (some := os.read(self._from, 1 << 20)):
                raise EOFError("the browser has ended")
            self._buffer += some
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: str | None, about: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            thrown = details.get("exception", {}).get("description", "")
            self.errors.append(f"{details['text']} {thrown}")
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
            self.errors.append(str([arg.get("value") for arg in about["args"]]))
        elif event == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(about["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])

    def open(self, path: Path, before: str = "") -> None:
        """Opens a file, after running the script `before`; returns when the page has loaded."""
        added = self.call("Page.addScriptToEvaluateOnNewDocument", source=before)
        self.call("Page.navigate", url=path.absolute().as_uri())
        loaded = "document.readyState === 'complete'"
        self.evaluate(f"new Promise(r => {loaded} ? r() : addEventListener('load', r))")
        self.call("Page.removeScriptToEvaluateOnNewDocument", **added)

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression, as JSON; waits for a promise."""
        found = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return found["result"].get("value")

    def press(self, key: str, *, code: int = 0, text: str = "", shift: bool = False) -> None:
        """Presses and releases a key, named as in KeyboardEvent.key."""
        about = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        kind = "keyDown" if text else "rawKeyDown"
        typed = {"text": text} if text else {}
        self.call("Input.dispatchKeyEvent", type=kind, **about, **typed)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, *, dark: bool = False, still: bool = False) -> None:
        """Emulates a reader who prefers dark colours, or no motion."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"}
        self.call("Emulation.setEmulatedMedia", features=[scheme, motion])

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def accessibility(self) -> list[dict[str, Any]]:
        """Returns role, name and value of each node that a screen reader sees, in order."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            {part: node.get(part, {}).get("value") for part in ("role", "name", "value")}
            for node in nodes
            if not node.get("ignored")
        ]
