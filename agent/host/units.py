"""Hooks that are systemd units: started, waited for, ended, and judged; what they are told, and what they wrote.

Asks systemd itself over D-Bus, and needs no privileges but a polkit rule that allows to start, stop and kill the
unit. Knows nothing of events, policy or hooks. The one invariant: a run counts as a success only if systemd says
that it was one, and nobody cut it short; whatever is not known for certain is a failure.

What somebody else has started is waited for, and never stopped.

Signals only say when to ask, for some get lost when systemd is replaced; a missing one never makes a success. The
unit is held (RefUnit) while it is waited for, or systemd would forget at once how it ended.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from agent.host.dbus import Bus, BusError, BusLostError
from agent.host.linux import HostError, ProcessTree, account_name, is_shutting_down

if sys.platform == "win32":
    raise ImportError("agent.host.units is for Linux")

_SYSTEMD = "org.freedesktop.systemd1"
_MANAGER_PATH = "/org/freedesktop/systemd1"
_MANAGER = f"{_SYSTEMD}.Manager"
_PROPERTIES = "org.freedesktop.DBus.Properties"
_DEFAULT_DIRECTORY = "/run/scheduled-events-agent"

# The variables that tell what a run of a unit is for.
_PURPOSE = ("SCHEDULED_EVENT_ID", "SCHEDULED_EVENT_STAGE")
_ENDED = ("inactive", "failed")
# Of services that go on when they have started, and that systemd starts again whenever they end well.
_LASTING_TYPES = ("forking", "notify", "notify-reload", "dbus")
_LASTING_RESTARTS = ("always", "on-success")
_LOOK_SECONDS = 2.0  # between two looks when no signal tells of anything
_GIVE_UP_SECONDS = 0.25  # the same while it may be given up waiting
_RECONNECT_SECONDS = 0.25
_LOST_SECONDS = 15.0  # a bus that is replaced is back much sooner
_UNKNOWN = "how it ended is not known: systemd could not be asked in time"
_STOP_SECONDS = 2.0  # an order to stop must not keep the hook's run from its other duties
_LEFT_ALONE = b"(it was running already, for somebody else: it was waited for in vain, and is left running)\n"
_SIGKILL = 9
_EXITED = 1  # CLD_EXITED, as ExecMainCode has it

_JOURNAL_LINES = 1000
_JOURNAL_SECONDS = 1.0
_JOURNAL_PAUSE_SECONDS = 0.02
# MESSAGE_ID of what systemd says last of a run: "Deactivated successfully" or "Failed with result".
_LAST_WORDS = ("7ad2d189f7e94e70a38c781354912448", "d9b373ed55a64feb8242e02dbe79a49c")

# What systemd takes for no character at all: it would refuse the whole file.
_NO_CHARACTERS = re.compile("[\ud800-\udfff\ufdd0-\ufdef]|[" + "".join(
    f"{chr(plane * 0x10000 + 0xFFFE)}-{chr(plane * 0x10000 + 0xFFFF)}" for plane in range(17)
) + "]")  # fmt: skip
# Older ones refuse these in a variable, all but tab and newline.
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


class _Jobs(NamedTuple):
    """What became of the unit's jobs while it was waited for."""

    own: str | None
    """The result of the job that was asked for; None if it was not seen."""
    others: tuple[str, ...]
    is_complete: bool
    """Whether none can have been missed."""


def verdict(end: Mapping[str, Any], jobs: _Jobs, *, before: bytes, is_joined: bool) -> Verdict:
    """The judgement on a unit with the properties ``end``, which has ended.

    ``before`` is the id of the invocation before it was asked to start; if that one ran then, it ``is_joined``.
    """
    results = (jobs.own, *jobs.others)
    invocation, status = bytes(end["InvocationID"]), int(end["ExecMainStatus"])
    has_exited = end["ExecMainCode"] == _EXITED
    code = (status if has_exited else -status) or None
    if jobs.own is None or (not jobs.is_complete and not invocation):
        return Verdict(None, _UNKNOWN)
    if "canceled" in results:
        return Verdict(code, "stopped by somebody else before it was done")
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
    # A natural end begins with that of the main process. A service that says STOPPING=1, as sd_notify(3) has it,
    # ends the other way round as well, but without any job.
    left_at, exited_at = end["ActiveExitTimestampMonotonic"], end["ExecMainExitTimestampMonotonic"]
    is_disturbed = bool(jobs.others) or not jobs.is_complete
    if is_disturbed and end["InactiveExitTimestampMonotonic"] <= left_at < exited_at:
        return Verdict(code, "stopped by somebody else before it was done")
    return Verdict(0, f"exit code {status}, which its unit takes for a success" if status else None)


