"""A fleet of real agents with one simulator and one real table, in trouble. Judged from outside.

The judge knows when hooks ran, from their own notes, when approvals came, from the simulator, and the table's
records.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from azurite import Azurite, running_azurite  # noqa: F401 - a fixture
from flaky_proxy import FlakyProxy
from harness import Simulator
from many_agents import GROUP, Fleet

from scheduled_events_agent.fleet.table import connect
from scheduled_events_agent.policy.settings import FleetSettings

pytestmark = pytest.mark.timeout(1800)
LIMIT = 2
"""So many events are prepared for at a time."""
WITHOUT_SLOT = "it begins without a slot of the fleet: it can wait no longer"


class JudgedFleet(Fleet):
    """One with a real table, behind a proxy."""

    def __init__(self, directory: Path, azure: Simulator, azurite: Azurite, proxy: FlakyProxy) -> None:
        self.azurite, self.proxy = azurite, proxy
        table = azurite.create_table()
        store = connect(FleetSettings(table=table), GROUP, azure.endpoint())
        url = f"{proxy.url}/{table.rpartition('/')[2]}"
        super().__init__(directory, azure, store, table=url, max_events=LIMIT)

    def begun_without_slot(self, events: Iterable[str]) -> set[str]:
        """Events whose agents have logged that they began without a slot."""
        lines = [line for agent in self.agents.values() for line in agent.history if WITHOUT_SLOT in line]
        return {event for event in events if any(event in line for line in lines)}

    def judge(self, events: list[str], late: Iterable[str] = ()) -> None:
        """``late``: events that were at their limit before a slot was free."""
        for event in events:
            approvals = self.azure.approvals(event)
            assert [event] == [id_ for request in approvals for id_ in request.approved], "it is approved once"
            first = approvals[0].monotonic
            for vm in self.azure.event(event).plan.vms:
                before = [run for run in self.runs(vm, event) if run.hook != "resume" and run.began < first]
                assert before, f"{event} was approved before {vm} had begun"
                assert before[-1].ended < first, f"{event} was approved before {vm} had prepared"
        assert self.begun_without_slot(events) == set(late)
        spans = [self._span(event) for event in events if event not in set(late)]
        for began, _ in spans:
            together = sum(other <= began < over for other, over in spans)
            assert together <= LIMIT, f"{together} events were prepared for at a time"

    def _span(self, event: str) -> tuple[float, float]:
        """From the first hook that prepared for it to the last that recovered."""
        vms = self.azure.event(event).plan.vms
        began = min(run.began for vm in vms for run in self.runs(vm, event))
        return began, max(self.back_at(vm, event) for vm in vms)


@pytest.fixture(scope="module", params=[10, pytest.param(100, marks=pytest.mark.nightly)])
def fleet(
    request: pytest.FixtureRequest, azurite: Azurite, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[JudgedFleet]:
    vms = [f"web_{number}" for number in range(request.param)]
    key = azurite.certificate.with_suffix(".key")
    with ExitStack() as stack:
        azure = stack.enter_context(Simulator(vms=vms, rate_limit=None))
        proxy = stack.enter_context(FlakyProxy(azurite.account_url, azurite.certificate, key))
        yield stack.enter_context(JudgedFleet(tmp_path_factory.mktemp("fleet"), azure, azurite, proxy))


def test_an_event_of_all_is_approved_once_when_all_are_prepared(fleet: JudgedFleet) -> None:
    event = fleet.schedule(fleet.vms)
    fleet.wait_over([event])
    fleet.judge([event])


def test_two_events_are_prepared_for_at_a_time_and_one_more_at_its_limit(fleet: JudgedFleet) -> None:
    first, second, third, *others = fleet.random.sample(fleet.vms, 10)
    holders = [fleet.schedule([vm], "Redeploy") for vm in (first, second)]
    fleet.wait(lambda: all(map(fleet.has_begun, holders)), "two events had a slot")
    waiting = [fleet.schedule([vm]) for vm in others]
    late = fleet.schedule([third], notice_seconds=310)
    fleet.wait(lambda: fleet.is_drained(third, late), "the late one was prepared", [third])
    agent = fleet.agents[third]
    fleet.wait(lambda: "a slot to approve" in agent.wait_text(late), "it waits", [third])
    assert fleet.azure.approvals(late) == ()
    assert not any(map(fleet.has_begun, waiting))
    fleet.let_go((first, second))
    events = [*holders, late, *waiting]
    fleet.wait_over(events)
    fleet.judge(events, late=[late])


def test_a_paused_agent_is_waited_for(fleet: JudgedFleet) -> None:
    *others, still = fleet.vms
    fleet.agents[still].freeze()
    try:
        event = fleet.schedule(fleet.vms)
        fleet.wait_each(lambda vm: fleet.is_drained(vm, event), others, "was prepared")
        first = fleet.agents[others[0]]
        looked = first.metric("fleet_requests_total", operation="list")
        fleet.wait(lambda: first.metric("fleet_requests_total", operation="list") >= looked + 2, "it looked twice")
        assert fleet.azure.approvals(event) == ()
    finally:
        fleet.agents[still].thaw()
    fleet.wait_over([event])
    fleet.judge([event])


def test_while_the_table_hangs_no_event_begins_and_none_is_approved(fleet: JudgedFleet) -> None:
    shared = fleet.schedule(fleet.vms, "Redeploy")
    fleet.wait_each(lambda vm: fleet.runs(vm, shared), fleet.vms, "had begun")
    outage_ends_at = time.monotonic() + (60.0 if len(fleet.vms) > 10 else 0.0)
    with fleet.azurite.stopped():
        single = fleet.schedule(fleet.vms[:1])
        fleet.let_go(fleet.vms)
        fleet.wait_each(lambda vm: fleet.is_drained(vm, shared), fleet.vms, "was prepared")
        fleet.wait_each(
            lambda vm: fleet.agents[vm].status()["fleet"]["error"],
            fleet.vms[:10],
            "knew that the store is unavailable",
        )
        fleet.wait(lambda: time.monotonic() > outage_ends_at, "a minute was over")
        assert fleet.azure.approvals(shared) == ()
        assert not fleet.has_begun(single)
    fleet.wait_over([shared, single])
    fleet.judge([shared, single])


def test_answers_are_lost_and_agents_killed(fleet: JudgedFleet) -> None:
    fleet.proxy.loses = 0.2
    try:
        events = [fleet.schedule(vms) for vms in (fleet.vms, *zip(fleet.random.sample(fleet.vms, 3)))]
        fleet.wait(lambda: fleet.has_begun(events[0]), "it had begun")
        for vm in fleet.random.sample(fleet.vms, len(fleet.vms) // 5):
            fleet.agents[vm].kill()
            fleet.agents[vm].start()
        fleet.wait_over(events)
    finally:
        fleet.proxy.loses = 0.0
    assert fleet.proxy.lost > 0
    fleet.judge(events)
