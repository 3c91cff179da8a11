"""``demo``: the real agent against the simulated service, shown as it happens, and checked at the end."""

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, Self

from scheduled_events_agent import AgentError
from scheduled_events_agent.cli.terminal import Cell, Terminal
from scheduled_events_agent.simulator import SimulatedEvent, Simulator
from scheduled_events_agent.status.facts import History
from scheduled_events_agent.store import Store

_WITHIN_SECONDS = 15.0
_SHOWN_MESSAGES = (
    "decided", "preparing", "waiting", "hook finished", "held", "recovering", "closed",
)  # fmt: skip

_POLICY = """\
rules:
  - name: user-initiated            # a user pressed Restart and waits for it
    when: {source: User}
    approve: immediately
  - name: short-freeze              # a pause of less than 9 s is not worth a drain
    when: {type: Freeze, duration_below: 9s}
    approve: immediately
  - name: eviction                  # a Spot VM goes, and does not come back: save the work
    when: {type: Preempt}
    prepare: [checkpoint]
    approve: when-prepared
  - name: impactful                 # the rest: take the machine out of service first, back in afterwards
    prepare: [drain]
    recover: [resume]
    approve: when-prepared
"""

# The hooks are one small program, so that the demo is the same on Linux and on Windows.
_HOOK = """\
import os, sys, time
name, type_ = sys.argv[1], os.environ["SCHEDULED_EVENT_TYPE"]
if name == "drain" and type_ == "Redeploy":
    print("3 connections do not close", flush=True)
    sys.exit(1)
words = {"drain": "taking the web server out of the load balancer", "checkpoint": "writing the checkpoint",
         "resume": "putting the web server back"}
print(words[name], "for the", type_, flush=True)
time.sleep({"drain": 1.0, "checkpoint": 1.5, "resume": 0.2}[name])
"""


class _Case(NamedTuple):
    """One event, and its expected end."""

    title: str
    type: str
    plan: dict[str, Any]
    """Arguments of ``Simulator.schedule``."""
    rule: str
    hooks: tuple[str, ...]
    """The expected hooks, as ``name: outcome``, in order."""
    is_approved: bool = True


_SOON = {"notice_seconds": 60, "start_delay_seconds": 0.4, "lasts_seconds": 0.8}
_CASES = (
    _Case(
        "A user restarts the machine: nothing to prepare, approved at once",
        "Reboot",
        {**_SOON, "source": "User"},
        rule="user-initiated",
        hooks=(),
    ),
    _Case(
        "Azure pauses the VM for 5 seconds: short enough, approved at once",
        "Freeze",
        {**_SOON, "duration_seconds": 5},
        rule="short-freeze",
        hooks=(),
    ),
    _Case(
        "Azure reboots the host: drain, approve, wait for the end, put back in service",
        "Reboot",
        _SOON,
        rule="impactful",
        hooks=("drain: succeeded", "resume: succeeded"),
    ),
    _Case(
        "A Spot VM is evicted in 8 seconds: the checkpoint must be written by then",
        "Preempt",
        {**_SOON, "notice_seconds": 8},
        rule="eviction",
        hooks=("checkpoint: succeeded",),
    ),
    _Case(
        "The drain fails: nothing is approved, Azure waits until NotBefore; recovered anyway",
        "Redeploy",
        {"notice_seconds": 3, "lasts_seconds": 1.0},
        rule="impactful",
        hooks=("drain: failed", "resume: succeeded"),
        is_approved=False,
    ),
)


class _DemoLog:
    """Prints one line at a time, and knows what the agent has logged. For any thread."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.terminal = Terminal.of(sys.stdout)
        self._changed = threading.Condition()
        self._logged: set[tuple[str, str]] = set()

    def line(self, source: str, text: str) -> None:
        with self._changed:
            row = (Cell(f"{time.monotonic() - self.began:.1f}s"), Cell(source), Cell(text))
            print(*self.terminal.table([row], widest=("999.9s", "Azure"), right=(0,)), sep="\n", flush=True)

    def head(self, title: str) -> None:
        with self._changed:
            print(f"\n--- {title}", flush=True)

    def add_agent_message(self, message: str, event_id: str) -> None:
        with self._changed:
            self._logged.add((message, event_id))
            self._changed.notify_all()

    def wait_for(self, message: str, event_id: str, seconds: float) -> bool:
        """Wait for a message in the agent's log; False if the time is up."""
        with self._changed:
            return self._changed.wait_for(lambda: (message, event_id) in self._logged, seconds)


def _print_azure_log(azure: Simulator, log: _DemoLog) -> None:
    for entry in azure.stream():
        event = entry.event
        if event is None:
            continue
        name = f"{event.plan.type} {event.id[:8]}"
        notice = (event.not_before_at - event.scheduled_at).total_seconds()
        messages = {
            "scheduled": f"announces {name}, at the earliest in {notice:.0f}s",
            "approved": f"gets the approval of {name}",
            "started": f"starts {name}",
            "gone": f"is done with {name}",
        }
        if entry.kind in messages:
            log.line("Azure", messages[entry.kind])


