"""approve and the like as commands: which event they find, without an agent that runs."""

import contextlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace
from status_samples import APPROVED_BY_KIM, HELD_BY_KIM

from scheduled_events_agent import cli, host
from scheduled_events_agent.cli import operator
from scheduled_events_agent.imds.document import ScheduledEvent
from scheduled_events_agent.policy import Decision
from scheduled_events_agent.store import RequestAnswer, Store
from scheduled_events_agent.workflow import Approval, Record, Transition, Workflow

NOW = datetime.now(UTC)
OVER = Workflow(
    id="aaaa@1",
    event=ScheduledEvent(id="AAAA", type="Reboot", status="Scheduled", resources=("web-1",)),
    decision=Decision(rule="impactful", reason="rule impactful matches it", affects="self"),
    first_seen_at=NOW,
    not_before_seen_at=NOW,
    boot_id="boot",
    phase="closed",
    is_over=True,
    outcome="canceled",
)
PENDING = replace(OVER, id="bbbb@1", event=replace(OVER.event, id="BBBB"), phase="held", is_over=False, outcome="")
RECOVERING = replace(OVER, id="cccc@1", event=replace(OVER.event, id="CCCC"), phase="recovering")
AGAIN = replace(PENDING, id="aaaa@2", event=OVER.event)

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "state"
    host.create_private_dir(directory)
    keep(directory, OVER, PENDING, RECOVERING)
    return directory


def keep(directory: Path, *workflows: Workflow) -> None:
    store = Store.open(directory, NOW)
    for workflow in workflows:
        gone = (Record(kind="gone", text=f"is no longer in the document ({workflow.outcome})"),)
        at = NOW - timedelta(days=1)
        store.commit([Transition(workflow=workflow, records=gone if workflow.is_over else ())], at)
    store.close()


@pytest.fixture
def run(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def run_it(*arguments: str) -> tuple[int, str]:
        code = cli.main([*arguments, "--state-dir", str(state_dir)])
        return code, capsys.readouterr().err

    return run_it


@pytest.mark.parametrize("command", ["approve", "hold", "release", "retry", "resolve"])
def test_an_event_that_is_over_is_reported_with_its_outcome(run: Run, command: str) -> None:
    code, told = run(command, "aaa")
    day = NOW - timedelta(days=1)
    assert (code, told) == (
        1,
        f"scheduled-events-agent: event AAAA is over since {day:%Y-%m-%d %H:%M:%S} UTC: canceled\n",
    )


def test_an_event_that_is_recovered_from_is_over_for_approve_but_not_for_retry(run: Run) -> None:
    assert run("approve", "cccc")[1].endswith(": canceled; its recovery is not done\n")
    assert "no agent runs" in run("retry", "cccc")[1]


def test_the_word_for_a_loss_of_state_is_no_id_and_only_resolve_knows_it(run: Run) -> None:
    assert "no agent runs" in run("resolve", "state_lost")[1]
    assert 'no pending event id begins with "state_lost"' in run("retry", "state_lost")[1]


def test_an_event_that_came_back_under_its_id_is_pending(run: Run, state_dir: Path) -> None:
    keep(state_dir, AGAIN)
    assert "no agent runs" in run("approve", "aaaa")[1]


def test_a_hold_without_a_response_during_an_approval_is_reported_as_valid(
    run: Run, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "_ANSWER_WITHIN_SECONDS", 0.1)
    held = replace(PENDING, operator=HELD_BY_KIM, approval=Approval(state="requested"))
    keep(state_dir, held)
    with contextlib.closing(host.acquire_lock(state_dir / "lock")):  # as an agent that runs has it
        told = "scheduled-events-agent: held, unless Azure accepts the approval that is under way; see status\n"
        assert run("hold", "bbbb") == (1, told)
        assert "has not answered within 0.1 s" in run("release", "bbbb")[1]
        keep(state_dir, replace(held, operator=None))
        assert "has not answered within 0.1 s" in run("hold", "bbbb")[1]


def test_a_release_without_a_response_during_an_approval_is_reported_as_valid(
    run: Run, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "_ANSWER_WITHIN_SECONDS", 0.1)
    released = replace(PENDING, approval=Approval(state="requested", taken_back=APPROVED_BY_KIM))
    keep(state_dir, released)
    with contextlib.closing(host.acquire_lock(state_dir / "lock")):  # as an agent that runs has it
        told = (
            "scheduled-events-agent: released, unless Azure accepts the approval that is under way; see status\n"
        )
        assert run("release", "bbbb") == (1, told)
        keep(state_dir, replace(released, approval=Approval(state="requested")))
        assert "has not answered within 0.1 s" in run("release", "bbbb")[1]


def test_an_event_that_was_never_seen_is_not_found_among_the_pending(run: Run) -> None:
    assert run("approve", "dddd")[1].startswith('scheduled-events-agent: no pending event id begins with "dddd"')


@pytest.mark.parametrize("succeeded", [True, False])
def test_the_exit_code_follows_the_result_and_not_its_message(
    run: Run, monkeypatch: pytest.MonkeyPatch, *, succeeded: bool
) -> None:
    monkeypatch.setattr(operator, "find_agent", lambda _: "1")
    answer = RequestAnswer(succeeded=succeeded, message="refused or not")
    monkeypatch.setattr(operator, "wait_for_answer", lambda *_: answer)
    assert run("approve", "bbbb")[0] == (0 if succeeded else 1)
