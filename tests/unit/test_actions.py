"""Commands of an operator about an event: hold, release, retry and resolve, one behaviour at a time."""

from datetime import timedelta
from typing import get_args

import msgspec
import pytest
from test_workflow import NOTICE, START, Agent, a_rule, an_event, started

from scheduled_events_agent.cli import _COMMANDS
from scheduled_events_agent.workflow import (
    ACTION_TEXTS,
    HookFinished,
    HookOutcome,
    OperatorAction,
    OperatorCommand,
    Workflow,
    is_ready,
    next_wake_at,
)

TWO_RECOVER = a_rule(prepare=("drain",), recover=("load", "resume"))


def an_agent_whose_recovery_failed() -> Agent:
    """At hook load."""
    agent = Agent(TWO_RECOVER)
    agent.document(an_event())
    agent.ends("drain")
    agent.document()
    assert agent.ends("load", "failed") == []
    return agent


def test_every_action_is_a_command_and_has_a_text() -> None:
    commands = [name for name, (module, _) in _COMMANDS.items() if module == "operator"]
    assert commands == [*get_args(OperatorAction)]
    assert commands == [*ACTION_TEXTS]


# --- A recovery that fails.


@pytest.mark.parametrize("outcome", ["failed", "timed_out", "not_started", "canceled"])
def test_an_event_whose_recovery_fails_stays_open_and_the_vm_is_not_ready(outcome: HookOutcome) -> None:
    agent = Agent(TWO_RECOVER)
    agent.document(an_event())
    agent.ends("drain")
    agent.document()
    assert agent.ends("load", outcome) == []
    assert agent.phase == "recovery_failed"
    assert agent.wait_message().startswith("hook load: ")
    assert not is_ready(agent.workflows)
    assert agent.document(after=86400) == []
    assert agent.phase == "recovery_failed"
    assert agent.journal[-1].startswith("recovery_failed: recovery failed (hook load: ")


def test_a_retry_runs_the_hook_that_failed_and_then_the_rest() -> None:
    agent = an_agent_whose_recovery_failed()
    assert agent.operator("retry") == ["A: recover load"]
    assert (agent.phase, agent.of().recover.failure) == ("recovering", "")
    assert agent.ends("load") == ["A: recover resume"]
    agent.ends("resume")
    assert agent.workflows == {}
    assert "operator: retried by kim" in agent.journal
    assert agent.journal[-1] == "closed: is over: unknown"


def test_a_retry_leaves_alone_what_has_succeeded() -> None:
    agent = Agent(TWO_RECOVER)
    agent.document(an_event())
    agent.ends("drain")
    agent.document()
    agent.ends("load")
    agent.ends("resume", "failed")
    assert agent.operator("retry") == ["A: recover resume"]


def test_a_retry_may_fail_again() -> None:
    agent = an_agent_whose_recovery_failed()
    agent.operator("retry")
    assert agent.ends("load", "timed_out") == []
    assert (agent.phase, agent.wait_message()) == ("recovery_failed", "hook load: timed_out")
    assert agent.operator("retry") == ["A: recover load"]


def test_a_resolved_recovery_is_over_and_the_journal_names_the_operator() -> None:
    agent = an_agent_whose_recovery_failed()
    assert agent.operator("resolve") == []
    assert agent.workflows == {}
    assert agent.journal[-2:] == [
        "operator: resolved by kim",
        "closed: is over: unknown, resolved by an operator",
    ]


def test_a_failed_recovery_is_neither_tried_again_nor_forgotten_by_a_restart() -> None:
    agent = an_agent_whose_recovery_failed()
    assert agent.restart() == []
    assert (agent.phase, is_ready(agent.workflows)) == ("recovery_failed", False)


@pytest.mark.parametrize("action", ["retry", "resolve"])
def test_an_action_before_the_first_document_is_kept_until_then(action: OperatorAction) -> None:
    agent = an_agent_whose_recovery_failed()
    agent.restart(document=False)
    assert agent.operator(action) == []
    assert agent.restart() == (["A: recover load"] if action == "retry" else [])
    assert (agent.workflows == {}) is (action == "resolve")


def test_a_retry_cut_off_by_a_crash_runs_again() -> None:
    agent = an_agent_whose_recovery_failed()
    agent.operator("retry")
    assert agent.restart() == ["A: recover load"]


def test_the_recovery_from_a_later_event_solves_the_one_that_failed() -> None:
    agent = an_agent_whose_recovery_failed()
    assert agent.document(an_event(id="B")) == ["B: prepare drain"]
    agent.ends("drain", event="B")
    assert agent.phase == "recovery_failed"
    assert agent.document() == ["B: recover load"]
    assert agent.ends("load", event="B") == ["B: recover resume"]
    assert agent.phase == "recovering"
    agent.ends("resume", event="B")
    assert agent.workflows == {}


