"""The simulator's control port: a page for people and JSON for programs, to let anything happen by hand.

Owns the paths, the checks of who asks, and the JSON. What may be said is what scenario files say, in the same
words. The one invariant: a web page of somebody else, open in the browser of this machine, can neither read
nor do anything here: the Host header must name this port, and a POST must be JSON and come from this page, or
from none.
"""

import base64
import contextlib
import hashlib
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from ipaddress import ip_address
from types import TracebackType
from typing import Annotated, Any, Self, TypeVar, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from agent import typed_yaml
from agent.simulator.azure import EventType, Happening, SimulatedEvent, SimulatorError, Source
from agent.simulator.faults import Fault, FaultKind, FaultScope
from agent.simulator.protocol import Answer, Request, make_answer
from agent.simulator.scenario import EventStep, FaultStep, Name, Step
from agent.simulator.server import LOOPBACK, Server
from agent.simulator.simulation import Simulator

_MAX_BODY_BYTES = 64 * 1024
_MAX_PENDING = 100
_MAX_SHOWN = 100
_REQUEST_SECONDS = 10.0
_MAX_CONNECTIONS = 32
_HTML = "text/html; charset=utf-8"
_GUARDS = (
    ("Cache-Control", "no-store"),
    ("Connection", "close"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
)
T = TypeVar("T")


class EventRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /approve, /cancel, /start and /end."""

    event: Name
    """Its id, or the name that was given to it."""


class ResetRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /reset-incarnation."""

    incarnation: Annotated[int, Meta(ge=0)] = 1


class EmptyRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /clear-faults."""


class ShownFault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of one VM's port."""

    kind: FaultKind
    on: FaultScope
    status: int | None
    until: datetime | None
    count: int | None
    """How many requests it is still to befall; None: any number."""


class ShownVm(msgspec.Struct, frozen=True, kw_only=True):
    """A VM and its port."""

    name: str
    endpoint: str
    polls: int
    faults: tuple[ShownFault, ...]


class ShownEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event as it stands."""

    id: str
    name: str
    type: EventType
    source: str
    status: str
    outcome: str
    vms: tuple[str, ...]
    description: str
    scheduled_at: datetime
    not_before: datetime
    approved_at: datetime | None
    approved_by: str
    started_at: datetime | None
    gone_at: datetime | None
    seen_by: tuple[str, ...]


class ShownHappening(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened."""

    at: datetime
    kind: str
    event: str
    vm: str
    text: str


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What GET /state answers."""

    now: datetime
    incarnation: int
    speed: float
    vms: tuple[ShownVm, ...]
    events: tuple[ShownEvent, ...]
    """Pending ones, then the latest that have gone, the newest first."""
    happenings: tuple[ShownHappening, ...]
    """The latest, newest first."""
    choices: dict[str, tuple[str, ...]]
    """Words that /schedule and /fault know, by key."""


class _RefusedError(Exception):
    """The request is not carried out."""

    def __init__(self, status: int, message: str, *headers: tuple[str, str]) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class Control:
    """The control port of a simulator; a context manager."""

    def __init__(self, simulator: Simulator, port: int = 0, *, bind: str = LOOPBACK) -> None:
        """``port`` 0: a free one. Listens at once, but answers from ``start`` on."""
        self._simulator = simulator
        self._server = Server(
            ("the control port",),
            self,
            port,
            bind=bind,
            request_seconds=_REQUEST_SECONDS,
            max_connections=_MAX_CONNECTIONS,
        )
        self.port = self._server.ports["the control port"]
        names = {self._server.host, LOOPBACK, "localhost"}
        self._hosts = {f"{name}:{self.port}" for name in names} | (names if self.port == 80 else set())

    @property
    def url(self) -> str:
        return f"http://{self._server.host}:{self.port}/"

    def start(self) -> Self:
        """Begin to answer; does not block."""
        self._server.start()
        return self

    def close(self) -> None:
        """End every connection."""
        self._server.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Called by the server

    def choose_fault(self, vm: str, request: Request) -> Fault | None:  # noqa: ARG002 - there are none here
        """This port never misbehaves."""
        return None

    def answer(
        self,
        vm: str,  # noqa: ARG002 - it is always this port
        connection: int,  # noqa: ARG002
        request: Request,
        fault: Fault | None,  # noqa: ARG002
        *,
        is_heard: bool,  # noqa: ARG002
    ) -> Answer:
        """The page, the state, or what became of a request."""
        try:
            self._check_sender(request)
            return self._respond(request)
        except _RefusedError as refusal:
            return _json_answer({"error": str(refusal)}, refusal.status, refusal.headers)
        except SimulatorError as error:
            return _json_answer({"error": str(error)}, 400)

    # How

    def _check_sender(self, request: Request) -> None:
        host = request.headers.get("host", "").lower()
        if host not in self._hosts and not (self._server.is_open and _is_no_domain(host)):
            raise _RefusedError(403, f'expected the Host 127.0.0.1:{self.port}; got "{host}"')
        if request.method != "POST":
            return
        origin = request.headers.get("origin")
        if origin is not None and origin.lower() != f"http://{host}":
            raise _RefusedError(403, f'a page of another origin may not do this; got "{origin}"')
        if request.headers.get("sec-fetch-site", "none").lower() not in ("none", "same-origin"):
            raise _RefusedError(403, "a page of another site may not do this")
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise _RefusedError(415, f'expected Content-Type: application/json; got "{content_type}"')

    def _respond(self, request: Request) -> Answer:
        path = request.target.partition("?")[0]
        method = "GET" if path in ("/", "/state") else "POST"
        if path not in ("/", "/state", *_ACTIONS):
            raise _RefusedError(404, f"there is no {path[:100]} here; there are /, /state, {', '.join(_ACTIONS)}")
        if request.method != method:
            raise _RefusedError(405, f"{path} is for {method}; got {request.method[:20]}", ("Allow", method))
        if path == "/":
            body, policy = _page()
            return make_answer(
                200, body, content_type=_HTML, headers=(*_GUARDS, ("Content-Security-Policy", policy))
            )
        if path == "/state":
            return make_answer(200, msgspec.json.encode(state_of(self._simulator)), headers=_GUARDS)
        if len(request.body) > _MAX_BODY_BYTES:
            raise _RefusedError(
                413, f"expected at most {_MAX_BODY_BYTES // 1024} KiB; got {len(request.body)} bytes"
            )
        step = _ACTIONS[path](request.body, path.removeprefix("/"))
        if step.event and sum(event.status != "Gone" for event in self._simulator.events()) >= _MAX_PENDING:
            raise _RefusedError(400, f"there are {_MAX_PENDING} pending events; end some of them first")
        event_id = self._simulator.play(step)
        return _json_answer({"event": event_id} if event_id else {}, 200)


def _is_no_domain(host: str) -> bool:
    """Whether the name is an address or has no dot: a domain may be another site's, which leads it here."""
    with contextlib.suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or "."
        if "." not in name:
            return True
        ip_address(name)
        return True
    return False


def state_of(simulator: Simulator) -> State:
    """What there is to see now."""
    names = {event_id: name for name, event_id in simulator.names().items()}
    events = [_shown_event(event, names.get(event.ids[0], "")) for event in reversed(simulator.events())]
    pending = [event for event in events if event.status != "Gone"]
    gone = [event for event in events if event.status == "Gone"]
    return State(
        now=datetime.now(UTC),
        incarnation=simulator.incarnation,
        speed=simulator.speed,
        vms=tuple(
            ShownVm(
                name=vm,
                endpoint=simulator.endpoint(vm),
                polls=simulator.polls(vm),
                faults=tuple(_shown_fault(fault, left) for fault, left in simulator.faults(vm)),
            )
            for vm in simulator.vms
        ),
        events=(*pending, *gone[:_MAX_SHOWN]),
        happenings=tuple(map(_shown_happening, reversed(simulator.happenings()[-_MAX_SHOWN:]))),
        choices={
            "type": get_args(EventType),
            "source": get_args(Source),
            "kind": get_args(FaultKind),
            "on": get_args(FaultScope),
        },
    )


def _shown_event(event: SimulatedEvent, name: str) -> ShownEvent:
    plan = event.plan
    return ShownEvent(
        id=event.id,
        name=name,
        type=plan.type,
        source=plan.source,
        status=event.status,
        outcome=event.outcome,
        vms=plan.vms,
        description=plan.description,
        scheduled_at=event.scheduled_at,
        not_before=event.not_before_at,
        approved_at=event.approved_at,
        approved_by=event.approved_by,
        started_at=event.started_at,
        gone_at=event.gone_at,
        seen_by=event.seen_by,
    )


def _shown_fault(fault: Fault, left: int | None) -> ShownFault:
    return ShownFault(
        kind=fault.kind,
        on=fault.on,
        status=fault.status if fault.kind == "status" else None,
        until=None if fault.until is None else datetime.fromtimestamp(fault.until, UTC),
        count=left,
    )


def _shown_happening(happening: Happening) -> ShownHappening:
    event = happening.event
    return ShownHappening(
        at=happening.at,
        kind=happening.kind,
        event=f"{event.plan.type} {event.id}" if event else "",
        vm=happening.vm,
        text=happening.text,
    )


def _read(body: bytes, type_: type[T], name: str) -> T:
    """The body of a request, judged as a scenario file would be."""
    try:
        content = json.loads(body.decode() or "{}", parse_constant=_refuse_constant)
        # JSON as it is written from here is YAML; not all that may be sent is.
        text = json.dumps(content, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise _RefusedError(400, f"{name}: expected JSON; {error}") from error
    parsed = typed_yaml.parse(text, type_, name)
    if parsed.value is None:
        told = [
            f"{problem.path}: {problem.message}" if problem.path else problem.message
            for problem in parsed.problems
        ]
        raise _RefusedError(400, f"{name}: {'; '.join(told)}")
    return parsed.value


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _event(body: bytes, name: str) -> str:
    return _read(body, EventRequest, name).event


def _clear_faults(body: bytes, name: str) -> Step:
    _read(body, EmptyRequest, name)
    return Step(at=0.0, clear_faults=True)


_ACTIONS: dict[str, Callable[[bytes, str], Step]] = {
    "/schedule": lambda body, name: Step(at=0.0, event=_read(body, EventStep, name)),
    "/approve": lambda body, name: Step(at=0.0, approve=_event(body, name)),
    "/cancel": lambda body, name: Step(at=0.0, cancel=_event(body, name)),
    "/start": lambda body, name: Step(at=0.0, start=_event(body, name)),
    "/end": lambda body, name: Step(at=0.0, end=_event(body, name)),
    "/fault": lambda body, name: Step(at=0.0, fault=_read(body, FaultStep, name)),
    "/clear-faults": _clear_faults,
    "/reset-incarnation": lambda body, name: Step(
        at=0.0, reset_incarnation=_read(body, ResetRequest, name).incarnation
    ),
}


def _json_answer(content: dict[str, str], status: int, headers: tuple[tuple[str, str], ...] = ()) -> Answer:
    return make_answer(status, msgspec.json.encode(content), headers=(*_GUARDS, *headers))


@cache
def _page() -> tuple[bytes, str]:
    """The page and its Content-Security-Policy, which names what stands in it and lets in nothing else."""
    text = (resources.files(__package__) / "control.html").read_text(encoding="utf-8")

    def digest(tag: str) -> str:
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"

    policy = (
        f"default-src 'none'; script-src {digest('script')}; style-src {digest('style')}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy
