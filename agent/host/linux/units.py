"""Hooks that are systemd units: start one, wait for it, end it, judge its run.

Asks systemd over D-Bus, and needs no privileges but a polkit rule that lets it start, stop and kill the unit.
Knows nothing of events, policy or hooks. The one invariant: a run is a success only if systemd says so and nothing
cut it short. Whatever is not known for certain is a failure.

A run that an administrator started is waited for, and never stopped.

Signals only say when to ask, for some get lost when systemd is replaced; a missing one never makes a success. The
unit is held (RefUnit) while the agent waits for it, or systemd would forget at once how it ended.
"""

import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from agent.host.error import HostError
from agent.host.linux.bus import MANAGER, PROPERTIES, SYSTEMD, Bus, BusError, BusLostError
from agent.host.linux.files import account_name
from agent.host.linux.journal import read_journal
from agent.host.linux.process import ProcessTree

if sys.platform == "win32":
    raise ImportError("agent.host.linux is for Linux; import agent.host instead")

_DEFAULT_DIRECTORY = "/run/scheduled-events-agent"
# The variables that tell what a run of a unit is for.
_PURPOSE = ("SCHEDULED_EVENT_ID", "SCHEDULED_EVENT_STAGE")
_ENDED = ("inactive", "failed")
# Services that go on when they have started, and those that systemd starts again when they end well.
_LASTING_TYPES = ("forking", "notify", "notify-reload", "dbus")
_LASTING_RESTARTS = ("always", "on-success")
_LOOK_SECONDS = 0.5  # between two looks when no signal comes
_RECONNECT_SECONDS = 0.25
_LOST_SECONDS = 15.0  # a bus that is replaced is back much sooner
_STOP_SECONDS = 2.0  # an order to stop must not keep the hook's run from its other duties
_UNKNOWN = "how it ended is not known: systemd could not be asked in time"
_STOPPED = "stopped by another program or an operator before it was done"
_LEFT_ALONE = b"(it ran already and the agent did not start it: the agent waited for it, and leaves it running)\n"
_SIGKILL = 9
_EXITED = 1  # CLD_EXITED, as ExecMainCode has it

_REASONS = {
    "timeout": "it took longer than its own file allows (TimeoutStartSec=, RuntimeMaxSec=, TimeoutStopSec=)",
    "start-limit-hit": "it was started too often in a short time (StartLimitBurst= of the unit)",
    "oom-kill": "it was killed for lack of memory",
    "watchdog": "its watchdog was not fed (WatchdogSec= of the unit)",
    "resources": "systemd could not start it; see the journal of the unit",
    "protocol": "it did not behave as its Type= promises",
}


class Verdict(NamedTuple):
    """How a run of a unit ended."""

    exit_code: int | None
    """0 for success and nothing else; less than 0 for a signal; None if there is none that says why it failed."""
    phrase: str | None = None
    """What the exit code does not tell."""


class Jobs(NamedTuple):
    """What became of the unit's jobs while it was waited for."""

    own: str | None
    """The result of the job that the agent asked for; None if it was not seen."""
    others: tuple[str, ...]
    is_complete: bool
    """Whether none can have been missed."""