def test_a_recovery_that_fails_again_for_a_later_event_leaves_both_open() -> None:
    agent = an_agent_whose_recovery_failed()
    agent.document(an_event(id="B"))
    agent.ends("drain", event="B")
    agent.document()
    agent.ends("load", "failed", event="B")
    assert [w.phase for w in agent.workflows.values()] == ["recovery_failed", "recovery_failed"]
    assert agent.operator("retry", event="B") == ["B: recover load"]
    agent.ends("load", event="B")
    agent.ends("resume", event="B")
    assert agent.workflows == {}


def test_a_stage_reverted_by_a_later_event_is_recovered_again() -> None:
    agent = Agent(TWO_RECOVER)
    agent.document(an_event())
    agent.ends("drain")
    agent.document()
    agent.ends("load")
    agent.ends("resume", "failed")
    agent.document(an_event(id="B"))
    agent.ends("drain", event="B")
    agent.operator("resolve")
    agent.document()
    assert agent.of("B").recover.current == "load"


def test_a_retry_waits_for_an_event_that_needs_the_vm_prepared() -> None:
    agent = Agent(TWO_RECOVER, rules=(TWO_RECOVER,))
    agent.document(an_event())
    agent.ends("drain")
    agent.document()
    agent.ends("load")
    agent.ends("resume", "failed")
    agent.document(an_event(id="B"))
    assert agent.operator("retry") == []
    assert agent.wait_message() == "event B still needs it prepared"
    agent.ends("drain", event="B")
    effects = agent.document()
    assert len(effects) == 1
    assert effects[0].endswith("recover load")


def test_a_failure_counts_for_every_event_that_was_about_to_run_the_hook() -> None:
    agent = Agent(TWO_RECOVER)
    agent.document(an_event(), an_event(id="B"))
    agent.ends("drain")
    agent.ends("drain", event="B")
    effects = agent.document()
    assert len(effects) == 1
    agent.ends("load", "failed", event=effects[0][0])
    assert [w.phase for w in agent.workflows.values()] == ["recovery_failed", "recovery_failed"]


def test_an_event_that_comes_back_under_its_id_is_one_of_its_own() -> None:
    agent = an_agent_whose_recovery_failed()
    assert agent.document(an_event()) == ["A: prepare drain"]
    assert sorted(workflow.phase for workflow in agent.all_of("A")) == ["preparing", "recovery_failed"]


def test_a_state_file_of_before_is_read() -> None:
    agent = an_agent_whose_recovery_failed()
    kept = msgspec.json.decode(msgspec.json.encode(agent.of()))
    del kept["recover"]["failed_hook"]
    assert msgspec.convert(kept, Workflow).recover.failed_hook == ""


# --- Hooks that are not required.


def end_optional(agent: Agent, hook: str, stage: str) -> list[str]:
    workflow = agent.of()
    agent.wait(1)
    return agent.send(
        HookFinished(
            workflow_id=workflow.id,
            stage=stage,  # type: ignore[arg-type]
            hook=hook,
            run=getattr(workflow, stage).run,
            outcome="failed",
            is_required=False,
            detail="exit code 3",
        )
    )


def test_the_failure_of_an_optional_hook_is_reported_and_stops_nothing() -> None:
    agent = Agent(a_rule(prepare=("tell", "drain"), recover=("tell", "resume")))
    agent.document(an_event())
    assert end_optional(agent, "tell", "prepare") == ["A: prepare drain"]
    assert agent.ends("drain") == ["A: approve A"]
    agent.document()
    assert end_optional(agent, "tell", "recover") == ["A: recover resume"]
    assert agent.of().recover.tolerated_failures == {"tell": "hook tell: exit code 3"}
    agent.ends("resume")
    assert agent.workflows == {}
    assert "hook_finished: hook tell: exit code 3 (failed), and it is not required" in agent.journal


# --- A preparation that fails.


def test_a_failed_preparation_is_retried_from_the_hook_that_failed() -> None:
    agent = Agent(a_rule(prepare=("stop", "drain", "save")))
    agent.document(an_event())
    agent.ends("stop")
    agent.ends("drain", "failed")
    assert agent.phase == "held"
    assert agent.operator("retry") == ["A: prepare drain"]
    assert agent.phase == "preparing"
    assert agent.ends("drain") == ["A: prepare save"]
    assert agent.ends("save") == ["A: approve A"]


def test_a_retried_preparation_leaves_out_what_the_policy_has_lost() -> None:
    agent = Agent(a_rule(prepare=("drain", "save")))
    agent.document(an_event())
    agent.ends("drain", "failed")
    agent.reload(a_rule(prepare=("save",)), hooks=("save", "resume"))
    assert agent.operator("retry") == ["A: prepare save"]


