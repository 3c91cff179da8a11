"""config/prometheus with Prometheus itself, fed by the real agent: each alert fires when it should, and only then.

Real agents live through all that can go wrong; what they expose on the way is kept. Laid out along a time of
hours, it becomes the input of promtool's rule tests. And a Prometheus scrapes live agents by the same rules, their
times cut short, and is asked what the dashboard asks.
"""

import contextlib
import http.client
import json
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

if sys.platform == "win32":
    pytest.skip("Prometheus is taken from a Linux distribution", allow_module_level=True)

import apt
from harness import PATIENCE, Agent, Simulator
from receiver import Receiver

from scheduled_events_agent import __version__
from scheduled_events_agent.simulator.table import SimulatedTable

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "config" / "prometheus"
CACHE = ROOT / ".cache" / "prometheus"
TARGET = 'job="scheduled-events-agent",instance="vm-1:9769"'
# As the scrape configuration has it.
SCRAPE_SECONDS = 15
DRAIN = {"name": "drain", "prepare": ["drain"], "recover": ["resume"], "approve": "when-prepared"}
# Without a fleet they have nothing to show.
FLEET_PANELS = {
    "Store unavailable",
    "VMs not ready",
    "Wait for slots and VMs",
    "Requests to the store",
    "Begun without a slot",
}
AT_ONCE = {"name": "at-once", "when": {"source": "User"}, "approve": "immediately"}
# An agent with a bug in it: it fails to create the workflow of a Freeze.
WITH_BUG = """
import sys
from scheduled_events_agent.workflow import signals
from scheduled_events_agent.cli import main
create = signals._create
def faulty(event, context):
    if event.type == "Freeze":
        raise RuntimeError("a bug")
    return create(event, context)
signals._create = faulty
sys.exit(main(sys.argv[1:]))
"""
# An agent to which minutes are nothing: what a failing API server needs to have lasted has passed at once.
IN_A_HURRY = """
import sys
from datetime import timedelta
from scheduled_events_agent.status import attention
from scheduled_events_agent.cli import main
attention._KUBERNETES_WITHIN = timedelta(0)
sys.exit(main(sys.argv[1:]))
"""
# No API server listens there.
KUBECONFIG = """
clusters: [{name: here, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: agent, user: {token: t}}]
contexts: [{name: agent, context: {cluster: here, user: agent}}]
current-context: agent
"""

Series = dict[str, float]


@dataclass(frozen=True)
class Moment:
    """The metrics of an agent at one moment."""

    at: float
    """Unix time."""
    series: Series


class BuggyAgent(Agent):
    """An agent that is not as it should be."""

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", WITH_BUG, *arguments]


class HastyAgent(Agent):
    """An agent that does not wait five minutes before it calls an API server unavailable."""

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", IN_A_HURRY, *arguments]


class Timeline:
    """Moments, each held for a time as if it had lasted, and what is to fire at the end of each."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.scrapes: list[Series] = []
        self._moment: Moment | None = None
        self._began = 0
        self.expected: list[tuple[int, tuple[str, ...]]] = []

    def hold(self, moment: Moment | None, minutes: float, *alerts: str, is_polling: bool = True) -> None:
        """Go on with this moment (None: nothing is heard of the agent), at whose end just these alerts fire.

        It may go on from one call to the next. Times of the clock stay what they were, except that of the last
        poll where the agent goes on polling.
        """
        now = len(self.scrapes) * SCRAPE_SECONDS
        if moment is not self._moment:
            self._moment, self._began = moment, now
        taken_at, series = (moment.at, moment.series) if moment else (0.0, {})
        for at in range(now, now + round(minutes * 60), SCRAPE_SECONDS):
            scrape = {f"up{{{TARGET}}}": 1.0 if series else 0.0}
            for name, value in series.items():
                is_fresh = is_polling and "_last_successful_poll_" in name
                scraped_at = at if is_fresh else self._began
                scrape[name] = value + (scraped_at - taken_at if "_timestamp_seconds" in name else 0.0)
            self.scrapes.append(scrape)
        self.expected.append(((len(self.scrapes) - 1) * SCRAPE_SECONDS, alerts))

    def to_test(self) -> dict[str, Any]:
        """As a group of promtool's tests."""
        names = list(dict.fromkeys(name for scrape in self.scrapes for name in scrape))
        tests = [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{seconds}s",
                "exp_samples": [
                    {"labels": f'{{alertname="ScheduledEvents{name}"}}', "value": 1} for name in alerts
                ],
            }
            for seconds, alerts in self.expected
        ]
        inputs = [{"series": name, "values": " ".join(self._values(name))} for name in names]
        return {
            "name": self._name,
            "interval": f"{SCRAPE_SECONDS}s",
            "input_series": inputs,
            "promql_expr_test": tests,
        }

    def _values(self, name: str) -> Iterator[str]:
        was_there = False
        for scrape in self.scrapes:
            if name in scrape:
                yield f"{scrape[name]:.3f}"
            else:
                yield "stale" if was_there else "_"
            was_there = name in scrape


def expose(agent: Agent) -> Moment:
    """Scrape it."""
    time.sleep(0.2)  # clients that ask within a tenth of a second share one answer
    status, text = agent.get("/metrics")
    assert status == 200
    series = {}
    for line in text.splitlines():
        match = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
        if match and not line.startswith("#"):
            labels = f"{TARGET},{match[2]}" if match[2] else TARGET
            series[f"{match[1]}{{{labels}}}"] = float(match[3])
    return Moment(time.time(), series)


def wait_count(agent: Agent, count: float, name: str, **labels: str) -> None:
    """Wait until a counter has come so far."""
    agent.wait_until(lambda: agent.metric(name, **labels) >= count, f"{name} with {labels} was {count:g}")