def unit_fault(name: str) -> str | None:
    """Why the unit could not be started, or not be waited for; None if nothing is known. Raises HostError."""
    with Bus(_SYSTEMD) as bus:
        (path,) = bus.call(_MANAGER_PATH, _MANAGER, "LoadUnit", "s", name)
        return _fault(name, _properties(bus, path))


def environment_file(env: Mapping[str, str]) -> str:
    """The variables as systemd's EnvironmentFile= reads them, and a shell's ``.`` too: every text is data.

    What neither can carry is replaced: control characters other than tab and newline by a space, what is no
    character by U+FFFD.
    """
    return "".join(f'{name}="{_quoted(value)}"\n' for name, value in env.items())


def start_unit(name: str, env: Mapping[str, str], stdin: bytes, output: int) -> "UnitRun":
    """Start the unit, or join it where it runs already for the same hook.

    What it is told lies in files then, and what it writes comes out at ``output`` when it has ended. Raises
    HostError, its message a phrase, if it cannot be started.
    """
    try:
        watched = _Watched(name)
    except HostError as error:
        raise HostError(f"cannot start {name}: {error}", kind="hook") from None
    try:
        fault = _fault(name, watched.before)
        if fault is not None:
            raise HostError(fault, kind="hook")
        # Its own, for whoever gives up waiting for the unit closes the other.
        kept = os.dup(output)
    except BaseException as error:
        watched.close()
        if isinstance(error, OSError):
            raise HostError(f"cannot start {name}: {error.strerror}", kind="hook") from None
        raise
    run = UnitRun(name, watched, _Briefing(_directory() / "units" / name, env, stdin), kept)
    try:
        if not run.is_for_others:
            run.begin()
    except BaseException:
        run.close()
        raise
    return run


class _Briefing:
    """What a unit is told, in files."""

    def __init__(self, place: Path, env: Mapping[str, str], stdin: bytes) -> None:
        self._place = place
        self._environment = environment_file(env).encode()
        self._stdin = stdin
        self._purpose = (
            environment_file({name: env[name] for name in _PURPOSE if name in env}).encode().splitlines()
        )

    def is_there(self, invocation: bytes) -> bool | None:
        """Whether what is there now was written for this hook of this event; None if nothing is for this run.

        An agent that was killed leaves it behind, and nobody takes it away when the unit has ended.
        """
        try:
            lines = (self._place / "environment").read_bytes().splitlines()
        except OSError:
            return None
        with suppress(OSError):  # killed before it saw the unit run: nobody else will have started it since
            if (self._place / "invocation").read_text() != invocation.hex():
                return None
        return set(self._purpose) <= set(lines)

    def note_run(self, invocation: bytes) -> None:
        """This run of the unit was started for what is there: any later one is somebody else's."""
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


class UnitRun(ProcessTree):
    """A unit that was started, in the shape of a program that was."""

    def __init__(self, name: str, watched: "_Watched", briefing: _Briefing, output: int) -> None:
        """``output`` is closed in the end."""
        self._name = name
        self._watched = watched
        self._briefing = briefing
        self._output = output
        self._has_ended = threading.Event()
        self._is_told_to_stop = False
        self._may_begin = threading.Lock()
        is_briefed = briefing.is_there(bytes(watched.before["InvocationID"]))
        self.is_for_others = watched.is_joined and not is_briefed
        """It runs for another event or stage, or for nobody we know: what that does is not what is wanted now."""
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
        """Block until the unit has ended, whatever that takes, and write what it wrote. Returns 0 for success."""
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
        before = bytes(self._watched.before["InvocationID"])
        result = verdict(end, self._watched.jobs, before=before, is_joined=self._watched.is_joined)
        self.ending = result.phrase
        since = self._watched.since
        has_run = end["InactiveExitTimestampMonotonic"] >= since
        with suppress(OSError):  # nobody listens any more
            _write(self._output, _journal(self._name, since, bytes(end["InvocationID"]).hex() if has_run else ""))
        return result.exit_code

    def _begin_after_others(self) -> None:
        if self._is_ours:  # left behind by an agent that was killed
            _order("StopUnit", self._name, "replace")
        if self._watched.wait(self._is_given_up) is None:
            if self._is_given_up():
                with suppress(OSError):  # as above
                    _write(self._output, _LEFT_ALONE)
            raise HostError(_UNKNOWN, kind="hook")
        self._watched.close()
        with self._may_begin:
            if self._is_told_to_stop:
                raise HostError("stopped before it was started", kind="hook")
            self._watched = _Watched(self._name)
            self.begin()

    def _is_given_up(self) -> bool:
        return self._is_told_to_stop and not self._is_ours

    def is_empty(self) -> bool:
        """Whether nothing of it runs any more that is ours to end."""
        return self._has_ended.is_set()

    def terminate(self) -> None:
        """Have systemd stop the unit; it is not waited for."""
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
        """Let go of it. The unit must have ended."""
        self._watched.close()
        os.close(self._output)
        self._briefing.remove()


