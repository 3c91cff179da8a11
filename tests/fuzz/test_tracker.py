"""Documents in any order of things, against a model that is kept in plain sets.

The tracker (``events.compare``, and what ``workflow.proceed`` makes of its answers) and the policy
(``policy.decide``) are driven together by Hypothesis: events appear, change, start, swap their ids, vanish and
come back; the agent restarts; the clock jumps; the rules are replaced.
"""

import fnmatch
import importlib
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scheduled_events_agent.imds import document as document_module
from scheduled_events_agent.imds.compare import Gone, Missing, Seen, compare
from scheduled_events_agent.imds.document import (
    EVENT_TYPES,
    RECOMMENDATION,
    Document,
    ScheduledEvent,
    parse_document,
)
from scheduled_events_agent.imds.text import DocumentError
from scheduled_events_agent.policy import MatchContext, Rule, When, decide
from scheduled_events_agent.workflow import (
    AgentRestarted,
    ApprovalAnswered,
    Approve,
    CancelHook,
    Context,
    HookFinished,
    PolicyChanged,
    RunHook,
    Signal,
    Workflow,
    Workflows,
    advance,
    known_events,
)

REAL_COMPARE = compare
decide_module = importlib.import_module("scheduled_events_agent.policy.decide")
NAMES = ("vm-1", "web-front")
HOOKS = {"drain", "resume", "tell"}

# --- what Azure has to say


@dataclass(frozen=True)
class Told:
    """One event as the document tells it; its id in any case."""

    id: str
    type: str
    status: str
    source: str
    resources: tuple[str, ...]
    not_before: datetime | None
    seconds: int
    description: str

    @property
    def key(self) -> str:
        return self.id.lower()

    @property
    def rename_fingerprint(self) -> tuple[Any, ...]:
        return (self.type, self.source, self.resources, self.description)

    def object(self) -> dict[str, Any]:
        return {
            "EventId": self.id,
            "EventStatus": self.status,
            "EventType": self.type,
            "Resources": list(self.resources),
            "NotBefore": "" if self.not_before is None else self.not_before.strftime("%a, %d %b %Y %H:%M:%S GMT"),
            "Description": self.description,
            "EventSource": self.source,
            "DurationInSeconds": self.seconds,
        }

    def event(self) -> ScheduledEvent:
        """The event as the agent has it, built without its parser."""
        return ScheduledEvent(
            id=self.id,
            type=self.type,
            status=self.status,
            source=self.source,
            resources=self.resources,
            not_before=self.not_before,
            duration_seconds=None if self.seconds < 0 else float(self.seconds),
            description=self.description,
        )


IDS = st.sampled_from(["A1", "a1", "B2", "b2", "C3", "D4", "E5", "F6"])
# A recommendation has a key and a life of its own: tests/unit/test_recommendations.py.
TYPES = st.sampled_from([*(type_ for type_ in EVENT_TYPES if type_ != RECOMMENDATION), "Upgrade"])
SOURCES = st.sampled_from(["Platform", "User", ""])
RESOURCES = st.sampled_from([("vm-1",), ("_VM-1",), ("vm-1", "vm-2"), ("vm-2", "vm-1"), ("vm-2",), ("vm-10",), ()])
DESCRIPTIONS = st.sampled_from(["", "Host server is undergoing maintenance.", "Live Migration"])
SECONDS = st.sampled_from([-1, 0, 5, 9, 30])
NOTICES = st.sampled_from([None, -3600, 0, 30, 300, 900, 86400 * 7])

# --- what the operator may want

MANY_DURATIONS = st.sampled_from([5.0, 9.0, 30.0])
MANY_NOTICES = st.sampled_from([30.0, 300.0, 3600.0])


def some(*words: str) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(st.sampled_from(words), min_size=1, max_size=2, unique=True).map(tuple)


CONDITIONS: dict[str, st.SearchStrategy[Any]] = {
    "type": some(*EVENT_TYPES),
    "source": some("Platform", "User"),
    "status": some("Scheduled", "Started"),
    "affects": st.sampled_from([("self",), ("shared",), ("others",), ("self", "others")]),
    "resource": some("vm-?", "VM-1", "*2", "web*"),
    "description": some("maint.*e", "^live", "^$"),
    "duration_below": MANY_DURATIONS,
    "duration_at_least": MANY_DURATIONS,
    "notice_below": MANY_NOTICES,
    "notice_at_least": MANY_NOTICES,
}


