"""The status page as a text: what stands in it, that everything is escaped, and that it stays small."""

import re
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from html.parser import HTMLParser
from typing import Any

import pytest
from msgspec.structs import replace

from agent.events import ScheduledEvent, Seen
from agent.page import HEADERS, render_page
from agent.policy import Rule
from agent.status import History, JournalEntry, PolicyInForce, RunningHook, Status, Vm
from agent.workflow import Approval, Context, Progress, Workflow, proceed

NOW = datetime(2026, 3, 4, 3, 0, 0, tzinfo=UTC)
RULE = Rule(name="impactful", prepare=("drain", "checkpoint"), recover=("resume",), approve="when-prepared")
VOID = {"meta", "link", "br", "input", "img"}


class Reader(HTMLParser):
    """Checks that elements are closed in order, and gathers what a reader would see."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data + " "


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def shown(*arguments: Any, **options: Any) -> str:
    """The page's text with single blanks."""
    return " ".join(read(render_page(*arguments, **options)).text.split())


def event(**changes: Any) -> ScheduledEvent:
    plain = ScheduledEvent(
        id="C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        type="Reboot",
        status="Scheduled",
        source="Platform",
        resources=("vm-1",),
        not_before=NOW + timedelta(minutes=11, seconds=42),
        description="Host maintenance.",
    )
    return replace(plain, **changes)


def workflow(one: ScheduledEvent | None = None, **changes: Any) -> Workflow:
    context = Context(
        now=NOW,
        names=("vm-1",),
        rules=(RULE,),
        windows={},
        hooks=(),
        boot_id="b",
        document_at=NOW,
        is_acting=False,
    )
    (first,) = proceed({}, [Seen(one or event())], context).board.values()
    return replace(first, **{"phase": "waiting", "prepare": Progress(), "waits_for": "", **changes})


def status(*pending: Workflow, **changes: Any) -> Status:
    plain = Status(
        at=NOW,
        version="0.1.0",
        started_at=NOW - timedelta(days=1),
        vm=Vm(names=("vm-1",), vm_id="id"),
        mode="act",
        is_paused=False,
        ready=True,
        health="ok",
        policy=PolicyInForce(file="/etc/policy.yaml", read_at=NOW),
        rules=("impactful",),
        endpoint="http://169.254.169.254",
        last_poll_at=NOW - timedelta(seconds=3),
        poll_failure="",
        incarnation="7",
        running=(),
        pending=pending,
    )
    return replace(plain, **changes)


def entry(text: str = "x", *, detail: str = "", at: datetime = NOW, kind: str = "hook_finished") -> JournalEntry:
    return JournalEntry(
        at=at, workflow_id="w", event_id="e", kind=kind, stage="", hook="", outcome="", text=text, detail=detail
    )


def test_when_nothing_is_pending_the_page_says_so_and_how_the_agent_is() -> None:
    assert shown(status()) == (
        "vm-1: Nothing is pending "
        "scheduled-events-agent vm-1 ready Nothing is pending "
        "Recent events None that the agent remembers. Pauses of this machine None was measured. "
        "Agent Health ok Last good poll 3s ago Endpoint http://169.254.169.254 Incarnation 7 This VM vm-1 "
        "VM id id Mode acts Policy /etc/policy.yaml , read 2026-03-04 03:00:00 UTC Rules impactful "
        "Version 0.1.0, started 2026-03-03 03:00:00 UTC "
        "As JSON: /status . For programs: /metrics , /healthz , /readyz ."
    )


def test_an_event_is_told_with_its_time_what_is_done_why_and_by_what() -> None:
    one = workflow(
        phase="preparing", prepare=Progress(state="running", done=("drain",), current="checkpoint", run=2)
    )
    hook = RunningHook(workflow_id=one.id, stage="prepare", hook="checkpoint", since=NOW - timedelta(seconds=72))
    text = shown(status(one, running=(hook,), ready=False))
    assert text.partition(" Recent events")[0].partition("503 ")[2] == (
        "Preparing for a Reboot Pending 1 Reboot preparing 11m 42s until it may start, 03:11:42 UTC "
        "Now runs the prepare hook checkpoint , 1m 12s so far Decision rule impactful takes it: affects self "
        "Approval wanted when prepared. Hooks prepare ✓ drain done ▸ checkpoint running recover · resume to do "
        "Affects this VM alone: vm-1 From Azure's platform Azure says Host maintenance. "
        "Id C7061BAC-AFDC-4513-B24B-AA5F13A16123 First seen 2026-03-04 03:00:00 UTC , 0s ago "
        "To overrule: scheduled-events-agent hold C7061BAC"
    )


