"""What only a log at level debug has of decisions: rules that were passed over, and what each gate answers."""

from collections.abc import Callable, Iterable

from scheduled_events_agent.policy import Facts, passed_over
from scheduled_events_agent.status.messages import wait_in_words
from scheduled_events_agent.telemetry.log import get_logger, is_debugging
from scheduled_events_agent.telemetry.log_ids import LogId
from scheduled_events_agent.workflow import Board, Context, Step, Workflow, gate_answers


class DebugTeller:
    """Nothing is computed here at any other level."""

    def __init__(self, is_told: Callable[[str], bool]) -> None:
        """``is_told``: whether the log tells of the event of this workflow at all."""
        self._is_told = is_told
        self._log = get_logger()
        self._answers: dict[str, dict[str, str]] = {}
        """By workflow and gate: what was told last."""

    def tell(self, steps: Iterable[Step], board: Board, context: Context) -> None:
        """What led to these steps, and what the gates answer now."""
        if not is_debugging():
            self._answers.clear()
            return
        try:
            self._tell(steps, board, context)
        except Exception:  # noqa: BLE001 - what is told for looking into must not stop the agent
            self._log.exception("a bug in the agent: debug lines are missing", log_id=LogId.EVENT_FAULT)

    def _tell(self, steps: Iterable[Step], board: Board, context: Context) -> None:
        for step in steps:
            is_decided = any(note.kind == "decided" for note in step.notes)
            if is_decided and self._is_told(step.workflow.id):
                self._tell_rules(step.workflow, context)
        told = self._answers
        self._answers = {
            key: self._tell_gates(workflow, context, told.get(key, {}))
            for key, workflow in board.items()
            if self._is_told(key)
        }

    def _tell_rules(self, workflow: Workflow, context: Context) -> None:
        facts = Facts(names=context.names, noticed_at=workflow.noticed_at)
        for rule, reason in passed_over(context.rules, workflow.decision.rule, workflow.event, facts):
            self._log.debug(f"rule {rule} is passed over", reason=reason, **_about(workflow))

    def _tell_gates(self, workflow: Workflow, context: Context, told: dict[str, str]) -> dict[str, str]:
        answers = {}
        for name, leave in gate_answers(workflow, context).items():
            why = wait_in_words(workflow, leave.waits) if leave.waits else ""
            answers[name] = f"{leave.answer}: {why}" if why else leave.answer
            if answers[name] != told.get(name):
                self._log.debug(f"gate {name}", reason=answers[name], **_about(workflow))
        return answers


def _about(workflow: Workflow) -> dict[str, str]:
    return {"event_id": workflow.event.id, "type": workflow.event.type}
