"""The simulated metadata service's answer to one request: its checks, error bodies and instance data.

Does no I/O and reads no clock.
Invariant: a request that the real service would reject never reaches the model of the events.
"""

import json
from base64 import urlsafe_b64encode
from datetime import datetime
from http.client import responses
from importlib import resources
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit
from uuid import UUID, uuid5

import msgspec

from scheduled_events_agent.simulator.azure import EVENTS_VERSIONS, Azure

Purpose = Literal["poll", "approve", "instance", "other"]

# /metadata/instance has versions of its own; the service names the newest three when it rejects one.
INSTANCE_VERSIONS = (
    "2017-04-02", "2017-08-01", "2017-12-01", "2018-02-01", "2018-04-02", "2018-10-01", "2019-02-01",
    "2019-03-11", "2019-04-30", "2019-06-01", "2019-06-04", "2019-08-01", "2019-08-15", "2019-11-01",
    "2020-06-01", "2020-07-15", "2020-09-01", "2020-10-01", "2020-12-01", "2021-01-01", "2021-02-01",
    "2021-03-01", "2021-05-01", "2021-10-01", "2021-11-01", "2021-11-15", "2021-12-13", "2023-07-01",
    "2023-11-15", "2024-03-15", "2024-07-17", "2025-04-07",
)  # fmt: skip
_BAD_VERSION = (
    "Bad request. api-version is invalid or was not specified in the request. "
    "For more information refer to aka.ms/azureimds"
)
# /metadata/identity/oauth2/token has versions of its own.
_TOKEN_VERSIONS = ("2018-02-01", "2019-06-01", "2019-08-01", "2019-11-01")
_TOKEN_SECONDS = 86400
_NO_HEADER = "Bad request. Required metadata header not specified"
_JSON = "application/json; charset=utf-8"
_VM_ID_SPACE = UUID("6f1f5c3e-3a4e-4c1e-9a53-6d6d0f1a3c11")


