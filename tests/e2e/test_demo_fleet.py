"""``demo fleet`` as people run it: what it shows has happened, and its verdict can be a bad one."""

import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from fleet_picture import PICTURE, bars_of, draw, drawn_bars, states_of
from harness import CHECKOUT

from agent import AgentError
from agent.cli.demo_fleet import Event, judge, play
from agent.status import JournalEntry

START = datetime(2026, 1, 1, tzinfo=UTC)
FIRST = Event("AAAAAAAA-1", "Reboot", ("web_0", "web_1", "web_2"))
SECOND = Event("BBBBBBBB-1", "Redeploy", ("web_3",))
THIRD = Event("CCCCCCCC-1", "Reboot", ("web_3", "web_4"))


def test_five_agents_act_together_and_all_is_as_expected() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agent", "demo", "fleet"],
        check=False,
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    )
    told = done.stdout
    assert done.returncode == 0, told
    (first,) = re.findall(r"announces Reboot (\w+), .*\n(?:.*\n)*.*--- Meanwhile", told)
    assert re.search(rf"web_3  waits for a slot: event {first} of web_[012], until \d\d:\d\dZ; ", told), told
    assert re.search(r"web_3  waits for web_4 to be ready", told), told
    assert "slot 000  free" in told
    assert len(re.findall(r"^ok  ", told, re.MULTILINE)) == 5
    picture = PICTURE.read_text(encoding="utf-8")
    drawn, shown = states_of(drawn_bars(picture)), states_of(bars_of(told.splitlines()))
    # On a busy machine its agent may be killed when its hook has ended: then it does the same in another order.
    for states in (drawn, shown):
        states["web_4"] = sorted(set(states["web_4"]))
    assert drawn == shown, "draw docs/fleet.svg again"
    assert picture == "\n".join(draw(drawn_bars(picture))) + "\n", "draw docs/fleet.svg again"


def at(seconds: float, event: Event, kind: str, **fields: str) -> JournalEntry:
    texts = {"workflow_id": event.id, "stage": "", "hook": "", "outcome": "", "text": "", "detail": ""}
    return JournalEntry(at=START + timedelta(seconds=seconds), event_id=event.id, kind=kind, **{**texts, **fields})


def life(event: Event, begins: float, *, ready: float) -> list[JournalEntry]:
    """What the agent of one of its VMs writes down when all goes well; it is over 10 s after it was ready."""
    return [
        at(begins, event, "preparing"),
        at(ready, event, "prepared"),
        at(ready + 10, event, "hook_finished", hook="resume", outcome="succeeded"),
        at(ready + 10, event, "closed", text="is over: completed"),
    ]


def verdict(
    *,
    first_approved: float = 6,
    second_begins: float = 20,
    third_approved: float | None = 45,
    is_back: bool = True,
) -> list[bool]:
    journals = {vm: life(FIRST, 1, ready=seconds) for vm, seconds in zip(FIRST.vms, (2, 3, 5), strict=True)}
    journals["web_3"] = [*life(SECOND, second_begins, ready=second_begins + 1), *life(THIRD, 40, ready=41)]
    journals["web_4"] = life(THIRD, 40, ready=44)[: None if is_back else -2]
    seconds = {FIRST.id: first_approved, SECOND.id: second_begins + 2, THIRD.id: third_approved}
    approved = {one: START + timedelta(seconds=after) if after else None for one, after in seconds.items()}
    return list(judge(FIRST, SECOND, THIRD, journals, approved).values())


def test_its_verdict_tells_each_fault() -> None:
    assert verdict() == [True, True, True, True]
    assert verdict(first_approved=4) == [False, True, True, True], "one VM was not ready yet"
    assert verdict(second_begins=14) == [True, False, True, True], "the first event was not over"
    assert verdict(third_approved=None) == [True, True, False, True], "it was never approved"
    assert verdict(is_back=False) == [True, True, True, False], "a VM has not recovered"


def test_a_table_without_its_signature_is_a_wrong_use() -> None:
    with pytest.raises(AgentError, match="--sas-file"):
        play("http://127.0.0.1:9/a/fleet", None)
