"""The status page in a real browser: nothing hostile runs, nothing overflows, nothing is disturbed."""

import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

if sys.platform == "win32":
    pytest.skip("the browser comes from Debian's packages", allow_module_level=True)

from chromium import Browser, Tab, browser
from harness import Agent, Simulator
from ports import free_port

from scheduled_events_agent.imds.compare import Seen
from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.policy import Decision, Rule
from scheduled_events_agent.status import (
    ActivePolicy,
    FleetState,
    Journal,
    JournalRecord,
    NotifiedTarget,
    Status,
    SuggestedCommand,
    TargetFailure,
    Vm,
)
from scheduled_events_agent.status.events import to_status, with_output
from scheduled_events_agent.status.facts import Facts, History, RunningHook
from scheduled_events_agent.status.history import merge, to_journal
from scheduled_events_agent.web.server import Response, WebServer
from scheduled_events_agent.web.static import FILES
from scheduled_events_agent.workflow import (
    Approval,
    Context,
    OperatorDecision,
    Phase,
    StageStatus,
    WaitReason,
    Workflow,
    advance,
)

NOW = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0)
"""The agent's clock. It is the page's too, so no time of a scene is of another day unless it is meant to be."""
SEEN_AT = NOW - timedelta(seconds=7300)
RULE = Rule(name="impactful", prepare=("drain", "checkpoint"), recover=("resume",), approve="when-prepared")
PHONE, DESKTOP = 360, 1280
HOSTILE = (
    "<script>window.ran=1</script><img src=x onerror=window.ran=2> \"'><svg/onload=window.ran=3> & &lt; "
    "\u202egnirts\u202c \u05e9\u05dc\u05d5\u05dd 🧊🔥 </style></main><a href=javascript:window.ran=4>x</a> "
    + "x"
    * 4096
)


def event(number: int = 1, **changes: Any) -> ScheduledEvent:
    plain = ScheduledEvent(
        id=f"C7061BAC-AFDC-4513-B24B-AA5F13A1612{number}",
        type="Reboot",
        status="Scheduled",
        source="Platform",
        resources=("web_3",),
        not_before=NOW + timedelta(minutes=11, seconds=42),
        duration_seconds=None,
        description="Virtual machine is going to be restarted as requested by authorized user.",
    )
    return replace(plain, **changes)


def workflow(one: ScheduledEvent, phase: Phase = "waiting", rule: Rule | None = RULE, **changes: Any) -> Workflow:
    context = Context(
        now=SEEN_AT,
        names=("web_3",),
        rules=(rule,) if rule else (),
        windows={},
        hooks=("drain", "checkpoint", "resume"),
        boot_id="boot",
        document_at=NOW,
        is_acting=False,
    )
    (first,) = advance({}, [Seen(one)], context).workflows.values()
    return replace(first, **{"phase": phase, "wait_reason": None, "prepare": StageStatus(), **changes})


def entry(seconds: float, kind: str, text: str, **fields: str) -> JournalRecord:
    empty = {"key": "w", "event_id": "e", "stage": "", "hook": "", "outcome": "", "detail": ""}
    return JournalRecord(at=NOW - timedelta(seconds=seconds), kind=kind, text=text, **{**empty, **fields})


def agent_entry(seconds: float, kind: str, text: str) -> JournalRecord:
    return entry(seconds, kind, text, key="", event_id="")


def facts(*workflows: Workflow, **changes: Any) -> Facts:
    plain = Facts(
        at=NOW,
        version="0.1.0",
        started_at=NOW - timedelta(days=12, hours=4),
        vm=Vm(names=("web_3",), vm_id="02aab8a4-74ef-476e-8182-f6d2ba4166a6"),
        mode="act",
        ready=not any(one.is_prepared_for for one in workflows),
        policy=ActivePolicy(file="/etc/scheduled-events-agent/policy.yaml", read_at=NOW - timedelta(days=3)),
        rules=("user-initiated", "short-freeze", "impactful"),
        endpoint="http://169.254.169.254",
        last_poll_at=NOW - timedelta(seconds=1),
        poll_failure="",
        incarnation="42",
        workflows=workflows,
        command_prefix="sudo ",
        supervisor_commands=(SuggestedCommand(command="systemctl status it", effect="show whether it runs"),),
    )
    return replace(plain, **changes)


DRAINED = "draining web_3 from backend web\n128 connections left\n64 connections left\n0 connections left\ndone"
PAST = (
    entry(7300, "seen", "Freeze Scheduled, from Platform, for web_3, not before 2026-04-11 22:26:58 UTC (900s)"),
    entry(7300, "decided", "rule impactful: approve when-prepared"),
    entry(7300, "preparing", "preparation begins: drain, checkpoint"),
    entry(7299, "hook_started", "hook drain starts", stage="prepare", hook="drain"),
    entry(7260, "hook_finished", "hook drain succeeded after 39.2s", outcome="succeeded", detail=DRAINED),
    entry(7259, "hook_finished", "hook checkpoint failed: exit code 3", outcome="failed", detail="no space left"),
    entry(7258, "held", "held: hook checkpoint failed; Azure starts it at 10:20:00 UTC"),
    entry(7200, "operator", "approved by ada"),
    entry(7199, "approved", "Azure has accepted the approval"),
    entry(7100, "started", "has started"),
    entry(6900, "gone", "is no longer in the document (completed)"),
    entry(6890, "closed", "is over: completed"),
)


def past(count: int) -> list[History]:
    ended = [
        workflow(event(number, type=kind), "closed", outcome="completed", id=f"past {number}", is_over=True)
        for number, kind in zip(range(count), ("Freeze", "Redeploy", "Freeze", "Terminate"), strict=False)
    ]
    return [History(workflow=one, records=PAST) for one in ended]


