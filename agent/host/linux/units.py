"""Hooks that are systemd units: start one, wait for it, end it, judge its run; and the agent's own unit.

Asks systemd over D-Bus, and needs no privileges but a polkit rule that lets it start, stop and kill the unit.
Knows nothing of events, policy or hooks. The one invariant: a run is a success only if systemd says so and nothing
cut it short. Whatever is not known for certain is a failure.

A run that this process did not start is waited for, and never stopped; then the unit is started.

Three things together tell how a run ended: the result of the job that started it (a oneshot unit that is stopped
and ends with 0 looks like a success otherwise), the id of the invocation (nothing may have run), and the unit's
properties. The unit is held (RefUnit) meanwhile, or systemd would forget them at once.
"""

import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from agent.host.error import HostError
from agent.host.linux.bus import Bus, BusError
from agent.host.linux.files import account_name
from agent.host.linux.journal import read_journal
from agent.host.linux.process import ProcessTree
from agent.host.surroundings import OwnService

if sys.platform == "win32":
    raise ImportError("agent.host.linux is for Linux; import agent.host instead")

_SERVICE = "scheduled-events-agent.service"
_DEFAULT_DIRECTORY = "/run/scheduled-events-agent"
_ENDED = ("inactive", "failed")
# Services that go on when they have started, and those that systemd starts again when they end well.
_LASTING_TYPES = ("forking", "notify", "notify-reload", "dbus")
_LASTING_RESTARTS = ("always", "on-success")
_LOOK_SECONDS = 0.25
_LOST_SECONDS = 15.0  # a bus that is replaced is back much sooner
_STOP_SECONDS = 2.0  # an order to stop must not keep the hook's run from its other duties
_UNKNOWN = "how it ended is not known: systemd could not be asked in time"
_STOPPED = "stopped by another program or an operator before it was done"
_LEFT_ALONE = b"(it ran already and the agent did not start it: the agent waited for it, and did not stop it)\n"
_SIGKILL = 9
_EXITED = 1  # CLD_EXITED, as ExecMainCode has it

_REASONS = {
    "timeout": "it took longer than its own file allows (TimeoutStartSec=, RuntimeMaxSec=, TimeoutStopSec=)",
    "start-limit-hit": "it was started too often in a short time (StartLimitBurst= of the unit)",
}


def verdict(end: Mapping[str, Any], before: bytes, job: str | None, *others: str) -> tuple[int | None, str | None]:
    """How a unit's run ended that left the properties ``end``: exit code, and a phrase for what it does not tell.

    The code is 0 for success and nothing else, less than 0 for a signal, None if none says why it failed.
    ``before`` is the id of the invocation before the start was asked for, ``job`` the result of the job that was
    asked for (None if it was not seen), and ``others`` are those of the unit's other jobs meanwhile.
    """
    invocation, status = bytes(end["InvocationID"]), int(end["ExecMainStatus"])
    has_exited = end["ExecMainCode"] == _EXITED
    code = (status if has_exited else -status) or None
    if job is None:
        return None, _UNKNOWN
    if "canceled" in (job, *others):
        return code, _STOPPED
    if job == "dependency":
        return None, "not started: a unit that it needs failed"
    if not (end["ConditionResult"] and end["AssertResult"]):
        if not end["ConditionTimestamp"]:  # none was looked at: systemd has forgotten the run
            return None, _UNKNOWN
        if end["Result"] == "exec-condition":
            return None, "it was skipped: its ExecCondition= did not hold"
        return None, "it was skipped: a condition (Condition...=, Assert...=) of the unit did not hold"
    if end["Result"] != "success":
        if end["Result"] in ("exit-code", "signal", "core-dump") and code is not None:
            return code, None
        return None, _REASONS.get(end["Result"], f"systemd calls it a failure ({end['Result']})")
    if job not in ("done", "failed"):  # "failed" comes before a Restart= that went well
        return None, f"systemd did not start it: the result of the job is {job}"
    if invocation in (b"", before):
        return None, "it did not run"
    if not has_exited:
        if end["ExecMainCode"]:
            return code, None
        return None, "it has no main process by which to tell whether it was done (Type=, PIDFile=)"
    # A natural end begins with that of the main process.
    left_at, exited_at = end["ActiveExitTimestampMonotonic"], end["ExecMainExitTimestampMonotonic"]
    if end["InactiveExitTimestampMonotonic"] <= left_at < exited_at:
        return code, _STOPPED
    return 0, f"exit code {status}, which its unit takes for a success" if status else None


def unit_fault(name: str) -> str | None:
    """Why a hook could not start the unit, or not wait for it; None if nothing is known. Raises HostError."""
    with closing(Bus()) as bus:
        return _fault(name, bus.unit(name))


