"""What is measured: an agent at any pace or a bare loop, with a metadata service of its own, and what it uses."""

import ctypes
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from harness import CHECKOUT, Agent, Answer, Endpoint, Request, document

from agent import __version__

PR_SET_PDEATHSIG = 1
FASTEST_SECONDS = 0.25  # that a policy allows
PATIENCE_SECONDS = 120.0
# What a user asked for is approved at once, a redeployment has a hook, anything else is watched.
RULES: list[dict[str, Any]] = [
    {"name": "user", "when": {"source": "User"}, "approve": "immediately", "shared": "any"},
    {"name": "drain", "when": {"type": "Redeploy"}, "prepare": ["drain"], "approve": "when-prepared"},
    {"name": "watch", "approve": "never"},
]
# As installed but for the pace, and for how long the journal is kept; it is pruned in the same proportion.
PACED = """
import sys
from datetime import timedelta
from msgspec.structs import replace
from agent.cli import main, run
from agent.engine import upkeep

interval, keep = map(float, (sys.argv.pop(1), sys.argv.pop(1)))
upkeep.KEEP_JOURNAL, upkeep.TIDY_SECONDS = timedelta(seconds=keep), keep / 90
load = run.load_policy

def load_paced(path):
    loaded = load(path)
    imds = replace(loaded.settings.imds, poll_interval=interval)
    return replace(loaded, settings=replace(loaded.settings, imds=imds))

run.load_policy = load_paced
sys.exit(main())
"""


class PacedAgent(Agent):
    """As it is installed, or faster than a policy allows; it ends with this process."""

    def __init__(
        self, directory: Path, endpoint: str, interval: float, keep_seconds: float = 90 * 86400.0
    ) -> None:
        super().__init__(directory, endpoint)
        self.interval, self._keep_seconds = interval, keep_seconds
        self.imds = {"endpoint": endpoint, "poll_interval": f"{max(FASTEST_SECONDS, interval):g}s"}
        prctl = ctypes.CDLL(None).prctl  # looked up here: a child of many threads may not load anything
        self.in_child = lambda: prctl(PR_SET_PDEATHSIG, 9)
        unit = (CHECKOUT / "systemd" / "scheduled-events-agent.service").read_text(encoding="utf-8").splitlines()
        words = [word for line in unit if line.startswith("Environment=") for word in line[12:].split()]
        self.environment = dict(word.split("=", 1) for word in words)

    def command(self, *arguments: str) -> list[str]:
        if arguments[0] != "run" or self.interval >= FASTEST_SECONDS:
            return super().command(*arguments)
        return [sys.executable, "-c", PACED, str(self.interval), str(self._keep_seconds), *arguments]

    def resident_mib(self) -> float:
        return float(psutil.Process(self.process.pid).memory_info().rss / 2**20)

    def cpu_ms(self) -> float:
        """User and system time; psutil knows no less than 10 ms."""
        if sys.platform == "win32":
            raise NotImplementedError
        clock = (~self.process.pid << 3) | 2  # as clock_getcpuclockid(3) names it
        return 1000 * time.clock_gettime(clock)


class Side(PacedAgent):
    """The agent or a bare loop, with a service of its own."""

    def __init__(self, kind: str, directory: Path, service: "Service", interval: float, hook: list[str]) -> None:
        super().__init__(directory, service.url, interval)
        self.service = service
        loop = [sys.executable, "-m", "benchmarks.bare_loop", kind, service.url, str(interval), *hook]
        self._loop = None if kind == "agent" else loop
        self.write_policy(imds=self.imds, rules=RULES, hooks={"drain": {"run": hook}})

    def command(self, *arguments: str) -> list[str]:
        return self._loop or super().command(*arguments)

    def readings(self) -> tuple[float, float, int]:
        """CPU in ms, how often its threads have gone to sleep, polls."""
        threads = [psutil.Process(thread.id) for thread in psutil.Process(self.process.pid).threads()]
        slept = sum(thread.num_ctx_switches().voluntary for thread in threads)
        return self.cpu_ms(), slept, self.service.polls

    def cpu_ms_to_first_poll(self) -> float:
        used: list[float] = []
        self.service.on_poll = lambda: used.append(self.cpu_ms())
        self.start(is_awaited=False)
        self.wait_polls(1)
        self.service.on_poll = lambda: None
        self.stop()
        return used[0]

    def wait_polls(self, count: int) -> None:
        """Wait for so many more."""
        goal = self.service.polls + count
        self.wait(lambda: self.service.polls >= goal, f"{count} more polls had come")

    def wait(self, test: Callable[[], bool], what: str) -> None:
        """Wait for news that make this true; raises TimeoutError, at once when the program has ended."""
        gives_up_at = time.monotonic() + PATIENCE_SECONDS
        with self.service.news:
            while not self.service.news.wait_for(test, 1.0):
                code = self.process.poll()
                if code is not None or time.monotonic() > gives_up_at:
                    raise TimeoutError(f"gave up waiting until {what}; exit code {code}\n{''.join(self.history)}")


class Service(Endpoint):
    """Serves one document as it is, and knows when. Times are ``time.monotonic``."""

    def __init__(self, news: threading.Condition) -> None:
        super().__init__()
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a program has ended amid a request
        self.news = news
        self._incarnation = 0
        self.served_at = 0.0
        """When the document of now was served for the first time; 0: it was not."""
        self.approved_at: dict[str, float] = {}
        self.on_poll: Callable[[], None] = lambda: None
        """Called before the answer."""

    def announce(self, *events: dict[str, Any]) -> None:
        """Serve these events, and no others, from now on."""
        with self.news:
            self._incarnation += 1
            self.body, self.served_at = document(*events, incarnation=self._incarnation), 0.0

    def answer(self, request: Request) -> Answer:
        with self.news:
            now, polls = time.monotonic(), self.polls
            answer = super().answer(request)
            if self.polls > polls:
                self.on_poll()
                self.served_at = self.served_at or now
            elif request.method == "POST":
                self.approved_at |= dict.fromkeys(self.approved[-1], now)
            self.news.notify_all()
        return answer


def compile_all() -> None:
    """As an installation does, so that no agent that is measured compiles."""
    subprocess.run([sys.executable, "-m", "compileall", "-q", "agent", "benchmarks"], cwd=CHECKOUT, check=False)


def print_table(*rows: Sequence[str]) -> None:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        others = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        print("  ".join((f"{name:<{widths[0]}}", *others)).rstrip())


def describe_machine() -> str:
    """For the head of a table."""
    return (
        f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}, "
        f"agent {__version__}; {datetime.now(UTC):%Y-%m-%d}, load average at the end {psutil.getloadavg()[0]:.1f}"
    )