PAUSES = [
    agent_entry(90_000, "machine_paused", "was paused for 6.2s"),
    agent_entry(7_000, "machine_paused", "was paused for 28.9s"),
]
AGENT_RECORDS = [
    agent_entry(90_000, "agent_started", "version 0.1.0, mode act"),
    agent_entry(7_299.5, "reload_rejected", "the policy file is rejected"),
    agent_entry(7_250, "on_clear", "the command history says what its hooks did"),
    agent_entry(7_000, "notification_lost", "pager: started of E: too old"),
    agent_entry(600, "reloaded", "rules: impactful"),
]
PREPARING = workflow(
    event(),
    "preparing",
    prepare=StageStatus(state="running", done=("drain",), current="checkpoint", run=2),
    id="Preparing",
)
RUNNING = RunningHook(
    workflow_id=PREPARING.id,
    stage="prepare",
    hook="checkpoint",
    since=NOW - timedelta(seconds=12),
    limit_seconds=120.0,
)
HELD = workflow(
    event(2, type="Redeploy", not_before=NOW + timedelta(minutes=4, seconds=8)),
    "held",
    prepare=StageStatus(state="failed", done=("drain",), run=2, failure="hook checkpoint failed: exit code 3"),
    wait_reason=WaitReason(kind="prepare_failed"),
    id="Held",
)
FAILED = workflow(
    event(3, status="Started"),
    "recovery_failed",
    is_over=True,
    was_started=True,
    prepare=StageStatus(state="succeeded", done=("drain", "checkpoint"), run=2),
    recover=StageStatus(state="failed", failed_hook="resume", failure="hook resume: exit code 3"),
    outcome="completed",
    id="Failed",
)
SHOWN = replace(FAILED, id="Shown")
OUTPUT = {
    ("Shown", "recover", "resume"): "one\nno route to 10.1.2.3\n\ncannot reach the load balancer\ngives up\n",
    ("Shown", "prepare", "drain"): "drained\n",
}
RESOLVED = StageStatus(state="resolved", failed_hook="resume", failure="hook resume: exit code 3")
OPTIONAL = StageStatus(
    state="succeeded", done=("resume",), tolerated_failures={"resume": "hook resume: exit code 3"}
)
STOPPED = workflow(
    event(5, not_before=NOW + timedelta(minutes=6)),
    "held",
    wait_reason=WaitReason(kind="held"),
    operator=OperatorDecision(action="hold", user="kim", at=NOW - timedelta(minutes=2)),
    id="Stopped",
)
APPROVED = workflow(
    event(8, not_before=NOW + timedelta(days=6, hours=3)),
    first_seen_at=NOW - timedelta(days=1),
    wait_reason=WaitReason(kind="time", at=NOW + timedelta(days=1), detail="lead 5d"),
    operator=OperatorDecision(action="approve", user="", at=NOW - timedelta(days=1)),
    id="Approved",
)
STARTED = workflow(
    event(9, status="Started"),
    "started",
    rule=replace(RULE, on_start=("announce",)),
    was_started=True,
    prepare=StageStatus(
        state="succeeded",
        done=("drain", "checkpoint"),
        tolerated_failures={"drain": "hook drain: exit code 1"},
    ),
    on_start=StageStatus(
        state="succeeded", done=("announce",), tolerated_failures={"announce": "hook announce: exit code 2"}
    ),
    id="Started",
)
MANUAL = workflow(
    event(4, type="Redeploy", not_before=NOW + timedelta(minutes=8, seconds=57)),
    rule=replace(RULE, approve="manual"),
    approval_needed_since=NOW,
    wait_reason=WaitReason(kind="manual"),
    id="Manual",
)
UNMATCHED = workflow(
    event(6, type="Preempt", resources=("vm_7",), not_before=NOW + timedelta(seconds=30)),
    rule=None,
    decision=Decision(
        rule=None, reason="this VM's name is not known: observe", affects="unknown", approve="never"
    ),
    wait_reason=WaitReason(kind="other_vm"),
    id="Unmatched",
)
MANY = (
    workflow(event(0, type="Freeze"), "approved", approval=Approval(state="confirmed"), id="many 0"),
    workflow(event(1, type="Preempt", status="Started"), "started", was_started=True, id="many 1"),
    workflow(
        event(2, type="Terminate"),
        "recovering",
        is_over=True,
        outcome="completed",
        recover=StageStatus(state="running"),
        id="many 2",
    ),
    workflow(
        event(3, not_before=NOW - timedelta(seconds=3)), "prepared", approval=Approval(failures=3), id="many 3"
    ),
    workflow(event(4, type="Redeploy", not_before=NOW + timedelta(days=6, hours=3)), id="many 4"),
    workflow(event(5, resources=("web_4", "web_5")), rule=None, id="many 5"),
)
MONSTER = event(
    7, description=HOSTILE, resources=("web_3", *(f"a-very-long-name-of-a-machine_{n:06}" for n in range(100)))
)
BAD = workflow(
    MONSTER, "preparing", id='"><script>window.ran=5</script>', prepare=StageStatus(state="running", run=1)
)
REFUSED = (
    'policy.yaml:14: rules[2].approve: expected one of immediately, when-prepared, manual, never; got "yes"\n'
)
REFUSED += 'policy.yaml:15: rules[2]: unknown key "recovr"; did you mean "recover"?'
POLICY = ActivePolicy(file="/etc/scheduled-events-agent/policy.yaml", read_at=NOW - timedelta(days=3))
TARGETS = (
    NotifiedTarget(name="ops", waiting=0, oldest_at=None, failure=None),
    NotifiedTarget(
        name="pager",
        waiting=2,
        oldest_at=NOW,
        failure=TargetFailure(since=NOW, reason="it answers 401"),
        lost=3,
        lost_at=NOW,
        lost_reason="too old",
    ),
)
FLEET = FleetState(
    group="web",
    error="acme answers 503: it is busy",
    unavailable_since=NOW,
    not_ready=("web_4", "web_5"),
    warnings=("members does not match this VM, web_3: all VMs are waited for",),
)

