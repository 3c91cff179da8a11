"""States that need a person, and states that a rule or an operator wants, which do not."""

import re
import shlex
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from status_samples import HELD_BY_KIM, NOW, a_workflow, some_facts

from scheduled_events_agent.cli import build_parser
from scheduled_events_agent.status import (
    ActivePolicy,
    Attention,
    ClockWrong,
    CommandOptions,
    FleetState,
    KubernetesFailure,
    NotifiedTarget,
    StateLost,
    SuggestedCommand,
    TargetFailure,
    Vm,
    WebConfigRejected,
)
from scheduled_events_agent.status.actions import with_prefix
from scheduled_events_agent.status.attention import ATTENTION_KINDS, WITH_DEADLINE, attention, exit_code
from scheduled_events_agent.status.events import to_status
from scheduled_events_agent.status.facts import Facts
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.workflow import Approval, StageStatus, WaitReason, Workflow

POLICY = ActivePolicy(file="/etc/policy.yaml", read_at=NOW - timedelta(hours=1))
FAILED = StageStatus(state="failed", run=1, failed_hook="drain", failure="hook drain: exit code 7")
UNDONE = StageStatus(state="succeeded", done=("drain",), run=1)
RECOVERY = {"recover": ("resume",)}
LOG = SuggestedCommand(command="journalctl -u scheduled-events-agent -n 50", effect="show the end of its log")


def held(**fields: Any) -> Workflow:
    """Its preparation has failed."""
    failed: dict[str, Any] = {"phase": "held", "prepare": FAILED, "wait_reason": WaitReason(kind="prepare_failed")}
    return a_workflow(**{**failed, **fields})


def recovering(**fields: Any) -> Workflow:
    told: dict[str, Any] = {"phase": "recovering", "is_over": True, "prepare": UNDONE, "handling_since": NOW}
    return a_workflow(decision=RECOVERY, **{**told, **fields})


def of_event(workflow: Workflow, **fields: Any) -> Facts:
    return some_facts(workflows=(workflow,), ready=False, **fields)


def target(**fields: Any) -> NotifiedTarget:
    return NotifiedTarget(**{"name": "ops", "waiting": 0, "oldest_at": None, "failure": None, **fields})


PROBLEMS = "policy.yaml:3: rules[0].approve: bad\npolicy.yaml:4: worse"
FAILING = Approval(failures=3, failing_since=NOW, failure="POST: 500")
LOST_HOOK = {"wait_reason": WaitReason(kind="lost_hook", detail="resume")}
MANUAL = a_workflow(decision={"approve": "manual"}, phase="prepared", approval_needed_since=NOW)
MOVED: dict[str, Any] = {"not_before": NOW + timedelta(days=2)}
DRAINED: dict[str, Any] = {
    "phase": "held", "prepare": UNDONE, "wait_reason": WaitReason(kind="never"), "phase_since": NOW,
}  # fmt: skip
EARLY = a_workflow(
    event=MOVED, decision={"approve": "never"}, early_until=NOW + timedelta(hours=47, minutes=45), **DRAINED
)
UNRECOVERED = recovering(
    phase="recovery_failed",
    recover=replace(FAILED, failed_hook="resume", failure="hook resume: exit code 1"),
)
LOST = StateLost(at=NOW, reason="file is not a database", recover=("resume", "tell"))
OTHER_VM = "the state file is of VM id-1, and this VM is id-2"
FOREIGN = StateLost(at=NOW, reason=OTHER_VM, is_foreign=True, recover=())


def of_old_name(event: dict[str, Any] | None = None, **fields: Any) -> Workflow:
    """Prepared for when this VM was web-1; now it is web-2."""
    found: dict[str, Any] = {"named_as": "web-1", "phase": "held", "prepare": UNDONE}
    found["wait_reason"] = WaitReason(kind="other_vm")
    of_old = {"resources": ("web-1",), **(event or {})}
    return a_workflow(event=of_old, decision={"affects": "others"}, **{**found, **fields})


