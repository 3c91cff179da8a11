"""The name server does not answer: an address needs none, and what waits for a name delays nothing else."""

import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_injection import DRAIN, needs_root, see_through
from harness import Agent, Simulator

if sys.platform == "win32":
    pytest.skip("there is no other way to a dead name service than a namespace of Linux", allow_module_level=True)

pytestmark = needs_root


@pytest.fixture
def questions(agent: Agent, tmp_path: Path) -> Iterator[socket.socket]:
    """Queries of the agent to its only name server, which never answers."""
    address = f"127.53.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((address, 53))
        server.setblocking(False)
        (tmp_path / "resolv.conf").write_text(f"nameserver {address}\noptions timeout:30 attempts:2\n")
        (tmp_path / "nsswitch.conf").write_text("hosts: files dns\n")
        mounts = "".join(
            f"mount --bind {tmp_path / name} /etc/{name} && " for name in ("resolv.conf", "nsswitch.conf")
        )
        agent.prefix = ["unshare", "--mount", "/bin/sh", "-c", f'{mounts}exec "$@"', "sh"]
        yield server


def has_asked(questions: socket.socket) -> bool:
    try:
        return b"nowhere" in questions.recv(4096, socket.MSG_PEEK)
    except BlockingIOError:
        return False


def answer(questions: socket.socket) -> None:
    """There is no such name, whatever it is."""
    try:
        question, asker = questions.recvfrom(4096)
    except BlockingIOError:
        return
    questions.sendto(question[:2] + b"\x81\x83" + question[4:6] + bytes(6) + question[12:], asker)


def test_an_endpoint_with_an_ip_address_needs_no_dns(
    sim: Simulator, agent: Agent, questions: socket.socket
) -> None:
    agent.write_policy(rules=[DRAIN], hooks=agent.hooks("drain", "resume"))
    agent.start()
    event = sim.schedule("Reboot", start_delay_seconds=0, lasts_seconds=None)
    see_through(sim, agent, event)
    agent.stop()
    with pytest.raises(BlockingIOError):
        questions.recv(4096)  # no query has come


def test_a_slow_name_lookup_delays_only_the_poller(sim: Simulator, agent: Agent, questions: socket.socket) -> None:
    hooks = {"drain": agent.hook("drain", until="drained"), **agent.hooks("resume")}
    agent.write_policy(rules=[DRAIN], hooks=hooks)
    agent.start()
    event = sim.schedule("Reboot", lasts_seconds=None)
    agent.wait_hook("drain", "start")
    port = sim.endpoint().rpartition(":")[2]
    agent.write_policy(imds={"endpoint": f"http://nowhere.test:{port}"}, rules=[DRAIN], hooks=hooks)
    agent.reload()
    agent.wait_until(lambda: has_asked(questions), "it asked for the name")
    began = time.monotonic()
    agent.let_go("drained")
    agent.wait_log("hook finished", hook="drain", event_id=event)
    said = agent.say("hold", event)
    # Only the answer waits for that of the approval, which waits for the name.
    assert said.returncode == 1
    assert "held, unless Azure accepts" in said.stderr
    assert agent.pending()[event]["phase"] == "held"
    assert agent.get("/healthz") == (200, "ok\n")
    agent.write_policy(rules=[DRAIN], hooks=hooks)
    agent.reload()
    agent.wait_log("the policy file was read again", count=2)
    assert agent.say("release", event).returncode == 0
    assert time.monotonic() - began < 60  # so long it would wait for the name
    polls = len(sim.requests())

    def is_polling() -> bool:
        answer(questions)
        return len(sim.requests()) > polls

    assert not agent.log("polling the metadata service fails")
    agent.wait_until(is_polling, "it polled again")
    sim.wait_approved(event)


def test_an_agent_that_starts_without_dns_reports_it_and_stops_on_request(
    sim: Simulator, agent: Agent, questions: socket.socket
) -> None:
    port = sim.endpoint().rpartition(":")[2]
    agent.write_policy(
        imds={"endpoint": f"http://nowhere.test:{port}"}, rules=[DRAIN], hooks=agent.hooks("drain", "resume")
    )
    agent.start(is_awaited=False)
    agent.wait_log("agent started")
    agent.wait_until(lambda: has_asked(questions), "it asked for the name")
    assert agent.get("/healthz") == (200, "ok\n")
    assert agent.get("/readyz") == (200, "ready\n")
    assert agent.stop() < 40  # it would wait for the name for longer