@st.composite
def whens(draw: st.DrawFn) -> When:
    """Few conditions at a time, or hardly any rule would ever hold."""
    names = draw(st.lists(st.sampled_from(sorted(CONDITIONS)), max_size=2, unique=True))
    return When(**{name: draw(CONDITIONS[name]) for name in names})


ANY_RULE = st.builds(
    Rule,
    name=st.just("x"),
    when=whens(),
    prepare=st.sampled_from([(), ("drain",)]),
    on_start=st.sampled_from([(), ("tell",)]),
    recover=st.sampled_from([(), ("resume",)]),
    approve=st.sampled_from(["immediately", "when-prepared", "manual", "never"]),
    shared=st.sampled_from([None, "hold", "first", "any"]),
)
RULES = st.lists(ANY_RULE, max_size=4).map(
    lambda rules: tuple(msgspec.structs.replace(one, name=f"r{index}") for index, one in enumerate(rules))
)


def expected_rule(rules: tuple[Rule, ...], told: Told, not_before_seen_at: datetime) -> str | None:
    """The name of the first rule whose conditions hold, computed a second time and as simply as possible."""
    mine = {name.lower() for name in NAMES}
    named = [resource.lower().removeprefix("_") in mine for resource in told.resources]
    affects = "unknown"
    if named:
        affects = "shared" if any(named) else "others"
    if named and all(named):
        affects = "self"
    notice = 0.0
    if told.not_before is not None and told.status != "Started":
        notice = max(0.0, (told.not_before - not_before_seen_at).total_seconds())
    known = told.seconds >= 0
    for one in rules:
        when = one.when
        forms = [form for text in told.resources for form in (text.lower(), text.lower().removeprefix("_"))]
        conditions = [
            not when.type or told.type in when.type,
            not when.source or told.source in when.source,
            not when.status or told.status in when.status,
            affects in when.affects or (affects == "shared" and "self" in when.affects),
            not when.resource
            or any(fnmatch.fnmatch(form, glob.lower()) for form in forms for glob in when.resource),
            not when.description
            or any(re.search(text, told.description, re.IGNORECASE) for text in when.description),
            when.duration_below is None or (known and told.seconds < when.duration_below),
            when.duration_at_least is None or (known and told.seconds >= when.duration_at_least),
            when.notice_below is None or notice < when.notice_below,
            when.notice_at_least is None or notice >= when.notice_at_least,
        ]
        if all(conditions):
            return one.name
    return None


# --- the machine

Changes = list[Seen | Missing | Gone]