def test_the_commands_to_overrule_lead_to_an_agent_that_is_not_where_the_default_is() -> None:
    text = shown(status(workflow(), command_options="--state-dir '/var/my agent'"))
    assert "To overrule: scheduled-events-agent hold C7061BAC --state-dir '/var/my agent' or " in text


@pytest.mark.parametrize("changes", [{"mode": "observe"}, {"is_paused": True}])
def test_no_command_is_offered_that_the_agent_would_refuse(changes: dict[str, Any]) -> None:
    assert "To overrule" in shown(status(workflow()))
    assert "To overrule" not in shown(status(workflow(), **changes))
    failed = workflow(phase="recovery_failed", is_gone=True)
    text = shown(status(failed, **changes))
    assert "scheduled-events-agent resolve C7061BAC" in text
    assert "scheduled-events-agent retry" not in text


def test_a_failed_recovery_is_shown_with_the_commands_that_solve_it() -> None:
    failed = Progress(state="failed", failed_hook="load", failure="hook load: exit code 3")
    decision = replace(workflow().decision, recover=("load", "resume"))
    over = workflow(phase="recovery_failed", is_gone=True, recover=failed, decision=decision)
    page = shown(status(over))
    assert "recovery failed" in page
    assert "✕ load failed" in page
    assert "· resume to do" in page
    assert re.search(r"To solve it: scheduled-events-agent retry \w+.* or scheduled-events-agent resolve", page)


@pytest.mark.parametrize(
    ("changes", "headline"),
    [
        ({"phase": "held", "waits_for": "hook drain failed"}, "Reboot is held: hook drain failed"),
        (
            {"phase": "recovery_failed", "is_gone": True, "waits_for": "hook load: exit code 3"},
            "Recovery from a Reboot failed: hook load: exit code 3",
        ),
        ({"phase": "prepared"}, "Prepared for a Reboot, which is not approved yet"),
        ({"phase": "approved"}, "Reboot is approved and may start"),
        ({"phase": "started"}, "Reboot is under way"),
        ({"phase": "recovering", "is_gone": True}, "Recovering from a Reboot"),
        ({"phase": "waiting"}, "Reboot is pending"),
        ({"phase": "waiting", "event": event(type="")}, "event is pending"),
    ],
)
def test_the_headline_is_the_answer_in_one_line(changes: dict[str, Any], headline: str) -> None:
    page = render_page(status(workflow(**changes)))
    assert re.findall(r'role="status">([^<]*)<', page)[0] == headline
    unhealthy = render_page(status(workflow(**changes), health=("the disk is full",)))
    assert re.findall(r'role="status">([^<]*)<', unhealthy)[0] == f"Not healthy. {headline}"
    assert "the disk is full" in unhealthy


@pytest.mark.parametrize(
    ("changes", "headline"),
    [
        ({"last_poll_at": None}, "Azure has told nothing yet"),
        ({"poll_failure": "connection refused"}, "Nothing was pending at the last good poll"),
        (
            {"poll_failure": "x", "health": ("no poll has succeeded for 212s",)},
            "Not healthy. Nothing was pending at the last good poll",
        ),
    ],
)
def test_that_nothing_is_pending_is_only_said_if_azure_has_just_said_so(
    changes: dict[str, Any], headline: str
) -> None:
    page = render_page(status(**changes))
    (shown_tone, text), *_ = re.findall(r'class="headline (\w+)" role="status">([^<]*)<', page)
    assert (text, shown_tone) == (headline, "bad" if "health" in changes else "busy")


def test_what_is_urgent_comes_first_and_what_concerns_others_last() -> None:
    others = workflow(event(id="A", resources=("vm-2",), not_before=NOW))
    late = workflow(event(id="B", not_before=NOW + timedelta(days=3)))
    soon = workflow(event(id="C"))
    page = render_page(status(others, late, soon))
    assert re.findall(r"<code>([ABC])</code>", page) == ["C", "B", "A"]
    assert re.findall(r'role="status">([^<]*)<', page)[0] == "Reboot is pending, and 2 more"


def test_of_many_events_only_the_first_is_told_at_length_and_the_rest_is_one_click_away() -> None:
    page = render_page(status(workflow(event(id="A")), workflow(event(id="B"), id="b")))
    first, second = re.findall(r"<article.*?</article>", page)
    assert "<details" not in first
    assert "<dt>Azure says</dt>" in first
    shown_at_once, folded = second.split("<details")
    assert "<dt>Now</dt>" in shown_at_once
    assert "<dt>Azure says</dt>" not in shown_at_once
    assert re.search(r'^ id="t-[0-9a-f]+"><summary>More</summary>.*<dt>Azure says</dt>.*<code>B</code>', folded)