RENAMED = {"vm": Vm(names=("web-2", "b"), vm_id="id")}
# By kind: the facts, severity, message and the first command.
NEEDED: dict[str, tuple[Facts, str, str, str]] = {
    "recovery_failed": (
        of_event(UNRECOVERED),
        "act",
        "Recovery from the Reboot of web-1 failed: hook resume: exit code 1.",
        "scheduled-events-agent retry 602D9444",
    ),
    "hook_missing": (
        of_event(recovering(**LOST_HOOK)),
        "act",
        "Recovery from the Reboot of web-1 waits for hook resume, which is not in the policy.",
        "scheduled-events-agent check",
    ),
    "state_lost": (
        some_facts(state_lost=LOST),
        "act",
        f"The state file was damaged at {NOW:%H:%M:%S} UTC: file is not a database.",
        "scheduled-events-agent resolve state_lost",
    ),
    "prepare_failed": (
        of_event(held()),
        "act",
        "The Reboot of web-1 is held: hook drain: exit code 7.",
        "scheduled-events-agent retry 602D9444",
    ),
    "approval_needed": (
        of_event(MANUAL),
        "act",
        "The Reboot of web-1 needs an operator's approval.",
        "scheduled-events-agent approve 602D9444",
    ),
    "not_acting": (
        of_event(recovering(), mode="observe"),
        "act",
        "The Reboot of web-1 is over, and what was prepared stays prepared: the agent only observes.",
        "scheduled-events-agent check",
    ),
    "approval_failing": (
        of_event(a_workflow(phase="prepared", approval=FAILING)),
        "act",
        "Azure does not accept the approval of the Reboot of web-1: 3 tries have failed.",
        "scheduled-events-agent history --event 602D9444",
    ),
    "unhealthy": (
        some_facts(faults=("the engine has run no cycle for more than 20s",)),
        "act",
        "The engine has run no cycle for more than 20s.",
        "scheduled-events-agent doctor",
    ),
    "restart_unsafe": (
        of_event(a_workflow(), policy=replace(POLICY, next_start_failure="/state is in memory (tmpfs)")),
        "act",
        "After the Reboot the agent does not go on: /state is in memory (tmpfs).",
        "scheduled-events-agent doctor",
    ),
    "agent_restarts": (
        some_facts(
            unclean_starts=tuple(NOW - timedelta(minutes=m) for m in (59, 2, 1)), supervisor_commands=(LOG,)
        ),
        "fix",
        "The agent ended by itself and was started again, 3 times within an hour.",
        LOG.command,
    ),
    "policy_rejected": (
        some_facts(policy=replace(POLICY, rejected=PROBLEMS, rejected_summary="line 3, approve", rejected_at=NOW)),
        "fix",
        "The policy file is rejected: line 3, approve.",
        "scheduled-events-agent check",
    ),
    "web_config_rejected": (
        some_facts(web_config_rejected=WebConfigRejected(reason="no such file", since=NOW)),
        "fix",
        "agent.web_config is rejected: no such file.",
        "scheduled-events-agent check",
    ),
    "vm_unknown": (
        some_facts(vm=Vm(names=(), vm_id=""), started_at=NOW - timedelta(minutes=5)),
        "act",
        "The name of this VM is not known.",
        "scheduled-events-agent doctor",
    ),
    "vm_changed": (
        of_event(
            of_old_name({"status": "Started"}, phase="started", was_started=True, wait_reason=None), **RENAMED
        ),
        "act",
        "This VM is prepared for the Reboot of web-1, and its name is web-2 now.",
        "scheduled-events-agent check",
    ),
    "out_of_service": (
        of_event(EARLY),
        "fix",
        "web-1 is out of service until 2026-04-13 22:12:00 UTC: earlier than its lead.",
        "scheduled-events-agent approve 602D9444",
    ),
    "clock_wrong": (
        some_facts(clock_wrong=ClockWrong(seconds_ahead=-599.2, since=NOW, command="timedatectl")),
        "fix",
        "The clock of this VM is 10 minutes behind Azure's.",
        "timedatectl",
    ),
    "foreign_state": (
        some_facts(state_lost=FOREIGN),
        "fix",
        f"This disk may be prepared for an event of another VM: {OTHER_VM}.",
        "scheduled-events-agent history",
    ),
    "fleet_unavailable": (
        some_facts(fleet=FleetState(group="web", error="no route", unavailable_since=NOW, not_ready=())),
        "fix",
        "The store of the fleet cannot be used: no route.",
        "scheduled-events-agent fleet status",
    ),
    "kubernetes_unavailable": (
        some_facts(kubernetes_failure=KubernetesFailure(since=NOW - timedelta(minutes=5), reason="forbidden")),
        "fix",
        "The conditions of the Kubernetes node cannot be updated: forbidden.",
        "scheduled-events-agent doctor",
    ),
    "notifications_failing": (
        some_facts(notify=(target(lost=3, lost_at=NOW, lost_reason="it answers 400"),)),
        "fix",
        "3 notifications to ops are lost: it answers 400.",
        "scheduled-events-agent notify test ops",
    ),
}


def one_of(facts: Facts) -> Attention:
    (found,) = attention(facts)
    return found


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_each_kind_has_a_message_a_command_and_an_exit_code(kind: str) -> None:
    facts, severity, message, first = NEEDED[kind]
    found = one_of(facts)
    assert (found.kind, found.severity, found.message) == (kind, severity, message)
    assert found.commands[0].command == first
    assert (found.deadline is not None) == (kind in WITH_DEADLINE)
    assert found.since is not None or kind == "unhealthy"
    shown = to_status(facts)
    assert shown.headline == message
    assert found.key in ("", *[event.key for event in shown.events])
    assert bool(found.key) == bool(found.event_id)
    is_of_event = bool(found.event_id) and severity == "act"
    assert exit_code(shown) == {"unhealthy": 1, "vm_unknown": 1, "state_lost": 3}.get(
        kind, 3 if is_of_event else 0
    )


