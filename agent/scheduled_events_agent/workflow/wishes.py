"""What this VM wants of its fleet for each event; told to the fleet's table after each turn."""

from datetime import datetime
from typing import Literal

import msgspec

from scheduled_events_agent.events import plain_name
from scheduled_events_agent.workflow.approving import OWN_GATES, ask_gates
from scheduled_events_agent.workflow.fleet import expected, fleet_key, needs_all, needs_slot, own_name
from scheduled_events_agent.workflow.model import Board, Context, Workflow
from scheduled_events_agent.workflow.phases import has_more_to_prepare, may_begin
from scheduled_events_agent.workflow.times import start_of

WishStage = Literal["idle", "begin", "busy", "ready", "gone", "away"]


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """One event, and where this VM stands with it.

    ``stage``: idle, nothing is begun, and its time has not come; begin, it would begin now; busy, this VM is not
    ready for its start; ready; gone, it is no longer in the document, and has not started; away, it is approved,
    under way or being recovered from.
    """

    event: str
    """The fleet key; see ``fleet_key``."""
    workflow: str
    """This appearance of the event."""
    event_id: str
    resources: tuple[str, ...]
    not_before: datetime | None
    own: str
    """Plain name of this VM."""
    expected: tuple[str, ...]
    """Plain names of the VMs whose readiness counts, this one included."""
    needs_slot: bool
    needs_all: bool
    stage: WishStage


def wishes(board: Board, context: Context) -> tuple[Wish, ...]:
    """One for each event that concerns the fleet. An event that has ended is no longer among them."""
    found: dict[str, Wish] = {}
    for workflow in board.values():
        wish = _wish(workflow, context)
        # An event may come back under its id while its first appearance is still recovered from.
        if wish is not None and not (wish.stage == "idle" and wish.event in found):
            found[wish.event] = wish
    return tuple(found.values())


def _wish(workflow: Workflow, context: Context) -> Wish | None:
    fleet = context.fleet
    own = own_name(workflow, context)
    if fleet is None:
        return None
    wants_slot = needs_slot(workflow, fleet)
    wants_all = needs_all(workflow)
    if not own and workflow.prepare.state != "idle" and context.names:
        # The event names it no longer. It is still prepared, so its slot is not free.
        own = plain_name(context.names[0])
        wants_slot = fleet.max_events is not None
    if not own or not (wants_slot or wants_all):
        return None
    return Wish(
        event=fleet_key(workflow),
        workflow=workflow.id,
        event_id=workflow.event.id,
        resources=workflow.event.resources,
        not_before=workflow.event.not_before,
        own=own,
        expected=tuple(expected(workflow, context)),
        needs_slot=wants_slot,
        needs_all=wants_all,
        stage=_stage(workflow, context),
    )


def _stage(workflow: Workflow, context: Context) -> WishStage:
    has_started = workflow.was_started or workflow.event.is_started
    if workflow.is_over and not has_started and workflow.begun_at is not None:
        return "gone"
    if has_started and workflow.event.type in ("Terminate", "Preempt") and workflow.decision.affects == "self":
        return "idle"  # this VM does not live to give its slot back
    is_past = workflow.is_over or has_started
    if is_past or workflow.approval.state == "confirmed" or workflow.phase == "approved":
        return "away" if workflow.begun_at is not None else "idle"
    if may_begin(workflow):
        may_act = context.is_acting and workflow.operator != "held"
        is_due = workflow.operator == "approved" or start_of(workflow, context).at <= context.now
        return "begin" if may_act and is_due else "idle"
    is_prepared = workflow.phase in ("prepared", "held") and not has_more_to_prepare(workflow)
    return "ready" if is_prepared and ask_gates(workflow, context, OWN_GATES).answer == "yes" else "busy"