def verdict(end: Mapping[str, Any], jobs: Jobs, *, before: bytes, is_joined: bool) -> Verdict:
    """The judgement on a unit that has ended with the properties ``end``.

    ``before`` is the id of the invocation before the start was asked for; if that one ran then, it ``is_joined``.
    """
    invocation, status = bytes(end["InvocationID"]), int(end["ExecMainStatus"])
    has_exited = end["ExecMainCode"] == _EXITED
    code = (status if has_exited else -status) or None
    if jobs.own is None or (not jobs.is_complete and not invocation):
        return Verdict(None, _UNKNOWN)
    if "canceled" in (jobs.own, *jobs.others):
        return Verdict(code, _STOPPED)
    if jobs.own == "dependency":
        return Verdict(None, "not started: a unit that it needs failed")
    if not (end["ConditionResult"] and end["AssertResult"]):
        if end["Result"] == "exec-condition":
            return Verdict(None, "it was skipped: its ExecCondition= did not hold")
        return Verdict(None, "it was skipped: a condition (Condition...=, Assert...=) of the unit did not hold")
    if end["Result"] != "success":
        is_plain = end["Result"] == "exit-code" if has_exited else end["Result"] in ("signal", "core-dump")
        if is_plain and code is not None:
            return Verdict(code)
        return Verdict(None, _REASONS.get(end["Result"], f"systemd calls it a failure ({end['Result']})"))
    if jobs.own not in ("done", "failed"):  # "failed" comes before a Restart= that went well
        return Verdict(None, f"systemd did not start it: the result of the job is {jobs.own}")
    if not invocation or (invocation == before and not is_joined):
        return Verdict(None, "it did not run")
    if not has_exited:
        if end["ExecMainCode"]:
            return Verdict(code)
        return Verdict(None, "it has no main process by which to tell whether it was done (Type=, PIDFile=)")
    # A natural end begins with that of the main process. A service that says STOPPING=1 (sd_notify(3)) ends the
    # other way round as well, but without any job.
    left_at, exited_at = end["ActiveExitTimestampMonotonic"], end["ExecMainExitTimestampMonotonic"]
    is_disturbed = bool(jobs.others) or not jobs.is_complete
    if is_disturbed and end["InactiveExitTimestampMonotonic"] <= left_at < exited_at:
        return Verdict(code, _STOPPED)
    return Verdict(0, f"exit code {status}, which its unit takes for a success" if status else None)


def unit_fault(name: str) -> str | None:
    """Why a hook could not start the unit, or not wait for it; None if nothing is known. Raises HostError."""
    with Bus() as bus:
        (path,) = bus.manager("LoadUnit", "s", name)
        return _fault(name, bus.properties(path))


