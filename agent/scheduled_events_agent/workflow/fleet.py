"""The rules of a fleet: what this VM requests of it, and which gates wait for its answer."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from math import inf
from typing import Literal

import msgspec
from msgspec.structs import replace

from scheduled_events_agent.imds.document import normalized_name, normalized_names
from scheduled_events_agent.policy import matches_glob
from scheduled_events_agent.workflow.gates import (
    ALLOW,
    LOCAL_APPROVAL_GATES,
    GateResult,
    evaluate_gates,
    stale_gate,
)
from scheduled_events_agent.workflow.model import Context, FleetEventStatus, WaitReason, Workflow, Workflows
from scheduled_events_agent.workflow.stages import can_start, needs_more_preparation
from scheduled_events_agent.workflow.timing import needed_seconds, start_of

FleetStage = Literal["not_ready", "ready", "requested"]
Exemption = Literal["", "urgent", "operator", "late", "unavailable"]
"""Why an event begins without a slot; "" if it waits for one."""

# Azure starts the event anyway: from then on it is prepared for without a slot, also if its hooks need less.
_MIN_LATEST_BEGIN_SECONDS = 300.0
# The store counts as unavailable from then on: a lost answer is not yet an outage.
_UNAVAILABLE_SECONDS = 60.0
_URGENT_TYPES = ("Preempt", "Terminate")
_MAX_NAMED = 3
_SHORT_ID = 8


class FleetRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request of this VM to its fleet about one event.

    ``stage``: requested, the VM wants to begin; not_ready, it has begun and has not recovered; ready, it is
    prepared, and only the fleet's gate still keeps the event from being approved.
    """

    event: str
    """The fleet key; see ``fleet_key``."""
    workflow_id: str
    """This appearance of the event."""
    event_id: str
    not_before: datetime | None
    vm: str
    """Plain name of this VM."""
    stage: FleetStage
    needs_slot: bool
    """It waits for a slot: to begin, or to be approved if it began without one."""
    lacks_slot: bool
    """It began without a slot, because it could wait no longer, and has none yet."""
    needs_all: bool
    requested_vms: tuple[str, ...]
    """Plain names of the VMs that must be ready, this one included."""
    seen_at: float
    """When this process first saw this appearance of the event, monotonic."""


def fleet_requests(
    workflows: Workflows, context: Context, seen_at: Mapping[str, float]
) -> tuple[FleetRequest, ...]:
    """Given all workflows, return a request for each event that wants to begin, or is not recovered from.

    Events that do not concern the fleet have none. ``seen_at``: when this process first saw each workflow.
    """
    found: dict[str, tuple[int, FleetRequest]] = {}
    for workflow in workflows.values():
        request = _request(workflow, context, seen_at)
        if request is None:
            continue
        rank = _rank(workflow, request)
        if request.event not in found or rank < found[request.event][0]:
            found[request.event] = rank, request
    return tuple(request for _, request in found.values())


def _rank(workflow: Workflow, request: FleetRequest) -> int:
    """Given a workflow and its request, return its place among the appearances of its event; the lowest is sent.

    An event may come back while its first appearance is still recovered from. Once it is prepared for again, that
    recovery waits for it.
    """
    if request.stage == "requested":
        return 2
    return 1 if workflow.is_over else 0


def _request(workflow: Workflow, context: Context, seen_at: Mapping[str, float]) -> FleetRequest | None:
    """Given a workflow, return its request to the fleet; None if it has none."""
    own = own_name(workflow, context)
    if not own and workflow.prepare.state != "idle" and context.names:
        own = normalized_name(context.names[0])  # the event no longer names this VM, which is still prepared
    if not own or not (counts_for_slots(workflow, context) or needs_all(workflow)):
        return None
    stage = _stage(workflow, context)
    if stage is None:
        return None
    return FleetRequest(
        event=fleet_key(workflow),
        workflow_id=workflow.id,
        event_id=workflow.event.id,
        not_before=workflow.event.not_before,
        vm=own,
        stage=stage,
        needs_slot=needs_slot(workflow, context) if stage == "requested" else _asks_for_slot(workflow, context),
        lacks_slot=stage != "requested" and lacks_slot(workflow, context),
        needs_all=needs_all(workflow),
        requested_vms=tuple(dict.fromkeys([own, *requested_vms(workflow, context)])),
        seen_at=seen_at.get(workflow.id, inf),
    )


