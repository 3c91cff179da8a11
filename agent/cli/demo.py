"""``demo``: the real agent against the simulated service, told as it happens, and checked at the end."""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent import AgentError
from agent.simulator import Happening, SimulatedEvent, Simulator
from agent.store import Store

_VM = "web-1"
_START_WITHIN_SECONDS = 15.0
_SCENE_WITHIN_SECONDS = 15.0

_POLICY = """\
rules:
  - name: user-initiated            # somebody pressed Restart: do not keep them waiting
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


@dataclass(frozen=True)
class _Scene:
    """One event and what must become of it."""

    title: str
    type: str
    plan: dict[str, Any]
    expected: str
    is_right: Callable[["_Outcome"], bool]


@dataclass(frozen=True)
class _Outcome:
    """What the two sides say became of an event: the service by its record, the agent by its journal."""

    rule: str
    hooks: tuple[str, ...]
    """``name: how it ended``, in order."""
    approved_at: float | None
    """Seconds after the service announced it."""
    approvals: int
    """Requests that held its id."""
    started_at: float
    notice_seconds: float
    closed: str
    """The agent's last word."""

    @property
    def was_early(self) -> bool:
        return self.approved_at is not None and self.started_at < self.notice_seconds


_SCENES = (
    _Scene(
        "A user restarts the machine: nothing to prepare, approved at once",
        "Reboot",
        {"source": "User", "notice_seconds": 60, "lasts_seconds": 0.8, "start_delay_seconds": 0.4},
        "approved at once",
        lambda it: it.rule == "user-initiated" and not it.hooks and it.approvals == 1 and it.was_early,
    ),
    _Scene(
        "Azure wants to pause it for 5 seconds: short enough, approved at once",
        "Freeze",
        {"duration_seconds": 5, "notice_seconds": 60, "lasts_seconds": 0.8, "start_delay_seconds": 0.4},
        "approved at once",
        lambda it: it.rule == "short-freeze" and not it.hooks and it.approvals == 1 and it.was_early,
    ),
    _Scene(
        "Azure wants to reboot the host: drain, approve, wait for the end, put back in service",
        "Reboot",
        {"notice_seconds": 60, "lasts_seconds": 1.0, "start_delay_seconds": 0.4},
        "drained, approved, recovered",
        lambda it: it.hooks == ("drain: succeeded", "resume: succeeded") and it.approvals == 1 and it.was_early,
    ),
    _Scene(
        "A Spot VM is evicted in 8 seconds: the checkpoint must be written by then",
        "Preempt",
        {"notice_seconds": 8, "lasts_seconds": 1.0, "start_delay_seconds": 0.4},
        "checkpoint in time, approved",
        lambda it: it.hooks == ("checkpoint: succeeded",) and it.approvals == 1 and it.was_early,
    ),
    _Scene(
        "The drain fails: nothing is approved, the service waits until NotBefore; recovered all the same",
        "Redeploy",
        {"notice_seconds": 3, "lasts_seconds": 1.0},
        "held, not approved, recovered",
        lambda it: (
            it.hooks == ("drain: failed", "resume: succeeded") and it.approvals == 0 and it.approved_at is None
        ),
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``demo`` has no options."""
    parser.description = (
        "Starts a simulated Azure endpoint and the real agent with a sample policy on loopback, in a temporary "
        "directory, and shows what happens. Exit code 1 if an event did not end as expected."
    )
    parser.set_defaults(handler=_run)


def _run(_: argparse.Namespace) -> int:
    teller = _Teller()
    with tempfile.TemporaryDirectory(prefix="scheduled-events-demo-") as name, Simulator(vms=(_VM,)) as azure:
        directory = Path(name)
        config = _write_files(directory, azure.endpoint())
        print("Starts the real agent against a simulated Azure, both on loopback and in a temporary directory.\n")
        print("The policy:\n", flush=True)
        print("".join(f"    {line}\n" for line in _POLICY.splitlines()))
        threading.Thread(target=_tell_azure, args=(azure, teller), daemon=True).start()
        with _agent(config, directory, teller):
            azure.wait_polls(1, timeout_seconds=_START_WITHIN_SECONDS)
            events = [_play(azure, scene, teller) for scene in _SCENES]
        outcomes = _outcomes(azure, [azure.event(event.id) for event in events], directory)
    return _tell_results(events, outcomes, time.monotonic() - teller.began)


def _play(azure: Simulator, scene: _Scene, teller: "_Teller") -> SimulatedEvent:
    teller.tell("", f"\n--- {scene.title}")
    event_id = azure.schedule(scene.type, **scene.plan)  # type: ignore[arg-type]
    azure.wait_gone(event_id, timeout_seconds=_SCENE_WITHIN_SECONDS)
    teller.wait_closed(event_id)
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


@contextlib.contextmanager
def _agent(config: Path, directory: Path, teller: "_Teller") -> Iterator[None]:
    # Started as this program was, wherever its modules were found: by -m, a script of pip's, a package's launcher.
    this_program = [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]]
    command = [*this_program, "run", "--config", str(config), "--state-dir", str(directory / "state")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, encoding="utf-8")
    reader = threading.Thread(target=_tell_agent, args=(process, teller), daemon=True)
    reader.start()
    try:
        yield
        if process.poll() is not None:
            raise AgentError(f"the agent ended by itself with exit code {process.returncode}")
    finally:
        process.terminate()  # on Windows that is a kill, which the agent takes as well
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()
        if process.stderr is not None:
            process.stderr.close()


class _Teller:
    """Prints one line at a time, from any thread, and knows which events the agent has closed."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._lock = threading.Condition()
        self._closed: set[str] = set()

    def close(self, event_id: str) -> None:
        with self._lock:
            self._closed.add(event_id)
            self._lock.notify_all()

    def wait_closed(self, event_id: str) -> None:
        """Wait for it, in bounds; if it does not come, the table will show what is missing."""
        with self._lock:
            self._lock.wait_for(lambda: event_id in self._closed, _SCENE_WITHIN_SECONDS)

    def tell(self, who: str, text: str) -> None:
        with self._lock:
            if who:
                print(f"{time.monotonic() - self.began:5.1f}s  {who:6} {text}", flush=True)
            else:
                print(text, flush=True)


def _tell_azure(azure: Simulator, teller: _Teller) -> None:
    for happening in azure.follow():
        sentence = _azure_sentence(happening)
        if sentence:
            teller.tell("Azure", sentence)


def _azure_sentence(happening: Happening) -> str:
    event = happening.event
    if event is None:
        return ""
    name = f"{event.plan.type} {event.id[:8]}"
    notice = (event.not_before_at - event.scheduled_at).total_seconds()
    words = {
        "scheduled": f"announces {name}, at the earliest in {notice:.0f}s",
        "approved": f"is told that {name} may start",
        "started": f"starts {name}",
        "gone": f"is done with {name}",
    }
    return words.get(happening.kind, "")


def _tell_agent(process: "subprocess.Popen[str]", teller: _Teller) -> None:
    for line in process.stderr or ():
        try:
            entry = json.loads(line)
        except ValueError:
            teller.tell("agent", line.rstrip())
            continue
        message = entry.get("message", "")
        if message == "hook output":
            teller.tell("hook", f"{entry['hook']}: {entry['line']}")
        elif message in _TOLD:
            teller.tell("agent", f"approves: {entry['reason']}" if message == "approving" else entry["reason"])
            if message == "closed":
                teller.close(entry["event_id"])
        elif entry.get("level") in ("warning", "error"):
            teller.tell("agent", f"{message}: {entry.get('reason', '')}")


_TOLD = ("decided", "preparing", "hook finished", "approving", "held", "recovering", "closed")


def _outcomes(azure: Simulator, events: list[SimulatedEvent], directory: Path) -> list[_Outcome]:
    with contextlib.closing(Store.look_into(directory / "state")) as store:
        journal = store.load_journal()
    outcomes = []
    for event in events:
        entries = [entry for entry in journal if entry.event_id == event.id]
        decided = next((entry.text for entry in entries if entry.kind == "decided"), "")
        ends = [entry for entry in entries if entry.kind == "hook_finished"]
        announced, approved = event.scheduled_at, event.approved_at
        outcomes.append(
            _Outcome(
                rule=decided.removeprefix("rule ").partition(" ")[0],
                hooks=tuple(f"{end.hook}: {end.outcome}" for end in ends),
                approved_at=(approved - announced).total_seconds() if approved else None,
                approvals=len(azure.approvals(event.id)),
                started_at=((event.started_at or announced) - announced).total_seconds(),
                notice_seconds=(event.not_before_at - announced).total_seconds(),
                closed=next((entry.text for entry in entries if entry.kind == "closed"), "not closed"),
            )
        )
    return outcomes


def _tell_results(events: list[SimulatedEvent], outcomes: list[_Outcome], seconds: float) -> int:
    header = ("event", "rule", "hooks", "approved", "started", "expected", "")
    rows = [header]
    wrong = 0
    for scene, event, outcome in zip(_SCENES, events, outcomes, strict=True):
        is_right = scene.is_right(outcome) and outcome.closed == "is over: completed"
        wrong += not is_right
        approved = "no" if outcome.approved_at is None else f"after {outcome.approved_at:.1f}s"
        rows.append(
            (
                f"{scene.type} {event.id[:8]}",
                outcome.rule,
                ", ".join(outcome.hooks) or "none",
                approved,
                f"after {outcome.started_at:.1f}s",
                scene.expected,
                "ok" if is_right else "WRONG",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("\nWhat came of it:\n")
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    verdict = "all as it should be" if not wrong else f"{wrong} of {len(_SCENES)} did not come out as they should"
    print(f"\n{verdict}, in {seconds:.0f} seconds")
    return 1 if wrong else 0
