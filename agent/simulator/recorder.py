"""Records the documents of a real endpoint, asked for as the agent would ask.

Owns the asking: one GET a second, no proxy, no redirect, a bounded body. It never approves. Every line that it has
written is whole, so that a recording may be cut off at any moment.
"""

import contextlib
import http.client
import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from agent.simulator.azure import EVENTS_VERSIONS, SimulatorError
from agent.simulator.recording import Origin, Recorded, make_recorded, summarize

REAL_ENDPOINT = "http://169.254.169.254"
_MAX_BODY_BYTES = 1024 * 1024
_TIMEOUT_SECONDS = 10.0
_FIRST_TIMEOUT_SECONDS = 120.0  # the first request switches the service on, which may take two minutes
_DOCUMENT_PATH = f"/metadata/scheduledevents?api-version={EVENTS_VERSIONS[-1]}"
_INSTANCE_PATH = "/metadata/instance/compute?api-version=2021-12-13"

Tell = Callable[[datetime, str], None]
"""Called with a time and what there is to say, whenever that has changed."""


def record(
    endpoint: str, path: Path, stop_requested: threading.Event, tell: Tell, *, interval_seconds: float = 1.0
) -> int:
    """Write each document that differs from the one before to a new file, until stopped; returns how many.

    Raises SimulatorError for a wrong address and for a file that cannot be made or written. ``tell`` gets the
    failures of the endpoint, which is then asked again.
    """
    host, port = _parse(endpoint)
    try:
        stream = path.open("xb", buffering=0)
    except FileExistsError:
        raise SimulatorError(f"{path} is there already: name a new file, or remove it", kind="usage") from None
    except OSError as error:
        raise SimulatorError(f"cannot record to {path}: {error.strerror}", kind="usage") from error
    with stream:
        origin: Origin | None = None
        last: bytes | None = None
        said, count, timeout = "", 0, _FIRST_TIMEOUT_SECONDS
        while True:
            at = datetime.now(UTC)
            try:
                if origin is None:
                    origin = _origin(_get(host, port, _INSTANCE_PATH, timeout))
                    _append(stream, path, origin)
                    tell(at, f"records the documents of {origin.vm}")
                body = _get(host, port, _DOCUMENT_PATH, timeout)
                timeout, news = _TIMEOUT_SECONDS, ""
                if body != last:
                    recorded = make_recorded(datetime.now(UTC), body)
                    _append(stream, path, recorded)
                    last, count = body, count + 1
                    tell(at, summarize(recorded))
            except (OSError, http.client.HTTPException, _RefusedError) as error:
                news = f"{endpoint} does not answer: {str(error) or type(error).__name__}"
                if isinstance(error, _RefusedError):
                    news = f"{endpoint} answers {error}"
            if news and news != said:
                tell(at, news)
            said = news
            if stop_requested.wait(interval_seconds):
                return count


def _append(stream: FileIO, path: Path, line: Origin | Recorded) -> None:
    rest = msgspec.json.encode(line) + b"\n"
    begin = stream.tell()
    try:
        while rest:
            rest = rest[stream.write(rest) :]
    except OSError as error:
        stream.truncate(begin)
        raise SimulatorError(f"cannot record to {path}: {error.strerror}") from error


class _RefusedError(Exception):
    """The endpoint answers, and not as it should."""


def _get(host: str, port: int, path: str, timeout: float) -> bytes:
    """The body of a 200; http.client knows no proxy and follows no redirect."""
    with contextlib.closing(http.client.HTTPConnection(host, port, timeout=timeout)) as connection:
        connection.request("GET", path, headers={"Metadata": "true", "Connection": "close"})
        response = connection.getresponse()
        body = response.read(_MAX_BODY_BYTES + 1)
    if response.status != http.client.OK:
        raise _RefusedError(f"{response.status} {response.reason}")
    if len(body) > _MAX_BODY_BYTES:
        raise _RefusedError(f"more than {_MAX_BODY_BYTES >> 20} MiB")
    if response.length:
        raise _RefusedError("with less than it announced")
    return body


def _origin(body: bytes) -> Origin:
    try:
        compute: dict[str, Any] = json.loads(body)
        return msgspec.convert(
            {"vm": compute["name"], "vm_id": compute["vmId"], "scale_set": compute.get("vmScaleSetName", "")},
            Origin,
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _RefusedError("with instance data that does not name the VM") from error


def _parse(endpoint: str) -> tuple[str, int]:
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        parts, host, port = urlsplit(""), None, 0
    if parts.scheme != "http" or not host or parts.path.strip("/") or parts.query or parts.username:
        raise SimulatorError(f'--from: expected http://ADDRESS[:PORT]; got "{endpoint}"', kind="usage")
    return host, port
