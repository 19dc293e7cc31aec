"""A headless Chromium, where one is installed, spoken to over two pipes: no package beside the browser is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell")


def find_chromium() -> str | None:
    """The path of a Chromium, or ``None``."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One page of the browser, by the Chrome DevTools Protocol: a JSON object and a zero byte, each way."""

    def __init__(self, writing: int, reading: int) -> None:
        self._to, self._from = os.fdopen(writing, "wb"), os.fdopen(reading, "rb")
        self._sent, self._session = 0, ""
        self.problems: list[str] = []
        """Errors and warnings of the console, and exceptions that nothing caught."""
        self.requests: list[str] = []
        """Addresses that were asked for."""
        self._loader = ""
        """Of the document that is there: each navigation has one of its own."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol. Raises ``RuntimeError`` for what the browser refuses."""
        self._sent += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._sent, "method": method, "params": parameters, **session}
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self._sent:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result

    def open(
        self, page: Path | str, *, width: int, height: int = 800, dark: bool = False, mobile: bool = False
    ) -> None:
        """Show a file, or an address, in a window of that many CSS pixels, and wait until it has been drawn."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        address = page if isinstance(page, str) else page.absolute().as_uri()
        loader = self.call("Page.navigate", url=address)["loaderId"]
        while self._loader != loader:  # until then what is evaluated may be so in the document before
            self._next()
        loaded = "document.readyState === 'complete' ? done() : addEventListener('load', done)"
        frames = "requestAnimationFrame(() => requestAnimationFrame(() => requestAnimationFrame(yes)))"
        self.evaluate(f"new Promise((yes) => {{ const done = () => {frames}; {loaded} }})")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, or of the promise that it is."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def screenshot(self, path: Path, *, top: int = 0, height: int = 800) -> None:
        """Write a PNG of a part of the page, ``top`` pixels from its beginning."""
        width = self.evaluate("innerWidth")
        clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(picture["data"]))

    def end(self) -> None:
        """End the browser."""
        self._session = ""
        with contextlib.suppress(RuntimeError):  # it may be gone before it has answered
            self.call("Browser.close")

    def _next(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._from.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("the browser has ended")
            data += byte
        message: dict[str, Any] = json.loads(data)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, content: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = content["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif event == "Log.entryAdded" and content["entry"]["level"] in ("error", "warning"):
            self.problems.append(content["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and content["type"] in ("error", "warning", "assert"):
            self.problems.append(str(content["args"]))
        elif event == "Page.frameNavigated" and "parentId" not in content["frame"]:
            self._loader = content["frame"]["loaderId"]
        elif event == "Network.requestWillBeSent":
            self.requests.append(content["request"]["url"])


@contextmanager
def browser(executable: str, profile: Path) -> Iterator[Tab]:
    """A tab of a browser that lives as long as the context; ``profile`` is a folder for what it writes."""
    command_out, command_in = os.pipe()
    answer_out, answer_in = os.pipe()

    def hand_over() -> None:  # the browser reads commands from descriptor 3 and writes answers to 4
        kept = (os.dup(command_out), os.dup(answer_in))
        os.dup2(kept[0], 3)
        os.dup2(kept[1], 4)

    process = subprocess.Popen(
        [executable, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
         f"--user-data-dir={profile}", "--no-first-run", "--disable-dev-shm-usage"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=hand_over, close_fds=False,
    )  # fmt: skip
    os.close(command_out)
    os.close(answer_in)
    try:
        tab = Tab(command_in, answer_out)
        yield tab
        tab.end()  # it ends its own processes, which would go on writing into the profile
        process.wait(timeout=120)
    finally:
        process.kill()
        process.wait()