Scene = tuple[Facts, list[History], list[JournalRecord]]
SCENES: dict[str, Scene] = {
    "idle": (facts(), past(4), PAUSES),
    "fresh": (
        facts(started_at=NOW, last_poll_at=None, polls="late", vm=Vm(names=(), vm_id=""), incarnation=""),
        [],
        [],
    ),
    "late": (
        facts(
            polls="late",
            poll_failure="GET http://169.254.169.254/metadata/scheduledevents: timed out",
            poll_failure_summary="timed out",
            last_poll_at=NOW - timedelta(seconds=12),
        ),
        past(1),
        [],
    ),
    "blind": (facts(PREPARING, polls="late", last_poll_at=NOW - timedelta(seconds=12)), [], []),
    "nameless": (
        facts(
            UNMATCHED,
            vm=Vm(names=(), vm_id=""),
            vm_failure="GET http://169.254.169.254/metadata/instance: 403 Forbidden",
            vm_failure_summary="/metadata/instance: 403 Forbidden",
        ),
        [],
        [],
    ),
    "preparing": (
        facts(PREPARING, running=(RUNNING,)),
        [*past(2), History(workflow=PREPARING, records=PAST[:5])],
        PAUSES,
    ),
    "restoring": (
        facts(
            running=(
                replace(RUNNING, workflow_id="", stage="on_clear", limit_seconds=3600.0),
                replace(RUNNING, workflow_id="", stage="on_clear", state="queued", limit_seconds=None),
            )
        ),
        [],
        [],
    ),
    "resolved": (
        facts(),
        [
            History(workflow=replace(past(1)[0].workflow, recover=RESOLVED), records=PAST),
            History(workflow=replace(past(1)[0].workflow, id="other", recover=OPTIONAL), records=PAST),
        ],
        [],
    ),
    "shown": (facts(SHOWN), [History(workflow=SHOWN, records=PAST)], []),
    "fleet": (facts(PREPARING, fleet=FLEET), [], []),
    "held": (facts(HELD), [History(workflow=HELD, records=PAST[:7]), *past(1)], PAUSES),
    "manual": (facts(MANUAL), [History(workflow=MANUAL, records=PAST[:2])], PAUSES),
    "failed": (facts(FAILED), [History(workflow=FAILED, records=PAST)], PAUSES),
    "operator": (
        facts(STOPPED, APPROVED),
        [
            History(workflow=STOPPED, records=(*PAST[:3], entry(120, "operator", "held by kim"))),
            History(
                workflow=APPROVED,
                records=(
                    entry(86_400, "seen", "Reboot Scheduled, from Platform, for web_3"),
                    entry(86_400, "operator", "approved by an operator"),
                    entry(600, "changed", "NotBefore is earlier by 2m"),
                ),
            ),
        ],
        [],
    ),
    "started": (facts(STARTED), [History(workflow=STARTED, records=PAST[:10])], AGENT_RECORDS),
    "many": (facts(*MANY), past(4), PAUSES),
    "hostile": (
        facts(
            BAD,
            vm=Vm(names=("web_3", "<b>"), vm_id="<i>"),
            endpoint="http://<u>",
            fleet=FleetState(
                group="<b>",
                error=HOSTILE,
                unavailable_since=NOW,
                not_ready=MONSTER.resources,
                warnings=(HOSTILE,),
            ),
        ),
        [
            History(
                workflow=BAD,
                records=(entry(9, "hook_finished", HOSTILE, outcome="failed", detail=HOSTILE[:4096]),),
            )
        ],
        [agent_entry(1, "machine_paused", HOSTILE)],
    ),
    "failing": (
        facts(
            polls="overdue",
            poll_failure="GET http://169.254.169.254/metadata/scheduledevents: connection refused",
            poll_failure_summary="connection refused",
            last_poll_at=NOW - timedelta(seconds=212),
        ),
        past(1),
        [],
    ),
    "observes": (facts(mode="observe"), past(2), PAUSES),
    "quiet": (
        facts(
            policy=replace(POLICY, needs_restart=("agent.listen_names",)), poll_failure="timed out", notify=TARGETS
        ),
        past(1),
        PAUSES,
    ),
    "refused": (
        facts(policy=replace(POLICY, rejected=REFUSED, rejected_summary="line 9, approve"), mode="observe"),
        past(1),
        PAUSES,
    ),
}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as one:
        yield one


def pages_of(scene: Callable[[], Scene], place: str = "") -> dict[str, Callable[[], Response]]:
    """The agent's answer at each path when things are as in the scene; its clock starts when it is asked."""
    began: list[float] = []

    def status_now() -> Status:
        began.append(time.monotonic())
        now = replace(scene()[0], at=NOW + timedelta(seconds=began[-1] - began[0]))
        return with_output(to_status(now), lambda *of_hook: OUTPUT.get(of_hook, ""))

    def as_json(answer: Status | Journal) -> Response:
        return Response(HTTPStatus.OK, msgspec.json.encode(answer), "application/json")

    def history() -> Response:
        _, recent, agent_records = scene()
        return as_json(to_journal(merge(recent, agent_records), NOW))

    files = {f"{place}{path}": make for path, make in FILES.items()}
    answers = {
        f"{place}/status": lambda: as_json(status_now()),
        f"{place}/history": history,
    }
    return {**files, **answers}


@pytest.fixture
def server() -> Iterator[WebServer]:
    pages: dict[str, Callable[[], Response]] = {}
    for name in SCENES:
        pages |= pages_of(partial(SCENES.__getitem__, name), f"/{name}")
    one = WebServer("127.0.0.1:0", pages)
    yield one
    one.close()


@pytest.fixture
def tab(chromium: Browser) -> Tab:
    return chromium.tab()


# For each element with text of its own: how much its colour stands out from what is behind it.
CONTRASTS = """(() => {
  const light = (color) => {
    const part = color.match(/[0-9.]+/g).map(Number).slice(0, 3).map((value) => {
      const share = value / 255;
      return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (!/, 0\\)$/.test(color)) return color;
    }
  };
  const bad = [];
  for (const node of document.body.querySelectorAll("*")) {
    const hasText = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!hasText || ["SCRIPT", "STYLE"].includes(node.tagName) || !node.getClientRects().length) continue;
    const [one, two] = [light(getComputedStyle(node).color), light(behind(node))].sort((a, b) => b - a);
    if ((one + 0.05) / (two + 0.05) < 4.5) bad.push(node.tagName + " " + node.textContent.slice(0, 40));
  }
  return bad;
})()"""


IS_WHOLE = "document.querySelector('footer') && !document.getElementById('main').ariaBusy"


def open_scene(tab: Tab, server: WebServer, name: str = "") -> None:
    """Load the page; returns when all of it is shown."""
    tab.open(f"http://127.0.0.1:{server.port}/{name}")
    tab.wait(IS_WHOLE)