def wait_attention(agent: Agent, kind: str, count: float = 1) -> None:
    """Wait until so much of a kind needs a person."""
    agent.wait_metric(count, "attention", kind=kind)


def wait_reloaded(agent: Agent) -> None:
    """Wait until the agent has read its policy again, for the first time."""
    agent.wait_log("the policy file was read again")
    agent.wait_metric(1, "config_last_reload_successful")


@contextlib.contextmanager
def living(
    directory: Path, kind: type[Agent] = Agent, *, fails: str = "", **sections: Any
) -> Iterator[tuple[Simulator, Agent]]:
    """A simulator and an agent that has polled. ``fails``: the requests that get an error instead of an answer."""
    with Simulator(vms=("vm-1",), others=("vm-2",), rate_limit=None) as sim:
        agent = kind(directory, sim.endpoint())
        try:
            if fails:
                sim.fault(None, "status", on=fails)
            sections.setdefault("rules", [AT_ONCE, DRAIN])
            sections.setdefault("hooks", agent.hooks("drain", "resume"))
            agent.write_policy(**sections)
            agent.start(is_awaited=fails != "poll")
            agent.wait_log("agent started")
            yield sim, agent
        except BaseException:
            sys.stdout.write("".join(agent.history))
            raise
        finally:
            agent.close()


# --- What agents live through. Each returns timelines.


def live_well(directory: Path) -> list[Timeline]:
    """A drain, with an approval that has to be repeated and a short pause; then one of a user's events."""
    with living(directory) as (sim, agent):
        agent.write_policy(
            rules=[AT_ONCE, DRAIN],
            hooks={
                "drain": agent.hook("drain", until="drained"),
                "resume": agent.hook("resume", until="resumed"),
            },
        )
        agent.reload()
        wait_reloaded(agent)
        idle = expose(agent)
        sim.fault(None, "status", on="approve", count=1)
        event = sim.schedule("Reboot", notice_seconds=900, lasts_seconds=None, start_delay_seconds=600.0)
        agent.wait_hook("drain", "start")
        preparing = expose(agent)
        agent.let_go("drained")
        agent.wait_phase(event, "approved")
        approved = expose(agent)
        sim.start_event(event)
        agent.wait_phase(event, "started")
        agent.freeze()
        time.sleep(2.5)  # there is nothing to wait for: this is how long it is paused
        agent.thaw()
        wait_count(agent, 1, "pause_seconds_count")
        started = expose(agent)
        sim.end(event)
        agent.wait_hook("resume", "start")
        recovering = expose(agent)
        agent.let_go("resumed")
        wait_count(agent, 1, "closed_total")
        closed = expose(agent)
        users = sim.schedule("Redeploy", source="User", notice_seconds=900, lasts_seconds=None)
        agent.wait_phase(users, "started")
        users_started = expose(agent)
        sim.end(users)
        wait_count(agent, 2, "closed_total")
        over = expose(agent)

    well = Timeline("a life in which nothing goes wrong")
    well.hold(idle, 30)
    well.hold(preparing, 4, "EventPending")
    well.hold(approved, 10, "EventPending")
    well.hold(None, 9)  # it is redeployed
    well.hold(started, 5)
    well.hold(recovering, 5)
    well.hold(closed, 10)
    well.hold(users_started, 2)
    well.hold(over, 60)

    down = Timeline("an agent that is away")
    down.hold(idle, 10)
    down.hold(None, 9.5)
    down.hold(None, 2, "AgentDown")
    down.hold(idle, 2)

    stuck = Timeline("recovery that does not end")
    stuck.hold(idle, 10)
    stuck.hold(recovering, 29)
    stuck.hold(recovering, 4, "RecoveryStuck")
    stuck.hold(closed, 2)
    return [well, down, stuck]


def live_held(directory: Path) -> list[Timeline]:
    """Hooks fail: to prepare, and to recover."""
    with living(directory) as (sim, agent):
        failing = {"drain": agent.hook("drain", exit_code=3), "resume": agent.hook("resume", exit_code=1)}
        agent.write_policy(rules=[DRAIN], hooks=failing)
        agent.reload()
        wait_reloaded(agent)
        idle = expose(agent)
        event = sim.schedule("Reboot", notice_seconds=900, lasts_seconds=None)
        agent.wait_phase(event, "held")
        wait_count(agent, 1, "hook_failures_total", stage="prepare")
        held = expose(agent)
        sim.cancel(event)
        wait_attention(agent, "recovery_failed")
        failed = expose(agent)
        agent.say("resolve", event)
        agent.wait_until(lambda: not agent.pending(), "the event was closed")
        closed = expose(agent)
    timeline = Timeline("hooks that fail")
    timeline.hold(idle, 10)
    timeline.hold(held, 1, "EventPending")
    timeline.hold(held, 10, "EventPending", "OperatorNeeded")
    timeline.hold(failed, 1)
    timeline.hold(failed, 90, "OperatorNeeded")
    timeline.hold(closed, 60)
    return [timeline]


def live_unprepared(directory: Path) -> list[Timeline]:
    """Azure starts an event before its time, and one that an operator holds."""
    with living(directory, rules=[{**DRAIN, "lead": "1m"}]) as (sim, agent):
        idle = expose(agent)
        event = sim.schedule("Reboot", notice_seconds=900, lasts_seconds=None)
        agent.wait_phase(event, "waiting")
        sim.start_event(event)
        wait_count(agent, 1, "unprepared_total", reason="time")
        sim.end(event)
        wait_count(agent, 1, "closed_total")
        early = expose(agent)
        held = sim.schedule("Redeploy", notice_seconds=900, lasts_seconds=None)
        agent.say("hold", held)
        sim.start_event(held)
        wait_count(agent, 1, "unprepared_total", reason="held")
        sim.end(held)
        wait_count(agent, 2, "closed_total")
        over = expose(agent)
    timeline = Timeline("events that start unprepared")
    timeline.hold(idle, 10)
    timeline.hold(early, 10, "Unprepared")
    timeline.hold(early, 10)
    timeline.hold(over, 10)
    return [timeline]


