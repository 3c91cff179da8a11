"""Notifications: what is told of an event, in which words and form, and how it gets to a service.

Owns the value that a notice is kept as, the bodies that services want, and one exchange with a service. Keeps
nothing, retries nothing and starts no thread. The one invariant: no URL, header or key of a target is in an error.

    notification.py  what has happened to an event, and which targets want to hear of it
    formats.py       CloudEvents, Slack, Teams, PagerDuty, templates
    delivery.py      one exchange: secrets, TLS, proxy, the answer
"""

from scheduled_events_agent.notifications.delivery import Delivered, NoticeError, deliver, doubts
from scheduled_events_agent.notifications.formats import BodyError, render
from scheduled_events_agent.notifications.notification import (
    SAMPLE,
    Happening,
    decode_happening,
    happenings,
    has_news,
    is_wanted,
)

__all__ = [
    "SAMPLE", "BodyError", "Delivered", "Happening", "NoticeError",
    "decode_happening", "deliver", "doubts", "happenings", "has_news", "is_wanted", "render",
]  # fmt: skip