@pytest.mark.parametrize("name", SCENES)
def test_the_page_has_no_overflow_weak_contrast_or_unwanted_script(
    tab: Tab, server: WebServer, name: str, tmp_path: Path
) -> None:
    for width, is_dark in ((PHONE, False), (PHONE, True), (DESKTOP, False), (DESKTOP, True)):
        tab.look(width, is_dark=is_dark)
        open_scene(tab, server, f"{name}/")
        scheme = "dark" if is_dark else "light"
        tab.screenshot(tmp_path / f"{name}-{width}-{scheme}.png")  # to be looked at
        assert tab.ask("document.documentElement.scrollWidth") <= width
        assert tab.ask(CONTRASTS) == []
    assert tab.ask("window.ran") is None
    assert tab.ask("document.querySelectorAll('script, img, svg, main a[href^=javascript]').length") == 1
    assert tab.ask("new Set([...document.querySelectorAll('[id]')].map((one) => one.id)).size") == tab.ask(
        "document.querySelectorAll('[id]').length"
    )
    assert tab.complaints == []


def test_hostile_text_is_shown_as_text(tab: Tab, server: WebServer) -> None:
    tab.look(PHONE)
    open_scene(tab, server, "hostile/")
    assert tab.ask("document.querySelector('q').textContent").startswith(HOSTILE[:400])
    assert tab.ask("document.querySelector('.timeline pre').textContent").endswith("xxxx")
    assert tab.ask("document.title") == "! web_3: fleet unavailable"
    # A mark that turns the writing is kept within an element of its own.
    assert tab.ask("[...document.querySelectorAll('main :not(bdi, pre)')].filter((one) =>"
                   " [...one.childNodes].some((child) => /\u202e/.test(child.data))).length") == 0  # fmt: skip


def test_the_content_security_policy_blocks_injected_content(tab: Tab, server: WebServer) -> None:
    tab.look(DESKTOP)
    open_scene(tab, server, "idle/")
    tab.ask("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=window.ran=1><p style=color:red>')")
    script = "Object.assign(document.createElement('script'), {textContent: 'window.ran = 2'})"
    tab.ask(f"document.body.append({script})")
    tab.wait("document.querySelector('img') && true")
    assert tab.ask("window.ran") is None
    assert tab.ask("getComputedStyle(document.querySelector('p[style]')).color") != "rgb(255, 0, 0)"
    tab.wait_complaints(3)  # which also shows that complaints are heard of


def test_without_a_script_the_page_names_the_command_that_shows_the_same(tab: Tab, server: WebServer) -> None:
    tab.look(PHONE, has_script=False)
    tab.open(f"http://127.0.0.1:{server.port}/held/")
    # (What the test itself asks is not the page's own script.)
    shown = " ".join(tab.ask("document.body.innerText").split())
    assert shown == (
        "This page needs JavaScript. On the machine itself, scheduled-events-agent status shows the same; "
        "programs read /status."
    )
    assert tab.ask("document.documentElement.scrollWidth") <= PHONE
    assert tab.complaints == []


def test_the_idle_page_starts_with_the_last_successful_poll(tab: Tab, server: WebServer) -> None:
    tab.look(DESKTOP)
    open_scene(tab, server, "idle/")
    assert tab.ask("document.querySelector('.headline').innerText").split("\n")[0] == "✓ Nothing is pending"
    assert tab.ask("/^Last successful poll \\d+\\w.* ago$/.test(document.querySelector('.polled').innerText)")
    open_scene(tab, server, "fresh/")
    assert tab.ask("document.querySelector('.polled').innerText") == "No successful poll yet"


PAIRS = "[...document.querySelectorAll('dl > div')].map((row) => [...row.children].map((one) => one.innerText))"
FACTS = f"Object.fromEntries({PAIRS})"


def test_a_harmless_failure_is_shown_without_a_warning(tab: Tab, server: WebServer) -> None:
    tab.look(DESKTOP)
    open_scene(tab, server, "fleet/")
    error = "the store cannot be used: acme answers 503: it is busy"
    fleet = f"group web; waits for web_4, web_5; {error}; {FLEET.warnings[0]}"
    assert tab.ask(FACTS)["Fleet"] == fleet
    open_scene(tab, server, "refused/")
    assert tab.ask(FACTS)["Policy"].endswith(REFUSED)
    open_scene(tab, server, "quiet/")
    facts = tab.ask(FACTS)
    assert facts["Needs a restart"] == "agent.listen_names"
    assert facts["Last successful poll"].endswith(" ago; since then: timed out")
    ops, pager = facts["Notifications"].split("\n")
    assert ops == "ops: nothing waits"
    since = f"{NOW:%H:%M:%S} UTC"
    assert pager == f"pager: fails since {since}: it answers 401; 2 waiting; 3 lost since {since}: too old"
    open_scene(tab, server, "idle/")
    facts = tab.ask(FACTS)
    assert facts["Health"] == "ok"
    assert facts.keys() & {"Fleet", "Needs a restart", "Notifications", "History"} == set()


def test_health_is_ok_only_if_documents_are_up_to_date(tab: Tab, server: WebServer) -> None:
    tab.look(DESKTOP)
    expected = {
        "preparing": "ok",
        "blind": "not known yet",
        "fresh": "not known yet",
        "failing": "not healthy, see above",
    }
    for name, health in expected.items():
        open_scene(tab, server, f"{name}/")
        assert tab.ask(FACTS)["Health"] == health, name


# The text of each part of the top of the page, as it can be seen.
TOP = (
    "[...document.querySelectorAll('header, .headline, .attention')]"
    ".map((one) => one.innerText.split('\\n').filter(Boolean))"
)


