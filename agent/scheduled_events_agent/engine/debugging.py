"""Details of decisions for a log at level debug: rules that do not match, and the answer of each gate."""

from collections.abc import Callable, Iterable

from scheduled_events_agent.policy import Facts, passed_over
from scheduled_events_agent.status.messages import wait_in_words
from scheduled_events_agent.telemetry.log import get_logger, is_debugging
from scheduled_events_agent.telemetry.log_ids import LogId
from scheduled_events_agent.workflow import Board, Context, Step, Workflow, gate_answers


class DebugTeller:
    """Logs the details of decisions. At any level but debug it computes nothing."""

    def __init__(self, is_told: Callable[[str], bool]) -> None:
        """``is_told``: whether the log has lines about the event of this workflow at all."""
        self._is_told = is_told
        self._log = get_logger()
        self._answers: dict[str, dict[str, str]] = {}
        """By workflow and gate: the answer that was logged last."""

    def tell(self, steps: Iterable[Step], board: Board, context: Context) -> None:
        """Log the reasons for these steps, and the present answers of the gates."""
        if not is_debugging():
            self._answers.clear()
            return
        try:
            self._tell(steps, board, context)
        except Exception:  # noqa: BLE001 - a bug in debug lines must not stop the agent
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
            self._log.debug(f"rule {rule} does not match", reason=reason, **_about(workflow))

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
