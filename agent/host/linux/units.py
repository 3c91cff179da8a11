"""Hooks that are systemd units: start one, wait for it, end it, judge its run.

Asks systemd over D-Bus, and needs no privileges but a polkit rule that lets it start, stop and kill the unit.
Knows nothing of events, policy or hooks. The one invariant: a run is a success only if systemd says so and nothing
cut it short. Whatever is not known for certain is a failure.

A run that an administrator started is waited for, and never stopped.

Signals only say when to ask, for some get lost when systemd is replaced; a missing one never makes a success. The
unit is held (RefUnit) while the agent waits for it, or systemd would forget at once how it ended.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from agent.host.error import HostError
from agent.host.linux.bus import MANAGER, PROPERTIES, SYSTEMD, Bus, BusError, BusLostError
from agent.host.linux.files import account_name
from agent.host.linux.journal import read_journal
from agent.host.linux.process import ProcessTree
from agent.host.linux.service import is_shutting_down

if sys.platform == "win32":
    raise ImportError("agent.host.linux is for Linux; import agent.host instead")

__all__ = [
    "start_unit",
    "unit_fault",
]

_DEFAULT_DIRECTORY = "/run/scheduled-events-agent"
# The variables that tell what a run of a unit is for.
_PURPOSE = ("SCHEDULED_EVENT_ID", "SCHEDULED_EVENT_STAGE")
_ENDED = ("inactive", "failed")
# Services that go on when they have started, and those that systemd starts again when they end well.
_LASTING_TYPES = ("forking", "notify", "notify-reload", "dbus")
_LASTING_RESTARTS = ("always", "on-success")
_LOOK_SECONDS = 2.0  # between two looks when no signal comes
_GIVE_UP_SECONDS = 0.25  # the same while the wait may be given up
_RECONNECT_SECONDS = 0.25
_LOST_SECONDS = 15.0  # a bus that is replaced is back much sooner
_UNKNOWN = "how it ended is not known: systemd could not be asked in time"
_STOP_SECONDS = 2.0  # an order to stop must not keep the hook's run from its other duties
_LEFT_ALONE = b"(it ran already and the agent did not start it: the agent waited for it, and leaves it running)\n"
_STOPPED = "stopped by another program or an operator before it was done"
_SIGKILL = 9
_EXITED = 1  # CLD_EXITED, as ExecMainCode has it

# Code points that systemd refuses; it would refuse the whole file.
_NO_CHARACTERS = re.compile("[\ud800-\udfff\ufdd0-\ufdef]|[" + "".join(
    f"{chr(plane * 0x10000 + 0xFFFE)}-{chr(plane * 0x10000 + 0xFFFF)}" for plane in range(17)
) + "]")  # fmt: skip
# Older versions of systemd refuse these in a variable, all but tab and newline.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")

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

    What neither can carry is replaced: control characters other than tab and newline by a space, what is no
    character by U+FFFD.
    """

    def quoted(value: str) -> str:
        return re.sub(r'(["\\`$])', r"\\\1", _NO_CHARACTERS.sub("\ufffd", _CONTROLS.sub(" ", value)))

    return "".join(f'{name}="{quoted(value)}"\n' for name, value in env.items())


def start_unit(name: str, env: Mapping[str, str], stdin: bytes, output: int) -> ProcessTree:
    """Start the unit, or join its run if that is for the same hook and event.

    ``env`` and ``stdin`` lie in files then. What the unit wrote comes out at ``output`` when it has ended. Raises
    HostError, its message a phrase, if it cannot be started.
    """
    try:
        watched = _Watched(name)
    except HostError as error:
        raise HostError(f"cannot start {name}: {error}", kind="hook") from None
    try:
        if fault := _fault(name, watched.before):
            raise HostError(fault, kind="hook")
        kept = os.dup(output)  # a hook that gives up waiting for the unit closes the other one
    except BaseException as error:
        watched.close()
        if isinstance(error, OSError):
            raise HostError(f"cannot start {name}: {error.strerror}", kind="hook") from None
        raise
    directory = Path(os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0] or _DEFAULT_DIRECTORY)
    run = UnitRun(name, watched, _Briefing(directory / "units" / name, env, stdin), kept)
    try:
        if not run.is_for_others:
            run.begin()
    except BaseException:
        run.close()
        raise
    return run


