"""The simulator's control port: a page for people and JSON for programs, to schedule events and faults manually.

Requests have the keys of a scenario file.
Invariant: a web page of another site, open in the browser of this machine, can do nothing here. The Host header
must name this port, and a POST must be JSON, which a browser sends to another site only if that site allows it.
"""

import json
from datetime import UTC, datetime
from importlib import resources
from typing import Annotated, Any, Self, TypeVar, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from scheduled_events_agent.policy import typed_yaml
from scheduled_events_agent.simulator.azure import EventType, Name, Plan, SimulatorError, Source
from scheduled_events_agent.simulator.faults import Fault, FaultKind, FaultScope
from scheduled_events_agent.simulator.protocol import Answer, Request, make_answer
from scheduled_events_agent.simulator.scenario import Step
from scheduled_events_agent.simulator.server import LOOPBACK, Server
from scheduled_events_agent.simulator.simulation import Simulator

_MAX_SHOWN = 100
_NAME = "the control port"
_GUARDS = (
    ("Cache-Control", "no-store"),
    ("Content-Security-Policy", "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
)
_FILES = {
    "/": ("control.html", "text/html; charset=utf-8"),
    "/control.css": ("control.css", "text/css; charset=utf-8"),
    "/control.js": ("control.js", "text/javascript; charset=utf-8"),
}
T = TypeVar("T")


class EventRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /approve, /cancel, /start and /end."""

    event: Name
    """The event's id, or the name that was given to it."""


class ResetRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /reset-incarnation."""

    incarnation: Annotated[int, Meta(ge=0)] = 1


class EmptyRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /clear-faults."""


# Path of a POST -> the type of its body, and the key of a scenario's step that it becomes.
_ACTIONS: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "/schedule": ("event", Plan),
    "/approve": ("approve", EventRequest),
    "/cancel": ("cancel", EventRequest),
    "/start": ("start", EventRequest),
    "/end": ("end", EventRequest),
    "/fault": ("fault", Fault),
    "/clear-faults": ("clear_faults", EmptyRequest),
    "/reset-incarnation": ("reset_incarnation", ResetRequest),
}


class _RejectedError(Exception):
    """A request is rejected."""

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
            (_NAME,), lambda _vm, _client, request: (self.answer(request), None), port, bind=bind
        )
        self.port = self._server.ports[_NAME]
        self._hosts = (urlsplit(self.url).netloc, f"{LOOPBACK}:{self.port}", f"localhost:{self.port}")

    @property
    def url(self) -> str:
        return f"{self._server.url(_NAME)}/"

    def start(self) -> Self:
        """Begin to answer; does not block."""
        self._server.start()
        return self

    def close(self) -> None:
        """End every connection."""
        self._server.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer(self, request: Request) -> Answer:
        """The page, the state, or the result of a request."""
        try:
            self._check_sender(request)
            return self._respond(request)
        except _RejectedError as rejection:
            return _json_answer({"error": str(rejection)}, rejection.status, rejection.headers)
        except SimulatorError as error:
            return _json_answer({"error": str(error)}, 400)

    def _check_sender(self, request: Request) -> None:
        host = request.headers.get("host", "").lower()
        if host not in self._hosts and not self._server.is_open:
            raise _RejectedError(403, f'expected the Host 127.0.0.1:{self.port}; got "{host}"')
        if request.method != "POST":
            return
        origin = request.headers.get("origin")
        if origin is not None and origin.lower() != f"http://{host}":
            raise _RejectedError(403, f'a page of another origin may not do this; got "{origin}"')
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise _RejectedError(415, f'expected Content-Type: application/json; got "{content_type}"')

    def _respond(self, request: Request) -> Answer:
        path = request.target.partition("?")[0]
        if path not in (*_FILES, "/state", *_ACTIONS):
            raise _RejectedError(404, f"there is no {path[:100]} here; there are /, /state, {', '.join(_ACTIONS)}")
        method = "POST" if path in _ACTIONS else "GET"
        if request.method != method:
            raise _RejectedError(405, f"{path} is for {method}; got {request.method[:20]}", ("Allow", method))
        if path in _FILES:
            name, content_type = _FILES[path]
            content = (resources.files(__package__) / name).read_bytes()
            return make_answer(200, content, content_type=content_type, headers=_GUARDS)
        if path == "/state":
            return _json_answer(state_of(self._simulator), 200)
        key, type_ = _ACTIONS[path]
        value: Any = _read(request.body, type_, path.removeprefix("/"))
        match value:
            case EventRequest(event=name):
                value = name
            case ResetRequest(incarnation=incarnation):
                value = incarnation
            case EmptyRequest():
                value = True
        event_id = self._simulator.play(Step(at=0.0, **{key: value}))
        return _json_answer({"event": event_id} if event_id else {}, 200)


def state_of(simulator: Simulator) -> dict[str, Any]:
    """The state for the page: pending events, then the latest that are gone; the newest first."""
    events = simulator.events()[::-1]
    gone = [event for event in events if event.status == "Gone"]
    return {
        "now": datetime.now(UTC),
        "incarnation": simulator.incarnation,
        "speed": simulator.speed,
        "vms": [
            {
                "name": vm,
                "endpoint": simulator.endpoint(vm),
                "polls": simulator.polls(vm),
                "faults": [
                    {
                        "kind": fault.kind,
                        "on": fault.on,
                        "status": fault.status if fault.kind == "status" else None,
                        "until": None if until is None else datetime.fromtimestamp(until, UTC),
                        "count": left,
                    }
                    for fault, until, left in simulator.faults(vm)
                ],
            }
            for vm in simulator.vms
        ],
        "events": [event for event in events if event.status != "Gone"] + gone[:_MAX_SHOWN],
        "history": simulator.history()[: -_MAX_SHOWN - 1 : -1],
        # Words that /schedule and /fault know, by key.
        "choices": {
            "type": get_args(EventType),
            "source": get_args(Source),
            "kind": get_args(FaultKind),
            "on": get_args(FaultScope),
        },
    }


def _read(body: bytes, type_: type[T], name: str) -> T:
    """The body of a request, judged as a scenario file would be."""
    try:
        # JSON as it is written from here is YAML; not all that may be sent is.
        text = json.dumps(json.loads(body.decode() or "{}"), ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise _RejectedError(400, f"{name}: expected JSON; {error}") from error
    parsed = typed_yaml.parse(text, type_, name)
    if parsed.value is None:
        problems = [str(replace(problem, file="", line=None)) for problem in parsed.problems]
        raise _RejectedError(400, f"{name}: {'; '.join(problems)}")
    return parsed.value


def _json_answer(content: dict[str, Any], status: int, headers: tuple[tuple[str, str], ...] = ()) -> Answer:
    return make_answer(status, msgspec.json.encode(content), headers=(*_GUARDS, *headers))
