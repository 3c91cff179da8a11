"""The subjects of the measurement: the agent at any pace, or a bare loop."""

import os
import platform
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from harness import Agent, installed_environment

from benchmarks.report import SIDES
from scheduled_events_agent import __version__
from scheduled_events_agent.simulator import Simulator

OTHERS = ["vm-2", *(f"production-web_{number:06}" for number in range(99))]
# A shell's own kill: no program is started beside the shell.
HOOK = ["/bin/sh", "-c", f"kill -USR1 {os.getpid()}"]
# Events that a user asked for are approved at once, a redeployment has a hook, anything else is watched.
RULES: list[dict[str, Any]] = [
    {"name": "user", "when": {"source": "User"}, "approve": "immediately", "shared": "any"},
    {"name": "drain", "when": {"type": "Redeploy"}, "prepare": ["drain"], "approve": "when-prepared"},
    {"name": "watch", "approve": "never"},
]
# As installed but for the pace, and for how long the journal is kept. A short one is also pruned more often.
PACED = """
import gc
import sys
from datetime import timedelta

gc.disable()  # as main does, which would import these modules
from scheduled_events_agent.cli import main
from scheduled_events_agent.daemon.poller import Poller
from scheduled_events_agent.engine import maintenance

interval, keep = map(float, (sys.argv.pop(1), sys.argv.pop(1)))
maintenance.KEEP_JOURNAL, maintenance.TIDY_SECONDS = timedelta(keep), min(60.0, keep * 86400 / 90)
poll = Poller._poll
Poller._poll = lambda *arguments: min(interval, poll(*arguments))
sys.exit(main())
"""


class Side(Agent):
    """The agent as it is installed, or a bare loop."""

    def __init__(
        self, kind: str, directory: Path, simulator: Simulator, interval: float, keep_days: float = 90
    ) -> None:
        """``interval``: seconds between two polls, 1 at most. ``keep_days``: how long the journal is kept."""
        super().__init__(directory, simulator.endpoint())
        self.kind = kind
        self.simulator = simulator
        self.interval = interval
        self._keep_days = keep_days
        self.write_policy(imds={"poll_interval": "1s"}, rules=RULES, hooks={"drain": {"run": HOOK}})
        self.environment = installed_environment()

    def command(self, *arguments: str) -> list[str]:
        if self.kind != "agent":
            loop = [sys.executable, "-m", "benchmarks.bare_loop", self.kind, self.endpoint]
            return [*loop, str(self.interval), *HOOK]
        if arguments[0] != "run":
            return super().command(*arguments)
        return [sys.executable, "-c", PACED, str(self.interval), str(self._keep_days), *arguments]

    def resident_mib(self) -> float:
        return float(psutil.Process(self.process.pid).memory_info().rss / 2**20)

    def cpu_ms(self) -> float:
        """User and system time; psutil knows no less than 10 ms."""
        if sys.platform == "win32":
            raise NotImplementedError
        clock = (~self.process.pid << 3) | 2  # as clock_getcpuclockid(3) names it
        return 1000 * time.clock_gettime(clock)

    def readings(self) -> tuple[float, int, int]:
        """CPU in ms, how often its threads have gone to sleep, polls."""
        threads = [psutil.Process(thread.id) for thread in psutil.Process(self.process.pid).threads()]
        sleeps = sum(thread.num_ctx_switches().voluntary for thread in threads)
        return self.cpu_ms(), sleeps, self.simulator.polls()

    def cpu_ms_to_first_poll(self) -> float:
        self.start(is_awaited=False)
        self.simulator.wait_polls(1)
        used = self.cpu_ms()
        self.process.terminate()  # after a kill, the agent would check its state file first
        self.wait_exit()
        return used

    def start_polling(self) -> None:
        """Returns when it has polled twice; raises RuntimeError, with what it wrote, at once if it ends."""
        goal = self.simulator.polls() + 2
        self.start(is_awaited=False)
        self.wait_until(lambda: self.simulator.polls() >= goal or self.process.poll() is not None, "it had polled")
        if self.process.poll() is not None:
            code = self.wait_exit()  # and for the last that it wrote
            raise RuntimeError(f"exit code {code}\n{''.join(self.history)}")

    def announce(self, type_: Any, vms: Sequence[str] = (), source: Any = "Platform") -> str:
        """Have an event in the document until ``simulator.end``; returns its id."""
        times: dict[str, Any] = {"notice_seconds": 86400.0, "start_delay_seconds": 86400.0}
        return self.simulator.schedule(type_, vms=vms, source=source, **times)

    def ms_to(self, act: str) -> float:
        """From the document with an event to its approval, or to the start of its hook; then the event is over."""
        if sys.platform == "win32":
            raise NotImplementedError
        happenings = len(self.simulator.history())
        event = self.announce("Redeploy") if act == "hook" else self.announce("Reboot", source="User")
        if act == "hook":
            assert signal.sigtimedwait([signal.SIGUSR1], 60), "no hook was started"
            hook_at = datetime.now(UTC)
        if act == "approval" or self.kind == "agent":  # what the agent approves too late would be rejected
            self.simulator.wait_approved(event)
        at = {happening.kind: happening.at for happening in self.simulator.history()[happenings:]}
        self.simulator.end(event)
        return 1000 * ((hook_at if act == "hook" else at["approved"]) - at["polled"]).total_seconds()


@contextmanager
def open_sides(interval: float, kinds: Sequence[str] = SIDES, keep_days: float = 90) -> Iterator[list[Side]]:
    """Each with a directory and a simulator of its own."""
    with TemporaryDirectory(prefix="scheduled-events-bench-") as directory, ExitStack() as stack:
        sides = []
        for kind in kinds:
            simulator = stack.enter_context(Simulator(others=OTHERS, rate_limit=None, clock=time.time))
            side = Side(kind, Path(directory) / kind, simulator, interval, keep_days)
            sides.append(stack.enter_context(closing(side)))
        yield sides


def describe_machine() -> str:
    """For the head of a table, or its foot."""
    machine = f"{os.cpu_count()} cores, {platform.platform()}, Python {platform.python_version()}"
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, load average {psutil.getloadavg()[0]:.1f}"
    return f"agent {__version__}, {machine}; {now}"
