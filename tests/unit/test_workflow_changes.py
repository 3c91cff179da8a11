"""Events that become others, policies that lose hooks, agents that pause, clocks that are set: lives by chance.

test_workflow_walk.py goes through every order of things under one policy, with events that stay what they are. All
of that changes here, in lives that are drawn by lot. For every prepare hook ``p1`` there is a recover hook ``r1``
that undoes it, and each life is held against what must be true from the outside:

- an approval is for an event that stands in the document as Scheduled and names this VM, by an agent that acts; it
  is what the rule in force or an operator wants, who has seen the event as it is; it is never sent twice
- a hook starts only if there is one, and the agent acts and has read a document; forward only while the event is
  there, and once, except after a crash in the middle of it; never to be canceled in the same moment
- nothing is undone that an event which is not over has prepared
- what is due is begun, and without news there is nothing more to do
- when all events are over, everything that was prepared is undone, and nothing is pending
"""

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, timedelta
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from mutants import break_workflow

from scheduled_events_agent.imds.compare import compare
from scheduled_events_agent.imds.document import Document, ScheduledEvent
from scheduled_events_agent.policy import MaintenanceWindow, MatchContext, Rule, When, decide
from scheduled_events_agent.workflow import (
    AgentRestarted,
    ApprovalAnswered,
    Approve,
    CancelHook,
    ClockChanged,
    Context,
    HookFinished,
    HookOutcome,
    OperatorCommand,
    PolicyChanged,
    RunHook,
    Signal,
    Stage,
    Transition,
    Workflow,
    advance,
    known_events,
    stages,
)

advance_module = importlib.import_module("scheduled_events_agent.workflow.advance")

VM = "vm_1"
TYPES = ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate")
RESOURCES = ((VM,), (VM,), (VM, "vm_2"), ("vm_2", VM), ("vm_2",), ())
HOOKS = frozenset({"p1", "p2", "p3", "r1", "r2", "r3", "tell"})
HOOK_SECONDS = {"p1": 10.0, "p2": 120.0, "p3": 1200.0}
RESERVE = 5.0
NOTICES = (-60, 5, 30, 300, 900, 86400)
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


class BrokenError(AssertionError):
    """Something is not as it must be; the story leads there."""


OPTIONAL = ("p3", "r3")


@dataclass
class Flight:
    """A hook that runs."""

    hook: str
    run: int
    is_told_to_end: bool = False


