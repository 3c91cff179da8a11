"""The status page: HTML for people, from values.

Owns what the page at / looks like, and the policy that keeps everything else out of it. Reads nothing, knows no
clock, and needs no script: with one it follows the agent without being loaded again. The one invariant: every text
from outside (Azure, hooks, the policy file) is escaped, and however much of it there is, the page stays small.
"""

from base64 import b64encode
from collections.abc import Iterable
from datetime import datetime, timedelta
from hashlib import sha256
from html import escape
from typing import NamedTuple

from agent.events import ScheduledEvent
from agent.status import (
    History,
    JournalEntry,
    RunningHook,
    Status,
    activity,
    by_urgency,
    command,
    short_ids,
    span,
    words_of_use,
)
from agent.workflow import Phase, Progress, Stage, Workflow

# Where there is more, the page says how much. Together they keep it below a megabyte, most often below 30 KiB.
_MAX_CARDS = 50
_MAX_RESOURCES = 12
_MAX_NAMES = 40
_MAX_ENTRIES = 40
_MAX_TEXT = 600
_MAX_OUTPUT = 2000
_MAX_NAME = 80
# Characters of HTML, of which a text may need six for each of its own.
_MAX_EVENTS = 300_000  # of all events together, but for their timelines
_MAX_HISTORY = 250_000  # of all timelines together
_REFRESH_SECONDS = 10  # for browsers without script

_TONES: dict[Phase, str] = {
    "recovery_failed": "bad",
    "held": "bad",
    "preparing": "busy",
    "recovering": "busy",
    "started": "busy",
}
_STAGES: tuple[tuple[Stage, str], ...] = (("prepare", "prepare"), ("on_start", "on start"), ("recover", "recover"))
_STEPS = {
    "done": ("good", "✓", "done"), "current": ("busy", "▸", "running"), "failed": ("bad", "✕", "failed"),
    "open": ("", "·", "to do"), "missed": ("", "-", "not run"),
}  # fmt: skip
_APPROVALS = {
    "immediately": "wanted at once", "when-prepared": "wanted when prepared",
    "manual": "wanted when an operator says so", "never": "not from here",
}  # fmt: skip
_FOOTER = (
    '<footer><p>As JSON: <a href="status">/status</a>. For programs: <a href="metrics">/metrics</a>, '
    '<a href="healthz">/healthz</a>, <a href="readyz">/readyz</a>.</p></footer>'
)
_DOTS = {"good": "15803d", "busy": "b45309", "bad": "b91c1c"}


def render_page(
    status: Status,
    recent: Iterable[History] = (),
    pauses: Iterable[JournalEntry] = (),
    *,
    shows_output: bool = False,
    unread: str = "",
) -> str:
    """The whole document.

    ``shows_output``: whether hooks' output is for everyone who may read the page. ``unread``: why ``recent`` and
    ``pauses`` could not be read, if so.
    """
    histories = {history.workflow.id: history for history in recent}
    room = _Room(_Budget(_MAX_EVENTS), _Budget(_MAX_HISTORY), shows_output)
    tone, headline = _headline(status)
    name = status.vm.names[0] if status.vm.names else "this VM"
    icon = f"<svg xmlns='http://www.w3.org/2000/svg'><circle cx='8' cy='8' r='7' fill='%23{_DOTS[tone]}'/></svg>"
    is_open = {workflow.id for workflow in status.pending}
    over = [history for history in histories.values() if history.workflow.id not in is_open][::-1]
    parts = [
        f'{_top(status, name)}<p class="headline {tone}" role="status">{_text(headline)}</p>',
        _problems(status, unread),
        _running_alone(status),
        _pending(status, histories, room),
        _recent(over, room, status.command_options, is_first_open=not status.pending),
        _pauses(list(pauses)[::-1]),
        _agent(status),
        _FOOTER,
    ]
    body = "".join(f'<div id="part-{number}">{part}</div>' for number, part in enumerate(parts))
    title = escape(_cut(f"{name}: {headline}", 120))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:image/svg+xml,{escape(icon)}">'
        f"<style>{_STYLE}</style>"
        f'<noscript><meta http-equiv="refresh" content="{_REFRESH_SECONDS}"></noscript></head>'
        f'<body><main id="main" data-at="{_epoch(status.at)}">{body}</main>'
        '<p id="lost" role="status"></p>'
        f"<script>{_SCRIPT}</script></body></html>"
    )