class _Briefing:
    """The files that tell a unit about the event."""

    def __init__(self, place: Path, env: Mapping[str, str], stdin: bytes) -> None:
        self._place = place
        self._environment = environment_file(env).encode()
        self._stdin = stdin
        purpose = {name: env[name] for name in _PURPOSE if name in env}
        self._purpose = set(environment_file(purpose).encode().splitlines())

    def is_there(self, invocation: bytes) -> bool | None:
        """Whether the files there were written for this hook of this event; None if they are not for this run.

        An agent that was killed leaves its files behind.
        """
        try:
            lines = (self._place / "environment").read_bytes().splitlines()
        except OSError:
            return None
        with suppress(OSError):  # an agent that was killed before it saw the run has not noted it
            if (self._place / "invocation").read_text() != invocation.hex():
                return None
        return self._purpose <= set(lines)

    def note_run(self, invocation: bytes) -> None:
        """This run of the unit was started for the files there; a later one was not."""
        with suppress(OSError):
            _write_file(self._place / "invocation", invocation.hex().encode())

    def write(self) -> None:
        """Raises HostError, its message a phrase."""
        try:
            for folder in (self._place.parents[1], self._place.parent, self._place):
                folder.mkdir(mode=0o700, exist_ok=True)
            (self._place / "invocation").unlink(missing_ok=True)
            _write_file(self._place / "environment", self._environment)
            _write_file(self._place / "event.json", self._stdin)
        except OSError as error:
            raise HostError(
                f"cannot tell {self._place.name} about the event: {self._place}: {error.strerror}; "
                "RuntimeDirectory= of the agent's own unit makes the directory",
                kind="hook",
            ) from None

    def remove(self) -> None:
        with suppress(OSError):
            for name in ("environment", "event.json", "invocation"):
                (self._place / name).unlink(missing_ok=True)
            self._place.rmdir()


def _write_file(path: Path, data: bytes) -> None:
    """All of the file or nothing of it, for this account (and systemd) alone."""
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    temporary.replace(path)


class UnitRun(ProcessTree):
    """A run of a unit, with the methods of a program's process tree."""

    def __init__(self, name: str, watched: "_Watched", briefing: _Briefing, output: int) -> None:
        """Closes ``output`` in the end."""
        self._name = name
        self._watched = watched
        self._briefing = briefing
        self._output = output
        self._has_ended = threading.Event()
        self._is_told_to_stop = False
        self._may_begin = threading.Lock()
        is_briefed = briefing.is_there(bytes(watched.before["InvocationID"]))
        self.is_for_others = watched.is_joined and not is_briefed
        """It runs for another event or stage, or an administrator runs it: this hook needs a run of its own."""
        self._is_ours = not watched.is_joined or is_briefed is not None
        """Whether an agent has started it: nothing else may be stopped."""

    def begin(self) -> None:
        """Start it, or join it. Raises HostError, its message a phrase."""
        self._is_ours = True
        if not self._watched.is_joined:
            self._briefing.write()
        try:
            self._watched.start()
        except BusLostError as error:
            _order("StopUnit", self._name, "replace")  # it may have been started
            raise HostError(f"cannot start {self._name}: {error}", kind="hook") from None

    def wait(self) -> int | None:
        """Block until the unit has ended, whatever that takes, and write its output. Returns 0 for success."""
        try:
            if self.is_for_others:
                self._begin_after_others()
            end = self._watched.wait(on_run=self._briefing.note_run)
        except HostError as error:
            self.ending = str(error)
            end = None
        self._has_ended.set()
        if end is None:
            self.ending = self.ending or _UNKNOWN
            return None
        watched = self._watched
        before = bytes(watched.before["InvocationID"])
        result = verdict(end, watched.jobs, before=before, is_joined=watched.is_joined)
        self.ending = result.phrase
        has_run = end["InactiveExitTimestampMonotonic"] >= watched.since
        self._write(read_journal(self._name, watched.since, bytes(end["InvocationID"]).hex() if has_run else ""))
        return result.exit_code

    def _begin_after_others(self) -> None:
        if self._is_ours:  # an agent that was killed left it running
            _order("StopUnit", self._name, "replace")
        if self._watched.wait(self._is_given_up) is None:
            if self._is_given_up():
                self._write(_LEFT_ALONE)
            raise HostError(_UNKNOWN, kind="hook")
        self._watched.close()
        with self._may_begin:
            if self._is_told_to_stop:
                raise HostError("stopped before it was started", kind="hook")
            self._watched = _Watched(self._name)
            self.begin()

    def _is_given_up(self) -> bool:
        return self._is_told_to_stop and not self._is_ours

    def _write(self, data: bytes) -> None:
        with suppress(OSError):  # the reader has given up
            while data:
                data = data[os.write(self._output, data) :]

    def is_empty(self) -> bool:
        """Whether nothing of it runs any more that is ours to end."""
        return self._has_ended.is_set()

    def terminate(self) -> None:
        """Have systemd stop the unit; does not wait for that."""
        with self._may_begin:
            self._is_told_to_stop = True
        if self._is_ours and not self._has_ended.is_set():
            _order("StopUnit", self._name, "replace")

    def kill(self) -> None:
        """Have systemd kill every process of the unit, and start none any more."""
        if not self._is_told_to_stop:
            self.terminate()
        if self._is_ours and not self._has_ended.is_set():
            _order("KillUnit", self._name, "all", _SIGKILL)

    def close(self) -> None:
        """Release it. The unit must have ended."""
        self._watched.close()
        os.close(self._output)
        self._briefing.remove()