def test_the_page_starts_with_what_an_operator_must_do(tab: Tab, server: WebServer) -> None:
    tab.look(DESKTOP)
    open_scene(tab, server, "held/")
    header, block = tab.ask(TOP)
    name, chip, ready, clock = header
    assert (name, chip, ready) == ("web_3", "✕ prepare failed", "not ready")
    assert re.fullmatch(r"\d\d:\d\d:\d\d UTC", clock)
    message, consequence, deadline, *commands = block
    assert message == "✕ The Redeploy of web_3 is held: hook checkpoint failed: exit code 3."
    at = f"{HELD.event.not_before:%H:%M:%S} UTC"
    assert consequence == f"Azure starts it at {at}, prepared or not."
    assert re.fullmatch(rf"[34]m \d+s left, until {at}", deadline)
    assert commands[0] == "sudo scheduled-events-agent retry C7061BAC"
    assert (commands[2], commands[3]) == ("Copy", "sudo scheduled-events-agent approve C7061BAC")
    assert tab.ask("document.querySelector('.attention').getAttribute('role')") == "alert"
    size = "parseFloat(getComputedStyle(document.querySelector({})).fontSize)"
    assert tab.ask(f"{size.format(repr('.commands pre'))} >= {size.format(repr('body'))}")
    # The page says nothing twice, and folds away what no operator needs at night.
    card = tab.ask("document.querySelector('article').innerText")
    assert "To overrule" not in card
    assert HELD.event.id not in card
    tab.ask("[...document.querySelectorAll('article summary')].find((one) => one.innerText === 'More').click()")
    assert tab.ask(FACTS).keys() >= {"From", "Decision", "Id", "First seen"}
    # A problem that can be repaired by day is shown, but not like an alarm.
    open_scene(tab, server, "refused/")
    header, _ = tab.ask(TOP)
    assert header[:3] == ["web_3", "! policy rejected", "ready"]
    assert tab.ask("document.querySelector('.attention.fix').getAttribute('role')") == "status"


def test_a_headline_is_a_sentence_and_the_exact_error_stands_below_it_in_small_print(
    tab: Tab, server: WebServer
) -> None:
    expected = {
        "failing": (
            r"✕ Azure's metadata service has not answered since .* UTC: connection refused\.",
            "GET http://169.254.169.254/metadata/scheduledevents: connection refused",
        ),
        "refused": (r"! The policy file is rejected: line 9, approve\.", REFUSED),
    }
    size = "parseFloat(getComputedStyle(document.querySelector('.attention {}')).fontSize)"
    for width in (PHONE, DESKTOP):
        tab.look(width)
        for scene, (headline, detail) in expected.items():
            open_scene(tab, server, f"{scene}/")
            assert re.fullmatch(headline, tab.ask("document.querySelector('.attention h2').innerText"))
            shown = tab.ask("document.querySelector('.attention .detail').innerText")
            assert shown.startswith(detail[:200])
            assert tab.ask(size.format(".detail")) < tab.ask(size.format("p"))
    open_scene(tab, server, "held/")
    assert tab.ask("document.querySelector('.attention .detail')") is None


def test_the_output_of_a_failed_hook_is_as_large_as_what_failed(tab: Tab, server: WebServer) -> None:
    size = "parseFloat(getComputedStyle(document.querySelector('.attention {}')).fontSize)"
    for width in (PHONE, DESKTOP):
        tab.look(width)
        open_scene(tab, server, "shown/")
        shown = tab.ask("document.querySelector('.attention .output').innerText")
        assert shown == "no route to 10.1.2.3\ncannot reach the load balancer\ngives up"
        assert tab.ask(size.format(".output")) == tab.ask(size.format("h2"))
    open_scene(tab, server, "failed/")  # the policy does not show output
    assert tab.ask("document.querySelector('.attention .output')") is None


def test_a_running_hook_is_shown_with_its_limit(tab: Tab, server: WebServer) -> None:
    tab.look(DESKTOP)
    open_scene(tab, server, "preparing/")
    assert re.fullmatch(r"runs the prepare hook checkpoint, [\dms ]+ of at most 2m", tab.ask(FACTS)["Now"])
    open_scene(tab, server, "restoring/")
    running, queued = tab.ask("[...document.querySelectorAll('.alone li')].map((one) => one.innerText)")
    assert re.fullmatch(r"▸ running the on_clear hook checkpoint, [\dms ]+ of at most 1h", running)
    assert re.fullmatch(r"… queued the on_clear hook checkpoint, [\dms ]+ so far", queued)


def test_past_events_and_pauses_are_shown_only_if_there_are_any(tab: Tab, server: WebServer) -> None:
    tab.look(DESKTOP)
    titles = "[...document.querySelectorAll('section[aria-labelledby] > h2')].map((one) => one.innerText)"
    open_scene(tab, server, "idle/")
    assert tab.ask(titles) == ["Recent events", "VM pauses", "Agent"]
    pauses = tab.ask("document.querySelector('section[aria-labelledby=pauses]').innerText")
    assert re.findall("was paused for .*|rules:.*", pauses) == ["was paused for 28.9s", "was paused for 6.2s"]
    open_scene(tab, server, "fresh/")
    assert tab.ask(titles) == ["Agent"]


def test_a_past_event_that_an_operator_resolved_is_no_failure(tab: Tab, server: WebServer) -> None:
    tab.look(DESKTOP)
    open_scene(tab, server, "resolved/")
    chips = "[...document.querySelectorAll('[aria-labelledby=recent] .chip')]"
    assert tab.ask(f"{chips}.map((one) => one.innerText)") == [
        "! completed, a recover hook failed",
        "completed, resolved by an operator",
    ]
    assert tab.ask(f"{chips}.map((one) => one.className.trim())") == ["chip busy", "chip"]


def test_an_operators_hold_or_approval_is_shown_with_its_time(tab: Tab, server: WebServer) -> None:
    tab.look(DESKTOP)
    open_scene(tab, server, "operator/")
    operators = f"{PAIRS}.filter(([name]) => name === 'Operator').map(([, text]) => text)"
    assert tab.ask(operators) == [
        "held by kim since 11:58:00 UTC",
        f"approved by an operator at {NOW - timedelta(days=1):%Y-%m-%d} 12:00:00 UTC",
    ]
    open_scene(tab, server, "held/")
    assert "Operator" not in tab.ask(FACTS)


def test_a_hook_that_failed_is_shown_as_failed_though_the_agent_goes_on(tab: Tab, server: WebServer) -> None:
    tab.look(DESKTOP)
    open_scene(tab, server, "started/")
    assert tab.ask("[...document.querySelectorAll('.steps li')].map((one) => one.innerText)") == [
        "✕ drain failed",
        "✓ checkpoint done",
        "✕ announce failed",
        "· resume to do",
    ]
    failures = "[...document.querySelectorAll('article dd p.bad')].map((one) => one.innerText)"
    assert tab.ask(failures) == ["hook drain: exit code 1", "hook announce: exit code 2"]