class _Budget:
    """How many characters there may be still."""

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self, text: str) -> str | None:
        """The text if there is room for it."""
        if len(text) > self.left:
            return None
        self.left -= len(text)
        return text


class _Room(NamedTuple):
    """What is left for what there may be much of."""

    events: _Budget
    timelines: _Budget
    shows_output: bool


# --- what it is all about


def _headline(status: Status) -> tuple[str, str]:
    """How things are, in one line that only changes when that does; and its tone."""
    held = [workflow for workflow in status.pending if workflow.phase == "held"]
    ours = [w for w in by_urgency(status.pending) if w.decision.affects in ("self", "shared")]
    failed = [workflow for workflow in status.pending if workflow.phase == "recovery_failed"]
    if failed:
        more = f", and from {len(failed) - 1} more" if len(failed) > 1 else ""
        text, tone = f"Recovery from a {failed[0].event.type} failed{more}: {failed[0].waits_for}", "bad"
    elif held:
        event = held[0].event
        more = f", and {len(held) - 1} more" if len(held) > 1 else ""
        text, tone = f"{event.type or 'An event'} is held{more}: {held[0].waits_for or 'NotBefore decides'}", "bad"
    elif ours:
        more = f", and {len(status.pending) - 1} more" if len(status.pending) > 1 else ""
        text, tone = f"{_course(ours[0])}{more}", "busy"
    elif status.pending:
        count = len(status.pending)
        text, tone = f"{count} event{'s' if count > 1 else ''} pending, none for this VM", "good"
    elif status.last_poll_at is None:
        text, tone = "Azure has told nothing yet", "busy"
    elif status.poll_failure:
        text, tone = "Nothing was pending at the last good poll", "busy"
    else:
        text, tone = "Nothing is pending", "good"
    if status.health != "ok":
        return "bad", f"Not healthy. {text}"
    return tone, text


def _course(workflow: Workflow) -> str:
    """What becomes of an event of this VM."""
    name = workflow.event.type or "event"
    if workflow.is_gone and workflow.phase not in ("recovering", "recovery_failed"):
        return f"{name} is over"
    return {
        "waiting": f"{name} is pending",
        "preparing": f"Preparing for a {name}",
        "prepared": f"Prepared for a {name}, which is not approved yet",
        "approved": f"{name} is approved and may start",
        "started": f"{name} is under way",
        "recovering": f"Recovering from a {name}",
    }.get(workflow.phase, f"{name}: {workflow.phase}")


def _top(status: Status, name: str) -> str:
    chips = [_chip("ready", "good") if status.ready else _chip("not ready: /readyz answers 503", "busy")]
    if status.health != "ok":
        chips.append(_chip("not healthy", "bad"))
    if status.mode == "observe":
        chips.append(_chip("only observes", "busy"))
    if status.is_paused:
        chips.append(_chip("paused", "busy"))
    return (
        f'<header><p class="product">scheduled-events-agent</p><h1>{_text(name)}</h1>'
        f'<p class="chips">{"".join(chips)}</p></header>'
    )


def _problems(status: Status, unread: str) -> str:
    bad = list(status.health[:_MAX_NAMES]) if status.health != "ok" else []
    odd = []
    if status.poll_failure and not bad:
        odd.append(f"The last poll failed: {status.poll_failure}")
    if status.is_paused:
        odd.append("The service manager has paused the agent: it watches, and does nothing.")
    if not status.vm.names:
        odd.append("What Azure calls this VM is not known yet, so no event can be told to be its own.")
    if unread:
        odd.append(f"What happened before cannot be shown: {unread}")
    noted = [("bad", text) for text in bad] + [("busy", text) for text in odd]
    boxes = "".join(f'<li class="box {tone}">{_text(text)}</li>' for tone, text in noted)
    boxes = f'<ul class="boxes">{boxes}</ul>' if boxes else ""
    if status.policy.refused:
        lines = status.policy.refused.splitlines()
        shown = "\n".join(lines[:_MAX_NAMES])
        boxes += (
            '<section class="box bad" aria-labelledby="refused"><h2 id="refused">The policy file was refused</h2>'
            "<p>The policy from before is in force.</p>"
            f"<pre>{_text(shown, 4000)}</pre>{_more(len(lines) - _MAX_NAMES, 'lines')}</section>"
        )
    return boxes


