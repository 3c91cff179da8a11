"""Every order of things: a walk through all sequences of signals, judged from the outside.

The world below knows what the document says, which hooks run and which approvals are under way. It performs
the effects of ``advance``, chooses what happens next in every possible way, and holds each effect against the
invariants, which it works out for itself and not from the fields of a workflow:

1. no approval before every prepare hook has succeeded, unless the rule or an operator says otherwise
2. no approval for an event of another VM, one that has started, is over, or is held
3. a prepare or on_start hook starts once for each appearance of the event, and once more after each crash
   that found it running; after a reboot all prepare hooks of an event that has not started start once more,
   also if it is away then and comes back;
   none starts beside a hook of an earlier appearance
4. a recover hook starts only when something is owed to it, never beside or before the preparation that
   another event still needs, and in the end nothing is owed; once it has succeeded it is owed again only to a
   preparation that begins later by a rule that names it; after a failure it and the rest of its stage wait
   for an operator, or for its success for another event, and the VM is not ready
5. all of this holds for canceled and completed events and over restarts, with and without a reboot
6. an approval that was confirmed is not sent again while the event stays listed, one that was not is, and so is
   that of an event that is back after its end; an operator's approval is void after a
   prepare hook has failed
7. nothing is approved when the state was lost, unless an operator says so
8. a new event is prepared for in the very step in which it is seen
9. a run with a crash ends as it would have ended without
10. no prepare hook starts against an operator's hold, also when the event has vanished or expired and come back
11. a recommendation is never approved; it is over, too, when it has expired, and is then not prepared for again
    while the document lists it; it is not recovered from while an eviction is in the document
12. the reason why an event waits is the one that holds now
13. of a hook that runs once at a time, no less urgent run is in the way of an eviction, and no hook of its own
    earlier appearance: they have a second to end
14. an event that only an operator can let be approved says so, and no other
15. once Azure has accepted an approval, the event shows the operator's action without what came too late
16. the VM is out of service only while a hook runs, until a time that is known and that the rule asks for, until
    Azure answers or ends what it has been let start, or because an operator holds it; else a person is asked
17. when Azure starts an event that its rule wants prepared, it is said once whether it was not and why; what a
    reboot finds started, or over, was prepared if all of its prepare hooks had succeeded before

An event that one answer lacks is missing: nothing is begun for it and nothing of it is undone. Only when a second
answer lacks it, it is over; if it comes back before a recovery has begun, its own or one for another event that
undoes the same, it is the same appearance. A scheduled event that names only other VMs is lacked, too; once it is
over so, it is another appearance if it names this VM again.

From every state a fair world (hooks succeed, Azure answers, events end, an operator retries what has failed to
recover) must lead to no open workflow.

A crash is a step of its own and loses whatever is in flight. For the agent that is one and the same: whether
the effects of the last step were never performed, or were, without their end being reported; and a crash before
the step was on disk is a crash in the state before it. What is on disk goes through JSON, as in the store.
"""

import importlib
import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace as replaced
from mutants import break_workflow
from status_samples import some_facts

from scheduled_events_agent.engine import remembered
from scheduled_events_agent.engine.remembered import changes_by_transitions, with_changes
from scheduled_events_agent.imds.compare import Gone, Missing, compare
from scheduled_events_agent.imds.document import Document, ScheduledEvent
from scheduled_events_agent.policy import Rule, When
from scheduled_events_agent.status import AttentionKind
from scheduled_events_agent.status import attention as attention_list
from scheduled_events_agent.workflow import (
    AgentRestarted,
    Approval,
    ApprovalAnswered,
    Approve,
    CancelHook,
    Context,
    GateResult,
    HookFinished,
    HookOutcome,
    OperatorAction,
    OperatorCommand,
    RememberedEvent,
    RememberedKey,
    RunHook,
    Signal,
    Stage,
    StageStatus,
    Transition,
    Workflow,
    advance,
    approval,
    is_ready,
    known_events,
    next_wake_at,
    phases,
    signals,
    stages,
)
from scheduled_events_agent.workflow import unprepared as unprepared_module
from scheduled_events_agent.workflow.timing import approval_turn_at

advance_module = importlib.import_module("scheduled_events_agent.workflow.advance")

START = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
TYPES = {"A": "Reboot", "B": "Redeploy", "C": "Freeze"}
# A warning and the eviction that may follow.
SPOT = {"R": "SpotRebalanceRecommendation", "P": "Preempt"}
EXPIRE_SECONDS = 6 * 3600.0
AT_ONCE = 10 * 86400.0
BOOTS = ("first boot", "second boot")


@dataclass(frozen=True)
class Script:
    """The changes that the world may make, and the rule for each event."""

    rules: dict[str, Rule]
    crashes: int = 2
    failures: int = 1
    """How many recover hooks fail."""
    appearances: int = 2
    has_operator: bool = False
    may_flap: bool = False
    """A started event may become scheduled again."""
    serialized: frozenset[str] = frozenset()
    """Hooks of which only one run may go on at a time."""
    may_move: bool = False
    """NotBefore may move, so far that the event would not have begun yet."""
    has_not_before: bool = True
    may_leave: bool = False
    """A scheduled event may name other VMs from some answer on."""
    resources: tuple[str, ...] = ("vm_1",)
    is_state_lost: bool = False
    begins: tuple[str, ...] = ()
    """What has happened where the walk begins."""
    depth: int = 1000
    """How many things happen after that, in every order; then a fair world follows."""

    def rule(self, event: str) -> Rule:
        return self.rules[event]

    def undoes(self, one: str, hook: str, other: str) -> bool:
        """Whether a recovery from ``one`` that has come to ``hook`` undoes what ``other`` needs prepared."""
        mine, theirs = self.rules[one], self.rules[other]
        so_far = mine.recover[: mine.recover.index(hook) + 1]
        return not {*mine.prepare, *so_far}.isdisjoint((*theirs.prepare, *theirs.recover))


def _waits_for_time(workflow: Workflow) -> bool:
    return bool(workflow.drain_until or workflow.approval.failures or workflow.decision.approve_after_seconds)


class BrokenError(AssertionError):
    """An invariant does not hold; the story leads there."""


@dataclass
class Flight:
    """A hook that runs."""

    workflow_id: str
    hook: str
    run: int
    is_told_to_end: bool = False
    is_urgent: bool = False
    """It was told to end within a second."""
    is_waiting: bool = False
    """Another run of the hook goes on, and only one may: its program is not started yet."""