def _stage(workflow: Workflow, context: Context) -> FleetStage | None:
    """Given a workflow, return its stage for the fleet; None if it has not begun and does not want to now."""
    event = workflow.event
    has_started = workflow.was_started or event.is_started
    if has_started and event.type in _URGENT_TYPES and workflow.decision.affects in ("self", "shared"):
        return None  # this VM will be gone, and could not withdraw the request
    is_approved = workflow.approval.state == "confirmed" or workflow.phase == "approved"
    is_past = workflow.is_over or has_started or is_approved
    if not is_past and can_start(workflow):
        may_act = context.is_acting and workflow.operator_action != "hold"
        is_due = workflow.operator_action == "approve" or start_of(workflow, context).at <= context.now
        return "requested" if may_act and is_due else None
    if workflow.handling_since is None:
        return None
    is_prepared = workflow.phase in ("prepared", "held") and not needs_more_preparation(workflow)
    if is_past or not is_prepared or not needs_all(workflow):
        return "not_ready"
    return "ready" if _is_approvable_alone(workflow, context) else "not_ready"


def _is_approvable_alone(workflow: Workflow, context: Context) -> bool:
    """Given a workflow, return whether only the fleet's gates may still keep it from being approved."""
    return evaluate_gates(workflow, context, (*LOCAL_APPROVAL_GATES, stale_gate)).verdict == "allow"


def workflow_id(key: str, first_seen_at: datetime) -> str:
    """Given an event's key and when it was first seen, return an id that only this appearance of the event has."""
    return f"{key}@{first_seen_at:%Y%m%dT%H%M%S.%fZ}"


def fleet_key(workflow: Workflow) -> str:
    """Given a workflow, return the key by which all VMs know its event: the one under which it was first seen."""
    return workflow.id.rpartition("@")[0]


def own_name(workflow: Workflow, context: Context) -> str:
    """Given a workflow, return the plain name by which its event names this VM; "" if it does not name it."""
    mine = normalized_names(context.names)
    return next((name for name in map(normalized_name, workflow.event.resources) if name in mine), "")


# --- Which VMs are waited for


def requested_vms(workflow: Workflow, context: Context) -> list[str]:
    """Given a workflow, return the plain names of the VMs whose readiness counts, in the order of Resources."""
    members = context.fleet.members if context.fleet else ("*",)
    mine = normalized_names(context.names)
    own = own_name(workflow, context)
    resources = [name for name in workflow.event.resources if normalized_name(name)]
    counted = [name for name in resources if matches_glob(name, members) or normalized_name(name) in mine]
    return list(dict.fromkeys(own if normalized_name(name) in mine else normalized_name(name) for name in counted))


def not_ready_others(workflow: Workflow, context: Context) -> list[str]:
    """Given a workflow, return the plain names of the other VMs that are not known to be ready now."""
    own = own_name(workflow, context)
    names = (*_status(workflow, context).not_ready, *_unasked(workflow, context))
    return [name for name in dict.fromkeys(names) if name != own]


def _unasked(workflow: Workflow, context: Context) -> list[str]:
    """Given a workflow, return the VMs to wait for that the fleet's status lacks: newly named ones."""
    asked = _status(workflow, context).requested_vms
    return [name for name in requested_vms(workflow, context) if name not in asked]


# --- A slot


def counts_for_slots(workflow: Workflow, context: Context) -> bool:
    """Given a workflow, return whether its event is one of those that ``max_events`` limits."""
    fleet = context.fleet
    decision = workflow.decision
    if fleet is None or fleet.max_events is None or workflow.event.is_recommendation:
        return False
    return workflow.prepare.state != "idle" or (
        decision.affects in ("self", "shared") and decision.has_preparation
    )


def needs_slot(workflow: Workflow, context: Context) -> bool:
    """Given a workflow, return whether its event must not begin without a slot."""
    return counts_for_slots(workflow, context) and not slot_exemption(workflow, context)


def lacks_slot(workflow: Workflow, context: Context) -> bool:
    """Given a workflow, return whether its event began late, without a slot, and slots still count."""
    return workflow.lacks_slot and counts_for_slots(workflow, context)