# Of each record: the lines of its time and of its text.
RECORDS = (
    "[...document.querySelectorAll('{} .timeline li')].map((one) =>"
    " [...one.children].flatMap((part) => part.innerText.split('\\n')))"
)


def test_records_about_the_agent_are_in_the_timelines_of_their_time(tab: Tab, server: WebServer) -> None:
    tab.look(DESKTOP)
    open_scene(tab, server, "started/")
    shown = [text for _, text, *_ in tab.ask(RECORDS.format("article"))]
    assert [text for text in shown if text not in [one.text for one in PAST]] == [
        "reload rejected: the policy file is rejected",
        "on clear: the command history says what its hooks did",
        "notification lost: pager: started of E: too old",
        "reloaded: rules: impactful",
    ]
    assert shown.index("reload rejected: the policy file is rejected") == 3  # before the hook that started then
    assert shown[-1] == "reloaded: rules: impactful"
    # Of an event that is over, only those until its end.
    ended = [History(workflow=past(1)[0].workflow, records=PAST)]
    late = agent_entry(6_000, "agent_stopped", "1 event is pending")
    other = WebServer("127.0.0.1:0", pages_of(lambda: (facts(), ended, [*AGENT_RECORDS, late])))
    open_scene(tab, other)
    texts = [text for _, text, *_ in tab.ask(RECORDS.format("[aria-labelledby=recent]"))]
    assert len(texts) == len(PAST) + 3
    assert texts[-1] == "is over: completed"
    other.close()


def test_the_first_record_of_another_day_has_its_date(tab: Tab, server: WebServer) -> None:
    tab.look(DESKTOP)
    open_scene(tab, server, "operator/")
    tab.ask("document.querySelectorAll('article details').forEach((one) => { one.open = true; })")
    times = [time[:-1] for time in tab.ask(RECORDS.format("article:last-of-type"))]
    yesterday = f"{NOW - timedelta(days=1):%Y-%m-%d}"
    assert times == [[yesterday, "12:00:00"], ["12:00:00"], [f"{NOW:%Y-%m-%d}", "11:50:00"]]
    first = tab.ask(RECORDS.format("article:first-of-type"))[0]
    assert first == ["09:58:20", PAST[0].text]


# Of each point in time: the value, its text, and whether the page has it from the past.
TIMES = """[...document.querySelectorAll('time:not([data-until], [data-since], [data-now])')].map((one) =>
  [one.dateTime, one.innerText, Boolean(one.closest('[aria-labelledby=recent], [aria-labelledby=pauses]'))])"""


@pytest.mark.parametrize("name", SCENES)
def test_times_have_one_form_and_their_date_unless_it_is_today(tab: Tab, server: WebServer, name: str) -> None:
    tab.look(DESKTOP)
    open_scene(tab, server, f"{name}/")
    tab.ask("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    # Above a timeline stands UTC.
    tab.ask("document.querySelectorAll('.timeline:not(.wide) time').forEach((one) => one.remove())")
    for at, shown, is_past in tab.ask(TIMES):
        day, clock = at[:10], at[11:19]
        has_date = is_past or day != f"{NOW:%Y-%m-%d}"
        assert shown == (f"{day} {clock} UTC" if has_date else f"{clock} UTC")
    for shown in re.findall(r"\S*\d\d:\d\d(?::\d\d)?\S*(?: UTC)?", tab.ask("document.body.innerText")):
        assert re.fullmatch(r"\d\d:\d\d:\d\d UTC", shown)


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("https://example.com/runbook#it", '<a href="https://example.com/runbook#it">Runbook: prepare_failed</a>'),
        ("/usr/share/runbook.md#it", "Runbook, on this VM: <code>/usr/share/runbook.md#it</code>"),
    ],
)
def test_the_runbook_is_a_link_or_a_path_on_the_machine(tab: Tab, place: str, shown: str) -> None:
    def status_now() -> Response:
        held = to_status(facts(HELD))
        needs = tuple(replace(one, runbook=place) for one in held.attention)
        return Response(HTTPStatus.OK, msgspec.json.encode(replace(held, attention=needs)), "application/json")

    server = WebServer("127.0.0.1:0", pages_of(lambda: SCENES["held"]) | {"/status": status_now})
    tab.look(DESKTOP)
    open_scene(tab, server)
    assert tab.ask("document.querySelector('.attention').lastChild.innerHTML") == shown
    server.close()


def test_an_event_that_may_start_now_has_no_countdown(tab: Tab, server: WebServer) -> None:
    tab.look(DESKTOP)
    open_scene(tab, server, "many/")
    assert tab.ask("document.querySelector('.deadline').innerText") == "It may start at any moment"


def test_tabs_differ_by_sign_and_shape(tab: Tab, server: WebServer) -> None:
    tab.look(DESKTOP)
    titles = {
        "idle": "✓ web_3",
        "preparing": "▸ web_3: preparing",
        "manual": "! web_3: approval needed",
        "failed": "✕ web_3: recovery failed",
        "late": "? web_3",
        "nameless": "✕ this VM: VM unknown",
        "failing": "✕ web_3: unhealthy",
        "refused": "! web_3: policy rejected",
    }
    shapes = set()
    for name, title in titles.items():
        open_scene(tab, server, f"{name}/")
        assert tab.ask("document.title") == title
        icon = tab.ask("decodeURIComponent(document.querySelector('link[rel=icon]').href)")
        shapes.add((title[0], re.sub("#[0-9a-f]+", "", icon)))
        chips = tab.ask("[...document.querySelectorAll('header .chip')].map((chip) => chip.innerText)")
        assert chips[-1] in ("ready", "not ready", "○ only observes")
        assert [chip[0] for chip in chips[:1] if ": " in title] == [title[0]] * (": " in title)
    assert len(shapes) == 5
    assert len({sign for sign, _ in shapes}) == 5
    assert len({shape for _, shape in shapes}) == 5


