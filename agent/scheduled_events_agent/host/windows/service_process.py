"""The process of the Windows service: it reports to the service control manager (SCM) and handles its controls.

Invariant: a stop without an error is reported to the SCM only if a stop was requested. Every other end is a
failure, to which the recovery actions apply.

    main thread     the SCM's dispatcher; controls arrive here and are passed on at once
    service thread  reports progress while the service starts or stops, and ends the process
    agent thread    the daemon: its reports to the service manager become the service's state
"""

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TextIO

from scheduled_events_agent.host import ServiceManager
from scheduled_events_agent.host.error import HostError
from scheduled_events_agent.host.windows import system
from scheduled_events_agent.host.windows.event_log import find_log_dir_risk
from scheduled_events_agent.host.windows.files import log_dir
from scheduled_events_agent.host.windows.service_manager import DISPLAY_NAME, NAME, STOP_TIMEOUT, need_windows

if sys.platform == "win32" or TYPE_CHECKING:
    import pywintypes
    import servicemanager
    import win32service
    import win32serviceutil

# An engine that gives no sign of life for this long hangs, and the process ends: as with systemd's watchdog.
_HANG_SECONDS = 60.0
_STOP_HANG_SECONDS = STOP_TIMEOUT + 15.0
# The SCM gives up on a service whose checkpoint stands still for longer than the hint.
_CHECKPOINT_SECONDS = 2.0
_WAIT_HINT_SECONDS = 10.0
_FAILED = 1
_SPECIFIC_ERROR = 1066  # ERROR_SERVICE_SPECIFIC_ERROR: the exit code is the service's own
_NO_CONTROLLER = 1063
_OWN_PROCESS = 0x10
_MAX_LEFT_CHARACTERS = 100_000


class State(IntEnum):
    """States of a service, in the SCM's numbers."""

    STOPPED = 1
    START_PENDING = 2
    STOP_PENDING = 3
    RUNNING = 4


class Control(IntEnum):
    """Controls that the SCM sends to a service, in its numbers."""

    STOP = 0x1
    INTERROGATE = 0x4
    SHUTDOWN = 0x5
    PARAMCHANGE = 0x6
    PRESHUTDOWN = 0xF


# SERVICE_ACCEPT_: STOP, SHUTDOWN, PARAMCHANGE, PRESHUTDOWN
_ACCEPTED_WHEN_RUNNING = 0x1 | 0x4 | 0x8 | 0x100
_PENDING = (State.START_PENDING, State.STOP_PENDING)
_ENDS = (Control.STOP, Control.SHUTDOWN, Control.PRESHUTDOWN)


class Status(NamedTuple):
    """SERVICE_STATUS, in its order."""

    service_type: int
    state: int
    accepted: int
    exit_code: int
    own_exit_code: int
    checkpoint: int
    wait_hint: int
    """Milliseconds."""


