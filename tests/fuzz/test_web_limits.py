"""The web server at its limits: no file descriptor left, and a crowd that says nonsense."""

import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path

import pytest
from inputs import make_input

from scheduled_events_agent.web import server as web
from scheduled_events_agent.web.server import Response, WebServer


def test_a_server_without_a_file_descriptor_waits_and_does_not_spin() -> None:
    if sys.platform == "win32":
        pytest.skip("there is no limit of a process's files to reach")
    import resource

    server = WebServer("127.0.0.1:0", {"/healthz": lambda: Response(HTTPStatus.OK, b"ok\n")})
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    with socket.socket() as client:
        client.settimeout(30)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 20, before[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                taken.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(1000))
            client.connect(("127.0.0.1", server.port))  # the system takes it; the server cannot
            began, began_cpu = time.monotonic(), time.process_time()
            time.sleep(1)  # what is measured is a second of waiting
            share = (time.process_time() - began_cpu) / (time.monotonic() - began)
        finally:
            for file in taken:
                os.close(file)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        answer = b""
        while part := client.recv(4096):
            answer += part
    server.close()
    assert answer.endswith(b"\r\n\r\nok\n")
    assert share < 0.2


def test_after_many_silent_or_invalid_clients_the_next_client_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web, "_REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(web, "_MAX_CLIENTS", 16)
    page = Response(HTTPStatus.OK, b"ok\n")
    before = set(threading.enumerate())
    server = WebServer("127.0.0.1:0", {"/healthz": lambda: page})
    most = 0

    def come_and_stay(seed: int) -> None:
        nonlocal most
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            try:
                client.sendall(make_input("web", seed)[: seed % 100])
                most = max(most, len(server._clients))
                while client.recv(1 << 16):
                    pass
            except OSError:
                pass  # it was reset with bytes of ours unread

    with ThreadPoolExecutor(60) as crowd:
        list(crowd.map(come_and_stay, range(240)))
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while part := client.recv(4096):
            answer += part
    server.close()
    assert answer.endswith(b"\r\n\r\nok\n")
    assert 0 < most <= web._MAX_CLIENTS
    assert not server._clients
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
    assert set(threading.enumerate()) <= before
