"""``demo``: the real agent against the simulated service, shown as it happens, and checked at the end."""

import argparse
import contextlib
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from agent import AgentError
from agent.cli import demo_fleet
from agent.cli.demo_stage import Shown, ShownAgent, show_azure
from agent.simulator import SimulatedEvent, Simulator
from agent.status import JournalEntry
from agent.store import Store

_WITHIN_SECONDS = 15.0

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


class _Scene(NamedTuple):
    """One event, and how it must end."""

    title: str
    type: str
    plan: dict[str, Any]
    """As ``Simulator.schedule`` takes it."""
    rule: str
    hooks: tuple[str, ...]
    """``name: outcome``, in order."""
    is_approved: bool = True


_SOON = {"notice_seconds": 60, "start_delay_seconds": 0.4, "lasts_seconds": 0.8}
_SCENES = (
    _Scene(
        "A user restarts the machine: nothing to prepare, approved at once",
        "Reboot",
        {**_SOON, "source": "User"},
        rule="user-initiated",
        hooks=(),
    ),
    _Scene(
        "Azure wants to pause it for 5 seconds: short enough, approved at once",
        "Freeze",
        {**_SOON, "duration_seconds": 5},
        rule="short-freeze",
        hooks=(),
    ),
    _Scene(
        "Azure wants to reboot the host: drain, approve, wait for the end, put back in service",
        "Reboot",
        _SOON,
        rule="impactful",
        hooks=("drain: succeeded", "resume: succeeded"),
    ),
    _Scene(
        "A Spot VM is evicted in 8 seconds: the checkpoint must be written by then",
        "Preempt",
        {**_SOON, "notice_seconds": 8},
        rule="eviction",
        hooks=("checkpoint: succeeded",),
    ),
    _Scene(
        "The drain fails: nothing is approved, Azure waits until NotBefore; recovered anyway",
        "Redeploy",
        {"notice_seconds": 3, "lasts_seconds": 1.0},
        rule="impactful",
        hooks=("drain: failed", "resume: succeeded"),
        is_approved=False,
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``demo``."""
    parser.description = (
        "Starts a simulated Azure endpoint and the real agent with a sample policy on loopback, in a temporary "
        "directory, and shows what happens. With the word fleet: five agents that act together, through a "
        "simulated table or a real one. Exit code 1 if an event did not end as expected."
    )
    parser.add_argument("fleet", nargs="?", choices=("fleet",), metavar="fleet", help="five VMs that act together")
    parser.add_argument("--table", metavar="URL", help="fleet: a table in Azure, or of Azurite")
    parser.add_argument("--sas-file", metavar="FILE", help="fleet: the shared access signature for that table")
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.fleet:
        return demo_fleet.play(arguments.table, arguments.sas_file)
    if arguments.table or arguments.sas_file:
        raise AgentError("--table and --sas-file are for demo fleet", kind="usage")
    shown = Shown()
    with tempfile.TemporaryDirectory(prefix="scheduled-events-demo-") as name, Simulator(vms=("web-1",)) as azure:
        directory = Path(name)
        config = _write_files(directory, azure.endpoint())
        print("Starts the real agent against a simulated Azure, both on loopback and in a temporary directory.\n")
        print("The policy:\n", flush=True)
        print("".join(f"    {line}\n" for line in _POLICY.splitlines()))
        threading.Thread(target=show_azure, args=(azure, shown), daemon=True).start()
        with ShownAgent(config, directory / "state", shown):
            azure.wait_polls(1, timeout_seconds=_WITHIN_SECONDS)
            events = [_play(azure, scene, shown) for scene in _SCENES]
        with contextlib.closing(Store.look_into(directory / "state")) as store:
            journal = store.load_journal()
    print("\nHow it ended:\n")
    wrong = [event for scene, event in zip(_SCENES, events, strict=True) if not _ended_well(scene, event, journal)]
    verdict = f"{len(wrong)} of {len(events)} did not end as expected" if wrong else "all as expected"
    print(f"\n{verdict}, in {time.monotonic() - shown.began:.0f} seconds")
    return 1 if wrong else 0


def _play(azure: Simulator, scene: _Scene, shown: Shown) -> SimulatedEvent:
    shown.line("", f"\n--- {scene.title}")
    event_id = azure.schedule(scene.type, **scene.plan)  # type: ignore[arg-type]
    azure.wait_gone(event_id, timeout_seconds=_WITHIN_SECONDS)
    shown.wait_for("agent", "closed", event_id, _WITHIN_SECONDS)  # else the journal shows what is missing
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


def _ended_well(scene: _Scene, event: SimulatedEvent, journal: list[JournalEntry]) -> bool:
    """Print what Azure and the agent's journal say of the event; whether that is as the scene has it."""
    entries = [entry for entry in journal if entry.event_id == event.id]
    decided = next((entry.text for entry in entries if entry.kind == "decided"), "")
    rule = decided.removeprefix("rule ").partition(" ")[0]
    hooks = tuple(f"{entry.hook}: {entry.outcome}" for entry in entries if entry.kind == "hook_finished")
    is_closed = any(entry.kind == "closed" and entry.text == "is over: completed" for entry in entries)
    is_approved = event.approved_at is not None
    is_right = (rule, hooks, is_approved) == (scene.rule, scene.hooks, scene.is_approved) and is_closed
    approved = "approved" if is_approved else "not approved"
    started = ((event.started_at or event.scheduled_at) - event.scheduled_at).total_seconds()
    told = ", ".join((f"rule {rule}", *hooks, approved, f"started after {started:.1f}s"))
    print(f"{'ok' if is_right else 'WRONG':5}  {scene.type:8}  {event.id[:8]}  {told}")
    return is_right