@dataclass
class World:
    """Everything outside the state machine, and the open workflows that the machine has returned last."""

    script: Script
    workflows: dict[str, Workflow] = field(default_factory=dict)
    remembered: dict[RememberedKey, RememberedEvent] = field(default_factory=dict)
    """What the agent has on disk of holds and of recommendations that are over."""
    now: datetime = START
    document_at: datetime | None = START
    boot: int = 0
    is_blind: bool = False
    """The agent has restarted and read no document since."""
    truth: dict[str, str] = field(default_factory=dict)
    """Event -> status in the document."""
    read: dict[str, str] = field(default_factory=dict)
    """The document as the agent has read it. An event that it misses is there as it was."""
    unlisted: tuple[str, ...] = ()
    """Keys of expired recommendations of which the answer that is read is the second one that lacks them."""
    missing: frozenset[str] = frozenset()
    """What the last answer lacked and the one before it did not."""
    counts: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    """Workflow id -> appearance, such as A1: event A for the first time."""
    flights: dict[tuple[str, Stage], Flight] = field(default_factory=dict)
    posts: dict[str, str] = field(default_factory=dict)
    """Appearance -> workflow id of approvals under way."""
    outlived: frozenset[str] = frozenset()
    """Appearances that were over and came back while an approval was under way: its answer counts no more."""
    taken_back: frozenset[str] = frozenset()
    """Appearances that an operator had approved, and that take back an approval under way."""
    undone: frozenset[str] = frozenset()
    """Appearances that were over when a recover hook started that undoes what was prepared for them."""
    stuck: dict[str, str] = field(default_factory=dict)
    """Appearance -> recover hook at which its recovery has failed."""
    used: frozenset[tuple[str, Stage, str]] = frozenset()
    """Prepare and on_start hooks that must not start again."""
    succeeded: frozenset[tuple[str, str]] = frozenset()
    failed: dict[str, str] = field(default_factory=dict)
    """Appearance -> prepare hook that has failed."""
    owed: frozenset[tuple[str, str]] = frozenset()
    """(appearance, recover hook): has to run before the VM is what it was."""
    words: dict[str, str] = field(default_factory=dict)
    held: frozenset[str] = frozenset()
    """Events that an operator holds, also while they are away."""
    started: frozenset[str] = frozenset()
    scheduled_boot: dict[str, int] = field(default_factory=dict)
    """Appearance -> the boot in which a document last listed it as Scheduled."""
    first_seen: dict[str, datetime] = field(default_factory=dict)
    confirmed: frozenset[str] = frozenset()
    expired: frozenset[str] = frozenset()
    """Recommendations that are over and not yet both closed and out of the document."""
    moved: frozenset[str] = frozenset()
    """Events whose NotBefore has moved."""
    before_reboot: dict[str, frozenset[str]] = field(default_factory=dict)
    """Appearance -> what may be said of its preparation, from a reboot until a document lists it as Scheduled."""
    starting: dict[str, frozenset[str]] = field(default_factory=dict)
    """Appearance that starts in this step -> what may be said of its preparation."""
    elsewhere: frozenset[str] = frozenset()
    """Events that the document lists for other VMs."""
    left: frozenset[str] = frozenset()
    """Appearances that ended so."""
    news: frozenset[tuple[str, ...]] = frozenset()
    """What the last step has brought."""
    crashes: int = 0
    failures: int = 0
    story: tuple[str, ...] = ()

    # --- What the world knows.

    def present(self, event: str) -> str:
        return f"{event}{self.counts[event]}"

    def is_gone(self, appearance: str) -> bool:
        event = appearance[0]
        return event not in self.read or self.present(event) != appearance

    def is_over(self, appearance: str) -> bool:
        """Whether nothing needs to be prepared for it."""
        return appearance in self.expired or self.is_gone(appearance)

    def key(self) -> tuple[Any, ...]:
        """All that the future depends on: the same key, the same future."""
        return (
            *(self._workflow_key(workflow) for workflow in self.workflows.values()),
            *sorted(self.truth.items()), "/", *sorted(self.read.items()), "/", *sorted(self.counts.items()),
            *sorted(
                (*key, flight.hook, flight.is_told_to_end, flight.is_urgent, flight.is_waiting)
                for key, flight in self.flights.items()
            ),
            *sorted(self.posts), self.used, self.succeeded, self.undone, *sorted(self.failed.items()), self.owed,
            *sorted(self.stuck.items()), "/", *sorted(self.words.items()), self.held, self.missing,
            self.started, self.confirmed, self.expired, self.elsewhere, self.left, self.moved,
            self.crashes, self.failures, self.is_blind, self.boot, *sorted(self.remembered),
            self.taken_back, self.outlived,
            *sorted(self.scheduled_boot.items()),
            "/", *sorted((name, *sorted(why)) for name, why in self.before_reboot.items()),
        )  # fmt: skip

    def _workflow_key(self, workflow: Workflow) -> tuple[Any, ...]:
        approval = workflow.approval
        retry = max((approval.retry_at - self.now).total_seconds(), 0) if approval.retry_at else None
        drain = max((workflow.drain_until - self.now).total_seconds(), 0) if workflow.drain_until else None
        speaks_at = approval_turn_at(workflow)
        speaks = max((speaks_at - self.now).total_seconds(), 0) if speaks_at else None
        is_stale = approval.failed_at is not None and approval.failed_at >= (self.document_at or START)
        return (
            self.names[workflow.id], workflow.event.status, workflow.phase,
            *((p.state, p.done, p.current, p.is_canceling, p.failure, p.failed_hook,
               *sorted(p.tolerated_failures.items()))
              for p in (workflow.prepare, workflow.on_start, workflow.recover)),
            approval.state, approval.taken_back is not None, approval.is_outlived, min(approval.failures, 2),
            retry, is_stale, drain, workflow.operator_action,
            workflow.is_over, workflow.was_started, workflow.is_history_unknown, workflow.unprepared,
            workflow.wait_reason and replaced(workflow.wait_reason, at=None), workflow.outcome, speaks,
            workflow.early_until is not None,
        )  # fmt: skip

    def expect(self, holds: bool, text: str) -> None:
        if not holds:
            raise BrokenError(f"{text}\n  after: {'; '.join(self.story)}\n  by: {self.script.rules}")

    # --- What the world does.

    def choices(self) -> Iterator[str]:
        """Everything that can happen next, in words that ``after`` understands."""
        for event in self.script.rules:
            yield from self._choices_of_azure(event)
        if self.is_blind:
            yield "first document"
            return
        if self.missing:
            yield "another answer"
        yield from self._choices_of_hooks()
        for name in self.posts:
            yield f"{name} approval ok"
            if not any(workflow.approval.failures for workflow in self.workflows.values()):
                yield f"{name} approval error"
        if any(_waits_for_time(w) for w in self.workflows.values()):
            yield "time passes"
        yield from self._choices_of_operators()
        if self.crashes < self.script.crashes:
            yield "crash"
            if self.boot == 0:
                yield "crash with reboot"

    def _choices_of_hooks(self) -> Iterator[str]:
        for (name, stage), flight in self.flights.items():
            if not flight.is_waiting:
                yield f"{name} {stage} succeeded"
            if flight.is_told_to_end:
                yield f"{name} {stage} canceled"
            elif stage != "recover" or self.failures < self.script.failures:
                yield f"{name} {stage} failed"

    def _choices_of_azure(self, event: str) -> Iterator[str]:
        status = self.truth.get(event)
        if status is None:
            is_more = self.counts.get(event, 0) < self.script.appearances or event in self.missing
            if is_more and self._may_appear(event):
                yield f"{event} appears Scheduled"
                if event != "R":
                    yield f"{event} appears Started"
            return
        if event == "R":
            if event in self.read and not self.is_blind and self._may_expire(self.present(event)):
                yield "R expires"
        elif status == "Scheduled":
            yield f"{event} becomes Started"
            if self.script.may_move and event in self.read and not self.is_blind and event not in self.moved:
                yield f"{event} moves"
            if self.script.may_leave:
                yield f"{event} leaves"
        elif self.script.may_flap:
            yield f"{event} becomes Scheduled"
        yield f"{event} vanishes"

    def _choices_of_operators(self) -> Iterator[str]:
        if self.script.has_operator:
            if "R" in self.read and self._may_expire(self.present("R")):
                yield "R operator resolve"
            for event in self.read:
                if self.is_over(self.present(event)):
                    continue  # the agent rejects it
                word = self.words.get(self.present(event), "")
                yield from (f"{event} operator {new}" for new in ("approve", "hold", "release") if new != word)
            yield from (f"{name} retry" for name in self.failed if name not in self.started)
        for name in self.unrecovered():
            yield from (f"{name} retry", f"{name} resolve")

    def unrecovered(self) -> list[str]:
        """The appearances that wait for an operator to repair their recovery."""
        return [self.names[key] for key, workflow in self.workflows.items() if workflow.phase == "recovery_failed"]

    def _may_expire(self, name: str) -> bool:
        return name not in self.expired and any(self.names[key] == name for key in self.workflows)

    def _may_appear(self, event: str) -> bool:
        """An event that goes and comes back while the agent is away is, for the agent, one that has stayed."""
        return not self.is_blind or event not in self.read

    def after(self, choice: str) -> "World":
        """The world after ``choice``; raises BrokenError if the agent does something that it must not."""
        world = replace(
            self,
            workflows=dict(self.workflows), truth=dict(self.truth), read=dict(self.read), counts=dict(self.counts),
            names=dict(self.names), flights={key: replace(flight) for key, flight in self.flights.items()},
            posts=dict(self.posts), words=dict(self.words), scheduled_boot=dict(self.scheduled_boot),
            first_seen=dict(self.first_seen),
            stuck=dict(self.stuck), failed=dict(self.failed), before_reboot=dict(self.before_reboot), starting={},
            story=(*self.story, choice), now=self.now + timedelta(seconds=1),
            news=frozenset(), unlisted=(),
        )  # fmt: skip
        world.do(choice.split())
        return world

    def do(self, words: list[str]) -> None:  # noqa: C901  # a flat list of cases
        match words:
            case [event, "appears", status]:
                self.truth[event] = status
                self.elsewhere -= {event}
                if not self.is_blind:
                    self._read_document()
            case [event, "becomes", status]:
                self.truth[event] = status
                if not self.is_blind:
                    self._read_document()
            case [event, ("vanishes" | "leaves") as how]:
                del self.truth[event]
                self.moved -= {event}
                if how == "leaves":
                    self.elsewhere |= {event}
                if not self.is_blind:
                    self._read_document()
            case [event, "moves"]:
                self.moved |= {event}
                self._read_document()
            case ["first", "document"]:
                self.is_blind = False
                self._read_document()
            case ["another", "answer"]:
                self._read_document()
            case [name, "approval", how]:
                workflow_id = self.posts.pop(name)
                if how == "ok" and name in self.names.values() and name not in self.outlived:
                    self.confirmed |= {name}
                    self._void_what_came_late(name)
                self.taken_back -= {name}
                self.outlived -= {name}
                self._send(ApprovalAnswered(workflow_id=workflow_id, error_kind="" if how == "ok" else "server"))
            case ["R", "expires"]:
                self.expired |= {self.present("R")}
                since = next(w for w in self.workflows.values() if self.names[w.id] == self.present("R"))
                self.now = (since.handling_since or since.first_seen_at) + timedelta(seconds=EXPIRE_SECONDS + 1)
                self.document_at = self.now
                self._send()
            case ["time", "passes"]:
                self.now += timedelta(seconds=60)
                self.document_at = self.now
                self._send()
            case ["R", "operator", "resolve"]:
                self.expired |= {self.present("R")}
                self.held -= {"R"}
                self._say(self.present("R"), "resolve")
            case [event, "operator", ("approve" | "hold" | "release") as action]:
                name = self.present(event)
                if (
                    action == "approve" or name not in self.confirmed
                ):  # else it comes too late, and changes nothing
                    if self.words.get(name) == "approve" and name in self.posts:
                        self.taken_back |= {name}
                    self.words[name] = action
                    is_held = action == "hold" and name not in self.started
                    self.held = self.held | {event} if is_held else self.held - {event}
                    self._begin_bare(event)
                self._say(name, action)
            case [name, "retry"]:
                self.stuck.pop(name, None)
                if name in self.failed and not self.is_gone(name):
                    self.used -= {(name, "prepare", self.failed.pop(name))}
                self._say(name, "retry")
            case [name, "resolve"]:
                self.stuck.pop(name, None)
                self.owed = frozenset(item for item in self.owed if item[0] != name)
                self._say(name, "resolve")
            case ["crash", *reboot]:
                self._crash(bool(reboot))
            case [name, ("prepare" | "on_start" | "recover") as stage, outcome]:
                self._end_hook(name, stage, outcome)  # type: ignore[arg-type]

    def _void_what_came_late(self, name: str) -> None:
        """A hold or a release that came while the approval was under way does not count: the one before does."""
        word, is_taken_back = self.words.get(name, ""), name in self.taken_back
        if word == "hold" or (is_taken_back and word != "approve"):
            self.words[name] = "approve" if is_taken_back else ""
        if word == "hold":
            self.held -= {name[0]}

    def _say(self, name: str, action: OperatorAction) -> None:
        workflow_id = next(key for key, value in self.names.items() if value == name)
        self._send(OperatorCommand(workflow_id=workflow_id, action=action, user="kim"))

    def _read_document(self) -> None:
        self.document_at = self.now
        for event in self.truth.keys() - self.read.keys():
            name = self.present(event) if self.counts.get(event, 0) else ""
            is_another = name in self.started and self.truth[event] == "Scheduled"
            if name and not is_another and self._returns(name):
                self.read[event] = self.truth[event]
                self._return(name)
            else:
                self.counts[event] = self.counts.get(event, 0) + 1
        new = [event for event in self.truth if event not in self.read]
        absent = frozenset(self.read) - frozenset(self.truth)
        over, already = absent & self.missing, self.missing
        self.left |= {self.present(event) for event in over & self.elsewhere}
        self.unlisted = ("r-recommendation",) if "R" in over else ()
        self.missing = absent - over
        self._expect_starts(new, over, already)
        self.read = {**{event: self.read[event] for event in self.missing}, **self.truth}
        for event, status in self.read.items():
            if status == "Started":
                self.started |= {self.present(event)}
                self.held -= {event}
            elif event in self.truth:
                self.scheduled_boot[self.present(event)] = self.boot
        events = tuple(
            ScheduledEvent(
                id=event, type=(TYPES | SPOT)[event], status=status, source="Platform",
                resources=self.script.resources,
                not_before=self._not_before(event) if status == "Scheduled" else None,
            )
            for event, status in self.truth.items()
        )  # fmt: skip
        for event in new:
            if event in self.held:
                self.words[self.present(event)] = "hold"
            self.scheduled_boot.setdefault(self.present(event), self.boot)
            self.first_seen[self.present(event)] = self.now
            rule = self.script.rule(event)
            is_history_unknown = self.script.is_state_lost and self.read[event] == "Started"
            if is_history_unknown:
                self.owed |= {(self.present(event), hook) for hook in rule.recover}
        for event in self.truth:
            self._begin_bare(event)
        missing = {w.event.key: w.event.id in already for w in self.workflows.values() if w.is_missing}
        ended = {event.casefold(): "Canceled" for event in over & self.elsewhere}
        document = Document(incarnation="1", events=events, ended=ended)
        elsewhere = {event.casefold() for event in self.elsewhere}
        found = compare(known_events(self.workflows), document, missing)
        self._send(
            *(
                replaced(one, names_others=True)
                if isinstance(one, Missing | Gone) and one.key in elsewhere
                else one
                for one in found
            )
        )
        still = {self.names[workflow.id] for workflow in self.workflows.values()}
        self.expired = frozenset(name for name in self.expired if name in still or not self.is_gone(name))
        self.left &= still
        for event in new:
            self._expect_prompt_preparation(event)

    def _not_before(self, event: str) -> datetime | None:
        if not self.script.has_not_before:
            return None
        return START + timedelta(seconds=2 * AT_ONCE if event in self.moved else AT_ONCE)

    def _may_say(self, name: str, *, is_new: bool = False, was_missing: bool = False) -> frozenset[str]:
        """The reasons that may be given why the event, which starts, is not prepared; "" if it may be prepared."""
        rule = self.script.rule(name[0])
        if is_new and not self.script.is_state_lost and (rule.prepare or rule.drain_for):
            return frozenset({"no_notice"})
        has_ended = all((name, hook) in self.succeeded for hook in rule.prepare)
        if is_new or (has_ended and not (rule.drain_for and not rule.prepare)):
            return frozenset({""})
        if name in self.before_reboot:
            return self.before_reboot[name]
        is_at_once = rule.approve == "immediately"
        if self.words.get(name) == "hold":
            why = "held"
        elif name in self.failed:
            is_allowed = is_at_once or rule.on_failure == "approve" or self.words.get(name) == "approve"
            why = "failure_allowed" if is_allowed else "hook_failed"
        else:
            why = "immediately" if is_at_once else "unfinished"
        may_be_done = {""} if has_ended else set()  # how long the drain has lasted is not looked at here
        return frozenset({why, *may_be_done, *({"held"} if was_missing else ())})

    def _expect_starts(self, new: list[str], over: frozenset[str], missing: frozenset[str]) -> None:
        """What may be said of the events of which this answer shows that they have started."""
        for event in over - self.elsewhere:
            self._end_unseen(self.present(event))
        for event, status in self.truth.items():
            name = self.present(event)
            if status == "Started" and name not in self.started:
                self.starting[name] = self._may_say(name, is_new=event in new, was_missing=event in missing)
            self.before_reboot.pop(name, None)

    def _end_unseen(self, name: str) -> None:
        """The event is over, and no document has shown its start. A reboot may have been that."""
        if name not in self.started and name[0] in "AB" and name in self.before_reboot:
            why = self.before_reboot[name]
            self.starting[name] = why if name in self.confirmed else why | {""}

    def _begin_bare(self, event: str) -> None:
        """A drain, or the promise of a recovery alone, begins without a hook that reports it."""
        rule, name = self.script.rule(event), self.present(event)
        is_bare = bool(rule.drain_for or not rule.prepare)
        is_to_start = self.truth.get(event) == "Scheduled" and name not in self.started and not self.is_over(name)
        is_early = event in self.moved and self.words.get(name) != "approve"
        is_allowed = self.words.get(name) != "hold" and not is_early
        if is_bare and is_to_start and event not in self.missing and is_allowed:
            self.owed |= {(name, hook) for hook in rule.recover}

    def _returns(self, name: str) -> bool:
        """Whether its end has brought nothing about yet."""
        workflow = next((w for w in self.workflows.values() if self.names[w.id] == name), None)
        if workflow is None or any(other == name for other, _ in self.flights):
            return False
        if name in self.undone or name in self.expired or name in self.left:
            return False
        return workflow.prepare.state != "canceled" or name in self.started

    def _return(self, name: str) -> None:
        """It goes on as it was, but for its approval and an operator's: they were for the time before."""
        if self.truth[name[0]] == "Scheduled":
            self.confirmed -= {name}
            self.taken_back -= {name}
            self.outlived |= {name} & self.posts.keys()
            if self.words.get(name) == "approve":
                self.words[name] = ""

    def _expect_prompt_preparation(self, event: str) -> None:
        rule = self.script.rule(event)
        if self.read[event] == "Scheduled" and rule.prepare and not rule.drain_for and event not in self.held:
            is_delayed = any(
                stage == "recover" and self.script.undoes(name[0], flight.hook, event)
                for (name, stage), flight in self.flights.items()
            )
            is_delayed = is_delayed or self._has_earlier_flight(self.present(event))
            is_delayed = is_delayed or (event != "P" and self._taken_by_eviction(rule.prepare[0]))
            is_begun = (self.present(event), "prepare") in self.flights
            self.expect(is_begun or is_delayed, f"(8) {event} is not prepared for at once")

    def _has_earlier_flight(self, name: str) -> bool:
        """Whether a hook of an earlier appearance of the same event runs."""
        return any(other[0] == name[0] and int(other[1:]) < int(name[1:]) for other, _ in self.flights)

    def _end_hook(self, name: str, stage: Stage, outcome: HookOutcome) -> None:
        flight = self.flights.pop((name, stage))
        if stage == "prepare" and not flight.is_waiting:
            self._owe_again(name)
        if not flight.is_waiting:
            self._begin_waiting(flight.hook)
        if stage == "recover" and outcome == "failed":
            self.failures += 1
            self.stuck[name] = flight.hook
        elif stage == "recover" and outcome == "succeeded":
            self.owed -= {(other, flight.hook) for other, _ in self.owed if self.is_over(other)}
            self.stuck = {other: hook for other, hook in self.stuck.items() if hook != flight.hook}
            self.news |= {("recover", flight.hook)}
        elif outcome == "succeeded":
            self.news |= {(name, stage, flight.hook)}
            self.succeeded |= {(name, flight.hook)}
        elif outcome == "canceled" and stage == "prepare":
            gave_way = not self.is_over(name) and name not in self.started
            if flight.is_waiting or gave_way:  # it gave way to an eviction, and has still to run
                self.used -= {(name, stage, flight.hook)}
        elif outcome == "failed" and stage == "prepare":
            self.failed[name] = flight.hook
            if self.words.get(name) == "approve" and name not in self.confirmed:
                self.words[name] = ""
        self._send(
            HookFinished(
                workflow_id=flight.workflow_id,
                stage=stage,
                hook=flight.hook,
                run=flight.run,
                outcome=outcome,
                has_run=not flight.is_waiting,
            )
        )

    def _begin_waiting(self, hook: str) -> None:
        """A run of the hook has ended: of those that wait, an eviction's goes first."""
        waiting = [key for key, flight in self.flights.items() if flight.hook == hook and flight.is_waiting]
        for name, stage in sorted(waiting, key=lambda key: key[0][0] != "P")[:1]:
            self.flights[name, stage].is_waiting = False
            if stage == "prepare":
                self._owe(name)

    def _crash(self, is_reboot: bool) -> None:
        self.crashes += 1
        self.missing = frozenset()
        self.boot += is_reboot
        self.used -= {(name, stage, flight.hook) for (name, stage), flight in self.flights.items()}
        for name in [name for name, stage in self.flights if stage == "prepare"]:
            self._owe(name)  # also one that has only waited: the agent does not know
            self._owe_again(name)
        if is_reboot:
            for name in [name for name in self.names.values() if name not in self.started]:
                self.before_reboot.setdefault(name, self._may_say(name))
                self.used = frozenset(item for item in self.used if item[:2] != (name, "prepare"))
                self.succeeded = frozenset(item for item in self.succeeded if item[0] != name)
                self.failed.pop(name, None)
        self.flights, self.posts, self.taken_back, self.outlived = {}, {}, frozenset(), frozenset()
        stored = msgspec.json.encode(list(self.workflows.values()))
        self.workflows = {workflow.id: workflow for workflow in msgspec.json.decode(stored, type=list[Workflow])}
        self.document_at, self.is_blind = None, True
        was_ready = is_ready(self.workflows)
        self._send(AgentRestarted())
        self.expect(not self.flights and not self.posts, "(7) something is done before the first document")
        self.expect(was_ready == is_ready(self.workflows), "(9) a restart has made the VM ready, or not ready")

    # --- What the agent does.

    def _send(self, *signals: Signal) -> None:
        context = Context(
            now=self.now,
            names=("vm_1",),
            rules=tuple(self.script.rules.values()),
            windows={},
            hooks=[hook for rule in self.script.rules.values() for hook in (*rule.prepare, *rule.recover)],
            boot_id=BOOTS[self.boot],
            document_at=self.document_at,
            is_state_lost=self.script.is_state_lost,
            serialized=self.script.serialized,
            holds={key: one for (fact, key), one in self.remembered.items() if fact == "hold"},
            expired={key for fact, key in self.remembered if fact == "expired"},
        )
        progression = advance(self.workflows, signals, context)
        self.expect(progression.errors == (), f"faults: {progression.errors}")
        self.remembered = with_changes(
            self.remembered,
            changes_by_transitions(self.remembered, signals, progression.transitions, self.unlisted, self.now),
        )
        self.workflows = progression.workflows
        begun: set[tuple[str, Stage]] = set()
        for step in progression.transitions:
            workflow = step.workflow
            event = workflow.event.id
            if workflow.id not in self.names:
                self.expect(self.present(event) not in self.names.values(), f"{event} has two workflows")
            name = self.names.setdefault(workflow.id, self.present(event))
            for effect in step.effects:
                match effect:
                    case RunHook(stage="recover"):
                        self._check_recover(name, effect.hook)
                    case RunHook():
                        self._check_run(name, effect.stage, effect.hook)
                    case Approve():
                        self._check_approve(name, effect.event_id)
                        self.posts[name] = workflow.id
                    case CancelHook():
                        flight = self.flights.get((name, effect.stage))
                        self.expect(flight is not None, f"{name} {effect.stage} is canceled and does not run")
                        is_new = (name, effect.stage) in begun
                        self.expect(not is_new, f"(4) {name} {effect.stage} is canceled as soon as it starts")
                        assert flight
                        flight.is_told_to_end = True
                        flight.is_urgent |= effect.is_urgent
                if isinstance(effect, RunHook):
                    self._start(name, effect)
                    begun.add((name, effect.stage))
            if not workflow.is_open:
                self._forget(name, workflow.outcome)
        self._expect_said(progression.transitions)
        self.expect(not (self.stuck and is_ready(self.workflows)), "(4) ready though a recovery has failed")
        self._expect_urgent_first()
        for workflow in self.workflows.values():
            due = phases.next_transition(workflow, self.workflows, context)
            self.expect(
                due == workflow.wait_reason, f"(12) {due} is not the reason that is shown: {workflow.wait_reason}"
            )
            name = self.names[workflow.id]
            word = self.words.get(name, "").replace("release", "")
            if name in self.confirmed and name not in self.started and not self.is_over(name):
                shown = workflow.operator_action
                self.expect(shown == word, f"(15) {name} shows {shown!r}, not {word!r}")
            is_needed = bool(REAL["why_approval_needed"](workflow, context))
            is_recorded = workflow.approval_needed_since is not None
            self.expect(is_needed == is_recorded, f"(14) an approval by an operator is needed: {is_needed}")
        self._expect_end_or_attention(context)

    def _expect_end_or_attention(self, context: Context) -> None:
        """Of each event that keeps the VM out of service: it goes on, or a person who looks in an hour is told."""
        stuck = {w.id for w in self.workflows.values() if w.is_prepared_for and not self._goes_on(w, context)}
        if not stuck:
            return
        workflows = tuple(self.workflows.values())
        in_an_hour = some_facts(at=self.now + timedelta(hours=1), workflows=workflows, ready=False)
        shown = attention_list.attention(in_an_hour)
        unknown = [self.names[key] for key in stuck.difference(one.key for one in shown)]
        self.expect(not unknown, f"(16) the VM stays prepared for {unknown}, and no person is asked")

    def _goes_on(self, workflow: Workflow, context: Context) -> bool:
        name = self.names[workflow.id]
        event = name[0]
        if self.flights or self.is_blind or event in self.missing:
            return True  # a hook runs, or the next answer is awaited
        if next_wake_at({workflow.id: workflow}, context) is not None:
            return True
        if self.is_over(name):
            others = [other for other in self.workflows.values() if not self.is_over(self.names[other.id])]
            return any(other.event.type == "Preempt" or other.is_prepared_for for other in others)
        if name in self.started or name in self.posts or name in self.confirmed:
            return True  # it is Azure's
        return self.words.get(name) == "hold" or (self.script.has_not_before and event not in self.moved)

    def _expect_said(self, transitions: tuple[Transition, ...]) -> None:
        """Of each event that starts it is said whether it is prepared, and of no other."""
        said: dict[str, list[str]] = {name: [] for name in self.starting}
        for step in transitions:
            unprepared = step.workflow.unprepared
            if any(record.kind == "unprepared" for record in step.records):
                said.setdefault(self.names[step.workflow.id], []).append(unprepared.kind if unprepared else "")
        for name, reasons in said.items():
            is_right = (reasons or [""])[0] in self.starting.get(name, {""}) and len(reasons) <= 1
            self.expect(is_right, f"(17) {name} starts, and is said to be unprepared: {reasons}")
        self.starting = {}

    def _start(self, name: str, effect: RunHook) -> None:
        """The hook runs, or waits if another run of it goes on and only one may."""
        hook = effect.hook
        is_taken = hook in self.script.serialized and any(one.hook == hook for one in self.flights.values())
        self.flights[name, effect.stage] = Flight(effect.workflow_id, hook, effect.run, is_waiting=is_taken)
        if effect.stage == "prepare" and not is_taken:
            self._owe(name)

    def _taken_by_eviction(self, hook: str) -> bool:
        """Whether the one run of the hook that may go on is that of an eviction."""
        if hook not in self.script.serialized:
            return False
        return any(
            name[0] == "P" and stage == "prepare" and flight.hook == hook and not flight.is_told_to_end
            for (name, stage), flight in self.flights.items()
        )

    def _expect_urgent_first(self) -> None:
        for (name, stage), flight in self.flights.items():
            if name[0] != "P" and stage != "on_start" and self._taken_by_eviction(flight.hook):
                self.expect(flight.is_urgent, f"(13) {name} keeps an eviction from {flight.hook}")
            if name[0] == "P" and "P" in self.read and name != self.present("P"):
                self.expect(flight.is_urgent, f"(13) {name} keeps its own return from {flight.hook}")

    def _forget(self, name: str, outcome: str) -> None:
        """The workflow is closed: nothing may be left of it."""
        self.expect(not any(other == name for other, _ in self.flights), f"{name} is closed while its hooks run")
        self.expect(not any(other == name for other, _ in self.owed), f"(4) {name} is closed and not recovered")
        self.news |= {(name, "closed", outcome, "approved" if name in self.confirmed else "")}
        self.used = frozenset(item for item in self.used if item[0] != name)
        self.succeeded = frozenset(item for item in self.succeeded if item[0] != name)
        self.started, self.confirmed = self.started - {name}, self.confirmed - {name}
        self.undone -= {name}
        self.left -= {name}
        if self.is_gone(name):
            self.expired -= {name}
        self.failed.pop(name, None)
        self.taken_back -= {name}
        self.posts.pop(name, None)  # no process waits for its answer any more
        self.outlived -= {name}
        self.words.pop(name, None)
        self.scheduled_boot.pop(name, None)

    def _owe(self, name: str) -> None:
        """Something is prepared for ``name``: its recovery is owed."""
        self.owed |= {(name, hook) for hook in self.script.rule(name[0]).recover}

    def _owe_again(self, name: str) -> None:
        """A prepare hook of ``name`` has run: the recoveries that are not done owe its recover hooks once more."""
        mine = self.script.rule(name[0]).recover
        for other in {other for other, _ in self.owed if self.is_over(other)}:
            self.owed |= {(other, hook) for hook in self.script.rule(other[0]).recover if hook in mine}

    def _check_run(self, name: str, stage: Stage, hook: str) -> None:
        event, rule = name[0], self.script.rule(name[0])
        text = f"{name} {stage} {hook} starts"
        self.expect((name, stage) not in self.flights, f"(3) {text} while another hook of the stage runs")
        self.expect((name, stage, hook) not in self.used, f"(3) {text} again")
        self.used |= {(name, stage, hook)}
        self.expect(not self.is_over(name), f"(4, 11) {text} though {event} is over")
        self.expect(event not in self.missing, f"(4) {text} though {event} is missing")
        if stage == "on_start":
            self.expect(self.read[event] == "Started", f"{text} though {event} has not started")
            return
        self.expect(self.words.get(name) != "hold", f"(10) {text} against the operator")
        self.expect(not self._has_earlier_flight(name), f"(3) {text} beside a hook of an earlier appearance")
        may_finish = rule.on_early_start == "finish" and self.scheduled_boot[name] == self.boot
        self.expect(name not in self.started or may_finish, f"(5) {text} though {event} has started")
        before = rule.prepare[: rule.prepare.index(hook)]
        is_in_order = all((name, one) in self.succeeded for one in before)
        self.expect(is_in_order, f"(3) {text} out of order")
        for (other, other_stage), flight in self.flights.items():
            if other_stage == "recover" and self.script.undoes(other[0], flight.hook, event):
                self.expect(False, f"(4) {text} while {other} recovers")

    def _check_recover(self, name: str, hook: str) -> None:
        event = name[0]
        text = f"{name} recover {hook} starts"
        self.expect((name, "recover") not in self.flights, f"(4) {text} while another hook of the stage runs")
        self.expect(self.is_over(name), f"(4) {text} though {event} is not over")
        self.expect(not self._has_earlier_flight(name), f"(3) {text} beside a hook of an earlier appearance")
        is_evicted = event == "R" and "P" in self.read
        self.expect(not is_evicted, f"(11) {text} though an eviction is pending")
        self.expect(name not in self.stuck, f"(4) {text} though its recovery has failed")
        is_owed = any(what == hook and self.is_over(other) for other, what in self.owed)
        self.expect(is_owed, f"(4) {text}, which nothing asks for")
        for (other, stage), flight in self.flights.items():
            is_in_the_way = stage == "prepare" and self.script.undoes(event, hook, other[0])
            self.expect(not is_in_the_way, f"(4) {text} while {other} prepares")
            self.expect((stage, flight.hook) != ("recover", hook), f"(4) {text} while it runs for {other}")
        for other, stage, _ in self.used:
            if stage == "prepare" and not self.is_over(other) and self.script.undoes(event, hook, other[0]):
                self.expect(False, f"(4) {text} though {other} needs it prepared")
        recover = self.script.rule(event).recover
        before = recover[: recover.index(hook)]
        self.expect(not any((name, what) in self.owed for what in before), f"(4) {text} out of order")
        over = {other for other in self.names.values() if self.is_over(other)}
        undone = {other for other in over if self.script.undoes(event, hook, other[0])}
        self.undone |= undone
        self.succeeded = frozenset(item for item in self.succeeded if item[0] not in undone)

    def _check_approve(self, name: str, event_id: str) -> None:
        event, rule, word = name[0], self.script.rule(name[0]), self.words.get(name, "")
        text = f"{name} is approved"
        self.expect(event_id == event, f"{text} as {event_id}")
        self.expect(event != "R", f"(11) {text}")
        self.expect("vm_1" in self.script.resources, f"(2) {text}, an event of another VM")
        self.expect(not self.is_gone(name), f"(2) {text} though it is over")
        self.expect(event not in self.missing, f"(2) {text} though it is missing")
        self.expect(
            self.read.get(event) == "Scheduled" and name not in self.started, f"(2) {text} after its start"
        )
        self.expect(word != "hold", f"(2) {text} against the operator")
        self.expect(name not in self.confirmed, f"(6) {text} again")
        self.expect(name not in self.posts, f"(6) {text} while an approval is under way")
        self.expect(self.may_approve(name), f"(1, 2, 7) {text} without leave")
        if self.script.resources == SHARED and rule.shared != "any" and word != "approve":
            waited = self.now - self.first_seen[name]
            self.expect(waited >= timedelta(seconds=10), f"(2) {text} before the turn of this VM")
        has_ended = name in self.failed or all((name, hook) in self.succeeded for hook in rule.prepare)
        self.expect(rule.approve == "immediately" or has_ended, f"(1) {text} before its preparation has ended")

    def may_approve(self, name: str) -> bool:
        """Whether the rule and the operator would have a scheduled event approved once its hooks have ended."""
        rule, word = self.script.rule(name[0]), self.words.get(name, "")
        is_shared = set(self.script.resources) != {"vm_1"}
        if "vm_1" not in self.script.resources or word == "hold":
            return False
        if word == "approve":
            return True
        if rule.approve in ("manual", "never") or self.script.is_state_lost:
            return False
        if is_shared and rule.shared != "any" and rule.approve != "immediately":
            return False
        return rule.approve == "immediately" or name not in self.failed or rule.on_failure == "approve"

    # --- The end.

    def fair_choice(self) -> str | None:
        """The next change in a world without mishaps; None when all is over."""
        if self.is_blind:
            return "first document"
        if self.missing:
            return "another answer"
        for (name, stage), flight in self.flights.items():
            if flight.is_told_to_end:
                return f"{name} {stage} canceled"
            if not flight.is_waiting:
                return f"{name} {stage} succeeded"
        for name in self.posts:
            return f"{name} approval ok"
        for name in self.unrecovered():
            return f"{name} retry"
        may_wait = {w.id for w in self.workflows.values() if _waits_for_time(w)}
        if may_wait and self.story[-2:] != ("time passes", "time passes"):
            return "time passes"
        for event, status in self.truth.items():
            name = self.present(event)
            if status == "Scheduled" and event != "R":
                if name not in self.started and event not in self.moved and self.may_approve(name):
                    self.expect(name in self.confirmed, f"(6) {name} is never approved")
                return f"{event} becomes Started"
            return f"{event} vanishes"
        return None

    def expect_rest(self) -> None:
        self.expect(self.workflows == {}, f"never over: {[*self.workflows.values()]}")
        self.expect(is_ready(self.workflows), "never ready again")
        self.expect(not self.owed, f"(4) never recovered: {set(self.owed)}")