class _Watched:
    """A unit that is held and waited for; for one thread at a time."""

    def __init__(self, name: str) -> None:
        """Raises BusError or BusLostError."""
        self._name = name
        self._bus: Bus | None = None
        self._path = ""
        self._job = ""
        self._results: list[tuple[str, str]] = []
        self._is_complete = True
        self._invocation = b""
        self._asked_at = time.monotonic_ns() // 1000
        self._connect()
        self.before = self._properties()

    @property
    def is_joined(self) -> bool:
        """Whether it ran already before ``start``."""
        return self.before["ActiveState"] not in (*_ENDED, "deactivating")

    @property
    def since(self) -> int:
        """When this run began, or was asked for: microseconds on the monotonic clock."""
        return int(self.before["InactiveExitTimestampMonotonic"]) if self.is_joined else self._asked_at

    @property
    def jobs(self) -> _Jobs:
        own = next((result for path, result in self._results if path == self._job), None)
        others = tuple(result for path, result in self._results if path != self._job)
        return _Jobs(own, others, self._is_complete)

    @property
    def _connection(self) -> Bus:
        if self._bus is None:
            raise BusLostError("not connected to the system bus", kind="bus")
        return self._bus

    def start(self) -> None:
        """Have systemd start it; it is not waited for. Raises HostError, its message a phrase, or BusLostError."""
        try:
            (self._job,) = self._ask("StartUnit", "ss", self._name, "replace")
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

        Returns None if systemd cannot be asked any more, or if it ``is_given_up`` to wait. ``on_run`` is told
        the id of each run, as soon as it is seen: there may be several (Restart=).
        """
        asked_at = time.monotonic()
        look_seconds = _LOOK_SECONDS if is_given_up is None else _GIVE_UP_SECONDS
        while is_given_up is None or not is_given_up():
            try:
                if self._bus is None:
                    self._connect()
                end = self._look(on_run)
                asked_at = time.monotonic()
                if end is not None:
                    return end
                self._note_signals(look_seconds)
            except (BusError, BusLostError):  # systemd is being replaced, or the bus is
                self.close()
                self._is_complete = False
                # Down with its machine, the bus does not come back.
                if time.monotonic() - asked_at > _LOST_SECONDS or is_shutting_down():
                    return None
                time.sleep(_RECONNECT_SECONDS)
        return None

    def close(self) -> None:
        """Let go of it."""
        if self._bus is not None:
            self._bus.close()
            self._bus = None

    def _connect(self) -> None:
        bus = self._bus = Bus(_SYSTEMD)
        try:
            (self._path,) = self._ask("LoadUnit", "s", self._name)
            sender = f"type='signal',sender='{_SYSTEMD}'"
            bus.add_match(f"{sender},interface='{_MANAGER}',member='JobRemoved',arg2='{self._name}'")
            bus.add_match(f"{sender},interface='{_PROPERTIES}',member='PropertiesChanged',path='{self._path}'")
            self._ask("Subscribe")
            with suppress(BusError):  # there is no such unit, as its properties will say
                self._ask("RefUnit", "s", self._name)
        except BaseException:
            self.close()
            raise

    def _look(self, on_run: Callable[[bytes], None]) -> dict[str, Any] | None:
        """Its properties if it has ended."""
        if self._property("ActiveState") not in _ENDED:
            invocation = bytes(self._property("InvocationID"))
            if invocation not in (b"", self._invocation):
                self._invocation = invocation
                on_run(invocation)
            return None
        end = self._properties()
        # What became of its jobs was told before this answer.
        self._note_signals(0)
        return end if end["ActiveState"] in _ENDED and end["Job"][0] == 0 else None

    def _property(self, name: str) -> Any:
        (value,) = self._connection.call(self._path, _PROPERTIES, "Get", "ss", f"{_SYSTEMD}.Unit", name)
        return value

    def _properties(self) -> dict[str, Any]:
        return _properties(self._connection, self._path)

    def _note_signals(self, timeout_seconds: float) -> None:
        """Take the signals there are; wait for one so long if there is none."""
        while (signal := self._connection.next_signal(timeout_seconds)) is not None:
            timeout_seconds = 0
            if signal.member == "JobRemoved" and signal.values[2] == self._name:
                self._results.append((signal.values[1], signal.values[3]))

    def _ask(self, member: str, signature: str = "", *arguments: Any) -> tuple[Any, ...]:
        return self._connection.call(_MANAGER_PATH, _MANAGER, member, signature, *arguments)


def _properties(bus: Bus, path: str) -> dict[str, Any]:
    """All properties of a unit, as they were at one moment: no name of an interface means every one."""
    (properties,) = bus.call(path, _PROPERTIES, "GetAll", "s", "")
    return dict(properties)


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
        return f"{name} has RemainAfterExit=yes, so that nobody can tell when it is done: set it to no"
    why = _why_lasting(unit)
    if why:
        return (
            f"{name} {why}, and so is made to run on: as a hook it would be waited for in vain, and then stopped; "
            "name a unit of Type=oneshot that starts or stops it"
        )
    return None


def _why_lasting(unit: Mapping[str, Any]) -> str:
    """What tells a server from a task; empty if nothing does."""
    if unit["Restart"] in _LASTING_RESTARTS:
        return f"has Restart={unit['Restart']}"
    if unit["Type"] in _LASTING_TYPES:
        return f"has Type={unit['Type']}"
    if unit["UnitFileState"].startswith("enabled") and unit["Type"] != "oneshot":
        return "is started at boot"
    return ""


def _order(member: str, name: str, *arguments: Any) -> None:
    """Tell systemd something about a unit; what comes of it shows in the unit's state."""
    signature = "".join("i" if isinstance(argument, int) else "s" for argument in arguments)
    with suppress(HostError), Bus(_SYSTEMD, timeout_seconds=_STOP_SECONDS) as bus:
        bus.call(_MANAGER_PATH, _MANAGER, member, f"s{signature}", name, *arguments, timeout_seconds=_STOP_SECONDS)