def test_the_page_lists_the_kinds_by_severity_and_those_with_a_deadline() -> None:
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text(encoding="utf-8")
    text = page.partition("\n## What needs a person\n")[2].partition("\n## ")[0]
    listed: dict[str, list[str]] = {"act": [], "fix": []}
    for severity, line in re.findall(r"^- `(act|fix)`, (.+?)(?=^- |^$)", text, re.MULTILINE | re.DOTALL):
        listed[severity] += re.findall(r"\[`(\w+)`\]", line)
    assert {severity: sorted(kinds) for severity, kinds in listed.items()} == {
        severity: sorted(kind for kind in ATTENTION_KINDS if NEEDED[kind][1] == severity) for severity in listed
    }
    (line,) = re.findall(r"until NotBefore (.+?)\n- ", text, re.DOTALL)
    assert re.findall(r"\[`(\w+)`\]", line) == [*WITH_DEADLINE]


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_each_kind_is_counted_and_all_others_are_0(kind: str) -> None:
    metrics = Metrics(tuple)
    metrics.set_attention(())
    metrics.set_attention(attention(NEEDED[kind][0]))
    text = metrics.expose().decode()
    for one in ATTENTION_KINDS:
        assert f'scheduled_events_attention{{kind="{one}"}} {float(one == kind)}\n' in text
    deadlines = [line for line in text.splitlines() if line.startswith("scheduled_events_attention_deadline")]
    assert len(deadlines) == (kind in WITH_DEADLINE)
    metrics.set_attention(())
    assert "attention_deadline_timestamp_seconds{" not in metrics.expose().decode()


def test_an_event_that_may_start_at_any_moment_has_the_deadline_0() -> None:
    metrics = Metrics(tuple)
    soon = held(event={"not_before": None})
    later = held(event={"id": "later"})
    metrics.set_attention(attention(some_facts(workflows=(later, soon))))
    text = metrics.expose().decode()
    assert 'scheduled_events_attention_deadline_timestamp_seconds{kind="prepare_failed"} 0.0\n' in text


def test_a_loss_of_state_names_what_may_not_have_run_and_how_it_ends() -> None:
    known = (
        "Whether the recover hooks (resume, tell) have run is not known: "
        "what was prepared before may still be out of service."
    )
    clears = " The next start with nothing pending runs on_clear (undo), which settles this."
    with_on_clear = replace(LOST, on_clear=("undo",))
    assert one_of(some_facts(state_lost=LOST)).consequence == known
    assert one_of(some_facts(state_lost=with_on_clear)).consequence == known + clears
    observes = one_of(some_facts(state_lost=with_on_clear, mode="observe"))
    assert (observes.severity, observes.consequence) == ("act", known)
    assert [one.command for one in observes.commands] == ["scheduled-events-agent resolve state_lost"]


def test_without_an_agent_a_loss_of_state_stays_and_no_command_has_an_effect() -> None:
    told = {"source": "state_file", "faults": ("no agent runs",), "mode": None, "rules": None, "policy": None}
    absence, loss = attention(some_facts(state_lost=replace(LOST, recover=None), **told))
    assert (absence.kind, loss.kind, loss.commands) == ("unhealthy", "state_lost", ())
    assert loss.consequence.startswith("Whether the recover hooks have run is not known")


def test_a_loss_of_state_that_no_rule_would_recover_from_needs_no_one() -> None:
    assert attention(some_facts(state_lost=replace(LOST, recover=(), on_clear=("undo",)))) == ()


def test_what_another_vm_prepared_stays_listed_though_no_rule_recovers() -> None:
    assert one_of(some_facts(state_lost=FOREIGN)).consequence == (
        "The agent does not run the recover hooks for it: this VM may be out of service."
    )


WANTED = {
    "an operator's own hold": a_workflow(phase="held", operator=HELD_BY_KIM, wait_reason=WaitReason(kind="held")),
    "a hold of what failed": held(operator=HELD_BY_KIM),
    "never": a_workflow(decision={"approve": "never"}, phase="held", wait_reason=WaitReason(kind="never")),
    "shared": a_workflow(decision={"affects": "shared"}, phase="held", wait_reason=WaitReason(kind="shared")),
    "of another VM": a_workflow(decision={"affects": "others"}),
    "an id that cannot be sent back": a_workflow(phase="held", wait_reason=WaitReason(kind="id")),
    "two failed approvals": a_workflow(phase="prepared", approval=Approval(failures=2)),
    "approvals that failed before a hold": a_workflow(
        phase="held", operator=HELD_BY_KIM, wait_reason=WaitReason(kind="held"), approval=Approval(failures=3)
    ),
    "under way": a_workflow(phase="started", event={"status": "Started"}, was_started=True),
    "recovers": recovering(),
    "waits for another event": recovering(wait_reason=WaitReason(kind="other_event", detail="B")),
}


