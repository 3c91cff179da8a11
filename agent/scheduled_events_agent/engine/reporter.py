"""Reports notes of events to log and metrics, and news of the engine itself to log and journal."""

from collections import deque
from collections.abc import Iterable, Sequence
from datetime import datetime

from scheduled_events_agent.status import CommandOptions
from scheduled_events_agent.status.actions import command, quoted
from scheduled_events_agent.store import Store, StoreError
from scheduled_events_agent.telemetry.log import FailureLog, get_logger
from scheduled_events_agent.telemetry.log_ids import LogId
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.workflow import Note, Step, Workflow

# If there are more new events than this at once, only the first few are logged.
_MAX_TOLD_AT_ONCE = 10
_TOLD_OF_MANY = 3
# Number of records that wait until the journal can be written; more drop the oldest.
_MAX_UNWRITTEN = 100
_LOUD_NOTES = ("held", "without_slot", "hook_missing", "approval_needed", "approval_failed", "recovery_failed")
# These kinds are logged for every event, because the VM is out of service meanwhile.
_NEVER_LEFT_OUT = ("hook_missing", "recovery_failed")


class Teller:
    """Reports events. If there are very many at once, the log has only a few; journal and metrics have all."""

    def __init__(self, store: Store, metrics: Metrics, command_options: CommandOptions) -> None:
        self._command_options = command_options
        self._store = store
        self._metrics = metrics
        self._log = get_logger()
        self._left_out: set[str] = set()
        self._unwritten: deque[tuple[str, str, datetime]] = deque(maxlen=_MAX_UNWRITTEN)
        self._faults = FailureLog("handling an event", LogId.EVENT_FAULT)

    def tell_steps(self, steps: Sequence[Step], now: datetime) -> None:
        """Report every note of the steps of one cycle; the notes have their texts already."""
        self.leave_out([step.workflow.id for step in steps if any(note.kind == "seen" for note in step.notes)])
        for step in steps:
            for note in step.notes:
                self._tell(step.workflow, note, now)

    def _tell(self, workflow: Workflow, note: Note, now: datetime) -> None:
        is_bad = note.kind in _LOUD_NOTES or (note.kind == "hook_finished" and note.outcome != "succeeded")
        fields = {
            "event_id": workflow.event.id,
            "type": workflow.event.type,
            "rule": workflow.decision.rule,
            "phase": workflow.phase,
        }
        if note.kind == "approval_needed":
            fields["command"] = command(self._command_options, "approve", quoted(workflow.event.id))
        if note.hook:
            fields |= {"hook": note.hook, "stage": note.stage}
        ended = LogId.HOOK_FAILED if is_bad else LogId.HOOK_SUCCEEDED
        log_id = ended if note.kind == "hook_finished" else LogId[note.kind.upper()]
        if self.is_told(workflow.id) or note.kind in _NEVER_LEFT_OUT:
            tell = self._log.warning if is_bad else self._log.info
            tell(
                note.kind.replace("_", " "),
                log_id=log_id,
                sentence=note.log_line,
                reason=note.text,
                **fields,
            )
        self._metrics.record_note(workflow, note, now.timestamp())

    def leave_out(self, workflow_ids: list[str]) -> None:
        """If there are very many of these workflows, log only the first few from now on."""
        if len(workflow_ids) > _MAX_TOLD_AT_ONCE:
            self._left_out.update(workflow_ids[_TOLD_OF_MANY:])
            text = "very many events at once: only the first ones are logged, the command history shows all"
            self._log.warning(text, log_id=LogId.MANY_EVENTS, events=len(workflow_ids), told=_TOLD_OF_MANY)

    def is_told(self, workflow_id: str) -> bool:
        """Whether this event is logged."""
        return workflow_id not in self._left_out

    def forget_closed(self, open_ids: Iterable[str]) -> None:
        """Forget workflows that are closed; ``open_ids`` are those that are still open."""
        self._left_out.intersection_update(open_ids)

    def tell_pause(self, seconds: float, now: datetime) -> None:
        """Report a pause of the machine."""
        self._metrics.pause_seconds.observe(seconds)
        self._metrics.last_pause_seconds.set(seconds)
        self._log.warning("this machine was paused", log_id=LogId.MACHINE_PAUSED, seconds=round(seconds, 1))
        self.record("pause", f"was paused for {seconds:.1f}s", now)

    def tell_recreated(self, loss: str, now: datetime) -> None:
        """Report that the state file was removed or replaced while it was open."""
        self._metrics.store_errors.labels("removed").inc()
        text = "the state file was removed or replaced and has been created again; nothing that was in it is lost"
        self._log.error(text, log_id=LogId.STATE_LOST, reason=loss)
        self.record("state_recreated", f"{loss}; created again, nothing is lost", now)

    def tell_fault(self, workflow_id: str, fault: Exception, now: float) -> None:
        """Report a bug in the agent; ``now`` is monotonic."""
        self._metrics.faults.inc()
        self._faults.failed(type(fault).__name__, f"{workflow_id}: {fault!r}", now)

    def record(self, kind: str, text: str, now: datetime) -> None:
        """Write to the journal as soon as that is possible; the log has the message in any case."""
        self._unwritten.append((kind, text, now))
        self.flush()

    def flush(self) -> None:
        """Write the records that are not in the journal yet."""
        if not self._unwritten:
            return
        try:
            self._store.record_all(self._unwritten)
            self._unwritten.clear()
        except StoreError as error:
            self._metrics.store_errors.labels(error.kind).inc()

    @property
    def has_unwritten(self) -> bool:
        """Whether records wait for ``flush``."""
        return bool(self._unwritten)