def _quoted(value: str) -> str:
    """The inside of double quotes."""
    value = _NO_CHARACTERS.sub("\ufffd", _CONTROLS.sub(" ", value))
    return re.sub(r'(["\\`$])', r"\\\1", value)


def _directory() -> Path:
    return Path(os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0] or _DEFAULT_DIRECTORY)


def _write_file(path: Path, data: bytes) -> None:
    """All of the file or nothing of it, for this account (and systemd) alone."""
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    temporary.replace(path)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _journal(name: str, since: int, invocation: str) -> bytes:
    """The last lines that the unit wrote, and what systemd said about it; or why they cannot be had.

    ``since``: microseconds on the monotonic clock; ``invocation``: the id of the run, empty if there was none.
    """
    command = ["journalctl", "--quiet", "--no-pager", "--all", "--output=json", f"--lines={_JOURNAL_LINES}"]
    # The journal knows the unit's name of every line, but of a last line without a newline, or one of a process
    # that is gone already, not always the run. And which boot this is looks different inside of some sandboxes.
    command += ["--output-fields=MESSAGE,MESSAGE_ID,INVOCATION_ID,_BOOT_ID"]
    command += [f"_SYSTEMD_UNIT={name}", "+", "_PID=1", f"UNIT={name}"]
    give_up_at = time.monotonic() + _JOURNAL_SECONDS
    before: list[dict[str, Any]] | None = None
    while True:
        # What is written takes its time to get into the journal, each sender's lines on their own. When systemd's
        # last words about the unit are there, and nothing is added any more, it is complete.
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_JOURNAL_SECONDS, check=False
            )
            found = [json.loads(line) for line in done.stdout.splitlines()]
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return f"(what it wrote cannot be read: {error})\n".encode()
        of_run = [entry for entry in found if not invocation or entry.get("INVOCATION_ID") == invocation]
        is_told = not invocation or any(entry.get("MESSAGE_ID") in _LAST_WORDS for entry in of_run)
        boot = of_run[-1].get("_BOOT_ID") if of_run else None
        entries = [
            entry
            for entry in found
            if entry.get("_BOOT_ID") == boot and int(entry.get("__MONOTONIC_TIMESTAMP", 0)) >= since
        ]
        if (is_told and entries == before) or done.returncode != 0 or time.monotonic() >= give_up_at:
            break
        before = entries
        time.sleep(_JOURNAL_PAUSE_SECONDS)
    if invocation and not entries:
        return (
            b"(what it wrote cannot be read: the journal shows nothing of it to this account; the group "
            b"systemd-journal may read it)\n"
        )
    return b"".join(_message(entry) + b"\n" for entry in entries)


def _message(entry: Mapping[str, Any]) -> bytes:
    message = entry.get("MESSAGE")
    if isinstance(message, list):  # what is no text comes as numbers
        return bytes(value for value in message if isinstance(value, int))
    return str(message or "").encode("utf-8", "replace")