@pytest.mark.parametrize("workflow", WANTED.values(), ids=WANTED.keys())
def test_an_event_that_a_rule_or_an_operator_holds_needs_no_attention(workflow: Workflow) -> None:
    assert attention(of_event(workflow)) == ()
    assert exit_code(to_status(of_event(workflow))) == 0


NO_TIME = a_workflow(event={"not_before": None}, decision={"approve": "never"}, **DRAINED)


@pytest.mark.parametrize(
    ("workflow", "at", "is_needed"),
    [
        (EARLY, NOW, True),
        (EARLY, NOW + timedelta(hours=47, minutes=40), True),
        (EARLY, NOW + timedelta(hours=47, minutes=40, seconds=1), False),
        (replace(EARLY, operator=HELD_BY_KIM), NOW, False),
        (replace(EARLY, approval=Approval(state="confirmed")), NOW, False),
        (replace(EARLY, phase="prepared", wait_reason=WaitReason(kind="all_ready")), NOW, True),
        (replace(EARLY, phase="prepared", wait_reason=WaitReason(kind="too_early")), NOW, True),
        (replace(EARLY, phase="prepared", wait_reason=WaitReason(kind="approval_slot")), NOW, False),
        (replace(EARLY, wait_reason=WaitReason(kind="missing")), NOW, False),
        (replace(EARLY, phase="prepared", wait_reason=None, approval=Approval(failures=1)), NOW, False),
        (replace(EARLY, phase="preparing", prepare=StageStatus(state="running", run=1)), NOW, False),
        (NO_TIME, NOW + timedelta(minutes=5), True),
        (NO_TIME, NOW + timedelta(minutes=4), False),
        (replace(NO_TIME, event=a_workflow().event), NOW + timedelta(minutes=19, seconds=12), True),
        (replace(NO_TIME, event=a_workflow().event), NOW + timedelta(minutes=19, seconds=11), False),
    ],
)
def test_a_vm_out_of_service_needs_attention_unless_that_ends_in_time(
    workflow: Workflow, at: datetime, is_needed: bool
) -> None:
    kinds = [one.kind for one in attention(replace(of_event(workflow), at=at))]
    assert kinds == (["out_of_service"] if is_needed else [])


def test_a_vm_out_of_service_says_until_when_and_how_to_end_that() -> None:
    found = one_of(of_event(EARLY))
    start = "2026-04-13 22:12:00 UTC"
    assert found.consequence == f"It stays prepared for the Reboot of web-1, which Azure starts at {start}."
    assert [(one.command.split()[1], one.effect) for one in found.commands] == [
        ("approve", "let Azure start it now"),
        ("hold", "do not approve it"),
    ]
    unknown = one_of(replace(of_event(NO_TIME), at=NOW + timedelta(minutes=5)))
    assert unknown.message == "web-1 is out of service, and Azure does not say until when."
    assert unknown.consequence == "It stays prepared for the Reboot of web-1, which Azure starts at any moment."


NO_STORE = FleetState(group="web", error="no route", unavailable_since=NOW, not_ready=("web-2",))
ALL_READY: dict[str, Any] = {"event": {"resources": ("web-1", "web-2")}, "phase": "prepared", "prepare": UNDONE}
FOR_ALL = {"shared": "all-ready", "affects": "shared", "can_approve_for_all": True}


@pytest.mark.parametrize("waits_for", ["all_ready", "missing"])
def test_a_store_that_keeps_an_approval_from_an_event_is_shown_with_this_event_only(waits_for: Any) -> None:
    reason = WaitReason(kind=waits_for)
    workflow = a_workflow(**ALL_READY, decision=FOR_ALL, wait_reason=reason, approval_needed_since=NOW)
    found = one_of(of_event(workflow, fleet=NO_STORE))
    assert (found.kind, found.severity, found.deadline) == ("approval_needed", "act", workflow.event.not_before)
    why = "The store of the fleet cannot be used: no route"
    assert found.message == f"The Reboot of web-1 needs an operator's approval: {why}."
    assert [one.command.split()[1] for one in found.commands] == ["approve", "hold", "fleet"]
    assert exit_code(to_status(of_event(workflow, fleet=NO_STORE))) == 3


