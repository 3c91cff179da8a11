"""Runs each input through one reader of foreign bytes, and checks the result.

There is one function per reader of foreign bytes. It returns if the agent did right, whatever the bytes were, and
raises if not. Only the agent's own error types are an answer; anything else that is raised is a fault.
"""

import atexit
import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from functools import cache
from http import HTTPStatus
from ipaddress import IPv4Address
from pathlib import Path
from random import Random
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from inputs import STORY_BREAK, THIS_PORT
from msgspec.structs import replace

from scheduled_events_agent import __version__
from scheduled_events_agent.hooks.run import hook_environment
from scheduled_events_agent.host.dhcp import parse_lease, parse_windows_options
from scheduled_events_agent.imds.compare import Seen, compare
from scheduled_events_agent.imds.document import (
    Document,
    ScheduledEvent,
    parse_document,
    parse_event,
    to_azure_json,
)
from scheduled_events_agent.imds.text import DocumentError
from scheduled_events_agent.policy import MatchContext, decide
from scheduled_events_agent.policy.load import ConfigError, parse_settings
from scheduled_events_agent.policy.settings import Settings
from scheduled_events_agent.simulator import Scenario, Simulator, SimulatorError, parse_scenario, rename_vms
from scheduled_events_agent.simulator.control import Control
from scheduled_events_agent.simulator.protocol import Request
from scheduled_events_agent.simulator.recording import (
    as_played,
    make_recorded,
    parse_recording,
    rename_vm,
    summarize,
)
from scheduled_events_agent.status.events import to_status
from scheduled_events_agent.status.facts import Facts
from scheduled_events_agent.web.server import Response, WebServer
from scheduled_events_agent.web.tls import Tls, TlsError
from scheduled_events_agent.workflow import (
    AgentRestarted,
    ApprovalAnswered,
    Approve,
    CancelHook,
    Context,
    HookFinished,
    RunHook,
    Signal,
    Workflow,
    Workflows,
    advance,
    known_events,
    next_wake_at,
)

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
_MAX_MESSAGE = 1200
_MAX_PROBLEMS = 200


@dataclass(frozen=True)
class Target:
    """One reader of foreign bytes."""

    check: Callable[[bytes], None]
    share: int
    """Its part of a hundred inputs."""


# --- documents


def check_document(data: bytes) -> None:
    """A document is read into clean values, or rejected with a message of one short line."""
    for parse in (parse_document, _parse_one):
        try:
            document = parse(data)
        except DocumentError as error:
            assert str(error).isprintable(), error  # noqa: PT017 - either outcome is right
            assert len(str(error)) < _MAX_MESSAGE, len(str(error))  # noqa: PT017
            continue
        known = {event.key: event for event in document.events}
        assert len(known) == len(document.events), "two events of one key"
        for event in document.events:
            _check_event(event)
            if event.affects(["vm-1"]) in ("self", "shared"):
                assert _is_named_as_it_came(data), "it names this VM only when it is cleaned"
        assert compare(known, document) == []
        assert compare({}, document) == [Seen(event) for event in document.events]


_CLOCKS = [f"%H:%M{seconds}" for seconds in ("", ":%S", ":%S.%f")]
_KNOWN_TIMES = [
    *(f"{day}%d %b %Y %H:%M:%S{zone}" for day in ("", "%a, ") for zone in ("", " GMT", " UTC", " %z")),
    *(f"%Y-%m-%d{between}{clock}{zone}" for between in "T " for clock in _CLOCKS for zone in ("", "%z")),
]


def check_time(data: bytes) -> None:
    """A NotBefore is read only if one of the known forms is all of it, and then as that form says."""
    text = data.decode(errors="replace")
    found = parse_event(json.dumps({"EventType": "Freeze", "NotBefore": text}).encode()).not_before
    if found is None:
        return
    whole = re.sub(r"(\.[0-9]{6})[0-9]+", r"\1", text.strip())  # strptime knows microseconds at most
    times = [time for form in _KNOWN_TIMES for time in _times_by_form(whole, form)]
    assert found in times, (text, found, times)