def _running_alone(status: Status) -> str:
    items = [
        f"<li>{_chip('running', 'busy')} the on_clear hook <b>{_text(hook.hook, _MAX_NAME)}</b>, "
        f"{_since(hook.since, status.at)} so far</li>"
        for hook in status.running
        if hook.stage == "on_clear"
    ]
    return f'<ul class="alone">{"".join(items)}</ul>' if items else ""


# --- one event


def _pending(status: Status, histories: dict[str, History], room: _Room) -> str:
    if not status.pending:
        return ""  # the headline says so
    cards: list[str] = []
    short = short_ids([workflow.event.id for workflow in status.pending])
    for workflow in by_urgency(status.pending)[:_MAX_CARDS]:
        history, short_id = histories.get(workflow.id), short[workflow.event.id]
        card = _card(status, workflow, history, room, short_id=short_id, is_first=not cards)
        if card is None:
            break
        cards.append(card)
    count = len(status.pending)
    return (
        f'<section aria-labelledby="pending"><h2 id="pending">Pending <small>{count}</small></h2>{"".join(cards)}'
        f"{_more(count - len(cards), 'are pending; /status has them all')}</section>"
    )


def _card(
    status: Status, workflow: Workflow, history: History | None, room: _Room, *, short_id: str, is_first: bool
) -> str | None:
    """What there is to say of a pending event; None if there is no room for it."""
    event, decision = workflow.event, workflow.decision
    running = status.running_for(workflow.id)
    tone = _TONES.get(workflow.phase, "")
    facts = [
        ("Now", _now(workflow, running, status.at)),
        ("Decision", _text(decision.reason)),
        ("Approval", _approval(workflow)),
        ("Hooks", _hooks(workflow, running)),
    ]
    about = [
        ("Affects", _resources(event, status.vm.names, decision.affects)),
        ("From", _text(_origin(event))),
        ("Azure says", f"<q>{_text(event.description)}</q>" if event.description else ""),
        ("Id", f"<code>{_text(event.id) or 'none'}</code>"),
        ("First seen", f"{_moment(workflow.first_seen_at)}, {_since(workflow.first_seen_at, status.at)} ago"),
    ]
    if is_first:
        facts, about = facts + about, []
    key = _key(workflow)
    head = (
        f'<article id="c-{key}" class="card {tone}" aria-labelledby="e-{key}"><div class="lead"><div>'
        f'<h3 id="e-{key}">{_text(event.type) or "An event without a type"}</h3>'
        f"{_chip(_phase_word(workflow), tone)}</div>"
        f"{_countdown(workflow, status.at)}</div>"
        f"{_list(facts)}{_way_out(status, workflow, short_id)}"
    )
    more = _list(about) if about else ""  # of many, each card is as short as it can be
    if room.events.take(head + more) is None:
        return None
    more += _timeline(history, room, status.command_options) if history else ""
    details = _details(f"t-{key}", "Timeline" if is_first else "More", more, is_open=is_first) if more else ""
    return f"{head}{details}</article>"


def _phase_word(workflow: Workflow) -> str:
    return "pending" if workflow.phase == "waiting" else workflow.phase.replace("_", " ")


def _way_out(status: Status, workflow: Workflow, short_id: str) -> str:
    """The commands with which an operator may decide otherwise, where that is of use."""
    lines = [command(word, short_id, status.command_options) for word in words_of_use(status, workflow)]
    commands = " or ".join(f"<code>{_text(line)}</code>" for line in lines)
    aim = "To solve it" if workflow.phase == "recovery_failed" else "To overrule"
    return f'<p class="hint">{aim}: {commands}</p>' if lines else ""


def _countdown(workflow: Workflow, now: datetime) -> str:
    event = workflow.event
    if workflow.is_gone:
        return '<p class="count"><b>over</b><small>at Azure</small></p>'
    if event.status == "Started":
        return '<p class="count"><b>started</b><small>by Azure</small></p>'
    if event.not_before is None or event.not_before <= now:
        return '<p class="count"><b>any moment</b><small>it may start</small></p>'
    is_soon = event.not_before - now < timedelta(days=1)
    stamp = f"{event.not_before:%H:%M:%S} UTC" if is_soon else _stamp(event.not_before)
    return f'<p class="count"><b>{_until(event.not_before, now)}</b><small>until it may start, {stamp}</small></p>'