class DocumentTracker(RuleBasedStateMachine):
    """Azure on one side, the agent on the other, and between them what must be true of both."""

    def __init__(self) -> None:
        super().__init__()
        self.azure: dict[str, Told] = {}
        self.known: dict[str, Told] = {}  # what the last documents said, by key
        self.missing: set[str] = set()  # of these, what the last one did not say
        self.noticed: dict[str, datetime] = {}
        self.lives: dict[str, str] = {}  # key -> id of the workflow that follows it
        self.workflows: Workflows = {}
        self.answers: list[Signal] = []
        self.now = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
        self.incarnation = 1
        self.policy: tuple[Rule, ...] = ()

    @initialize(rules=RULES)
    def begin(self, rules: tuple[Rule, ...]) -> None:
        self.policy = rules

    # Changes in Azure.

    @rule(
        id_=IDS, type_=TYPES, source=SOURCES, resources=RESOURCES, notice=NOTICES, seconds=SECONDS,
        description=DESCRIPTIONS, is_started=st.sampled_from([False, False, False, True]),
    )  # fmt: skip
    def appears(
        self, *, id_: str, type_: str, source: str, resources: tuple[str, ...], notice: int | None, seconds: int,
        description: str, is_started: bool,
    ) -> None:  # fmt: skip
        assume(id_.lower() not in self.azure)
        not_before = None if notice is None else self.now.replace(microsecond=0) + timedelta(seconds=notice)
        status = "Started" if is_started else "Scheduled"
        told = Told(id_, type_, status, source, resources, not_before, seconds, description)
        self.azure[told.key] = told

    @precondition(lambda self: self.azure)
    @rule(data=st.data(), type_=TYPES, resources=RESOURCES, notice=NOTICES, seconds=SECONDS)
    def changes(
        self, data: st.DataObject, type_: str, resources: tuple[str, ...], notice: int | None, seconds: int
    ) -> None:
        told = self._any(data)
        not_before = None if notice is None else self.now.replace(microsecond=0) + timedelta(seconds=notice)
        change: dict[str, Any] = {
            "type": type_,
            "resources": resources,
            "not_before": not_before,
            "seconds": seconds,
            "id": told.id.swapcase(),
            "status": "Scheduled",
        }
        key = data.draw(st.sampled_from(sorted(change)))
        self.azure[told.key] = replace(told, **{key: change[key]})

    @precondition(lambda self: self.azure)
    @rule(data=st.data(), keeps_time=st.booleans())
    def starts(self, data: st.DataObject, keeps_time: bool) -> None:
        told = self._any(data)
        self.azure[told.key] = replace(told, status="Started", not_before=told.not_before if keeps_time else None)

    @precondition(lambda self: self.azure)
    @rule(data=st.data(), id_=IDS)
    def starts_under_another_id(self, data: st.DataObject, id_: str) -> None:
        assume(id_.lower() not in self.azure)
        told = self._any(data)
        del self.azure[told.key]
        self.azure[id_.lower()] = replace(told, id=id_, status="Started", not_before=None)

    @precondition(lambda self: self.azure)
    @rule(data=st.data())
    def vanishes(self, data: st.DataObject) -> None:
        del self.azure[self._any(data).key]

    @rule()
    def service_is_switched_on_again(self) -> None:
        self.incarnation = 1

    # Changes to the agent.

    @rule(seconds=st.sampled_from([-3600, -1, 1, 60, 3600]))
    def time_passes(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)

    @rule(rules=RULES)
    def rules_are_replaced(self, rules: tuple[Rule, ...]) -> None:
        self.policy = rules
        self._proceed([PolicyChanged()])

    @rule()
    def agent_restarts(self) -> None:
        self.workflows = {key: restored(workflow) for key, workflow in self.workflows.items()}
        self.answers.clear()
        self._proceed([AgentRestarted()])

    @precondition(lambda self: self.answers)
    @rule(is_lucky=st.sampled_from([True, True, False]))
    def hooks_and_approvals_end(self, is_lucky: bool) -> None:
        answers, self.answers = self.answers, []
        self._proceed([answer if is_lucky else unlucky(answer) for answer in answers])

    @rule(
        body=st.sampled_from(
            [b"", b"<html>", b'{"Events": null}', b'{"Events": [1]}', b'{"DocumentIncarnation": 1}']
        )
    )
    def something_else_is_answered(self, body: bytes) -> None:
        """It is no document, and so says nothing of any event: there is nothing to compare."""
        with pytest.raises(DocumentError):
            parse_document(body)

    @rule(data=st.data())
    def document_is_read(self, data: st.DataObject) -> None:
        self.now += timedelta(microseconds=1)  # no two documents are read in the same microsecond
        order = data.draw(st.permutations(sorted(self.azure)))
        document = self._document([self.azure[key] for key in order], has_twin=data.draw(st.booleans()))
        # Two answers that come one right after the other count as one.
        is_apart = data.draw(st.booleans())
        missing = dict.fromkeys(self.missing, is_apart)
        changes = compare(known_events(self.workflows), document, missing)
        self._check(changes, order, is_apart=is_apart)
        self._follow(changes)
        self._proceed(list(changes))
        self._check_lives()

    @rule()
    def document_is_read_again(self) -> None:
        """Read the same text as last time: none of it is new."""
        document = self._document([told for key, told in self.known.items() if key not in self.missing])
        assert compare(known_events(self.workflows), document, dict.fromkeys(self.missing, False)) == []

    # Invariants.

    @invariant()
    def what_is_known_is_what_the_last_documents_said(self) -> None:
        assert known_events(self.workflows) == {key: told.event() for key, told in self.known.items()}
        assert {w.event.key for w in self.workflows.values() if w.is_missing} == self.missing

    @invariant()
    def first_matching_rule_took_each_event(self) -> None:
        for key, told in self.known.items():
            workflow = self.workflows[self.lives[key]]
            expected = expected_rule(self.policy, told, self.noticed[key])
            facts = MatchContext(names=NAMES, not_before_seen_at=self.noticed[key])
            assert decide(self.policy, {}, told.event(), facts).rule == expected
            assert workflow.not_before_seen_at == self.noticed[key]
            has_begun = (
                workflow.prepare.state != "idle" or workflow.on_start.state != "idle" or told.status == "Started"
            )
            if not has_begun:
                assert workflow.decision.rule == expected
            if workflow.decision.approve != "never":
                assert told.type in EVENT_TYPES

    # The machinery.

    def _any(self, data: st.DataObject) -> Told:
        return self.azure[data.draw(st.sampled_from(sorted(self.azure)))]

    def _document(self, tolds: list[Told], *, has_twin: bool = False) -> Document:
        self.incarnation += 1
        objects = [told.object() for told in tolds]
        if has_twin and objects:
            # One event twice, and one that says that it is over: neither is news of its own.
            objects.append(dict(objects[0], Resources=[]))
            objects.append(dict(objects[0], EventId="over-1", EventStatus="Canceled"))
        return parse_document(json.dumps({"DocumentIncarnation": self.incarnation, "Events": objects}).encode())

    def _check(self, changes: Changes, order: list[str], *, is_apart: bool) -> None:
        """Check which events were seen and which are gone, from two sets and nothing else."""
        new = [self.azure[key] for key in order if key not in self.known]
        missing = {key: told for key, told in self.known.items() if key not in self.azure}
        back = self.missing & self.azure.keys()
        changed = {key for key in self.azure if key in self.known and self.azure[key] != self.known[key]} | back
        seen = [change for change in changes if isinstance(change, Seen)]
        gone = [change.key for change in changes if isinstance(change, Gone)]
        assert Counter(change.event.key for change in seen) == Counter([*(told.key for told in new), *changed])
        assert all(change.event == self.azure[change.event.key].event() for change in seen)
        renamed = {change.renamed_from: self.azure[change.event.key] for change in seen if change.renamed_from}
        assert len(renamed) == sum(bool(change.renamed_from) for change in seen), "one event under two new ids"
        newly = [change.key for change in changes if isinstance(change, Missing)]
        assert sorted(newly) == sorted(missing.keys() - self.missing - renamed.keys())
        assert sorted(gone) == sorted(missing.keys() & self.missing - renamed.keys() if is_apart else ())
        assert renamed.keys() <= missing.keys()
        for old_key, told in renamed.items():
            assert told in new
            assert told.status == "Started"
            assert told.rename_fingerprint == missing[old_key].rename_fingerprint
        starting = Counter(told.rename_fingerprint for told in new if told.status == "Started")
        leaving = Counter(told.rename_fingerprint for told in missing.values())
        assert Counter(told.rename_fingerprint for told in renamed.values()) == starting & leaving, (
            "not every swap was found"
        )

    def _follow(self, changes: Changes) -> None:
        """The model's own record of whose life goes on under which key; "" is a life that is yet to begin."""
        lives, noticed = dict(self.lives), dict(self.noticed)
        for change in changes:
            if isinstance(change, Missing):
                continue
            if isinstance(change, Gone):
                del lives[change.key], noticed[change.key], self.known[change.key]
            elif change.renamed_from:
                old = self.known.pop(change.renamed_from)
                lives[change.event.key] = lives.pop(change.renamed_from)
                was_noticed = noticed.pop(change.renamed_from)
                noticed[change.event.key] = was_noticed if old.not_before == change.event.not_before else self.now
            elif change.event.key not in lives:
                lives[change.event.key], noticed[change.event.key] = "", self.now
            elif self.known[change.event.key].not_before != change.event.not_before:
                noticed[change.event.key] = self.now
        self.lives, self.noticed, self.known = lives, noticed, {**self.known, **self.azure}
        self.missing = self.known.keys() - self.azure.keys()

    def _check_lives(self) -> None:
        present = {workflow.event.key: workflow.id for workflow in self.workflows.values() if not workflow.is_over}
        assert set(present) == set(self.lives)
        for key, life in self.lives.items():
            if life:
                assert present[key] == life, "an event goes on as if it were another one"
            else:
                assert present[key].endswith(f"@{self.now:%Y%m%dT%H%M%S.%fZ}"), "a new event goes on as an old one"
        self.lives = present

    def _proceed(self, signals: list[Signal]) -> None:
        context = Context(
            now=self.now,
            names=NAMES,
            rules=self.policy,
            windows={},
            hooks=HOOKS,
            boot_id="boot",
            document_at=self.now,
        )
        progression = advance(self.workflows, signals, context)
        assert progression.errors == ()
        again = advance(progression.workflows, [], context)
        assert again.transitions == (), "without news there is more to do"
        self.workflows = progression.workflows
        for step in progression.transitions:
            for effect in step.effects:
                match effect:
                    case RunHook():
                        self.answers.append(
                            HookFinished(
                                workflow_id=effect.workflow_id,
                                stage=effect.stage,
                                hook=effect.hook,
                                run=effect.run,
                                outcome="succeeded",
                            )
                        )
                    case CancelHook():
                        self.answers = [canceled(answer, effect) for answer in self.answers]
                    case Approve():
                        event = step.workflow.event
                        assert self.known[event.key].status == "Scheduled"
                        assert event.affects(NAMES) in ("self", "shared")
                        self.answers.append(ApprovalAnswered(workflow_id=effect.workflow_id))
                    case _:
                        pass


