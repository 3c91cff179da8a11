"""A pytest plugin to test a policy and its hooks: simulated Azure, and for each VM the real agent as a process.

``pytest_plugins = ["scheduled_events_agent.simulator.testing"]`` in conftest.py switches it on.
Invariant: after a test, no process that it started is left.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import pytest

import scheduled_events_agent
from scheduled_events_agent.host import processes
from scheduled_events_agent.policy import Hook
from scheduled_events_agent.policy.load import parse_settings
from scheduled_events_agent.policy.schema import plain
from scheduled_events_agent.policy.settings import Settings
from scheduled_events_agent.simulator.simulation import TIMEOUT_SECONDS, Simulator
from scheduled_events_agent.store import Store, StoreError

if TYPE_CHECKING:
    from scheduled_events_agent.status import JournalRecord

T = TypeVar("T")

_STOP_SECONDS = 5.0
_PAUSE_SECONDS = 0.05
# Notes the variables that a hook was given, then becomes the hook.
_RECORDER = """\
import json, os, subprocess, sys
notes, name, shell, *command = sys.argv[1:]
given = {key: value for key, value in os.environ.items() if key.startswith("SCHEDULED_EVENT_")}
with open(notes, "a", encoding="utf-8") as file:
    file.write(json.dumps({"hook": name, "given": given}) + "\\n")
try:
    if os.name == "nt":
        sys.exit(subprocess.call(shell or command, shell=bool(shell)))
    command = ["/bin/sh", "-c", shell] if shell else command
    os.execvp(command[0], command)
except OSError as error:
    sys.exit(f"cannot be started: {command[0]}: {error.strerror}")
"""


class ExpectationError(AssertionError):
    """A condition that a test waited for was not met."""


class HookResult(msgspec.Struct, frozen=True, kw_only=True):
    """A hook that has run, its attempts included."""

    name: str
    stage: str
    """The stage: prepare, on_start or recover."""
    event_id: str
    outcome: str
    """The outcome: succeeded, failed, timed_out, canceled or not_started."""
    reason: str
    """A sentence, such as ``hook drain: exit code 3 (failed)``."""
    output: str
    """The end of the hook's output, 4 KiB at most."""
    environment: dict[str, str]
    """The SCHEDULED_EVENT_* variables of its last attempt; empty if it has a ``user``."""


