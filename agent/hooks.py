"""Runs one hook: environment, attempts, time limit, whole process tree, output.

Does not know which hooks an event needs, when, or what their results mean. The one invariant: ``HookRun.run``
returns, soon after the hook's time is up at the latest, whatever the hook does; and what it started is gone then.

A hook's main process ends the hook: what it left running is ended too. What is to live longer belongs to the
service manager (``systemctl start``, ``sc start``). A hook that is a unit of systemd outlives an agent that is
killed, and is joined when it is run again.
"""

import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from agent import AgentError, host
from agent.events import ScheduledEvent
from agent.policy import Hook
from agent.settings.files import hook_tampering_fault
from agent.workflow import HookOutcome

# From being asked to end (SIGTERM; there is no such thing on Windows) to being killed.
_GRACE_SECONDS = 5.0
_LEFTOVER_GRACE_SECONDS = 1.0
# A deadline is when everything must be gone, so the grace comes before it; never more than this part of the time.
_GRACE_SHARE = 0.1
# What even SIGKILL does not end within this (a process stuck in the kernel) is left to itself.
_KILL_SECONDS = 10.0
# But not before so many tries: where very many processes starve this one, each takes seconds.
_KILLS = 3
_CHECK_SECONDS = (0.002, 0.05)  # first and longest pause between two looks at processes that are ending
_SWEEP_SECONDS = 1.0

_MAX_LINE_BYTES = 2000
_MAX_LINES = 1000
_TAIL_BYTES = 4096
# A program that prints without end is slowed down to this, so that reading it costs little.
_FREE_BYTES = 4 << 20
_MAX_BYTES_PER_SECOND = 32 << 20
_MAX_VARIABLE = 8192
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# The latter end a line, or turn the direction of writing, for some who show it.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")

# Variables of a hook whose values its output should not repeat.
_SECRET_NAMES = re.compile(
    r"secret|token|passw|passphrase|credential|(api|access|account|private|shared|storage)_?key"
    r"|connection_?string|(^|_)(pat|sas|auth)(_|$)",
    re.IGNORECASE,
)
_MIN_SECRET_BYTES = 8  # less would spoil what is no secret
_MAX_SECRET_BYTES = 4096
_MAX_CREDENTIAL_BYTES = 1 << 16


class HookResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a hook ended."""

    hook: str
    outcome: HookOutcome
    exit_code: int | None
    """Of the last attempt; less than 0 for a signal; None if it did not start, or its code was lost."""
    attempts: int
    """How many were begun."""
    duration_seconds: float
    """From the first attempt's start to the last one's end, the pauses between them included."""
    tail: str
    """The end of the last attempt's output, 4 KiB at most."""
    detail: str
    """One phrase for people, such as ``exit code 3``."""