def restored(workflow: Workflow) -> Workflow:
    """As the store keeps it and gives it back."""
    return msgspec.json.decode(msgspec.json.encode(workflow).decode(), type=Workflow)


def unlucky(answer: Signal) -> Signal:
    if isinstance(answer, HookFinished) and answer.outcome == "succeeded":
        return msgspec.structs.replace(answer, outcome="failed")
    return (
        msgspec.structs.replace(answer, error_kind="timeout") if isinstance(answer, ApprovalAnswered) else answer
    )


def canceled(answer: Signal, effect: CancelHook) -> Signal:
    if isinstance(answer, HookFinished) and (answer.workflow_id, answer.stage) == (
        effect.workflow_id,
        effect.stage,
    ):
        return msgspec.structs.replace(answer, outcome="canceled")
    return answer


def walk(*phases: Phase) -> None:
    """As many walks as the profile has examples; more to find a planted fault, which ends the search."""
    run_state_machine_as_test(
        DocumentTracker,
        settings=settings(
            stateful_step_count=30,
            database=None,
            max_examples=1000 if phases else settings().max_examples,  # a planted fault shows long before
            report_multiple_bugs=False,
            phases=phases or (Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.hypothesis
def test_the_tracker_and_the_policy_agree_with_a_simple_model() -> None:
    walk()


NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
TOLD = st.builds(
    Told,
    id=IDS,
    type=TYPES,
    status=st.sampled_from(["Scheduled", "Started"]),
    source=SOURCES,
    resources=RESOURCES,
    not_before=NOTICES.map(lambda notice: None if notice is None else NOW + timedelta(seconds=notice)),
    seconds=SECONDS,
    description=DESCRIPTIONS,
)


Rules = tuple[Rule, ...]


def rules_with(condition: str) -> st.SearchStrategy[Rules]:
    """One rule that has this condition, and no other."""
    return CONDITIONS[condition].map(lambda value: (Rule(name="r0", when=When(**{condition: value})),))


def decide_all(rules: st.SearchStrategy[Rules], *phases: Phase, count: int | None = None) -> None:
    @settings(
        database=None,
        max_examples=count or settings().max_examples,
        report_multiple_bugs=False,
        phases=phases or (Phase.generate, Phase.shrink),
    )
    @given(rules=rules, told=TOLD)
    def check(rules: Rules, told: Told) -> None:
        decision = decide(rules, {}, told.event(), MatchContext(names=NAMES, not_before_seen_at=NOW))
        assert decision.rule == expected_rule(rules, told, NOW)

    check()


@pytest.mark.hypothesis
def test_the_first_rule_whose_conditions_hold_matches_the_event() -> None:
    decide_all(RULES)


@pytest.mark.hypothesis
@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_rule_matches_events_for_which_its_condition_holds(condition: str) -> None:
    decide_all(rules_with(condition))


# --- that it would be found


def renames_nothing(known: dict[str, ScheduledEvent], document: Document, missing: dict[str, bool]) -> Changes:
    changes = REAL_COMPARE(known, document, missing)
    old = [Missing(change.renamed_from) for change in changes if isinstance(change, Seen) and change.renamed_from]
    return [*(Seen(change.event) if isinstance(change, Seen) else change for change in changes), *old]


def forgets_the_case(known: dict[str, ScheduledEvent], document: Document, missing: dict[str, bool]) -> Changes:
    return [
        change
        for change in REAL_COMPARE(known, document, missing)
        if not (isinstance(change, Seen) and change.event.id.islower())
    ]


def misses_an_end(known: dict[str, ScheduledEvent], document: Document, missing: dict[str, bool]) -> Changes:
    changes = REAL_COMPARE(known, document, missing)
    return [change for change in changes if isinstance(change, Seen) or document.events]


def takes_the_first_absence_for_the_end(
    known: dict[str, ScheduledEvent], document: Document, missing: dict[str, bool]
) -> Changes:
    changes = REAL_COMPARE(known, document, missing)
    return [Gone(change.key) if isinstance(change, Missing) else change for change in changes]


def does_not_look_at_the_time(
    known: dict[str, ScheduledEvent], document: Document, missing: dict[str, bool]
) -> Changes:
    return REAL_COMPARE(known, document, dict.fromkeys(missing, True))


def renames_at_the_start_only(
    known: dict[str, ScheduledEvent], document: Document, missing: dict[str, bool]
) -> Changes:
    present = {event.key for event in document.events}
    left = {key: event for key, event in known.items() if not event.is_started or key in present}
    changes = REAL_COMPARE(left, document, missing)
    return [*changes, *(Missing(key) for key in known.keys() - left.keys() - missing.keys())]


WRONG = [forgets_the_case, misses_an_end, takes_the_first_absence_for_the_end, does_not_look_at_the_time]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_broken_tracker_is_detected(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    monkeypatch.setitem(globals(), "compare", wrong)
    with pytest.raises(AssertionError):
        walk(Phase.generate)


class Drawn:
    """What a step draws, told beforehand."""

    def __init__(self, *values: Any) -> None:
        self._values = iter(values)

    def draw(self, strategy: object) -> Any:
        del strategy
        return next(self._values)


def start_under_another_id(status: str) -> None:
    """A life that few of those that are generated have: an event, and then the same one, started, as another."""
    event = Told("A1", "Freeze", status, "Platform", ("vm-1",), None, 5, "")
    documents: Any = DocumentTracker()
    for told in (event, replace(event, id="B2", status="Started")):
        documents.azure = {told.key: told}
        documents.document_is_read(data=Drawn([told.key], False, True))


@pytest.mark.parametrize(
    ("wrong", "status"), [(renames_nothing, "Scheduled"), (renames_at_the_start_only, "Started")]
)
def test_a_tracker_that_does_not_recognize_a_renamed_event_is_detected(
    monkeypatch: pytest.MonkeyPatch, wrong: Any, status: str
) -> None:
    start_under_another_id(status)
    monkeypatch.setitem(globals(), "compare", wrong)
    with pytest.raises(AssertionError, match="not every swap was found"):
        start_under_another_id(status)


@pytest.mark.parametrize("lost", CONDITIONS)
def test_a_policy_that_ignores_a_condition_is_detected(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    right: Callable[[When, ScheduledEvent, MatchContext], str | None] = decide_module.why_conditions_fail
    blank = When(affects=("self", "shared", "others"))

    def why_conditions_fail(when: When, event: ScheduledEvent, facts: MatchContext) -> str | None:
        return right(msgspec.structs.replace(when, **{lost: getattr(blank, lost)}), event, facts)

    monkeypatch.setattr(decide_module, "why_conditions_fail", why_conditions_fail)
    with pytest.raises(AssertionError):
        decide_all(rules_with(lost), Phase.generate, count=500)  # it takes 0.2 s at most


def test_a_lost_duplicate_in_a_document_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_module, "_merge", lambda twins: twins[-1])
    with pytest.raises(AssertionError):
        walk(Phase.generate)
