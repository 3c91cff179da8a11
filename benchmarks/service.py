"""The metadata service for a measurement: one document, served as it is, and when that was and what came back."""

import json
import threading
import time
from collections.abc import Callable, Container, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

_PATIENCE_SECONDS = 120.0


class Service:
    """A context manager. Times are ``time.monotonic``: a document's before its first byte is sent."""

    def __init__(self, news: threading.Condition) -> None:
        """``news``: told of whatever comes; what else is waited for may tell it as well."""
        self.polls = 0
        self.served_at = 0.0
        """When the document of now was served for the first time; 0: it was not."""
        self.approved_at: dict[str, float] = {}
        self.may_answer = threading.Event()
        """Set: polls are answered; else they wait."""
        self.may_answer.set()
        self._incarnation = 0
        self._news = news
        self._body = b""
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                is_poll = self.path.startswith("/metadata/scheduledevents")
                body = service._poll() if is_poll else b'{"compute": {"name": "vm-1", "vmId": "id-1"}}'
                self._answer(body)

            def do_POST(self) -> None:
                now = time.monotonic()
                requests = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["StartRequests"]
                service._approve([request["EventId"] for request in requests], now)
                self._answer(b"")

            def _answer(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                pass  # a program has ended amid a request

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.announce()

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def announce(self, *events: Mapping[str, Any]) -> None:
        """Serve these events, and no others, from now on."""
        with self._news:
            self._incarnation += 1
            self._body = json.dumps({"DocumentIncarnation": self._incarnation, "Events": events}).encode()
            self.served_at = 0.0

    def wait_for(self, event_id: str, done_at: Container[str]) -> None:
        self._wait(lambda: event_id in done_at, f"{event_id} was acted on")

    def wait_polls(self, count: int) -> None:
        """Wait for so many more."""
        goal = self.polls + count
        self._wait(lambda: self.polls >= goal, f"{count} more polls had come")

    def _wait(self, test: Callable[[], bool], what: str) -> None:
        with self._news:
            if not self._news.wait_for(test, _PATIENCE_SECONDS):
                raise TimeoutError(f"gave up after {_PATIENCE_SECONDS:g} s of waiting until {what}")

    def _poll(self) -> bytes:
        with self._news:
            self.polls += 1
            self._news.notify_all()
        self.may_answer.wait(_PATIENCE_SECONDS)
        with self._news:
            self.served_at = self.served_at or time.monotonic()
            return self._body

    def _approve(self, event_ids: list[str], now: float) -> None:
        with self._news:
            self.approved_at |= dict.fromkeys(event_ids, now)
            self._news.notify_all()
