"""A real browser without a window, spoken to through a pipe: no driver, no port, nothing to download but itself.

This file has the process and the protocol, and nothing about the pages that are looked at. Invariant: the page can
do what it can do for a user, and no more; only scripts of the test itself bypass the page's own policy.
"""

import sys

if sys.platform == "win32":
    raise ImportError("the browser comes from Debian's packages")

import base64
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apt

PROGRAM = "chromium-headless-shell"
PATIENCE = 60.0


def install() -> str:
    """The browser's path; from Debian's archive if it is not here yet, with letters for most scripts."""
    return apt.need(PROGRAM, PROGRAM, "fonts-dejavu-core", "fonts-noto-color-emoji")


class Tab:
    """One page. What the browser complains about is in ``complaints``."""

    def __init__(self, browser: "Browser", session: str) -> None:
        self._browser = browser
        self._session = session
        self.complaints: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol."""
        return self._browser.call(method, parameters, self._session)

    def open(self, url: str) -> None:
        """Load a page; returns when it and its own scripts have been run."""
        loader = self.call("Page.navigate", url=url)
        assert "errorText" not in loader, (url, loader["errorText"])
        # By its loader: the same of the page before may come late.
        loaded = {"name": "load", "loaderId": loader["loaderId"]}
        self._browser.wait_event(self._session, "Page.lifecycleEvent", loaded)

    def look(self, width: int, height: int = 800, *, is_dark: bool = False, has_script: bool = True) -> None:
        """Choose the screen and the user's preferences; call it before ``open``."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not has_script)

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Click on the first such element with the mouse."""
        box = f"document.querySelector({selector!r}).getBoundingClientRect()"
        x, y = self.ask(
            f"(() => {{ const {{x, y, width, height}} = {box}; return [x + width / 2, y + height / 2]; }})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def wait(self, expression: str) -> Any:
        """The value of an expression as soon as it is a true one."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if value := self.ask(expression):
                return value
            time.sleep(0.1)
        raise AssertionError(f"never true: {expression}")

    def wait_complaints(self, count: int) -> None:
        """Wait until the browser has complained so often; it does so when it comes to it."""
        deadline = time.monotonic() + PATIENCE
        while len(self.complaints) < count:
            assert time.monotonic() < deadline, self.complaints
            self.ask("1")  # with the answer comes what the browser had to say before
            time.sleep(0.05)

    def screenshot(self, path: Path, last: str = "") -> None:
        """The whole page, as long as it is; ``last``: down to the end of the first such element, and a margin."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        height = min(size["height"], 6000)
        if last:
            height = 16 + self.ask(f"document.querySelector({last!r}).getBoundingClientRect().bottom + scrollY")
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height, "scale": 1}
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))


class Browser:
    """The process; for one thread."""

    def __init__(self, process: "subprocess.Popen[bytes]", to_browser: int, from_browser: int, log: Path) -> None:
        self._process = process
        self._log = log
        self._to, self._from = to_browser, from_browser
        self._number = 0
        self._buffer = b""
        self._events: list[dict[str, Any]] = []
        self._tabs: dict[str, Tab] = {}

    def tab(self) -> Tab:
        """A fresh page that shares nothing with another."""
        context = self.call("Target.createBrowserContext", {})["browserContextId"]
        target = self.call("Target.createTarget", {"url": "about:blank", "browserContextId": context})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        tab = self._tabs[session] = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            tab.call(f"{domain}.enable")
        tab.call("Page.setLifecycleEventsEnabled", enabled=True)
        return tab

    def call(self, method: str, parameters: dict[str, Any], session: str = "") -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        number = self._number
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def wait_event(self, session: str, method: str, parameters: dict[str, str]) -> None:
        """Wait for an event with these parameters among its own."""

        def has_come() -> bool:
            return any(
                event["method"] == method
                and event.get("sessionId") == session
                and parameters.items() <= event["params"].items()
                for event in self._events
            )

        while not has_come():
            self._receive()

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], PATIENCE)
            data = os.read(self._from, 1 << 20) if ready else b""
            assert data, f"the browser has nothing to say any more; {self._end_of_log()}"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._events.append(message)
            self._note(message)
        return message

    def _end_of_log(self) -> str:
        ended = self._process.poll()
        said = self._log.read_text(errors="replace")[-2000:]
        state = "it runs" if ended is None else f"it has ended with {ended}"
        return f"{state}, and has logged:\n{said}"

    def _note(self, event: dict[str, Any]) -> None:
        tab = self._tabs.get(event.get("sessionId", ""))
        if tab is None:
            return
        told = event["params"]
        if event["method"] == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            tab.complaints.append(f"{told['entry']['source']}: {told['entry']['text']}")
        elif event["method"] == "Runtime.exceptionThrown":
            tab.complaints.append(f"exception: {told['exceptionDetails']}")
        elif event["method"] == "Audits.issueAdded" and "ontentSecurityPolicy" in told["issue"]["code"]:
            tab.complaints.append(f"policy: {told['issue']['details']}")
        elif event["method"] == "Page.javascriptDialogOpening":
            tab.complaints.append(f"dialog: {told['message']}")


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser as long as the context lasts."""
    program = install()
    read_by_it, to_it = os.pipe()
    from_it, written_by_it = os.pipe()

    def pass_on() -> Callable[[], None]:
        def place() -> None:  # the protocol has 3 to be read and 4 to be written by the browser
            one, two = os.dup(read_by_it), os.dup(written_by_it)
            os.dup2(one, 3)
            os.dup2(two, 4)

        return place

    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home,
        tempfile.NamedTemporaryFile(prefix="chromium-", suffix=".log") as log,
    ):
        process = subprocess.Popen(
            [
                program, "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--force-color-profile=srgb",
                "--ignore-certificate-errors", f"--user-data-dir={home}", "about:blank",
            ],
            preexec_fn=pass_on(),  # noqa: PLW1509 - one thread
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )  # fmt: skip
        os.close(read_by_it)
        os.close(written_by_it)
        try:
            yield Browser(process, to_it, from_it, Path(log.name))
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(to_it)
            os.close(from_it)
