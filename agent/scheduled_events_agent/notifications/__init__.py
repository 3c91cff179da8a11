"""Notifications: their content, their formats, and their delivery to a service.

Owns the stored value of a notification, the bodies that services want, and one exchange with a service. Stores
nothing, retries nothing and starts no thread. Invariant: no URL, header or key of a target is in an error.

    notification.py  what has happened to an event, and which targets want to hear of it
    formats.py       CloudEvents, Slack, Teams, PagerDuty, templates
    delivery.py      one exchange: secrets, TLS, proxy, the answer
    masking.py       the target's secrets in its answer
"""

from scheduled_events_agent.notifications.delivery import Deliver, Delivered, NotificationError, deliver, warnings
from scheduled_events_agent.notifications.formats import FormatError, render
from scheduled_events_agent.notifications.notification import (
    SAMPLE,
    Notification,
    decode_notification,
    leads_to_notification,
    matches,
    notifications_of,
)

__all__ = [
    "SAMPLE",
    "Deliver",
    "Delivered",
    "FormatError",
    "Notification",
    "NotificationError",
    "decode_notification",
    "deliver",
    "leads_to_notification",
    "matches",
    "notifications_of",
    "render",
    "warnings",
]  # fmt: skip