Ending = frozenset[tuple[str, ...]]
Endings = dict[tuple[Any, ...], Ending]


def ending(world: World, endings: Endings) -> Ending:
    """How ``world`` ends if all is fair; a state that was driven to its end before is not driven again."""
    path: list[tuple[tuple[Any, ...], Ending]] = []
    while True:
        key = (*world.key(), world.story[-2:].count("time passes"))
        if key in endings:
            break
        world.expect(len(path) < 200, "no end in sight")
        choice = world.fair_choice()
        if choice is None:
            world.expect_rest()
            endings[key] = frozenset()
            break
        world = world.after(choice)
        path.append((key, world.news))
    result = endings[key]
    for earlier, news in reversed(path):
        result = endings[earlier] = result | news
    return result


def walk(script: Script) -> int:
    """All that can happen by ``script``, shortest stories first; returns the number of states."""
    first = tell(script, *script.begins)
    seen, endings = {first.key()}, Endings()
    frontier = [first]
    while frontier:
        following = []
        for world in frontier:
            for choice in world.choices():
                new = world.after(choice)
                key = new.key()
                if key in seen:
                    continue
                seen.add(key)
                end = ending(new, endings)
                # An approval under way counts, but is not sent again once its event has started or is held; a hook
                # that runs goes on under a hold, but not begun again.
                is_late = any(
                    world.is_gone(name) or name in world.started or not world.may_approve(name)
                    for name in world.posts
                ) or any(stage == "prepare" and world.words.get(name) == "hold" for name, stage in world.flights)
                # Work that a crash has cut off is not done again for an event that is missing. A hook that waited
                # counts as one that ran.
                is_unknown = any(flight.is_waiting for flight in world.flights.values())
                if choice == "crash" and not (is_late or is_unknown or world.missing):
                    undisturbed = ending(world, endings)
                    differs = end ^ undisturbed
                    new.expect(not differs, f"(9) {differs} differs without the crash")
                if len(new.story) - len(script.begins) < script.depth:
                    following.append(new)
        frontier = following
    return len(seen)