@dataclass
class Life:
    """The world around the state machine, and the open workflows that the machine has returned last."""

    seed: int
    context: Context = field(init=False)
    workflows: dict[str, Workflow] = field(default_factory=dict)
    document: dict[str, ScheduledEvent] = field(default_factory=dict)
    flights: dict[tuple[str, Stage], Flight] = field(default_factory=dict)
    posts: list[str] = field(default_factory=list)
    confirmed: set[str] = field(default_factory=set)
    used: set[tuple[str, Stage, str]] = field(default_factory=set)
    succeeded: set[tuple[str, str]] = field(default_factory=set)
    undone: dict[str, bool] = field(default_factory=dict)
    """Whether what a prepare hook did is undone, by the number that it shares with its recover hook."""
    words: dict[str, tuple[str, str, set[str]]] = field(default_factory=dict)
    """What an operator said of which type and VMs."""
    count: int = 0
    story: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        start = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
        self.context = Context(
            now=start, names=(VM,), rules=self.some_rules(), windows=self.a_window(), hooks=HOOKS, boot_id="1",
            document_at=start, hook_seconds=HOOK_SECONDS, reserve=RESERVE,
        )  # fmt: skip

    def live(self, steps: int) -> None:
        mishaps: list[tuple[int, Callable[[], None]]] = [
            (12, self.announce), (24, self.change), (26, self.end_a_hook), (8, self.answer), (7, self.speak),
            (5, self.reload), (4, self.pause), (3, self.set_clock), (4, self.crash), (7, self.send),
        ]  # fmt: skip
        weights, whats = zip(*mishaps, strict=True)
        for _ in range(steps):
            self.wait(self.chance.choice((0.01, 1, 1, 1, 20, 300, 3600)))
            self.chance.choices(whats, weights)[0]()
        self.end()

    def end(self) -> None:
        """A world without mishaps, in which every event is over."""
        self.story.append("all is fair")
        self.context = replace(self.context, is_acting=True, hooks=HOOKS)
        self.send(PolicyChanged())
        self.document.clear()
        while any(not workflow.is_over for workflow in self.workflows.values()):
            self.read()
        for _ in range(100):
            failed = [key for key, workflow in self.workflows.items() if workflow.phase == "recovery_failed"]
            if self.flights:
                key = next(iter(self.flights))
                self.finish(key, "canceled" if self.flights[key].is_told_to_end else "succeeded")
            elif failed:
                self.send(OperatorCommand(workflow_id=failed[0], action="retry", user="kim"))
        self.expect(not self.workflows, f"never over: {[*self.workflows.values()]}")
        self.expect(all(self.undone.values()), f"never undone: {self.undone}")

    def expect(self, holds: bool, text: str) -> None:
        if not holds:
            raise BrokenError("\n".join([f"seed {self.seed}: {text}", *self.story]))

    # --- What there is by lot.

    def some_rules(self) -> tuple[Rule, ...]:
        choice, rules = self.chance.choice, []
        for number in range(choice((0, 1, 2, 3))):
            numbers = self.chance.sample((1, 2, 3), choice((0, 1, 2)))
            when: dict[str, Any] = {
                "type": choice(((), tuple(self.chance.sample(TYPES, 2)))),
                "status": choice(((), (), (), ("Scheduled",), ("Started",))),
                "affects": choice((("self",), ("self",), ("shared",), ("self", "others"))),
                "notice_below": choice((None, None, None, 600.0)),
            }
            rule: dict[str, Any] = {
                "approve": choice(("immediately", "when-prepared", "when-prepared", "manual", "never")),
                "on_failure": choice(("hold", "approve")),
                "on_early_start": choice(("cancel", "finish")),
                "shared": choice((None, "hold", "first", "any")),
                "on_start": choice(((), (), ("tell",))),
                "drain_for": choice((0.0, 0.0, 30.0, 600.0)),
                "lead": choice((None, None, 0.0, 60.0, 900.0)),
                "window": choice((None, None, None, "night")),
                "prepare": tuple(f"p{n}" for n in numbers),
                "recover": tuple(f"r{n}" for n in numbers),
            }
            rules.append(Rule(name=f"rule-{number}", when=When(**when), **rule))
        return tuple(rules)

    def a_window(self) -> dict[str, MaintenanceWindow]:
        hour, days = self.chance.randrange(24), self.chance.sample(DAYS, 3)
        return {"night": MaintenanceWindow(start=time(hour), length=7200.0, days=tuple(days))}  # type: ignore[arg-type]

    def a_time(self) -> datetime | None:
        notice = self.chance.choice((None, *NOTICES))
        return None if notice is None else self.context.now + timedelta(seconds=notice)

    # --- What happens.

    def wait(self, seconds: float) -> None:
        self.context = replace(self.context, now=self.context.now + timedelta(seconds=seconds))

    def announce(self) -> None:
        choice = self.chance.choice
        self.count += 1
        event = ScheduledEvent(
            id=f"E{self.count}", type=choice((*TYPES, "Upgrade")), resources=choice(RESOURCES),
            status=choice(("Scheduled", "Scheduled", "Scheduled", "Started", "")), not_before=self.a_time(),
        )  # fmt: skip
        self.document[event.id] = event
        self.read()

    def change(self) -> None:
        if not self.document:
            return
        choice = self.chance.choice
        event = self.document.pop(choice([*self.document]))
        changed = choice(
            (
                None,
                replace(event, status="Started", not_before=None, id=choice((event.id, event.id, f"{event.id}n"))),
                replace(event, status="Scheduled"),
                replace(event, not_before=self.a_time()),
                replace(event, type=choice(TYPES)),
                replace(event, resources=choice(RESOURCES)),
            )
        )
        if changed:
            self.document[changed.id] = changed
        self.read()

    def end_a_hook(self) -> None:
        if self.flights:
            key = self.chance.choice([*self.flights])
            outcomes: tuple[HookOutcome, ...] = ("succeeded", "succeeded", "succeeded", "failed", "timed_out")
            if self.flights[key].is_told_to_end:
                outcomes = ("canceled", "canceled", "succeeded")
            self.finish(key, self.chance.choice(outcomes))

    def finish(self, key: tuple[str, Stage], outcome: HookOutcome) -> None:
        flight = self.flights.pop(key)
        is_required = flight.hook not in OPTIONAL
        succeeded = outcome == "succeeded" or (outcome != "canceled" and not is_required)
        if key[1] == "recover" and succeeded:
            self.undone[flight.hook[1:]] = True
        if succeeded:
            self.succeeded.add((key[0], flight.hook))
        self.send(
            HookFinished(
                workflow_id=key[0], stage=key[1], hook=flight.hook, run=flight.run, outcome=outcome,
                is_required=is_required,
            )
        )  # fmt: skip

    def answer(self) -> None:
        if self.posts:
            workflow_id = self.posts.pop(self.chance.randrange(len(self.posts)))
            error_kind = self.chance.choice(("", "", "throttled"))
            if not error_kind:
                self.confirmed.add(workflow_id)
            self.send(ApprovalAnswered(workflow_id=workflow_id, error_kind=error_kind))

    def speak(self) -> None:
        if self.workflows:
            workflow = self.workflows[self.chance.choice([*self.workflows])]
            word: Any = self.chance.choice(("approve", "hold", "release"))
            if (workflow.recover if workflow.is_over else workflow.prepare).state == "failed":
                word = self.chance.choice(("retry", "resolve" if workflow.is_over else "retry", word))
            if word == "resolve":
                self.undone |= {hook[1:]: True for hook in workflow.decision.recover}
            elif word == "retry":
                self.used.discard((workflow.id, "prepare", workflow.prepare.failed_hook))
            else:
                self.words[workflow.id] = (word, workflow.event.type, set(workflow.event.resources))
            self.send(OperatorCommand(workflow_id=workflow.id, action=word, user="kim"))

    def reload(self) -> None:
        """Hooks that the new policy does not name may be gone, but for those that the engine keeps."""
        rules = self.some_rules()
        hooks = {hook for rule in rules for hook in (*rule.prepare, *rule.on_start, *rule.recover)}
        kept = {h for w in self.workflows.values() for h in (*w.decision.on_start, *w.decision.recover)}
        hooks = self.chance.choice((hooks | kept, set(HOOKS)))
        self.context = replace(self.context, rules=rules, windows=self.a_window(), hooks=frozenset(hooks))
        self.send(PolicyChanged())

    def pause(self) -> None:
        self.context = replace(self.context, is_acting=not self.context.is_acting)
        self.send(PolicyChanged())

    def set_clock(self) -> None:
        """While the agent runs, which sees it, or while it does not."""
        seconds = self.chance.choice((-7200, -30, 30, 7200))
        self.wait(seconds)
        self.send(*self.chance.choice(((), (ClockChanged(seconds),))))

    def crash(self) -> None:
        self.used -= {(*key, flight.hook) for key, flight in self.flights.items()}
        self.flights, self.posts = {}, []
        stored = msgspec.json.encode([*self.workflows.values()])
        self.workflows = {workflow.id: workflow for workflow in msgspec.json.decode(stored, type=list[Workflow])}
        self.context = replace(self.context, document_at=None, boot_id=self.chance.choice(("1", "2")))
        for workflow in self.workflows.values():
            may_start = not (workflow.is_over or workflow.was_started or workflow.event.is_started)
            if may_start and workflow.prepare_boot_id != self.context.boot_id:  # a reboot has undone it
                key = (workflow.id, "prepare")
                self.used = {used for used in self.used if used[:2] != key}
        self.send(AgentRestarted(), PolicyChanged())
        if self.document and self.chance.random() < 0.5:
            self.document.popitem()
        self.read()

    def read(self) -> None:
        self.context = replace(self.context, document_at=self.context.now)
        for workflow in self.workflows.values():
            event = self.document.get(workflow.event.id)
            word, type_, resources = self.words.get(workflow.id, ("", "", set()))
            if event and word == "approve" and (event.type != type_ or not set(event.resources) <= resources):
                self.words[workflow.id] = ("", "", set())
            elif event:
                self.words[workflow.id] = (word, type_, set(event.resources))
        # The answer before may have been too short a time ago to count as another one.
        is_apart = self.chance.random() < 0.7
        missing = {workflow.event.key: is_apart for workflow in self.workflows.values() if workflow.is_missing}
        document = Document(incarnation="", events=(*self.document.values(),))
        self.send(*compare(known_events(self.workflows), document, missing))

    # --- What the machine makes of it.

    def send(self, *signals: Signal) -> None:
        self.story.append(f"{self.context.now:%d %H:%M:%S} {signals or 'time passes'}")
        progression = advance(self.workflows, signals, self.context)
        self.expect(not progression.errors, f"bugs: {progression.errors}")
        again = advance(progression.workflows, [], self.context)
        self.expect(not again.transitions, f"without news there is more to do: {again.transitions}")
        self.workflows = progression.workflows
        workflows = {step.workflow.id: step.workflow for step in progression.transitions} | self.workflows
        begun = set()
        for step in progression.transitions:
            for effect in step.effects:
                self.story.append(f"    {effect}")
                match effect:
                    case RunHook():
                        self.check_hook(step.workflow, effect, workflows)
                        begun.add((effect.workflow_id, effect.stage))
                        self.flights[effect.workflow_id, effect.stage] = Flight(effect.hook, effect.run)
                    case CancelHook():
                        key = (effect.workflow_id, effect.stage)
                        self.expect(key in self.flights, "a hook is canceled that does not run")
                        self.expect(key not in begun, "a hook is canceled in the moment in which it starts")
                        self.flights[key].is_told_to_end = True
                    case Approve():
                        self.check_approval(workflows[effect.workflow_id], effect.event_id)
                        self.posts.append(effect.workflow_id)
        for workflow in self.workflows.values():
            self.check_progress(workflow)

    def check_hook(self, workflow: Workflow, effect: RunHook, workflows: dict[str, Workflow]) -> None:
        key, hook, number = (effect.workflow_id, effect.stage), effect.hook, effect.hook[1:]
        self.expect(self.context.is_acting and self.context.document_at is not None, "a hook starts blindly")
        self.expect(hook in self.context.hooks, "a hook starts that there is not")
        self.expect(key not in self.flights, "two hooks of a stage run")
        self.expect(workflow.is_over or workflow.event.id in self.document, "a hook starts for a missing event")
        if effect.stage == "recover":
            self.expect(workflow.is_over, "an event is recovered from that is not over")
            for other in workflows.values():
                needs_it = other.is_prepared_for and not other.is_over and f"p{number}" in other.decision.prepare
                self.expect(not needs_it, f"{hook} undoes what {other.event.id} needs")
            return
        self.expect(not workflow.is_over, "an event is prepared for that is over")
        self.expect((*key, hook) not in self.used, "a hook runs again")
        self.used.add((*key, hook))
        if effect.stage == "prepare":
            is_held = self.words.get(workflow.id, ("",))[0] == "hold"
            self.expect(not is_held, "a prepare hook starts against an operator")
            self.undone[number] = False
            beside = [flight.hook for (_, stage), flight in self.flights.items() if stage == "recover"]
            self.expect(f"r{number}" not in beside, "what is prepared is undone at the same time")

    def check_approval(self, workflow: Workflow, event_id: str) -> None:
        event, context = self.document.get(event_id), self.context
        self.expect(
            event is not None and event.status == "Scheduled", "an event is approved that is not scheduled"
        )
        assert event is not None
        self.expect(VM in event.resources, "an event of others is approved")
        self.expect(context.is_acting and context.document_at is not None, "an event is approved blindly")
        self.expect(workflow.id not in {*self.posts, *self.confirmed}, "an event is approved again")
        word = self.words.get(workflow.id, ("",))[0]
        self.expect(word != "hold", "an event is approved that an operator holds")
        if word == "approve":
            return
        facts = MatchContext(names=context.names, not_before_seen_at=workflow.not_before_seen_at)
        decision = decide(context.rules, context.windows, event, facts)
        is_allowed = decision.approve in ("immediately", "when-prepared") and decision.can_approve_for_all
        self.expect(is_allowed, "an event is approved though no rule says so")
        if decision.approve == "when-prepared" and decision.on_failure == "hold":
            missing = [hook for hook in decision.prepare if (workflow.id, hook) not in self.succeeded]
            self.expect(not missing, f"an event is approved without {missing}")

    def check_progress(self, workflow: Workflow) -> None:
        context, decision, event = self.context, workflow.decision, workflow.event
        is_present = event.id in self.document
        is_ahead = event.status == "Scheduled" and not workflow.was_started and is_present
        if not is_ahead or not context.is_acting or context.document_at is None or not decision.rule:
            return
        needed = decision.drain_for + sum(HOOK_SECONDS[hook] for hook in decision.prepare) + RESERVE
        start = decision.start(event, context.now, needed)
        is_due = workflow.id in self.confirmed or start.at <= context.now
        is_idle = workflow.prepare.state == "idle" and workflow.operator_action != "hold"
        self.expect(not (decision.has_preparation and is_due and is_idle), f"{event.id} is not prepared for")