def _fault(name: str, unit: Mapping[str, Any]) -> str | None:
    if unit["LoadState"] != "loaded":
        return f"{name} cannot be started: {unit['LoadError'][1]} If it is new or changed: systemctl daemon-reload"
    if unit["Id"] != name:
        return f"{name} is another name of {unit['Id']}: use that one"
    if unit["RemainAfterExit"]:
        return f"{name} has RemainAfterExit=yes, so nothing tells when it is done: set it to no"
    if unit["Restart"] in _LASTING_RESTARTS:
        why = f"has Restart={unit['Restart']}"
    elif unit["Type"] in _LASTING_TYPES:
        why = f"has Type={unit['Type']}"
    elif unit["UnitFileState"].startswith("enabled") and unit["Type"] != "oneshot":
        why = "is started at boot"
    else:
        return None
    return (
        f"{name} {why}, so it is a server that runs on; as a hook it would never be done, and be stopped when its "
        "time is up: name a unit of Type=oneshot that starts or stops it"
    )


def environment_file(env: Mapping[str, str]) -> str:
    """The variables as systemd's EnvironmentFile= reads them, and a shell's ``.`` too: every text is data.

    Older versions of systemd refuse control characters other than tab and newline: each becomes a space. What is
    no character makes any version refuse the whole file: it becomes U+FFFD.
    """
    return "".join(f'{name}="{"".join(map(_written, value))}"\n' for name, value in env.items())


def _written(character: str) -> str:
    code = ord(character)
    if code < 32 or code == 127:
        return character if character in "\t\n" else " "
    if 0xD800 <= code <= 0xDFFF or 0xFDD0 <= code <= 0xFDEF or code & 0xFFFE == 0xFFFE:
        return "\ufffd"
    return f"\\{character}" if character in '"\\`$' else character


def start_unit(name: str, env: Mapping[str, str], stdin: bytes, output: int) -> ProcessTree:
    """Start the unit, unless it runs already: then that run is waited for first.

    ``env`` and ``stdin`` are in files meanwhile. What the unit wrote comes out at ``output`` when it has ended.
    Raises HostError, its message a phrase, if it cannot be started.
    """
    try:
        run = UnitRun(name, env, stdin, os.dup(output))  # a hook that gives up waiting closes the other one
    except OSError as error:
        raise HostError(f"cannot start {name}: {error.strerror}", kind="hook") from None
    try:
        run.begin()
    except BaseException:
        run.close()
        raise
    return run


