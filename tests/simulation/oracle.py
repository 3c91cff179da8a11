"""Decides from the outside what the agent may do and must do.

The oracle knows which documents the agent has read, which hooks ran and how they ended, what was posted, what
operators sent, and which of that the agent can know after a crash. It never looks into a workflow. It forbids only
what is certain to be wrong: where a crash or a reload leaves open what the agent knows, both are right. The
invariants:

    1  no approval before every prepare hook has succeeded, unless the rule or an operator says otherwise
    2  no approval for an event of another VM, one that has started, is over, is missing or is held
    3  a prepare or on_start hook starts once, and once more only after a crash that it did not survive; after a
       reboot an event that has not started is prepared for from its first hook
    4  what was prepared is recovered exactly once after the event (two answers lack it), never while another event
       needs it prepared; a recover hook that has succeeded runs again only after a rule that names it has prepared
       again; what was never prepared is never recovered (of an event that had started when the state
       was lost, that it was not is not known: it is recovered). After a failure it and the rest of the stage wait
       for an operator's retry, or for a success of the hook for another event; until then the VM is not ready
       A recommendation is over as well when it has expired, no earlier than its rule says; it is not prepared for
       again while documents list it, and not recovered from while a Preempt of this VM is there. A document of an
       api-version that leaves it out says nothing about it
    5  all of this over restarts, with and without a reboot, for canceled and completed events
    6  an approval that was confirmed is not sent again before two answers lack the event; one that was
       not is, until it is
    7  nothing is approved before a document was read, without a name, or after the state was lost
    8  an event is prepared for in the very cycle in which it is first seen
    9  after a restart the VM is as ready, or not, as before; and in the end nothing is left to do
    10 what this VM does not approve by itself is prepared for, and no earlier before NotBefore than it takes; both
       by this VM's clock, which may be wrong
    11 no drain and no prepare hook starts against an operator's hold
    12 a target hears of an event, if it wants to, before it hears what happens to it, also if the VM's name comes
       later than the event; every notification that is on disk arrives at its target, those of a target in order,
       or is counted as given up; no other notification arrives. The counts of an agent that is killed and the
       notifications of a state that is lost are excused
    13 of a hook of which only one run goes on at a time, a less urgent one gives way to an eviction within a
       second, and runs again later
    14 an operator hears that a hold is set, or that an approval is taken back, only when no approval is under way
       that Azure may still accept
    15 when an event starts that its rule wants prepared, the agent says whether it was not, and why
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from scheduled_events_agent.imds.document import RECOMMENDATION
from scheduled_events_agent.policy import Hook, Rule
from scheduled_events_agent.policy.settings import NotifyTarget
from scheduled_events_agent.workflow import HookOutcome

VM = "vm_1"
# Two answers that are closer to each other count as one.
_POLLS_APART = 0.9
# Work that is due at this very moment begins in the next cycle.
_TURN_SECONDS = 1.0
Key = tuple[str, str]
"""Event and hook."""
News = tuple[str, str, datetime]
"""Workflow, what has happened to its event, and when."""


class BrokenError(AssertionError):
    """An invariant does not hold."""


@dataclass
class Life:
    """One event, as far as the agent has read of it."""

    name: str
    type: str
    resources: tuple[str, ...]
    status: str
    is_history_unknown: bool
    current_id: str = ""
    is_missing: bool = False
    """The last answer that was decided on lacked it."""
    lacked_since: float | None = None
    """When an answer first lacked it, decided on or not, and none has had it since."""
    is_gone: bool = False
    is_resolved: bool = False
    """An operator may have ended it."""
    is_expired: bool = False
    """A recommendation that the agent takes for over, though documents may still list it."""
    was_started: bool = False
    may_be_begun: bool = False
    """Something may have been prepared."""
    has_begun: bool = False
    """More has, or may have, than that a hook waited for another run of it."""
    plan: Rule | None = None
    """The rule that began it."""
    is_unsure: bool = False
    """It was seen under one policy and begun under another: which of the two rules began it is not known."""
    not_before: datetime | None = None
    read_at: datetime | None = None
    """When it was first read; None if the clock has been set since."""
    may_have_more: bool = False
    """Another policy may have added hooks to what had begun."""
    policies: int = 0
    """How many policies there had been when it was first seen."""
    succeeded: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    """Prepare hooks of which the agent knows that they need not run again."""
    is_announced: bool = False
    """It was first read as Scheduled."""
    is_doubtful: bool = False
    """The agent has crashed since: what it knew at the start is not certain."""
    is_nameless: bool = False
    """It was listed while the agent did not know its VM's name."""
    has_failed: bool = False
    failed_hook: str = ""
    """The hook at which its preparation has failed."""
    stuck_at: str = ""
    """The hook at which its recovery has failed."""
    last_stuck_at: str = ""
    """The hook of its last failed recovery; an operator's command, which may get lost, does not clear it."""
    is_confirmed: bool = False
    is_posted: bool = False
    """An approval is under way, as far as the agent knows."""
    words: frozenset[str] = frozenset({""})
    """What the operator may have said last."""

    @property
    def is_over(self) -> bool:
        return self.is_gone or self.is_expired

    @property
    def is_sure(self) -> bool:
        """Whether it is known which hooks its rule has given it."""
        return self.plan is not None and not (self.is_unsure or self.may_have_more)

    def undoes(self, hook: str, other: "Life") -> bool:
        """Whether its recovery, which has come to this hook, undoes for certain what the other needs prepared."""
        if self.plan is None or other.plan is None or self.is_unsure or other.is_unsure:
            return False
        return _undoes(self.plan, hook, other.plan)


