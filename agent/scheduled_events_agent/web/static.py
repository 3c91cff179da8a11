"""The files of the status page, read when the agent starts: an upgrade may replace them while it runs."""

from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

from scheduled_events_agent.web.server import Response

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""The browser loads, frames and runs nothing but these files."""

_FILES = {
    "/": ("status.html", "text/html; charset=utf-8"),
    "/status.css": ("status.css", "text/css; charset=utf-8"),
    "/status.js": ("status.js", "text/javascript; charset=utf-8"),
}


def _page_of(name: str, content_type: str) -> Callable[[], Response]:
    page = Response(HTTPStatus.OK, Path(__file__).with_name(name).read_bytes(), content_type, HEADERS)
    return lambda: page


FILES = {path: _page_of(*about) for path, about in _FILES.items()}
"""The files, by their paths on the server."""