def hook_environment(
    event: ScheduledEvent, *, stage: str, rule: str | None, vm: str, outcome: str, seconds_left: float | None
) -> dict[str, str]:
    """The SCHEDULED_EVENT_* variables of a hook.

    Texts are cut to 8 KiB, the list of resources after a whole name. Names may hold commas for all Azure says,
    so a hook that needs the resources should read the JSON on its standard input (``events.to_azure_json``).
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
        "SECONDS_LEFT": "" if seconds_left is None else str(max(0, int(seconds_left))),
        "DURATION_SECONDS": "-1" if event.duration_seconds is None else f"{event.duration_seconds:g}",
        "DESCRIPTION": event.description,
        "RESOURCES": resources,
        "STAGE": stage,
        "RULE": rule or "",
        "VM": vm,
        "OUTCOME": outcome,
    }
    return {f"SCHEDULED_EVENT_{name}": value[:_MAX_VARIABLE].replace("\0", "") for name, value in values.items()}


def end_leftovers(instance: str) -> int:
    """End what hooks of an earlier agent with this ``instance`` left running when it was killed; returns how many.

    To be called once at start, before any hook runs. An ``instance`` that only begins like this one is another's.
    """
    return host.end_marked(f"{instance}:")


class HookRun:
    """One run of one hook, attempts included. ``run`` blocks; everything else may be called from any thread.

    ``deadline`` is on the monotonic clock: the hook and all it started must be gone by then. None leaves only the
    hook's own time limit. ``on_line`` gets each line of output, on a thread of its own; it should not block.
    ``instance`` names the agent among those of this machine, for ``end_leftovers``: the absolute path of its state
    does, and a relative one does not, for agents in two directories could have the same.
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
    ) -> None:
        self.name = name
        self._hook = hook
        self._environment = environment
        self._stdin = stdin
        self._deadline = deadline
        self._on_line = on_line
        self._instance = instance
        self._lines_left = _MAX_LINES
        self._is_canceled = False
        self._has_ended = False
        self._exit_code: int | None = None
        self._is_abandoned = False
        self._changed = threading.Condition()

    def run(self) -> HookResult:
        """Run the hook to its end. Never raises for what the hook does or for a program that cannot be started."""
        with _turn(self) as queue:
            with self._changed:
                while queue and queue[0] is not self and not self._is_canceled and self._seconds_left() > 0:
                    self._changed.wait(min(self._seconds_left(), threading.TIMEOUT_MAX))
                has_turn = not queue or queue[0] is self
            begun_at = time.monotonic()
            if not has_turn and not self._is_canceled:
                return self._result(0, begun_at, "not_started", "no time was left after other runs of this hook")
            return self._run_attempts(begun_at)

    def cancel(self) -> None:
        """End the run as soon as its processes can be ended."""
        with self._changed:
            self._is_canceled = True
            self._changed.notify_all()

    def set_deadline(self, deadline: float | None) -> None:
        """Move the deadline, earlier or later; see the class."""
        with self._changed:
            self._deadline = deadline
            self._changed.notify_all()

    def _run_attempts(self, begun_at: float) -> HookResult:
        if self._is_canceled:
            return self._result(0, begun_at, "canceled", "canceled before it started")
        if self._seconds_left() <= 0:
            return self._result(0, begun_at, "not_started", "no time was left")
        attempt = 0
        while True:
            attempt += 1
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
                    if pause == 0.0:
                        break
                    self._changed.wait(pause)

    def _run_attempt(self, attempt: int, begun_at: float) -> HookResult:
        started_at = time.monotonic()
        self._has_ended, self._exit_code = False, None
        # Not only when the policy is read: a file may have been given away since.
        if host.is_privileged() and (fault := hook_tampering_fault(self._hook)):
            return self._result(attempt, begun_at, "not_started", fault)
        try:
            output = _Output(self._pass_on, _secrets(self._hook))
        except (OSError, RuntimeError) as error:  # no descriptors, no memory for a thread
            return self._result(attempt, begun_at, "not_started", f"cannot be started: {error}")
        try:
            outcome, detail = self._watch(self._start(output.descriptor), started_at)
        except AgentError as error:
            outcome, detail = "not_started", str(error)
        finally:
            tail = output.finish()
        return self._result(attempt, begun_at, outcome, detail, tail)

    def _start(self, output: int) -> host.ProcessTree:
        hook = self._hook
        own = {**hook.env, **self._environment}
        if hook.unit is not None:
            return host.start_unit(hook.unit, own, self._stdin, output)
        return host.start_tree(
            run=hook.run,
            shell=hook.shell,
            env=host.base_environment(hook.user) | own,
            cwd=hook.cwd,
            user=hook.user,
            stdin=self._stdin,
            output=output,
            token=f"{self._instance}:{os.urandom(8).hex()}",
        )

    def _watch(self, tree: host.ProcessTree, started_at: float) -> tuple[HookOutcome, str]:
        """See the tree to its end, whatever that takes."""
        try:
            threading.Thread(target=self._await_end, args=(tree,), name=f"hook-{self.name}", daemon=True).start()
        except RuntimeError as error:
            tree.kill()
            self._await_end(tree)
            self._end(tree, 0.0)
            tree.close()
            return "not_started", f"cannot be watched: {error}"
        cause = self._await_end_or_cause(started_at)
        stopped_after = _span(time.monotonic() - started_at)
        is_gone = self._end(tree, _LEFTOVER_GRACE_SECONDS if cause is None else _GRACE_SECONDS)
        with self._changed:
            self._is_abandoned = not self._has_ended
        if not self._is_abandoned:
            tree.close()
        trouble = "" if is_gone else "; not all of its processes could be killed"
        if cause == "canceled":
            return "canceled", f"canceled after {stopped_after}{trouble}"
        if cause == "timeout":
            return "timed_out", f"killed after {_span(self._hook.timeout)}, its time limit{trouble}"
        if cause == "deadline":
            return "timed_out", f"killed after {stopped_after}, no time was left{trouble}"
        detail = tree.ending or _describe(self._exit_code)
        return ("succeeded" if self._exit_code == 0 else "failed"), detail + trouble

    def _await_end_or_cause(self, started_at: float) -> Literal["canceled", "timeout", "deadline"] | None:
        """Wait for the program's end; or return why it must be ended."""
        is_time_up = False
        while True:
            with self._changed:
                if self._has_ended:
                    return None
                if self._is_canceled:
                    return "canceled"
                now = time.monotonic()
                timeout = started_at + self._hook.timeout - now
                left = self._seconds_left()
                left -= min(_GRACE_SECONDS, _GRACE_SHARE * max(0.0, now + left - started_at))
                if is_time_up and min(timeout, left) <= 0:
                    return "timeout" if timeout <= 0 else "deadline"
                # Where this process was stopped meanwhile, the end may have come in time and only be told now.
                is_time_up = min(timeout, left) <= 0
                self._changed.wait(_CHECK_SECONDS[1] if is_time_up else min(timeout, left, _SWEEP_SECONDS))
            host.reap_orphans()

    def _await_end(self, tree: host.ProcessTree) -> None:
        exit_code = tree.wait()
        with self._changed:
            self._exit_code, self._has_ended = exit_code, True
            self._changed.notify_all()
            is_abandoned = self._is_abandoned
        if is_abandoned:
            tree.close()

    def _end(self, tree: host.ProcessTree, grace_seconds: float) -> bool:
        """End what still runs: ask, wait, kill. Returns whether all of it is gone."""
        asked_at = time.monotonic()
        kill_at: float | None = None
        pause, longest_pause = _CHECK_SECONDS
        is_asked, kills = False, 0
        while not (self._has_ended and tree.is_empty()):
            now = time.monotonic()
            if not is_asked:
                tree.terminate()
                is_asked = True
            if kill_at is None and now >= min(asked_at + grace_seconds, now + self._seconds_left()):
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
        deadline = self._deadline
        return float("inf") if deadline is None else deadline - time.monotonic()

    def _pass_on(self, line: str) -> bool:
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
            # A path or PATH in it may hold bytes that are no text, which nobody after this could write down.
            detail=detail.encode("utf-8", "replace").decode(),
        )


