"""A ledger in memory, with the faults of a real one: for tests."""

import threading
from collections.abc import Callable, Mapping
from itertools import count

from scheduled_events_agent.fleet.ledger import LedgerError, Row

Partition = dict[str, Row]


def _work(_: str) -> str:
    return ""


class MemoryLedger:
    """For any thread. ``fault`` says of each call (put, put_if_unchanged, list_rows) what goes wrong with it:

    "" nothing, away: it has no effect, lost: it has its effect and the answer is lost, stale: it lists what was
    there before the last write to the partition.
    """

    def __init__(self, fault: Callable[[str], str] = _work) -> None:
        self.fault = fault
        self.calls = 0
        self._partitions: dict[str, Partition] = {}
        self._before: dict[str, Partition] = {}
        self._versions = count(1)
        self._lock = threading.Lock()

    def put(self, partition: str, key: str, content: Mapping[str, str] | None) -> None:
        fault = self._begin("put")
        with self._lock:
            self._write(partition, key, content)
        self._end(fault)

    def put_if_unchanged(self, partition: str, key: str, content: Mapping[str, str] | None, version: str) -> bool:
        fault = self._begin("put_if_unchanged")
        with self._lock:
            row = self._partitions.get(partition, {}).get(key)
            is_unchanged = (row.version if row else "") == version or (row is None and content is None)
            if is_unchanged:
                self._write(partition, key, content)
        self._end(fault)
        return is_unchanged

    def list_rows(self, partition: str, prefix: str = "") -> list[Row]:
        fault = self._begin("list_rows")
        with self._lock:
            tables = self._before if fault == "stale" else self._partitions
            rows = sorted(row for row in tables.get(partition, {}).values() if row.key.startswith(prefix))
        self._end(fault)
        return rows

    def rows(self) -> dict[str, list[Row]]:
        """All there is, by partition, without a fault: for who judges from outside."""
        with self._lock:
            return {name: list(rows.values()) for name, rows in self._partitions.items() if rows}

    def _write(self, partition: str, key: str, content: Mapping[str, str] | None) -> None:
        before = self._partitions.get(partition, {})
        rows = {name: row for name, row in before.items() if name != key}
        if content is not None:
            rows[key] = Row(key, dict(content), str(next(self._versions)))
        self._partitions[partition] = rows
        self._before[partition] = before

    def _begin(self, call: str) -> str:
        self.calls += 1
        fault = self.fault(call)
        if fault == "away":
            raise LedgerError("the ledger is away", kind="unreachable")
        return fault

    def _end(self, fault: str) -> None:
        if fault == "lost":
            raise LedgerError("the answer was lost", kind="timeout")