@pytest.mark.parametrize(
    ("changes", "hooks"),
    [
        ({"phase": "waiting"}, "prepare · drain to do · checkpoint to do recover · resume to do"),
        (
            {"phase": "started", "was_started": True, "prepare": Progress(done=("drain",))},
            "prepare ✓ drain done - checkpoint not run recover · resume to do",
        ),
        ({"phase": "recovering", "is_gone": True},
         "prepare - drain not run - checkpoint not run recover · resume to do"),
        ({"phase": "closed", "is_gone": True},
         "prepare - drain not run - checkpoint not run recover - resume not run"),
    ],
)  # fmt: skip
def test_a_hook_whose_time_has_passed_is_not_called_to_do(changes: dict[str, Any], hooks: str) -> None:
    assert f" Hooks {hooks} Affects " in shown(status(workflow(**changes)))


@pytest.mark.parametrize(
    ("changes", "approval"),
    [
        ({"approval": Approval(state="confirmed")}, "approved Azure has taken it."),
        ({"approval": Approval(state="requested")}, "asking Azure is being asked."),
        ({"approval": Approval(failures=2)}, "failing 2 failed so far; it is tried again."),
        ({"operator": "held"}, "wanted when prepared. An operator holds it."),
        ({"was_started": True}, "none was given from here."),
    ],
)
def test_how_far_the_approval_has_come_is_told(changes: dict[str, Any], approval: str) -> None:
    assert f" Approval {approval} Hooks " in shown(status(workflow(**changes)))


def test_two_events_whose_ids_begin_alike_are_named_whole() -> None:
    one, two = workflow(event(id="12345678-A")), workflow(event(id="12345678-B"))
    assert "scheduled-events-agent hold 12345678-A or" in shown(status(one, two))


HOSTILE = "</pre></style></title></main><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;\u202e"


def test_every_text_from_outside_is_escaped_wherever_it_stands() -> None:
    vm = Vm(names=("vm-1", HOSTILE), vm_id=HOSTILE)
    one = workflow(
        event(id=HOSTILE, type=HOSTILE, source=HOSTILE, description=HOSTILE, resources=("vm-1", HOSTILE)),
        id=HOSTILE,
        phase="held",
        waits_for=HOSTILE,
        prepare=Progress(state="failed", failure=HOSTILE, current=HOSTILE),
    )
    one = replace(one, decision=replace(one.decision, rule=HOSTILE, reason=HOSTILE, prepare=(HOSTILE,)))
    whole = status(
        one,
        vm=vm,
        health=(HOSTILE,),
        policy=PolicyInForce(file=HOSTILE, read_at=NOW, refused=HOSTILE),
        rules=(HOSTILE,),
        endpoint=HOSTILE,
        poll_failure=HOSTILE,
        incarnation=HOSTILE,
        version=HOSTILE,
        running=(
            RunningHook(workflow_id="", stage="on_clear", hook=HOSTILE, since=NOW),
            RunningHook(workflow_id=HOSTILE, stage="prepare", hook=HOSTILE, since=NOW),
        ),
    )
    over = replace(one, id="other", phase="closed", is_gone=True)
    past = [History(workflow=w, entries=(entry(HOSTILE, detail=HOSTILE),)) for w in (one, over)]
    page = render_page(whole, past, [entry(HOSTILE)], shows_output=True, unread=HOSTILE)
    reader = read(page)
    assert {tag for tag, _ in reader.tags} & {"img", "svg", "iframe", "form", "object"} == set()
    assert [tag for tag, _ in reader.tags].count("script") == 1
    assert not any(
        name.startswith("on") or name == "style" for _, attributes in reader.tags for name in attributes
    )
    assert page.count("alert(1)") > 20
    assert page.count("<script>") == 1
    # A mark that turns the writing is kept within an element of its own.
    body = page.partition("</title>")[2]
    assert "\u202e" not in re.sub("<(bdi|pre)>[^<]*</", "", body)