def _now(workflow: Workflow, running: Iterable[RunningHook], now: datetime) -> str:
    running = list(running)
    if running:
        return "; ".join(
            f"runs the {hook.stage} hook <b>{_text(hook.hook, _MAX_NAME)}</b>, {_since(hook.since, now)} so far"
            for hook in running
        )
    if workflow.phase == "preparing" and workflow.drain_until and workflow.drain_until > now:
        return f"drains for {_until(workflow.drain_until, now)} more (/readyz answers 503)"
    return _text(activity(workflow, (), now))


def _approval(workflow: Workflow) -> str:
    approval, decision = workflow.approval, workflow.decision
    words = {"": "", "approved": " An operator has approved it.", "held": " An operator holds it."}
    said = words[workflow.operator]
    if approval.state == "confirmed":
        return f"{_chip('approved', 'good')} Azure has taken it.{said}"
    tries = f" {approval.failures} failed" if approval.failures else ""
    if approval.state == "requested":
        return f"{_chip('asking', 'busy')} Azure is being asked.{tries}{said}"
    if tries:
        return f"{_chip('failing', 'bad')}{tries} so far; it is tried again.{said}"
    if workflow.is_gone or workflow.was_started:
        return f"none was given from here.{said}"
    if not decision.rule:
        return f"none: the event is only observed.{said}"
    return f"{_APPROVALS[decision.approve]}.{said}"


def _hooks(workflow: Workflow, running: Iterable[RunningHook]) -> str:
    decision = workflow.decision
    busy = {(hook.stage, hook.hook) for hook in running}
    names = {"prepare": decision.prepare, "on_start": decision.on_start, "recover": decision.recover}
    states: dict[Stage, Progress] = {
        "prepare": workflow.prepare, "on_start": workflow.on_start, "recover": workflow.recover,
    }  # fmt: skip
    is_over = workflow.is_gone
    is_past: dict[Stage, bool] = {
        "prepare": is_over or workflow.was_started, "on_start": is_over, "recover": workflow.phase == "closed",
    }  # fmt: skip
    lines = []
    for stage, title in _STAGES:
        steps = []
        for name in names[stage][:_MAX_NAMES]:
            progress = states[stage]
            if (stage, name) in busy or progress.current == name:
                word = "current"
            elif name in progress.done:
                word = "done"
            else:
                is_next = progress.state == "failed" and name == (
                    progress.failed_hook or _first_open(names[stage], progress)
                )
                word = "failed" if is_next else "missed" if is_past[stage] else "open"
            tone, sign, meaning = _STEPS[word]
            steps.append(
                f'<li class="{tone}"><span aria-hidden="true">{sign}</span> {_text(name, _MAX_NAME)}'
                f' <span class="quiet">{meaning}</span></li>'
            )
        if steps:
            more = _more(len(names[stage]) - _MAX_NAMES, "hooks", "li")
            listed = f'<ol class="steps">{"".join(steps)}{more}</ol>'
            lines.append(f'<div class="stage"><span class="quiet">{title}</span>{listed}</div>')
    failures = [
        f'<p class="bad">{_text(progress.failure)}</p>' for progress in states.values() if progress.failure
    ]
    return "".join([*lines, *failures])


def _first_open(names: Iterable[str], progress: Progress) -> str | None:
    return next((name for name in names if name not in progress.done), None)


def _resources(event: ScheduledEvent, mine: tuple[str, ...], affects: str) -> str:
    folded = {name.casefold().removeprefix("_") for name in mine}

    def is_mine(name: str) -> bool:
        return name.casefold().removeprefix("_") in folded

    names = sorted(event.resources, key=lambda name: not is_mine(name))
    shown = [
        f"<b>{_text(name, _MAX_NAME)}</b>" if is_mine(name) else _text(name, _MAX_NAME)
        for name in names[:_MAX_RESOURCES]
    ]
    whom = {
        "self": "this VM alone", "shared": "this VM and others", "others": "other VMs only",
        "unknown": "nobody knows whether this VM",
    }[affects]  # fmt: skip
    more = f", and {len(names) - _MAX_RESOURCES} more" if len(names) > _MAX_RESOURCES else ""
    return f"{whom}: {', '.join(shown)}{more}" if shown else whom


def _origin(event: ScheduledEvent) -> str:
    parts = [{"User": "a user", "Platform": "Azure's platform"}.get(event.source, event.source or "unknown")]
    if event.duration_seconds is not None:
        parts.append(f"about {event.duration_seconds:g}s long")
    return ", ".join(parts)


# --- what happened


