"""What clients sent to the simulator, and what they got: kept in memory, and in a file if there is to be one."""

import itertools
import time
from collections import deque
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from agent.simulator.azure import SimulatorError
from agent.simulator.protocol import Answer, Request

# More than a day of one VM polling once a second; a bound so that a simulator left running does not grow.
_MAX_RECORDS = 100_000


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request that a client sent, and what it got."""

    number: int
    at: datetime
    """When it was answered, by the wall clock."""
    monotonic: float
    """The same by time.monotonic(), just before the first byte of the answer was sent."""
    vm: str
    connection: int
    """Counted from 1; requests on one kept-alive connection have the same number."""
    method: str
    path: str
    """With its query."""
    status: int
    """0 if there was no answer."""
    fault: str
    """Kind of the fault that hit it; "" for none."""
    headers: dict[str, str]
    """Names in lower case."""
    body: str
    accepted: tuple[str, ...]
    """Ids that this request asked to start and that were not refused."""
    approved: tuple[str, ...]
    """Those of them on which it had an effect: not on what was approved or had started before."""
    incarnation: int
    """DocumentIncarnation at that moment."""

    def __str__(self) -> str:
        return f"{self.vm} {self.method} {self.status}{f' ({self.fault})' if self.fault else ''}"


class Traffic:
    """The record of all requests. Not safe for use by several threads at once."""

    def __init__(self, file: Path | None) -> None:
        """``file`` gets each request as a line of JSON; raises SimulatorError if it cannot be written."""
        self.records: deque[RequestRecord] = deque(maxlen=_MAX_RECORDS)
        self._numbers = itertools.count(1)
        try:
            self._stream = None if file is None else file.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise SimulatorError(f"cannot write requests to {file}: {error.strerror}", kind="usage") from error

    def add(
        self, vm: str, connection: int, request: Request, *, fault: str, answer: Answer, incarnation: int
    ) -> None:
        """Record a request that is answered now."""
        record = RequestRecord(
            number=next(self._numbers),
            at=datetime.now(UTC),
            monotonic=time.monotonic(),
            vm=vm,
            connection=connection,
            method=request.method,
            path=request.target,
            status=answer.status,
            fault=fault,
            headers=request.headers,
            body=request.body.decode("utf-8", "replace"),
            accepted=answer.accepted,
            approved=answer.approved,
            incarnation=incarnation,
        )
        self.records.append(record)
        if self._stream is not None:
            self._stream.write(msgspec.json.encode(record).decode() + "\n")

    def approvals(self, ids: Collection[str] | None) -> tuple[RequestRecord, ...]:
        """Approvals that were accepted: all, or those of one event by any id of it."""
        folded = None if ids is None else {known.casefold() for known in ids}
        return tuple(
            record
            for record in self.records
            if record.accepted and (folded is None or any(one.casefold() in folded for one in record.accepted))
        )

    def close(self) -> None:
        """Close the file; what is in memory stays."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
