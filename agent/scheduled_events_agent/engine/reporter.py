"""What the engine tells: each note of an event to log and metrics, and its own news to log and journal."""

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

# Of more new events than this at once, the log tells of the first few.
_MAX_TOLD_AT_ONCE = 10
_TOLD_OF_MANY = 3
# Records that wait until the journal can be written; of more, the oldest go.
_MAX_UNWRITTEN = 100
_LOUD_NOTES = ("held", "without_slot", "hook_missing", "approval_needed", "approval_failed", "recovery_failed")
# Of what this VM is out of service for, the log has every event.
_NEVER_LEFT_OUT = ("hook_missing", "recovery_failed")


class Teller:
    """Of very many events at once the log has only a few; journal and metrics have all of them."""

    def __init__(self, store: Store, metrics: Metrics, command_options: CommandOptions) -> None:
        self._command_options = command_options
        self._store = store
        self._metrics = metrics
        self._log = get_logger()
        self._left_out: set[str] = set()
        self._unwritten: deque[tuple[str, str, datetime]] = deque(maxlen=_MAX_UNWRITTEN)
        self._faults = FailureLog("handling an event", LogId.EVENT_FAULT)

    def tell_steps(self, steps: Sequence[Step], now: datetime) -> None:
        """Every note of the steps of one cycle; they have their messages."""
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
        """If these are very many, log only the first few from now on."""
        if len(workflow_ids) > _MAX_TOLD_AT_ONCE:
            self._left_out.update(workflow_ids[_TOLD_OF_MANY:])
            text = "very many events at once: the log tells of the first ones, the command history of all"
            self._log.warning(text, log_id=LogId.MANY_EVENTS, events=len(workflow_ids), told=_TOLD_OF_MANY)

    def is_told(self, workflow_id: str) -> bool:
        """Whether the log tells of this event."""
        return workflow_id not in self._left_out

    def forget_closed(self, open_ids: Iterable[str]) -> None:
        """Only these are still open."""
        self._left_out.intersection_update(open_ids)

    def tell_pause(self, seconds: float, now: datetime) -> None:
        """The machine stood still."""
        self._metrics.pause_seconds.observe(seconds)
        self._metrics.last_pause_seconds.set(seconds)
        self._log.warning("this machine stood still", log_id=LogId.MACHINE_PAUSED, seconds=round(seconds, 1))
        self.record("pause", f"stood still for {seconds:.1f}s", now)

    def tell_recreated(self, loss: str, now: datetime) -> None:
        """The state file was removed or replaced while it was open."""
        self._metrics.store_errors.labels("removed").inc()
        text = "the state file was removed or replaced and has been made anew; nothing that was in it is lost"
        self._log.error(text, log_id=LogId.STATE_LOST, reason=loss)
        self.record("state_recreated", f"{loss}; made anew, nothing is lost", now)

    def tell_fault(self, workflow_id: str, fault: Exception, now: float) -> None:
        """A bug of the agent's own; ``now`` is monotonic."""
        self._metrics.faults.inc()
        self._faults.failed(type(fault).__name__, f"{workflow_id}: {fault!r}", now)

    def record(self, kind: str, text: str, now: datetime) -> None:
        """Into the journal, as soon as that can be written; the log has it in any case."""
        self._unwritten.append((kind, text, now))
        self.flush()

    def flush(self) -> None:
        """Write the records that the journal has not taken yet."""
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
