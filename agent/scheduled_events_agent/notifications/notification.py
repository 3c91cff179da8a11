"""The notification payload, stored until it is delivered, and which targets receive it."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal
from uuid import uuid4

import msgspec
from msgspec.structs import replace

from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.policy import Decision, MatchContext, why_conditions_fail, why_event_fails
from scheduled_events_agent.policy.settings import NotificationKind, NotifyTarget
from scheduled_events_agent.status import Attention, EventView, SuggestedCommand, Vm
from scheduled_events_agent.status.actions import command, with_prefix
from scheduled_events_agent.status.attention import of_events
from scheduled_events_agent.status.events import event_view
from scheduled_events_agent.status.facts import Facts
from scheduled_events_agent.status.messages import unprepared_message
from scheduled_events_agent.workflow import RecordKind, Transition, Workflow

_KINDS: dict[RecordKind, NotificationKind] = {
    "seen": "seen", "named": "seen", "preparing": "preparing", "prepared": "prepared", "held": "held",
    "approved": "approved", "started": "started", "closed": "recovered", "recovery_failed": "recovery_failed",
    "approval_needed": "approval_needed", "hook_missing": "hook_missing", "vm_unknown": "vm_unknown",
}  # fmt: skip
# These notifications say what an operator can do.
_ASKING: tuple[NotificationKind, ...] = ("approval_needed", "held", "hook_missing", "recovery_failed")
_MAX_COMMANDS = 2


class Notification(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A notification of one change of an event. Stored as it is; docs/notifications.md has the fields."""

    id: str
    kind: NotificationKind | Literal["test"]
    at: datetime
    vm: str
    vm_id: str
    mode: Literal["act", "observe"]
    reason: str
    addition: str
    """The part of the reason that is not in the title."""
    seconds_left: int | None
    deadline: datetime | None = None
    commands: tuple[SuggestedCommand, ...] = ()
    """The commands that an operator may use; empty if no action is needed."""
    runbook: str = ""
    """The runbook's section about it: its address, or its path on the VM; empty if no action is needed."""
    severity: Literal["act", "fix", ""] = ""
    """Of what is needed, as in ``attention``; empty if no action is needed."""
    has_started: bool
    """Azure has started the event, which may be over since."""
    event: EventView

    @property
    def has_runbook_link(self) -> bool:
        """Whether ``runbook`` is an address, and not a path on the VM."""
        return "://" in self.runbook


def leads_to_notification(transition: Transition) -> bool:
    """Whether the transition leads to a notification."""
    return any(record.kind in _KINDS for record in transition.records)


def notifications_of(transitions: Sequence[Transition], facts: Facts) -> Iterator[tuple[Transition, Notification]]:
    """The notifications of the transitions, in order. Their records already have their messages.

    ``facts``: those after the last transition. Each notification shows its event as it is then: between two
    transitions of a moment the state is half changed, such as approved and still waiting for an operator.
    """
    at = facts.at
    last = {transition.workflow.id: transition.workflow for transition in transitions}
    needs = {one.key: one for one in of_events(facts)}
    for transition in transitions:
        workflow = transition.workflow
        event = transition.workflow.event
        is_ahead = event.not_before is not None and not (workflow.is_over or event.is_started)
        for record in transition.records:
            if (kind := _KINDS.get(record.kind)) is None:
                continue
            need = needs.get(workflow.id) if kind in _ASKING else None
            if kind == "vm_unknown":
                need = _need_of_unknown_vm(workflow, facts)
            addition = record.text if record.addition is None else record.addition
            says_start = record.kind in ("started", "named") or (kind == "recovered" and not workflow.was_started)
            unprepared = unprepared_message(workflow) if says_start else ""
            yield (
                transition,
                Notification(
                    id=uuid4().hex,
                    kind=kind,
                    at=at,
                    vm=next(iter(facts.vm.names), ""),
                    vm_id=facts.vm.vm_id,
                    mode="act" if facts.mode == "act" else "observe",
                    reason="; ".join(filter(None, [record.text, unprepared])),
                    addition="; ".join(filter(None, [addition, unprepared])),
                    seconds_left=int((event.not_before - at).total_seconds())
                    if is_ahead and event.not_before
                    else None,
                    deadline=need.deadline if need else None,
                    severity=need.severity if need else "",
                    commands=tuple(_commands(need, facts.command_prefix)) if need else (),
                    runbook=need.runbook if need else "",
                    has_started=workflow.was_started,
                    event=event_view(last[workflow.id], facts, is_kept=True),
                ),
            )


def _need_of_unknown_vm(workflow: Workflow, facts: Facts) -> Attention | None:
    """What is needed before the event starts; None if it has started already, or will not."""
    event = workflow.event
    if facts.mode != "act" or event.status != "Scheduled" or event.is_recommendation:
        return None
    doctor = command(facts.command_options, "doctor")
    return Attention(
        kind="vm_unknown",
        severity="act",
        since=workflow.vm_unknown_since,
        message="",
        deadline=event.not_before,
        commands=(SuggestedCommand(command=doctor, effect="find the problem"),),
    )


def _commands(need: Attention, prefix: str) -> Iterator[SuggestedCommand]:
    for one in need.commands[:_MAX_COMMANDS]:
        yield replace(one, command=with_prefix(one.command, prefix))


def matches(
    target: NotifyTarget, transition: Transition, notification: Notification, names: tuple[str, ...]
) -> bool:
    """Whether the target receives this notification."""
    if target.format == "pagerduty":
        if notification.kind in ("started", "recovered"):
            # These end incidents. The event may have changed since an incident began, or the policy. PagerDuty
            # ignores one about an incident that was never opened.
            return True
        if notification.kind in ("held", "vm_unknown") and not notification.severity:
            return False  # a rule or an operator wants it so, or there is nothing to do before a start
    workflow = transition.workflow
    facts = MatchContext(names=names, not_before_seen_at=workflow.not_before_seen_at)
    if notification.kind == "vm_unknown":
        # It may be this VM's: of the conditions only those about the event itself count.
        failed = why_event_fails(target.when, workflow.event, facts)
    else:
        failed = why_conditions_fail(target.when, workflow.event, facts)
    return notification.kind in target.kinds and failed is None


_AT = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
SAMPLE = Notification(
    id="00000000000000000000000000000000",
    kind="test",
    at=_AT,
    vm="vm-1",
    vm_id="",
    mode="act",
    reason='an operator sends a "test"',
    addition='an operator sends a "test"',
    seconds_left=900,
    has_started=False,
    event=event_view(
        Workflow(
            id="test",
            event=ScheduledEvent(
                id="A123BC45-1234-5678-AB90-ABCDEF123456",
                type="Freeze",
                status="Scheduled",
                source="Platform",
                resources=("vm-1",),
                not_before=_AT + timedelta(minutes=15),
                duration_seconds=5.0,
                description="A test, no event.",
            ),
            decision=Decision(rule="test", reason="a test", affects="self"),
            first_seen_at=_AT,
            not_before_seen_at=_AT,
            boot_id="",
        ),
        Facts(at=_AT, vm=Vm(names=("vm-1",), vm_id="")),
    ),
)
"""The notification that ``notify test`` sends, and with which ``check`` renders templates."""

# Made here, not at first use: two threads that describe a type to msgspec at the same moment crash the process.
_DECODER = msgspec.json.Decoder(Notification)


def decode_notification(body: str | bytes) -> Notification:
    """Decode a notification that the outbox has stored. For any thread. Raises msgspec.MsgspecError."""
    return _DECODER.decode(body)
