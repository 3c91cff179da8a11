"""The yardsticks: loops that poll, compare bytes and act, and know no policy, no state and no fault.

Run as a program: ``bare_loop httpx|http.client ENDPOINT INTERVAL_SECONDS HOOK...``. Of what is new it
approves what a user started, and runs the hook for a redeployment.
"""

import json
import subprocess
import sys
import time

PATH = "/metadata/scheduledevents?api-version=2020-07-01"
HEADERS = {"Metadata": "true"}
kind, endpoint, interval, *hook = sys.argv[1:]

if kind == "httpx":
    import httpx

    client = httpx.Client(base_url=endpoint, headers=HEADERS, trust_env=False, timeout=10.0)

    def exchange(text: str | None) -> bytes:
        return (client.post(PATH, content=text) if text else client.get(PATH)).content
else:
    import http.client

    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=10)

    def exchange(text: str | None) -> bytes:
        connection.request("POST" if text else "GET", PATH, text, HEADERS)
        return connection.getresponse().read()


last = b""
known = set[str]()
while True:
    began = time.monotonic()
    body = exchange(None)
    if body != last:
        events = {event["EventId"]: event for event in json.loads(body)["Events"]}
        for new in events.keys() - known:
            if events[new]["EventSource"] == "User":
                exchange(json.dumps({"StartRequests": [{"EventId": new}]}))
            elif events[new]["EventType"] == "Redeploy":
                subprocess.run(hook, check=False)
        last = body
        known = set(events)
    time.sleep(max(0.0, began + float(interval) - time.monotonic()))
