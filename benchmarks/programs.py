"""Programs under measurement, an agent as it is installed among them, and what the kernel counts. Linux only."""

import ctypes
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self

import psutil

from agent import __version__

_ROOT = Path(__file__).parent.parent
_UNIT = _ROOT / "systemd" / "scheduled-events-agent.service"
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1
# ``run`` at a pace that no policy allows; the journal is kept for so many seconds, and pruned a ninetieth of that
# apart, as of 90 days once a day.
_FAST = """
import sys
from datetime import timedelta
from msgspec.structs import replace
from agent.cli import main, run
from agent.engine import upkeep

interval, keep = map(float, (sys.argv.pop(1), sys.argv.pop(1)))
upkeep.KEEP_JOURNAL, upkeep.TIDY_SECONDS = timedelta(seconds=keep), keep / 90
load = run.load_policy

def load_fast(path):
    loaded = load(path)
    imds = replace(loaded.settings.imds, poll_interval=interval)
    return replace(loaded, settings=replace(loaded.settings, imds=imds))

run.load_policy = load_fast
sys.exit(main(sys.argv[1:]))
"""


def environment(cache: Path) -> dict[str, str]:
    """This one, with what the agent's unit sets; ``cache`` keeps compiled modules, whatever this shell says."""
    lines = _UNIT.read_text(encoding="utf-8").splitlines()
    words = [word for line in lines if line.startswith("Environment=") for word in line[12:].split()]
    ours = {**os.environ, **dict(word.split("=", 1) for word in words), "PYTHONPYCACHEPREFIX": str(cache)}
    ours.pop("PYTHONDONTWRITEBYTECODE", None)
    return ours


def _end_with_parent() -> None:
    """Runs in the new process: a benchmark that is killed leaves no agent behind."""
    if _LIBC is not None and sys.platform != "win32":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Program:
    """A Python program that runs until the ``with`` block ends."""

    def __init__(self, arguments: Sequence[str], log: Path, cache: Path) -> None:
        self._log = log
        with log.open("ab") as stream:
            self._process = psutil.Popen(
                [sys.executable, *arguments],
                cwd=_ROOT,
                env=environment(cache),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                preexec_fn=_end_with_parent,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except psutil.TimeoutExpired:
            self.kill()
        if kind is not None:
            print(f"{self._log} ends:\n{self._log.read_text(errors='replace')[-4000:]}", file=sys.stderr)

    def kill(self) -> None:
        """End it as a power cut would."""
        self._process.kill()
        self._process.wait()

    def hang_up(self) -> None:
        """Send SIGHUP."""
        if sys.platform != "win32":
            self._process.send_signal(signal.SIGHUP)

    def open_files(self) -> int:
        return self._process.num_fds() if sys.platform != "win32" else 0

    def threads(self) -> int:
        return self._process.num_threads()

    def wake_ups(self) -> float:
        """How often its threads have gone to sleep, and so were woken."""
        found = 0
        for status in Path(f"/proc/{self._process.pid}/task").glob("*/status"):
            (count,) = re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", status.read_text(), re.MULTILINE)
            found += int(count)
        return found

    def cpu_seconds(self) -> float:
        """User and system time of all threads that there are or were, finer than psutil's."""
        if sys.platform == "win32" or _LIBC is None:
            raise NotImplementedError
        clock = ctypes.c_int()
        code = _LIBC.clock_getcpuclockid(self._process.pid, ctypes.byref(clock))
        if code:
            raise OSError(code, os.strerror(code))
        return time.clock_gettime(clock.value)

    def resident_mib(self) -> float:
        """What of it is in memory now, shared libraries included."""
        return self._process.memory_info().rss / 2**20


class Agent:
    """An agent of one VM, in a directory of its own."""

    def __init__(
        self,
        directory: Path,
        cache: Path,
        imds: Mapping[str, object],
        rules: Sequence[Mapping[str, Any]],
        hooks: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """``cache`` keeps the compiled modules; ``imds``, ``rules`` and ``hooks`` are parts of its policy."""
        self.state_dir = directory / "state"
        self.log = directory / "agent.log"
        self._cache = cache
        self._address = ""  # of its pages, once they were asked for
        self._policy_file = directory / "policy.yaml"
        listening = {"listen": "127.0.0.1:0", "log": {"format": "json"}}
        self._policy = {"imds": imds, "agent": listening, "rules": rules, "hooks": hooks}
        self.write_policy()

    def write_policy(self, **parts: object) -> None:
        """Write the policy, with other ``parts`` if they are given."""
        self._policy_file.write_text(json.dumps({**self._policy, **parts}), encoding="utf-8")  # JSON is YAML

    def options(self, command: str) -> list[str]:
        """What a command needs to be about this agent."""
        config, state = ["--config", str(self._policy_file)], ["--state-dir", str(self.state_dir)]
        return {"run": config + state, "check": config, "status": state, "history": state}.get(command, [])

    def start(self) -> Program:
        """As it is installed."""
        return self._start(["-m", "agent"])

    def start_fast(self, interval_seconds: float, keep_seconds: float = 90 * 86400.0) -> Program:
        return self._start(["-c", _FAST, str(interval_seconds), str(keep_seconds)])

    def _start(self, command: list[str]) -> Program:
        self._address = ""
        self.log.unlink(missing_ok=True)
        return Program([*command, "run", *self.options("run")], self.log, self._cache)

    def get(self, page: str) -> str:
        """A page of its web server. Raises OSError if there is none yet."""
        if not self._address:
            found = re.search(r'"message":"agent started".*"listen":"([^"]+)"', self.log.read_text("utf-8"))
            if not found:
                raise ConnectionRefusedError("it has not started")
            self._address = found[1]
        return fetch(f"http://{self._address}{page}")


def fetch(url: str) -> str:
    """Fetch a page, which may say 503: it is not ready."""
    try:
        with urllib.request.urlopen(url, timeout=60.0) as answer:
            text: str = answer.read().decode()
            return text
    except urllib.error.HTTPError as refusal:
        with refusal:
            text = refusal.read().decode(errors="replace")
        if refusal.code != HTTPStatus.SERVICE_UNAVAILABLE:
            raise
        return text


def describe_machine() -> str:
    """For the head of a table."""
    return (
        f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}, "
        f"agent {__version__}; {datetime.now(UTC):%Y-%m-%d}, load average at the end {psutil.getloadavg()[0]:.1f}"
    )
