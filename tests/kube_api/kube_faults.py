"""What goes wrong on purpose: in the API server, in what stands before it, and in admission webhooks."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from harness import Answer
from kube_access import Call
from kube_status import ApiError

FaultName = Literal[
    "too many requests",  # 429 of the server itself, Retry-After 3
    "bad gateway",  # 502 of a proxy
    "web page",  # 200 with HTML
    "trickle",  # a byte a second
    "endless",  # 1 GB
    "broken off",  # no answer
    "unauthorized",
    "webhook 400",
    "webhook 403",
    "webhook 422",
    "webhook 500",
]
WEBHOOK = 'admission webhook "guard.example.com" denied the request: '
_BIG_BYTES = 1024**3
_BLANKS = b" " * 65536
_JSON = {"Content-Type": "application/json"}
_REASONS = {400: "BadRequest", 403: "Forbidden", 422: "Invalid", 500: "InternalError"}


@dataclass
class Fault:
    """Happens to requests for which ``hits`` is true, ``times`` times."""

    name: FaultName
    hits: Callable[[Call], bool]
    times: float = math.inf

    def answer(self, is_closing: Callable[[], bool]) -> Answer:
        """The answer instead of the right one. Raises ApiError, or ConnectionError for none at all."""
        match self.name:
            case "too many requests":
                headers = {"Content-Type": "text/plain; charset=utf-8", "Retry-After": "3"}
                return Answer(429, b"Too many requests, please try again later.\n", headers)
            case "bad gateway":
                return Answer(502, b"<html><h1>502 Bad Gateway</h1></html>", {"Content-Type": "text/html"})
            case "web page":
                return Answer(200, b"<html>please log in</html>", {"Content-Type": "text/html"})
            case "trickle":
                return Answer(200, headers={**_JSON, "Content-Length": "1000"}, stream=_trickle(is_closing))
            case "endless":
                return Answer(
                    200, headers={**_JSON, "Content-Length": str(_BIG_BYTES)}, stream=_endless(is_closing)
                )
            case "broken off":
                raise ConnectionError("broken off on purpose")
            case "unauthorized":
                raise ApiError(401, "Unauthorized")
        code = int(self.name.removeprefix("webhook "))
        raise ApiError(code, f"{WEBHOOK}it is in use", reason=_REASONS[code])


def _trickle(is_closing: Callable[[], bool]) -> Iterator[bytes]:
    while not is_closing():
        yield b" "
        until = time.monotonic() + 1
        while time.monotonic() < until and not is_closing():
            time.sleep(0.05)


def _endless(is_closing: Callable[[], bool]) -> Iterator[bytes]:
    yield b'{"items":[' + _BLANKS[10:]
    for _ in range(_BIG_BYTES // len(_BLANKS) - 1):
        if is_closing():
            return
        yield _BLANKS