def test_a_command_is_copied_by_its_button(tab: Tab, server: WebServer) -> None:
    tab.look(DESKTOP)
    open_scene(tab, server, "held/")
    command = "sudo scheduled-events-agent retry C7061BAC"
    tab.ask("navigator.clipboard.writeText = async (text) => { window.written = text; }")
    tab.click("button[data-copy]")
    assert tab.wait("window.written") == command
    tab.wait("document.querySelector('button[data-copy]').innerText === 'Copied'")
    tab.wait("document.querySelector('button[data-copy]').innerText === 'Copy'")
    # Without HTTPS, from another machine, the browser gives no clipboard.
    tab.ask("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    tab.ask("document.addEventListener('copy', () => { window.selected = document.activeElement.value; })")
    tab.click("button[data-copy]")
    assert tab.wait("window.selected") == command
    assert tab.ask("document.querySelector('textarea')") is None
    assert tab.complaints == []


def test_times_are_utc_with_the_readers_local_time(tab: Tab, server: WebServer) -> None:
    tab.look(DESKTOP)
    tab.call("Emulation.setTimezoneOverride", timezoneId="Asia/Tokyo")
    open_scene(tab, server, "held/")
    assert tab.ask("document.querySelector('article summary').innerText") == "Timeline (UTC)"
    shown, title = tab.ask(
        "(() => { const one = document.querySelector('.timeline time'); return [one.innerText, one.title]; })()"
    )
    assert shown.split("\n")[-1] == f"{PAST[0].at:%H:%M:%S}"
    there = PAST[0].at.astimezone(timezone(timedelta(hours=9)))
    assert f"{there:%-I:%M:%S}" in title
    assert title.endswith(", your time")
    assert tab.ask("[...document.querySelectorAll('time')].filter((one) => !one.title).length") == 0


def test_on_paper_everything_is_shown(tab: Tab, server: WebServer) -> None:
    tab.look(DESKTOP)
    open_scene(tab, server, "held/")
    tab.ask("addEventListener('beforeprint', () => {"
            " window.folded = document.querySelectorAll('details:not([open])').length; })")  # fmt: skip
    assert tab.ask("document.querySelectorAll('details:not([open])').length") > 0
    tab.call("Page.printToPDF")
    assert tab.ask("window.folded") == 0
    assert tab.ask("document.querySelectorAll('details:not([open])').length") > 0


def test_a_page_that_follows_the_agent_does_not_disturb_its_reader(tab: Tab) -> None:
    scene = [SCENES["held"]]
    server = WebServer("127.0.0.1:0", pages_of(lambda: scene[0]))
    tab.look(DESKTOP)
    open_scene(tab, server)
    count = tab.ask("document.querySelector('.count time').textContent")
    tab.wait(f"document.querySelector('.count time').textContent !== {count!r}")
    # A reader opens the past, closes the present, stands on a summary and has selected a text.
    tab.ask("window.isHere = true")
    tab.ask("document.querySelector('article details').open = false")
    tab.ask("document.querySelector('section > details').open = true")
    tab.ask("document.querySelector('section > details summary').focus()")
    tab.ask("getSelection().selectAllChildren(document.querySelector('section > details pre'))")
    selected = tab.ask("getSelection().toString()")
    held, recent, pauses = SCENES["held"]
    scene[0] = (replace(held, incarnation="43", faults=("a disk is full",)), recent, pauses)
    tab.wait("document.querySelectorAll('.attention').length === 2")
    assert tab.ask("document.title") == "✕ web_3: prepare failed"
    assert tab.ask("document.querySelector('article details').open") is False
    assert tab.ask("document.querySelector('section > details').open") is True
    assert tab.ask("document.activeElement.tagName") == "SUMMARY"
    assert tab.ask("getSelection().toString()") == selected
    # One more event comes: what was opened stays so, though it is at another place now.
    opened = tab.ask("document.querySelector('section > details').id")
    scene[0] = (replace(held, workflows=(PREPARING, HELD)), recent, pauses)
    tab.wait("document.querySelectorAll('article').length === 2")
    assert tab.ask(f"document.getElementById({opened!r}).open") is True
    assert tab.ask("document.activeElement.tagName") == "SUMMARY"
    assert tab.ask("window.isHere") is True  # all that without loading the page again
    assert tab.complaints == []
    server.close()


# Parts of the page that still say that all is well.
GOOD = "[...document.querySelectorAll('.good')].filter((one) => one.getClientRects().length).length"


@pytest.mark.parametrize("trouble", [signal.SIGKILL, signal.SIGSTOP])
def test_a_page_without_its_agent_shows_an_error(tab: Tab, tmp_path: Path, trouble: signal.Signals) -> None:
    with (
        Simulator(vms=("vm-1",), rate_limit=None) as azure,
        Agent(tmp_path / "agent", azure.endpoint()) as agent,
    ):
        listen = f"127.0.0.1:{free_port()}"
        agent.write_policy(agent={"listen": listen})
        agent.start()
        tab.look(PHONE)
        tab.open(f"http://{listen}/")
        tab.wait("document.title === '✓ vm-1' && " + IS_WHOLE)
        assert tab.ask(GOOD) > 0
        began = tab.ask("performance.now()")
        agent.process.send_signal(trouble)
        lost_after = tab.wait("document.title.startsWith('✕') && performance.now()") - began
        assert lost_after < 20_000  # eight seconds, where nothing else is to be done
        assert tab.ask("document.title") == "✕ no answer: vm-1"
        assert tab.ask(GOOD) == 0
        assert tab.ask("document.querySelectorAll('.headline, header .chip').length") == 0
        alert = tab.ask("document.querySelector('[role=alert]').innerText")
        assert re.match(
            r"✕ The agent has not answered since \d\d:\d\d:\d\d UTC \(\d+s ago\)\. What follows is from then\.\n",
            alert,
        )
        if sys.platform == "linux":
            assert "systemctl status scheduled-events-agent\n" in alert
            assert "journalctl -u scheduled-events-agent -n 50\n" in alert
        assert (
            tab.ask("getComputedStyle(document.getElementById('agent').closest('.stale')).filter")
            == "grayscale(1)"
        )
        tab.call("Emulation.setEmulatedMedia", media="print")
        assert tab.ask("document.getElementById('lost').getClientRects().length") == 1
        if trouble == signal.SIGSTOP:
            agent.thaw()
        else:
            agent.wait_exit()
            agent.start()
        tab.wait("document.title === '✓ vm-1'")
        assert tab.ask("document.querySelectorAll('#lost, .stale').length") == 0


def test_outdated_content_can_still_be_read(tab: Tab, tmp_path: Path) -> None:
    for is_dark in (False, True):
        server = WebServer("127.0.0.1:0", pages_of(lambda: SCENES["held"]))
        tab.look(PHONE, is_dark=is_dark)
        open_scene(tab, server)
        server.close()
        tab.wait("document.getElementById('lost') && true")
        assert tab.ask(CONTRASTS) == []
        tab.screenshot(tmp_path / f"gone-{is_dark}.png")


def test_a_hidden_page_asks_rarely_and_a_shown_one_at_once(tab: Tab) -> None:
    pages = pages_of(lambda: SCENES["idle"])
    answer = pages["/status"]
    is_refusing = threading.Event()
    refused = threading.Semaphore(0)

    def status_page() -> Response:
        if not is_refusing.is_set():
            return answer()
        refused.release()
        return Response(HTTPStatus.SERVICE_UNAVAILABLE, b"this takes long to read\n")

    server = WebServer("127.0.0.1:0", {**pages, "/status": status_page})
    tab.look(DESKTOP)
    open_scene(tab, server)
    tab.ask("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    is_refusing.set()
    assert refused.acquire(timeout=60)
    began = time.monotonic()
    assert refused.acquire(timeout=60)
    assert time.monotonic() - began > 6  # a page that is seen would have given its agent up by now
    assert tab.ask("document.title") == "✓ web_3"
    shown = time.monotonic()
    tab.ask("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    assert refused.acquire(timeout=60)
    assert time.monotonic() - shown < 6  # else it would be ten seconds again
    tab.wait("document.title === '✕ no answer: web_3'")
    server.close()


def test_an_unreadable_history_keeps_the_status_on_the_page(tab: Tab) -> None:
    pages = pages_of(lambda: SCENES["held"])
    pages["/history"] = lambda: Response(HTTPStatus.SERVICE_UNAVAILABLE, b"the state file is <locked>\n")
    server = WebServer("127.0.0.1:0", pages)
    tab.look(DESKTOP)
    tab.open(f"http://127.0.0.1:{server.port}/")
    tab.wait(f"{FACTS}.History === 'cannot be shown: the state file is <locked>\\n'.trim()")
    assert tab.ask("document.querySelectorAll('article').length") == 1
    assert tab.ask("document.getElementById('recent')") is None
    server.close()


def test_the_page_of_an_agent_that_was_upgraded_is_loaded_again(tab: Tab) -> None:
    scene = [SCENES["idle"]]
    loaded = threading.Semaphore(0)
    pages = pages_of(lambda: scene[0])

    def script() -> Response:
        loaded.release()
        return FILES["/status.js"]()

    server = WebServer("127.0.0.1:0", {**pages, "/status.js": script})
    tab.look(DESKTOP)
    open_scene(tab, server)
    assert loaded.acquire(timeout=60)
    idle, recent, pauses = scene[0]
    scene[0] = (replace(idle, version="0.2.0"), recent, pauses)
    assert loaded.acquire(timeout=60)
    server.close()


def test_the_page_truncates_long_lists_and_reports_it(tab: Tab) -> None:
    names = tuple(f"a-machine-with-a-long-name-{number:05}" for number in range(100))
    many = [
        workflow(event(id=f"{number:08}-E", resources=("web_3", *names), description="<" * 4096), id=f"w{number}")
        for number in range(1000)
    ]
    output = entry(1, "hook_finished", "hook drain succeeded", outcome="succeeded", detail="a" * 4000 + "z")
    past = [History(workflow=replace(many[0], id="past"), records=(output,) * 41)]
    scene: Scene = (facts(*many), past, [])
    server = WebServer("127.0.0.1:0", pages_of(lambda: scene))
    tab.look(DESKTOP)
    open_scene(tab, server)
    text = tab.ask("document.body.textContent")
    for told in (
        "… 950 more are pending; /status has them all",
        ", and 89 more",
        "… (4,096 characters)",
        "… there are earlier records",
        "…" + "a" * 1999 + "z",
    ):
        assert told in text
    assert tab.ask("document.querySelectorAll('.timeline time').length") == 40
    assert tab.complaints == []
    server.close()


def test_status_metric_exit_code_and_tab_title_agree_about_one_agent(tab: Tab, tmp_path: Path) -> None:
    manual = {"name": "manual", "when": {"type": "Redeploy"}, "approve": "manual"}
    drain = {"name": "drain", "prepare": ["drain"], "recover": ["resume"], "approve": "when-prepared"}
    with (
        Simulator(vms=("vm-1",), rate_limit=None) as azure,
        Agent(tmp_path / "agent", azure.endpoint()) as agent,
    ):
        listen = f"127.0.0.1:{free_port()}"
        hooks = {"drain": agent.hook("drain", exit_code=7), "resume": agent.hook("resume", exit_code=1)}
        policy: dict[str, Any] = {"agent": {"listen": listen}, "rules": [manual, drain], "hooks": hooks}
        agent.write_policy(**policy)
        agent.start()
        tab.look(PHONE)
        tab.open(f"http://{listen}/")

        def agree(kind: str, title: str, code: int) -> None:
            agent.wait_until(lambda: [one["kind"] for one in agent.status()["attention"]] == [kind], kind)
            agent.wait_metric(1.0, "attention", kind=kind)
            assert agent.run("status", "--state-dir", str(agent.state_dir)).returncode == code
            tab.wait(f"document.title === {title!r}")

        redeploy = azure.schedule("Redeploy", notice_seconds=600)
        agree("approval_needed", "! vm-1: approval needed", 3)
        azure.cancel(redeploy)
        reboot = azure.schedule("Reboot", notice_seconds=600)
        agree("prepare_failed", "✕ vm-1: prepare failed", 3)
        azure.cancel(reboot)
        agree("recovery_failed", "✕ vm-1: recovery failed", 3)
        agent.say("resolve", reboot)
        agent.write_policy(**{**policy, "rules": [{"name": "all", "aprove": "never"}]})
        agent.reload()
        agree("policy_rejected", "! vm-1: policy rejected", 0)
