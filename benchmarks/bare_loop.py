"""The yardsticks: loops that poll, compare bytes and act, and know no policy, no state and no fault.

Run as a program: ``bare_loop httpx|http.client ENDPOINT INTERVAL_SECONDS HOOK...``. What a user started it
approves at once; for any other event that is new it runs the hook.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

PATH, HEADERS = "/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"}


def connect(kind: str, endpoint: str) -> Callable[[str | None], bytes]:
    """What gets the document, or posts a text."""
    if kind == "httpx":
        import httpx  # noqa: PLC0415 - the other loop is to do without it

        client = httpx.Client(base_url=endpoint, headers=HEADERS, trust_env=False, timeout=10.0)
        return lambda text: (client.post(PATH, content=text) if text else client.get(PATH)).content
    import http.client  # noqa: PLC0415 - as above

    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=10)

    def exchange(text: str | None) -> bytes:
        connection.request("POST" if text else "GET", PATH, text, HEADERS)
        return connection.getresponse().read()

    return exchange


def run(kind: str, endpoint: str, interval: str, *hook: str) -> None:
    """Until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    exchange, last, known = connect(kind, endpoint), b"", set[str]()
    while True:
        began = time.monotonic()
        body = exchange(None)
        if body != last:
            last, events = body, json.loads(body)["Events"]
            new = [event for event in events if event["EventId"] not in known]
            known = {event["EventId"] for event in events}
            if to_approve := [{"EventId": event["EventId"]} for event in new if event["EventSource"] == "User"]:
                exchange(json.dumps({"StartRequests": to_approve}))
            for event in new:
                if event["EventSource"] != "User":
                    subprocess.run(hook, env={**os.environ, "SCHEDULED_EVENT_ID": event["EventId"]}, check=False)
        time.sleep(max(0.0, began + float(interval) - time.monotonic()))


if __name__ == "__main__":
    run(*sys.argv[1:])