def tell(script: Script, *story: str) -> World:
    """Replay a story, as a failure prints it."""
    world = World(script)
    for choice in story:
        world = world.after(choice)
    return world


def a_rule(event: str = "A", **changes: Any) -> Rule:
    fields: dict[str, Any] = {
        "name": f"rule-{event}",
        "when": When(type=((TYPES | SPOT)[event],), affects=("self", "others")),  # type: ignore[arg-type]
        "prepare": ("drain", "save"),
        "recover": ("load", "resume"),
        "approve": "when-prepared",
        "lead": AT_ONCE,  # or what the VM does not approve by itself would wait for the last minutes
    }
    return Rule(**{**fields, **changes})


ONE_EVENT, TWO_EVENTS, THREE_EVENTS = 6, 4, 3
"""Depths that each planted fault is found at, see below."""


def to_depth(quick: int, nightly: int = 1000) -> pytest.MarkDecorator:
    """How long a story may be: for every change, and each night."""
    return pytest.mark.parametrize("depth", [quick, pytest.param(nightly, marks=pytest.mark.nightly)])


SHARED, OTHER = ("vm_0", "vm_1"), ("vm_10",)
APPROVE = ("immediately", "when-prepared", "manual", "never")
SINGLE = list(itertools.product(APPROVE, ("hold", "approve"), ("cancel", "finish"), ((), ("load", "resume"))))


