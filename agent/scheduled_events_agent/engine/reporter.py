"""Reports records of events to log and metrics, and news of the engine itself to log and journal."""

from collections import deque
from collections.abc import Iterable, Sequence
from datetime import datetime

from scheduled_events_agent.status import AgentRecordKind, CommandOptions
from scheduled_events_agent.status.actions import command, quoted
from scheduled_events_agent.store import AgentRecord, Store, StoreError
from scheduled_events_agent.telemetry.log import ChangeLogger, get_logger
from scheduled_events_agent.telemetry.log_ids import LogId
from scheduled_events_agent.telemetry.metrics import Metrics
from scheduled_events_agent.workflow import Record, Transition, Workflow

# If there are more new events than this at once, only the first few are logged.
_MAX_LOGGED_AT_ONCE = 10
_LOGGED_OF_MANY = 3
# Number of records that wait until the journal can be written; more drop the oldest.
_MAX_UNWRITTEN = 100
# These kinds are logged for every event, because the VM is out of service meanwhile.
_NEVER_MUTED = ("hook_missing", "recovery_failed")


class EventReporter:
    """Reports events. If there are very many at once, the log has only a few; journal and metrics have all."""

    def __init__(self, store: Store, metrics: Metrics, command_options: CommandOptions) -> None:
        self._command_options = command_options
        self._store = store
        self._metrics = metrics
        self._log = get_logger()
        self._muted: set[str] = set()
        self._unwritten: deque[AgentRecord] = deque(maxlen=_MAX_UNWRITTEN)
        self._bugs = ChangeLogger("handling an event", LogId.EVENT_BUG)

    def report_transitions(self, transitions: Sequence[Transition], now: datetime) -> None:
        """Report every record of the transitions of one cycle; the records have their texts already."""
        self.mute(
            [
                transition.workflow.id
                for transition in transitions
                if any(record.kind == "seen" for record in transition.records)
            ]
        )
        for transition in transitions:
            for record in transition.records:
                self._report(transition.workflow, record, now)

    def _report(self, workflow: Workflow, record: Record, now: datetime) -> None:
        fields = {
            "event_id": workflow.event.id,
            "type": workflow.event.type,
            "rule": workflow.decision.rule,
            "phase": workflow.phase,
        }
        if record.kind == "approval_needed":
            fields["command"] = command(self._command_options, "approve", quoted(workflow.event.id))
        if record.hook:
            fields |= {"hook": record.hook, "stage": record.stage}
        if record.kind == "hook_finished":
            log_id = LogId.HOOK_SUCCEEDED if record.outcome == "succeeded" else LogId.HOOK_FAILED
        elif record.kind == "vm_unknown":
            log_id = LogId.EVENT_VM_UNKNOWN
        else:
            log_id = LogId[record.kind.upper()]
        if self.is_logged(workflow.id) or record.kind in _NEVER_MUTED:
            write_log = getattr(self._log, log_id.level)
            write_log(
                record.kind.replace("_", " "),
                log_id=log_id,
                sentence=record.log_line,
                reason=record.text,
                **fields,
            )
        self._metrics.count_record(workflow, record, now.timestamp())

    def mute(self, workflow_ids: list[str]) -> None:
        """If there are very many of these workflows, log only the first few from now on."""
        if len(workflow_ids) > _MAX_LOGGED_AT_ONCE:
            self._muted.update(workflow_ids[_LOGGED_OF_MANY:])
            text = "very many events at once: only the first ones are logged, the command history shows all"
            self._log.warning(text, log_id=LogId.MANY_EVENTS, events=len(workflow_ids), logged=_LOGGED_OF_MANY)

    def is_logged(self, workflow_id: str) -> bool:
        """Whether this event is logged."""
        return workflow_id not in self._muted

    def prune_muted(self, open_ids: Iterable[str]) -> None:
        """Forget workflows that are closed; ``open_ids`` are those that are still open."""
        self._muted.intersection_update(open_ids)

    def report_pause(self, seconds: float, now: datetime) -> None:
        """Report a pause of the machine."""
        self._metrics.pause_seconds.observe(seconds)
        self._metrics.last_pause_seconds.set(seconds)
        self._log.warning("this machine was paused", log_id=LogId.MACHINE_PAUSED, seconds=round(seconds, 1))
        self.record("machine_paused", f"was paused for {seconds:.1f}s", now)

    def report_recreated(self, loss: str, now: datetime) -> None:
        """Report that the state file was removed or replaced while it was open."""
        self._metrics.store_errors.labels("removed").inc()
        text = "the state file was removed or replaced and has been created again; nothing that was in it is lost"
        self._log.error(text, log_id=LogId.STATE_LOST, reason=loss)
        self.record("state_recreated", f"{loss}; created again, nothing is lost", now)

    def report_bug(self, workflow_id: str, bug: Exception, now: float) -> None:
        """Report a bug in the agent; ``now`` is monotonic."""
        self._metrics.bugs.inc()
        self._bugs.failed(type(bug).__name__, f"{workflow_id}: {bug!r}", now)

    def record(self, kind: AgentRecordKind, text: str, now: datetime) -> None:
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