def _times_by_form(text: str, form: str) -> Iterator[datetime]:
    with contextlib.suppress(ValueError, OverflowError):
        time = datetime.strptime(text, form)  # noqa: DTZ007 - most forms have no offset
        yield time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)


def _is_named_as_it_came(data: bytes) -> bool:
    """Whether any text of the document is the name vm-1 to the letter, case and one ``_`` aside."""
    texts: list[str] = []

    def gather(value: Any) -> None:
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, list):
            for item in value:
                gather(item)

    def gather_object(pairs: list[tuple[str, Any]]) -> None:
        for _, value in pairs:
            gather(value)

    json.loads(data.decode("utf-8-sig"), object_pairs_hook=gather_object)
    return any(text.casefold() in ("vm-1", "_vm-1") for text in texts)


def _parse_one(data: bytes) -> Document:
    return Document(incarnation="", events=(parse_event(data),))


def _check_event(event: ScheduledEvent) -> None:
    for text in (event.id, event.type, event.status, event.source, event.description):
        assert text == text.strip()
    for text in (event.id, event.type, event.status, event.source, event.description, *event.resources):
        assert text.isprintable(), text
        assert len(text) <= 4096
    assert event.not_before is None or event.not_before.tzinfo is UTC
    assert event.duration_seconds is None or 0 <= event.duration_seconds < float("inf")
    assert event.affects(["vm-1"]) in {"self", "shared", "others", "unknown"}
    if event.id == event.approval_id and not event.is_ambiguous:
        assert parse_event(to_azure_json(event)) == event
    assert not event.is_ambiguous or not event.id_error or event.approval_id == ""
    assert msgspec.json.decode(msgspec.json.encode(event), type=ScheduledEvent) == event
    environment = hook_environment(event, stage="prepare", rule="x", vm="vm-1", outcome="", seconds_left=1e9)
    assert all("\0" not in value and len(value) <= 8192 for value in environment.values())


# --- stories: documents that follow each other, read as the engine reads them


@cache
def _settings() -> Settings:
    text = """
        rules:
          - {name: user, when: {source: User}, approve: immediately, shared: any}
          - {name: told, when: {description: host|maint.*}, prepare: [a, b], recover: [c], approve: when-prepared}
          - {name: night, when: {type: Reboot, notice_at_least: 1m}, window: night, prepare: [a], approve: manual}
          - {name: short, when: {type: Freeze, duration_below: 9s}, approve: immediately, on_start: [d]}
          - {name: rest, when: {resource: 'vm-*'}, drain_for: 30s, prepare: [a], recover: [c], lead: 15m}
        hooks: {a: {shell: a}, b: {shell: b}, c: {shell: c}, d: {shell: d}}
        maintenance_windows: {night: {start: 02:00, length: 2h, timezone: Europe/Berlin}}
    """
    return parse_settings(text, "policy.yaml").settings


def check_story(data: bytes) -> None:
    """After each document, what is known is what stands in it; no step is a bug; nothing lost is approved."""
    workflows: Workflows = {}
    now = NOW
    for number, text in enumerate(data.split(STORY_BREAK)[:20]):
        now += timedelta(seconds=60)
        try:
            document = parse_document(text)
        except DocumentError:
            continue  # it says nothing about any event
        workflows = {key: _restored(workflow) for key, workflow in workflows.items()}
        signals: list[Signal] = [AgentRestarted()] if zlib.crc32(text) % 5 == 0 else []
        missing = {workflow.event.key for workflow in workflows.values() if workflow.is_missing}
        signals += compare(known_events(workflows), document, dict.fromkeys(missing, True))
        events = {event.key: event for event in document.events}
        for turn in range(100):
            now += timedelta(seconds=1)
            workflows, signals = _turn(workflows, signals, now, events, is_lucky=(zlib.crc32(text) + turn) % 3 > 0)
            missing = {workflow.event.key for workflow in workflows.values() if workflow.is_missing}
            known = {key: event for key, event in known_events(workflows).items() if key not in missing}
            assert known == events, f"document {number} is not what is known after it"
            if not signals:
                break
        else:
            raise AssertionError("hooks and approvals have no end")
        assert compare(known_events(workflows), document, dict.fromkeys(missing, False)) == []