def _undoes(one: Rule, hook: str, other: Rule) -> bool:
    """Whether a recovery by one rule that has come to this hook undoes what the other rule prepares.

    The hooks before it count, too: it may rely on them.
    """
    index = one.recover.index(hook) if hook in one.recover else len(one.recover)
    return not {*one.prepare, *one.recover[:index], hook}.isdisjoint((*other.prepare, *other.recover))


@dataclass
class Run:
    """A hook that runs."""

    event: str
    stage: str
    hook: str
    is_told_to_end: bool = False
    has_begun: bool = False
    """Its program was started; else it waits for another run of the hook."""


@dataclass
class Notice:
    """A notification that must reach a target."""

    target: str
    news: News
    is_sure: bool
    """It is on disk; otherwise the power went while it was written."""
    is_named: bool = False
    """The agent had a name for its VM."""
    is_settled: bool = False
    """It has arrived, is counted as given up, or is excused."""
    has_arrived: bool = False


class Oracle:
    """Gets all that happens, in order; raises BrokenError at the first thing that must not be."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        """``now``: the VM's wall clock."""
        self._now = now
        self.hooks: Mapping[str, Hook] = {}
        self.reserve = 0.0
        self.lives: dict[str, Life] = {}
        self.rules: tuple[Rule, ...] = ()
        self.all_rules: tuple[Rule, ...] = ()
        """The policies that were in force since the events began."""
        self.runs: list[Run] = []
        self.is_blind = True
        """The agent has decided on no document since it started."""
        self.has_name = False
        self.on_clear_runs = 0
        self._used: set[tuple[str, str, str]] = set()
        """(event, stage, hook): must not start again."""
        self._owed: set[Key] = set()
        """(event, recover hook): must run before all is well."""
        self._allowed: set[Key] = set()
        """(event, recover hook): may run."""
        self._fresh: list[Life] = []
        self._policies = 0
        self.targets: tuple[NotifyTarget, ...] = ()
        self._notices: list[Notice] = []
        self._unwritten: list[Notice] = []

    # --- What the simulation reports.

    def policy(self, rules: tuple[Rule, ...]) -> None:
        """These rules are in force."""
        self._policies += 1
        self.rules = rules
        self.all_rules += rules
        for life in self.lives.values():
            rule = self.rule(life)
            is_over = life.is_over and not any(name == life.name for name, _ in self._allowed)
            life.may_have_more |= life.may_be_begun and not life.is_over
            if life.may_have_more and not any(used[:2] == (life.name, "prepare") for used in self._used):
                # If it has only waited for hooks of others, and gets hooks now, nothing was done for it.
                self._owed = {key for key in self._owed if key[0] != life.name}
            if life.may_be_begun and not is_over and rule is not None:
                self._allowed |= {(life.name, hook) for hook in rule.recover}

    def clock_set(self) -> None:
        """The VM's clock shows another time from now on."""
        for life in self.lives.values():
            life.read_at = None

    def heard(self, names: Iterable[str]) -> None:
        """A document has reached the agent, which need not decide on it: a later one may come first."""
        for name in names:
            if name in self.lives:
                self.lives[name].is_missing, self.lives[name].lacked_since = False, None

    def read(
        self,
        events: Iterable[tuple[str, str, str, str, tuple[str, ...], datetime | None]],
        *,
        answered: float,
        is_state_lost: bool,
        has_recommendations: bool = True,
    ) -> None:
        """A document has been decided on, and the decision is on disk.

        ``events``: name, present id, type, status, VMs, NotBefore.
        """
        self.is_blind = False
        present = set()
        for name, current_id, type_, status, resources, not_before in events:
            present.add(name)
            life = self.lives.get(name)
            if life is None:
                life = Life(name, type_, resources, status, is_state_lost, policies=self._policies)
                life.read_at, life.is_announced = self._now(), status == "Scheduled"
                self.lives[name] = life
                self._fresh.append(life)
            life.status, life.current_id, life.not_before = status, current_id, not_before
            life.is_missing, life.lacked_since = False, None
            life.is_nameless |= not self.has_name
            rule = self.rule(life)
            is_bare = rule is not None and (rule.drain_for or not rule.prepare)
            if status == "Scheduled" and rule is not None and is_bare:
                # It may be begun at any moment, and the event be gone before anybody has seen that.
                self._allowed |= {(life.name, hook) for hook in rule.recover}
            life.was_started |= status == "Started"
        self.compared(present, answered=answered, has_recommendations=has_recommendations)
        for life in self.lives.values():
            if life.is_gone or life.name in present:
                continue
            if life.type == RECOMMENDATION and not has_recommendations:
                continue
            life.is_missing = True
            if life.lacked_since is not None and answered - life.lacked_since >= _POLLS_APART:
                if life.is_history_unknown and life.was_started:
                    # For all that is known it was prepared for, by the agent that had lost its state.
                    self._begin(life, is_certain=self.has_name and not life.may_be_begun)
                life.is_gone = True

    def compared(self, present: Collection[str], *, answered: float, has_recommendations: bool = True) -> None:
        """The agent has seen what a document lists, and need not have been able to write what follows."""
        for life in self.lives.values():
            can_list = has_recommendations or life.type != RECOMMENDATION
            if can_list and life.name not in present and life.lacked_since is None:
                life.lacked_since = answered

    def unready(self, name: str) -> None:
        """The VM tells that it is not ready for work because of this event."""
        life = self.lives.get(name)
        if life is None or life.may_be_begun or life.is_over:
            return
        rule = self.rule(life)
        # A drain, or the promise of a recovery alone, is a preparation as well.
        if rule is not None and (rule.drain_for or not rule.prepare):
            self._check_time(life, f"{name} is prepared for")
            self._expect(life.words != {"hold"}, f"(11) {name} is drained for against an operator")
            self._begin(life, is_certain=True)

    def expired(self, name: str) -> None:
        """The agent considers it over, and that is on disk."""
        life = self.lives[name]
        self._expect(life.type == RECOMMENDATION, f"(4) {name} expires")
        self._expect(not life.is_expired, f"(4) {name} expires twice")
        seconds = min(rule.expire_after for rule in self.all_rules if life.type in rule.when.type)
        if life.read_at is not None and not life.is_resolved:
            self._expect(self._now() >= life.read_at + timedelta(seconds=seconds), f"(4) {name} expires too early")
        life.is_expired = True

    def ready(self, *, is_ready: bool) -> None:
        """Check the answer of the page /readyz."""
        stuck = [life.name for life in self.lives.values() if life.stuck_at]
        self._expect(not (is_ready and stuck), f"(4) the VM is ready though the recovery from {stuck} failed")

    def asked(self, name: str, word: str) -> None:
        """An operator sends retry or resolve, which may be rejected."""
        life = self.lives.get(name)
        if life is not None and not life.is_over:
            life.is_resolved |= word == "resolve"
        if life is not None and life.is_over and life.last_stuck_at:
            self._allowed |= {(name, life.last_stuck_at)} if word == "retry" else set()
            life.stuck_at = ""
        elif life is not None and life.failed_hook:
            self._used.discard((name, "prepare", life.failed_hook))

    def obeyed(self, name: str, word: str) -> None:
        """The agent has applied a retry, or a resolve: the operator has repaired the machine manually."""
        life = self.lives.get(name)
        if life is None:
            return
        if word == "resolve":
            self._owed = {key for key in self._owed if key[0] != name}
        elif not life.is_over:
            life.has_failed, life.failed_hook = False, ""

    def told(self, name: str, word: str) -> None:
        """An operator hears that a hold is set, or (``word`` is "") that an approval is taken back."""
        life = self.lives.get(name)
        if life is None or life.is_over or life.was_started:
            return
        rule = self.rule(life)
        if word == "hold" or rule is None or rule.approve in ("manual", "never"):
            what = "a hold is set" if word == "hold" else "an approval is taken back"
            self._expect(not life.is_posted, f"(14) {name}: {what}, says the agent while an approval is under way")

    def turned(self, *, may_be_late: bool) -> None:
        """The cycle that received the document has ended."""
        fresh, self._fresh = self._fresh, []
        if may_be_late:
            return
        for life in fresh:
            rule = self.rule(life)
            if rule is None or life.status != "Scheduled" or VM not in life.resources:
                continue
            if not rule.prepare or rule.drain_for or rule.lead is not None or self._is_late(life, rule):
                continue
            in_the_way = [run for run in self.runs if run.stage == "recover" and self._is_in_the_way(run, rule)]
            for run in in_the_way:
                text = f"(8) {life.name} waits for hook {run.hook} of {run.event}, which has not been asked to end"
                self._expect(run.is_told_to_end or not self.lives[run.event].is_sure, text)
            is_held_up = self.on_clear_runs or in_the_way or self._is_taken(rule.prepare[0], life)
            is_begun = any((run.event, run.stage) == (life.name, "prepare") for run in self.runs)
            self._expect(is_begun or bool(is_held_up), f"(8) {life.name} is not prepared for at once")

    def _is_taken(self, hook: str, life: Life) -> bool:
        """Whether an eviction has the one run of the hook that may go on, or has it next."""
        runs = [run for run in self.runs if (run.stage, run.hook) == ("prepare", hook)]
        is_needed = any(self.lives[run.event].type == "Preempt" for run in runs)
        is_needed = is_needed or any(self._waits_to_run(hook, other) for other in self.lives.values())
        return is_needed and life.type != "Preempt" and self.hooks[hook].serialize

    def _waits_to_run(self, hook: str, life: Life) -> bool:
        """Whether it is an eviction whose first hook this is, and a recover hook that must end is in its way."""
        rule = self.rule(life)
        if rule is None or life.type != "Preempt" or life.is_over or life.status != "Scheduled":
            return False
        is_next = rule.prepare[:1] == (hook,) and hook not in life.succeeded
        return is_next and any(run.stage == "recover" and self._is_in_the_way(run, rule) for run in self.runs)

    def waits(self, event: str, hook: str, *, behind: tuple[str, str]) -> None:
        """A hook that must not run twice has waited for a second, behind one of that event and stage."""
        is_urgent = self.lives[event].type == "Preempt"
        is_less = behind[1] != "on_start" and self.lives[behind[0]].type != "Preempt"
        self._expect(not (is_urgent and is_less), f"(13) hook {hook} of {event} waits for that of {behind[0]}")

    def started(self, event: str, stage: str, hook: str) -> None:
        """A hook starts, or waits for another run of it."""
        life, text = self.lives.get(event), f"{stage} hook {hook} of {event} starts"
        self._expect(not self.is_blind, f"(7) {text} before any document was read")
        self._expect(not self.on_clear_runs, f"{text} beside an on_clear hook")
        self._expect(life is not None, f"{text}, an event that was never read")
        assert life is not None
        beside = [run for run in self.runs if (run.event, run.stage) == (event, stage)]
        self._expect(not beside, f"(3) {text} beside another of the stage")
        if stage == "recover":
            self._check_recover(life, hook, text)
        else:
            self._check_forward(life, stage, hook, text)
        self.runs.append(Run(event, stage, hook))

    def begun(self, event: str, stage: str, hook: str) -> None:
        """The program of a hook that has started is started, too."""
        for run in self.runs:
            run.has_begun |= (run.event, run.stage) == (event, stage)
        if stage == "prepare":
            self._begin(self.lives[event], is_certain=True, hook=hook)

    def maybe_started(self, event: str, stage: str, hook: str) -> None:
        """The start is on disk, and may never come."""
        life = self.lives[event]
        if stage == "prepare":
            life.has_begun = True  # the agent cannot know
            self._begin(life, is_certain=False, hook=hook)

    def told_to_end(self, event: str, stage: str) -> None:
        """A hook that runs is not wanted any more."""
        for run in self.runs:
            run.is_told_to_end |= (run.event, run.stage) == (event, stage)

    def ended(self, event: str, stage: str, hook: str, outcome: HookOutcome) -> None:
        """A hook has ended, which the agent need not know yet."""
        self.runs = [run for run in self.runs if (run.event, run.stage) != (event, stage)]
        if stage == "prepare" and outcome == "succeeded":
            self.lives[event].succeeded.add(hook)

    def known(self, event: str, stage: str, hook: str, outcome: HookOutcome, *, is_required: bool) -> None:
        """The agent has put the end of a hook on disk."""
        life = self.lives[event]
        has_failed = outcome in ("failed", "timed_out", "not_started")
        if stage == "prepare" and outcome == "canceled" and not (life.is_over or life.was_started):
            self._used.discard((event, stage, hook))  # it gave way
        if stage == "prepare" and has_failed and is_required:
            life.has_failed, life.failed_hook = True, hook
        elif stage == "prepare" and has_failed:
            life.succeeded.add(hook)
        if stage == "prepare" and (outcome == "succeeded" or (has_failed and not is_required)):
            life.done.add(hook)
        if stage == "recover" and has_failed and is_required:
            life.stuck_at = life.last_stuck_at = hook
            self._allowed.discard((event, hook))
        elif stage == "recover" and outcome != "canceled":
            for other in self.lives.values():
                other.stuck_at = "" if other.stuck_at == hook else other.stuck_at
            gone = {other.name for other in self.lives.values() if other.is_over}
            self._owed = {key for key in self._owed if key[1] != hook or key[0] not in gone}
            # All that are over are done with it, until a rule that names it prepares again.
            done = gone - {run.event for run in self.runs if run.stage == "prepare"}
            self._allowed = {key for key in self._allowed if key[1] != hook or key[0] not in done}

    def known_unbegun(self, event: str, stage: str, hook: str, outcome: HookOutcome, *, is_required: bool) -> None:
        """The agent has put on disk that a hook has ended whose program was not started."""
        self.known(event, stage, hook, outcome, is_required=is_required)
        life = self.lives[event]
        if stage == "prepare" and outcome == "canceled":
            self._used.discard((event, stage, hook))
        may_have_begun = life.has_begun or life.is_history_unknown or not life.is_sure
        if life.plan is not None and not (may_have_begun or life.plan.drain_for):
            self._allowed = {key for key in self._allowed if key[0] != event}

    def not_run(self, event: str, stage: str, hook: str) -> None:
        """The hook failed, and counts as not run because the machine went down."""
        self._used.discard((event, stage, hook))

    def posted(self, names: Iterable[tuple[str, str]]) -> None:
        """One request to approve: (event, id)."""
        for name, event_id in names:
            life, text = self.lives.get(name), f"{name} is approved"
            self._expect(not self.is_blind, f"(7) {text} before any document was read")
            self._expect(self.has_name, f"(7) {text} by an agent that does not know its VM's name")
            self._expect(life is not None, f"(2) {text}, which was never read")
            assert life is not None
            self._check_approval(life, event_id, text)
            life.is_posted = True

    def answered(self, name: str, *, is_confirmed: bool) -> None:
        """The agent has put the answer to an approval on disk."""
        if name in self.lives:
            life = self.lives[name]
            life.is_posted = False
            life.is_confirmed |= is_confirmed
            if is_confirmed and "hold" in life.words:  # it came too late
                life.words = life.words | {""}

    def spoke(self, name: str, words: Iterable[str]) -> None:
        """Set the commands of an operator that the agent may know of now."""
        if name in self.lives:
            self.lives[name].words = frozenset(words)

    def crashed(self) -> None:
        """The agent is gone, with whatever ran."""
        for run in self.runs:
            self._used.discard((run.event, run.stage, run.hook))
            self.lives[run.event].has_begun |= run.stage == "prepare"
        self.runs, self._fresh, self.is_blind, self.on_clear_runs = [], [], True, 0
        for life in self.lives.values():
            life.is_posted = life.is_missing = False
            life.is_doubtful = True
            life.lacked_since = None
        self._notices += self._unwritten
        self._unwritten = []

    def rebooted(self) -> None:
        """The machine has started again: what was prepared for an event that has not started is undone."""
        for life in self.lives.values():
            if life.is_over or life.was_started:
                continue
            self._used = {used for used in self._used if used[:2] != (life.name, "prepare")}
            life.succeeded.clear()
            life.has_failed = False
            life.failed_hook = ""

    def forgotten(self, event: str, stage: str, hook: str) -> None:
        """The hook had ended, and the agent was killed before that was on disk."""
        self._used.discard((event, stage, hook))
        if event in self.lives:
            self.lives[event].has_begun |= stage == "prepare"

    def lost(self) -> None:
        """The state file is gone: what was begun is not known any more."""
        self._used, self._owed, self._allowed = set(), set(), set()
        self.lives = {}
        self._excuse(self._notices)

    def writes_news(self, news: Iterable[tuple[News, str, tuple[str, ...]]], *, is_named: bool) -> None:
        """These, each with type and VMs of its event, are about to be written.

        ``is_named``: the agent has a name for its VM, right or not. Without one no target hears of any event.
        """
        self._unwritten = [
            Notice(target.name, one, is_sure=False, is_named=is_named)
            for one, type_, vms in news
            for target in self.targets
            if one[1] in target.kinds
            and (type_ in target.when.type or not target.when.type)
            and (VM in vms or "others" in target.when.affects or one[1] == "vm_unknown")
        ]
        if self._policies == 1 and is_named:
            for notice in self._unwritten:
                self._check_announcement(notice)

    def _check_announcement(self, notice: Notice) -> None:
        """Whether the target has heard of the event before it hears what happens to it."""
        kinds = next(target.kinds for target in self.targets if target.name == notice.target)
        workflow_id, what, _ = notice.news
        written = (*self._notices, *self._unwritten)
        of_event = [one for one in written if (one.target, one.news[0]) == (notice.target, workflow_id)]
        is_announced = any(one.news[1] == "seen" and one.is_named for one in of_event)
        self._expect(
            is_announced or "seen" not in kinds,
            f"(12) {notice.target} hears that {workflow_id} is {what}, not seen",
        )

    def has_written_news(self) -> None:
        """They are on disk."""
        for notice in self._unwritten:
            # Without a name, whom the event affects is not known.
            notice.is_sure = self.has_name or notice.news[1] == "vm_unknown"
        self._notices += self._unwritten
        self._unwritten = []

    def notified(self, target: str, news: News, *, is_rejected: bool) -> None:
        """The target has received it, or rejects it for good."""
        text = f"(12) {target} hears that {news[0]} is {news[1]}"
        all_ = [notice for notice in self._notices if notice.target == target]
        same = [index for index, notice in enumerate(all_) if notice.news == news]
        self._expect(bool(same), f"{text}, which was never written")
        index = next((index for index in same if not all_[index].is_settled), None)
        if index is None:
            return  # once more
        early = [notice.news for notice in all_[:index] if notice.is_sure and not notice.is_settled]
        self._expect(not early, f"{text} before {early}")
        late = [notice.news for notice in all_[index + 1 :] if notice.has_arrived]
        self._expect(not late, f"{text} after {late}")
        all_[index].is_settled, all_[index].has_arrived = True, not is_rejected

    def dropped(self, target: str, count: int) -> None:
        """The agent counts these notifications as dropped because the policy has no such target."""
        gone = [notice for notice in self._notices if notice.target == target and not notice.is_settled]
        owed = [notice.news for notice in gone if notice.is_sure]
        self._expect(len(owed) <= count, f"(12) {count} notices of {target} are counted as dropped, not {owed}")
        self._excuse(gone)

    def lost_counts(self) -> None:
        """The agent may have been killed after it dropped notifications, and before it counted them."""
        names = {target.name for target in self.targets}
        self._excuse(notice for notice in self._notices if notice.target not in names)

    @staticmethod
    def _excuse(notifications: Iterable[Notice]) -> None:
        for notice in notifications:
            notice.is_settled = True

    def finished(self, *, is_ready: bool, pending: Iterable[str]) -> None:
        """Nothing has gone wrong for long, and every event is over."""
        self._expect(not self.runs, f"(9) hooks run for ever: {self.runs}")
        self._expect(not self._owed, f"(4) never recovered: {sorted(self._owed)}")
        self._expect(is_ready, "(9) the VM stays out of service")
        self._expect(not [*pending], f"(9) events that are over stay pending: {[*pending]}")
        owed = [(one.target, one.news) for one in self._notices if one.is_sure and not one.is_settled]
        self._expect(not owed, f"(12) never arrived: {owed}")

    def unprepared(self, name: str) -> None:
        """The event starts and nothing has gone wrong for long enough."""
        life = self.lives.get(name)
        rule = self.rule(life) if life is not None else None
        if life is None or rule is None or not rule.prepare or VM not in life.resources or self._policies > 1:
            return
        is_held = bool(life.words - {"", "approve"})
        is_ours = not (life.was_started or is_held or life.is_history_unknown or life.read_at is None)
        if is_ours and not self._is_early_by_clock(life, rule):
            self._expect(life.may_be_begun, f"(10) {name} starts and is not prepared for")

    def shown_start(self, name: str, reason: str) -> None:
        """That the event has started is on disk. ``reason``: why it is not prepared, as the agent says."""
        life = self.lives.get(name)
        if life is None or life.is_doubtful or self._policies > 1:
            return
        expected = self._unprepared(life)
        self._expect(
            not expected or reason in expected, f"(15) {name} starts, and is unprepared: {reason or 'no'}"
        )

    def _unprepared(self, life: Life) -> set[str]:
        """What the agent may say of an event that starts; nothing: whatever it likes."""
        rule = self.rule(life)
        if rule is None or not (rule.prepare or rule.drain_for) or life.type == RECOMMENDATION:
            return {""}
        if not life.is_announced:
            return {"" if life.is_history_unknown else "no_notice"}
        if rule.prepare and life.done.issuperset(rule.prepare):
            return {""}
        if len(life.words) > 1 or not rule.prepare or (life.is_nameless and life.is_history_unknown):
            return set()
        if life.words == {"hold"} and not life.is_nameless:
            return {"held"}
        of_failure = {"hook_failed", "failure_allowed"} if life.has_failed else set()
        of_name = {"vm_unknown"} if life.is_nameless else set()
        return {"unfinished", "immediately", "time", "manual"} | of_failure | of_name

    def neglected(self, name: str, seconds: float) -> None:
        """The event stood there for so long while nothing went wrong."""
        life = self.lives.get(name)
        if life is None or life.is_confirmed or life.was_started or not self._may_approve(life):
            return
        if len(life.words) > 1:
            return  # what an operator said may never have been taken
        rule = self.rule(life)
        if rule is None or rule.lead is not None or self._policies > 1:
            return
        has_ended = life.has_failed or life.succeeded.issuperset(rule.prepare)
        if rule.approve == "immediately" or has_ended:
            self._expect(False, f"(6) {name} is not approved for {seconds:.0f} s, and nothing is in the way")

    # --- What follows.

    def rule(self, life: Life) -> Rule | None:
        """The rule in force for the event."""
        if VM not in life.resources:
            return next((r for r in self.rules if life.type in r.when.type and "others" in r.when.affects), None)
        return next((rule for rule in self.rules if life.type in rule.when.type), None)

    def _is_late(self, life: Life, rule: Rule) -> bool:
        """Whether it is begun only some time before NotBefore, since others must approve it."""
        if life.type in (RECOMMENDATION, "Preempt"):
            return False
        is_ours = rule.approve in ("immediately", "when-prepared") and VM in life.resources
        return not (is_ours and self._may_speak(life, rule))

    def _is_early_by_clock(self, life: Life, rule: Rule) -> bool:
        """Whether this VM's clock is so far behind that the time to prepare for it has not come there."""
        if life.not_before is None or not (rule.lead is not None or self._is_late(life, rule)):
            return False
        # The least that the preparation may take; hooks whose earlier runs were short begin that late.
        seconds = self.reserve if rule.lead is None else rule.lead
        return self._now() < life.not_before - timedelta(seconds=seconds - _TURN_SECONDS)

    def _may_speak(self, life: Life, rule: Rule) -> bool:
        """Whether this VM may approve it for the others, if need be after them."""
        shared = rule.shared or ("first" if rule.approve == "immediately" else "hold")
        if life.resources == (VM,) or shared == "any":
            return True
        return shared == "first" and (life.resources[0] == VM or rule.approve == "immediately")

    def _check_time(self, life: Life, text: str) -> None:
        """Whether it may be prepared for already."""
        rule = self.rule(life)
        if life.may_be_begun or life.read_at is None or life.not_before is None or self._policies > 1:
            return
        if rule is None or rule.lead is not None or not self._is_late(life, rule):
            return
        if "approve" in life.words or life.status != "Scheduled":
            return
        hooks = sum(self.hooks[hook].limit_seconds for hook in rule.prepare)
        earliest = life.not_before - timedelta(seconds=rule.drain_for + hooks + self.reserve)
        self._expect(self._now() >= earliest, f"(10) {text} before {earliest:%H:%M:%S}")

    def _is_in_the_way(self, run: Run, rule: Rule) -> bool:
        """Whether a recovery that runs may undo what this rule prepares."""
        life = self.lives[run.event]
        return life.plan is None or not life.is_sure or _undoes(life.plan, run.hook, rule)

    def _begin(self, life: Life, *, is_certain: bool, hook: str = "") -> None:
        """Something is, or may be, prepared for it: its recovery is owed. Others run its hooks once more."""
        rule = self.rule(life)
        if life.plan is None:
            life.plan, life.is_unsure = rule, life.policies != self._policies
        life.may_be_begun = True
        life.has_begun |= is_certain
        plans = [plan for plan in (life.plan, rule) if plan is not None]
        if life.is_unsure or (hook and hook not in plans[0].prepare):
            plans = [plan for plan in self.all_rules if life.type in plan.when.type]
        self._allowed |= {(life.name, what) for plan in plans for what in plan.recover}
        if is_certain and life.plan is not None and not life.is_unsure:
            self._owed |= {(life.name, what) for what in life.plan.recover}
        recovering = {run.event for run in self.runs if run.stage == "recover"}
        # A recovery that has failed goes on with a retry.
        stuck = {other.name for other in self.lives.values() if other.stuck_at}
        owing = recovering | stuck | {name for name, _ in self._owed}
        named = {what for plan in plans for what in plan.recover}
        for name in {name for name, _ in self._allowed} | owing:
            other = self.lives[name]
            if other is not life and other.plan is not None:
                rules = [other.plan]
                if not other.is_sure:
                    rules += [rule for rule in self.all_rules if other.type in rule.when.type]
                self._allowed |= {(name, what) for rule in rules for what in rule.recover if what in named}

    def _check_forward(self, life: Life, stage: str, hook: str, text: str) -> None:
        event = life.name
        self._expect((event, stage, hook) not in self._used, f"(3) {text} again")
        self._used.add((event, stage, hook))
        self._expect(not life.is_over, f"(4) {text} though the event is over")
        self._expect(not life.is_missing, f"(4) {text} though the event is missing")
        if stage == "on_start":
            self._expect(life.status == "Started", f"{text} though the event has not started")
            return
        self._check_time(life, text)
        self._expect(life.words != {"hold"}, f"(11) {text} against an operator")
        self._begin(life, is_certain=False, hook=hook)
        assert life.plan is not None
        may_finish = life.plan.on_early_start == "finish" or life.is_unsure
        self._expect(not life.was_started or may_finish, f"(5) {text} though the event has started")
        if hook in life.plan.prepare and not life.is_unsure:
            before = life.plan.prepare[: life.plan.prepare.index(hook)]
            missing = [name for name in before if name not in life.succeeded]
            self._expect(not missing, f"(3) {text} before {missing}")
        for run in self.runs:
            if run.stage == "recover" and self.lives[run.event].undoes(run.hook, life):
                self._expect(False, f"(4) {text} while {run.event} recovers")

    def _check_recover(self, life: Life, hook: str, text: str) -> None:
        self._expect(life.is_over, f"(4) {text} though the event is not over")
        if life.type == RECOMMENDATION:
            evictions = [one.name for one in self.lives.values() if one.type == "Preempt" and not one.is_gone]
            self._expect(not evictions, f"(4) {text} though the eviction {evictions} is pending")
        self._expect(not life.stuck_at, f"(4) {text} though the recovery failed at {life.stuck_at}")
        is_allowed = any(what == hook and self.lives[name].is_over for name, what in self._allowed)
        self._expect(is_allowed, f"(4) {text}, which nothing asks for")
        for run in self.runs:
            is_undone = run.stage == "prepare" and life.undoes(hook, self.lives[run.event])
            self._expect(not is_undone, f"(4) {text} while {run.event} prepares")
            is_twin = (run.stage, run.hook) == ("recover", hook)
            self._expect(not is_twin, f"(4) {text} while it runs for {run.event}")
        for name, stage, _ in self._used:
            other = self.lives[name]
            if stage == "prepare" and not other.is_over and life.undoes(hook, other):
                self._expect(False, f"(4) {text} though {name} needs it prepared")

    def _check_approval(self, life: Life, event_id: str, text: str) -> None:
        self._expect(event_id == life.current_id, f"(2) {text} as {event_id}")
        self._expect(VM in life.resources, f"(2) {text}, an event of another VM")
        self._expect(life.type != RECOMMENDATION, f"(2) {text}, a recommendation")
        self._expect(not life.is_gone, f"(2) {text} though it is over")
        self._expect(not life.is_missing, f"(2) {text} though it is missing")
        self._expect(life.status == "Scheduled" and not life.was_started, f"(2) {text} after its start")
        self._expect(life.words != {"hold"}, f"(2) {text} against the operator")
        self._expect(not life.is_confirmed, f"(6) {text} again")
        self._expect(not life.is_posted, f"(6) {text} while an approval is under way")
        self._expect(self._may_approve(life), f"(1, 2, 7) {text} without leave")
        rule = self.rule(life)
        if "approve" in life.words and (rule is None or rule.approve != "immediately"):
            # An operator overrules a failure and the rule, but not a preparation that is under way.
            rules = [life.plan] if life.plan is not None else []
            self._expect(
                not rules
                or life.has_failed
                or "prepare" not in {r.stage for r in self.runs if r.event == life.name},
                f"(1) {text} while it is prepared for",
            )
            return
        assert rule is not None
        is_asked_for = "approve" in life.words  # by an operator, who need not wait for other VMs
        if life.read_at is not None and not is_asked_for and (rule.shared or "first") == "first":
            turn = life.read_at + timedelta(seconds=10.0 * life.resources.index(VM))
            self._expect(self._now() >= turn, f"(2) {text} before {turn:%H:%M:%S}, the turn of this VM")
        has_ended = life.has_failed or life.succeeded.issuperset(rule.prepare)
        self._expect(rule.approve == "immediately" or has_ended, f"(1) {text} before its preparation has ended")

    def _may_approve(self, life: Life) -> bool:
        """Whether the rule or the operator would have it approved, its preparation aside."""
        rule = self.rule(life)
        if life.words == {"hold"} or VM not in life.resources or life.type == RECOMMENDATION:
            return False
        if "approve" in life.words:
            return True
        if rule is None or rule.approve in ("manual", "never") or life.is_history_unknown:
            return False
        if not self._may_speak(life, rule):
            return False
        return rule.approve == "immediately" or not life.has_failed or rule.on_failure == "approve"

    @staticmethod
    def _expect(holds: bool, text: str) -> None:
        if not holds:
            raise BrokenError(text)
