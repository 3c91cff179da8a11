"""``demo``: the real agent against the simulated service, shown as it happens, and checked at the end."""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from agent import AgentError
from agent.simulator import Happening, SimulatedEvent, Simulator
from agent.status import JournalEntry
from agent.store import Store

_VM = "web-1"
_START_WITHIN_SECONDS = 15.0
_SCENE_WITHIN_SECONDS = 15.0

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


@dataclass(frozen=True)
class _Scene:
    """One event, and how it must end."""

    title: str
    type: str
    plan: dict[str, Any]
    """As ``Simulator.schedule`` takes it."""
    rule: str
    hooks: tuple[str, ...]
    """``name: outcome``, in order."""
    is_approved: bool
    summary: str


_SOON = {"notice_seconds": 60, "start_delay_seconds": 0.4, "lasts_seconds": 0.8}
_SCENES = (
    _Scene(
        "A user restarts the machine: nothing to prepare, approved at once",
        "Reboot",
        {**_SOON, "source": "User"},
        rule="user-initiated",
        hooks=(),
        is_approved=True,
        summary="approved at once",
    ),
    _Scene(
        "Azure wants to pause it for 5 seconds: short enough, approved at once",
        "Freeze",
        {**_SOON, "duration_seconds": 5},
        rule="short-freeze",
        hooks=(),
        is_approved=True,
        summary="approved at once",
    ),
    _Scene(
        "Azure wants to reboot the host: drain, approve, wait for the end, put back in service",
        "Reboot",
        _SOON,
        rule="impactful",
        hooks=("drain: succeeded", "resume: succeeded"),
        is_approved=True,
        summary="drained, approved, recovered",
    ),
    _Scene(
        "A Spot VM is evicted in 8 seconds: the checkpoint must be written by then",
        "Preempt",
        {**_SOON, "notice_seconds": 8},
        rule="eviction",
        hooks=("checkpoint: succeeded",),
        is_approved=True,
        summary="checkpoint in time, approved",
    ),
    _Scene(
        "The drain fails: nothing is approved, Azure waits until NotBefore; recovered anyway",
        "Redeploy",
        {"notice_seconds": 3, "lasts_seconds": 1.0},
        rule="impactful",
        hooks=("drain: failed", "resume: succeeded"),
        is_approved=False,
        summary="held, not approved, recovered",
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
        with contextlib.closing(Store.look_into(directory / "state")) as store:
            journal = store.load_journal()
        return _show_results(azure, events, journal, time.monotonic() - teller.began)


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
        """Wait some seconds for it; if it does not come, the table shows what is missing."""
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
        "approved": f"gets the approval of {name}",
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


def _show_results(
    azure: Simulator, events: list[SimulatedEvent], journal: list[JournalEntry], seconds: float
) -> int:
    """The table of what Azure and the agent's journal say; 1 if an event did not end as its scene says."""
    rows = [("event", "rule", "hooks", "approved", "started", "expected", "")]
    wrong = 0
    for scene, event in zip(_SCENES, events, strict=True):
        entries = [entry for entry in journal if entry.event_id == event.id]
        decided = next((entry.text for entry in entries if entry.kind == "decided"), "")
        rule = decided.removeprefix("rule ").partition(" ")[0]
        hooks = tuple(f"{entry.hook}: {entry.outcome}" for entry in entries if entry.kind == "hook_finished")
        is_closed = any(entry.kind == "closed" and entry.text == "is over: completed" for entry in entries)
        count, started_at = len(azure.approvals(event.id)), event.started_at or event.scheduled_at
        is_early = event.approved_at is not None and started_at < event.not_before_at
        is_right = (rule, hooks, count, is_early) == (
            scene.rule,
            scene.hooks,
            scene.is_approved,
            scene.is_approved,
        )
        wrong += not (is_right and is_closed)
        rows.append(
            (
                f"{scene.type} {event.id[:8]}",
                rule,
                ", ".join(hooks) or "none",
                _after(event, event.approved_at) if event.approved_at else "no",
                _after(event, started_at),
                scene.summary,
                "ok" if is_right and is_closed else "WRONG",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("\nHow it ended:\n")
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    verdict = "all as expected" if not wrong else f"{wrong} of {len(_SCENES)} did not end as expected"
    print(f"\n{verdict}, in {seconds:.0f} seconds")
    return 1 if wrong else 0


def _after(event: SimulatedEvent, at: datetime) -> str:
    return f"after {(at - event.scheduled_at).total_seconds():.1f}s"