def _fault(name: str, unit: Mapping[str, Any]) -> str | None:
    state = unit["LoadState"]
    if state == "not-found":
        return f"there is no unit {name}; if its file is new: systemctl daemon-reload"
    if state == "masked":
        return f"{name} is masked: systemctl unmask {name}"
    if state != "loaded":
        return f"{name} cannot be loaded ({state}): {unit['LoadError'][1]}; see: systemctl status {name}"
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
    """Start the unit, or join its run if that is for the same hook and event.

    ``env`` and ``stdin`` lie in files then. What the unit wrote comes out at ``output`` when it has ended. Raises
    HostError, its message a phrase, if it cannot be started.
    """
    try:
        kept = os.dup(output)  # a hook that gives up waiting for the unit closes the other one
    except OSError as error:
        raise HostError(f"cannot start {name}: {error.strerror}", kind="hook") from None
    run = UnitRun(name, env, stdin, kept)
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
        self._env = env
        self._stdin = stdin
        self._output = output
        runtime = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0] or _DEFAULT_DIRECTORY
        self._place = Path(runtime, "units", name)
        self._noted = b""
        self._has_ended = threading.Event()
        self._is_stop_asked = False
        self._may_begin = threading.Lock()
        self._bus: Bus | None = None
        self._path = ""
        self._before: dict[str, Any] = {}
        self._asked_at_unix = 0.0
        self._job = ""
        self._results: list[tuple[str, str]] = []
        self._has_all_results = True
        self._is_joined = False
        self._is_ours = False
        """Whether an agent has started it: nothing else may be stopped."""
        self._is_for_others = False
        """It runs for another event or stage, or an administrator runs it: this hook needs a run of its own."""

    def begin(self) -> None:
        """Start it or join it, unless it runs for others. Raises HostError, its message a phrase."""
        self._disconnect()
        self._asked_at_unix = time.time()
        self._results, self._has_all_results = [], True
        try:
            self._bus = self._connect()
            self._before = self._bus.properties(self._path)
        except HostError as error:
            raise HostError(f"cannot start {self._name}: {error}", kind="hook") from None
        if fault := _fault(self._name, self._before):
            raise HostError(fault, kind="hook")
        self._is_joined = self._before["ActiveState"] not in (*_ENDED, "deactivating")
        is_briefed = self._is_briefed(bytes(self._before["InvocationID"]))
        self._is_ours = not self._is_joined or is_briefed is not None
        self._is_for_others = self._is_joined and not is_briefed
        if not self._is_for_others:
            self._start(self._bus)

    def wait(self) -> int | None:
        """Block until the unit has ended, whatever that takes, and write its output. Returns 0 for success."""
        end = None
        try:
            while self._is_for_others:
                self._wait_for_others()
            end = self._wait_for_end()
        except HostError as error:
            self.ending = str(error)
        self._has_ended.set()
        if end is None:
            self.ending = self.ending or _UNKNOWN
            return None
        own = next((result for path, result in self._results if path == self._job), None)
        others = tuple(result for path, result in self._results if path != self._job)
        before = bytes(self._before["InvocationID"])
        jobs = Jobs(own, others, self._has_all_results)
        result = verdict(end, jobs, before=before, is_joined=self._is_joined)
        self.ending = result.phrase
        since = int(self._before["InactiveExitTimestamp"]) / 1e6 if self._is_joined else self._asked_at_unix
        has_run = bytes(end["InvocationID"]) not in (b"", b"" if self._is_joined else before)
        self._write(read_journal(self._name, since, has_run=has_run))
        return result.exit_code

    def is_empty(self) -> bool:
        """Whether nothing of it runs any more that is ours to end."""
        return self._has_ended.is_set()

    def terminate(self) -> None:
        """Have systemd stop the unit; does not wait for that."""
        with self._may_begin:
            self._is_stop_asked = True
        if self._is_ours and not self._has_ended.is_set():
            _order("StopUnit", "ss", self._name, "replace")

    def kill(self) -> None:
        """Have systemd kill every process of the unit, and start none any more."""
        if not self._is_stop_asked:
            self.terminate()
        if self._is_ours and not self._has_ended.is_set():
            _order("KillUnit", "ssi", self._name, "all", _SIGKILL)

    def close(self) -> None:
        """Release it. The unit must have ended."""
        self._disconnect()
        os.close(self._output)
        if self._is_ours:
            shutil.rmtree(self._place, ignore_errors=True)

    def _is_briefed(self, invocation: bytes) -> bool | None:
        """Whether a killed agent left files for this hook of this event; None if it left none for this run."""
        try:
            lines = (self._place / "environment").read_text(encoding="utf-8").splitlines()
        except OSError:
            return None
        with suppress(OSError):  # an agent that was killed before it saw the run has not noted it
            if (self._place / "invocation").read_text() not in ("", invocation.hex()):
                return None
        purpose = {name: self._env[name] for name in _PURPOSE if name in self._env}
        return set(environment_file(purpose).splitlines()) <= set(lines)

    def _brief(self) -> None:
        """Write the files that tell the unit about the event. Raises HostError, its message a phrase."""
        shutil.rmtree(self._place, ignore_errors=True)
        try:
            self._place.mkdir(mode=0o700, parents=True)
            self._write_file("environment", environment_file(self._env).encode())
            self._write_file("event.json", self._stdin)
        except OSError as error:
            raise HostError(
                f"cannot tell {self._name} about the event: {self._place}: {error.strerror}; "
                "RuntimeDirectory= of the agent's own unit makes the directory",
                kind="hook",
            ) from None

    def _note_run(self, invocation: bytes) -> None:
        """Tell the next agent that this run of the unit was started for the files; a later one was not."""
        if invocation not in (b"", self._noted):
            self._noted = invocation
            with suppress(OSError):
                self._write_file("invocation", invocation.hex().encode())

    def _write_file(self, name: str, data: bytes) -> None:
        path = self._place / name
        path.touch(mode=0o600)
        path.write_bytes(data)

    def _start(self, bus: Bus) -> None:
        if not self._is_joined:
            self._brief()
        try:
            (self._job,) = bus.manager("StartUnit", "ss", self._name, "replace")
        except BusLostError as error:
            _order("StopUnit", "ss", self._name, "replace")  # it may have been started
            raise HostError(f"cannot start {self._name}: {error}", kind="hook") from None
        except BusError as error:
            if error.name.rpartition(".")[2] in ("AccessDenied", "InteractiveAuthorizationRequired"):
                raise HostError(
                    f"{account_name()} may not start {self._name} ({error}): a polkit rule has to allow it to "
                    "start, stop and kill this unit; install-unit --strict writes one for the units of the policy",
                    kind="hook",
                ) from None
            raise HostError(f"systemd does not start {self._name}: {error}", kind="hook") from None

    def _wait_for_others(self) -> None:
        """Wait until a run that is not for this hook has ended, and begin. Raises HostError."""
        if self._is_ours:  # an agent that was killed left it running
            _order("StopUnit", "ss", self._name, "replace")
        if self._wait_for_end() is None:
            if self._is_given_up():
                self._write(_LEFT_ALONE)
            raise HostError(_UNKNOWN, kind="hook")
        with self._may_begin:
            if self._is_stop_asked:
                raise HostError("stopped before it was started", kind="hook")
            self.begin()

    def _is_given_up(self) -> bool:
        return self._is_stop_asked and not self._is_ours

    def _wait_for_end(self) -> dict[str, Any] | None:
        """Block until the unit has ended. Returns its properties then.

        Returns None if systemd cannot be asked any more, or if the wait for the run of others is given up.
        """
        asked_at = time.monotonic()
        while not self._is_given_up():
            try:
                if self._bus is None:
                    self._bus = self._connect()
                unit = self._bus.properties(self._path)
                asked_at = time.monotonic()
                if unit["ActiveState"] in _ENDED:
                    # The signals that tell what became of its jobs came before this answer.
                    self._note_results(self._bus, 0)
                    if unit["Job"][0] == 0:
                        return unit
                elif not self._is_for_others:
                    self._note_run(bytes(unit["InvocationID"]))
                self._note_results(self._bus, _LOOK_SECONDS)
            except (BusError, BusLostError):  # systemd is being replaced, or the bus is
                self._disconnect()
                self._has_all_results = False
                if time.monotonic() - asked_at > _LOST_SECONDS:
                    return None
                time.sleep(_RECONNECT_SECONDS)
        return None

    def _note_results(self, bus: Bus, timeout_seconds: float) -> None:
        """Take the signals there are; wait for one so long if there is none."""
        while (signal := bus.next_signal(timeout_seconds)) is not None:
            timeout_seconds = 0
            member, values = signal
            if member == "JobRemoved" and values[2] == self._name:
                self._results.append((values[1], values[3]))

    def _connect(self) -> Bus:
        bus = Bus()
        try:
            (self._path,) = bus.manager("LoadUnit", "s", self._name)
            sender = f"type='signal',sender='{SYSTEMD}'"
            bus.add_match(f"{sender},interface='{MANAGER}',member='JobRemoved',arg2='{self._name}'")
            bus.add_match(f"{sender},interface='{PROPERTIES}',member='PropertiesChanged',path='{self._path}'")
            bus.manager("Subscribe")
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
        with suppress(OSError):  # the reader has given up
            while data:
                data = data[os.write(self._output, data) :]


def _order(member: str, signature: str, *arguments: Any) -> None:
    """Give systemd an order about a unit; what comes of it shows in the unit's state."""
    with suppress(HostError), Bus(_STOP_SECONDS) as bus:
        bus.manager(member, signature, *arguments)
