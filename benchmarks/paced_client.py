"""One poll after another with a client alone, no policy and no state: what a client costs by itself.

Run as a program: ``paced_client agent|httpx ENDPOINT INTERVAL_SECONDS``.
"""

import sys
import time
from collections.abc import Callable

import httpx

from agent.imds import ImdsClient


def agents_client(endpoint: str) -> Callable[[], bytes]:
    """The agent's own client."""
    return ImdsClient(endpoint, api_version="2020-07-01", request_timeout=10.0, first_request_timeout=10.0).fetch


def bare_httpx(endpoint: str) -> Callable[[], bytes]:
    """A client as httpx has it, which keeps its connection."""
    client = httpx.Client(trust_env=False, timeout=10.0)
    url = f"{endpoint}/metadata/scheduledevents?api-version=2020-07-01"
    return lambda: client.get(url, headers={"Metadata": "true"}).content


if __name__ == "__main__":
    fetch = {"agent": agents_client, "httpx": bare_httpx}[sys.argv[1]](sys.argv[2])
    while True:
        began = time.monotonic()
        fetch()
        time.sleep(max(0.0, began + float(sys.argv[3]) - time.monotonic()))