def _turn(
    workflows: Workflows,
    signals: list[Signal],
    now: datetime,
    events: dict[str, ScheduledEvent],
    *,
    is_lucky: bool,
) -> tuple[Workflows, list[Signal]]:
    settings = _settings()
    context = Context(
        now=now,
        names=("vm-1",),
        rules=settings.rules,
        windows=settings.maintenance_windows,
        hooks=settings.hooks,
        boot_id="boot",
        document_at=now,
    )
    progression = advance(workflows, signals, context)
    assert progression.errors == (), progression.errors
    answers: list[Signal] = []
    for step in progression.transitions:
        workflow = step.workflow
        assert _restored(workflow) == workflow
        for effect in step.effects:
            match effect:
                case RunHook():
                    outcome = "succeeded" if is_lucky else "failed"
                    answers.append(
                        HookFinished(
                            workflow_id=workflow.id,
                            stage=effect.stage,
                            hook=effect.hook,
                            run=effect.run,
                            outcome="succeeded" if outcome == "succeeded" else "failed",
                        )
                    )
                case CancelHook():
                    pass  # it has ended in the same moment
                case Approve():
                    event = events[workflow.event.key]
                    assert event.status == "Scheduled", f"an event that is {event.status} is approved"
                    assert effect.event_id == event.approval_id
                    assert effect.event_id
                    assert not event.is_ambiguous
                    assert event.affects(("vm-1",)) in ("self", "shared")
                    kind = "" if is_lucky else "timeout"
                    answers.append(ApprovalAnswered(workflow_id=workflow.id, error_kind=kind))
                case _:
                    pass
    wake_at = next_wake_at(progression.workflows, context)
    assert wake_at is None or wake_at > now
    return progression.workflows, answers


def _restored(workflow: Workflow) -> Workflow:
    """As the store gives it back."""
    return msgspec.json.decode(msgspec.json.encode(workflow).decode(), type=Workflow)


# --- files that people write

_PROBLEM = re.compile(r"f\.yaml(:[1-9][0-9]*)?: \S.*", re.DOTALL)


def check_policy(data: bytes) -> None:
    """A policy is loaded and can decide, or each problem has its line and is not too long to be read."""
    try:
        loaded = parse_settings(data, "f.yaml")
    except ConfigError as error:
        _check_problems(tuple(map(str, error.problems)))
        return
    _check_problems(tuple(map(str, loaded.warnings)) or ("f.yaml:1: x",))
    settings = loaded.settings
    for event in _events():
        facts = MatchContext(names=("vm-1",), not_before_seen_at=NOW)
        decision = decide(settings.rules, settings.maintenance_windows, event, facts)
        assert decision.start(event, NOW, 60.0).at >= NOW


def _check_problems(problems: tuple[str, ...]) -> None:
    assert 0 < len(problems) <= _MAX_PROBLEMS, len(problems)
    for problem in problems:
        assert _PROBLEM.fullmatch(problem), problem[:300]
        assert len(problem) < _MAX_MESSAGE + 4000, len(problem)


@cache
def _events() -> tuple[ScheduledEvent, ...]:
    return tuple(
        ScheduledEvent(
            id="A",
            type=type_,
            status="Scheduled",
            source=source,
            resources=resources,
            not_before=not_before,
            duration_seconds=seconds,
            description="Host server is undergoing maintenance.",
        )
        for type_, source, resources, not_before, seconds in (
            ("Freeze", "Platform", ("vm-1",), NOW + timedelta(minutes=15), 5.0),
            ("Reboot", "User", ("vm-1", "vm-2"), NOW + timedelta(days=7), None),
            ("Preempt", "Platform", ("vm-2",), None, None),
            ("Terminate", "", (), NOW - timedelta(days=1), 1e300),
        )
    )