def live_careless(directory: Path) -> list[Timeline]:
    """A hook fails that is not required."""
    with living(directory) as (sim, agent):
        hooks = {**agent.hooks("resume"), "drain": agent.hook("drain", exit_code=3, required=False)}
        agent.write_policy(rules=[DRAIN], hooks=hooks)
        agent.reload()
        wait_reloaded(agent)
        idle = expose(agent)
        event = sim.schedule("Reboot", notice_seconds=900, lasts_seconds=0.5)
        sim.wait_gone(event)
        wait_count(agent, 1, "closed_total")
        wait_count(agent, 1, "hook_failures_total", stage="prepare")
        closed = expose(agent)
    timeline = Timeline("a hook that fails and is not required")
    timeline.hold(idle, 10)
    timeline.hold(closed, 2)
    timeline.hold(closed, 10, "HookFailed")
    timeline.hold(closed, 10)
    return [timeline]


def live_as_wanted(directory: Path) -> list[Timeline]:
    """Events that a rule leaves to an operator, or never approves, and one that the operator holds."""
    manual = {**DRAIN, "name": "manual", "when": {"type": "Reboot"}, "approve": "manual"}
    never = {**DRAIN, "name": "never", "when": {"type": "Redeploy"}, "approve": "never", "lead": "15m"}
    with living(directory, rules=[manual, never]) as (sim, agent):
        idle = expose(agent)
        far = sim.schedule("Reboot", notice_seconds=3 * 86400, lasts_seconds=None)
        wait_attention(agent, "approval_needed")
        later = expose(agent)
        sim.cancel(far)
        wait_count(agent, 1, "closed_total")
        near = sim.schedule("Reboot", notice_seconds=840, lasts_seconds=None)
        wait_attention(agent, "approval_needed")
        now = expose(agent)
        agent.say("hold", near)
        wait_attention(agent, "approval_needed", 0)
        held = expose(agent)
        sim.cancel(near)
        wait_count(agent, 2, "closed_total")
        left = sim.schedule("Redeploy", notice_seconds=840, lasts_seconds=None)
        agent.wait_phase(left, "held")
        never_approved = expose(agent)
    manual_approval = Timeline("events that an operator has to approve")
    manual_approval.hold(idle, 10)
    manual_approval.hold(later, 60, "EventPending", "OperatorNeededLater")
    manual_approval.hold(now, 1, "EventPending")
    manual_approval.hold(now, 5, "EventPending", "OperatorNeeded")
    manual_approval.hold(held, 8, "EventPending")
    not_approved = Timeline("an event that is never approved")
    not_approved.hold(idle, 10)
    not_approved.hold(never_approved, 13, "EventPending")
    return [manual_approval, not_approved]


def live_warned(directory: Path) -> list[Timeline]:
    """Recommendations: one that is prepared for, and one for which that fails."""
    rule = {**DRAIN, "name": "spot", "when": {"type": "SpotRebalanceRecommendation"}, "approve": "never"}
    with living(directory, rules=[rule]) as (sim, agent):
        event = sim.schedule("SpotRebalanceRecommendation", lasts_seconds=None)
        agent.wait_phase(event, "prepared")
        prepared = expose(agent)
        sim.end(event)
        wait_count(agent, 1, "closed_total")
        closed = expose(agent)
        failing = {**agent.hooks("resume"), "drain": agent.hook("drain", exit_code=3)}
        agent.write_policy(rules=[rule], hooks=failing)
        agent.reload()
        wait_reloaded(agent)
        sim.schedule("SpotRebalanceRecommendation", lasts_seconds=None)
        wait_attention(agent, "prepare_failed")
        failed = expose(agent)
    timeline = Timeline("recommendations")
    timeline.hold(prepared, 30)
    timeline.hold(closed, 10)
    timeline.hold(failed, 30, "OperatorNeededLater")
    return [timeline]


def live_crashing(directory: Path) -> list[Timeline]:
    """An agent that is killed three times, and is away for 15 seconds of each minute."""
    with living(directory) as (_, agent):
        for _number in range(3):
            idle = expose(agent)
            agent.kill()
            agent.start()
        wait_attention(agent, "agent_restarts")
        crashed = expose(agent)
    timeline = Timeline("an agent that crashes")
    timeline.hold(idle, 10)
    for _number in range(10):
        timeline.hold(None, 0.25)
        timeline.hold(idle, 0.75)
    for _number in range(10):
        timeline.hold(crashed, 0.75, "AgentRestarts")
        timeline.hold(None, 0.25, "AgentRestarts")
    return [timeline]


def live_watching(directory: Path) -> list[Timeline]:
    """Events that no rule matches, or that are of another machine."""
    watch = {"name": "watch", "when": {"affects": "others"}}
    with living(directory, rules=[AT_ONCE, watch], hooks={}) as (sim, agent):
        sim.schedule("Reboot", notice_seconds=900)
        sim.schedule("Reboot", notice_seconds=900, vms=["vm-2"])
        wait_count(agent, 2, "pending")
        timeline = Timeline("events that are only observed")
        timeline.hold(expose(agent), 14, "EventPending")
        return [timeline]