@to_depth(ONE_EVENT)
@pytest.mark.parametrize(("approve", "on_failure", "on_early_start", "recover"), SINGLE)
def test_one_event_with_signals_in_every_order_and_a_crash_anywhere(
    approve: Any, on_failure: Any, on_early_start: Any, recover: tuple[str, ...], depth: int
) -> None:
    rule = a_rule(approve=approve, on_failure=on_failure, on_early_start=on_early_start, recover=recover)
    assert walk(Script({"A": rule}, crashes=1, appearances=1, may_flap=True, depth=depth)) > 100


@to_depth(ONE_EVENT)
@pytest.mark.parametrize(
    "script",
    [
        Script({"A": a_rule(prepare=("drain",))}, crashes=3, appearances=1),
        Script({"A": a_rule(on_start=("tell", "log"), recover=("resume",))}, crashes=2, appearances=1),
        Script({"A": a_rule(prepare=("drain",), on_start=("tell",), on_early_start="finish")}, appearances=1),
        Script({"A": a_rule(drain_for=30.0)}, appearances=1),
        Script({"A": a_rule(drain_for=30.0, prepare=())}, appearances=1),
        Script({"A": a_rule(prepare=(), recover=("resume",))}, appearances=1),
        Script({"A": a_rule(prepare=(), recover=(), approve="immediately")}),
        Script({"A": a_rule(approve="manual")}, crashes=1, appearances=1, has_operator=True),
        Script({"A": a_rule(approve="manual")}, appearances=1, has_operator=True, resources=SHARED),
        Script({"A": a_rule(prepare=("drain",))}, crashes=1, appearances=1, has_operator=True),
        Script({"A": a_rule(prepare=("drain",), approve="never")}, appearances=1, has_operator=True),
        Script({"A": a_rule(prepare=("drain",))}, appearances=1, has_operator=True, is_state_lost=True, crashes=0),
        Script({"A": a_rule()}, appearances=1, has_operator=True, crashes=1, resources=SHARED),
        Script({"A": a_rule(approve="immediately", shared="any")}, appearances=1, resources=SHARED),
        Script({"A": a_rule(approve="immediately")}, appearances=1, resources=SHARED),
        Script({"A": a_rule(prepare=("drain",))}, crashes=1, has_operator=True, resources=OTHER, appearances=1),
        Script({"A": a_rule(prepare=("drain",))}, crashes=1, appearances=2, may_leave=True),
        Script({"A": a_rule(prepare=("drain",), recover=())}, crashes=1, appearances=2, has_operator=True),
    ],
    ids=[
        "three crashes", "on start", "finish early start", "drain", "drain alone", "recovery alone", "no hooks",
        "manual", "manual of two", "operator", "never", "state lost", "shared hold", "shared any", "second of two",
        "another VM", "leaves", "held while it is away",
    ],
)  # fmt: skip
def test_one_event_under_special_rules_with_signals_in_every_order(script: Script, depth: int) -> None:
    assert walk(replace(script, depth=depth)) > 50