def check_scenario(data: bytes) -> None:
    """A scenario can be read and renamed, or each problem has its line."""
    text = data.decode("utf-8", "replace" if zlib.crc32(data) % 2 else "surrogateescape")
    try:
        scenario = parse_scenario(text, "f.yaml")
    except SimulatorError as error:
        assert error.kind == "config"  # noqa: PT017 - either outcome is right
        _check_problems(tuple(re.split(r"\n(?=f\.yaml:)", str(error))))
        return
    assert isinstance(scenario, Scenario)
    renamed = rename_vms(scenario, ("a vm of no scenario",))
    assert len(renamed.timeline) == len(scenario.timeline)


@cache
def tls_file() -> Path:
    """A file of TLS settings, with a certificate and its key beside it where openssl can make them."""
    place = Path(tempfile.mkdtemp(prefix="fuzz-tls-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    if shutil.which("openssl"):
        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "server.key")
        command = ["openssl", "req", "-x509", *new_key, "-out", "server.pem", "-subj", "/CN=x"]
        subprocess.run(command, cwd=place, check=True, capture_output=True)
    return place / "web.yml"


def check_tls(data: bytes) -> None:
    """A file of TLS settings is in force, or each problem has its line."""
    file = tls_file()
    file.write_bytes(data)
    try:
        Tls(file, lambda _: None).context()
    except TlsError as error:
        # An error about the whole file has no line.
        text = str(error).replace(f"{file}: ", "f.yaml:1: ").replace(str(file), "f.yaml")
        _check_problems(tuple(re.split(r"\n(?=f\.yaml:)", text)))


def check_recording(data: bytes) -> None:
    """A recording can be played and renamed, or each problem has its line; any answer can be recorded and read."""
    recorded = make_recorded(NOW, data)
    line = b'{"vm":"vm-1"}\n' + msgspec.json.encode(recorded)
    assert parse_recording(line, "f.yaml").documents == (recorded,)
    try:
        recording = parse_recording(data, "f.yaml")
    except SimulatorError as error:
        assert error.kind == "config"  # noqa: PT017 - either outcome is right
        _check_problems(tuple(re.split(r"\n(?=f\.yaml:)", str(error))))
        return
    assert recording.origin.vm.split() == [recording.origin.vm]
    renamed = rename_vm(recording, "vm of no recording")
    assert len(renamed.documents) == len(recording.documents)
    for speed in (0.1, 1.0, 1e6):
        times = []
        for due, document, body in as_played(renamed, NOW.timestamp(), speed):
            times.append(due)
            summarize(document)
            is_odd = document.document is None
            assert is_odd or json.loads(body).keys() == (document.document or {}).keys()
        assert times == sorted(times)


# --- leases


def check_lease(data: bytes) -> None:
    """A lease of any DHCP client tells an address or nothing."""
    _check_address(parse_lease(data.decode("utf-8", "replace")))
    _check_address(parse_lease(data.decode("utf-8", "surrogateescape")))


def check_registry(data: bytes) -> None:
    """Windows' record of DHCP options tells an address or nothing."""
    _check_address(parse_windows_options(data))


def _check_address(address: str | None) -> None:
    assert address is None or str(IPv4Address(address)) == address


# --- the status page

_COUNTS = (0, 0, 1, 1, 2)
_A_QUARTER = timedelta(minutes=15)
_FIRST_TIME, _LAST_TIME = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


def check_page(data: bytes) -> None:
    """Whatever a status has, there are words for it, and /status shows them as JSON.

    The bytes are its texts; how many events there are, and in what state, follows from them as well.
    """
    texts = data.decode("utf-8", "replace").split(STORY_BREAK.decode())
    random = Random(zlib.crc32(data))
    facts: Facts = _some(random, Facts, texts)
    # The clock is that of a running agent, and a policy can give a hook at most 2000 years.
    limits = (None, 0.0, 5.0, 200 * 3650 * 86400.0)
    running = [replace(hook, since=NOW, limit_seconds=random.choice(limits)) for hook in facts.running]
    facts = replace(facts, running=tuple(running))
    found = to_status(facts)
    assert found.headline
    assert len(found.events) == len(facts.workflows)
    assert all(event.activity and event.approval.text for event in found.events)
    assert msgspec.json.decode(msgspec.json.encode(found))["headline"] == found.headline


def _some(random: Random, annotation: Any, texts: list[str]) -> Any:
    """A value of the type; all its texts are some of these."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _some(random, arguments[0], texts)
    if origin in (Union, UnionType):
        return _some(random, random.choice(arguments), texts)
    if origin is Literal:
        return random.choice(arguments)
    if origin is tuple:
        count = 70 if random.random() < 0.002 else random.choice(_COUNTS)
        return tuple(_some(random, arguments[0], texts) for _ in range(count))
    if origin is Mapping:
        return {_some(random, arguments[0], texts): _some(random, arguments[1], texts) for _ in range(2)}
    if issubclass(annotation, msgspec.Struct):
        return annotation(**{name: _some(random, type_, texts) for name, type_ in _fields(annotation)})
    makers: dict[Any, Callable[[], Any]] = {
        str: lambda: random.choice(texts),
        bool: lambda: random.random() < 0.5,
        int: lambda: random.randrange(5),
        float: lambda: random.choice((0.0, 5.0, 0.25, 1e300)),
        datetime: lambda: random.choice((NOW + random.randrange(-200, 200) * _A_QUARTER, _FIRST_TIME, _LAST_TIME)),
        time: lambda: time(random.randrange(24)),
        NoneType: lambda: None,
    }
    return makers[annotation]()


@cache
def _fields(type_: type[msgspec.Struct]) -> tuple[tuple[str, Any], ...]:
    return tuple((item.name, item.type) for item in msgspec.structs.fields(type_))


# --- the simulator's control port

_MAX_REFUSAL = 200_000


def check_control(data: bytes) -> None:
    """Each request is carried out or rejected. A rejected one changes nothing; all can be shown afterwards."""
    now = NOW.timestamp()
    with (
        closing(Simulator(("vm-1", "vm-2"), others=("vm-3",), rate_limit=None, clock=lambda: now)) as simulator,
        closing(Control(simulator)) as control,
    ):
        hosts = (f"localhost:{control.port}", f"127.0.0.1:{control.port}")
        for text in data.replace(THIS_PORT, str(control.port).encode()).split(STORY_BREAK)[:20]:
            now += 1 + zlib.crc32(text) % 400
            request = request_of(text)
            before = simulator.history()
            answer = control.answer(request)
            assert answer.wire.startswith(f"HTTP/1.1 {answer.status} ".encode())
            assert answer.wire.endswith(answer.body)
            assert answer.status in (200, 400, 403, 404, 405, 415)
            if answer.status != 200:
                assert json.loads(answer.body)["error"]
                assert len(answer.body) < _MAX_REFUSAL, len(answer.body)
                assert simulator.history() == before
            else:
                assert request.headers["host"].lower() in hosts
            if answer.status == 200 and request.method != "GET":
                assert request.method == "POST"
                assert "json" in request.headers["content-type"].lower()
                assert request.headers.get("origin", "http://" + hosts[0]).lower()[7:] in hosts
        shown = control.answer(request_of(f"GET /state\nHost: {hosts[0]}".encode()))
        assert json.loads(shown.body)["vms"]
        parse_document(simulator._service.azure.document("2020-07-01"))


def request_of(text: bytes) -> Request:
    """Build a request from words, headers and a body, whatever they are."""
    head, _, body = text.replace(b"\r\n", b"\n").partition(b"\n\n")
    first, *lines = head.decode("latin-1").split("\n")
    words = [*first.split(), "", ""]
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Request(method=words[0], target=words[1], headers=headers, body=body)


# --- the web server

_PAGES = {
    "/metrics": Response(HTTPStatus.OK, b"# metrics\n", "text/plain; version=0.0.4; charset=utf-8"),
    "/healthz": Response(HTTPStatus.SERVICE_UNAVAILABLE, b"no poll has succeeded\n"),
    "/status": Response(HTTPStatus.OK, b"{}" * 50_000, "application/json"),
}
_PHRASES = {status: f"{HTTPStatus(status).phrase}\n".encode() for status in (400, 408, 414, 431, 505)}
_BODIES = frozenset(page.body for page in _PAGES.values()) | {
    b"no such page; there are: /healthz /metrics /status\n",
    b"the Host header is not a name of this server: use its address, or add the name to agent.listen_names\n",
    b"only GET and HEAD: nothing can be changed here\n",
    b"no\n",
    b"",
    *_PHRASES.values(),
}
_ANSWER = re.compile(
    rb"HTTP/1\.0 (200|400|404|405|408|414|421|431|503|505) [^\r\n]*\r\n((?:[A-Za-z-]+: [^\r\n]*\r\n)*)\r\n",
    re.DOTALL,
)
_HEADERS = frozenset(b"Server Date Content-Type Content-Length Cache-Control X-Content-Type-Options Allow".split())
_MAX_THREADS = 160
_MAX_FILES = 60


@cache
def _server() -> WebServer:
    return WebServer("127.0.0.1:0", {path: lambda page=page: page for path, page in _PAGES.items()})  # type: ignore[misc]


def check_web(data: bytes) -> None:
    """A client that sends anything gets one answer or none, and the next client is served."""
    server = _server()
    checksum = zlib.crc32(data)
    # Not always the same address: the ports of one would all be used up, for each stays taken for a minute.
    source = f"127.0.{checksum % 200}.{1 + checksum // 200 % 200}" if sys.platform == "linux" else "127.0.0.1"
    _check_answer(data, _say(server.port, source, data, checksum))
    if checksum % 64 == 0:
        answer = _say(server.port, source, b"GET /metrics HTTP/1.1\r\n\r\n", 0)
        assert answer.endswith(b"\r\n\r\n# metrics\n"), answer
        assert threading.active_count() <= _MAX_THREADS, threading.active_count()
        if sys.platform == "linux":
            assert len(list(Path("/proc/self/fd").iterdir())) <= _MAX_FILES, "file descriptors are not closed"


def _say(port: int, source: str, data: bytes, checksum: int) -> bytes:
    parts: list[bytes] = []
    with socket.create_connection(("127.0.0.1", port), timeout=30, source_address=(source, 0)) as connection:
        cut = checksum % (len(data) + 1) if checksum % 3 == 0 else len(data)
        try:
            connection.sendall(data[:cut])
            connection.sendall(data[cut:])
            if checksum % 16 == 5:  # a client that does not wait for its answer
                return b""
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 18):
                parts.append(part)
        except (ConnectionResetError, BrokenPipeError):
            pass  # it closed with some of our bytes unread
        except OSError as error:
            if sys.platform != "linux" and "reset" not in str(error):
                raise
    return b"".join(parts)


def _check_answer(data: bytes, answer: bytes) -> None:
    if not answer.startswith(b"HTTP/"):
        # The answer to an HTTP/0.9 request has no head. What is cut short was reset with bytes of ours unread.
        is_page = any(body.startswith(answer) for body in _BODIES)
        assert is_page, answer[:300]
        return
    head = _ANSWER.match(answer)
    assert head is not None, answer[:300]
    names = {line.partition(b":")[0] for line in head[2].split(b"\r\n") if line}
    assert names <= _HEADERS, names
    assert f"scheduled-events-agent/{__version__}".encode() in head[2]
    body = answer[head.end() :]
    assert any(page.startswith(body) for page in _BODIES), body[:300]
    if head[1] in (b"200", b"404", b"421", b"503"):
        # The library takes any white space of Latin-1 for the blank between the words of a request.
        assert data.decode("latin-1").split()[0] in ("GET", "HEAD"), "something else than reading was done"
    assert body.count(b"HTTP/1.0 ") == 0 or b"HTTP/1.0 " in data, "two answers"


TARGETS = {
    "document": Target(check_document, 32),
    "time": Target(check_time, 4),
    "story": Target(check_story, 3),
    "policy": Target(check_policy, 6),
    "scenario": Target(check_scenario, 6),
    "recording": Target(check_recording, 6),
    "control": Target(check_control, 3),
    "lease": Target(check_lease, 17),
    "registry": Target(check_registry, 12),
    "web": Target(check_web, 5),
    "tls": Target(check_tls, 4),
    "page": Target(check_page, 2),
}
