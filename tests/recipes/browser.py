"""A browser for tests: headless Chromium, controlled through its debugging pipe."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# Seconds without an answer after which a test fails; the first start on a busy machine is slow.
PATIENCE = 120


def find_browser() -> str | None:
    """The program in $BROWSER_FOR_TESTS, or Chromium if it is installed; None otherwise."""
    wanted = os.environ.get("BROWSER_FOR_TESTS")
    return shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page; `events` are the browser's reports about it, such as errors."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self._received = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol and return its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self.events.append(answer)

    def open(self, path: Path, width: int, dark: bool) -> None:
        """Show a file in a window that is `width` pixels wide; narrow ones are those of telephones."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.events.clear()
        self.send("Page.navigate", url=path.absolute().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page; promises are awaited."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression of JavaScript is true."""
        end = time.monotonic() + PATIENCE / 3
        while time.monotonic() < end:
            if self.value(f"Boolean({condition})"):
                return
            time.sleep(0.05)
        raise AssertionError(f"it stays false: {condition}")

    def _receive(self) -> dict[str, Any]:
        """The next message of the browser."""
        while b"\0" not in self._received:
            block = os.read(self._answers, 1 << 16)
            assert block, "the browser has ended"
            self._received += block
        message, _, self._received = self._received.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def browser_page(program: str, profile: Path) -> Iterator[Page]:
    """A page of a browser that is started and stopped with it, and may fill a folder with its profile."""
    in_browser, requests = os.pipe()
    answers, out_browser = os.pipe()
    options = "--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run".split()
    # Chromium reads commands from descriptor 3 and answers on 4. `timeout` ends one that hangs.
    shell = f'exec timeout {PATIENCE} "$@" 3<&{in_browser} 4>&{out_browser}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", program, "--remote-debugging-pipe", *options]
        + [f"--user-data-dir={profile}"],
        pass_fds=(in_browser, out_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(in_browser)
    os.close(out_browser)
    try:
        yield Page(requests, answers)
    finally:
        process.terminate()
        process.wait()
        os.close(requests)
        os.close(answers)