def live_observing(directory: Path) -> list[Timeline]:
    """An agent whose policy has it only observe, for more than a day."""
    with living(directory) as (_, agent):
        agent.write_policy(agent={"mode": "observe"}, rules=[AT_ONCE], hooks={})
        agent.reload()
        wait_reloaded(agent)
        moment = expose(agent)
    # A day of every series would be a million samples.
    series = {name: value for name, value in moment.series.items() if name.startswith("scheduled_events_acting")}
    watching = Moment(moment.at, series)
    timeline = Timeline("an agent that only observes")
    timeline.hold(watching, 23 * 60)
    timeline.hold(watching, 2 * 60, "OnlyObserves")
    return [timeline]


def live_unheard(directory: Path) -> list[Timeline]:
    """The service answers approvals with errors, then polls, too."""
    with living(directory) as (sim, agent):
        idle = expose(agent)
        sim.fault(None, "status", on="approve")
        event = sim.schedule("Reboot", notice_seconds=900, lasts_seconds=None)
        wait_count(agent, 1, "approvals_total", outcome="server_error")
        failed_once = expose(agent)
        wait_attention(agent, "approval_failing")
        failing = expose(agent)
        sim.clear_faults()
        sim.wait_approved(event)
        sim.end(event)
        wait_count(agent, 1, "closed_total")
        closed = expose(agent)
        sim.fault(None, "status", on="poll")
        wait_count(agent, 2, "polls_total", outcome="server_error")
        unheard = expose(agent)
        sim.clear_faults()
        wait_count(agent, agent.metric("polls_total", outcome="ok") + 1, "polls_total", outcome="ok")
        heard = expose(agent)
    approvals = Timeline("approvals that fail")
    approvals.hold(idle, 10)
    approvals.hold(failed_once, 1, "EventPending")
    approvals.hold(failing, 1, "EventPending")
    approvals.hold(failing, 5, "EventPending", "OperatorNeeded")
    approvals.hold(closed, 5)
    polls_fail = Timeline("polls that fail")
    polls_fail.hold(closed, 10)
    polls_fail.hold(unheard, 4.5, is_polling=False)
    polls_fail.hold(unheard, 2, "PollingStale", is_polling=False)
    polls_fail.hold(heard, 1)
    with living(directory / "never", fails="poll") as (_, agent):
        wait_count(agent, 1, "polls_total", outcome="server_error")
        never = expose(agent)
    from_start = Timeline("polls that never succeeded")
    from_start.hold(never, 2, is_polling=False)
    from_start.hold(never, 2, "PollingStale", is_polling=False)
    return [approvals, polls_fail, from_start]


def live_begun_early(directory: Path) -> list[Timeline]:
    """An operator approves an event days ahead, and takes that back while a hook prepares for it."""
    rule = {**DRAIN, "lead": "15m"}
    with living(directory, rules=[rule]) as (sim, agent):
        agent.write_policy(
            rules=[rule], hooks={**agent.hooks("resume"), "drain": agent.hook("drain", until="drained")}
        )
        agent.reload()
        wait_reloaded(agent)
        idle = expose(agent)
        event = sim.schedule("Reboot", notice_seconds=3 * 86400, lasts_seconds=None)
        agent.wait_phase(event, "waiting")
        agent.say("approve", event)
        agent.wait_hook("drain", "start")
        agent.say("release", event)
        agent.let_go("drained")
        wait_attention(agent, "out_of_service")
        early = expose(agent)
    timeline = Timeline("a VM that is prepared days ahead")
    timeline.hold(idle, 10)
    timeline.hold(early, 4.5, "EventPending")
    timeline.hold(early, 60, "EventPending", "OutOfService")
    return [timeline]


def live_nameless(directory: Path) -> list[Timeline]:
    """The service does not say which VM this is, and an event is pending."""
    with living(directory, fails="instance") as (sim, agent):
        sim.schedule("Reboot", notice_seconds=3600, lasts_seconds=None)
        wait_attention(agent, "vm_unknown")
        nameless = expose(agent)
    timeline = Timeline("a VM whose name is not known")
    timeline.hold(nameless, 4.5, "EventPending")
    timeline.hold(nameless, 40, "EventPending", "VmUnknown")
    timeline.hold(nameless, 5, "EventPending", "OperatorNeeded")
    return [timeline]


def live_renamed(directory: Path) -> list[Timeline]:
    """The policy gives the VM another name while it is prepared for an event."""
    policy: dict[str, Any] = {"rules": [{**DRAIN, "approve": "manual", "lead": "2h"}]}
    with living(directory, **policy) as (sim, agent):
        event = sim.schedule("Reboot", notice_seconds=3600, lasts_seconds=None)
        agent.wait_phase(event, "prepared")
        agent.write_policy(**policy, hooks=agent.hooks("drain", "resume"), vm={"name": "vm-9"})
        agent.reload()
        wait_attention(agent, "vm_changed")
        renamed = expose(agent)
        sim.cancel(event)
        wait_count(agent, 1, "closed_total")
        closed = expose(agent)
    timeline = Timeline("a VM that gets another name while it is prepared")
    timeline.hold(renamed, 1)
    timeline.hold(renamed, 50, "OperatorNeeded")
    timeline.hold(closed, 10)
    return [timeline]