@pytest.mark.parametrize(
    "workflow",
    [
        a_workflow(**ALL_READY, decision=FOR_ALL, wait_reason=WaitReason(kind="all_ready")),
        a_workflow(phase="waiting", wait_reason=WaitReason(kind="slot", at=NOW)),
    ],
)
def test_a_store_that_keeps_no_approval_from_an_event_is_to_be_repaired(workflow: Workflow) -> None:
    found = one_of(of_event(workflow, fleet=NO_STORE))
    assert (found.kind, found.severity) == ("fleet_unavailable", "fix")


def test_an_approval_that_the_rule_leaves_to_an_operator_does_not_hide_that_the_store_fails() -> None:
    decision = {**FOR_ALL, "approve": "manual"}
    workflow = a_workflow(**ALL_READY, decision=decision, approval_needed_since=NOW)
    kinds = [one.kind for one in attention(of_event(workflow, fleet=NO_STORE))]
    assert kinds == ["approval_needed", "fleet_unavailable"]


REFUSED = "the API server: connection refused"
API_AWAY = KubernetesFailure(since=NOW - timedelta(minutes=5), reason=REFUSED)


def test_an_api_server_that_was_away_for_less_than_five_minutes_needs_no_attention() -> None:
    soon = replace(API_AWAY, since=NOW - timedelta(minutes=4, seconds=59))
    assert attention(some_facts(kubernetes_failure=soon)) == ()


def test_an_api_server_that_is_away_is_reported_once() -> None:
    target_failure = TargetFailure(since=API_AWAY.since, reason=REFUSED)
    events = target(name="kubernetes", failure=target_failure)
    found = one_of(some_facts(kubernetes_failure=API_AWAY, notify=(events,)))
    assert found.kind == "kubernetes_unavailable"
    leases = replace(NO_STORE, error=REFUSED)
    assert one_of(some_facts(kubernetes_failure=API_AWAY, fleet=leases)).kind == "fleet_unavailable"
    words = replace(NO_STORE, error=f"this account may not list Leases in the namespace default: {REFUSED}")
    assert one_of(some_facts(kubernetes_failure=API_AWAY, fleet=words)).kind == "fleet_unavailable"
    denied = replace(events, failure=replace(target_failure, reason="events is forbidden"))
    facts = some_facts(kubernetes_failure=API_AWAY, notify=(denied,), fleet=NO_STORE)
    kinds = [one.kind for one in attention(facts)]
    assert kinds == ["fleet_unavailable", "kubernetes_unavailable", "notifications_failing"]


def test_an_agent_that_only_observes_needs_no_attention_before_an_event() -> None:
    for workflow in (MANUAL, held(), a_workflow(), EARLY):
        assert attention(of_event(workflow, mode="observe")) == ()


def test_a_recommendation_needs_attention_only_for_repairs() -> None:
    warning = {"type": "SpotRebalanceRecommendation"}
    found = one_of(of_event(held(event=warning)))
    assert (found.kind, found.severity, found.deadline) == ("prepare_failed", "fix", None)
    assert exit_code(to_status(of_event(held(event=warning)))) == 0
    over = replace(UNRECOVERED, event=a_workflow(event=warning).event)
    assert exit_code(to_status(of_event(over))) == 3


def test_the_nearest_deadline_comes_first_and_then_the_worst() -> None:
    later = held(event={"id": "later", "not_before": NOW + timedelta(days=1)})
    facts = some_facts(
        workflows=(later, UNRECOVERED, held(), MANUAL),
        policy=replace(POLICY, rejected="bad", rejected_at=NOW),
        polls="overdue",
        last_poll_at=NOW - timedelta(seconds=61),
    )
    assert [(one.kind, one.event_id) for one in attention(facts)] == [
        ("prepare_failed", "602D9444"),
        ("approval_needed", "602D9444"),
        ("prepare_failed", "later"),
        ("unhealthy", ""),
        ("recovery_failed", "602D9444"),
        ("policy_rejected", ""),
    ]
    soon = a_workflow(
        event={"id": "soon", "not_before": NOW + timedelta(minutes=1)}, phase="prepared", approval=FAILING
    )
    now = held(event={"id": "now", "not_before": None})
    first, second, *_ = attention(replace(facts, workflows=(*facts.workflows, soon, now)))
    assert (first.event_id, second.event_id) == ("now", "soon")


def test_without_an_agent_that_comes_first_for_no_command_has_an_effect() -> None:
    facts = some_facts(
        source="state_file",
        mode=None,
        workflows=(held(), UNRECOVERED),
        faults=("no agent runs",),
        supervisor_commands=(LOG,),
    )
    first, second, third = attention(facts)
    assert (first.message, first.commands) == ("No agent runs.", (LOG,))
    assert "is prepared for" in first.consequence
    assert second.kind == "prepare_failed"
    assert (third.kind, third.consequence) == ("recovery_failed", "")  # nothing answers at /readyz
    assert exit_code(to_status(facts)) == 3