class _Watched:
    """A unit that is held and waited for; for one thread at a time."""

    def __init__(self, name: str) -> None:
        """Raises BusError or BusLostError."""
        self._name = name
        self._path = ""
        self._job = ""
        self._results: list[tuple[str, str]] = []
        self._is_complete = True
        self._invocation = b""
        self._asked_at = time.monotonic_ns() // 1000
        self._bus: Bus | None = self._connect()
        try:
            self.before = self._bus.properties(self._path)
        except BaseException:
            self.close()
            raise

    @property
    def is_joined(self) -> bool:
        """Whether it ran already before ``start``."""
        return self.before["ActiveState"] not in (*_ENDED, "deactivating")

    @property
    def since(self) -> int:
        """When this run began, or was asked for: microseconds on the monotonic clock."""
        return int(self.before["InactiveExitTimestampMonotonic"]) if self.is_joined else self._asked_at

    @property
    def jobs(self) -> Jobs:
        own = next((result for path, result in self._results if path == self._job), None)
        others = tuple(result for path, result in self._results if path != self._job)
        return Jobs(own, others, self._is_complete)

    def start(self) -> None:
        """Have systemd start it; does not wait. Raises HostError, its message a phrase, or BusLostError."""
        if self._bus is None:
            raise BusLostError("the connection to the system bus is closed")
        try:
            (self._job,) = self._bus.manager("StartUnit", "ss", self._name, "replace")
        except BusError as error:
            if error.name.rpartition(".")[2] in ("AccessDenied", "InteractiveAuthorizationRequired"):
                raise HostError(
                    f"{account_name()} may not start {self._name} ({error}): a polkit rule has to allow it to "
                    "start, stop and kill this unit; install-unit --strict writes one for the units of the policy",
                    kind="hook",
                ) from None
            raise HostError(f"systemd does not start {self._name}: {error}", kind="hook") from None

    def wait(
        self, is_given_up: Callable[[], bool] | None = None, on_run: Callable[[bytes], None] = lambda _: None
    ) -> dict[str, Any] | None:
        """Block until it has ended. Returns its properties then.

        Returns None if systemd cannot be asked any more, or if the wait ``is_given_up``. ``on_run`` gets the id of
        each run, as soon as it is seen: there may be several (Restart=).
        """
        asked_at = time.monotonic()
        look_seconds = _LOOK_SECONDS if is_given_up is None else _GIVE_UP_SECONDS
        while is_given_up is None or not is_given_up():
            try:
                if self._bus is None:
                    self._bus = self._connect()
                end = self._look(self._bus, on_run)
                asked_at = time.monotonic()
                if end is not None:
                    return end
                self._note_signals(self._bus, look_seconds)
            except (BusError, BusLostError):  # systemd is being replaced, or the bus is
                self.close()
                self._is_complete = False
                # While the machine goes down, the bus does not come back.
                if time.monotonic() - asked_at > _LOST_SECONDS or is_shutting_down():
                    return None
                time.sleep(_RECONNECT_SECONDS)
        return None

    def close(self) -> None:
        """Release it."""
        if self._bus is not None:
            self._bus.close()
            self._bus = None

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

    def _look(self, bus: Bus, on_run: Callable[[bytes], None]) -> dict[str, Any] | None:
        """Its properties if it has ended."""
        unit = bus.properties(self._path)
        if unit["ActiveState"] not in _ENDED:
            invocation = bytes(unit["InvocationID"])
            if invocation not in (b"", self._invocation):
                self._invocation = invocation
                on_run(invocation)
            return None
        # The signals that tell what became of its jobs came before this answer.
        self._note_signals(bus, 0)
        return unit if unit["Job"][0] == 0 else None

    def _note_signals(self, bus: Bus, timeout_seconds: float) -> None:
        """Take the signals there are; wait for one so long if there is none."""
        while (signal := bus.next_signal(timeout_seconds)) is not None:
            timeout_seconds = 0
            if signal.member == "JobRemoved" and signal.values[2] == self._name:
                self._results.append((signal.values[1], signal.values[3]))


def _order(member: str, name: str, *arguments: Any) -> None:
    """Give systemd an order about a unit; what comes of it shows in the unit's state."""
    signature = "".join("i" if isinstance(argument, int) else "s" for argument in arguments)
    with suppress(HostError), Bus(_STOP_SECONDS) as bus:
        bus.manager(member, f"s{signature}", name, *arguments)