class UnitRun(ProcessTree):
    """A run of a unit, with the methods of a program's process tree."""

    def __init__(self, name: str, env: Mapping[str, str], stdin: bytes, output: int) -> None:
        """Closes ``output`` in the end."""
        self._name = name
        self._files = {"environment": environment_file(env).encode(), "event.json": stdin}
        self._output = output
        runtime = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0] or _DEFAULT_DIRECTORY
        self._place = Path(runtime, "units", name)
        self._may_begin = threading.Lock()
        self._is_stop_asked = False
        self._has_ended = threading.Event()
        self._bus: Bus | None = None
        self._job = ""
        """The job that starts it; "" while a run that this process did not start is waited for."""
        self._results: dict[str, str] = {}
        """How the unit's jobs ended."""
        self._invocation_before = b""
        self._asked_at_unix = 0.0

    def begin(self) -> None:
        """Start it, unless it runs. Raises HostError, its message a phrase."""
        self._write_files()  # first: a run that begins from here on has read them
        try:
            self._bus = self._bus or self._connect()
            unit = self._bus.unit(self._name)
            if fault := _fault(self._name, unit):
                raise HostError(fault, kind="hook")
            if unit["ActiveState"] not in _ENDED:
                return
            self._invocation_before, self._asked_at_unix = bytes(unit["InvocationID"]), time.time()
            self._results = {}
            try:
                (self._job,) = self._bus.manager("StartUnit", "ss", self._name, "replace")
            except BusError as error:
                if not error.refusal:  # it may have been started
                    _order("StopUnit", "ss", self._name, "replace")
                raise
        except BusError as error:
            why = str(error)
            if error.refusal.endswith(("AccessDenied", "InteractiveAuthorizationRequired")):
                why = (
                    f"{account_name()} may not ({error}): a polkit rule has to allow it to start, stop and kill "
                    "this unit; install-unit --strict writes one for the units of the policy"
                )
            raise HostError(f"cannot start {self._name}: {why}", kind="hook") from None

    def wait(self) -> int | None:
        """Block until the unit has ended, whatever that takes, and write its output. Returns 0 for success."""
        end = None
        try:
            end = self._wait_for_end()
            while end is not None and not self._job:
                with self._may_begin:
                    if not self._is_stop_asked:
                        self.begin()
                end = self._wait_for_end()
        except HostError as error:
            self.ending = str(error)
        self._has_ended.set()
        if end is None:
            self.ending = self.ending or _UNKNOWN
            return None
        own = self._results.pop(self._job, None)
        exit_code, self.ending = verdict(end, self._invocation_before, own, *self._results.values())
        has_run = bytes(end["InvocationID"]) not in (b"", self._invocation_before)
        self._write(read_journal(self._name, self._asked_at_unix, has_run=has_run))
        return exit_code

    def is_empty(self) -> bool:
        """Whether nothing of it runs any more that is ours to end."""
        return self._has_ended.is_set()

    def terminate(self) -> None:
        """Have systemd stop the unit; does not wait for that."""
        with self._may_begin:
            self._is_stop_asked = True
        if self._job and not self._has_ended.is_set():
            _order("StopUnit", "ss", self._name, "replace")

    def kill(self) -> None:
        """Have systemd kill every process of the unit, and start none any more."""
        self.terminate()
        if self._job and not self._has_ended.is_set():
            _order("KillUnit", "ssi", self._name, "all", _SIGKILL)

    def close(self) -> None:
        """Release it. The unit must have ended."""
        self._disconnect()
        os.close(self._output)
        shutil.rmtree(self._place, ignore_errors=True)

    def _write_files(self) -> None:
        """Write the files that tell the unit about the event. Raises HostError, its message a phrase."""
        shutil.rmtree(self._place, ignore_errors=True)
        try:
            self._place.mkdir(mode=0o700, parents=True)
            for name, data in self._files.items():
                (self._place / name).touch(mode=0o600)
                (self._place / name).write_bytes(data)
        except OSError as error:
            raise HostError(
                f"cannot tell {self._name} about the event: {self._place}: {error.strerror}; "
                "RuntimeDirectory= of the agent's own unit makes the directory",
                kind="hook",
            ) from None

    def _wait_for_end(self) -> dict[str, Any] | None:
        """Block until the unit has ended. Returns its properties then.

        Returns None if systemd cannot be asked any more, or if the wait for the run of others is given up.
        """
        give_up_at = time.monotonic() + _LOST_SECONDS
        while self._job or not self._is_stop_asked:
            try:
                self._bus = self._bus or self._connect()
                unit = self._bus.unit(self._name)
                give_up_at = time.monotonic() + _LOST_SECONDS
                has_ended = unit["ActiveState"] in _ENDED and unit["Job"][0] == 0
                # The signals that tell what became of its jobs came before this answer.
                jobs = self._bus.ended_jobs(0 if has_ended else _LOOK_SECONDS)
                self._results |= {path: result for path, name, result in jobs if name == self._name}
                if has_ended:
                    return unit
            except BusError:  # systemd is being replaced, or the bus is
                self._disconnect()
                if time.monotonic() > give_up_at:
                    return None
                time.sleep(_LOOK_SECONDS)
        self._write(_LEFT_ALONE)
        return None

    def _connect(self) -> Bus:
        bus = Bus()
        try:
            bus.watch_jobs()
            with suppress(BusError):  # there is no such unit, as its properties will say
                bus.manager("RefUnit", "s", self._name)
        except BaseException:
            bus.close()
            raise
        return bus

    def _disconnect(self) -> None:
        if self._bus is not None:
            self._bus.close()
            self._bus = None

    def _write(self, data: bytes) -> None:
        with suppress(OSError), open(self._output, "wb", closefd=False) as output:  # its reader may have given up
            output.write(data)


def _order(member: str, signature: str, *arguments: Any) -> None:
    """Give systemd an order about a unit; what comes of it shows in the unit's state."""
    with suppress(HostError), closing(Bus(_STOP_SECONDS)) as bus:
        bus.manager(member, signature, *arguments)


def own_service() -> OwnService | None:
    """The agent's service as systemd has it; None if it has none. Raises HostError if systemd does not answer."""
    with closing(Bus()) as bus:
        unit = bus.unit(_SERVICE)
    if unit["LoadState"] == "not-found":
        return None
    return OwnService(
        is_enabled=unit["UnitFileState"].startswith("enabled"),
        state=f"{unit['ActiveState']} ({unit['SubState']})",
        is_running=unit["ActiveState"] in ("active", "reloading"),
        pid=unit["MainPID"],
        account=unit["User"] or "root",
        is_stale=unit["NeedDaemonReload"],
        is_masked=unit["UnitFileState"].startswith("masked"),
    )
