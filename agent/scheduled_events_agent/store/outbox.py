"""Notifications that were not delivered yet. Each is written together with its transition, or not at all."""

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime

import msgspec

from scheduled_events_agent.status.status import NotifiedTarget

MAX_NOTIFICATIONS = 1000
"""Most notifications of one target; the oldest are dropped first."""

Transaction = Callable[[], AbstractContextManager[None]]


class OutboxItem(msgspec.Struct, frozen=True, kw_only=True):
    """A notification that was not delivered yet."""

    id: int
    """Notifications of a target are delivered in the order of their ids."""
    at: datetime
    body: str


class Backlog(msgspec.Struct, frozen=True, kw_only=True):
    """The undelivered notifications of one target."""

    count: int
    oldest_at: datetime


class Loss(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The notifications that one target has lost since one was last delivered to it."""

    count: int
    since: datetime
    reason: str
    """Why the last one was lost."""


def notified(name: str, waiting: Backlog | None, loss: Loss | None) -> NotifiedTarget:
    """The state of a target, according to the state file."""
    return NotifiedTarget(
        name=name,
        waiting=waiting.count if waiting else 0,
        oldest_at=waiting.oldest_at if waiting else None,
        failure=None,
        lost=loss.count if loss else 0,
        lost_at=loss.since if loss else None,
        lost_reason=loss.reason if loss else "",
    )


class OutboxTable:
    """The table of notifications. All methods raise StoreError."""

    def __init__(self, connection: sqlite3.Connection, transaction: Transaction, reading: Transaction) -> None:
        self.connection = connection
        """The connection of the store."""
        self._transaction = transaction
        self._reading = reading

    def add(self, stamp: str, notifications: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Add notifications (target, body) within a transaction. Returns the older ones that are lost by that."""
        self.connection.executemany(
            "INSERT INTO outbox (target, at, body) VALUES (?, ?, ?)",
            [(target, stamp, body) for target, body in notifications],
        )
        lost: list[tuple[str, str]] = []
        for target in dict.fromkeys(target for target, _ in notifications):
            surplus = "SELECT id, body FROM outbox WHERE target = ? ORDER BY id DESC LIMIT -1 OFFSET ?"
            rows = self.connection.execute(surplus, (target, MAX_NOTIFICATIONS)).fetchall()[::-1]
            self.connection.executemany("DELETE FROM outbox WHERE id = ?", [(row[0],) for row in rows])
            lost += [(target, row[1]) for row in rows]
        return lost

    def load_body(self, notification_id: int) -> str | None:
        """The body; None if the notification is no longer there."""
        with self._reading():
            row = self.connection.execute("SELECT body FROM outbox WHERE id = ?", (notification_id,)).fetchone()
            return str(row[0]) if row else None

    def load_next(self, target: str, after_id: int) -> OutboxItem | None:
        """The next notification to deliver."""
        query = "SELECT id, at, body FROM outbox WHERE target = ? AND id > ? ORDER BY id LIMIT 1"
        with self._reading():
            row = self.connection.execute(query, (target, after_id)).fetchone()
            return OutboxItem(id=row[0], at=datetime.fromisoformat(row[1]), body=row[2]) if row else None

    def drop(self, targets: Iterable[str]) -> None:
        """Delete all notifications that wait for these targets."""
        with self._transaction():
            self.connection.executemany("DELETE FROM outbox WHERE target = ?", [(one,) for one in targets])

    def waiting(self) -> dict[str, Backlog]:
        """The backlog of each target for which notifications wait."""
        query = "SELECT target, count(*), min(at) FROM outbox GROUP BY target"
        with self._reading():
            rows = self.connection.execute(query).fetchall()
            return {name: Backlog(count=count, oldest_at=datetime.fromisoformat(at)) for name, count, at in rows}