def test_a_failed_preparation_needs_attention_while_one_document_lacks_the_event() -> None:
    missing = held(wait_reason=WaitReason(kind="missing"))
    assert one_of(of_event(missing)).message == "The Reboot of web-1 is held: hook drain: exit code 7."


def test_an_event_without_an_id_can_have_its_hook_run_again() -> None:
    found = one_of(of_event(held(event={"id": "", "resources": ("web-1",)})))
    assert [one.effect for one in found.commands] == ["run drain again, then the rest"]


def test_the_consequence_says_what_happens_if_no_person_acts() -> None:
    start = "22:26:12 UTC"
    assert one_of(of_event(held())).consequence == f"Azure starts it at {start}, prepared or not."
    assert one_of(of_event(MANUAL)).consequence == f"Without an approval Azure starts it at {start}."
    soon = held(event={"not_before": NOW})
    assert one_of(of_event(soon)).consequence == "Azure starts it at any moment, prepared or not."
    unready = "/readyz answers 503 since 22:12:00 UTC: no traffic until this is settled."
    assert one_of(of_event(UNRECOVERED)).consequence == unready
    rejected = "In force is the policy accepted at 21:12:00 UTC, also after a restart."
    assert one_of(NEEDED["policy_rejected"][0]).consequence == rejected


def test_the_commands_say_what_they_do() -> None:
    def effects(facts: Facts) -> list[tuple[str, str]]:
        return [(one.command.split()[1], one.effect) for one in one_of(facts).commands]

    assert effects(of_event(held())) == [
        ("retry", "run drain again, then the rest"),
        ("approve", "let Azure start it as it is"),
    ]
    assert effects(of_event(UNRECOVERED)) == [
        ("retry", "run resume again, then the rest"),
        ("resolve", "only when you have done manually what resume does"),
    ]
    assert effects(of_event(recovering(**LOST_HOOK))) == [
        ("check", "edit policy.yaml: hook resume again, then reload; recovery goes on by itself"),
        ("resolve", "only when you have done manually what resume does"),
    ]
    event = {"resources": ("web-1", "web-2", "web-3")}
    shared = a_workflow(
        event=event, decision={"approve": "manual", "affects": "shared"}, phase="held", approval_needed_since=NOW
    )
    assert effects(of_event(shared)) == [
        ("approve", "let Azure start it when it is prepared, on all 3 VMs that it names"),
        ("hold", "do not approve it"),
    ]


RELOAD = "sudo systemctl reload scheduled-events-agent"


def test_what_ends_with_a_change_of_the_policy_names_its_file_and_the_reload() -> None:
    told = {"policy": POLICY, "reload_command": RELOAD}
    expected = {
        "not_acting": "edit /etc/policy.yaml: mode: act, then reload, or restart it without --observe",
        "hook_missing": "edit /etc/policy.yaml: hook resume again, then reload; recovery goes on by itself",
        "vm_unknown": "edit /etc/policy.yaml: vm.name: this VM's name in Azure, then reload",
    }
    for kind, effect in expected.items():
        commands = one_of(replace(NEEDED[kind][0], **told)).commands
        assert SuggestedCommand(command=RELOAD, effect=effect) in commands, kind
        assert "check" not in [one.command.split()[1] for one in commands], kind


def test_an_approval_that_azure_does_not_accept_can_be_given_from_outside_the_vm() -> None:
    event = {"id": "602D9444-1B2C-4A5D-9E8F-0123456789AB"}
    facts = of_event(a_workflow(event=event, phase="prepared", approval=FAILING), command_prefix="sudo ")
    (line,) = [one for one in one_of(facts).commands if one.command.startswith("az ")]
    assert line.command == (
        "az maintenance scheduledevents acknowledge --resource-group GROUP --resource-type virtualMachines "
        "--resource-name web-1 --scheduled-events-id 602D9444-1B2C-4A5D-9E8F-0123456789AB"
    )
    assert "from outside the VM" in line.effect
    assert with_prefix(line.command, "sudo ") == line.command
    assert with_prefix("scheduled-events-agent status", "sudo ") == "sudo scheduled-events-agent status"
    nameless = of_event(a_workflow(event={"id": ""}, phase="prepared", approval=FAILING))
    assert not [one for one in one_of(nameless).commands if one.command.startswith("az ")]