class ScheduledEvents:
    """A simulated Azure, and an agent of one of its VMs that runs once ``run`` is called.

    The agent keeps its state from one ``run`` to the next. A wait that is too long raises ExpectationError.
    """

    def __init__(self, directory: Path, azure: Simulator, vm: str = "") -> None:
        """``vm``: the VM on which the agent runs; by default the first one."""
        self.azure = azure
        """The service: ``schedule``, ``approve``, ``cancel``, ``end``, ``fault``, ``wait_gone`` ..."""
        self.directory = directory
        self.vm = vm or next(iter(azure.vms))
        self._others: dict[str, ScheduledEvents] = {}
        self._policy_file = directory / "policy.json"
        self._state_dir = directory / "state"
        self._hooks_file = directory / "hooks.jsonl"
        self._recorder_file = directory / "record_hook.py"
        self._log_file = directory / "agent.log"
        self._process: subprocess.Popen[bytes] | None = None

    def agent_of(self, vm: str) -> "ScheduledEvents":
        """The agent of another VM, with the same simulated Azure."""
        if vm == self.vm:
            return self
        if vm not in self._others:
            self.azure.endpoint(vm)  # raises for a VM that is not there
            directory = self.directory / f"agent-{len(self._others) + 2}"
            directory.mkdir(mode=0o700)
            self._others[vm] = ScheduledEvents(directory, self.azure, vm)
        return self._others[vm]

    def all_agents(self) -> "tuple[ScheduledEvents, ...]":
        """This agent, and every other one that ``agent_of`` has returned."""
        return (self, *self._others.values())

    # Start and stop

    def run(
        self,
        policy: str | os.PathLike[str],
        *,
        hooks: Mapping[str, Sequence[str | os.PathLike[str]]] | None = None,
    ) -> None:
        """Start the agent with a policy file; returns when it has polled.

        ``hooks``: programs and arguments to run in place of what the policy names, by the hook's name, such as a
        script of this checkout in place of the one that is installed. A Path among them is made absolute, for
        hooks run elsewhere. A ``user`` of such a hook is left out.

        The test sets the policy's ``imds``, ``vm``, ``agent.listen``, ``agent.state_dir`` and ``agent.log``.
        Raises ConfigError, with a line for each thing that is wrong with the policy.
        """
        if self._process is not None:
            raise ExpectationError("the agent runs already: stop() or kill() it first")
        settings = parse_settings(Path(policy).read_bytes(), str(policy)).settings
        unknown = set(hooks or ()) - set(settings.hooks)
        if unknown:
            known = ", ".join(settings.hooks) or "none"
            raise ValueError(f"hooks: {policy} has no hook {', '.join(sorted(unknown))}; it has {known}")
        self._recorder_file.write_text(_RECORDER, encoding="utf-8")
        self._write_policy(settings, hooks or {})
        polls = self.azure.polls(self.vm)
        self._start()
        self._wait_until(lambda: self.azure.polls(self.vm) > polls, "the agent had polled", TIMEOUT_SECONDS)

    def stop(self) -> None:
        """Ask the agent to stop, and wait for its end (on Windows it is killed).

        Hooks that still run are ended too: those of an agent that was killed, and has not run again.
        """
        self._end(subprocess.Popen.terminate)
        processes.kill_leftovers(f"{(self._state_dir / 'state.db').resolve()}:")

    def kill(self) -> None:
        """End the agent at once, as a power cut would; ``run`` starts it again with the state that it had."""
        self._end(subprocess.Popen.kill)

    @property
    def log(self) -> str:
        """The agent's log so far, over all its runs."""
        return self._log_file.read_text(encoding="utf-8", errors="replace") if self._log_file.exists() else ""

    # Results

    def hooks(self, event_id: str = "", *, name: str = "", stage: str = "") -> tuple[HookResult, ...]:
        """Hooks that have ended, oldest first: all, or those of one event, name or stage."""
        environments = self._environments()
        return tuple(
            HookResult(
                name=entry.hook,
                stage=entry.stage,
                event_id=entry.event_id,
                outcome=entry.outcome,
                reason=entry.text,
                output=entry.detail,
                environment=environments.get((entry.hook, entry.event_id.casefold(), entry.stage), {}),
            )
            for entry in self._journal()
            if entry.kind in ("hook_finished", "hook_canceled")
            and entry.outcome
            and (not event_id or self._is(entry.event_id, event_id))
            and name in ("", entry.hook)
            and stage in ("", entry.stage)
        )

    def wait_hook(
        self,
        name: str,
        *,
        event_id: str = "",
        stage: str = "",
        count: int = 1,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> HookResult:
        """Wait until the hook has ended for the ``count``-th time, and return how."""
        __tracebackhide__ = True

        def found() -> tuple[HookResult, ...]:
            ends = self.hooks(event_id, name=name, stage=stage)
            return ends if len(ends) >= count else ()

        times = f"hook {name} had ended" if count == 1 else f"hook {name} had ended {count} times"
        return self._wait_until(found, times, timeout_seconds)[count - 1]

    def wait_held(self, event_id: str, timeout_seconds: float = TIMEOUT_SECONDS) -> str:
        """Wait until the agent holds the event, and return the reason."""
        return self._wait_record("held", event_id, "was held", timeout_seconds)

    def wait_approved(self, event_id: str, timeout_seconds: float = TIMEOUT_SECONDS) -> str:
        """Wait until Azure has accepted the agent's approval, and return why it was given."""
        self._wait_record("approved", event_id, "was approved by the agent", timeout_seconds)
        return self._wait_record("approving", event_id, "was approved by the agent", timeout_seconds)

    def wait_recovery_failed(self, event_id: str, timeout_seconds: float = TIMEOUT_SECONDS) -> str:
        """Wait until a recover hook has failed and the event waits for an operator, and return why."""
        return self._wait_record("recovery_failed", event_id, "had failed to be recovered from", timeout_seconds)

    def wait_closed(self, event_id: str, timeout_seconds: float = TIMEOUT_SECONDS) -> str:
        """Wait until the agent is done with the event, recovery included, and return its last journal entry."""
        return self._wait_record("closed", event_id, "was closed", timeout_seconds)

    def was_approved(self, event_id: str) -> bool:
        """Whether this agent has ever sent an approval of the event that Azure accepted."""
        return any(request.vm == self.vm for request in self.azure.approvals(event_id))

    def journal(self, event_id: str = "") -> tuple[str, ...]:
        """The entries of the agent's journal for the event, or for all: ``kind: text``, oldest first."""
        return tuple(
            f"{entry.kind}: {entry.text}"
            for entry in self._journal()
            if not event_id or self._is(entry.event_id, event_id)
        )

    # How

    def _write_policy(self, settings: Settings, hooks: Mapping[str, Sequence[str | os.PathLike[str]]]) -> None:
        replace = msgspec.structs.replace
        own = {
            name: replace(settings.hooks[name], run=tuple(map(_argument, run)), shell=None, user=None)
            for name, run in hooks.items()
        }
        recorded = {name: self._recorded(name, hook) for name, hook in {**settings.hooks, **own}.items()}
        changed = replace(
            settings,
            hooks=recorded,
            imds=replace(settings.imds, endpoint=self.azure.endpoint(self.vm), poll_interval=0.25),
            vm=replace(settings.vm, name=None, aliases=()),
            agent=replace(
                settings.agent,
                listen="127.0.0.1:0",
                state_dir=str(self._state_dir),
                log=replace(settings.agent.log, level="info", format="json"),
            ),
        )
        content = json.dumps(plain(changed, Settings), ensure_ascii=False, indent=2)
        self._policy_file.write_text(content, encoding="utf-8")

    def _recorded(self, name: str, hook: Hook) -> Hook:
        """The hook, noting its environment before it begins; one of another account could not write that file."""
        if hook.user is not None:
            return hook
        program = (sys.executable, "-I", "-S", str(self._recorder_file), str(self._hooks_file), name)
        return msgspec.structs.replace(hook, run=(*program, hook.shell or "", *(hook.run or ())), shell=None)

    def _start(self) -> None:
        home = str(Path(scheduled_events_agent.__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
        # -P: a folder called agent beside the tests is not the agent.
        command = [sys.executable, "-P", "-m", "scheduled_events_agent", "run", "--config", str(self._policy_file)]
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--stop-timeout", f"{_STOP_SECONDS:g}s"],
                cwd=self.directory,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def _end(self, how: Callable[["subprocess.Popen[bytes]"], None]) -> None:
        process = self._process
        if process is None:
            return
        how(process)
        try:
            process.wait(2 * _STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._process = None
        with self._log_file.open("a", encoding="utf-8") as log:
            log.write(f"--- the agent has ended: {process.returncode}\n")

    def _journal(self) -> "Sequence[JournalRecord]":
        if not (self._state_dir / "state.db").exists():
            return ()
        try:
            store = Store.open_readonly(self._state_dir)
        except StoreError:
            if self._process is None:
                raise
            return ()  # the agent is creating it
        with closing(store):
            return store.load_journal()

    def _environments(self) -> dict[tuple[str, str, str], dict[str, str]]:
        """The variables that a hook was given last, by its name, its event's id (folded) and its stage."""
        if not self._hooks_file.exists():
            return {}
        environments = {}
        lines = self._hooks_file.read_text(encoding="utf-8").split("\n")[:-1]  # the last line may not be whole yet
        for line in map(json.loads, lines):
            given = line["given"]
            event_id = given.get("SCHEDULED_EVENT_ID", "").casefold()
            environments[line["hook"], event_id, given.get("SCHEDULED_EVENT_STAGE", "")] = given
        return environments

    def _is(self, found: str, event_id: str) -> bool:
        """Whether an id of the journal is that of an event, which may have gone on under another one."""
        return found.casefold() in {known.casefold() for known in self.azure.event(event_id).ids}

    def _wait_record(self, kind: str, event_id: str, what: str, timeout_seconds: float) -> str:
        __tracebackhide__ = True

        def found() -> list[str]:
            return [e.text for e in self._journal() if e.kind == kind and self._is(e.event_id, event_id)]

        return self._wait_until(found, f"event {event_id} {what}", timeout_seconds)[-1]

    def _wait_until(self, test: Callable[[], T], what: str, timeout_seconds: float) -> T:
        __tracebackhide__ = True  # a failure is the test's
        deadline = time.monotonic() + timeout_seconds
        while not (result := test()):
            if self._process is None:
                why = "the agent does not run"
            elif (code := self._process.poll()) is not None:
                why = f"the agent has ended, with exit code {code}"
            elif time.monotonic() > deadline:
                why = f"it took longer than {timeout_seconds:g} s"
            else:
                time.sleep(_PAUSE_SECONDS)
                continue
            raise ExpectationError(f"gave up waiting until {what}: {why}; {self._account()}")
        return result

    def _account(self) -> str:
        records = self.journal()[-15:]
        lines = "".join(f"\n  {line}" for line in records) or " nothing"
        last = "\n".join(f"  {line}" for line in self.log.splitlines()[-15:]) or "  nothing"
        return f"the agent's journal says:{lines}\nand its log ends:\n{last}"


@pytest.fixture
def scheduled_events_vm() -> str:
    """Name of the simulated VM in Resources; a fixture of the same name replaces it."""
    return "vm-1"


@pytest.fixture
def scheduled_events_vms(scheduled_events_vm: str) -> Sequence[str]:
    """Names of all simulated VMs, if there are to be several; a fixture of the same name replaces it."""
    return (scheduled_events_vm,)


@pytest.fixture
def scheduled_events(
    tmp_path: Path, request: pytest.FixtureRequest, scheduled_events_vms: Sequence[str]
) -> Iterator[ScheduledEvents]:
    """The simulated Azure, and the agent of its first VM; all that runs ends with the test."""
    directory = tmp_path / "scheduled-events-agent"
    directory.mkdir(mode=0o700)
    # Without the request limit, for the agent polls at its fastest pace.
    with Simulator(vms=tuple(scheduled_events_vms), rate_limit=None) as azure:
        events = ScheduledEvents(directory, azure)
        request.node.stash[_KEY] = events
        try:
            yield events
        finally:
            for one in events.all_agents():
                one.stop()


def _argument(given: str | os.PathLike[str]) -> str:
    return given if isinstance(given, str) else str(Path(given).absolute())


_KEY = pytest.StashKey[ScheduledEvents]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: "pytest.CallInfo[None]") -> Iterator[None]:
    """Show the agent's log with a test that has failed."""
    events = item.stash.get(_KEY, None)
    if call.when == "call" and call.excinfo is not None and events is not None:
        for one in events.all_agents():
            name = "scheduled-events-agent" if one is events else f"scheduled-events-agent of {one.vm}"
            item.add_report_section("call", f"log of {name}", one.log)
    return (yield)
