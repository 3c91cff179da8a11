"""Details of decisions for a log at level debug: rules that do not match, and the answer of each gate."""

from collections.abc import Callable, Iterable

from scheduled_events_agent.policy import MatchContext, rejected_rules
from scheduled_events_agent.status.messages import wait_message
from scheduled_events_agent.telemetry.log import get_logger, is_debugging
from scheduled_events_agent.telemetry.log_ids import LogId
from scheduled_events_agent.workflow import Context, Transition, Workflow, Workflows, gate_results


class DebugReporter:
    """Logs the details of decisions. At any level but debug it computes nothing."""

    def __init__(self, is_logged: Callable[[str], bool]) -> None:
        """``is_logged``: whether the log has lines about the event of this workflow at all."""
        self._is_logged = is_logged
        self._log = get_logger()
        self._answers: dict[str, dict[str, str]] = {}
        """By workflow and gate: the answer that was logged last."""

    def report(self, transitions: Iterable[Transition], workflows: Workflows, context: Context) -> None:
        """Log the reasons for these transitions, and the present answers of the gates."""
        if not is_debugging():
            self._answers.clear()
            return
        try:
            self._report(transitions, workflows, context)
        except Exception:  # noqa: BLE001 - a bug in debug lines must not stop the agent
            self._log.exception("a bug in the agent: debug lines are missing", log_id=LogId.EVENT_BUG)

    def _report(self, transitions: Iterable[Transition], workflows: Workflows, context: Context) -> None:
        for transition in transitions:
            is_decided = any(record.kind == "decided" for record in transition.records)
            if is_decided and self._is_logged(transition.workflow.id):
                self._log_rejected_rules(transition.workflow, context)
        before = self._answers
        self._answers = {
            key: self._log_gates(workflow, context, before.get(key, {}))
            for key, workflow in workflows.items()
            if self._is_logged(key)
        }

    def _log_rejected_rules(self, workflow: Workflow, context: Context) -> None:
        facts = MatchContext(names=context.names, not_before_seen_at=workflow.not_before_seen_at)
        for rule, reason in rejected_rules(context.rules, workflow.decision.rule, workflow.event, facts):
            self._log.debug(f"rule {rule} does not match", reason=reason, **_about(workflow))

    def _log_gates(self, workflow: Workflow, context: Context, before: dict[str, str]) -> dict[str, str]:
        answers = {}
        for name, result in gate_results(workflow, context).items():
            why = wait_message(workflow, result.wait_reason) if result.wait_reason else ""
            answers[name] = f"{result.verdict}: {why}" if why else result.verdict
            if answers[name] != before.get(name):
                self._log.debug(f"gate {name}", reason=answers[name], **_about(workflow))
        return answers


def _about(workflow: Workflow) -> dict[str, str]:
    return {"event_id": workflow.event.id, "type": workflow.event.type}
