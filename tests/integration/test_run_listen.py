"""``run --listen``: where the pages are, whatever the policy says, also after a reload."""

import hashlib
import json
import socket
import sys
from pathlib import Path

import pytest
from harness import Agent
from ports import free_port

from scheduled_events_agent.cli import build_parser
from scheduled_events_agent.cli.config import policy_file
from scheduled_events_agent.cli.status import keys_for_restart


def has_ipv6() -> bool:
    """Whether this machine has a loopback address of IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ("10.0.0.4:9769", "10.0.0.4:9769"),
        ("node-1:1", "node-1:1"),
        ("fd00:10::4:9769", "[fd00:10::4]:9769"),
        ("::1:9769", "[::1]:9769"),
        ("[::1]:9769", "[::1]:9769"),
        ("off", "off"),
    ],
)
def test_an_address_may_be_given_without_brackets(given: str, means: str) -> None:
    assert build_parser().parse_args(["run", "--listen", given]).listen == means


@pytest.mark.parametrize("given", ["", ":9769", "9769", "10.0.0.4", "10.0.0.4:65536", "fd00::g:1", "::1", "[::1"])
def test_what_agent_listen_cannot_be_is_rejected_with_the_same_words(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["run", "--listen", given])
    assert ended.value.code == 2
    expected = f'argument --listen: expected ADDRESS:PORT or off; got "{given}"\n'
    assert capsys.readouterr().err.endswith(expected)


@pytest.mark.skipif(sys.platform == "win32", reason="there a reload is asked of the service")
def test_the_option_counts_more_than_the_policy_also_after_a_reload(agent: Agent) -> None:
    address = f"127.0.0.1:{free_port()}"
    agent.write_policy(agent={"listen": "off"})
    agent.start("--listen", address)
    assert agent.wait_log("agent started")["listen"] == address
    agent.write_policy(agent={"listen": "127.0.0.1:1", "healthy_within": "5m"})
    agent.reload()
    agent.wait_log("the policy file was read again")
    status, text = agent.get("/status")
    assert status == 200
    assert json.loads(text)["policy"]["needs_restart"] == []


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")
def test_the_pages_are_served_on_an_ipv6_address_without_brackets(agent: Agent) -> None:
    port = free_port()
    agent.write_policy()
    agent.start("--listen", f"::1:{port}", is_awaited=False)
    agent.wait_log("agent started", listen=f"[::1]:{port}")


def test_warnings_are_about_the_address_of_the_option(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"

    def warnings(in_policy: str, option: str | None) -> list[str]:
        policy.write_text(f"agent: {{listen: '{in_policy}'}}\n")
        loaded = policy_file(policy, listen=option).load()
        return [problem.path for problem in loaded.warnings]

    assert warnings("127.0.0.1:9769", None) == []
    assert warnings("127.0.0.1:9769", "10.0.0.4:9769") == ["agent.listen"]
    assert warnings("0.0.0.0:9769", None) == ["agent.listen"]
    assert warnings("0.0.0.0:9769", "127.0.0.1:9769") == []


@pytest.mark.skipif(sys.platform == "win32", reason="there a reload is asked of the service")
def test_after_a_reload_the_keys_that_need_a_restart_are_known(agent: Agent, tmp_path: Path) -> None:
    def hash_of_policy() -> str:
        return hashlib.sha256(agent.config.read_bytes()).hexdigest()

    agent.write_policy()
    agent.start()
    assert keys_for_restart(agent.state_dir, hash_of_policy()) == ()
    agent.write_policy(agent={"listen": "off"})
    agent.reload()
    assert keys_for_restart(agent.state_dir, hash_of_policy()) == ("agent.listen",)
    # No agent is where a new policy has the state: the one that runs has it where it was.
    assert keys_for_restart(tmp_path / "elsewhere", hash_of_policy()) == ("agent.state_dir",)
