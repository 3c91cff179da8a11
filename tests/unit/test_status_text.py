"""Texts of the status page: its headline, and what it says of each pending event."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from status_samples import APPROVED_BY_KIM, HELD_BY_KIM, a_workflow, some_facts

import scheduled_events_agent
from scheduled_events_agent.imds.compare import Seen
from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.policy import Rule
from scheduled_events_agent.status import ActivePolicy, CommandOptions, EventView, Vm
from scheduled_events_agent.status.events import to_status
from scheduled_events_agent.status.facts import Facts, RunningHook
from scheduled_events_agent.status.messages import time_left
from scheduled_events_agent.status.status import AgentStatus
from scheduled_events_agent.web.static import FILES, HEADERS
from scheduled_events_agent.workflow import Approval, Context, StageStatus, WaitReason, Workflow, advance

NOW = datetime(2026, 3, 4, 3, 0, 0, tzinfo=UTC)
RULE = Rule(name="impactful", prepare=("drain", "checkpoint"), recover=("resume",), approve="when-prepared")


def event(**changes: Any) -> ScheduledEvent:
    plain = ScheduledEvent(
        id="C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        type="Reboot",
        status="Scheduled",
        source="Platform",
        resources=("vm-1",),
        not_before=NOW + timedelta(minutes=11, seconds=42),
        description="Host maintenance.",
    )
    return replace(plain, **changes)


def workflow(one: ScheduledEvent | None = None, **changes: Any) -> Workflow:
    context = Context(
        now=NOW,
        names=("vm-1",),
        rules=(RULE,),
        windows={},
        hooks=(),
        boot_id="b",
        document_at=NOW,
        is_acting=False,
    )
    (first,) = advance({}, [Seen(one or event())], context).workflows.values()
    return replace(first, **{"phase": "waiting", "prepare": StageStatus(), "wait_reason": None, **changes})


def facts(*workflows: Workflow, **changes: Any) -> Facts:
    plain = Facts(
        at=NOW,
        version="0.1.0",
        started_at=NOW - timedelta(days=1),
        vm=Vm(names=("vm-1",), vm_id="id"),
        mode="act",
        ready=True,
        policy=ActivePolicy(file="/etc/policy.yaml", read_at=NOW),
        rules=("impactful",),
        endpoint="http://169.254.169.254",
        last_poll_at=NOW - timedelta(seconds=3),
        poll_failure="",
        incarnation="7",
        workflows=workflows,
    )
    return replace(plain, **changes)


def headline(*workflows: Workflow, **changes: Any) -> str:
    return to_status(facts(*workflows, **changes)).headline


def first_of(*workflows: Workflow, **changes: Any) -> EventView:
    return to_status(facts(*workflows, **changes)).events[0]


def test_an_event_shows_the_phase_the_progress_and_the_operator_actions() -> None:
    one = workflow(
        phase="preparing", prepare=StageStatus(state="running", done=("drain",), current="checkpoint", run=2)
    )
    hook = RunningHook(workflow_id=one.id, stage="prepare", hook="checkpoint", since=NOW - timedelta(seconds=72))
    given = facts(one, running=(hook,), ready=False)
    found = to_status(given)
    assert found.headline == "Preparing for a Reboot"
    (shown,) = found.events
    assert shown.key == one.id
    assert shown.phase == "preparing"
    assert shown.activity == "runs the prepare hook checkpoint, 1m 12s so far"
    assert shown.approval.text == "by itself, when prepared"
    assert [(hook.stage, hook.hook, hook.state) for hook in shown.hooks] == [
        ("prepare", "drain", "done"),
        ("prepare", "checkpoint", "running"),
        ("recover", "resume", "open"),
    ]
    assert [one.command for one in shown.commands] == ["scheduled-events-agent hold C7061BAC"]
    assert found.condition == "busy"
    for name in AgentStatus.__struct_fields__:
        assert getattr(found, name) == getattr(given, name), name


def commands(*workflows: Workflow, **changes: Any) -> tuple[str, ...]:
    return tuple(one.command for one in first_of(*workflows, **changes).commands)


def test_the_commands_name_an_agent_outside_the_default_directory() -> None:
    assert commands(workflow(), command_options=CommandOptions(state="--state-dir '/var/my agent'")) == (
        "scheduled-events-agent hold C7061BAC --state-dir '/var/my agent'",
        "scheduled-events-agent approve C7061BAC --state-dir '/var/my agent'",
    )


def test_no_command_is_offered_that_the_agent_would_reject() -> None:
    assert commands(workflow()) != ()
    assert commands(workflow(), mode="observe") == ()
    failed = workflow(phase="recovery_failed", is_over=True)
    assert commands(failed, mode="observe") == ("scheduled-events-agent resolve C7061BAC",)


def test_a_failed_recovery_is_shown_with_the_commands_that_solve_it() -> None:
    failed = StageStatus(state="failed", failed_hook="load", failure="hook load: exit code 3")
    decision = replace(workflow().decision, recover=("load", "resume"))
    over = workflow(phase="recovery_failed", is_over=True, recover=failed, decision=decision)
    assert commands(over) == (
        "scheduled-events-agent retry C7061BAC",
        "scheduled-events-agent resolve C7061BAC",
    )
    assert hooks(over)[2:] == ["load failed", "resume open"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"phase": "held", "wait_reason": WaitReason(kind="held")}, "Reboot is held: an operator holds it"),
        (
            {
                "phase": "recovery_failed",
                "is_over": True,
                "recover": StageStatus(failure="hook load: exit code 3"),
            },
            "Recovery from the Reboot of vm-1 failed: hook load: exit code 3.",
        ),
        ({"phase": "prepared"}, "Prepared for a Reboot, which is not approved yet"),
        ({"phase": "approved"}, "Reboot is approved and may start"),
        ({"phase": "started"}, "Reboot is under way"),
        ({"phase": "recovering", "is_over": True}, "Recovering from a Reboot"),
        ({"phase": "started", "is_over": True}, "Reboot is over"),
        ({"phase": "waiting"}, "Reboot is pending"),
        ({"phase": "waiting", "event": event(type="")}, "event is pending"),
    ],
)
def test_the_headline_is_the_answer_in_one_line(changes: dict[str, Any], expected: str) -> None:
    assert headline(workflow(**changes)) == expected


def test_urgent_events_come_first_and_events_of_others_last() -> None:
    others = workflow(event(id="A", resources=("vm-2",), not_before=NOW))
    late = workflow(event(id="B", not_before=NOW + timedelta(days=3)))
    soon = workflow(event(id="C"))
    found = to_status(facts(others, late, soon))
    assert [event.key for event in found.events] == [soon.id, late.id, others.id]
    assert found.headline == "Reboot is pending, and 2 more"
    assert headline(others) == ("1 event pending, none for this VM")
    unknown = replace(others, decision=replace(others.decision, affects="unknown"))
    assert headline(unknown) == "1 event pending, and nothing says whether for this VM"


def hooks(workflow: Workflow) -> list[str]:
    return [f"{hook.hook} {hook.state}" for hook in first_of(workflow).hooks]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"phase": "waiting"}, ["drain open", "checkpoint open", "resume open"]),
        (
            {"phase": "started", "was_started": True, "prepare": StageStatus(done=("drain",))},
            ["drain done", "checkpoint not_run", "resume open"],
        ),
        ({"phase": "recovering", "is_over": True}, ["drain not_run", "checkpoint not_run", "resume open"]),
        ({"phase": "closed", "is_over": True}, ["drain not_run", "checkpoint not_run", "resume not_run"]),
        (
            {"phase": "held", "prepare": StageStatus(state="failed", done=("drain",))},
            ["drain done", "checkpoint failed", "resume open"],
        ),
    ],
)
def test_a_hook_whose_time_has_passed_is_not_listed_as_next(changes: dict[str, Any], expected: list[str]) -> None:
    assert hooks(workflow(**changes)) == expected


@pytest.mark.parametrize(
    ("changes", "approval"),
    [
        ({"approval": Approval(state="confirmed")}, "Azure has accepted it"),
        ({"approval": Approval(state="requested")}, "Azure is being asked"),
        ({"approval": Approval(state="requested", failures=1)}, "Azure is being asked; 1 failed so far"),
        ({"approval": Approval(failures=2)}, "2 failed so far; the agent tries again"),
        ({"was_started": True}, "none was given by this VM"),
        ({"operator": HELD_BY_KIM}, "not by itself: Azure starts it at 22:26:12 UTC"),
        ({"operator": APPROVED_BY_KIM}, "when prepared"),
        ({"phase": "held"}, "not by itself: Azure starts it at 22:26:12 UTC"),
        ({}, "by itself, when prepared"),
        ({"decision": {"approve": "immediately"}}, "by itself, at once"),
        ({"decision": {"approve": "manual"}}, "by an operator"),
        ({"phase": "held", "approval_needed_since": NOW}, "by an operator"),
        ({"decision": {"approve": "never"}}, "never: Azure starts it at 22:26:12 UTC"),
        (
            {"decision": {"approve": "never"}, "event": {"not_before": NOW}},
            "never: Azure may start it at any moment",
        ),
        ({"decision": {"affects": "others"}}, "not by this VM, which it does not name"),
        ({"decision": {"affects": "unknown", "rule": None}}, "not before it is known whether it names this VM"),
    ],
)
def test_the_state_of_the_approval_is_shown(changes: dict[str, Any], approval: str) -> None:
    assert to_status(some_facts(workflows=(a_workflow(**changes),))).events[0].approval.text == approval


@pytest.mark.parametrize(
    ("approve", "approval"),
    [
        ("when-prepared", "none: the agent only observes; it would be by itself, when prepared"),
        ("manual", "none: the agent only observes; it would be by an operator"),
        ("never", "never: Azure starts it at 22:26:12 UTC"),
    ],
)
def test_an_agent_that_only_observes_shows_what_the_approval_would_be(approve: str, approval: str) -> None:
    observing = some_facts(mode="observe", workflows=(a_workflow(decision={"approve": approve}),))
    assert to_status(observing).events[0].approval.text == approval


def test_two_events_whose_ids_begin_alike_are_named_whole() -> None:
    one, two = workflow(event(id="12345678-A")), workflow(event(id="12345678-B"))
    assert "scheduled-events-agent hold 12345678-A" in commands(one, two)


# --- the files


def test_the_browser_may_load_the_files_and_nothing_else() -> None:
    assert HEADERS["Content-Security-Policy"] == (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    assert (HEADERS["X-Frame-Options"], HEADERS["Referrer-Policy"]) == ("DENY", "no-referrer")
    assert [(path, make().status, make().content_type, make().headers) for path, make in FILES.items()] == [
        ("/", 200, "text/html; charset=utf-8", HEADERS),
        ("/status.css", 200, "text/css; charset=utf-8", HEADERS),
        ("/status.js", 200, "text/javascript; charset=utf-8", HEADERS),
    ]


def test_the_page_says_of_a_recommendation_what_the_command_says() -> None:
    script = (Path(scheduled_events_agent.__file__).parent / "web" / "status.js").read_text(encoding="utf-8")
    recommendation = first_of(workflow(event=event(type="SpotRebalanceRecommendation", not_before=None)))
    assert f'count("a warning", "{time_left(recommendation, NOW)}")' in script


def test_texts_never_become_markup_and_nothing_comes_from_elsewhere() -> None:
    folder = Path(scheduled_events_agent.__file__).parent / "web"
    script = (folder / "status.js").read_text(encoding="utf-8")
    ways = r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|eval\(|Function\(|\bstyle\b|setHTML"
    assert re.findall(ways, script) == []
    whole = script + "".join((folder / f"status.{kind}").read_text(encoding="utf-8") for kind in ("html", "css"))
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import| on\w+=|<style| style=", whole) == []
    assert re.findall(r"<script[^>]*>([^<]*)</script>", whole) == [""]