class Service(ServiceManager):
    """The service while it runs. ``control`` is for the dispatcher's thread; the rest is for the agent's."""

    def __init__(
        self,
        set_status: Callable[[Status], None],
        crash_file: TextIO,
        hang_seconds: float = _HANG_SECONDS,
        checkpoint_seconds: float = _CHECKPOINT_SECONDS,
    ) -> None:
        """``crash_file`` gets the stacks of all threads when the agent hangs; it must be a real file."""
        self._set_status = set_status
        self._crash_file = crash_file
        self._hang_seconds = hang_seconds
        self._checkpoint_seconds = checkpoint_seconds
        self.shutdown = threading.Event()
        """Set once the machine goes down."""
        self._stop: Callable[[], None] | None = None
        self._reload: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._state = State.START_PENDING
        self._checkpoint = 0

    def run(self, work: "Callable[[Service], int]") -> int:
        """Run ``work`` in a thread of its own and report to the SCM until it has ended. Returns its exit code.

        ``work`` makes the agent, passes it to ``attach``, runs it, and returns the service's exit code; 1, for any
        failure, if it raises. When this returns, the process has to end at once. A failure is not reported: after
        a crash the SCM always recovers, after a stop with an error perhaps not before the next boot.
        """
        exit_code = _FAILED

        def run_work() -> None:
            nonlocal exit_code
            exit_code = work(self)

        system.service_shutdown = self.shutdown
        self._set_state(State.START_PENDING)
        self._arm_watchdog(self._hang_seconds)
        worker = threading.Thread(target=run_work, name="agent", daemon=True)
        worker.start()
        while worker.is_alive():
            worker.join(self._checkpoint_seconds)
            self._repeat_status(*_PENDING)
        faulthandler.cancel_dump_traceback_later()
        if exit_code != _FAILED:
            self._set_state(State.STOPPED, exit_code)
        return exit_code

    def attach(self, stop: Callable[[], None], reload: Callable[[], None]) -> None:
        """Pass controls on to these, which do not wait. To be called before the agent runs."""
        self._reload = reload
        self._stop = stop

    def control(self, control: int) -> None:
        """Handle a control of the SCM."""
        if control == Control.INTERROGATE:
            self._repeat_status(State.RUNNING, *_PENDING)
        elif self._stop is None or self._reload is None:
            return  # nothing is accepted yet
        elif control in _ENDS:
            if control != Control.STOP:
                self.shutdown.set()
            self._set_state(State.STOP_PENDING)
            self._stop()
        elif control == Control.PARAMCHANGE:
            self._reload()

    def notify(self, state: Literal["ready", "reloading", "stopping"], status: str) -> None:
        """Report the state of the service. ``status`` is not used: the SCM has no field for it; the log has it."""
        del status
        if state == "ready" and self._state == State.START_PENDING:
            self._set_state(State.RUNNING)
        elif state == "stopping":
            self._set_state(State.STOP_PENDING)
            self._arm_watchdog(max(_STOP_HANG_SECONDS, self._hang_seconds))

    def keep_alive(self) -> None:
        """To be called as long as this process does its work: without it, it ends."""
        self._arm_watchdog(self._hang_seconds)

    def _arm_watchdog(self, seconds: float) -> None:
        # Its thread is not Python's, so that a call that never gives the interpreter back does not stop it. The
        # process ends with code 1, unannounced: to the SCM that is a crash.
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._crash_file)

    def _set_state(self, state: State, exit_code: int = 0) -> None:
        with self._lock:
            if self._state == State.STOP_PENDING and state not in (State.STOP_PENDING, State.STOPPED):
                return  # there is no way back
            if self._state == State.STOPPED:
                return  # nor a second end
            self._checkpoint = self._checkpoint if state == self._state else 0
            self._state = state
            self._report(exit_code)

    def _repeat_status(self, *states: State) -> None:
        """Report the state again if it is one of these."""
        with self._lock:
            if self._state in states:
                self._report()

    def _report(self, exit_code: int = 0) -> None:
        is_pending = self._state in _PENDING
        self._checkpoint = self._checkpoint + 1 if is_pending else 0
        self._set_status(
            Status(
                service_type=_OWN_PROCESS,
                state=self._state,
                accepted=_ACCEPTED_WHEN_RUNNING if self._state == State.RUNNING else 0,
                exit_code=_SPECIFIC_ERROR if exit_code else 0,
                own_exit_code=exit_code,
                checkpoint=self._checkpoint,
                wait_hint=int(_WAIT_HINT_SECONDS * 1000) if is_pending else 0,
            )
        )


def open_crash_log(directory: Path) -> tuple[TextIO, str]:
    """The crash file, for output that can go nowhere else, and the text that an earlier process has left in it.

    If it cannot be opened, that output is lost, and the agent works all the same.
    """
    path = directory / "crash.log"
    try:
        if risk := find_log_dir_risk(directory):
            raise OSError(risk)
        # Emptied only when it has been read: nothing else says why that process ended.
        file = path.open("a+", encoding="utf-8", errors="backslashreplace", buffering=1)
        file.seek(0)
        left = file.read(_MAX_LEFT_CHARACTERS).strip()
        file.truncate(0)
    except OSError:
        return Path(os.devnull).open("w", encoding="utf-8"), ""
    return file, left


def host_service(work: Callable[[Service, str], int]) -> None:
    """Be the service's process until the service has stopped, then end it.

    ``work`` is described at ``Service.run``. It also gets the text that an earlier process left in the crash file.
    From then on, everything that is printed goes to that file. Raises HostError if the SCM has not started this
    process.
    """
    need_windows()

    class Framework(win32serviceutil.ServiceFramework):
        _svc_name_ = NAME
        _svc_display_name_ = DISPLAY_NAME

        def __init__(self, args: Sequence[str]) -> None:
            # There is no standard output in a service.
            crash_file, self._left = open_crash_log(log_dir())
            sys.stdout = sys.stderr = crash_file
            faulthandler.enable(crash_file)
            self._service = Service(lambda status: win32service.SetServiceStatus(self.ssh, status), crash_file)
            super().__init__(args)

        def SvcRun(self) -> None:  # noqa: N802 - the framework's name
            code = self._service.run(lambda service: work(service, self._left))
            # The framework would report another stop, and with its own idea of the exit code.
            os._exit(code)

        def ServiceCtrlHandlerEx(self, control: int, event_type: int, data: object) -> None:  # noqa: N802
            del event_type, data
            self._service.control(control)

    try:
        servicemanager.Initialize()
        servicemanager.PrepareToHostSingle(Framework)
        servicemanager.StartServiceCtrlDispatcher()  # type: ignore[no-untyped-call]
    except pywintypes.error as error:
        if error.winerror != _NO_CONTROLLER:
            raise
        raise HostError(
            "only Windows' service control manager can run `service host`: use `service start`, or `run` to have "
            "the agent in the foreground",
            kind="usage",
        ) from None