def live_in_another_time(directory: Path) -> list[Timeline]:
    """The clock of the VM is behind, then right again."""
    with living(directory) as (sim, agent):
        sim.fault(None, "clock_ahead")
        wait_attention(agent, "clock_wrong")
        wrong = expose(agent)
        # Its clock is ten minutes behind that of the service, which Prometheus has, too.
        wrong = Moment(wrong.at + 600, wrong.series)
        sim.clear_faults()
        agent.wait_metric(0.0, "attention", kind="clock_wrong")
        right = expose(agent)
    timeline = Timeline("a clock that is behind")
    timeline.hold(wrong, 5)
    timeline.hold(wrong, 60, "SetupBroken")
    timeline.hold(right, 10)
    return [timeline]


def live_unnotified(directory: Path) -> list[Timeline]:
    """A service rejects its notifications."""
    with (
        Receiver(lambda: "400") as receiver,
        living(directory, notify=[{"name": "ops", "to": receiver.url}]) as (sim, agent),
    ):
        idle = expose(agent)
        event = sim.schedule("Freeze", notice_seconds=900)
        wait_count(agent, 1, "notifications_dropped_total", reason="refused")
        sim.cancel(event)
        wait_count(agent, 1, "closed_total")
        wait_count(agent, 2, "notifications_dropped_total", reason="refused")
        wait_attention(agent, "notifications_failing")
        refused = expose(agent)
    timeline = Timeline("notices that are refused")
    timeline.hold(idle, 10)
    timeline.hold(refused, 5)
    timeline.hold(refused, 60, "SetupBroken")
    return [timeline]


def live_without_table(directory: Path) -> list[Timeline]:
    """An event waits for a slot, and the fleet's store is unavailable; a later one can wait no longer."""
    directory.mkdir(parents=True)
    sas_file = directory / "sas"
    sas_file.touch(mode=0o600)
    sas_file.write_text(SimulatedTable.SAS, encoding="utf-8")
    table = SimulatedTable()
    fleet = {"group": "web", "table": table.url, "credential": {"sas_file": str(sas_file)}, "max_events": 1}
    with living(directory / "agent", fleet=fleet) as (sim, agent):
        with table:
            wait_count(agent, 1, "fleet_requests_total", operation="list", result="ok")
            idle = expose(agent)
        event = sim.schedule("Redeploy", notice_seconds=900)
        wait_attention(agent, "fleet_unavailable")
        waiting = expose(agent)
        sim.cancel(event)
        wait_count(agent, 1, "closed_total")
        canceled = expose(agent)
        late = sim.schedule("Redeploy", notice_seconds=200)
        wait_count(agent, 1, "fleet_begun_without_slot_total", reason="late")
        sim.cancel(late)
        wait_count(agent, 2, "closed_total")
        begun = expose(agent)
    timeline = Timeline("a table that is unavailable")
    timeline.hold(idle, 10)
    timeline.hold(waiting, 8, "EventPending")
    timeline.hold(waiting, 3, "EventPending", "FleetUnavailable")
    timeline.hold(canceled, 10, "FleetUnavailable")
    timeline.hold(begun, 10, "FleetUnavailable", "BegunWithoutSlot")
    return [timeline]


def live_without_cluster(directory: Path) -> list[Timeline]:
    """The Kubernetes API server cannot be reached; then the policy no longer reports to it."""
    directory.mkdir(parents=True)
    kubeconfig = directory / "kubeconfig"
    kubeconfig.write_text(KUBECONFIG, encoding="utf-8")
    cluster = {"node": "vm-1", "kubeconfig": str(kubeconfig)}
    with living(directory / "agent", HastyAgent, kubernetes=cluster) as (_, agent):
        wait_attention(agent, "kubernetes_unavailable")
        failing = expose(agent)
        agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
        agent.reload()
        wait_reloaded(agent)
        wait_attention(agent, "kubernetes_unavailable", 0)
        over = expose(agent)
    timeline = Timeline("an API server that cannot be reached")
    timeline.hold(failing, 5)
    timeline.hold(failing, 8, "KubernetesUnavailable")
    timeline.hold(over, 10)
    return [timeline]


def live_refused(directory: Path) -> list[Timeline]:
    """A policy file with a mistake is offered, then corrected; the machine is paused for eleven seconds."""
    with living(directory) as (_, agent):
        idle = expose(agent)
        good = agent.config.read_text(encoding="utf-8")
        agent.config.write_text("rules: [{name: x, aprove: never}]\n", encoding="utf-8")
        agent.reload()
        wait_attention(agent, "policy_rejected")
        refused = expose(agent)
        agent.config.write_text(good, encoding="utf-8")
        agent.reload()
        wait_reloaded(agent)
        mended = expose(agent)
        agent.freeze()
        time.sleep(11.5)  # there is nothing to wait for: this is how long it is paused
        agent.thaw()
        wait_count(agent, 10, "last_pause_seconds")
        paused = expose(agent)
    reload = Timeline("a policy file that is refused")
    reload.hold(idle, 10)
    reload.hold(refused, 5)
    reload.hold(refused, 2, "SetupBroken")
    reload.hold(mended, 2)
    pause = Timeline("a long pause")
    pause.hold(mended, 10)
    pause.hold(paused, 10, "LongPause")
    pause.hold(paused, 10)
    return [reload, pause]