def _recent(over: list[History], room: _Room, options: str, *, is_first_open: bool) -> str:
    items: list[str] = []
    for history in over:
        workflow = history.workflow
        first, last = workflow.first_seen_at, history.entries[-1].at if history.entries else None
        took = f", {span(first, last)} long" if last else ""
        tone = "bad" if workflow.recover.failure else ""
        summary = (
            f"<b>{_text(workflow.event.type) or 'event'}</b> {_chip(workflow.outcome or workflow.phase, tone)} "
            f"<span>{_moment(first)}{_text(took)}</span>"
        )
        head = (
            f"<p>{_text(workflow.decision.reason)}</p>"
            f'<p class="quiet"><code>{_text(workflow.event.id)}</code> {_text(workflow.event.description)}</p>'
        )
        if room.events.take(summary + head) is None:
            break
        timeline = _timeline(history, room, options)
        item = _details(
            f"t-{_key(workflow)}", summary, head + timeline, is_open=is_first_open and not items, is_html=True
        )
        items.append(item)
    body = "".join(items) + _more(len(over) - len(items), "are over")
    body = body or '<p class="none">None that the agent remembers.</p>'
    return f'<section aria-labelledby="recent"><h2 id="recent">Recent events</h2>{body}</section>'


def _timeline(history: History, room: _Room, options: str) -> str:
    """The entries, oldest first; of many, the last ones."""
    entries = history.entries[-_MAX_ENTRIES:]
    days = [history.workflow.first_seen_at, *(entry.at for entry in entries)]
    lines = [
        _entry(entry, is_new_day=entry.at.date() != before.date(), shows_output=room.shows_output)
        for entry, before in zip(entries, days, strict=False)
    ]
    earlier = _more(len(history.entries) - len(entries), "entries came before", "li")
    way_out = f"<code>{_text(command('history --event', history.workflow.event.id, options))}</code> shows it"
    is_hidden = not room.shows_output and any(entry.detail for entry in entries)
    hint = f'<p class="hint">What the hooks wrote is not shown here: {way_out}.</p>' if is_hidden else ""
    whole = room.timelines.take(f'<ol class="timeline">{earlier}{"".join(lines)}</ol>{hint}')
    return whole or f'<p class="quiet">There is no room for its timeline here: {way_out}.</p>'


def _entry(entry: JournalEntry, *, is_new_day: bool, shows_output: bool) -> str:
    bad = entry.outcome in ("failed", "timed_out", "not_started") or entry.kind in (
        "held", "approval_failed", "blocked", "recovery_failed",
    )  # fmt: skip
    tone = "bad" if bad else "good" if entry.outcome == "succeeded" or entry.kind == "approved" else ""
    day = f"{entry.at:%Y-%m-%d}<br>" if is_new_day else ""
    output = ""
    if entry.detail and shows_output:
        cut = entry.detail[-_MAX_OUTPUT:]
        mark = "…" if len(cut) < len(entry.detail) else ""
        output = f"<pre>{mark}{escape(cut)}</pre>"
    return (
        f'<li class="{tone}"><time datetime="{_iso(entry.at)}">{day}{entry.at:%H:%M:%S}</time>'
        f"<div>{_text(entry.text)}{output}</div></li>"
    )


def _pauses(pauses: list[JournalEntry]) -> str:
    lines = "".join(
        f"<li>{_moment(pause.at)}<div>{_text(pause.text)}</div></li>" for pause in pauses[:_MAX_ENTRIES]
    )
    body = f'<ol class="timeline wide">{lines}</ol>' if lines else '<p class="none">None was measured.</p>'
    return f'<section aria-labelledby="pauses"><h2 id="pauses">Pauses of this machine</h2>{body}</section>'


# --- the agent


