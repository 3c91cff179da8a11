"""Notifications as events about the node, which ``kubectl describe node`` shows: a format of notifications.

Source: kubernetes.io/docs/reference/kubernetes-api/cluster-resources/event-v1, and recorded answers of an API
server 1.36. Events about a node are in the namespace default; the API server rejects them elsewhere.
"""

import time
from hashlib import sha256
from typing import Any, Literal

import msgspec

from scheduled_events_agent import AgentError
from scheduled_events_agent.http.errors import HttpErrorKind
from scheduled_events_agent.kubernetes.client import ApiError
from scheduled_events_agent.kubernetes.node_status import NodeStatus
from scheduled_events_agent.kubernetes.own_node import find_own_node
from scheduled_events_agent.notifications import Delivered, Notification, NotificationError
from scheduled_events_agent.policy.durations import format_time
from scheduled_events_agent.policy.settings import KubernetesSettings, NotificationKind, NotifyTarget
from scheduled_events_agent.status.actions import SHORT_ID
from scheduled_events_agent.status.messages import notification_title

COMPONENT = "scheduled-events-agent"
PATH = "/api/v1/namespaces/default/events"
_UID_SECONDS = 600.0  # a node that was registered anew has another uid
_MAX_MESSAGE = 1024
_MAX_NODE = 200  # characters of a node's name; a name has 253 at most
_HASH_DIGITS = 20

_REASONS: dict[NotificationKind | Literal["test"], str] = {
    "seen": "ScheduledEventSeen",
    "preparing": "ScheduledEventPreparing",
    "prepared": "ScheduledEventPrepared",
    "approved": "ScheduledEventApproved",
    "started": "ScheduledEventStarted",
    "recovered": "ScheduledEventRecovered",
    "approval_needed": "ScheduledEventApprovalNeeded",
    "held": "ScheduledEventHeld",
    "hook_missing": "ScheduledEventHookMissing",
    "recovery_failed": "ScheduledEventRecoveryFailed",
    "vm_unknown": "ScheduledEventVmUnknown",
    "test": "AgentTest",
}
"""Reason of an event, by the kind of the notification."""
_KIND_OF_ERROR: dict[str, HttpErrorKind] = {
    "unavailable": "unreachable",
    "unauthorized": "denied",
    "forbidden": "denied",
    "not_found": "not_found",
    "conflict": "unexpected_status",
    "rejected": "rejected",
}
_KIND_OF_STATUS: dict[int, HttpErrorKind] = {401: "denied", 429: "throttled", 500: "server_error"}


class _Event(msgspec.Struct):
    kind: Literal["Event"]


_EVENT = msgspec.json.Decoder(_Event)


class EventSender:
    """Posts notifications as events about one node. For one thread."""

    def __init__(self, settings: KubernetesSettings | None) -> None:
        """``settings``: those of the policy; None: account and node are found as by default."""
        self._settings = settings or KubernetesSettings()
        self._node: NodeStatus | None = None
        self._uid = ""
        self._uid_until = 0.0

    def deliver(self, target: NotifyTarget, notification: Notification) -> Delivered:
        """Post a notification once; one that is there already counts as delivered. Raises NotificationError."""
        end_at = time.monotonic() + target.timeout
        try:
            node = self._find_node(end_at)
            event = event_of(notification, node.name, self._uid)
            node.client.send("POST", PATH, _EVENT, body=event, seconds=end_at - time.monotonic())
        except ApiError as error:
            if error.status == 409:
                return Delivered(status=409, answer="")
            self._node = None
            raise _error_of(error) from None
        except AgentError as error:
            self._node = None
            raise NotificationError(str(error), kind="setup") from None
        return Delivered(status=201, answer="")

    def _find_node(self, end_at: float) -> NodeStatus:
        """The node, with its uid: without it no one finds the event."""
        if self._node is None or time.monotonic() >= self._uid_until:
            self._node = find_own_node(self._settings)
            self._uid = self._node.read(end_at - time.monotonic()).uid
            self._uid_until = time.monotonic() + _UID_SECONDS
        return self._node


def event_of(notification: Notification, node: str, uid: str) -> dict[str, Any]:
    """The event as it is posted. A second one about the same has the same name, so there is none."""
    at = notification.at.replace(microsecond=0)
    same = f"{notification.event.id}/{notification.kind}/{notification.at.isoformat()}"
    return {
        "metadata": {
            "name": f"{node[:_MAX_NODE].rstrip('.-')}.{sha256(same.encode()).hexdigest()[:_HASH_DIGITS]}",
            "namespace": "default",
        },
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid},
        "reason": _REASONS[notification.kind],
        "message": _message(notification),
        "type": "Warning" if notification.severity == "act" else "Normal",
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }


def _message(notification: Notification) -> str:
    event = notification.event
    title = notification_title(notification.kind, event, notification.vm)
    start = ""
    if event.not_before is not None and notification.seconds_left is not None:
        not_before = format_time(event.not_before)
        is_said = not_before in f"{title}{notification.addition}"
        start = "" if is_said else f", not before {not_before}"
    named = f"{title} (event {event.id[:SHORT_ID]}{start})"
    return ": ".join(filter(None, [named, notification.addition]))[:_MAX_MESSAGE]


def _error_of(error: ApiError) -> NotificationError:
    kind = _KIND_OF_ERROR[error.kind]
    if error.kind == "unavailable" and error.status is not None:
        kind = _KIND_OF_STATUS.get(error.status, "server_error")
    elif error.failure is not None:
        kind = error.failure
    return NotificationError(str(error), kind=kind, status=error.status, retry_after=error.retry_after)
