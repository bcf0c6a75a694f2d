"""A real browser for tests: headless Chromium, spoken to over two pipes in its DevTools protocol.

Pipes instead of a socket, so that no package is needed and no port is opened. Every message is JSON and ends in a zero
byte; file 3 of the browser is what we write, file 4 what we read.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_STARTER = """
import os, sys
commands, answers = os.dup(int(sys.argv[1])), os.dup(int(sys.argv[2]))
high = [os.dup2(commands, 30), os.dup2(answers, 31)]
os.dup2(30, 3), os.dup2(31, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
    named = os.environ.get("FLATOUT_CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page. Keeps what a page should never cause: dialogs, errors, requests, broken policy."""

    def __init__(self, program: str, profile: Path) -> None:
        ours, theirs = os.pipe(), os.pipe()
        words = [
            program,
            "--headless=new",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            "--no-first-run",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--hide-scrollbars",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _STARTER, str(ours[0]), str(theirs[1]), *words],
            pass_fds=(ours[0], theirs[1]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self.write_end, self.read_end = ours[1], theirs[0]
        self.buffer, self.number, self.session = b"", 0, None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        try:
            self.session = None
            self.send("Browser.close")
        except (OSError, RuntimeError, TimeoutError):
            self.process.kill()
        self.process.wait(timeout=600)
        os.close(self.write_end)
        os.close(self.read_end)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {} if self.session is None else {"sessionId": self.session}
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Page.javascriptDialogOpening":
            self.number += 1  # a dialog stops everything until it is answered
            answer = {"id": self.number, "method": "Page.handleJavaScriptDialog", "params": {"accept": False}}
            os.write(self.write_end, json.dumps({**answer, "sessionId": self.session}).encode() + b"\0")
        self.events.append(event)

    def _receive(self, seconds: float = 600.0) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            if not select.select([self.read_end], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            part = os.read(self.read_end, 2**20)
            if not part:
                raise RuntimeError("the browser has ended")
            self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(line)

    # --- what a person would do ---

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False, touch: bool = False) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.send("Emulation.setTouchEmulationEnabled", enabled=touch)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 600.0) -> None:
        until = time.monotonic() + seconds
        while not self.run(expression):
            assert time.monotonic() < until, f"never true: {expression}"
            time.sleep(0.05)

    def settle(self) -> None:
        """Until what was asked for is painted."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def box(self, selector: str) -> dict[str, float]:
        """Where an element is on the screen, after scrolling it into view."""
        quoted = json.dumps(selector)
        self.run(f"document.querySelector({quoted}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
        self.settle()
        return self.run(f"document.querySelector({quoted}).getBoundingClientRect().toJSON()")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.mouse("mouseMoved", *start)
        self.mouse("mousePressed", *start, button="left", clickCount=1, buttons=1)
        for part in (0.3, 0.6, 1.0):
            at = [a + part * (b - a) for a, b in zip(start, end, strict=True)]
            self.mouse("mouseMoved", at[0], at[1], button="left", buttons=1)
        self.mouse("mouseReleased", *end, button="left", clickCount=1)
        self.settle()

    def double_click(self, x: float, y: float) -> None:
        for count in (1, 2):
            self.mouse("mousePressed", x, y, button="left", clickCount=count, buttons=1)
            self.mouse("mouseReleased", x, y, button="left", clickCount=count)
        self.settle()

    def key(self, key: str, **more: Any) -> None:
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **more)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"clip": {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 14000), "scale": 1}}
        picture = self.send("Page.captureScreenshot", captureBeyondViewport=whole, **(clip if whole else {}))
        path.write_bytes(base64.b64decode(picture["data"]))

    def print_page(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.printToPDF", printBackground=False)["data"]))

    # --- what went wrong ---

    def heard(self, method: str) -> list[dict[str, Any]]:
        self.run("0")  # whatever was on its way has arrived
        return [event["params"] for event in self.events if event.get("method") == method]

    def complaints(self) -> list[str]:
        """Dialogs, exceptions, console errors and violations of the policy."""
        found = [f"dialog: {event['message']}" for event in self.heard("Page.javascriptDialogOpening")]
        found += [f"exception: {event['exceptionDetails']}" for event in self.heard("Runtime.exceptionThrown")]
        found += [
            f"console: {event['args']}" for event in self.heard("Runtime.consoleAPICalled") if event["type"] == "error"
        ]
        found += [
            f"log: {event['entry']['text']}"
            for event in self.heard("Log.entryAdded")
            if event["entry"]["level"] == "error"
        ]
        return found

    def requests(self) -> list[str]:
        return [event["request"]["url"] for event in self.heard("Network.requestWillBeSent")]
