"""What the result of a hook that is not required leaves of its stage."""

import pytest

from scheduled_events_agent.workflow import HookFinished, HookOutcome, StageStatus
from scheduled_events_agent.workflow.stages import with_result


def after(stage_status: StageStatus, hook: str, outcome: HookOutcome) -> StageStatus:
    signal = HookFinished(workflow_id="E", stage="recover", hook=hook, run=1, outcome=outcome, is_required=False)
    return with_result(stage_status, signal)


@pytest.mark.parametrize("first", ["failed", "timed_out", "succeeded"])
def test_another_hook_neither_hides_the_one_that_failed_nor_lets_the_recovery_go_on(first: HookOutcome) -> None:
    stuck = StageStatus(state="failed", failed_hook="load", failure="hook load: exit code 1")
    for outcome in (first, "succeeded"):
        stuck = after(stuck, "resume", outcome)
        assert (stuck.state, stuck.failed_hook, stuck.failure) == ("failed", "load", "hook load: exit code 1")


def test_a_hook_that_failed_is_named_until_it_succeeds() -> None:
    failed = after(StageStatus(state="running"), "resume", "failed")
    assert (failed.state, failed.failed_hook, failed.done) == ("running", "", ("resume",))
    assert failed.tolerated_failures == {"resume": "hook resume: failed"}
    again = after(failed, "resume", "succeeded")
    assert (again.state, again.tolerated_failures) == ("running", {})


def test_a_recovery_that_has_not_begun_does_not_begin_by_the_hook_of_another_event() -> None:
    failed = after(StageStatus(), "resume", "failed")
    assert failed.state == "idle"
    assert after(failed, "resume", "succeeded").state == "idle"