def needs_slot_to_approve(workflow: Workflow, context: Context) -> bool:
    """Given a workflow, return whether its event must not be approved without a slot."""
    return lacks_slot(workflow, context) and not _slot_exemption_at_any_time(workflow, context)


def _asks_for_slot(workflow: Workflow, context: Context) -> bool:
    """Given a workflow that has begun, return whether its event asks for a slot now.

    Until its other gates allow the approval, it asks for none: what has a slot must not wait for anything else.
    """
    return needs_slot_to_approve(workflow, context) and _is_approvable_alone(workflow, context)


def has_slot(workflow: Workflow, context: Context) -> bool:
    """Given a workflow, return whether its event has a slot, as far as the fleet has answered."""
    return _status(workflow, context).has_slot


def slot_exemption(workflow: Workflow, context: Context) -> Exemption:
    """Given a workflow, return why its event begins without a slot; "" if it waits for one."""
    exemption = _slot_exemption_at_any_time(workflow, context)
    latest = latest_begin(workflow, context)
    is_late = latest is not None and latest <= context.now
    return "late" if is_late and exemption in ("", "unavailable") else exemption


def _slot_exemption_at_any_time(workflow: Workflow, context: Context) -> Exemption:
    """Given a workflow, return why its event needs no slot, to begin or to be approved; "" if it needs one."""
    event = workflow.event
    if workflow.operator_action == "approve":
        return "operator"
    if event.type in _URGENT_TYPES or event.starts_at is None or workflow.approval.state == "confirmed":
        return "urgent"
    alone_at = begins_alone_at(context)
    return "unavailable" if alone_at is not None and alone_at <= context.now else ""


def exemption_message(exemption: Exemption, context: Context) -> str:
    """Given an exemption, return the reason for it as a clause; "" if there is none."""
    error = context.fleet.error if context.fleet else ""
    return {
        "": "",
        "urgent": "it may start at any moment",
        "operator": "an operator has approved it",
        "late": "it can wait no longer",
        "unavailable": f"the store cannot be used ({error})",
    }[exemption]


def latest_begin(workflow: Workflow, context: Context) -> datetime | None:
    """Given a workflow, return until when its event waits for a slot; None if it does not wait."""
    starts_at = workflow.event.starts_at
    if starts_at is None:
        return None
    seconds = max(_MIN_LATEST_BEGIN_SECONDS, needed_seconds(workflow.decision, context))
    if (starts_at - context.now).total_seconds() <= seconds:
        return context.now  # a NotBefore may be the first moment of a datetime
    return starts_at - timedelta(seconds=seconds)


def begins_alone_at(context: Context) -> datetime | None:
    """Given a context, return from when on events begin without a slot because the store is unavailable.

    None if the store is available, or if events wait for it.
    """
    fleet = context.fleet
    return None if fleet is None or fleet.on_unavailable == "wait" else unavailable_at(context)


def unavailable_at(context: Context) -> datetime | None:
    """Given a context, return from when on the store counts as unavailable; None if it can be used."""
    fleet = context.fleet
    if fleet is None or fleet.unavailable_seconds is None:
        return None
    return context.now + timedelta(seconds=_UNAVAILABLE_SECONDS - fleet.unavailable_seconds)


def slot_gate(workflow: Workflow, context: Context) -> GateResult:
    """Given a workflow, return whether its event may begin as far as slots go.

    A slot belongs to the event, not to a VM: else the VMs of one event would wait for each other.
    """
    if not needs_slot(workflow, context) or has_slot(workflow, context):
        return ALLOW
    latest = latest_begin(workflow, context)
    begins_at = min(at for at in (latest, begins_alone_at(context)) if at is not None)
    why = _why_no_slot(workflow, context)
    return GateResult(
        "wait", WaitReason(kind="slot", at=begins_at, detail=why) if why else WaitReason(kind="fleet")
    )