def test_a_retry_of_what_did_not_fail_does_nothing() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    assert agent.operator("retry") == []
    assert (agent.phase, agent.of().operator_action) == ("preparing", "")


# --- Hold.


def test_nothing_is_prepared_for_an_event_that_is_held_before_its_lead() -> None:
    agent = Agent(a_rule(prepare=("drain",), lead=60.0, drain_for=10.0))
    agent.document(an_event())
    assert agent.operator("hold") == []
    assert (agent.phase, agent.wait_message()) == ("held", "an operator holds it")
    assert agent.tick(870) == []
    assert is_ready(agent.workflows)
    assert agent.document(started(an_event())) == []
    assert agent.document() == []
    assert agent.workflows == {}


def test_an_event_that_is_released_before_its_lead_waits_for_it() -> None:
    agent = Agent(a_rule(prepare=(), recover=(), approve="immediately", lead=60.0))
    agent.document(an_event())
    agent.operator("hold")
    assert agent.operator("release") == []
    assert agent.phase == "waiting"
    assert agent.wait_message().startswith("begins at 2026-03-02 12:14:00 UTC")
    assert next_wake_at(agent.workflows, agent.context) == START + timedelta(minutes=14)
    assert agent.tick(870) == ["A: approve A"]


def test_an_event_that_is_released_after_its_lead_is_prepared_for_at_once() -> None:
    agent = Agent(a_rule(prepare=("drain",), lead=60.0))
    agent.document(an_event())
    agent.operator("hold")
    agent.tick(870)
    assert agent.operator("release") == ["A: prepare drain"]


def test_an_approval_overrules_a_hold_and_the_lead() -> None:
    agent = Agent(a_rule(prepare=("drain",), lead=60.0))
    agent.document(an_event())
    agent.operator("hold")
    assert agent.operator("approve") == ["A: prepare drain"]
    assert agent.ends("drain") == ["A: approve A"]


def test_a_hook_that_runs_is_let_end_under_a_hold_and_no_other_begins() -> None:
    agent = Agent(a_rule(prepare=("drain", "save")))
    agent.document(an_event())
    assert agent.operator("hold") == []
    assert agent.phase == "preparing"
    assert agent.ends("drain") == []
    assert (agent.phase, agent.wait_message()) == ("held", "an operator holds it")
    assert agent.operator("release") == ["A: prepare save"]
    assert agent.ends("save") == ["A: approve A"]


def test_an_event_held_during_its_last_hook_is_approved_when_released() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.operator("hold")
    assert agent.ends("drain") == []
    assert (agent.phase, agent.wait_message()) == ("held", "an operator holds it")
    assert agent.operator("release") == ["A: approve A"]


def test_a_drain_goes_on_under_a_hold_and_no_hook_follows_it() -> None:
    agent = Agent(a_rule(prepare=("drain",), drain_for=30.0))
    agent.document(an_event())
    assert agent.operator("hold") == []
    assert (agent.phase, is_ready(agent.workflows)) == ("held", False)
    assert agent.tick(60) == []
    assert agent.operator("release") == ["A: prepare drain"]


def test_a_hook_cut_off_by_a_crash_is_not_begun_again_under_a_hold() -> None:
    agent = Agent(a_rule(prepare=("drain",)))
    agent.document(an_event())
    agent.operator("hold")
    assert agent.restart("boot 1", an_event()) == []
    assert agent.phase == "held"
    assert agent.operator("release") == ["A: prepare drain"]


@pytest.mark.parametrize("early_start", ["cancel", "finish"])
def test_a_hold_ends_with_the_start_and_its_preparation_is_not_begun(early_start: str) -> None:
    agent = Agent(a_rule(prepare=("drain", "save"), on_start=("tell",), on_early_start=early_start))
    agent.document(an_event())
    agent.operator("hold")
    agent.ends("drain")
    assert agent.document(started(an_event())) == ["A: on_start tell"]
    agent.ends("tell")
    assert agent.document() == ["A: recover resume"]


def test_a_held_event_that_is_gone_is_recovered_from() -> None:
    agent = Agent(a_rule(prepare=("drain", "save")))
    agent.document(an_event())
    agent.operator("hold")
    agent.ends("drain")
    assert agent.document() == ["A: recover resume"]


def test_a_hold_under_a_failed_preparation_says_what_failed() -> None:
    agent = Agent(a_rule(prepare=("drain", "save")))
    agent.document(an_event())
    agent.operator("hold")
    agent.ends("drain", "failed")
    assert agent.wait_message() == "hook drain: exit code 1"


def test_an_event_of_days_ahead_is_held_at_once() -> None:
    agent = Agent(a_rule(lead=900.0))
    agent.document(an_event(not_before=START + 200 * NOTICE))
    agent.send(OperatorCommand(workflow_id=agent.of().id, action="hold", user=""))
    assert agent.phase == "held"
    assert "operator: held by an operator" in agent.journal