class _Output:
    """Reads what a hook writes, on a thread of its own, from the moment it is made until ``finish``.

    ``on_line`` answers whether it wants more. The reader never waits for the end of the pipe, which a process
    that got away could hold open for ever, and which comes early if the hook closes its side: we keep the pipe
    open ourselves, and end it with a word that nobody else can say.
    """

    def __init__(self, on_line: Callable[[str], bool], secrets: Sequence[bytes]) -> None:
        self._on_line = on_line
        # So much more is kept than is told that no secret is cut where it would not be known any more.
        self._margin = max(map(len, secrets), default=0)
        self._secrets = re.compile(b"|".join(map(re.escape, secrets))) if secrets else None
        self._has_listener = True
        self._last_word = os.urandom(16)
        self._tail = b""
        self._line = b""
        self._source, self.descriptor = os.pipe()
        self._thread = threading.Thread(target=self._read, name="hook-output", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            os.close(self._source)
            os.close(self.descriptor)
            raise

    def finish(self) -> str:
        """Read what was written until now, and no more. Returns the end of it."""
        last_word = self._last_word
        try:
            while last_word and self._thread.is_alive():
                try:
                    last_word = last_word[os.write(self.descriptor, last_word) :]
                except OSError:
                    # The hook made the pipe non-blocking, which holds for our side too, and filled it.
                    self._thread.join(_CHECK_SECONDS[0])
            self._thread.join()
        finally:
            os.close(self.descriptor)
            os.close(self._source)
        text = _clean(host.decode_output(self._redacted(self._tail)))
        return text.encode()[-_TAIL_BYTES:].decode("utf-8", "ignore")

    def _read(self) -> None:
        total = 0
        held_back = b""
        while True:
            data = held_back + os.read(self._source, 1 << 16)
            data, last_word, _ = data.partition(self._last_word)
            if last_word:
                self._take(data)
                self._emit()
                return
            # The last word may have come in part.
            size = next((n for n in range(15, 0, -1) if data.endswith(self._last_word[:n])), 0)
            data, held_back = data[: len(data) - size], data[len(data) - size :]
            self._take(data)
            total += len(data)
            if total > _FREE_BYTES:
                time.sleep(len(data) / _MAX_BYTES_PER_SECOND)

    def _take(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-_TAIL_BYTES - self._margin :]
        while self._has_listener and data:
            piece, newline, data = data.partition(b"\n")
            self._line += piece[: _MAX_LINE_BYTES + 1 + self._margin - len(self._line)]
            if newline:
                self._line += newline
                self._emit()

    def _emit(self) -> None:
        line, self._line = self._line, b""
        if not line or not self._has_listener:
            return
        line = self._redacted(line.removesuffix(b"\n").removesuffix(b"\r"))
        end = _MAX_LINE_BYTES
        if len(line) > end:
            while end > _MAX_LINE_BYTES - 4 and line[end] & 0xC0 == 0x80:  # not in the middle of a character
                end -= 1
        text = _clean(host.decode_output(line[:end])) + (" (cut)" if len(line) > end else "")
        try:
            self._has_listener = self._on_line(text)
        except Exception:  # noqa: BLE001 - a line that cannot be passed on must not stop the reading
            self._has_listener = False

    def _redacted(self, data: bytes) -> bytes:
        return self._secrets.sub(b"***", data) if self._secrets else data


def _secrets(hook: Hook) -> list[bytes]:
    """Texts that the hook knows and its output should not repeat, the longest first.

    As far as they can be told: each line of more than a few bytes by itself, for so it would come out.
    """
    texts = [
        value.encode("utf-8", "surrogateescape") for name, value in hook.env.items() if _SECRET_NAMES.search(name)
    ]
    if directory := os.environ.get("CREDENTIALS_DIRECTORY"):
        with suppress(OSError):
            for path in Path(directory).iterdir():
                with suppress(OSError), path.open("rb") as file:
                    texts.append(file.read(_MAX_CREDENTIAL_BYTES))
    lines = {line.strip() for text in texts for line in text.splitlines()}
    return sorted(
        (line for line in lines if _MIN_SECRET_BYTES <= len(line) <= _MAX_SECRET_BYTES), key=len, reverse=True
    )


_queues: dict[str, deque[HookRun]] = {}
_queues_lock = threading.Lock()


@contextmanager
def _turn(run: HookRun) -> Iterator[deque[HookRun]]:
    """Stand in the queue for a hook that must not run twice at a time; it is one's turn when one is its head.

    The queue of a hook that may is empty.
    """
    hook = run._hook  # noqa: SLF001 - one thing in two pieces
    if not (hook.serialize or hook.unit):
        yield deque()
        return
    # A unit runs once at a time whatever its hook says: a second start would join the first, for another event.
    key = hook.unit or run.name
    with _queues_lock:
        queue = _queues.setdefault(key, deque())
        queue.append(run)
    try:
        yield queue
    finally:
        with _queues_lock:
            queue.remove(run)
            following = queue[0] if queue else None
            if following is None:
                del _queues[key]
        if following is not None:
            with following._changed:  # noqa: SLF001 - as above
                following._changed.notify_all()  # noqa: SLF001


def _clean(text: str) -> str:
    """Without what would colour or garble a terminal; lines end as they do on Linux."""
    return _CONTROLS.sub(" ", _ESCAPES.sub("", text.replace("\r\n", "\n")))


def _describe(exit_code: int | None) -> str:
    if exit_code is None:
        return "its exit code was lost"
    if exit_code >= 0:
        return f"exit code {exit_code}" + (f" ({exit_code:#010x})" if exit_code > 0x7FFFFFFF else "")
    try:
        return f"ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"ended by signal {-exit_code}"


def _span(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f}".removesuffix(".0") + "s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "m"), (rest, "s"))
    return "".join(f"{value}{unit}" for value, unit in parts if value)