def _agent(status: Status) -> str:
    polled = f"{_since(status.last_poll_at, status.at)} ago" if status.last_poll_at else "never yet"
    failure = f' <span class="bad">since then: {_text(status.poll_failure)}</span>' if status.poll_failure else ""
    policy = status.policy
    refused = ' <span class="bad">(the file as it is now was refused)</span>' if policy.refused else ""
    policy_hash = f", SHA-256 <code>{escape(policy.hash[:12])}</code>" * bool(policy.hash)
    rules = ", ".join(_text(rule, _MAX_NAME) for rule in status.rules[:_MAX_NAMES])
    acts = "acts" if status.mode == "act" else "only observes: runs no hooks, approves nothing"
    facts = [
        ("Health", "ok" if status.health == "ok" else '<span class="bad">not healthy, see above</span>'),
        ("Last good poll", polled + failure),
        ("Endpoint", f"<code>{_text(status.endpoint)}</code>"),
        ("Incarnation", _text(status.incarnation) or "no document yet"),
        (
            "This VM",
            ", ".join(_text(name, _MAX_NAME) for name in status.vm.names[:_MAX_NAMES]) or "name not known yet",
        ),
        ("VM id", f"<code>{_text(status.vm.vm_id)}</code>" if status.vm.vm_id else ""),
        ("Mode", f"{acts}{'; paused' if status.is_paused else ''}"),
        ("Policy", f"<code>{_text(policy.file)}</code>, read {_moment(policy.read_at)}{policy_hash}{refused}"),
        ("Rules", rules + _more(len(status.rules) - _MAX_NAMES, "rules", "span") or "none"),
        ("Version", f"{_text(status.version)}, started {_moment(status.started_at)}"),
    ]
    return f'<section class="card" aria-labelledby="agent"><h2 id="agent">Agent</h2>{_list(facts)}</section>'


# --- pieces


def _text(text: str | None, limit: int = _MAX_TEXT) -> str:
    """Escaped, and cut if it is very long."""
    cut = escape(_cut(text or "", limit))
    # A mark that turns the direction of writing is kept to its own text.
    return cut if cut.isascii() else f"<bdi>{cut}</bdi>"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text):,} characters)"


def _key(workflow: Workflow) -> str:
    """Names the event within the page; its own id may be any text."""
    return sha256(workflow.id.encode()).hexdigest()[:12]


def _chip(word: str, tone: str) -> str:
    return f'<span class="chip {tone}">{escape(word)}</span>'


def _more(number: int, what: str, tag: str = "p") -> str:
    return f'<{tag} class="quiet">… {number:,} more {what}</{tag}>' if number > 0 else ""