LIVES = range(500)  # each machine that is wrong shows in one of them


def lives(seeds: range = LIVES) -> None:
    for seed in seeds:
        Life(seed).live(steps=(10, 30, 60)[seed % 3])


@pytest.mark.parametrize("seeds", [LIVES, pytest.param(range(500, 8000), marks=pytest.mark.nightly)])
def test_no_change_breaks_an_invariant(seeds: range) -> None:
    lives(seeds)


def without(phase: str) -> Callable[[Workflow], bool]:
    real = stages.needs_more_preparation
    return lambda workflow: workflow.phase != phase and real(workflow)


def loses_nothing(*_: object) -> tuple[str, ...]:
    return ()


def recovers_first(items: Any, key: Any) -> list[str]:
    return sorted(items, key=lambda item: not key(item))


def starts_nothing(workflow: Workflow, *_: object) -> Transition:
    return Transition(workflow=replace(workflow, phase="recovering", was_started=True))


def is_never_needed(*_: object) -> bool:
    return False


@pytest.mark.parametrize(
    ("name", "wrong", "found"),
    [
        ("needs_more_preparation", without("approved"), "is not prepared for"),
        ("needs_more_preparation", without("prepared"), "is not prepared for"),
        ("_lost_hooks", loses_nothing, "a hook starts that there is not"),
        ("sorted", recovers_first, "undoes what|canceled in the moment"),
        ("undoes", is_never_needed, "undoes what"),
        ("_may_prepare_more", is_never_needed, "is approved without"),
        ("_start", starts_nothing, "bugs: .* is not an allowed transition"),
    ],
)
def test_a_broken_state_machine_is_detected(
    name: str, wrong: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "sorted":
        monkeypatch.setattr(advance_module, name, wrong, raising=False)
    else:
        break_workflow(monkeypatch, name, wrong)
    with pytest.raises(BrokenError, match=found):
        lives()
