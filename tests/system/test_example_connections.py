"""Claims of the cookbook's page on dead connections, with real ones on loopback whose packets are dropped."""

import ctypes
import errno
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

if sys.platform != "linux":
    pytest.skip("dropping the packets of one socket is for Linux", allow_module_level=True)

from harness import CHECKOUT, PATIENCE, Agent, Simulator

PAGE = CHECKOUT / "docs/cookbook/connections.md"
RETRIES = Path("/proc/sys/net/ipv4/tcp_retries2")
DEAD_SECONDS = 2
_SO_ATTACH_FILTER = 26


class Server:
    """Accepts connections, and can drop all that arrives on them, as a lost peer does: nothing is acknowledged."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._accepted: list[socket.socket] = []

    def connect(self) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.port), PATIENCE)
        peer, _ = self._listener.accept()
        self._accepted.append(peer)
        client.sendall(b"?")
        assert peer.recv(1) == b"?"
        peer.sendall(b"!")
        assert client.recv(1) == b"!"
        return client

    def drop_everything(self) -> None:
        instruction = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: keep no byte
        program = struct.pack("HP", 1, ctypes.addressof(instruction))
        for peer in self._accepted:
            peer.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)

    def close(self) -> None:
        for one in (self._listener, *self._accepted):
            one.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def with_keep_alive(client: socket.socket) -> socket.socket:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT):
        client.setsockopt(socket.IPPROTO_TCP, option, 1)
    return client


def wait_failed(client: socket.socket, expected: int) -> None:
    with pytest.raises(OSError, match=os.strerror(expected)):  # otherwise the test's time limit ends it
        client.recv(1)


@pytest.mark.skipif(int(RETRIES.read_text()) < 12, reason="this machine gives dead connections up by itself early")
def test_only_a_user_timeout_ends_a_dead_connection_with_data_in_flight(server: Server) -> None:
    limited, plain, kept, idle = (server.connect() for _ in range(4))
    limited.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_SECONDS * 1000)
    with plain, limited, with_keep_alive(kept), with_keep_alive(idle):
        server.drop_everything()
        began = time.monotonic()
        for client in (limited, plain, kept):
            client.sendall(b"?")
        wait_failed(limited, errno.ETIMEDOUT)
        took = time.monotonic() - began
        assert took > DEAD_SECONDS / 2
        wait_failed(idle, errno.ETIMEDOUT)
        time.sleep(3 * took)
        for client in (plain, kept):
            assert client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
            client.sendall(b"?")  # still taken, as if all were well


def test_the_recover_hook_of_the_page_ends_dead_connections(server: Server, tmp_path: Path) -> None:
    ss = shutil.which("ss")
    if ss is None:
        pytest.skip("ss is not installed")
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    policy = yaml.safe_load(text.replace("/usr/bin/ss", ss).replace(":5432", f":{server.port}"))
    policy["rules"][1]["drain_for"] = "0s"
    with server.connect() as tried:
        subprocess.run(policy["hooks"]["close-pool"]["run"], check=True, capture_output=True)
        if tried.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
            pytest.skip("this account or kernel does not let ss end connections")
    with server.connect() as client, Simulator(vms=("vm-1",), rate_limit=None) as sim:
        agent = Agent(tmp_path, sim.endpoint())
        agent.write_policy(**policy)
        try:
            agent.start()
            server.drop_everything()
            client.sendall(b"?")
            sim.schedule("Freeze", lasts_seconds=0.5)
            agent.wait_log("closed")
            wait_failed(client, errno.ECONNABORTED)
        finally:
            agent.close()
