"""A program under measurement: its CPU time and memory as the kernel counts them. Linux only."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import psutil

_ROOT = Path(__file__).parent.parent
_UNIT = _ROOT / "systemd" / "scheduled-events-agent.service"
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """Runs in the new process: a benchmark that is killed leaves no agent behind."""
    if _LIBC is not None and sys.platform != "win32":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Program:
    """A Python program that runs until the ``with`` block ends."""

    def __init__(self, arguments: Sequence[str], log: Path, cache: Path) -> None:
        """``cache`` is where compiled modules are kept: an installed agent has them, whatever this shell says."""
        self._log = log
        environment = {**os.environ, **_of_the_unit(), "PYTHONPYCACHEPREFIX": str(cache)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with log.open("ab") as stream:
            self.executed_at = time.monotonic()
            self._process = psutil.Popen(
                [sys.executable, *arguments],
                cwd=_ROOT,
                env=environment,
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
        """How many file descriptors it has."""
        return self._process.num_fds() if sys.platform != "win32" else 0

    def threads(self) -> int:
        """How many it has."""
        return self._process.num_threads()

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


def _of_the_unit() -> dict[str, str]:
    """The environment that the agent's unit gives it."""
    lines = _UNIT.read_text(encoding="utf-8").splitlines()
    words = [word for line in lines if line.startswith("Environment=") for word in line[12:].split()]
    return dict(word.split("=", 1) for word in words)
