"""The yardsticks: loops that poll, compare bytes and act, and know no policy, no state and no fault.

Run as a program: ``bare_loop httpx|http.client ENDPOINT INTERVAL_SECONDS [HOOK...]``. What a user started it
approves at once; for any other event that is new it runs the hook, if there is one.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

Exchange = Callable[[str, str | None], bytes]
"""Get (a text: post) what a path has."""
_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
_HEADERS = {"Metadata": "true"}


def by_httpx(endpoint: str) -> Exchange:
    import httpx  # noqa: PLC0415 - the other loop is to do without it

    client = httpx.Client(base_url=endpoint, headers=_HEADERS, trust_env=False, timeout=10.0)
    return lambda path, text: (client.post(path, content=text) if text else client.get(path)).content


def by_http_client(endpoint: str) -> Exchange:
    import http.client  # noqa: PLC0415 - as above

    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=10)

    def exchange(path: str, text: str | None) -> bytes:
        connection.request("POST" if text else "GET", path, text, _HEADERS)
        return connection.getresponse().read()

    return exchange


def run(exchange: Exchange, interval_seconds: float, hook: list[str]) -> None:
    """Poll, compare, act; until killed."""
    last, known = b"", set[str]()
    while True:
        began = time.monotonic()
        body = exchange(_PATH, None)
        if body != last:
            last = body
            events = json.loads(body)["Events"]
            new = [event for event in events if event["EventId"] not in known]
            known = {event["EventId"] for event in events}
            if to_approve := [{"EventId": event["EventId"]} for event in new if event["EventSource"] == "User"]:
                exchange(_PATH, json.dumps({"StartRequests": to_approve}))
            for event in new:
                if hook and event["EventSource"] != "User":
                    subprocess.run(hook, env={**os.environ, "SCHEDULED_EVENT_ID": event["EventId"]}, check=False)
        time.sleep(max(0.0, began + interval_seconds - time.monotonic()))


if __name__ == "__main__":
    make = {"httpx": by_httpx, "http.client": by_http_client}[sys.argv[1]]
    run(make(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
