"""Texts of the status page: its headline, and what it says of each pending event."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import scheduled_events_agent
from scheduled_events_agent.imds.compare import Seen
from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.policy import Rule
from scheduled_events_agent.status import CommandOptions, PolicyInForce, RunningHook, ShownWorkflow, Status, Vm
from scheduled_events_agent.status.messages import as_shown
from scheduled_events_agent.status.summaries import with_words
from scheduled_events_agent.web.static import FILES, HEADERS
from scheduled_events_agent.workflow import Approval, Context, Progress, proceed

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


def workflow(one: ScheduledEvent | None = None, **changes: Any) -> ShownWorkflow:
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
    (first,) = proceed({}, [Seen(one or event())], context).board.values()
    return replace(
        as_shown(first), **{"phase": "waiting", "prepare": Progress(), "waits": None, "waits_for": "", **changes}
    )


def status(*pending: ShownWorkflow, **changes: Any) -> Status:
    plain = Status(
        at=NOW,
        version="0.1.0",
        started_at=NOW - timedelta(days=1),
        vm=Vm(names=("vm-1",), vm_id="id"),
        mode="act",
        ready=True,
        health="ok",
        policy=PolicyInForce(file="/etc/policy.yaml", read_at=NOW),
        rules=("impactful",),
        endpoint="http://169.254.169.254",
        last_poll_at=NOW - timedelta(seconds=3),
        poll_failure="",
        incarnation="7",
        running=(),
        pending=pending,
    )
    return replace(plain, **changes)


def headline(*pending: ShownWorkflow, **changes: Any) -> tuple[str, str]:
    found = with_words(status(*pending, **changes))
    return found.headline, found.tone


def test_a_summary_tells_what_is_done_how_far_it_is_and_what_an_operator_can_do() -> None:
    one = workflow(
        phase="preparing", prepare=Progress(state="running", done=("drain",), current="checkpoint", run=2)
    )
    hook = RunningHook(workflow_id=one.id, stage="prepare", hook="checkpoint", since=NOW - timedelta(seconds=72))
    found = with_words(status(one, running=(hook,), ready=False))
    assert (found.headline, found.tone) == ("Preparing for a Reboot", "busy")
    (summary,) = found.summaries
    assert summary.workflow_id == one.id
    assert summary.activity == "runs the prepare hook checkpoint, 1m 12s so far"
    assert summary.approval == "wanted when prepared"
    assert [(step.stage, step.hook, step.state) for step in summary.hooks] == [
        ("prepare", "drain", "done"),
        ("prepare", "checkpoint", "running"),
        ("recover", "resume", "open"),
    ]
    assert summary.commands == ("scheduled-events-agent hold C7061BAC",)
    assert replace(found, headline="", tone="good", summaries=(), attention=()) == status(
        one, running=(hook,), ready=False
    )


def commands(*pending: ShownWorkflow, **changes: Any) -> tuple[str, ...]:
    return with_words(status(*pending, **changes)).summaries[0].commands


def test_the_commands_to_overrule_lead_to_an_agent_that_is_not_where_the_default_is() -> None:
    assert commands(workflow(), command_options=CommandOptions(state="--state-dir '/var/my agent'")) == (
        "scheduled-events-agent hold C7061BAC --state-dir '/var/my agent'",
        "scheduled-events-agent approve C7061BAC --state-dir '/var/my agent'",
    )


def test_no_command_is_offered_that_the_agent_would_refuse() -> None:
    assert commands(workflow()) != ()
    assert commands(workflow(), mode="observe") == ()
    failed = workflow(phase="recovery_failed", is_over=True)
    assert commands(failed, mode="observe") == ("scheduled-events-agent resolve C7061BAC",)


def test_a_failed_recovery_is_told_with_the_commands_that_solve_it() -> None:
    failed = Progress(state="failed", failed_hook="load", failure="hook load: exit code 3")
    decision = replace(workflow().decision, recover=("load", "resume"))
    over = workflow(phase="recovery_failed", is_over=True, recover=failed, decision=decision)
    assert commands(over) == (
        "scheduled-events-agent retry C7061BAC",
        "scheduled-events-agent resolve C7061BAC",
    )
    assert steps(over)[2:] == ["load failed", "resume open"]


@pytest.mark.parametrize(
    ("changes", "expected", "tone"),
    [
        ({"phase": "held", "waits_for": "hook drain failed"}, "Reboot is held: hook drain failed", "busy"),
        (
            {"phase": "recovery_failed", "is_over": True, "recover": Progress(failure="hook load: exit code 3")},
            "Recovery from the Reboot of vm-1 failed: hook load: exit code 3.",
            "bad",
        ),
        ({"phase": "prepared"}, "Prepared for a Reboot, which is not approved yet", "busy"),
        ({"phase": "approved"}, "Reboot is approved and may start", "busy"),
        ({"phase": "started"}, "Reboot is under way", "busy"),
        ({"phase": "recovering", "is_over": True}, "Recovering from a Reboot", "busy"),
        ({"phase": "started", "is_over": True}, "Reboot is over", "busy"),
        ({"phase": "waiting"}, "Reboot is pending", "busy"),
        ({"phase": "waiting", "event": event(type="")}, "event is pending", "busy"),
    ],
)
def test_the_headline_is_the_answer_in_one_line(changes: dict[str, Any], expected: str, tone: str) -> None:
    assert headline(workflow(**changes)) == (expected, tone)


@pytest.mark.parametrize(
    ("changes", "expected", "tone"),
    [
        ({}, "Nothing is pending", "good"),
        ({"last_poll_at": None}, "Azure has not answered yet", "good"),
        ({"poll_failure": "connection refused"}, "Nothing was pending at the last successful poll", "good"),
        (
            {"poll_failure": "x", "health": ("no poll has succeeded for 212s",)},
            "No poll has succeeded for 212s.",
            "bad",
        ),
    ],
)
def test_that_nothing_is_pending_is_only_said_if_azure_has_just_said_so(
    changes: dict[str, Any], expected: str, tone: str
) -> None:
    assert headline(**changes) == (expected, tone)


def test_what_is_urgent_comes_first_and_what_concerns_others_last() -> None:
    others = workflow(event(id="A", resources=("vm-2",), not_before=NOW))
    late = workflow(event(id="B", not_before=NOW + timedelta(days=3)))
    soon = workflow(event(id="C"))
    found = with_words(status(others, late, soon))
    assert [summary.workflow_id for summary in found.summaries] == [soon.id, late.id, others.id]
    assert found.headline == "Reboot is pending, and 2 more"
    assert headline(others) == ("1 event pending, none for this VM", "good")


def steps(workflow: ShownWorkflow) -> list[str]:
    return [f"{step.hook} {step.state}" for step in with_words(status(workflow)).summaries[0].hooks]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"phase": "waiting"}, ["drain open", "checkpoint open", "resume open"]),
        (
            {"phase": "started", "was_started": True, "prepare": Progress(done=("drain",))},
            ["drain done", "checkpoint not_run", "resume open"],
        ),
        ({"phase": "recovering", "is_over": True}, ["drain not_run", "checkpoint not_run", "resume open"]),
        ({"phase": "closed", "is_over": True}, ["drain not_run", "checkpoint not_run", "resume not_run"]),
        (
            {"phase": "held", "prepare": Progress(state="failed", done=("drain",))},
            ["drain done", "checkpoint failed", "resume open"],
        ),
    ],
)
def test_a_hook_whose_time_has_passed_is_not_called_to_do(changes: dict[str, Any], expected: list[str]) -> None:
    assert steps(workflow(**changes)) == expected


@pytest.mark.parametrize(
    ("changes", "approval"),
    [
        ({"approval": Approval(state="confirmed")}, "Azure has accepted it"),
        ({"approval": Approval(state="requested")}, "Azure is being asked"),
        ({"approval": Approval(state="requested", failures=1)}, "Azure is being asked; 1 failed so far"),
        ({"approval": Approval(failures=2)}, "2 failed so far; the agent tries again"),
        ({"operator_action": "hold"}, "wanted when prepared; an operator holds it"),
        ({"was_started": True}, "none was given by this VM"),
    ],
)
def test_how_far_the_approval_is_is_told(changes: dict[str, Any], approval: str) -> None:
    assert with_words(status(workflow(**changes))).summaries[0].approval == approval


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


def test_texts_never_become_markup_and_nothing_comes_from_elsewhere() -> None:
    folder = Path(scheduled_events_agent.__file__).parent / "web"
    script = (folder / "status.js").read_text(encoding="utf-8")
    ways = r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|eval\(|Function\(|\bstyle\b|setHTML"
    assert re.findall(ways, script) == []
    whole = script + "".join((folder / f"status.{kind}").read_text(encoding="utf-8") for kind in ("html", "css"))
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import| on\w+=|<style| style=", whole) == []
    assert re.findall(r"<script[^>]*>([^<]*)</script>", whole) == [""]
