"""What has happened to an event: the value that a notice is kept as until it is delivered."""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Literal
from uuid import uuid4

import msgspec

from scheduled_events_agent.events import ScheduledEvent
from scheduled_events_agent.policy import Facts, mismatch
from scheduled_events_agent.settings.model import NoticeWord, NotifyTarget
from scheduled_events_agent.status.messages import note_in_words
from scheduled_events_agent.workflow import NoteKind, Step

_WORDS: dict[NoteKind, NoticeWord] = {
    "seen": "seen", "preparing": "preparing", "prepared": "prepared", "held": "held", "approved": "approved",
    "started": "started", "closed": "recovered", "recovery_failed": "recovery_failed",
    "approval_needed": "approval_needed", "hook_missing": "hook_missing",
}  # fmt: skip


class Happening(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that has happened to an event. Stored as it is; docs/notifications.md says what each field is."""

    id: str
    what: NoticeWord | Literal["test"]
    at: datetime
    workflow_id: str
    vm: str
    vm_id: str
    mode: Literal["act", "observe"]
    rule: str | None
    reason: str
    seconds_left: int | None
    outcome: str
    event: ScheduledEvent


def happenings(
    steps: Iterable[Step], at: datetime, *, names: tuple[str, ...], vm_id: str, mode: Literal["act", "observe"]
) -> Iterator[tuple[Step, Happening]]:
    """What the steps have to tell, in their order."""
    for step in steps:
        workflow = step.workflow
        event = step.workflow.event
        is_ahead = event.not_before is not None and not (workflow.is_over or event.is_started)
        for note in step.notes:
            if (what := _WORDS.get(note.kind)) is None:
                continue
            yield (
                step,
                Happening(
                    id=uuid4().hex,
                    what=what,
                    at=at,
                    workflow_id=workflow.id,
                    vm=next(iter(names), ""),
                    vm_id=vm_id,
                    mode=mode,
                    rule=workflow.decision.rule,
                    reason=note_in_words(workflow, note),
                    seconds_left=int((event.not_before - at).total_seconds())
                    if is_ahead and event.not_before
                    else None,
                    outcome=workflow.outcome,
                    event=event,
                ),
            )


def is_wanted(target: NotifyTarget, step: Step, happening: Happening, names: tuple[str, ...]) -> bool:
    """Whether the target is to hear of it."""
    facts = Facts(names=names, noticed_at=step.workflow.noticed_at)
    return happening.what in target.on and mismatch(target.when, happening.event, facts) is None


_AT = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
SAMPLE = Happening(
    id="00000000000000000000000000000000",
    what="test",
    at=_AT,
    workflow_id="test",
    vm="vm-1",
    vm_id="",
    mode="act",
    rule="test",
    reason='an operator sends a "test"',
    seconds_left=900,
    outcome="",
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
)
"""What ``notify test`` sends, and ``check`` renders templates with."""