class _DemoAgent:
    """The agent, as a process whose log is shown."""

    def __init__(self, config: Path, state_dir: Path, log: _DemoLog) -> None:
        # Start it as this program was started: with -m, a script of pip's, or a package's launcher.
        this_program = [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]]
        command = [*this_program, "run", "--config", str(config), "--state-dir", str(state_dir)]
        self._log = log
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, encoding="utf-8")
        self._reader = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> Self:
        self._reader.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        code = self._process.poll()
        self._process.terminate()  # on Windows that is a kill, which does the agent no harm
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join()
        self._process.__exit__(None, None, None)
        if kind is None and code is not None:
            raise AgentError(f"the agent ended by itself with exit code {code}")

    def _show(self) -> None:
        for line in self._process.stderr or ():
            try:
                entry = json.loads(line)
            except ValueError:
                self._log.line("agent", line.rstrip())
                continue
            message = entry.get("message", "")
            reason = entry.get("reason", "")
            if message == "hook output":
                self._log.line("hook", f"{entry['hook']}: {entry['line']}")
            elif message == "approving":
                self._log.line("agent", f"approves: {reason}")
            elif message in _SHOWN_MESSAGES:
                self._log.line("agent", reason)
            elif entry.get("level") in ("warning", "error"):
                self._log.line("agent", f"{message}: {reason}" if reason else message)
            self._log.add_agent_message(message, entry.get("event_id", ""))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``demo``."""
    parser.description = (
        "Starts a simulated Azure endpoint and the real agent with a sample policy on loopback, in a temporary "
        "directory, and shows what happens. Exit code 1 if an event did not end as expected."
    )
    parser.set_defaults(handler=_run)


def _run(_arguments: argparse.Namespace) -> int:
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):  # else the agent would run on
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    log = _DemoLog()
    with tempfile.TemporaryDirectory(prefix="scheduled-events-demo-") as name, Simulator(vms=("web-1",)) as azure:
        directory = Path(name)
        config = _write_files(directory, azure.endpoint())
        print("Starts the real agent against a simulated Azure, both on loopback and in a temporary directory.\n")
        print("The policy:\n", flush=True)
        print("".join(f"    {line}\n" for line in _POLICY.splitlines()))
        threading.Thread(target=_print_azure_log, args=(azure, log), daemon=True).start()
        with _DemoAgent(config, directory / "state", log):
            azure.wait_polls(1, timeout_seconds=_WITHIN_SECONDS)
            events = [_run_case(azure, case, log) for case in _CASES]
        with contextlib.closing(Store.open_readonly(directory / "state")) as store:
            histories = {history.workflow.event.id: history for history in store.load_histories()}
    print("\nHow it ended:\n")
    ended = zip(_CASES, events, strict=True)
    results = [_verify(case, event, histories.get(event.id)) for case, event in ended]
    print(*log.terminal.table([result.row for result in results]), sep="\n")
    wrong = [result for result in results if not result.is_right]
    verdict = f"{len(wrong)} of {len(events)} did not end as expected" if wrong else "all as expected"
    print(f"\n{verdict}, in {time.monotonic() - log.began:.0f} seconds")
    return 1 if wrong else 0


def _run_case(azure: Simulator, case: _Case, log: _DemoLog) -> SimulatedEvent:
    log.head(case.title)
    event_id = azure.schedule(case.type, **case.plan)  # type: ignore[arg-type]
    azure.wait_gone(event_id, timeout_seconds=_WITHIN_SECONDS)
    log.wait_for("closed", event_id, _WITHIN_SECONDS)  # else the journal shows what is missing
    return azure.event(event_id)


def _write_files(directory: Path, endpoint: str) -> Path:
    hook = directory / "hook.py"
    hook.write_text(_HOOK, encoding="utf-8")
    hooks = "".join(
        f"  {name}: {{run: [{json.dumps(sys.executable)}, {json.dumps(str(hook))}, {name}], timeout: 10s}}\n"
        for name in ("drain", "checkpoint", "resume")
    )
    config = directory / "policy.yaml"
    # The service allows five requests a second: a faster pace than the usual 1 s, so that the demo is short.
    config.write_text(
        f"{_POLICY}hooks:\n{hooks}imds: {{endpoint: {json.dumps(endpoint)}, poll_interval: 400ms}}\n"
        "agent: {listen: off, reserve: 1s, log: {format: json}}\n",
        encoding="utf-8",
    )
    return config


class _CaseResult(NamedTuple):
    """The result of one event."""

    is_right: bool
    row: tuple[Cell, ...]


def _verify(case: _Case, event: SimulatedEvent, history: History | None) -> _CaseResult:
    """The result of an event, from Azure and the agent's history, and whether it is as expected."""
    records = history.records if history else ()
    rule = history.workflow.decision.rule if history else None
    hooks = tuple(f"{record.hook}: {record.outcome}" for record in records if record.kind == "hook_finished")
    is_completed = history is not None and not history.workflow.is_open and history.workflow.outcome == "completed"
    is_approved = event.approved_at is not None
    is_right = (rule, hooks, is_approved) == (case.rule, case.hooks, case.is_approved) and is_completed
    approved = "approved" if is_approved else "not approved"
    started = ((event.started_at or event.scheduled_at) - event.scheduled_at).total_seconds()
    summary = ", ".join((f"rule {rule or 'none'}", *hooks, approved, f"started after {started:.1f}s"))
    verdict = "ok" if is_right else "WRONG"
    return _CaseResult(is_right, (Cell(verdict), Cell(case.type), Cell(event.id[:8]), Cell(summary)))
