"""The yardstick: a loop with the standard library's http.client that knows no policy, no state and no fault.

Run as a program: ``bare_loop ENDPOINT INTERVAL_SECONDS [HOOK...]``. What a user started it approves at once; for
any other event that is new it runs the hook, if there is one.
"""

import http.client
import json
import os
import subprocess
import sys
import time


def run(endpoint: str, interval_seconds: float, hook: list[str]) -> None:
    """Poll, compare, act; until killed."""
    address = endpoint.removeprefix("http://")
    path = "/metadata/scheduledevents?api-version=2020-07-01"
    connection = http.client.HTTPConnection(address, timeout=10)
    last = b""
    known: set[str] = set()
    while True:
        began = time.monotonic()
        connection.request("GET", path, headers={"Metadata": "true"})
        body = connection.getresponse().read()
        if body != last:
            last = body
            events = json.loads(body)["Events"]
            new = [event for event in events if event["EventId"] not in known]
            known = {event["EventId"] for event in events}
            to_approve = [{"EventId": event["EventId"]} for event in new if event["EventSource"] == "User"]
            if to_approve:
                text = json.dumps({"StartRequests": to_approve})
                connection.request("POST", path, text, headers={"Metadata": "true"})
                connection.getresponse().read()
            for event in new:
                if hook and event["EventSource"] != "User":
                    environment = {**os.environ, "SCHEDULED_EVENT_ID": event["EventId"]}
                    subprocess.run(hook, env=environment, check=False)
        time.sleep(max(0.0, began + interval_seconds - time.monotonic()))


if __name__ == "__main__":
    run(sys.argv[1], float(sys.argv[2]), sys.argv[3:])
