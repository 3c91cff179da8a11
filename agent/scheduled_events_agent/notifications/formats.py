"""Formats of notifications: CloudEvents, Slack, Teams, PagerDuty, or a template."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from scheduled_events_agent import host
from scheduled_events_agent.imds.document import to_azure_json
from scheduled_events_agent.notifications.notification import Happening
from scheduled_events_agent.status.messages import notice_title, utc

_MAX_TEMPLATE_BYTES = 64 * 1024
_PLACEHOLDER = re.compile(r"\$\{([^}\n]*)\}")
_JSON = "application/json"
# Limits of PagerDuty's events: a summary, and a dedup key.
_MAX_SUMMARY = 1024
_MAX_KEY = 255
_SEVERITIES = {
    "recovery_failed": "critical", "hook_missing": "critical", "approval_needed": "warning", "held": "warning",
}  # fmt: skip
# A failed recovery calls again, also if what came before the start was acknowledged.
_AFTER_START = "/recovery"


class BodyError(ValueError):
    """A template cannot be used; the message names its file and line."""


def render(body: str, happening: Happening, routing_key: str = "") -> tuple[str, bytes]:
    """Content type and body. ``routing_key`` is for PagerDuty. Raises BodyError."""
    if body == "cloudevents":
        return "application/cloudevents+json", msgspec.json.encode(_cloud_event(happening))
    if body == "pagerduty":
        return _JSON, msgspec.json.encode(_pagerduty(happening, routing_key))
    makers: dict[str, Callable[[Happening], dict[str, Any]]] = {"slack": _slack, "teams": _teams}
    if body in makers:
        return _JSON, msgspec.json.encode(makers[body](happening))
    return _JSON, _from_template(Path(body), happening)


def _data(happening: Happening) -> dict[str, Any]:
    return {
        "what": happening.what,
        "title": _title(happening),
        "reason": happening.reason,
        "vm": {"name": happening.vm, "id": happening.vm_id},
        "rule": happening.rule,
        "mode": happening.mode,
        "seconds_left": happening.seconds_left,
        "deadline": happening.deadline,
        "commands": happening.commands,
        "outcome": happening.outcome,
        "event": msgspec.Raw(to_azure_json(happening.event)),
    }


def _title(happening: Happening) -> str:
    return notice_title(happening.what, happening.event, happening.vm, happening.outcome, happening.at)


def _cloud_event(happening: Happening) -> dict[str, Any]:
    event: dict[str, Any] = {
        "specversion": "1.0",
        "id": happening.id,
        "source": f"/azure/vm/{happening.vm_id or 'unknown'}",
        "type": f"io.scheduled-events-agent.{happening.what}",
        "time": happening.at,
        "datacontenttype": _JSON,
        "data": _data(happening),
    }
    return event | ({"subject": happening.event.id} if happening.event.id else {})


def _facts(happening: Happening) -> dict[str, str]:
    """The facts of a notification, besides its title, that a person needs."""
    event = happening.event
    left = happening.seconds_left
    not_before = utc(event.not_before) if event.not_before and left is not None else ""
    facts = {
        "Event": event.id,
        "VM": happening.vm,
        "Act before" if happening.deadline else "Not before": not_before,
        "Time left": f"{left} s" if left is not None else "",
        "Rule": happening.rule or "none: only observed",
        "Source": event.source,
        "Description": event.description,
    }
    return {name: text for name, text in facts.items() if text}


def _slack(happening: Happening) -> dict[str, Any]:
    lines = [f"*{_title(happening)}*", *filter(None, [happening.addition])]
    lines += [f"{name}: {text}" for name, text in _facts(happening).items()]
    lines += [f"`{one.command}`: {one.effect}" for one in happening.commands]
    text = "\n".join(lines)
    # Slack's control characters; without them a text from Azure cannot mention a channel.
    for character, escape in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, escape)
    return {"text": text}


def _teams(happening: Happening) -> dict[str, Any]:
    facts = [{"title": name, "value": text} for name, text in _facts(happening).items()]
    facts += [{"title": one.effect, "value": one.command} for one in happening.commands]
    texts = [{"type": "TextBlock", "text": _title(happening), "weight": "Bolder", "size": "Medium", "wrap": True}]
    if happening.addition:
        texts.append({"type": "TextBlock", "text": happening.addition, "wrap": True})
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": [*texts, {"type": "FactSet", "facts": facts}],
    }
    content = {"contentType": "application/vnd.microsoft.card.adaptive", "contentUrl": None, "content": card}
    return {"type": "message", "attachments": [content]}


def _pagerduty(happening: Happening, routing_key: str) -> dict[str, Any]:
    summary = f"{_title(happening)} ({happening.addition})" if happening.addition else _title(happening)
    has_begun = happening.has_started and happening.what != "started"
    suffix = _AFTER_START if has_begun else ""
    event: dict[str, Any] = {
        "routing_key": routing_key,
        "dedup_key": f"{happening.workflow_id[: _MAX_KEY - len(suffix)]}{suffix}",
        "event_action": "resolve" if happening.what in ("started", "recovered") else "trigger",
        "payload": {
            "summary": summary[:_MAX_SUMMARY],
            "source": happening.vm or "unknown",
            "severity": _SEVERITIES.get(happening.what, "info"),
            "timestamp": happening.at,
            "class": happening.event.type,
            "custom_details": _data(happening),
        },
    }
    return event


def _from_template(path: Path, happening: Happening) -> bytes:
    try:
        template = host.read_trusted_file(path, _MAX_TEMPLATE_BYTES).decode()
    except host.HostError as error:
        raise BodyError(str(error)) from error
    except UnicodeDecodeError as error:
        raise BodyError(f"{path}: cannot be read: not UTF-8") from error
    fields = _fields(happening)
    for match in _PLACEHOLDER.finditer(template):
        if match[1] not in fields:
            line = template.count("\n", 0, match.start()) + 1
            raise BodyError(f"{path}:{line}: there is no field {match[0]}; known are: {', '.join(fields)}")
    text = _PLACEHOLDER.sub(lambda match: fields[match[1]], template)
    try:
        json.loads(text)
    except ValueError as error:
        # No value has a line break in it, so the line is that of the template.
        line = getattr(error, "lineno", 1)
        reason = getattr(error, "msg", str(error))
        raise BodyError(f"{path}:{line}: not JSON once its placeholders are filled in: {reason}") from error
    return text.encode()


def _fields(happening: Happening) -> dict[str, str]:
    """The fields that a template may name: texts as JSON has them between quotes, numbers, or null."""
    event = happening.event
    texts = {
        "id": happening.id,
        "what": happening.what,
        "title": _title(happening),
        "reason": happening.reason,
        "time": happening.at.isoformat(),
        "vm": happening.vm,
        "vm_id": happening.vm_id,
        "rule": happening.rule or "",
        "mode": happening.mode,
        "outcome": happening.outcome,
        "event_id": event.id,
        "type": event.type,
        "status": event.status,
        "source": event.source,
        "description": event.description,
        "resources": ", ".join(event.resources),
        "not_before": event.not_before.isoformat() if event.not_before else "",
        "deadline": happening.deadline.isoformat() if happening.deadline else "",
        "commands": "\n".join(one.command for one in happening.commands),
    }
    numbers = {"seconds_left": happening.seconds_left, "duration_seconds": event.duration_seconds}
    escaped = {name: msgspec.json.encode(text).decode()[1:-1] for name, text in texts.items()}
    return escaped | {name: msgspec.json.encode(number).decode() for name, number in numbers.items()}