def test_no_element_has_the_id_of_another() -> None:
    many = [workflow(event(id=f"E-{n}"), id=f"w {n}") for n in range(9)]
    past = [History(workflow=replace(w, phase="closed", id=f"p{w.id}"), entries=()) for w in many]
    ids = [attributes["id"] for _, attributes in read(render_page(status(*many), past)).tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[a-z0-9-]+", name or "") for name in ids)


def test_only_what_is_latest_is_open() -> None:
    past = [
        History(workflow=workflow(phase="closed", id=f"p{n}"), entries=(entry(f"happened in {n}"),))
        for n in range(3)
    ]
    page = render_page(status(), past)
    assert re.findall(r"<details id=\"[^\"]*\"( open)?>.*?happened in (\d)", page) == [
        (" open", "2"),
        ("", "1"),
        ("", "0"),
    ]


def test_a_timeline_over_midnight_names_the_days() -> None:
    entries = (entry("one"), entry("two", at=NOW + timedelta(days=1)), entry("three", at=NOW + timedelta(days=1)))
    text = shown(status(), [History(workflow=workflow(phase="closed"), entries=entries)])
    assert "03:00:00 one 2026-03-05 03:00:00 two 03:00:00 three" in text


def test_a_thousand_events_of_a_hundred_machines_make_a_small_page_that_says_how_many_more() -> None:
    names = tuple(f"a-machine-with-a-long-name-{n:05}" for n in range(100))
    many = tuple(
        workflow(event(id=f"{n:08}-E", resources=("vm-1", *names), description="<" * 4096), id=f"w{n}")
        for n in range(1000)
    )
    output = entry("<" * 4096, detail="<" * 4096)
    past = [History(workflow=one, entries=(output,) * 500) for one in many[:20]]
    page = render_page(status(*many), past, [entry("<" * 4096)] * 20, shows_output=True)
    assert len(page) < 1_000_000
    text = shown(status(*many), past, shows_output=True)
    assert "… 950 more are pending; /status has them all" in text
    assert ", and 89 more From" in text
    assert "(4,096 characters)" in text
    assert "There is no room for its timeline here: scheduled-events-agent history --event 00000019" in text


def test_the_page_stays_below_a_megabyte_whatever_the_texts_are_and_says_what_it_leaves_out() -> None:
    quotes = "'" * 4096  # each is six characters of HTML
    pending = [
        workflow(
            event(
                id=f"{number}{quotes}", type=quotes, source=quotes, description=quotes, resources=(quotes,) * 12
            ),
            id=f"pending {number}",
            waits_for=quotes,
        )
        for number in range(100)
    ]
    over = [replace(one, id=f"{one.id}, over", phase="closed", is_gone=True) for one in pending[:20]]
    histories = [History(workflow=one, entries=(entry(quotes, detail=quotes),) * 40) for one in [*over, *pending]]
    page = render_page(status(*pending), histories, shows_output=True)
    assert len(page) < 1 << 20
    cards, summaries = page.count("<article"), page.count(">closed</span>")
    assert 0 < cards < 50
    assert f"… {100 - cards} more are pending" in page
    assert f"… {20 - summaries} more are over" in page


def test_of_a_long_output_the_end_is_shown() -> None:
    past = [History(workflow=workflow(phase="closed"), entries=(entry(detail="a" * 4000 + "z"),))]
    page = render_page(status(), past, shows_output=True)
    assert f"<pre>…{'a' * 1999}z</pre>" in page


def test_output_is_left_to_the_command_line_unless_the_policy_has_it_shown() -> None:
    past = [History(workflow=workflow(phase="closed"), entries=(entry("hook drain: exit 1", detail="hunter2"),))]
    text = shown(status(), past)
    assert "hunter2" not in text
    command = f"scheduled-events-agent history --event {event().id}"
    assert f"hook drain: exit 1 What the hooks wrote is not shown here: {command} shows it." in text
    assert "hook drain: exit 1 hunter2" in shown(status(), past, shows_output=True)


def test_the_policy_of_the_page_allows_its_own_style_and_script_and_nothing_else() -> None:
    page = render_page(status())

    def hash_of(element: str) -> str:
        (text,) = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
        return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"

    assert HEADERS["Content-Security-Policy"] == (
        f"default-src 'none'; style-src {hash_of('style')}; script-src {hash_of('script')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    assert HEADERS["X-Frame-Options"] == "DENY"
    assert HEADERS["Referrer-Policy"] == "no-referrer"


def test_nothing_is_loaded_from_elsewhere() -> None:
    places = [value for _, attributes in read(render_page(status())).tags for name, value in attributes.items()
              if name in ("src", "href", "action", "data", "poster")]  # fmt: skip
    assert [place for place in places if place and not place.startswith("data:")] == [
        "status", "metrics", "healthz", "readyz",
    ]  # fmt: skip


def test_a_browser_without_script_loads_the_page_again_by_itself() -> None:
    assert '<noscript><meta http-equiv="refresh" content="10"></noscript>' in render_page(status())
