"""Starts and stops the hooks of events and of on_clear, takes their results, and estimates how long hooks take."""

from collections.abc import Callable, Mapping
from datetime import datetime

from msgspec.structs import replace

from scheduled_events_agent.engine.messages import (
    ON_CLEAR,
    HookDone,
    HookKey,
    RunOnClear,
    hook_key,
    not_run_result,
)
from scheduled_events_agent.engine.protocols import Executor, Host
from scheduled_events_agent.engine.reporter import EventReporter
from scheduled_events_agent.hooks import durations
from scheduled_events_agent.hooks.run import HookResult, hook_environment
from scheduled_events_agent.imds.document import to_azure_json
from scheduled_events_agent.policy import Hook
from scheduled_events_agent.policy.settings import Settings
from scheduled_events_agent.store import Store
from scheduled_events_agent.telemetry.log import get_logger
from scheduled_events_agent.telemetry.log_ids import LogId
from scheduled_events_agent.workflow import (
    CancelHook,
    HookFinished,
    RunHook,
    Signal,
    Stage,
    Workflow,
    Workflows,
    hook_deadline_at,
)


class HookRuns:
    """Starts and stops hooks through the executor, and takes their results.

    At most one hook of on_clear runs, and none beside a hook of an event.
    """

    def __init__(
        self,
        store: Store,
        executor: Executor,
        machine: Host,
        reporter: EventReporter,
        put: Callable[[HookDone], None],
    ) -> None:
        """``put`` makes a message come back to the engine soon."""
        self._put = put
        self._store = store
        self._executor = executor
        self._machine = machine
        self._reporter = reporter
        self._log = get_logger()
        self._is_on_clear_decided = False
        """Whether it is known if anything was pending at the start."""
        self._on_clear: list[str] = []
        self._has_on_clear_failed = False
        self._is_on_clear_interrupted = False
        """Whether a hook of an event or the mode observe has ended those of on_clear.

        They go on when the agent acts and nothing is pending any more.
        """
        self._delayed: list[RunHook] = []
        """Hooks that wait for the end of an on_clear hook, because it might undo their work."""
        self.cut_short: list[RunHook] = []
        """Hooks that failed while the machine went down; they run again if it stays up after all."""
        self._begun: set[HookKey] = set()
        """Hooks that were cut short after their program had been started, until they end."""
        self._times = durations.decode(store.get_meta("hook_times"))
        self._are_times_saved = True

    def seconds(self, hooks: Mapping[str, Hook]) -> dict[str, float]:
        """By hook: how many seconds it may take."""
        return {name: durations.estimate_seconds(self._times, name, hook) for name, hook in hooks.items()}

    def run(self, workflow: Workflow, effect: RunHook, settings: Settings, vm: str, now: datetime) -> None:
        if self._executor.is_running(ON_CLEAR):
            self._is_on_clear_interrupted = True
            self._executor.cancel_hook(ON_CLEAR, is_urgent=workflow.event.type == "Preempt")
            self._delayed.append(effect)
            return
        event = workflow.event
        not_before = None if workflow.is_over else event.starts_at
        environment = hook_environment(
            event,
            stage=effect.stage,
            rule=workflow.decision.rule,
            vm=vm,
            outcome=workflow.outcome,
            seconds_left=(not_before - now).total_seconds() if not_before else None,
        )
        self._executor.start_hook(
            effect,
            settings.hooks.get(effect.hook),
            environment=environment,
            stdin=to_azure_json(event),
            deadline=self.deadline(workflow, effect.stage, settings.agent.reserve, now),
            event_id=event.id,
        )

    def deadline(self, workflow: Workflow, stage: Stage, reserve: float, now: datetime) -> float | None:
        """When a hook that starts now must have ended, monotonic; None if only its own time limit counts."""
        deadline_at = hook_deadline_at(workflow, stage, reserve, now)
        return None if deadline_at is None else self._machine.monotonic() + (deadline_at - now).total_seconds()

    def cancel(self, cancel: CancelHook) -> None:
        key = (cancel.workflow_id, cancel.stage)
        waiting = [effect for effect in (*self._delayed, *self.cut_short) if hook_key(effect) == key]
        self._delayed = [effect for effect in self._delayed if effect not in waiting]
        self.cut_short = [effect for effect in self.cut_short if effect not in waiting]
        for effect in waiting:
            result = not_run_result(effect.hook, "canceled", "canceled before it started")
            self._put(HookDone(effect, result))
        self._executor.cancel_hook(key, is_urgent=cancel.is_urgent)

    def resume(self) -> None:
        """Run again the hooks that were cut short: the machine stays up."""
        self._delayed += self.cut_short
        self.cut_short = []

    def run_delayed(self, workflows: Workflows, settings: Settings, vm: str, now: datetime) -> None:
        """Start hooks that had to wait, except those of events that are missing now or held by an operator."""
        if not self._delayed or self._executor.is_running(ON_CLEAR) or settings.agent.mode != "act":
            return
        delayed = self._delayed
        self._delayed = []
        for effect in delayed:
            workflow = workflows.get(effect.workflow_id)  # None if it was another VM's
            is_held = workflow is not None and workflow.operator_action == "hold" and effect.stage == "prepare"
            if workflow is not None and (workflow.is_missing or is_held):
                self._delayed.append(effect)
            elif workflow is not None:
                self._log.info(
                    "a hook that had to wait starts now",
                    log_id=LogId.HOOK_DELAYED,
                    event_id=effect.workflow_id,
                    hook=effect.hook,
                )
                self.run(workflow, effect, settings, vm, now)

    def to_signal(self, effect: RunHook, result: HookResult, hook: Hook | None) -> HookFinished | None:
        """The signal for the result; None if the hook counts as not run, because the machine goes down.

        ``hook``: the hook in the policy; None if it is not there.
        """
        self._learn_time(effect, result, hook)
        # A hook that was canceled does not run again.
        if result.outcome not in ("succeeded", "canceled") and self._machine.is_shutting_down():
            # Services and their hooks are stopped in no known order, some before the agent.
            self._log.warning(
                "the machine goes down: this hook counts as not run, and runs again at the next start",
                log_id=LogId.HOOK_CUT_SHORT,
                event_id=effect.workflow_id,
                hook=effect.hook,
                reason=result.detail,
            )
            self.cut_short.append(effect)
            if result.has_run:
                self._begun.add(hook_key(effect))
            return None
        has_run = result.has_run or hook_key(effect) in self._begun
        self._begun.discard(hook_key(effect))
        attempts = f" after {result.attempts} attempts" if result.attempts > 1 else ""
        return HookFinished(
            workflow_id=effect.workflow_id,
            stage=effect.stage,
            hook=effect.hook,
            run=effect.run,
            outcome=result.outcome,
            is_required=hook is None or hook.required,
            has_run=has_run,
            detail=f"{result.detail}{attempts}",
            tail=result.tail,
        )

    @property
    def awaits_clear(self) -> bool:
        """Whether ``decide_on_clear`` is due."""
        is_ended = self._is_on_clear_interrupted and not self._executor.is_running(ON_CLEAR)
        return is_ended or not self._is_on_clear_decided

    def decide_on_clear(self, settings: Settings, vm: str, now: datetime, *, is_clear: bool) -> None:
        """Begin the hooks of on_clear if nothing is pending; otherwise they never run.

        If they were interrupted, go on with them as soon as nothing is pending.
        """
        if not self._is_on_clear_decided:
            self._is_on_clear_decided = True
            self._on_clear = list(settings.on_clear) if is_clear else []
        elif is_clear:
            self._on_clear = [hook for hook in self._on_clear if hook in settings.on_clear]
            self._is_on_clear_interrupted = False
        if is_clear and self._on_clear:
            self._reporter.record("on_clear", f"nothing is pending: {', '.join(self._on_clear)}", now)
            self.run_on_clear(settings, vm)

    def run_on_clear(self, settings: Settings, vm: str) -> None:
        """Start the next hook of on_clear, unless they are interrupted."""
        if settings.agent.mode != "act":
            self._is_on_clear_interrupted = True
        if self._on_clear and not self._is_on_clear_interrupted:
            hook = self._on_clear.pop(0)
            environment = {"SCHEDULED_EVENT_STAGE": "on_clear", "SCHEDULED_EVENT_VM": vm}
            self._executor.start_hook(RunOnClear(hook), settings.hooks.get(hook), environment=environment)

    def end_on_clear(self, result: HookResult, now: datetime, *, is_required: bool) -> bool:
        """Note that a hook of on_clear has ended. Returns whether all of them have run now and succeeded."""
        if self._is_on_clear_interrupted and result.outcome == "canceled":
            self._on_clear.insert(0, result.hook)
        elif result.outcome == "canceled" or (result.outcome != "succeeded" and is_required):
            self._has_on_clear_failed = True
        log_id = LogId.HOOK_SUCCEEDED if result.outcome == "succeeded" else LogId.HOOK_FAILED
        write_log = getattr(self._log, log_id.level)
        write_log(
            "on_clear hook ended", log_id=log_id, hook=result.hook, outcome=result.outcome, reason=result.detail
        )
        self._reporter.record("on_clear", f"hook {result.hook}: {result.detail} ({result.outcome})", now)
        return not self._on_clear and not self._has_on_clear_failed

    def _learn_time(self, effect: RunHook, result: HookResult, hook: Hook | None) -> None:
        if effect.stage == "prepare" and hook is not None and result.attempts:
            self._times = durations.record_run(
                self._times, effect.hook, hook, result.outcome, result.duration_seconds
            )
            self._are_times_saved = False

    def save_times(self) -> None:
        """Raises StoreError."""
        if not self._are_times_saved:
            self._store.set_meta({"hook_times": durations.encode(self._times)})
            self._are_times_saved = True


def with_needed_hooks(old: Settings, new: Settings, workflows: Workflows) -> Settings:
    """The new policy, plus the on_start and recover hooks of the old one that pending events still need."""
    decisions = [workflow.decision for workflow in workflows.values()]
    names = {name for decision in decisions for name in (*decision.on_start, *decision.recover)}
    kept = {name: old.hooks[name] for name in names & old.hooks.keys() - new.hooks.keys()}
    if kept:
        get_logger().warning(
            "hooks that pending events still need are kept until the next start",
            log_id=LogId.POLICY_WARNING,
            hooks=[*kept],
        )
    return replace(new, hooks={**kept, **new.hooks})


def is_aborted_by_stop(signal: Signal) -> bool:
    """Whether a hook has failed, perhaps because the agent is stopping. Then it runs again at the next start."""
    return isinstance(signal, HookFinished) and signal.outcome != "succeeded"
