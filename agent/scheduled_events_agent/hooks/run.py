"""Runs one hook: environment, attempts, time limit, whole process tree, output.

It does not know which hooks an event needs, when, or what their results mean. Invariant: ``HookRun.run`` returns
soon after the hook's time is up, whatever the hook does. All processes that the hook started are gone then.

When a hook's main process ends, processes that it left running are ended too. A process that must live longer
belongs to the service manager (``systemctl start``, ``sc start``).
"""

import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from math import inf, isfinite
from typing import Literal

import msgspec

from scheduled_events_agent import AgentError, host
from scheduled_events_agent.hooks.command import command_of
from scheduled_events_agent.hooks.output import HookOutput, secrets_of
from scheduled_events_agent.hooks.preflight import find_hook_write_risk
from scheduled_events_agent.host import processes
from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.policy import Hook
from scheduled_events_agent.policy.durations import format_duration
from scheduled_events_agent.workflow import HookOutcome, Rank

# From SIGTERM to SIGKILL. (Windows has no SIGTERM.)
_GRACE_SECONDS = 5.0
_LEFTOVER_GRACE_SECONDS = 1.0
_URGENT_GRACE_SECONDS = 1.0
# At a deadline all processes must be gone, so the grace period is before it; at most this part of the time.
_GRACE_SHARE = 0.1
# A process that SIGKILL does not end within this time (it is stuck in the kernel) is abandoned, but only after so
# many tries: if very many processes slow this one down, each try takes seconds.
_KILL_SECONDS = 10.0
_KILLS = 3
_CHECK_SECONDS = (0.002, 0.05)  # first and longest pause between two looks at processes that are ending
_QUEUE_CHECK_SECONDS = 0.1
_MAY_BEGIN_CHECK_SECONDS = 1.0

_SECONDS_LEFT = "SCHEDULED_EVENT_SECONDS_LEFT"
_MAX_LINES = 1000
_MAX_VARIABLE = 8192
_MAX_NUMBER = 9_999_999_999


class HookResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a hook ended."""

    hook: str
    outcome: HookOutcome
    exit_code: int | None
    """Exit code of the last attempt; negative for a signal; None if it did not start, or its code was lost."""
    attempts: int
    """Number of attempts that were begun."""
    duration_seconds: float
    """Time from the first attempt's start to the last one's end, including the pauses between them."""
    tail: str
    """The end of the last attempt's output, 4 KiB at most."""
    detail: str
    """One phrase for people, such as ``exit code 3``."""
    has_run: bool = True
    """Whether its program was started, in any attempt."""


def hook_environment(
    event: ScheduledEvent, *, stage: str, rule: str | None, vm: str, outcome: str, seconds_left: float | None
) -> dict[str, str]:
    """The SCHEDULED_EVENT_* variables of a hook.

    Texts are cut to 8 KiB, the list of resources after a whole name. A name may contain a comma, so a hook that
    needs the resources should read the JSON on its standard input (``to_azure_json``).
    """
    resources = ",".join(event.resources)
    if len(resources) > _MAX_VARIABLE:
        resources = resources[: _MAX_VARIABLE + 1].rpartition(",")[0]
    values = {
        "ID": event.id,
        "TYPE": event.type,
        "STATUS": event.status,
        "SOURCE": event.source,
        "NOT_BEFORE": "" if event.not_before is None else event.not_before.isoformat().replace("+00:00", "Z"),
        "SECONDS_LEFT": "" if seconds_left is None else _whole_seconds(seconds_left),
        "DURATION_SECONDS": _duration_seconds(event.duration_seconds),
        "DESCRIPTION": event.description,
        "RESOURCES": resources,
        "STAGE": stage,
        "RULE": rule or "",
        "VM": vm,
        "OUTCOME": outcome,
    }
    return {f"SCHEDULED_EVENT_{name}": value[:_MAX_VARIABLE].replace("\0", "") for name, value in values.items()}


def attempt_environment(timeout_seconds: float) -> dict[str, str]:
    """The variable that only an attempt has: after so many whole seconds the agent begins to end it."""
    return {"SCHEDULED_EVENT_TIMEOUT_SECONDS": _whole_seconds(timeout_seconds)}


def _whole_seconds(seconds: float) -> str:
    """The form that hooks may compute with: ``run-hook`` and ``common.sh`` drop any other."""
    return str(max(0, min(int(seconds), _MAX_NUMBER)))


def _duration_seconds(seconds: float | None) -> str:
    """Not as ``1e+06``: without an exponent, so that a hook can compare it."""
    return "-1" if seconds is None else f"{abs(seconds):.3f}".rstrip("0").rstrip(".")