def live_without_disk(directory: Path) -> list[Timeline]:
    """Something else keeps the state file locked while an event comes: once for a moment, once for long."""

    def count(number: int) -> None:
        wait_count(agent, number, "store_errors_total", kind="locked")

    with living(directory) as (sim, agent):
        idle = expose(agent)
        with contextlib.closing(sqlite3.connect(agent.state_dir / "state.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            event = sim.schedule("Reboot", source="User", notice_seconds=900, lasts_seconds=0.5)
            count(1)
            other.execute("ROLLBACK")
            sim.wait_gone(event)
            wait_count(agent, 1, "closed_total")
            works = expose(agent)
            errors = round(agent.metric("store_errors_total", kind="locked"))
            other.execute("BEGIN IMMEDIATE")
            sim.schedule("Reboot", source="User", notice_seconds=900)
            count(errors + 1)
            wait_attention(agent, "unhealthy")
            failing = expose(agent)
            other.execute("ROLLBACK")
    timeline = Timeline("a state file that cannot be written")
    timeline.hold(idle, 10)
    timeline.hold(works, 4)
    timeline.hold(failing, 2)
    timeline.hold(failing, 5, "Unhealthy")
    timeline.hold(works, 5)
    return [timeline]


def live_without_its_state(directory: Path) -> list[Timeline]:
    """The state file is damaged while the machine is prepared. At the next start the event is over."""
    with living(directory) as (sim, agent):
        agent.write_policy(
            rules=[{**DRAIN, "approve": "manual", "lead": "1d"}], hooks=agent.hooks("drain", "resume")
        )
        agent.reload()
        wait_reloaded(agent)
        idle = expose(agent)
        event = sim.schedule("Reboot", notice_seconds=900)
        agent.wait_log("prepared", event_id=event)
        agent.kill()
        for log in agent.state_dir.glob("state.db-*"):
            log.unlink()
        (agent.state_dir / "state.db").write_bytes(b"no database " * 1000)
        sim.cancel(event)
        agent.start()
        wait_attention(agent, "state_lost")
        lost = expose(agent)
        agent.say("resolve", "state_lost")
        wait_attention(agent, "state_lost", 0)
        resolved = expose(agent)
    timeline = Timeline("a state file that was damaged")
    timeline.hold(idle, 10)
    timeline.hold(lost, 1)
    timeline.hold(lost, 90, "OperatorNeeded")
    timeline.hold(resolved, 10)
    return [timeline]


def live_with_a_bug(directory: Path) -> list[Timeline]:
    """An agent with a bug, one of whose on_clear hooks fails."""
    with living(directory, BuggyAgent) as (sim, agent):
        agent.write_policy(
            rules=[DRAIN],
            on_clear=["uncordon"],
            hooks={**agent.hooks("drain", "resume"), "uncordon": agent.hook("uncordon", exit_code=1)},
        )
        agent.stop()
        agent.start()
        agent.wait_log("on_clear hook ended")
        cleared = expose(agent)
        event = sim.schedule("Freeze", notice_seconds=900)
        wait_count(agent, 1, "bugs_total")
        wait_attention(agent, "unhealthy")
        met = expose(agent)
        sim.cancel(event)
        wait_attention(agent, "unhealthy", 0)
        over = expose(agent)
    timeline = Timeline("an agent with a bug")
    timeline.hold(cleared, 10, "OnClearFailed")
    timeline.hold(met, 2, "OnClearFailed")
    timeline.hold(met, 10, "OnClearFailed", "Unhealthy")
    timeline.hold(over, 45, "AgentBug", "OnClearFailed")
    timeline.hold(over, 10, "OnClearFailed")
    return [timeline]


def nobody() -> Timeline:
    """Prometheus has no target at all."""
    timeline = Timeline("no target")
    timeline.scrapes = [{"another": 1.0}] * 80
    timeline.expected = [(9 * 60, ()), (11 * 60, ("AgentAbsent",))]
    return timeline


LIVES: tuple[Callable[[Path], list[Timeline]], ...] = (
    live_well,
    live_held,
    live_unprepared,
    live_careless,
    live_as_wanted,
    live_warned,
    live_crashing,
    live_watching,
    live_observing,
    live_unheard,
    live_begun_early,
    live_nameless,
    live_renamed,
    live_in_another_time,
    live_unnotified,
    live_without_table,
    live_without_cluster,
    live_refused,
    live_without_disk,
    live_without_its_state,
    live_with_a_bug,
)


# --- Prometheus' programs


@pytest.fixture(scope="session")
def programs() -> Path:
    """Where prometheus and promtool are. Unpacked, not installed: a package of it would start a server."""
    for found in (CACHE / "usr/bin", Path("/usr/bin")):
        if (found / "promtool").exists() and (found / "prometheus").exists():
            return found
    apt.unpack(CACHE, "prometheus")
    return CACHE / "usr/bin"


def promtool(programs: Path, *arguments: str, cwd: Path = PACKAGE) -> str:
    """Run it; returns what it says if all is well."""
    done = subprocess.run(
        [str(programs / "promtool"), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE * 10,  # it counts on one core: half a minute on a calm machine
    )
    assert done.returncode == 0, f"promtool {' '.join(arguments)}\n{done.stdout}{done.stderr}"
    return done.stdout


class Prometheus:
    """A server of our own on a free port of loopback."""

    def __init__(self, programs: Path, directory: Path) -> None:
        self._process = subprocess.Popen(
            [
                str(programs / "prometheus"),
                f"--config.file={directory / 'prometheus.yaml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._address = ""
        self._has_begun = threading.Event()  # to answer, or ended
        threading.Thread(target=self._read, daemon=True).start()
        self._has_begun.wait(PATIENCE)
        assert self._process.poll() is None, "".join(self.lines)

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line)
            match = re.search(r'msg="Listening on" address=(\S+)', line)
            if match:
                self._address = match[1]
            if "Server is ready to receive web requests" in line:
                self._has_begun.set()
        self._has_begun.set()

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its API."""
        with contextlib.closing(http.client.HTTPConnection(self._address, timeout=PATIENCE)) as connection:
            connection.request("GET", f"/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
            answer = json.load(connection.getresponse())
        assert answer["status"] == "success", (path, parameters, answer)
        return answer["data"]

    def firing(self) -> dict[tuple[str, str], Mapping[str, Any]]:
        """Alerts that fire, by instance and name."""
        return {
            (
                alert["labels"].get("instance", ""),
                alert["labels"]["alertname"].removeprefix("ScheduledEvents"),
            ): alert
            for alert in self.ask("alerts")["alerts"]
            if alert["state"] == "firing"
        }

    def close(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)
        if self._process.stderr is not None:
            self._process.stderr.close()


# --- The tests


def test_promtool_accepts_the_files_named_in_the_readme(programs: Path) -> None:
    commands = re.findall(r"^\$ promtool (.+)$", (PACKAGE / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    said = [promtool(programs, *command.split()) for command in commands]
    assert [command.split()[0] for command in commands] == ["check", "test", "check"]
    assert f"SUCCESS: {len(rules_of(PACKAGE))} rules found" in said[0]


def test_prometheus_accepts_the_configuration_with_all_that_is_commented_out(
    programs: Path, tmp_path: Path
) -> None:
    text = (PACKAGE / "prometheus.yaml").read_text(encoding="utf-8")
    (tmp_path / "prometheus.yaml").write_text(re.sub(r"^( *)#(?! \S)", r"\1", text, flags=re.MULTILINE))
    shutil.copy(PACKAGE / "rules.yaml", tmp_path)
    for name in ("ca.pem", "client.pem", "client.key"):
        (tmp_path / name).touch()
    assert "SUCCESS" in promtool(programs, "check", "config", "--syntax-only", "prometheus.yaml", cwd=tmp_path)


@pytest.mark.parametrize("shows_certificate", [False, True], ids=["of the server alone", "of the client too"])
def test_prometheus_accepts_the_configuration_that_asks_for_pages_with_tls(
    programs: Path, tmp_path: Path, shows_certificate: bool
) -> None:
    text = (PACKAGE / "prometheus.yaml").read_text(encoding="utf-8")
    before, scheme, of_tls = text.partition("    #scheme: https\n")
    of_tls = re.sub(r"^( *)#", r"\1", scheme + of_tls, flags=re.MULTILINE)
    server_only = re.sub(r"^ *(?:cert|key)_file: .*\n", "", of_tls, flags=re.MULTILINE)
    assert len(server_only.splitlines()) == len(of_tls.splitlines()) - 2
    (tmp_path / "prometheus.yaml").write_text(before + (of_tls if shows_certificate else server_only))
    shutil.copy(PACKAGE / "rules.yaml", tmp_path)
    for name in ("ca.pem", "client.pem", "client.key"):
        (tmp_path / name).touch()
    # The files are there, and are looked at without --syntax-only.
    assert "SUCCESS" in promtool(programs, "check", "config", "prometheus.yaml", cwd=tmp_path)


def test_promtool_parses_every_query_of_the_dashboard(programs: Path, tmp_path: Path) -> None:
    queries = [expression for _, expression in dashboard_queries()]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    said = promtool(programs, "check", "rules", "rules.yaml", cwd=tmp_path)
    assert f"SUCCESS: {len(queries)} rules found" in said


def test_alerts_fire_on_metrics_of_troubled_agents_only(programs: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(len(LIVES)) as pool:
        lives = [pool.submit(live, tmp_path / live.__name__) for live in LIVES]
        timelines = [timeline for life in lives for timeline in life.result()] + [nobody()]
    fired = {name for timeline in timelines for _, alerts in timeline.expected for name in alerts}
    known = {rule["alert"].removeprefix("ScheduledEvents") for rule in rules_of(PACKAGE) if "alert" in rule}
    assert fired == known
    tests = {
        "rule_files": [str(PACKAGE / "rules.yaml")],
        "evaluation_interval": f"{SCRAPE_SECONDS}s",
        "tests": [timeline.to_test() for timeline in timelines],
    }
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests, sort_keys=False, width=10**9))
    assert "SUCCESS" in promtool(programs, "test", "rules", "tests.yaml", cwd=tmp_path)


def test_prometheus_raises_the_alerts_and_serves_the_dashboard(programs: Path, tmp_path: Path) -> None:
    away = {"name": "away", "to": "http://127.0.0.1:1"}  # what waits for it is on the dashboard
    with (
        living(tmp_path / "well", notify=[away]) as (well, healthy),
        living(tmp_path / "ill") as (ill, troubled),
    ):
        failing = {**troubled.hooks("resume"), "drain": troubled.hook("drain", exit_code=3)}
        troubled.write_policy(rules=[AT_ONCE, DRAIN], hooks=failing)
        with_note = {**healthy.hooks("drain", "resume"), "note": healthy.hook("note", exit_code=3)}
        healthy.write_policy(notify=[away], rules=[{**AT_ONCE, "on_start": ["note"]}, DRAIN], hooks=with_note)
        for agent in (healthy, troubled):
            agent.reload()
            wait_reloaded(agent)
        addresses = [agent.wait_log("agent started")["listen"] for agent in (healthy, troubled)]
        write_quick_configuration(tmp_path, addresses)
        prometheus = Prometheus(programs, tmp_path)
        try:
            troubled.wait_until(
                lambda: len(prometheus.ask("query", query="scheduled_events_ready")["result"]) == 2,
                "both had been scraped",
            )
            # Before its first scrape Prometheus knew no agent at all.
            troubled.wait_until(lambda: not prometheus.firing(), "nothing fired")
            for sim in (well, ill):
                users = sim.schedule("Freeze", source="User", notice_seconds=900, lasts_seconds=0.5)
                sim.wait_gone(users)
            event = ill.schedule("Reboot", notice_seconds=290, lasts_seconds=None)
            troubled.wait_phase(event, "held")
            troubled.config.write_text("rules: [{name: x, aprove: never}]\n", encoding="utf-8")
            troubled.reload()
            names = ("EventPending", "OperatorNeeded", "SetupBroken")
            expected = {(addresses[0], "HookFailed"), *((addresses[1], name) for name in names)}
            fires = troubled.wait_until(
                lambda: found if (found := prometheus.firing()).keys() == expected else {},
                f"just {expected} fired",
            )
            needed = fires[addresses[1], "OperatorNeeded"]["annotations"]
            assert re.fullmatch(
                rf"Preparation of {addresses[1]} for an event failed; Azure starts it in [1-4]m \d+s\.",
                needed["summary"],
            )
            failed = fires[addresses[0], "HookFailed"]["annotations"]["description"]
            assert failed.startswith("Failed since the agent started: note (failed, 1x). The log has the output. ")
            texts = " ".join(text for alert in fires.values() for text in alert["annotations"].values())
            assert "error expanding" not in texts
            assert "<no value>" not in texts

            def without_result() -> set[tuple[str, str]]:
                """Title and query."""
                queries = dashboard_queries()
                return {one for one in queries if not prometheus.ask("query", query=one[1])["result"]}

            without_at_first = without_result()
            ill.start_event(event)
            unprepared = "increase(scheduled_events_unprepared_total[5m]) > 0"
            troubled.wait_until(
                lambda: prometheus.ask("query", query=unprepared)["result"],
                "it was scraped that the event has started unprepared",
            )
            empty = {title for title, _ in without_at_first & without_result()}
            # Where nothing need have happened: a panel with several queries is named for each.
            assert empty - FLEET_PANELS <= {"Measured pauses", "Agent trouble", "Notifications"}
            assert empty >= FLEET_PANELS
        finally:
            prometheus.close()


def test_a_roll_out_stops_at_every_alert_that_is_no_info() -> None:
    alerts = [rule for rule in rules_of(PACKAGE) if "alert" in rule]
    serious = {rule["alert"] for rule in alerts if rule["labels"]["severity"] != "info"}
    _, _, stops = roll_out_page().partition("stop at each of them:\n")
    listed = re.findall(r"`(ScheduledEvents\w+)`", stops.partition("\n\n**")[0])
    # Of those, this one is wanted in the week before, and the page has it silenced.
    assert sorted([*listed, "ScheduledEventsOnlyObserves"]) == sorted(serious)


def test_the_expressions_of_a_roll_out_tell_decisions_versions_and_policies(
    programs: Path, tmp_path: Path
) -> None:
    blocks = re.findall(r"^```promql\n(.*?)^```$", roll_out_page(), re.MULTILINE | re.DOTALL)
    decisions, versions, policies = "".join(blocks).splitlines()
    (command,) = re.findall(r"^\$ sudo (sha256sum .+)$", roll_out_page(), re.MULTILINE)
    with (
        living(tmp_path / "first") as (_, first),
        living(tmp_path / "last", agent={"mode": "observe"}) as (sim, last),
    ):
        agents = (first, last)
        write_quick_configuration(tmp_path, [agent.wait_log("agent started")["listen"] for agent in agents])
        prometheus = Prometheus(programs, tmp_path)

        def values(query: str) -> dict[tuple[str, ...], float]:
            """By the values of the labels, in the order of their names."""
            found = prometheus.ask("query", query=query)["result"]
            return {
                tuple(value for _, value in sorted(one["metric"].items())): float(one["value"][1]) for one in found
            }

        try:
            last.wait_until(lambda: values(versions) == {(__version__,): 2}, "both had been scraped")
            files = [command.replace("/etc/scheduled-events-agent", str(agent.directory)) for agent in agents]
            sums = [subprocess.check_output(shlex.split(line), text=True).split()[0] for line in files]
            assert values(policies) == {(value,): 1 for value in sums}
            none_yet = {("immediately", "at-once"): 0, ("never", "none"): 0, ("when-prepared", "drain"): 0}
            last.wait_until(lambda: values(decisions) == none_yet, "there were two scrapes to compare")
            event = sim.schedule("Reboot", notice_seconds=900)
            last.wait_until(lambda: values(decisions)["when-prepared", "drain"] > 0, "the decision was counted")
            assert last.pending()[event]["phase"] == "waiting"  # it only observes
        finally:
            prometheus.close()


def roll_out_page() -> str:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    return page.partition("\n## Rolling it out\n")[2].partition("\n## ")[0]


def rules_of(directory: Path) -> list[dict[str, Any]]:
    document = yaml.safe_load((directory / "rules.yaml").read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def dashboard_queries() -> list[tuple[str, str]]:
    """Title of the panel and query, as Grafana would ask for all agents."""
    model = json.loads((PACKAGE / "dashboard.json").read_text(encoding="utf-8"))
    return [
        (
            panel["title"],
            re.sub(r"\$(job|instance)", ".*", target["expr"]).replace("$__rate_interval", "5m"),
        )
        for row in model["panels"]
        for panel in (row, *row.get("panels", ()))
        for target in panel.get("targets", [])
    ]


def write_quick_configuration(directory: Path, addresses: list[str]) -> None:
    """The package's own configuration and rules for these agents, with minutes made seconds."""
    config = yaml.safe_load((PACKAGE / "prometheus.yaml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    (job,) = config["scrape_configs"]
    job["scrape_timeout"] = "500ms"
    job["static_configs"] = [{"targets": addresses}]
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    rules = (PACKAGE / "rules.yaml").read_text(encoding="utf-8")
    rules = re.sub(r"for: \d+m", "for: 2s", rules)
    (directory / "rules.yaml").write_text(rules)
