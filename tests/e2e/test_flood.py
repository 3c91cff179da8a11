"""A real agent takes answers at every limit, and the next good document as if nothing had been."""

import re
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from harness import Agent, Endpoint, document

from scheduled_events_agent.imds.document import MAX_EVENTS, MAX_OWN_EVENTS

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the cost of a process is read from /proc")

BODY_BYTES = 8 * 1024 * 1024
OF_OTHERS = [f"vm-{number}" for number in range(2, 102)]
AT_ONCE: dict[str, Any] = {"name": "now", "approve": "immediately", "shared": "any"}
BY_HAND: dict[str, Any] = {
    "name": "by-hand",
    "approve": "manual",
    "prepare": ["drain"],
    "lead": "1h",
    "shared": "any",
}
HELD: dict[str, Any] = {"name": "held", "approve": "never", "drain_for": "1s", "lead": "1h"}
OTHERS: dict[str, Any] = {"name": "others", "when": {"affects": ["self", "others"]}, "approve": "immediately"}


def event(event_id: str, *vms: str, **fields: str) -> dict[str, Any]:
    not_before = datetime.now(UTC) + timedelta(hours=2)
    return {
        "EventId": event_id,
        "EventStatus": "Scheduled",
        "EventType": "Freeze",
        "Resources": list(vms),
        "NotBefore": f"{not_before:%a, %d %b %Y %H:%M:%S GMT}",
        **fields,
    }


def at_every_limit() -> bytes:
    """As many events as are taken, as many of this VM, as many values and as long a text."""
    mine = [event(f"mine-{number}", "vm-1") for number in range(MAX_OWN_EVENTS)]
    others = [event(f"{number}", *OF_OTHERS) for number in range(MAX_EVENTS - len(mine))]
    text = "x" * ((BODY_BYTES - len(document(*mine, *others))) // MAX_EVENTS - 40)
    for one in (*mine, *others):
        one["Description"] = text
    return document(*mine, *others)


FLOODS: dict[str, Callable[[], bytes]] = {
    "every limit": at_every_limit,
    "others alone": lambda: document(*(event(str(number), "vm-2") for number in range(MAX_EVENTS))),
    "too many of this VM": lambda: document(*(event(str(number), "vm-1") for number in range(MAX_EVENTS))),
    "very many small events": lambda: b'{"Events":[' + b'{"EventId":"x"},' * 390_000 + b"{}]}",
    "very many values": lambda: b'{"Events":[' + b"[]," * 2_700_000 + b"[]]}",
}


class Cost:
    """The cost of a process, from the creation of this object until it is asked for."""

    def __init__(self, pid: int) -> None:
        self._proc = Path(f"/proc/{pid}")
        (self._proc / "clear_refs").write_text("5")  # the peak of its memory counts from here
        self._seconds, self._kibibytes = self._seconds_now(), self._peak()

    def seconds(self) -> float:
        return self._seconds_now() - self._seconds

    def mebibytes(self) -> float:
        return (self._peak() - self._kibibytes) / 1024

    def _seconds_now(self) -> float:
        fields = (self._proc / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def _peak(self) -> int:
        match = re.search(r"VmHWM:\s+(\d+)", (self._proc / "status").read_text())
        assert match
        return int(match[1])


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as endpoint:
        yield endpoint


@pytest.mark.parametrize(
    ("flood", "rule"),
    [
        *((flood, rule) for flood in ("every limit", "others alone") for rule in (AT_ONCE, BY_HAND, HELD, OTHERS)),
        ("too many of this VM", AT_ONCE),
        ("very many small events", AT_ONCE),
        ("very many values", AT_ONCE),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else value,
)
def test_an_answer_at_a_limit_costs_little_and_the_next_event_is_acted_on(
    make_agent: Callable[..., Agent], endpoint: Endpoint, flood: str, rule: dict[str, Any]
) -> None:
    agent = make_agent(endpoint.url)
    last = {"name": "last", "when": {"type": "Preempt"}, "approve": "immediately"}
    agent.write_policy(imds={"poll_interval": "1s"}, rules=[last, rule], hooks=agent.hooks("drain"))
    agent.start()
    agent.wait_log("this VM is known")
    body, lines = FLOODS[flood](), len(agent.lines)
    cost = Cost(agent.process.pid)
    before, endpoint.body = endpoint.polls, body
    agent.wait_until(lambda: endpoint.polls > before, "the flood was asked for")
    answers = endpoint.polls - before
    endpoint.body = document(event("LAST", "vm-1", EventType="Preempt"))
    agent.wait_until(lambda: ["LAST"] in endpoint.approved, "the next event was approved")
    assert cost.mebibytes() < 150
    assert cost.seconds() < 2 * answers
    assert len(agent.lines) - lines < 50