@to_depth(ONE_EVENT)
@pytest.mark.parametrize(
    "rule",
    [
        a_rule(prepare=("drain",), recover=("resume",)),
        a_rule(prepare=("drain",), recover=("load", "resume")),
        a_rule(prepare=("drain",), recover=("resume",), drain_for=30.0),
        a_rule(prepare=("drain",), recover=()),
        a_rule(prepare=(), recover=("resume",)),
    ],
    ids=["one hook", "two hooks", "drain", "no recovery", "recovery alone"],
)
def test_a_reappearing_event_with_signals_in_every_order(rule: Rule, depth: int) -> None:
    assert walk(Script({"A": rule}, crashes=0, appearances=2, failures=0, depth=depth)) > 80
    assert walk(Script({"A": rule}, crashes=1, appearances=2, failures=0, depth=depth)) > 400


@to_depth(ONE_EVENT)
def test_an_event_that_comes_back_while_its_recovery_has_failed(depth: int) -> None:
    rule = a_rule(prepare=("drain",), recover=("load", "resume"))
    assert walk(Script({"A": rule}, crashes=0, appearances=2, depth=depth)) > 200


OUT_OF_SERVICE = {
    "never": a_rule(prepare=("drain",), approve="never"),
    "manual": a_rule(prepare=("drain",), approve="manual"),
    "when prepared": a_rule(prepare=("drain",)),
    "immediately": a_rule(prepare=("drain",), approve="immediately"),
    "drain alone": a_rule(prepare=(), drain_for=30.0, approve="never"),
    "recovery alone": a_rule(prepare=(), approve="never"),
}


