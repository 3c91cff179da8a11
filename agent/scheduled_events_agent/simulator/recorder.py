"""Records the documents of a real endpoint, with requests like the agent's.

It sends one GET a second, without a proxy, follows no redirect, and limits the body. It never approves.
"""

import contextlib
import http.client
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from io import BufferedWriter
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from scheduled_events_agent.simulator.azure import EVENTS_VERSIONS, SimulatorError
from scheduled_events_agent.simulator.recording import Origin, Recorded, VmName, make_recorded, summarize

REAL_ENDPOINT = "http://169.254.169.254"
_MAX_BODY_BYTES = 1024 * 1024
_TIMEOUT_SECONDS = 10.0
_FIRST_TIMEOUT_SECONDS = 120.0  # the first request switches the service on, which may take two minutes
# The newest version is a preview, which not every VM has.
_DOCUMENT_PATHS = tuple(f"/metadata/scheduledevents?api-version={version}" for version in EVENTS_VERSIONS[:-3:-1])
_INSTANCE_PATH = "/metadata/instance/compute?api-version=2021-12-13"

Report = Callable[[datetime, str], None]
"""Called with a time and a message, whenever the message has changed."""


class _Compute(msgspec.Struct):
    """The VM, as /metadata/instance/compute names it."""

    name: VmName
    vm_id: str = msgspec.field(name="vmId")
    scale_set: str = msgspec.field(name="vmScaleSetName", default="")


class _EndpointError(Exception):
    """The endpoint does not answer, or not as it should."""


class _UnknownRequestError(_EndpointError):
    """The endpoint does not know what it was asked for."""


def record(
    endpoint: str, path: Path, stop_requested: threading.Event, report: Report, *, interval_seconds: float = 1.0
) -> None:
    """Write each document that differs from the one before to a new file, until stopped.

    Raises SimulatorError for a wrong address and for a file that cannot be made or written. ``report`` gets the
    failures of the endpoint, which is then asked again.
    """
    host, port = _parse(endpoint)
    try:
        with path.open("xb") as stream:
            origin: Origin | None = None
            last: bytes | None = None
            last_trouble = ""
            timeout = _FIRST_TIMEOUT_SECONDS
            document_path = _DOCUMENT_PATHS[0]
            while True:
                trouble = ""
                try:
                    if origin is None:
                        origin = _origin(_get(host, port, _INSTANCE_PATH, timeout))
                        _append(stream, origin)
                        report(datetime.now(UTC), f"records the documents of {origin.vm}")
                    body = _get(host, port, document_path, timeout)
                    timeout = _TIMEOUT_SECONDS
                    if body != last:
                        recorded = make_recorded(datetime.now(UTC), body)
                        last = body
                        _append(stream, recorded)
                        report(recorded.at, summarize(recorded))
                except _EndpointError as error:
                    trouble = f"{endpoint} {error}"
                    if isinstance(error, _UnknownRequestError):
                        document_path = _DOCUMENT_PATHS[document_path == _DOCUMENT_PATHS[0]]
                    if trouble != last_trouble:
                        report(datetime.now(UTC), trouble)
                last_trouble = trouble
                if stop_requested.wait(interval_seconds):
                    return
    except FileExistsError:
        raise SimulatorError(f"{path} is there already: name a new file, or remove it", kind="usage") from None
    except OSError as error:
        raise SimulatorError(f"cannot record to {path}: {error.strerror}") from error


def _append(stream: BufferedWriter, line: Origin | Recorded) -> None:
    stream.write(msgspec.json.encode(line) + b"\n")
    stream.flush()


def _get(host: str, port: int, path: str, timeout: float) -> bytes:
    """The body of a 200; http.client knows no proxy and follows no redirect."""
    try:
        with contextlib.closing(http.client.HTTPConnection(host, port, timeout=timeout)) as connection:
            connection.request("GET", path, headers={"Metadata": "true", "Connection": "close"})
            response = connection.getresponse()
            body = response.read(_MAX_BODY_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        raise _EndpointError(f"does not answer: {str(error) or type(error).__name__}") from error
    if response.status != http.client.OK:
        is_unknown = response.status in (http.client.BAD_REQUEST, http.client.NOT_FOUND)
        kind = _UnknownRequestError if is_unknown else _EndpointError
        raise kind(f"answers {response.status} {response.reason}")
    if len(body) > _MAX_BODY_BYTES:
        raise _EndpointError(f"answers more than {_MAX_BODY_BYTES >> 20} MiB")
    if response.length:
        raise _EndpointError("answers with less than it announced")
    return body


def _origin(body: bytes) -> Origin:
    try:
        compute = msgspec.json.decode(body, type=_Compute)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _EndpointError("answers with instance data that does not name the VM") from error
    return Origin(vm=compute.name, vm_id=compute.vm_id, scale_set=compute.scale_set)


def _parse(endpoint: str) -> tuple[str, int]:
    try:
        parts = urlsplit(endpoint)
        host = parts.hostname
        port = parts.port or 80
    except ValueError:
        parts = urlsplit("")
        host = None
        port = 0
    if parts.scheme != "http" or not host or parts.path.strip("/") or parts.query or parts.username:
        raise SimulatorError(f'--from: expected http://ADDRESS[:PORT]; got "{endpoint}"', kind="usage")
    return host, port