def test_an_event_of_a_name_that_this_vm_no_longer_has_is_one_cause() -> None:
    failed = of_old_name({"id": "later", "not_before": NOW + timedelta(days=1)}, prepare=FAILED)
    found = one_of(some_facts(workflows=(failed, of_old_name()), **RENAMED))
    assert (found.event_id, found.deadline) == ("602D9444", NOW + timedelta(minutes=14, seconds=12))
    assert (
        found.message
        == "This VM is prepared for the Reboot of web-1 and 1 other event, and its name is web-2 now."
    )
    assert found.consequence == "The agent acts on no other event of web-1. Azure starts this one at 22:26:12 UTC."
    effect = "edit policy.yaml: vm.name: web-1, or the same in vm.aliases, then reload"
    assert [(one.command.split()[1], one.effect) for one in found.commands] == [
        ("check", effect),
        ("doctor", "find the problem"),
    ]
    service = some_facts(workflows=(of_old_name(),), reload_command="systemctl reload it", **RENAMED)
    assert [(one.command.split()[1], one.effect) for one in one_of(service).commands] == [
        ("reload", effect),
        ("check", "see before the reload that the policy is right"),
        ("doctor", "find the problem"),
    ]
    assert to_status(some_facts(workflows=(of_old_name(),), **RENAMED)).health == (
        "This VM is prepared for the Reboot of web-1, and its name is web-2 now.",
    )


NOT_RENAMED = {
    "its name was put back": (of_old_name(), Vm(names=("WEB-1",), vm_id="id")),
    "an alias has the name": (of_old_name(), Vm(names=("web-2", "_web-1"), vm_id="id")),
    "nothing is prepared": (of_old_name(prepare=StageStatus(), phase="waiting"), RENAMED["vm"]),
    "a rule is for events of other VMs": (of_old_name(named_as=""), RENAMED["vm"]),
    "Azure names another VM now": (of_old_name({"resources": ("web-3",)}), RENAMED["vm"]),
}


@pytest.mark.parametrize("case", NOT_RENAMED)
def test_an_event_of_this_or_of_another_vm_says_nothing_of_a_changed_name(case: str) -> None:
    workflow, vm = NOT_RENAMED[case]
    assert "vm_changed" not in [one.kind for one in attention(of_event(workflow, vm=vm))]


def test_after_the_event_a_changed_name_counts_until_it_is_recovered_or_needs_more() -> None:
    over: dict[str, Any] = {"is_over": True, "phase": "recovering", "wait_reason": None}
    found = one_of(of_event(of_old_name(**over), **RENAMED))
    assert (found.kind, found.deadline) == ("vm_changed", None)
    assert found.consequence == "The agent acts on no other event of web-1."
    failed = of_old_name(**over | {"phase": "recovery_failed"}, recover=FAILED)
    assert one_of(of_event(failed, **RENAMED)).kind == "recovery_failed"
    lost = of_old_name(**over | LOST_HOOK)
    assert one_of(of_event(lost, **RENAMED)).kind == "hook_missing"
    assert attention(of_event(of_old_name(), mode="observe", **RENAMED)) == ()


def test_a_reason_that_ends_as_a_sentence_gets_no_second_stop() -> None:
    rejected = 'unknown key "rulez"; did you mean "rules"?'
    bad = replace(POLICY, rejected=f"policy.yaml:3: {rejected}", rejected_summary=rejected, rejected_at=NOW)
    assert one_of(some_facts(policy=bad)).message == f"The policy file is rejected: {rejected}"
    reason = "its certificate is not trusted: it is not valid for '127.0.0.1'."
    failing = target(failure=TargetFailure(since=NOW - timedelta(minutes=5), reason=reason))
    assert one_of(some_facts(notify=(failing,))).message == f"Notifications to ops fail: {reason}"


def test_a_message_is_a_sentence_and_the_exact_error_stands_below_it() -> None:
    request = "GET http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01"
    error = '401 Unauthorized: {"error": "denied"}'
    since = NOW - timedelta(minutes=4)
    polls = {"poll_failure": f"{request}: {error}", "poll_failure_summary": "401 Unauthorized"}
    unanswered = some_facts(polls="overdue", last_poll_at=since, **polls)
    found = one_of(unanswered)
    assert found.message == "Azure's metadata service has not answered since 22:08:00 UTC: 401 Unauthorized."
    assert (found.consequence, found.detail) == ("No new event is seen.", f"{request}: {error}")
    later = replace(unanswered, at=NOW + timedelta(minutes=1))
    assert one_of(later).message == found.message  # what changes with time is no headline
    nameless = {"vm": Vm(names=(), vm_id=""), "started_at": NOW - timedelta(minutes=5)}
    answers = {
        "vm_failure": "GET http://x/metadata/instance: 403",
        "vm_failure_summary": "/metadata/instance: 403",
    }
    found = one_of(some_facts(**nameless, **answers))
    assert found.message == "The name of this VM is not known: /metadata/instance: 403."
    assert found.detail == "GET http://x/metadata/instance: 403"
    assert one_of(NEEDED["approval_failing"][0]).detail == "POST: 500"
    assert one_of(NEEDED["policy_rejected"][0]).detail == PROBLEMS
    for kind, (facts, *_) in NEEDED.items():
        assert not re.search(r"https?:|\b(GET|POST)\b|\n", one_of(facts).message), kind


