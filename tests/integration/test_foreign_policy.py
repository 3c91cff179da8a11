"""Root's commands and a policy of another account: see "Files that say what is done" in docs/security.md."""

import argparse
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scheduled_events_agent.cli import build_parser, doctor, main
from scheduled_events_agent.imds.client import resolve_endpoint

if sys.platform == "win32":
    pytest.skip("owners as Linux has them", allow_module_level=True)
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")

STRANGER = 54321
POLICY = """\
rules: [{name: all, prepare: [drain], approve: when-prepared}]
hooks: {drain: {shell: 'exit 0'}}
imds: {endpoint: 'http://127.0.0.1:PORT'}
agent: {listen: '127.0.0.1:1', state_dir: 'DIR/state', web_config: 'DIR/web.yml'}
notify: [{name: ops, to: 'http://127.0.0.1:PORT/', headers: {Authorization: {file: 'DIR/token'}}}]
fleet:
  group: web
  table: https://acme.table.core.windows.net/vms
  max_events: 1
  credential: {sas_file: 'DIR/sas'}
  proxy: http://127.0.0.1:PORT
"""
NAMED = ("token", "sas", "web.yml")

# What root may do with such a file: every command that takes --config, by its words.
REJECTING = [["run"], ["notify", "test"], ["fleet", "status"], ["fleet", "release", "1"], ["doctor"]]
READING = [
    ["explain", "DIR/event.json", "--vm", "vm-1"],
    ["history"],
    *([action, "1"] for action in ("approve", "hold", "release", "retry", "resolve")),
]
FOR_THE_SERVICE = {"service"}  # the agent that it starts is what reads the file

_opened: set[str] | None = None
"""Paths that this process has opened; None while no test wants to know."""


def _note_opened(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _opened is not None and isinstance(arguments[0], str | os.PathLike):
        _opened.add(os.fspath(arguments[0]))


sys.addaudithook(_note_opened)


@contextmanager
def noting_opened() -> Iterator[set[str]]:
    global _opened  # noqa: PLW0603 - an audit hook stays for ever, and has no other place
    _opened = set()
    try:
        yield _opened
    finally:
        _opened = None


class Listener:
    """Counts the connections that are made to it, and closes each."""

    def __init__(self) -> None:
        self.connections = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection:
                if connection.recv(64) == b"end":
                    return
                self.connections += 1

    def close(self) -> int:
        """Close it when every connection so far is counted; returns their number."""
        with socket.create_connection(("127.0.0.1", self.port), 10) as last:
            last.sendall(b"end")
            self._thread.join(30)
        self._socket.close()
        return self.connections


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Listener:
    def away_from_the_machines_own(endpoint: str) -> str:
        return "http://127.0.0.1:1" if endpoint == "auto" else resolve_endpoint(endpoint)

    monkeypatch.setattr(doctor, "resolve_endpoint", away_from_the_machines_own)
    monkeypatch.setattr(doctor, "_SPACING_SECONDS", 0.01)
    monkeypatch.delenv("SUDO_USER", raising=False)
    return Listener()


@pytest.fixture
def policy(tmp_path: Path, listener: Listener) -> Path:
    (tmp_path / "token").write_text("Bearer of-root-alone\n")
    (tmp_path / "sas").write_text("sv=1&sig=of-root-alone&sp=raud\n")
    (tmp_path / "web.yml").write_text("root:*:20785:0:99999:7:::\n")
    (tmp_path / "event.json").write_text('{"EventId": "1", "EventType": "Reboot", "Resources": ["vm-1"]}')
    for name in NAMED:
        (tmp_path / name).chmod(0o600)
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY.replace("PORT", str(listener.port)).replace("DIR", str(tmp_path)))
    return file


def words_of(command: list[str], policy: Path) -> list[str]:
    return [*(word.replace("DIR", str(policy.parent)) for word in command), "--config", str(policy)]


@pytest.mark.parametrize("command", REJECTING, ids=" ".join)
def test_root_sends_and_reads_nothing_that_a_policy_of_another_account_names(
    command: list[str], policy: Path, listener: Listener, capsys: pytest.CaptureFixture[str]
) -> None:
    os.chown(policy, STRANGER, STRANGER)
    with noting_opened() as opened:
        code = main(words_of(command, policy))
    out, err = capsys.readouterr()
    assert listener.close() == 0
    assert str(policy) in opened
    assert opened.isdisjoint(str(policy.parent / name) for name in NAMED)
    assert not (policy.parent / "state").exists()
    reason = f"{policy}: {policy} can be changed by its owner, uid {STRANGER}"
    assert reason in re.sub(r"\s+", " ", out + err)
    assert code == (1 if command == ["doctor"] else 2)


def test_doctor_names_the_checks_that_it_does_not_make(
    policy: Path, listener: Listener, capsys: pytest.CaptureFixture[str]
) -> None:
    os.chown(policy, STRANGER, STRANGER)
    assert main(words_of(["doctor"], policy)) == 1
    listener.close()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[1] for row in rows if row[2:] == ["waits", "for", "the", "check", "permissions"]] == [
        "policy", "hooks", "secrets", "fleet", "kubernetes", "notifications",
    ]  # fmt: skip


@pytest.mark.parametrize("command", READING, ids=lambda words: words[0])
def test_what_only_reads_the_policy_answers_for_every_owner_alike(
    command: list[str], policy: Path, listener: Listener, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for owner in (0, STRANGER):
        os.chown(policy, owner, owner)
        code = main(words_of(command, policy))
        out, err = capsys.readouterr()
        answers.append((code, re.sub(r"Time: \S+ \S+", "", out), err))
    assert answers[0] == answers[1]
    assert listener.close() == 0


def test_status_names_the_owner_as_what_keeps_an_agent_from_starting(
    policy: Path, listener: Listener, capsys: pytest.CaptureFixture[str]
) -> None:
    os.chown(policy, STRANGER, STRANGER)
    with noting_opened() as opened:
        assert main(words_of(["status"], policy)) == 1
    assert opened.isdisjoint(str(policy.parent / name) for name in NAMED)
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "No agent runs: the policy file is rejected: other accounts could change it" in out
    assert f"{policy} can be changed by its owner, uid {STRANGER}" in out
    assert listener.close() == 0


def test_check_reports_the_owner_and_sends_nothing(
    policy: Path, listener: Listener, capsys: pytest.CaptureFixture[str]
) -> None:
    os.chown(policy, STRANGER, STRANGER)
    assert main(words_of(["check"], policy)) == 2
    assert f"{policy}: {policy} can be changed by its owner, uid {STRANGER}" in capsys.readouterr().out
    assert listener.close() == 0


def test_every_command_that_takes_a_policy_is_tried_here() -> None:
    tried = {words[0] for words in (*REJECTING, *READING, ["status"], ["check"])}
    assert commands_with_config(build_parser()) == tried | FOR_THE_SERVICE


def commands_with_config(parser: argparse.ArgumentParser) -> set[str]:
    """The commands that have the option themselves, or in one of their actions."""
    found = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                if "--config" in command._option_string_actions or commands_with_config(command):
                    found.add(name)
    return found