class VirtualMachine(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated VM, as /metadata/instance describes it."""

    name: str
    """The VM's name in Resources and instance/compute/name."""
    vm_id: str = ""
    """The vmId; by default it is made from the name and stays the same from run to run."""
    scale_set: str = ""

    @property
    def id(self) -> str:
        return self.vm_id or str(uuid5(_VM_ID_SPACE, self.name))

    @property
    def client_id(self) -> str:
        """Client id of the VM's only managed identity."""
        return str(uuid5(_VM_ID_SPACE, f"identity of {self.name}"))


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request as read from the wire; header names are in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes = b""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to send, and the result for the ids that the request asked to start."""

    status: int
    body: bytes = b""
    wire: bytes
    """Status line, headers and body, ready to be sent."""
    accepted: tuple[str, ...] = ()
    """Ids that the request asked to start and that were not rejected."""
    approved: tuple[str, ...] = ()
    """Ids that the request approved: not what was approved or had started before."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request that a client sent, and what it got."""

    at: datetime
    """When it was answered, by the wall clock."""
    monotonic: float
    """When it was answered, by time.monotonic(), just before the first byte was sent."""
    vm: str
    connection: int
    """Counted from 1; requests on one kept-alive connection have the same number."""
    method: str
    path: str
    """The path with its query."""
    status: int
    """0 if there was no answer."""
    fault: str
    """Kind of the fault that hit it; "" for none."""
    headers: dict[str, str]
    """The headers, with names in lower case."""
    body: str
    accepted: tuple[str, ...]
    """Ids that this request asked to start and that were not rejected."""
    approved: tuple[str, ...]
    """Ids that this request approved: not what was approved or had started before."""
    incarnation: int
    """DocumentIncarnation at that moment."""

    def __str__(self) -> str:
        line = f"{self.vm} {self.method} {self.status}"
        return f"{line} ({self.fault})" if self.fault else line


def make_answer(
    status: int,
    body: bytes = b"",
    *,
    content_type: str = _JSON,
    headers: tuple[tuple[str, str], ...] = (),
) -> Answer:
    """An answer with its status line, headers and body as bytes."""
    lines = [f"HTTP/1.1 {status} {responses.get(status, 'Unknown')}", "Server: IMDS/simulator"]
    lines += [f"Content-Type: {content_type}"] if body else []
    lines += [f"{name}: {value}" for name, value in headers]
    lines.append(f"Content-Length: {len(body)}")
    head = "\r\n".join(lines) + "\r\n\r\n"
    return Answer(status=status, body=body, wire=head.encode("latin-1") + body)


def proxied(answer: Answer) -> Answer:
    """The answer with the header that Azure's Guest Proxy Agent adds."""
    status_line, _, rest = answer.wire.partition(b"\r\n")
    wire = b"%b\r\nx-ms-azure-host-authorization: simulated\r\n%b" % (status_line, rest)
    return msgspec.structs.replace(answer, wire=wire)


def make_error(status: int, message: str = "", **more: Any) -> Answer:
    """An error as the service words it: a JSON object with ``error``."""
    return make_answer(status, _encode({"error": message or responses.get(status, "Unknown"), **more}))


class Imds:
    """The metadata service of one set of VMs. Not safe for use by several threads at once."""

    def __init__(self, azure: Azure, vms: dict[str, VirtualMachine]) -> None:
        self._azure = azure
        self._vms = vms

    def answer(self, now: float, vm: str, request: Request) -> Answer:
        """Answer a request that came in on a VM's port."""
        headers = request.headers
        if "x-forwarded-for" in headers:
            return make_error(400, "Bad request. Requests must not carry an X-Forwarded-For header")
        if headers.get("metadata", "").strip().lower() != "true":
            return make_error(400, _NO_HEADER)
        path, query = _parse_target(request.target)
        version = query.get("api-version", "")
        match path:
            case ["metadata", "scheduledevents"]:
                return self._answer_events(now, vm, version, request)
            case ["metadata", "instance", *rest]:
                if version not in INSTANCE_VERSIONS:
                    return _bad_version(INSTANCE_VERSIONS)
                if request.method != "GET":
                    return make_error(405)
                return _part_of(_instance(self._vms[vm]), rest, query.get("format", "json"))
            case ["metadata", "identity", "oauth2", "token"]:
                if version not in _TOKEN_VERSIONS:
                    return _bad_version(_TOKEN_VERSIONS)
                return _token(self._vms[vm], query, now) if request.method == "GET" else make_error(405)
            case ["metadata", "versions"]:
                if request.method != "GET":
                    return make_error(405)
                return make_answer(200, _encode({"apiVersions": sorted({*EVENTS_VERSIONS, *INSTANCE_VERSIONS})}))
        return make_error(404)

    def _answer_events(self, now: float, vm: str, version: str, request: Request) -> Answer:
        if version not in EVENTS_VERSIONS:
            return _bad_version(EVENTS_VERSIONS)
        if request.method == "GET":
            self._azure.mark_served(now, vm, version)
            return make_answer(200, self._azure.document(version))
        if request.method == "POST":
            return self._approve(now, vm, version, request.body)
        return make_error(405)

    def _approve(self, now: float, vm: str, version: str, body: bytes) -> Answer:
        """All ids of a request or none: what the real service does with a mixture is not documented."""
        try:
            content = json.loads(body)
            ids = [item["EventId"] for item in content["StartRequests"]]
        except (ValueError, TypeError, KeyError):
            return make_error(400, 'Bad request. Expected {"StartRequests": [{"EventId": "..."}]}')
        if not ids or not all(isinstance(event_id, str) for event_id in ids):
            return make_error(400, "Bad request. StartRequests must name events by their EventId")
        # Documented as a string; clients echo the number that they were given.
        if version == EVENTS_VERSIONS[0] and type(content.get("DocumentIncarnation")) not in (str, int):
            return make_error(400, "Bad request. DocumentIncarnation must be given")
        for event_id in ids:
            if not self._azure.is_pending(event_id):
                return make_error(400, f"Bad request. There is no event {event_id}")
        approved = tuple(event_id for event_id in ids if self._azure.approve(now, event_id, vm))
        return msgspec.structs.replace(make_answer(200), accepted=tuple(ids), approved=approved)


def purpose_of(request: Request) -> Purpose:
    """The purpose of a request, well-formed or not."""
    path = _parse_target(request.target)[0]
    if path[-1:] == ("scheduledevents",):
        return "approve" if request.method == "POST" else "poll"
    return "instance" if path[:2] == ("metadata", "instance") else "other"


def version_of(request: Request) -> str:
    """The api-version that the client asks for; "" without one."""
    return _parse_target(request.target)[1].get("api-version", "")


def _parse_target(target: str) -> tuple[tuple[str, ...], dict[str, str]]:
    try:
        parts = urlsplit(target)
    except ValueError:
        return (), {}
    path = tuple(part for part in parts.path.lower().split("/") if part)
    return path, {name.lower(): values[-1] for name, values in parse_qs(parts.query).items()}


def _bad_version(versions: tuple[str, ...]) -> Answer:
    return make_error(400, _BAD_VERSION, **{"newest-versions": list(reversed(versions[-3:]))})


def _token(vm: VirtualMachine, query: dict[str, str], now: float) -> Answer:
    """A token with the claims of Microsoft's tokens, but without a signature; the storage emulator accepts it."""
    resource = query.get("resource", "")
    if not resource:
        return make_error(
            400, "invalid_request", error_description="Required query variable 'resource' is missing"
        )
    if query.get("client_id", vm.client_id).lower() != vm.client_id:
        return make_error(400, "invalid_request", error_description="Identity not found")
    began = int(now)
    ends = int(now) + _TOKEN_SECONDS
    claims = {
        "aud": resource,
        "iss": "https://sts.windows.net/00000000-0000-0000-0000-000000000000/",
        "iat": began,
        "nbf": began,
        "exp": ends,
        "appid": vm.client_id,
    }
    parts = [_encode({"typ": "JWT", "alg": "RS256"}), _encode(claims), b"not signed"]
    token = ".".join(urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)
    return make_answer(
        200,
        _encode(
            {
                "access_token": token,
                "client_id": vm.client_id,
                "expires_in": str(_TOKEN_SECONDS),
                "expires_on": str(ends),
                "not_before": str(began),
                "resource": resource,
                "token_type": "Bearer",
            }
        ),
    )


def _instance(vm: VirtualMachine) -> dict[str, Any]:
    """The instance's data; as with the real service every value is a string."""
    text = (resources.files(__package__) / "instance.json").read_text(encoding="utf-8")
    instance: dict[str, Any] = json.loads(text)
    compute = instance["compute"]
    compute["name"] = vm.name
    # Never the name that Resources uses, so that a client that confuses the two is found out.
    compute["osProfile"]["computerName"] = vm.name.split(".")[0].replace("_", "")[:9] + "000000"
    compute["placementGroupId"] = str(uuid5(_VM_ID_SPACE, vm.scale_set)) if vm.scale_set else ""
    compute["resourceId"] += vm.name
    compute["vmId"] = vm.id
    compute["vmScaleSetName"] = vm.scale_set
    return instance


def _part_of(instance: dict[str, Any], path: list[str], format_: str) -> Answer:
    part: Any = instance
    for step in path:
        names = {name.lower(): name for name in part} if isinstance(part, dict) else {}
        if step not in names:
            return make_error(404)
        part = part[names[step]]
    if not isinstance(part, str):
        return make_answer(200, _encode(part))
    if format_ != "text":
        return make_error(400, "Bad request. A single value is available as format=text only")
    return make_answer(200, part.encode(), content_type="text/plain; charset=utf-8")


def _encode(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