def test_doctor_comes_before_the_errors_of_approvals_if_polls_fail_too() -> None:
    facts = of_event(a_workflow(phase="prepared", approval=FAILING), poll_failure="timeout")
    assert one_of(facts).commands[0].command == "scheduled-events-agent doctor"


def test_commands_have_the_options_with_which_they_find_agent_and_policy() -> None:
    policy = replace(POLICY, rejected="bad")
    options = CommandOptions(state="--state-dir /my/state", policy="--config /my/policy.yaml")
    facts = of_event(held(), policy=policy, command_options=options)
    lines = [one.command for found in attention(facts) for one in found.commands]
    assert lines == [
        "scheduled-events-agent retry 602D9444 --state-dir /my/state",
        "scheduled-events-agent approve 602D9444 --state-dir /my/state",
        "scheduled-events-agent check --config /my/policy.yaml",
    ]


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_each_command_that_is_shown_is_about_the_same_agent(kind: str) -> None:
    options = CommandOptions(state="--state-dir '/my state'", policy="--config '/my policy.yaml'")
    status = to_status(replace(NEEDED[kind][0], command_options=options))
    lines = [one.command for found in status.attention for one in found.commands]
    lines += [one.command for event in status.events for one in event.commands]
    for line in lines:
        if not line.startswith("scheduled-events-agent "):
            continue
        arguments = build_parser().parse_args(shlex.split(line)[1:])
        has_state_option = hasattr(arguments, "state_dir")
        assert not has_state_option or arguments.state_dir == "/my state"
        reads_policy = arguments.command == "doctor" or not has_state_option
        assert arguments.config == ("/my policy.yaml" if reads_policy else None)


def test_a_state_that_ends_by_itself_soon_needs_no_attention_yet() -> None:
    recent = TargetFailure(since=NOW - timedelta(minutes=4), reason="it answers 503")
    long = replace(recent, since=NOW - timedelta(minutes=5))
    assert attention(some_facts(notify=(target(failure=recent),))) == ()
    found = one_of(some_facts(notify=(target(failure=long),)))
    assert found.message == "Notifications to ops fail: it answers 503."
    unnamed = {"vm": Vm(names=(), vm_id=""), "started_at": NOW - timedelta(minutes=4)}
    assert attention(some_facts(**unnamed)) == ()
    old = tuple(NOW - timedelta(minutes=m) for m in (61, 2, 1))
    assert attention(some_facts(unclean_starts=old)) == ()


OPEN = "/etc/policy.yaml can be changed by every account: chmod go-w /etc/policy.yaml"


def test_a_rejected_policy_with_which_no_agent_starts_again_needs_an_operator_before_a_restart_of_the_vm() -> None:
    policy = replace(POLICY, rejected=OPEN, rejected_at=NOW, next_start_failure=OPEN)
    found = one_of(some_facts(policy=policy))
    assert (found.kind, found.severity, found.deadline) == ("policy_rejected", "act", None)
    in_force = "In force is the policy accepted at 21:12:00 UTC"
    assert found.consequence == f"{in_force}. After a restart no agent runs: {OPEN}."
    assert exit_code(to_status(some_facts(policy=policy))) == 3
    freeze = a_workflow(event={"id": "freeze", "type": "Freeze"})
    of_another = a_workflow(event={"id": "other"}, decision={"affects": "others"})
    started = a_workflow(event={"id": "started", "status": "Started"}, was_started=True)
    unmoved = some_facts(workflows=(freeze, of_another, started), policy=policy)
    assert one_of(unmoved).deadline is None
    later = a_workflow(event={"type": "Redeploy", "not_before": NOW + timedelta(days=1)})
    facts = some_facts(workflows=(freeze, later, a_workflow()), policy=policy)
    assert one_of(facts).deadline == a_workflow().event.not_before
    metrics = Metrics(tuple)
    metrics.set_attention(attention(facts))
    assert 'attention_deadline_timestamp_seconds{kind="policy_rejected"}' in metrics.expose().decode()


def test_another_state_directory_at_the_next_start_needs_an_operator_only_before_a_restart_of_the_vm() -> None:
    policy = replace(POLICY, needs_restart=("agent.listen", "agent.state_dir"))
    assert attention(some_facts(policy=policy)) == ()
    assert attention(of_event(a_workflow(event={"type": "Freeze"}), policy=policy)) == ()
    assert attention(of_event(a_workflow(), policy=replace(POLICY, needs_restart=("agent.listen",)))) == ()
    found = one_of(of_event(a_workflow(), policy=policy))
    assert (found.kind, found.severity) == ("restart_unsafe", "act")
    assert "another agent.state_dir" in found.message
    assert attention(of_event(a_workflow(), policy=policy, mode="observe")) == ()


def test_a_good_policy_file_that_is_not_loaded_rings_nothing() -> None:
    assert attention(some_facts(policy=replace(POLICY, changed_at=NOW))) == ()