@to_depth(ONE_EVENT)
@pytest.mark.parametrize("resources", [("vm_1",), SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize("changes", [{"may_move": True}, {"has_not_before": False}], ids=["moves", "no time"])
@pytest.mark.parametrize("rule", OUT_OF_SERVICE.values(), ids=OUT_OF_SERVICE.keys())
def test_a_vm_out_of_service_goes_on_by_itself_or_a_person_is_asked(
    rule: Rule, changes: dict[str, Any], resources: tuple[str, ...], depth: int
) -> None:
    script = Script({"A": rule}, crashes=0, appearances=1, has_operator=True, resources=resources, depth=depth)
    assert walk(replace(script, **changes)) > 50


def a_pair(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Rule]:
    return {"A": a_rule("A", **first), "B": a_rule("B", **second)}


DRAIN = {"prepare": ("drain",), "recover": ("resume",)}
PAIRS = {
    "same hooks": a_pair(DRAIN, DRAIN),
    "longer recovery": a_pair({**DRAIN, "recover": ("load", "resume")}, DRAIN),
    "other order": a_pair({**DRAIN, "recover": ("load", "resume")}, {**DRAIN, "recover": ("resume", "load")}),
    "no recovery": a_pair(DRAIN, {**DRAIN, "recover": ()}),
    "nothing shared": a_pair(DRAIN, {"prepare": ("stop",), "recover": ("go",)}),
    "only recovery shared": a_pair(DRAIN, {"prepare": ("stop",), "recover": ("resume",)}),
    "immediately": a_pair({**DRAIN, "approve": "immediately"}, DRAIN),
    "in spite of failure": a_pair({**DRAIN, "on_failure": "approve"}, DRAIN),
    "finish early start": a_pair({**DRAIN, "on_early_start": "finish"}, DRAIN),
    "on start": a_pair({**DRAIN, "on_start": ("tell",)}, DRAIN),
    "drain": a_pair(DRAIN, {**DRAIN, "drain_for": 30.0}),
    "recovery alone": a_pair({**DRAIN, "prepare": ()}, DRAIN),
}


@to_depth(TWO_EVENTS, nightly=7)
@pytest.mark.parametrize("rules", PAIRS.values(), ids=PAIRS.keys())
def test_two_events_with_signals_in_every_order_and_a_crash_anywhere(rules: dict[str, Rule], depth: int) -> None:
    assert walk(Script(rules, crashes=1, appearances=1, depth=depth)) > 500


WAITING = {
    "own recovery": a_pair(DRAIN, {"prepare": ("drain",), "recover": ("go",)}),
    "same hooks": a_pair(DRAIN, DRAIN),
    "second hook waits": a_pair(DRAIN, {"prepare": ("save", "drain"), "recover": ("go",)}),
    "drain": a_pair(DRAIN, {"prepare": ("drain",), "recover": ("go",), "drain_for": 30.0}),
    "in spite of failure": a_pair(DRAIN, {"prepare": ("drain",), "recover": ("go",), "on_failure": "approve"}),
}


@to_depth(TWO_EVENTS, nightly=7)
@pytest.mark.parametrize("rules", WAITING.values(), ids=WAITING.keys())
def test_an_event_whose_hook_waits_for_that_of_another_in_every_order(rules: dict[str, Rule], depth: int) -> None:
    begins = ("A appears Scheduled", "B appears Scheduled")
    once = frozenset({"drain"})
    assert walk(Script(rules, crashes=1, appearances=1, serialized=once, begins=begins, depth=depth)) > 400


def three(first: dict[str, Any], second: dict[str, Any], third: dict[str, Any]) -> dict[str, Rule]:
    return {"A": a_rule("A", **first), "B": a_rule("B", **second), "C": a_rule("C", **third)}


CHECKPOINT = {"prepare": ("checkpoint",), "recover": ("uncheck",)}
OVERLAPPING = three(DRAIN, {"prepare": ("drain", "checkpoint"), "recover": ("resume", "uncheck")}, CHECKPOINT)
"""A and C share hooks with B, and none with each other."""
ALL_PREPARED = (
    "A appears Scheduled",
    "A1 prepare succeeded",
    "A1 approval ok",
    "B appears Scheduled",
    "B1 prepare succeeded",
    "B1 prepare succeeded",
    "B1 approval ok",
    "C appears Scheduled",
    "C1 prepare succeeded",
    "C1 approval ok",
)
ONE_RECOVERED = (*ALL_PREPARED, "A vanishes", "B vanishes", "another answer", "A1 recover succeeded")


@to_depth(THREE_EVENTS, nightly=6)
@pytest.mark.parametrize("begins", [ALL_PREPARED, ONE_RECOVERED], ids=["prepared", "recovered once for two"])
def test_three_events_whose_rules_overlap_in_every_order(begins: tuple[str, ...], depth: int) -> None:
    assert walk(Script(OVERLAPPING, crashes=1, appearances=2, begins=begins, depth=depth)) > 150


def a_spot_pair(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Rule]:
    return {"R": a_rule("R", **first, expire_after=EXPIRE_SECONDS), "P": a_rule("P", **second)}


WARNED = {
    "same hooks": a_spot_pair(DRAIN, DRAIN),
    "nothing shared": a_spot_pair(DRAIN, {"prepare": ("stop",), "recover": ("go",)}),
    "nothing to recover": a_spot_pair({**DRAIN, "recover": ()}, {**DRAIN, "prepare": ("drain", "save")}),
    "drain": a_spot_pair({**DRAIN, "drain_for": 30.0}, DRAIN),
    "immediately": a_spot_pair({**DRAIN, "approve": "immediately"}, {**DRAIN, "approve": "immediately"}),
}


@to_depth(TWO_EVENTS, nightly=7)
@pytest.mark.parametrize("rules", WARNED.values(), ids=WARNED.keys())
def test_a_recommendation_and_an_eviction_in_every_order(rules: dict[str, Rule], depth: int) -> None:
    assert walk(Script(rules, crashes=1, appearances=1, depth=depth)) > 300


@to_depth(TWO_EVENTS, nightly=8)
@pytest.mark.parametrize("more", [{}, {"prepare": ("drain", "save")}, {"drain_for": 30.0}])
def test_an_eviction_among_others_that_need_the_same_hook_once_at_a_time(more: dict[str, Any], depth: int) -> None:
    rules = {"A": a_rule("A", **{**DRAIN, **more}), "P": a_rule("P", **DRAIN)}
    assert walk(Script(rules, crashes=1, appearances=1, serialized=frozenset({"drain"}), depth=depth)) > 500
    swapped = {"A": a_rule("A", **DRAIN), "P": a_rule("P", **{**DRAIN, **more})}
    assert walk(Script(swapped, crashes=1, appearances=1, serialized=frozenset({"drain"}), depth=depth)) > 500


@to_depth(ONE_EVENT)
def test_a_recommendation_alone_with_signals_in_every_order(depth: int) -> None:
    rules = {"R": a_rule("R", prepare=("drain",), expire_after=EXPIRE_SECONDS)}
    assert walk(Script(rules, crashes=1, appearances=2, has_operator=True, depth=depth)) > 300


HELD_AND_EXPIRED = Script(
    {"R": a_rule("R", prepare=("drain",), recover=(), expire_after=EXPIRE_SECONDS)},
    crashes=1,
    has_operator=True,
    begins=("R appears Scheduled", "R1 prepare succeeded", "R operator hold"),
)


@to_depth(ONE_EVENT)
def test_a_held_recommendation_that_expires_and_comes_back(depth: int) -> None:
    assert walk(replace(HELD_AND_EXPIRED, depth=depth)) > 200


@pytest.mark.parametrize(
    "seed", [seed if seed < 25 else pytest.param(seed, marks=pytest.mark.nightly) for seed in range(60)]
)
def test_a_long_random_run_of_two_events_breaks_no_invariant(seed: int) -> None:
    chance = random.Random(seed)
    changes: list[dict[str, Any]] = [
        {
            "prepare": chance.choice((("drain",), ("drain", "save"), ("stop",), ())),
            "recover": chance.choice(((), ("resume",), ("load", "resume"), ("resume", "load"))),
            "on_start": chance.choice(((), ("tell",))),
            "approve": chance.choice(APPROVE),
            "on_failure": chance.choice(("hold", "approve")),
            "on_early_start": chance.choice(("cancel", "finish")),
            "drain_for": chance.choice((0.0, 0.0, 30.0)),
        }
        for _ in range(2)
    ]
    script = Script(
        a_pair(*changes),
        crashes=30,
        failures=30,
        appearances=10**6,
        has_operator=chance.random() < 0.5,
        may_flap=chance.random() < 0.3,
    )
    world = World(script)
    for _ in range(200):
        world = world.after(chance.choice([*world.choices()]))
    ending(world, {})


# --- A walk that finds nothing proves something only if it finds what is there to be found.


def test_a_walk_can_be_repeated() -> None:
    story = (
        "A appears Scheduled",
        "A1 prepare succeeded",
        "A1 approval ok",
        "crash",
        "A vanishes",
        "first document",
        "another answer",
    )
    world = tell(Script({"A": a_rule(prepare=("drain",), recover=("resume",))}), *story)
    assert world.story == story
    assert [*world.flights] == [("A1", "recover")]


@pytest.mark.parametrize("ended", ["A1 recover canceled", "A1 recover succeeded"])
def test_a_reappearing_event_is_prepared_again_while_another_recovers(ended: str) -> None:
    """It has the same hooks, so what was prepared for it does not stand any more."""
    story = (
        "A appears Scheduled",
        "A1 prepare succeeded",
        "B appears Scheduled",
        "B1 prepare succeeded",
        "A vanishes",
        "B vanishes",
        "another answer",
        "B appears Scheduled",
        ended,
    )
    world = tell(Script(PAIRS["same hooks"], crashes=0), *story)
    assert [*world.flights] == [("B2", "prepare")]
    assert "B2" not in world.posts


Faults = dict[str, Callable[..., Any]]


def _always_yes(*_: Any) -> GateResult:
    return GateResult("allow")


def _never_asked(name: str) -> Faults:
    """The machine with one gate left open."""
    left = tuple(_always_yes if gate.__name__ == name else gate for gate in phases.APPROVAL_GATES)
    return {"APPROVAL_GATES": left}  # type: ignore[dict-item]


def _forgetful_restart(workflow: Workflow, context: Context) -> Transition:
    del context
    return Transition(workflow=workflow)


def _restart_that_takes_hooks_for_done(workflow: Workflow, context: Context) -> Transition:
    step = REAL["_restart"](workflow, context)
    done = (*workflow.prepare.done, workflow.prepare.current or "")
    assert isinstance(step, Transition)
    return replaced(step, workflow=replaced(step.workflow, prepare=replaced(step.workflow.prepare, done=done)))


def _restart_that_repeats_approvals(workflow: Workflow, context: Context) -> Transition:
    step = REAL["_restart"](workflow, context)
    assert isinstance(step, Transition)
    return replaced(step, workflow=replaced(step.workflow, approval=Approval()))


def _restart_that_prepares_again(workflow: Workflow, context: Context) -> Transition:
    step = REAL["_restart"](workflow, context)
    assert isinstance(step, Transition)
    again = replaced(step.workflow.prepare, done=())
    return replaced(step, workflow=replaced(step.workflow, prepare=again))


def _answer_that_gives_up(workflow: Workflow, signal: ApprovalAnswered, context: Context) -> Transition | None:
    step = REAL["apply_approval_answer"](workflow, signal, context)
    assert step is None or isinstance(step, Transition)
    if step is None or not signal.error_kind:
        return step
    return replaced(step, workflow=replaced(step.workflow, approval=Approval(state="requested")))


def _restart_that_retries(workflow: Workflow, context: Context) -> Transition:
    step = REAL["_restart"](workflow, context)
    assert isinstance(step, Transition)
    is_stuck = workflow.recover.state == "failed"
    recover = replaced(workflow.recover, state="running") if is_stuck else step.workflow.recover
    return replaced(step, workflow=replaced(step.workflow, recover=recover))


def _takes_failures_for_done(progress: StageStatus, signal: HookFinished) -> StageStatus:
    ended = REAL["with_result"](progress, replaced(signal, is_required=signal.stage != "recover"))
    assert isinstance(ended, StageStatus)
    return ended


def _close_at_once(workflow: Workflow, *_: Any) -> Transition | None:
    return phases._close(workflow)


def _cancel_in_words_only(workflow: Workflow, stage: Stage, **_: bool) -> Transition:
    progress = replaced(workflow.stage_status(stage), current=None, state="canceled")
    return Transition(workflow=workflow.with_stage(stage, progress))


def _begin_when_an_operator_says_so(workflow: Workflow, context: Context) -> Any:
    step = REAL["_begin_when_due"](workflow, context)
    return step if workflow.operator_action == "approve" else None


def _nobody_prepares(*_: Any) -> bool:
    return False


def _needed_by_nobody_else(workflow: Workflow, workflows: Any) -> list[Workflow]:
    peers = stages.other_prepared(workflow, workflows)
    return [peer for peer in peers if stages.still_needs_preparation(peer) and stages.undoes(workflow, peer)]


def _recovers_all_again(workflow: Workflow, workflows: Any, context: Context) -> Any:
    """All hooks that are done run again if any other event that shares hooks was ever prepared for."""
    recover, needed_by = workflow.recover, phases._dependents(workflow, workflows)
    is_prepared = any(other.prepare.run > 0 for other in needed_by)
    if workflow.phase == "recovering" and recover.current is None and recover.done and is_prepared:
        return Transition(workflow=replaced(workflow, recover=replaced(recover, done=())))
    return REAL["next_transition"](workflow, workflows, context)


def _counts_what_only_waited(workflow: Workflow, signal: HookFinished) -> Any:
    return REAL["_finish_hook"](workflow, replaced(signal, has_run=True))


def _counts_nothing_that_was_canceled(workflow: Workflow, signal: HookFinished) -> Any:
    return REAL["_finish_hook"](workflow, replaced(signal, has_run=signal.outcome != "canceled"))


def _cancel_once(workflow: Workflow, stage: Stage, text: str, *, is_urgent: bool) -> Any:
    if workflow.stage_status(stage).is_canceling:
        return None
    return REAL["_cancel"](workflow, stage, text, is_urgent=is_urgent)


def _undoes_nothing(recovering: Workflow, _: Workflow) -> Workflow:
    return recovering


def _lose_as_if_it_had_vanished(workflow: Workflow, signal: Gone, context: Context) -> Any:
    return REAL["_mark_gone"](workflow, replaced(signal, names_others=False), context)


def _admit_and_forget(event: ScheduledEvent, context: Context) -> Any:
    return REAL["_create"](event, replaced(context, holds={}, expired=()))


def _answer_that_leaves_it_taken_back(workflow: Workflow, signal: ApprovalAnswered, context: Context) -> Any:
    forgotten = replaced(workflow, approval=replaced(workflow.approval, taken_back=None))
    return REAL["apply_approval_answer"](forgotten, signal, context)


def _answer_that_counts_for_each_appearance(workflow: Workflow, signal: ApprovalAnswered, context: Context) -> Any:
    taken = replaced(workflow, approval=replaced(workflow.approval, is_outlived=False))
    return REAL["apply_approval_answer"](taken, signal, context)


def _start_that_overlooks_holds(step: Transition, context: Context) -> Any:
    workflow = step.workflow
    noted = REAL["with_start_noted"](replaced(step, workflow=replaced(workflow, operator=None)), context)
    return replaced(noted, workflow=replaced(noted.workflow, operator=workflow.operator))


def _expiry_that_ends_the_hold(*arguments: Any) -> Any:
    put, removed = REAL["_changes_of_holds"](*arguments)
    ended = {("hold", key) for key in arguments[3].values()}
    return {key: one for key, one in put.items() if key not in ended}, removed | ended


def _expiry_that_leaves_holds_alone(*arguments: Any) -> Any:
    return REAL["_changes_of_holds"](*arguments[:3], (), arguments[4])


REAL: Faults = {
    "_changes_of_holds": remembered._changes_of_holds,
    "_restart": signals._restart,
    "apply_approval_answer": approval.apply_approval_answer,
    "_create": signals._create,
    "_mark_gone": signals._mark_gone,
    "explain": advance_module.explain,
    "why_approval_needed": approval.why_approval_needed,
    "_begin_when_due": phases._begin_when_due,
    "next_transition": phases.next_transition,
    "_finish_hook": signals._finish_hook,
    "_cancel": stages._cancel,
    "with_result": stages.with_result,
    "with_start_noted": unprepared_module.with_start_noted,
}
MUTANTS: dict[str, tuple[Faults, str, Script]] = {
    "no preparation is asked for": (_never_asked("preparation_gate"), "(1", Script(PAIRS["same hooks"])),
    "no rule is asked": (_never_asked("rule_gate"), "(1", Script({"A": a_rule(approve="never")})),
    "the service's gate is open": (
        _never_asked("eligibility_gate"), "(2)", Script({"A": a_rule()}, resources=OTHER, has_operator=True),
    ),
    "operators are ignored": (_never_asked("operator_gate"), "(1", Script({"A": a_rule(approve="manual")})),
    "anybody speaks for all": (
        _never_asked("shared_event_gate"), "(1", Script({"A": a_rule()}, resources=SHARED),
    ),
    "lost state": (_never_asked("state_loss_gate"), "(1, 2, 7)", Script({"A": a_rule()}, is_state_lost=True)),
    "recovery ignores other events": ({"undoes": _nobody_prepares}, "(4)", Script(PAIRS["same hooks"])),
    "recovery asks for shared hooks only": (
        {"next_transition": _recovers_all_again}, "(4)",
        Script(OVERLAPPING, crashes=0, appearances=1, begins=ALL_PREPARED),
    ),
    "a hook that only waited counts as run": (
        {"_finish_hook": _counts_what_only_waited}, "(4)",
        Script(WAITING["own recovery"], serialized=frozenset({"drain"}), crashes=0),
    ),
    "a hook that was canceled counts as not run": (
        {"_finish_hook": _counts_nothing_that_was_canceled}, "(4)", Script({"A": a_rule()}, crashes=0),
    ),
    "a preparation undoes no recover hook": (
        {"without_undone_hooks": _undoes_nothing}, "(4)",
        Script(
            a_pair({**DRAIN, "recover": ("resume", "uncheck")}, DRAIN), crashes=0, appearances=1, failures=0,
            begins=("A appears Scheduled", "A1 prepare succeeded", "A1 approval ok", "A vanishes"),
        ),
    ),
    "recovery beside the last prepare hook": (
        {"still_needs_preparation": lambda workflow: not workflow.is_over}, "(4)",
        Script(PAIRS["same hooks"], crashes=0),
    ),
    "recovery is forgotten": ({"_over": _close_at_once}, "(4)", Script({"A": a_rule()})),
    "recovery is not shared": ({"is_to_recover": _nobody_prepares}, "(4)", Script(PAIRS["same hooks"])),
    "a restart forgets the hook in flight": ({"_restart": _forgetful_restart}, "", Script({"A": a_rule()})),
    "a restart takes the hook in flight for done": (
        {"_restart": _restart_that_takes_hooks_for_done}, "(3)", Script({"A": a_rule()}),
    ),
    "a restart prepares again": ({"_restart": _restart_that_prepares_again}, "(3)", Script({"A": a_rule()})),
    "a reboot undoes nothing": (
        {"_without_what_a_reboot_has_undone": lambda workflow, _: workflow}, "(3)", Script({"A": a_rule()}),
    ),
    "hooks of two appearances run side by side": (
        {"_has_earlier_hook": _nobody_prepares}, "(3)", Script({"A": a_rule()}, appearances=2, crashes=0),
    ),
    "an approval outlives a failure": (
        {"with_void_approval": lambda step, _: step}, "(1",
        Script({"A": a_rule(approve="manual")}, has_operator=True, crashes=0),
    ),
    "a restart repeats approvals": ({"_restart": _restart_that_repeats_approvals}, "(6)", Script({"A": a_rule()})),
    "a failed approval is given up": (
        {"apply_approval_answer": _answer_that_gives_up}, "(6)", Script({"A": a_rule()}),
    ),
    "hooks are canceled in words only": ({"cancel_stage": _cancel_in_words_only}, "", Script({"A": a_rule()})),
    "a failed recovery is taken for done": (
        {"with_result": _takes_failures_for_done}, "(4)", Script({"A": a_rule(recover=("resume",))}, crashes=0),
    ),
    "recovery goes on after a failure": (
        {"with_result": _takes_failures_for_done}, "(4)", Script({"A": a_rule()}, crashes=0),
    ),
    "a restart tries a failed recovery again": (
        {"_restart": _restart_that_retries}, "(4)", Script({"A": a_rule(prepare=("drain",))}),
    ),
    "a hold stops approvals only": (
        {"starts_next": _nobody_prepares}, "(10)", Script({"A": a_rule()}, has_operator=True, crashes=0),
    ),
    "a recommendation is recovered from before its eviction": (
        {"_dependents": _needed_by_nobody_else}, "(11)", Script(WARNED["nothing shared"], crashes=0),
    ),
    "an expired recommendation begins again": (
        {"_create": _admit_and_forget}, "", Script(WARNED["same hooks"], crashes=0),
    ),
    "a hold ends when its event vanishes": (
        {"_create": _admit_and_forget}, "(10)",
        Script({"A": a_rule(prepare=("drain",), recover=())}, appearances=2, has_operator=True, crashes=0),
    ),
    "one memory for a hold and for an expiry": (
        {"_changes_of_holds": _expiry_that_ends_the_hold}, "(10)", replace(HELD_AND_EXPIRED, crashes=0),
    ),
    "a hold outlives the end that an operator gives": (
        {"_changes_of_holds": _expiry_that_leaves_holds_alone}, "(8)", replace(HELD_AND_EXPIRED, crashes=0),
    ),
    "an event forgets the approval that Azure has accepted": (
        {"apply_approval_answer": _answer_that_leaves_it_taken_back}, "(15)",
        Script({"A": a_rule(approve="manual", prepare=())}, has_operator=True, crashes=0),
    ),
    "an approval counts for a later appearance, too": (
        {"apply_approval_answer": _answer_that_counts_for_each_appearance}, "(6)",
        Script(
            PAIRS["same hooks"], crashes=0,
            begins=(
                "A appears Scheduled", "A1 prepare succeeded", "B appears Scheduled",
                "A vanishes", "another answer", "A appears Scheduled",
            ),
        ),
    ),
    "an event that left comes back as it was": (
        {"_mark_gone": _lose_as_if_it_had_vanished}, "",
        Script(PAIRS["same hooks"], may_leave=True, crashes=0, begins=("A appears Scheduled",)),
    ),
    "an eviction waits for its turn": (
        {"_has_come_to": _nobody_prepares}, "(13)",
        Script({"A": a_rule("A", **DRAIN), "P": a_rule("P", **DRAIN)}, serialized=frozenset({"drain"}), crashes=0),
    ),
    "an eviction that comes back waits for its own old hook": (
        {"_cancel": _cancel_once}, "(13)", Script({"P": a_rule("P", **DRAIN)}, appearances=2, crashes=0),
    ),
    "a reason outlives its cause": (
        {"explain": lambda one, why, context: REAL["explain"](one, why or one.wait_reason, context)},
        "(12)", Script({"A": a_rule(approve="manual", prepare=("drain",))}, has_operator=True, crashes=0),
    ),
    "an approval that is needed is noted for ever": (
        {"why_approval_needed": lambda workflow, context: REAL["why_approval_needed"](
            replaced(workflow, operator=None), context
        )},
        "(14)", Script({"A": a_rule(approve="manual", prepare=("drain",))}, has_operator=True, crashes=0),
    ),
    "a NotBefore that moves away is not noticed": (
        {"early_until": lambda *_: None},
        "(16)", Script({"A": a_rule(prepare=("drain",), approve="never")}, may_move=True, crashes=0),
    ),
    "a recommendation never ends": (
        {"expires_at": lambda _: None},
        "(16)",
        Script(
            {"R": a_rule("R", prepare=("drain",), expire_after=EXPIRE_SECONDS)}, crashes=0,
            begins=("R appears Scheduled", "R1 prepare succeeded"),
        ),
    ),
    "what is said of a start is forgotten": (
        {"with_start_noted": lambda step, _: step}, "(17)", Script({"A": a_rule()}, crashes=0),
    ),
    "a reboot hides that it was prepared": (
        {"is_begun": lambda workflow, _: workflow.prepare.state != "idle"}, "(17)",
        Script({"A": a_rule(prepare=("drain",))}, crashes=1),
    ),
    "an operator's hold is blamed on the hooks": (
        {"with_start_noted": _start_that_overlooks_holds}, "(17)",
        Script({"A": a_rule()}, crashes=0, has_operator=True),
    ),
    "nothing is said but of events without notice": (
        {"with_reason": lambda workflow, _: workflow, "is_begun": _nobody_prepares}, "(17)",
        Script({"A": a_rule()}, crashes=0),
    ),
    "an event is prepared for only when an operator says so": (
        {"_begin_when_due": _begin_when_an_operator_says_so},
        "(8)", Script({"A": a_rule()}),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("faults", "found", "script"), MUTANTS.values(), ids=MUTANTS.keys())
def test_the_walk_detects_a_broken_state_machine(
    faults: Faults, found: str, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, wrong in faults.items():
        break_workflow(monkeypatch, name, wrong)
    with pytest.raises(BrokenError) as caught:
        walk(replace(script, depth=ONE_EVENT if len(script.rules) == 1 else TWO_EVENTS))
    assert str(caught.value).startswith(found)
    assert re.search(r"\n  after: [ARP] appears S", str(caught.value))


NEVER_MOVED = replace(
    Script({"A": OUT_OF_SERVICE["never"]}, has_operator=True, crashes=0, depth=ONE_EVENT), may_move=True
)


@pytest.mark.parametrize(
    ("kind", "script"),
    [
        ("recovery_failed", Script({"A": a_rule(prepare=("drain",))}, crashes=0, depth=ONE_EVENT)),
        ("out_of_service", NEVER_MOVED),
        ("out_of_service", replace(NEVER_MOVED, may_move=False, has_not_before=False)),
        ("prepare_failed", replace(NEVER_MOVED, rules={"A": a_rule(prepare=("drain",), drain_for=30.0)})),
        ("approval_needed", replace(NEVER_MOVED, rules={"A": a_rule(approve="manual")})),
    ],
)
def test_the_walk_detects_that_no_person_is_asked(
    kind: AttentionKind, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert walk(script) > 10
    events = attention_list.of_events
    monkeypatch.setattr(attention_list, "of_events", lambda status: [x for x in events(status) if x.kind != kind])
    with pytest.raises(BrokenError) as caught:
        walk(script)
    assert str(caught.value).startswith("(16)")
