"""The shipped example policies and their hooks, put to work in a test; and systemctl as these hooks call it.

An example is taken as it is shipped, but for the texts that a test replaces in it (paths, addresses, durations),
each of which must be there. ``ServiceManager`` stands for systemd where there is none: it runs real processes,
outside of every hook, and knows no more of systemctl than the hooks use.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from harness import CHECKOUT, PATIENCE
from hook_shells import SHIPPED_HOOKS

HOOKS = "/etc/scheduled-events-agent/hooks"
"""Where the examples have their hooks."""

_SYSTEMCTL = """#!{python} -IS
import json, socket, sys
with socket.create_connection(("127.0.0.1", {port})) as connection, connection.makefile("rw") as stream:
    stream.write(json.dumps(sys.argv[1:]) + "\\n")
    stream.flush()
    code, text = json.loads(stream.readline())
if text:
    print(text, file=sys.stderr if code else sys.stdout)
sys.exit(code)
"""


def copy_hooks(directory: Path) -> Path:
    """Copy the shipped hooks to ``directory``/hooks: the checkout may stand where everybody may write."""
    return Path(shutil.copytree(SHIPPED_HOOKS, directory / "hooks"))


def example(name: str, hooks: Path, endpoint: str, replacements: Mapping[str, str]) -> str:
    """A shipped policy, with these texts replaced, for a simulated endpoint."""
    text = (CHECKOUT / "config" / "examples" / name).read_text(encoding="utf-8")
    for old, new in {HOOKS: str(hooks), **replacements}.items():
        assert old in text, f"{name} does not hold {old!r}"
        text = text.replace(old, new)
    return f"{text}\nimds: {{endpoint: '{endpoint}', poll_interval: 250ms}}\nagent: {{listen: '127.0.0.1:0'}}\n"


@dataclass(frozen=True)
class Unit:
    """A service: what it runs, as whom, and the signal that stops it."""

    run: Sequence[str]
    user: str | None = None
    stop_signal: int = signal.SIGTERM
    is_mixed: bool = False
    """KillMode=mixed: only the main process gets the signal, as PostgreSQL's units have it."""


@dataclass(frozen=True)
class Call:
    """One call of systemctl, and when it was answered."""

    arguments: tuple[str, ...]
    answered_at: float


class ServiceManager:
    """Runs units when the ``systemctl`` in ``directory`` asks it to, which belongs first on a hook's PATH."""

    def __init__(self, directory: Path, units: Mapping[str, Unit]) -> None:
        self.directory = directory
        self.calls: list[Call] = []
        self.log = directory / "units.log"
        self.states: dict[str, str] = {}  # for systemctl, until the unit is stopped; else active or inactive
        self.passing: dict[str, list[str]] = {}  # states that systemctl sees before the others, each once
        self.disabled: set[str] = set()
        self._units = units
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started: dict[str, str] = {}
        self._orphans: set[psutil.Process] = set()  # maybe: systemd would end them with their main process
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o755)
        systemctl = self.directory / "systemctl"
        port = self._listener.getsockname()[1]
        systemctl.write_text(_SYSTEMCTL.format(python=sys.executable, port=port), encoding="utf-8")
        systemctl.chmod(0o755)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with socket.create_connection(self._listener.getsockname()):  # ends the thread
            pass
        self._thread.join(PATIENCE)
        self._listener.close()
        for name in self._units:
            self.power_off(name)
        for process in self._orphans:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def start(self, name: str) -> None:
        """Start a unit, unless it runs."""
        with self._lock:
            if not self._runs(name):
                unit = self._units[name]
                self._started[name] = datetime.now(UTC).isoformat()
                with self.log.open("ab") as log:
                    self._processes[name] = subprocess.Popen(
                        unit.run, user=unit.user, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log
                    )

    def stop(self, name: str) -> None:
        """Stop a unit, if it runs: its processes get the signal; what outlives the first one is killed."""
        unit = self._units[name]
        self._end(name, lambda process: process.send_signal(unit.stop_signal), is_mixed=unit.is_mixed)

    def power_off(self, name: str) -> None:
        """End a unit as a power cut does."""
        self._end(name, psutil.Process.kill)

    def hang(self, name: str) -> None:
        """Have a unit, if it runs, be as on a machine that is gone: it neither answers nor rejects."""
        with self._lock:
            if self._runs(name):
                for process in self._tree(name):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.suspend()

    def _end(self, name: str, first: Callable[[psutil.Process], None], *, is_mixed: bool = False) -> None:
        with self._lock:
            if self._runs(name):
                processes = self._tree(name)
                for process in processes[:1] if is_mixed else processes:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        first(process)
                self._processes[name].wait(PATIENCE)
                for process in processes:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                psutil.wait_procs(processes, PATIENCE)

    def _tree(self, name: str) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self._processes[name].pid)
            return [top, *top.children(recursive=True)]
        return []

    def runs(self, name: str) -> bool:
        with self._lock:
            return self._runs(name)

    def _runs(self, name: str) -> bool:
        return name in self._processes and self._processes[name].poll() is None

    def _state(self, name: str) -> str:
        if self.passing.get(name):
            return self.passing[name].pop(0)
        return self.states.get(name) or ("active" if self.runs(name) else "inactive")

    def _control_group(self, name: str) -> str:
        """A folder with the unit's processes, as seen from where the kernel has such folders."""
        if not self.runs(name):
            return ""
        folder = self.directory / f"{name}.cgroup"
        folder.mkdir(exist_ok=True)
        (folder / "cgroup.procs").write_text("".join(f"{process.pid}\n" for process in self._tree(name)))
        return "/" + os.path.relpath(folder, "/sys/fs/cgroup")

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection, connection.makefile("rw", encoding="utf-8") as stream:
                line = stream.readline()
                if not line:
                    return
                arguments = json.loads(line)
                answer = self._do(arguments)
                self.calls.append(Call(tuple(arguments), time.monotonic()))
                stream.write(json.dumps(answer) + "\n")
                stream.flush()

    def _do(self, arguments: list[str]) -> tuple[int, str]:  # a flat list of cases
        verb, *options, name = arguments
        is_known = name in self._units
        if verb == "show" and not is_known:
            return 0, "LoadState=not-found\nActiveState=inactive"
        if not is_known:
            return 5, f"Unit {name} not found."
        match [verb, *options]:
            case ["start"]:
                self.start(name)
            case ["stop"]:
                self.stop(name)
                self.states.pop(name, None)
            case ["show", "--property=LoadState,ActiveState"]:
                return 0, f"LoadState=loaded\nActiveState={self._state(name)}"
            case ["show", "--property=ActiveEnterTimestamp", "--value"]:
                return 0, self._started.get(name, "")
            case ["show", "--property=MainPID", "--value"]:
                return 0, str(self._processes[name].pid) if self.runs(name) else "0"
            case ["show", "--property=ControlGroup", "--value"]:
                return 0, self._control_group(name)
            case ["is-enabled", "--quiet"]:
                return (1 if name in self.disabled else 0), ""
            case ["kill", "--kill-who=main", option] if option.startswith("--signal="):
                if not self.runs(name):
                    return 1, f"Failed to kill unit {name}: no such process"
                self._orphans.update(self._tree(name)[1:])
                self._processes[name].send_signal(signal.Signals[f"SIG{option.removeprefix('--signal=')}"])
            case _:
                return 64, f"the stand-in for systemctl does not know {arguments}"
        return 0, ""