def approval_slot_gate(workflow: Workflow, context: Context) -> GateResult:
    """Given a workflow, return whether its event may be approved as far as slots go.

    What began late is out of service without a slot. Approved at once, it would be so while others are.
    """
    if not needs_slot_to_approve(workflow, context) or has_slot(workflow, context):
        return ALLOW
    why = _why_no_slot(workflow, context)
    starts_at = workflow.event.starts_at
    return GateResult(
        "wait",
        WaitReason(kind="approval_slot", at=starts_at, detail=why) if why else WaitReason(kind="fleet"),
    )


def _why_no_slot(workflow: Workflow, context: Context) -> str:
    """Given a workflow, return why its event has no slot as a clause; "" if the fleet has not answered yet."""
    fleet = context.fleet
    status = _status(workflow, context)
    if status.other_vm_id:
        return f"another VM, with vmId {status.other_vm_id}, uses the name of this one"
    if fleet is not None and fleet.error:
        return f"the store cannot be used ({fleet.error})"
    if fleet is not None and not status.workflow_id and fleet_key(workflow) in fleet.statuses:
        return "its first appearance is not recovered from"
    return f"{ordinal(status.position)} in line{_behind(status.ahead)}" if status.position else ""


def _behind(events: tuple[str, ...]) -> str:
    """Given the ids of the events ahead in the line, return the end of a clause that names them."""
    if not events:
        return ""
    what = "event" if len(events) == 1 else "events"
    return f", behind {what} {some_of([event[:_SHORT_ID] for event in events])}"


def ordinal(number: int) -> str:
    """Given a number, return it as an ordinal, such as 1st or 12th."""
    is_teen = number % 100 in (11, 12, 13)
    ending = "th" if is_teen else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


# --- All ready


def needs_all(workflow: Workflow) -> bool:
    """Given a workflow, return whether every VM that its event names must be ready before it is approved."""
    return workflow.decision.shared == "all-ready" and workflow.decision.affects == "shared"


def fleet_gate(workflow: Workflow, context: Context) -> GateResult:
    """Given a workflow, return whether its event may be approved as far as other VMs go.

    With ``shared: all-ready`` every VM that the event names must be ready, or an operator must approve it.
    """
    status = _status(workflow, context)
    is_all_ready = status.is_all_ready and not _unasked(workflow, context)
    if workflow.operator_action == "approve" or not needs_all(workflow) or is_all_ready:
        return ALLOW
    return GateResult("wait", _why_not_all_ready(workflow, context))


def why_only_operator(workflow: Workflow, context: Context) -> str:
    """Given a workflow, return why only an operator can have it approved, as a clause; "" if the fleet may.

    So it is if nothing but the fleet's gate is in the way, and the store cannot be used to ask the fleet.
    """
    since = unavailable_at(context)
    if context.fleet is None or since is None or since > context.now:
        return ""
    present = replace(workflow, missing_since=None)  # one answer that lacks the event does not end the need
    if fleet_gate(workflow, context).verdict == "allow":
        return ""
    is_ready = evaluate_gates(present, context, LOCAL_APPROVAL_GATES).verdict == "allow"
    return f"the fleet's store cannot be used ({context.fleet.error})" if is_ready else ""


def _why_not_all_ready(workflow: Workflow, context: Context) -> WaitReason:
    """Given a workflow that waits for other VMs, return the reason."""
    status = _status(workflow, context)
    if status.other_vm_id:
        return WaitReason(kind="same_name", detail=status.other_vm_id)
    error = context.fleet.error if context.fleet else ""
    others = not_ready_others(workflow, context)
    is_unanswered = context.fleet is not None and not (status.workflow_id or error)
    if is_unanswered or not others:
        return WaitReason(kind="fleet")
    unavailable = f"; the store cannot be used ({error})" if error else ""
    return WaitReason(kind="all_ready", detail=f"{some_of(others)} to be ready{unavailable}")


def some_of(names: list[str]) -> str:
    """Given names, return the first three as text, and how many more there are."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{', '.join(names[:_MAX_NAMED])}{more}"


def _status(workflow: Workflow, context: Context) -> FleetEventStatus:
    """Given a workflow, return the fleet's status of its event.

    A status of another appearance of the event does not count: then nothing is known.
    """
    statuses = context.fleet.statuses if context.fleet else {}
    status = statuses.get(fleet_key(workflow), FleetEventStatus())
    return status if status.workflow_id == workflow.id else FleetEventStatus()
