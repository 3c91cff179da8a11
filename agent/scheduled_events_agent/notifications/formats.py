"""Formats of notifications: CloudEvents, Slack, Teams, PagerDuty, or a template."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from scheduled_events_agent import host
from scheduled_events_agent.imds.document import RECOMMENDATION
from scheduled_events_agent.notifications.notification import Notification
from scheduled_events_agent.policy.durations import format_rounded, format_time
from scheduled_events_agent.status.messages import notification_title

_MAX_TEMPLATE_BYTES = 64 * 1024
_PLACEHOLDER = r"\$\{([^}\n]*)\}"
_JSON = "application/json"
# Limits of PagerDuty's events: a summary, and a dedup key.
_MAX_SUMMARY = 1024
_MAX_KEY = 255
_SEVERITIES = {
    "recovery_failed": "critical", "hook_missing": "critical", "vm_unknown": "critical",
    "approval_needed": "warning", "held": "warning",
}  # fmt: skip
# Ends the key, the id of the event's appearance, once Azure has started the event. So a failed recovery calls
# again, also if what came before the start was acknowledged.
_AFTER_START = "/recovery"


class FormatError(ValueError):
    """A template cannot be used; the message names its file and line."""


def render(format_: str, notification: Notification, routing_key: str = "") -> tuple[str, bytes]:
    """Content type and body. ``routing_key`` is for PagerDuty. Raises FormatError."""
    if format_ == "cloudevents":
        return "application/cloudevents+json", msgspec.json.encode(_cloud_event(notification))
    if format_ == "pagerduty":
        return _JSON, msgspec.json.encode(_pagerduty(notification, routing_key))
    makers: dict[str, Callable[[Notification], dict[str, Any]]] = {"slack": _slack, "teams": _teams}
    if format_ in makers:
        return _JSON, msgspec.json.encode(makers[format_](notification))
    return _JSON, _from_template(Path(format_), notification)


def _data(notification: Notification) -> dict[str, Any]:
    return {
        "kind": notification.kind,
        "title": _title(notification),
        "reason": notification.reason,
        "vm": {"name": notification.vm, "id": notification.vm_id},
        "mode": notification.mode,
        "seconds_left": notification.seconds_left,
        "deadline": notification.deadline,
        "commands": notification.commands,
        "runbook": notification.runbook,
        "event": notification.event,
    }


def _title(notification: Notification) -> str:
    return notification_title(notification.kind, notification.event, notification.vm)


def _cloud_event(notification: Notification) -> dict[str, Any]:
    event: dict[str, Any] = {
        "specversion": "1.0",
        "id": notification.id,
        "source": f"/azure/vm/{notification.vm_id or 'unknown'}",
        "type": f"io.scheduled-events-agent.{notification.kind}",
        "time": notification.at,
        "datacontenttype": _JSON,
        "data": _data(notification),
    }
    return event | ({"subject": notification.event.id} if notification.event.id else {})


def _facts(notification: Notification) -> dict[str, str]:
    """The facts of a notification, besides its title, that a person needs."""
    event = notification.event
    left = notification.seconds_left
    not_before = format_time(event.not_before) if event.not_before and left is not None else ""
    time_left = ""
    if left is not None and left > 0:
        time_left = format_rounded(left)
    elif left is not None and event.type != RECOMMENDATION:
        time_left = "none: it may start at any moment"
    facts = {
        "Event": event.id,
        "VM": notification.vm,
        "Act before" if notification.deadline else "Not before": not_before,
        "Time left": time_left,
        "Rule": event.rule or "none: only observed",
        "Mode": "observe: no hook runs, and nothing is approved" if notification.mode == "observe" else "",
        "Source": event.source,
        "Description": event.description,
    }
    return {name: text for name, text in facts.items() if text}


def _slack(notification: Notification) -> dict[str, Any]:
    lines = [f"*{_title(notification)}*", *filter(None, [notification.addition])]
    lines += [f"{name}: {text}" for name, text in _facts(notification).items()]
    lines += [f"`{one.command}`: {one.effect}" for one in notification.commands]
    if notification.runbook and not notification.has_runbook_link:
        lines.append(f"Runbook: `{notification.runbook}`")
    text = "\n".join(lines)
    # Slack's control characters; without them a text from Azure cannot mention a channel.
    for character, escape in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, escape)
    return {"text": f"{text}\n<{notification.runbook}|Runbook>" if notification.has_runbook_link else text}


def _teams(notification: Notification) -> dict[str, Any]:
    facts = [{"title": name, "value": text} for name, text in _facts(notification).items()]
    facts += [{"title": one.effect, "value": one.command} for one in notification.commands]
    if notification.runbook and not notification.has_runbook_link:
        facts.append({"title": "Runbook", "value": notification.runbook})
    texts = [
        {"type": "TextBlock", "text": _title(notification), "weight": "Bolder", "size": "Medium", "wrap": True}
    ]
    if notification.addition:
        texts.append({"type": "TextBlock", "text": notification.addition, "wrap": True})
    card: dict[str, Any] = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": [*texts, {"type": "FactSet", "facts": facts}],
    }
    if notification.has_runbook_link:
        card["actions"] = [{"type": "Action.OpenUrl", "title": "Runbook", "url": notification.runbook}]
    content = {"contentType": "application/vnd.microsoft.card.adaptive", "contentUrl": None, "content": card}
    return {"type": "message", "attachments": [content]}


def _pagerduty(notification: Notification, routing_key: str) -> dict[str, Any]:
    summary = (
        f"{_title(notification)} ({notification.addition})" if notification.addition else _title(notification)
    )
    has_begun = notification.has_started and notification.kind != "started"
    suffix = _AFTER_START if has_begun else ""
    event: dict[str, Any] = {
        "routing_key": routing_key,
        "dedup_key": f"{notification.event.key[: _MAX_KEY - len(suffix)]}{suffix}",
        "event_action": "resolve" if notification.kind in ("started", "recovered") else "trigger",
        "payload": {
            "summary": summary[:_MAX_SUMMARY],
            "source": notification.vm or "unknown",
            "severity": _SEVERITIES.get(notification.kind, "info"),
            "timestamp": notification.at,
            "class": notification.event.type,
            "custom_details": _data(notification),
        },
    }
    if notification.has_runbook_link:
        event["links"] = [{"href": notification.runbook, "text": "Runbook"}]
    return event


def _from_template(path: Path, notification: Notification) -> bytes:
    try:
        template = host.read_trusted_file(path, _MAX_TEMPLATE_BYTES).decode()
    except host.HostError as error:
        raise FormatError(str(error)) from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: cannot be read: not UTF-8") from error
    fields = _fields(notification)
    for match in re.finditer(_PLACEHOLDER, template):
        if match[1] not in fields:
            line = template.count("\n", 0, match.start()) + 1
            raise FormatError(f"{path}:{line}: there is no field {match[0]}; known are: {', '.join(fields)}")
    text = re.sub(_PLACEHOLDER, lambda match: fields[match[1]], template)
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        # No value has a line break in it, so the line is that of the template.
        line = getattr(error, "lineno", 1)
        reason = getattr(error, "msg", str(error))
        raise FormatError(f"{path}:{line}: not JSON once its placeholders are filled in: {reason}") from error
    return text.encode()


def _fields(notification: Notification) -> dict[str, str]:
    """The fields that a template may name: texts as JSON has them between quotes, numbers, or null."""
    event = notification.event
    texts = {
        "id": notification.id,
        "kind": notification.kind,
        "title": _title(notification),
        "reason": notification.reason,
        "time": notification.at.isoformat(),
        "vm": notification.vm,
        "vm_id": notification.vm_id,
        "rule": event.rule or "",
        "mode": notification.mode,
        "outcome": event.outcome,
        "event_id": event.id,
        "type": event.type,
        "status": event.status,
        "source": event.source,
        "description": event.description,
        "resources": ", ".join(event.resources),
        "not_before": event.not_before.isoformat() if event.not_before else "",
        "deadline": notification.deadline.isoformat() if notification.deadline else "",
        "commands": "\n".join(one.command for one in notification.commands),
        "runbook": notification.runbook,
    }
    numbers = {"seconds_left": notification.seconds_left, "duration_seconds": event.duration_seconds}
    escaped = {name: msgspec.json.encode(text).decode()[1:-1] for name, text in texts.items()}
    return escaped | {name: msgspec.json.encode(number).decode() for name, number in numbers.items()}
