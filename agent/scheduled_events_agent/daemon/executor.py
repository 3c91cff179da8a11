"""Carries out the engine's decisions on threads, so that the engine does not wait for them.

Invariant: each hook and each approval is answered through the inbox, even one that could not begin.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial

from scheduled_events_agent import AgentError, host
from scheduled_events_agent.daemon.background import run_in_background
from scheduled_events_agent.daemon.poller import Put, request_error
from scheduled_events_agent.engine import HookCommand, HookDone, HookKey, hook_key, not_run_result
from scheduled_events_agent.hooks.run import HookQueue, HookQueues, HookRun
from scheduled_events_agent.host import processes
from scheduled_events_agent.imds.client import ImdsClient
from scheduled_events_agent.policy import Hook
from scheduled_events_agent.policy.durations import plural
from scheduled_events_agent.policy.settings import Settings
from scheduled_events_agent.status.facts import RunningHook
from scheduled_events_agent.status.messages import of_event
from scheduled_events_agent.telemetry.log import Logger, get_logger, is_debugging
from scheduled_events_agent.workflow import ApprovalAnswered, Approve


class ThreadExecutor:
    """Runs each hook and each request to approve on its own thread, so that none delays another.

    For the engine's thread.
    """

    def __init__(
        self,
        connect: Callable[[], ImdsClient],
        put: Put,
        instance: str,
        settings: Callable[[], Settings],
    ) -> None:
        """``settings`` returns the policy in force; for any thread."""
        self._connect = connect
        self._put = put
        self._settings = settings
        self._instance = instance
        self._queues = HookQueues(HookQueue)
        self._runs: dict[HookKey, tuple[HookRun, HookCommand]] = {}
        self._unanswered: set[str] = set()

    def start_hook(
        self,
        effect: HookCommand,
        hook: Hook | None,
        *,
        environment: dict[str, str],
        stdin: bytes = b"",
        deadline: float | None = None,
        event_id: str = "",
    ) -> None:
        """Run the hook of ``effect``; its result goes to the inbox. Never raises."""
        name = effect.hook
        if hook is None:
            result = not_run_result(name, "not_started", "there is no such hook in the policy any more")
            self._put(HookDone(effect, result))
            return
        log = get_logger().bind(hook=name, stage=environment["SCHEDULED_EVENT_STAGE"], event_id=event_id)
        run = HookRun(
            name,
            hook,
            environment=environment,
            stdin=stdin,
            deadline=deadline,
            on_line=partial(_log_output, log, _of_hook(name, environment)),
            instance=self._instance,
            queues=self._queues,
            rank=effect.rank,
            load_current=lambda: self._settings().hooks.get(name),
            may_begin=lambda: self._settings().agent.mode == "act",
        )
        if is_debugging():
            _log_command(log, hook, deadline)
        self._runs[hook_key(effect)] = (run, effect)
        run_in_background(
            lambda: self._put(HookDone(effect, run.run())),
            f"hook-{name}",
            lambda _, reason: self._put(HookDone(effect, not_run_result(name, "not_started", reason))),
        )

    def cancel_hook(self, key: HookKey, *, is_urgent: bool) -> None:
        """End the hook if it is running; its result says canceled. ``is_urgent``: see ``HookRun.cancel``."""
        if key in self._runs:
            self._runs[key][0].cancel(is_urgent=is_urgent)

    def set_deadline(self, key: HookKey, deadline: float | None) -> None:
        """NotBefore has moved."""
        if key in self._runs:
            self._runs[key][0].set_deadline(deadline)

    def hook_received(self, effect: HookCommand) -> None:
        """Note that the hook's result has been taken from the inbox."""
        self._runs.pop(hook_key(effect), None)

    def is_running(self, key: HookKey) -> bool:
        return key in self._runs

    def reap(self) -> None:
        """Release orphans that have ended: those of hooks, and for PID 1 of a container those of any process."""
        processes.reap_zombies()

    def is_busy(self) -> bool:
        return bool(self._runs or self._unanswered)

    def running(self) -> tuple[RunningHook, ...]:
        """The hooks that run or wait for another run, for any thread."""
        return tuple(
            [
                RunningHook(
                    workflow_id=effect.workflow_id,
                    stage=effect.stage,
                    hook=effect.hook,
                    state="queued" if run.is_queued else "running",
                    since=run.since,
                    limit_seconds=None if run.is_queued else run.limit_seconds,
                )
                for run, effect in list(self._runs.values())
            ]
        )

    def cancel_all(self, grace_seconds: float) -> None:
        """End every hook within ``grace_seconds``."""
        for run, _ in self._runs.values():
            run.cancel()
            run.set_deadline(time.monotonic() + grace_seconds)

    def approve(self, approvals: list[Approve], incarnation: str) -> None:
        """Send all of them in one request; each is answered through the inbox."""

        def work() -> None:
            kind = detail = ""
            try:
                client = self._connect()
                client.approve([approve.event_id for approve in approvals], incarnation)
            except (AgentError, OSError) as raised:
                error = request_error(raised)
                kind, detail = error.kind, str(error)
            self._answer(approvals, kind, detail)

        self._unanswered |= {approve.workflow_id for approve in approvals}
        run_in_background(work, "approval", partial(self._answer, approvals))

    def approval_received(self, workflow_id: str) -> None:
        """Note that the answer to the approval has been taken from the inbox."""
        self._unanswered.discard(workflow_id)

    def _answer(self, approvals: list[Approve], kind: str, detail: str) -> None:
        for approve in approvals:
            self._put(ApprovalAnswered(workflow_id=approve.workflow_id, error_kind=kind, detail=detail))


def _of_hook(hook: str, environment: Mapping[str, str]) -> str:
    """The beginning of a log line for people that is about this run of a hook."""
    event_id = environment.get("SCHEDULED_EVENT_ID", "")
    text = f"hook {hook}"
    return of_event(environment["SCHEDULED_EVENT_TYPE"], event_id, text) if event_id else text


def _log_command(log: Logger, hook: Hook, deadline: float | None) -> None:
    """Log which program the hook runs. Arguments and shell lines may hold secrets, and are not logged."""
    command = "a line for the shell"
    if hook.run is not None:
        program, *arguments = hook.run
        command = f"{program} with {plural(len(arguments), 'argument')}"
    log.debug(
        "hook command",
        command=command,
        account=hook.user or host.account_name(),
        limit_seconds=hook.timeout,
        attempts=hook.attempts,
        deadline_seconds=None if deadline is None else round(deadline - time.monotonic(), 1),
    )


def _log_output(log: Logger, about: str, line: str) -> None:
    log.info("hook output", sentence=f"{about}: {line}", line=line)