def _list(facts: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<div><dt>{name}</dt><dd>{html}</dd></div>" for name, html in facts if html) + "</dl>"


def _details(key: str, summary: str, body: str, *, is_open: bool, is_html: bool = False) -> str:
    words = summary if is_html else escape(summary)
    return f'<details id="{key}"{" open" if is_open else ""}><summary>{words}</summary>{body}</details>'


def _epoch(at: datetime) -> int:
    return int(at.timestamp() * 1000)


def _iso(at: datetime) -> str:
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"


def _stamp(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _moment(at: datetime) -> str:
    return f'<time datetime="{_iso(at)}">{_stamp(at)}</time>'


def _until(at: datetime, now: datetime) -> str:
    """A countdown; the script goes on with it."""
    return f'<time datetime="{_iso(at)}" data-until="{_epoch(at)}">{span(now, at)}</time>'


def _since(at: datetime, now: datetime) -> str:
    """How long ago; the script goes on with it."""
    return f'<time datetime="{_iso(at)}" data-since="{_epoch(at)}">{span(at, now)}</time>'


_STYLE = """
:root{color-scheme:light dark;--page:#f5f6f8;--card:#fff;--line:#dfe3e8;--ink:#1b212b;--quiet:#566070;
--good:#166534;--good-bg:#dcfce7;--busy:#8a3d0c;--busy-bg:#fef0c7;--bad:#b01c1c;--bad-bg:#fde8e8;--pre:#f0f2f5;
--link:#1d4ed8}
@media (prefers-color-scheme:dark){:root{--page:#0f1318;--card:#181e26;--line:#2c3541;--ink:#e7eaef;
--quiet:#a0abba;--good:#86efac;--good-bg:#12301d;--busy:#fcd34d;--busy-bg:#37290a;--bad:#fca5a5;--bad-bg:#421717;--pre:#10151b;
--link:#93b4ff}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Noto Sans","DejaVu Sans",sans-serif;overflow-wrap:anywhere}
main{max-width:56rem;margin:0 auto;padding:1.25rem 1rem 2rem;display:grid;gap:1rem;
grid-template-columns:minmax(0,1fr)}
main>div,section{display:grid;gap:.75rem;grid-template-columns:minmax(0,1fr)}
h1,h2,h3,p,ul,ol,dl,dd{margin:0;padding:0}
ul,ol{list-style:none}
h1{font-size:1.6rem;line-height:1.2;font-weight:650}
h2{font-size:1.05rem;font-weight:650;margin-top:.75rem}
h2 small{display:inline-block;min-width:1.6em;padding:0 .45em;border-radius:1em;background:var(--line);
text-align:center;font-size:.8em}
h3{font-size:1.3rem;line-height:1.25;font-weight:650}
a{color:var(--link)}
code,pre{font:.85em/1.5 ui-monospace,SFMono-Regular,Consolas,"DejaVu Sans Mono",monospace}
pre{margin:.4rem 0 0;padding:.6rem .75rem;background:var(--pre);border:1px solid var(--line);border-radius:.4rem;
white-space:pre-wrap;color:var(--ink)}
header{display:flex;flex-wrap:wrap;gap:.25rem 1rem;align-items:baseline;justify-content:space-between}
.product{flex-basis:100%;color:var(--quiet);font-size:.875rem}
.chips{display:flex;flex-wrap:wrap;gap:.4rem}
.chip{display:inline-block;padding:.05rem .6rem;border-radius:1rem;background:var(--line);font-size:.875rem}
.good{color:var(--good)}.busy{color:var(--busy)}.bad{color:var(--bad)}
.chip.good,.headline.good{background:var(--good-bg)}
.chip.busy,.headline.busy{background:var(--busy-bg)}
.chip.bad,.headline.bad,.box.bad{background:var(--bad-bg)}
.box.busy{background:var(--busy-bg)}
.headline{padding:.8rem 1rem;border-radius:.6rem;font-size:1.1rem;font-weight:600}
main>div:empty{display:none}
.boxes{display:grid;gap:.5rem;grid-template-columns:minmax(0,1fr)}
.box{padding:.7rem 1rem;border-radius:.6rem}
.box h2{margin:0}
.stage{display:grid;grid-template-columns:4.5rem minmax(0,1fr);gap:0 .75rem}
time{white-space:nowrap}
.card,details,.alone,.timeline.wide{background:var(--card);border:1px solid var(--line);border-radius:.6rem}
.card{padding:1rem;display:grid;gap:.75rem;grid-template-columns:minmax(0,1fr);color:var(--ink)}
article.card{border-left:.3rem solid var(--line)}
article.card.busy{border-left-color:var(--busy)}
article.card.bad{border-left-color:var(--bad)}
.card h2{margin:0}
.lead{display:flex;flex-wrap:wrap;gap:.5rem 1.5rem;justify-content:space-between}
.lead>div{display:flex;flex-wrap:wrap;gap:.4rem .75rem;align-items:center;align-content:flex-start}
.count{display:grid;text-align:right;margin-left:auto}
.count b{font-size:1.5rem;line-height:1.2;font-weight:650;font-variant-numeric:tabular-nums}
.count small{color:var(--quiet)}
dl{display:grid;gap:.35rem}
dl>div{display:grid;grid-template-columns:7.5rem minmax(0,1fr);gap:.25rem 1rem}
dt{color:var(--quiet)}
q{quotes:none}
.steps{display:flex;flex-wrap:wrap;gap:.1rem 1rem}
.quiet,.none,.hint,.timeline time,summary span:not(.chip){color:var(--quiet)}
.hint{font-size:.9rem}.timeline+.hint{margin-top:.5rem}
details{padding:.55rem .9rem}
article details{background:none;border-width:1px 0 0;border-radius:0;padding:.55rem 0 0}
details[open]>summary{margin-bottom:.6rem}
summary{cursor:pointer}
summary:focus-visible,a:focus-visible{outline:2px solid var(--link);outline-offset:2px;border-radius:.2rem}
details>p{margin-bottom:.5rem}
.timeline{display:grid;gap:.4rem;font-size:.925rem}
.timeline li{display:grid;grid-template-columns:5.2rem minmax(0,1fr);gap:0 .75rem}
.timeline li.quiet{display:block}
.timeline.wide{padding:.7rem .9rem}
.timeline.wide li{grid-template-columns:13rem minmax(0,1fr)}
.timeline time{font-variant-numeric:tabular-nums}
.alone{padding:.7rem 1rem}
footer{color:var(--quiet);font-size:.875rem;margin-top:.5rem}
#lost{position:sticky;bottom:0;margin:0;text-align:center;background:var(--bad-bg);color:var(--bad);font-weight:600}
#lost:not(:empty){padding:.8rem 1rem;border-top:1px solid var(--bad)}
@media (max-width:34rem){dl>div{grid-template-columns:minmax(0,1fr);gap:0}dt{font-size:.825rem}dl{gap:.6rem}
.timeline.wide li{grid-template-columns:minmax(0,1fr)}.count{text-align:left;margin:0;flex-basis:100%}
.timeline li{grid-template-columns:minmax(0,1fr)}}
@media print{#lost{display:none}}
"""

# Follows the agent: what has changed is put in place, so that what is being read, and what was opened, stays.
_SCRIPT = """
"use strict";
(() => {
  const main = document.getElementById("main");
  const lost = document.getElementById("lost");
  let ahead = Infinity, timer = 0, isAsking = false;
  const span = (ms) => {
    const seconds = Math.max(0, Math.floor(ms / 1000)), minutes = Math.floor(seconds / 60);
    const hours = Math.floor(seconds / 3600), days = Math.floor(seconds / 86400);
    if (days) return days + "d " + hours % 24 + "h";
    if (hours) return hours + "h " + minutes % 60 + "m";
    return minutes ? minutes + "m " + seconds % 60 + "s" : seconds + "s";
  };
  const tick = () => {
    const now = Date.now() - ahead;
    for (const time of main.querySelectorAll("time[data-until],time[data-since]")) {
      const text = "until" in time.dataset ? span(time.dataset.until - now) : span(now - time.dataset.since);
      if (time.textContent !== text) time.textContent = text;
    }
  };
  const follow = () => {
    // Of the agent's clock; the answer that came soonest after it was made tells best.
    ahead = Math.min(ahead, Date.now() - main.dataset.at);
    tick();
  };
  const sync = (old, fresh) => {
    if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName || old.id !== fresh.id) {
      old.replaceWith(document.importNode(fresh, true));
      return;
    }
    if (old.nodeType === Node.TEXT_NODE) {
      if (old.data !== fresh.data) old.data = fresh.data;
      return;
    }
    for (const name of old.getAttributeNames())
      if (name !== "open" && !fresh.hasAttribute(name)) old.removeAttribute(name);
    for (const name of fresh.getAttributeNames())
      if (name !== "open" && old.getAttribute(name) !== fresh.getAttribute(name))
        old.setAttribute(name, fresh.getAttribute(name));
    if (old.nodeName === "TIME" && ("until" in old.dataset || "since" in old.dataset)) return;
    // What has an id is known again wherever it stands.
    const after = [...fresh.childNodes], wanted = new Set(after.map((node) => node.id).filter(Boolean));
    for (const child of [...old.children]) if (child.id && !wanted.has(child.id)) child.remove();
    after.forEach((node, i) => {
      const at = old.childNodes[i] || null, same = node.id && [...old.children].find((one) => one.id === node.id);
      if (same) { if (same !== at) old.insertBefore(same, at); sync(same, node); }
      else if (!at || node.id || wanted.has(at.id)) old.insertBefore(document.importNode(node, true), at);
      else sync(at, node);
    });
    while (old.childNodes.length > after.length) old.lastChild.remove();
  };
  const put = (fresh) => {
    const next = fresh.getElementById("main"), look = (page) => page.querySelector("style").textContent;
    if (!next || look(fresh) !== look(document)) { location.reload(); return; }
    const open = new Map([...main.querySelectorAll("details")].map((one) => [one.id, one.open]));
    sync(main, next);
    for (const one of main.querySelectorAll("details")) if (open.has(one.id)) one.open = open.get(one.id);
    document.title = fresh.title;
    const icon = (page) => page.querySelector("link[rel=icon]");
    if (icon(document).href !== icon(fresh).href) icon(document).href = icon(fresh).href;
  };
  const refresh = async () => {
    if (isAsking) return;
    isAsking = true;
    clearTimeout(timer);
    try {
      const answer = await fetch(location.pathname, {cache: "no-store", signal: AbortSignal.timeout(10000)});
      if (!answer.ok) throw new Error(answer.status);
      put(new DOMParser().parseFromString(await answer.text(), "text/html"));
      follow();
      lost.textContent = "";
    } catch {
      const at = new Date(Number(main.dataset.at)).toISOString().slice(11, 19);
      lost.textContent = "The agent does not answer. This is how things were at " + at + " UTC.";
    }
    isAsking = false;
    timer = setTimeout(refresh, document.hidden ? 30000 : 2000);
  };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
  follow();
  setInterval(tick, 250);
  timer = setTimeout(refresh, 2000);
})();
"""


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


HEADERS = {
    "Content-Security-Policy": "; ".join(
        [
            "default-src 'none'",
            f"style-src {_hash(_STYLE)}",
            f"script-src {_hash(_SCRIPT)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    ),
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""What goes with the document: nothing is loaded, framed or run but what stands in it."""