def kill_orphans(instance: str) -> int:
    """End processes that hooks of an earlier agent with this ``instance`` left running. Returns their number.

    Call it once at start, before any hook runs. An ``instance`` that only begins like this one is another agent's.
    """
    return processes.kill_leftovers(f"{instance}:")


class HookQueue:
    """Serializes the runs of a hook: of those that wait, the one with the lowest rank is next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[HookRun] = []
        self._running: HookRun | None = None

    def join(self, run: "HookRun") -> None:
        """Add the run to those that wait."""
        with self._lock:
            self._waiting.append(run)

    def has_turn(self, run: "HookRun") -> bool:
        """Whether the run may begin now. If so, no other run may begin until it leaves."""
        with self._lock:
            if self._running is None and min(self._waiting, key=lambda one: one.rank) is run:
                self._waiting.remove(run)
                self._running = run
            return self._running is run

    def leave(self, run: "HookRun") -> None:
        """Remove the run: it has ended, or waits no longer."""
        with self._lock:
            if self._running is run:
                self._running = None
            else:
                self._waiting.remove(run)


HookQueues = defaultdict[str, HookQueue]
"""The value for each hook, by its name."""


class HookRun:
    """One run of one hook, attempts included. ``run`` blocks; everything else may be called from any thread.

    ``deadline`` (monotonic): the hook and all that it started must be gone by then. None: only the hook's own time
    limit counts. ``on_line`` gets each line of output, on another thread; it should not block. ``instance``
    identifies this agent on this machine, for ``kill_orphans``: the absolute path of its state file. ``queues``:
    shared by the runs that must not overlap; of those that wait, the one with the lowest ``rank`` is next.
    """

    def __init__(
        self,
        name: str,
        hook: Hook,
        *,
        environment: Mapping[str, str],
        stdin: bytes = b"",
        deadline: float | None = None,
        on_line: Callable[[str], None] = lambda _: None,
        instance: str = "",
        queues: HookQueues | None = None,
        rank: Rank = (0, 0.0, 0.0),
        load_current: Callable[[], Hook | None] = lambda: None,
        may_begin: Callable[[], bool] = lambda: True,
    ) -> None:
        """``load_current`` returns the hook as the policy has it now, for the next attempt; None: as before.

        While ``may_begin`` returns false, neither a run that waited for its turn nor another attempt begins.
        """
        self.name = name
        self.rank = rank
        self.is_queued = queues is not None and hook.serialize
        """Whether the hook waits for another run of it to end; for any thread."""
        self.since = datetime.now(UTC)
        """Since when the hook waits, or runs; for any thread."""
        self._since = time.monotonic()
        self._hook = hook
        self._environment = environment
        self._made_at = time.monotonic()
        self._moved_seconds = 0.0
        """By how much NotBefore has moved since then."""
        self._stdin = stdin
        self._deadline = inf if deadline is None else deadline
        self._longest_grace_seconds = inf
        self._canceled_until = inf
        self._on_line = on_line
        self._instance = instance
        self._load_current = load_current
        self._may_begin = may_begin
        self._queue = queues[name] if queues is not None and hook.serialize else None
        self._lines_left = _MAX_LINES
        self._is_canceled = False
        self._has_run = False
        self._has_ended = False
        self._exit_code: int | None = None
        self._is_abandoned = False
        self._changed = threading.Condition()

    def run(self) -> HookResult:
        """Run the hook to its end. Never raises because of the hook, nor if it cannot be started."""
        queue = self._queue
        if queue is None:
            return self._run_attempts(time.monotonic())
        queue.join(self)
        try:
            while not (self._may_begin() and queue.has_turn(self)) and not self._is_canceled:
                if self._seconds_left() <= 0:
                    detail = "no time was left after other runs of this hook"
                    return self._result(0, time.monotonic(), "not_started", detail)
                with self._changed:
                    self._changed.wait(max(0.0, min(self._seconds_left(), _QUEUE_CHECK_SECONDS)))
            self.since = datetime.now(UTC)
            self._since = time.monotonic()
            self.is_queued = False
            return self._run_attempts(time.monotonic())
        finally:
            queue.leave(self)

    @property
    def limit_seconds(self) -> float:
        """How many seconds after ``since`` the run ends at the latest, with all its attempts; for any thread."""
        timeout_at = self._since + self._hook.limit_seconds
        seconds = min(timeout_at, self._deadline, self._canceled_until) - self._since
        return round(max(0.0, seconds), 3)

    def cancel(self, *, is_urgent: bool = False) -> None:
        """End the run now. ``is_urgent``: it is killed one second after SIGTERM, not five; may follow a call."""
        with self._changed:
            self._is_canceled = True
            if is_urgent:
                self._longest_grace_seconds = _URGENT_GRACE_SECONDS
            grace_seconds = min(_GRACE_SECONDS, self._longest_grace_seconds)
            self._canceled_until = min(self._canceled_until, time.monotonic() + grace_seconds)
            self._changed.notify_all()

    def set_deadline(self, deadline: float | None) -> None:
        """Move the deadline of the run, earlier or later."""
        with self._changed:
            new = inf if deadline is None else deadline
            if isfinite(new) and isfinite(self._deadline):
                self._moved_seconds += new - self._deadline
            self._deadline = new
            self._changed.notify_all()

    def _run_attempts(self, begun_at: float) -> HookResult:
        if self._is_canceled:
            return self._result(0, begun_at, "canceled", "canceled before it started")
        if self._seconds_left() <= 0:
            return self._result(0, begun_at, "not_started", "no time was left")
        attempt = 0
        while True:
            attempt += 1
            self._hook = self._load_current() or self._hook
            result = self._run_attempt(attempt, begun_at)
            if result.outcome in ("succeeded", "canceled") or attempt >= self._hook.attempts or self._is_abandoned:
                return result
            retry_at = time.monotonic() + self._hook.retry_delay
            with self._changed:
                while True:
                    if self._is_canceled:
                        detail = f"canceled before attempt {attempt + 1}; {result.detail}"
                        return msgspec.structs.replace(result, outcome="canceled", detail=detail)
                    pause = max(0.0, retry_at - time.monotonic())
                    if self._seconds_left() <= pause:
                        detail = f"{result.detail}; no time was left to try again"
                        return msgspec.structs.replace(result, detail=detail)
                    if pause == 0.0 and self._may_begin():
                        break
                    self._changed.wait(pause or _MAY_BEGIN_CHECK_SECONDS)

    def _run_attempt(self, attempt: int, begun_at: float) -> HookResult:
        started_at = time.monotonic()
        self._has_ended = False
        self._exit_code = None
        # Checked here, too, not only when the policy is read: the owner may have changed since.
        if host.is_privileged() and (risk := find_hook_write_risk(self._hook)):
            return self._result(attempt, begun_at, "not_started", risk)
        try:
            output = HookOutput(self._emit, secrets_of(self._hook))
        except (OSError, RuntimeError) as error:  # no descriptors, no memory for a thread
            return self._result(attempt, begun_at, "not_started", f"cannot be started: {error}")
        try:
            outcome, detail = self._watch(self._start(output.descriptor, started_at), started_at)
        except AgentError as error:
            outcome = "not_started"
            detail = str(error)
        finally:
            tail = output.finish()
        return self._result(attempt, begun_at, outcome, detail, tail)

    def _start(self, output: int, started_at: float) -> processes.ProcessTree:
        hook = self._hook
        limit = attempt_environment(min(hook.timeout, self._latest_end(started_at) - started_at))
        tree = processes.start_tree(
            run=command_of(hook),
            shell=hook.shell,
            env={
                **processes.base_environment(hook.user),
                **hook.env,
                **self._environment,
                **self._seconds_left_variable(started_at),
                **limit,
            },
            cwd=hook.cwd,
            user=hook.user,
            stdin=self._stdin,
            output=output,
            token=f"{self._instance}:{os.urandom(8).hex()}",
        )
        self._has_run = True
        return tree

    def _seconds_left_variable(self, now: float) -> dict[str, str]:
        """SECONDS_LEFT of an attempt: the run may have waited for other runs or attempts since it was made."""
        at_first = self._environment.get(_SECONDS_LEFT)
        if not at_first:
            return {}
        left = int(at_first) + self._moved_seconds - int(now - self._made_at)
        return {_SECONDS_LEFT: _whole_seconds(left)}

    def _watch(self, tree: processes.ProcessTree, started_at: float) -> tuple[HookOutcome, str]:
        """Wait for the end of the process tree, or end it."""
        try:
            threading.Thread(target=self._await_end, args=(tree,), name=f"hook-{self.name}", daemon=True).start()
        except RuntimeError as error:
            tree.kill()
            self._await_end(tree)
            self._end(tree, 0.0)
            tree.close()
            return "not_started", f"cannot be watched: {error}"
        cause = self._await_end_or_cause(started_at)
        is_gone = self._end(tree, _LEFTOVER_GRACE_SECONDS if cause is None else _GRACE_SECONDS)
        ended_after = _format(time.monotonic() - started_at)
        with self._changed:
            self._is_abandoned = not self._has_ended
        if not self._is_abandoned:
            tree.close()
        trouble = "" if is_gone else "; not all of its processes could be killed"
        if cause == "canceled":
            return "canceled", f"canceled after {ended_after}{trouble}"
        if cause == "timeout":
            return (
                "timed_out",
                f"killed after {ended_after}; its time limit is {_format(self._hook.timeout)}{trouble}",
            )
        if cause == "deadline":
            return "timed_out", f"killed after {ended_after}, no time was left{trouble}"
        outcome: HookOutcome = "succeeded" if self._exit_code == 0 else "failed"
        return outcome, _describe_exit(self._exit_code) + trouble

    def _await_end_or_cause(self, started_at: float) -> Literal["canceled", "timeout", "deadline"] | None:
        """Wait for the program's end, and return None; or return why it must be ended."""
        is_time_up = False
        while True:
            with self._changed:
                if self._has_ended:
                    return None
                if self._is_canceled:
                    return "canceled"
                now = time.monotonic()
                timeout_at = started_at + self._hook.timeout
                end_at = min(timeout_at, self._latest_end(started_at))
                if now < end_at:
                    is_time_up = False
                    self._changed.wait(min(end_at - now, threading.TIMEOUT_MAX))
                elif is_time_up:
                    return "timeout" if now >= timeout_at else "deadline"
                else:
                    # If this process was stopped meanwhile, the hook may have ended in time: check once more.
                    is_time_up = True
                    self._changed.wait(_CHECK_SECONDS[1])

    def _latest_end(self, started_at: float) -> float:
        """When the program must be asked to end, so that all of it is gone at the deadline."""
        whole_time = max(0.0, self._deadline - started_at)
        return self._deadline - min(_GRACE_SECONDS, _GRACE_SHARE * whole_time)

    def _await_end(self, tree: processes.ProcessTree) -> None:
        exit_code = tree.wait()
        with self._changed:
            self._exit_code = exit_code
            self._has_ended = True
            self._changed.notify_all()
            is_abandoned = self._is_abandoned
        if is_abandoned:
            tree.close()

    def _end(self, tree: processes.ProcessTree, grace_seconds: float) -> bool:
        """End the processes that still run: SIGTERM, wait, SIGKILL. Returns whether all of them are gone."""
        asked_at = time.monotonic()
        kill_at: float | None = None
        pause, longest_pause = _CHECK_SECONDS
        is_asked = False
        kills = 0
        while not (self._has_ended and tree.is_empty()):
            now = time.monotonic()
            if not is_asked:
                tree.terminate()
                is_asked = True
            # A cancellation may become urgent meanwhile.
            grace_ends_at = asked_at + min(grace_seconds, self._longest_grace_seconds)
            if kill_at is None and now >= min(grace_ends_at, self._deadline):
                kill_at = now
            if kill_at is not None:
                if now >= kill_at + _KILL_SECONDS and kills >= _KILLS:
                    return False
                tree.kill()
                kills += 1
            with self._changed:
                self._changed.wait(pause)
            pause = min(2 * pause, longest_pause)
        return True

    def _seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    def _emit(self, line: str) -> bool:
        if self._lines_left > 0:
            self._on_line(line)
        elif self._lines_left == 0:
            self._on_line(f"(more than {_MAX_LINES} lines: of the rest, only the end is kept with the result)")
        self._lines_left -= 1
        return self._lines_left >= 0

    def _result(
        self, attempts: int, begun_at: float, outcome: HookOutcome, detail: str, tail: str = ""
    ) -> HookResult:
        return HookResult(
            hook=self.name,
            outcome=outcome,
            exit_code=self._exit_code,
            attempts=attempts,
            duration_seconds=time.monotonic() - begun_at,
            tail=tail,
            # A path in it may hold bytes that are not text, which could not be stored.
            detail=detail.encode("utf-8", "replace").decode(),
            has_run=self._has_run,
        )


def _describe_exit(exit_code: int | None) -> str:
    if exit_code is None:
        return "its exit code was lost"
    if exit_code >= 0:
        return f"exit code {exit_code}" + (f" ({exit_code:#010x})" if exit_code > 0x7FFFFFFF else "")
    try:
        return f"ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"ended by signal {-exit_code}"


def _format(seconds: float) -> str:
    return format_duration(round(seconds, 1))
