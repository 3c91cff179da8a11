"""Commands whose output cannot be written, or whose reader has gone: all of them do the same."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from scheduled_events_agent import host
from scheduled_events_agent.cli.output import READER_GONE
from scheduled_events_agent.store import Store

if sys.platform == "win32":
    pytest.skip("redirections as a shell of Unix makes them", allow_module_level=True)

COMMANDS = (
    "--help", "--version", "check", "check --json", "check --schema", "check --help", "explain document.json",
    "status --state-dir state", "history --state-dir state", "history --state-dir state --json", "simulate --list",
    "simulate --json --now --speed 100 scenario.yaml",
)  # fmt: skip
TIMEOUT_SECONDS = 60.0

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files that the commands read: a policy, a document, a scenario, and the state of an agent that has run."""
    (tmp_path / "policy.yaml").write_text("agent: {mode: observe}\n", encoding="utf-8")
    (tmp_path / "document.json").write_text('{"DocumentIncarnation": 1, "Events": []}', encoding="utf-8")
    (tmp_path / "scenario.yaml").write_text("{timeline: [{at: 0s, event: {type: Reboot}}], ends: 1s}\n", "utf-8")
    host.create_private_dir(tmp_path / "state")
    now = datetime.now(UTC)
    store = Store.open(tmp_path / "state", now)
    store.record("agent_started", "version 0.1.0, mode act", now)
    store.close()
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Run:
    """The command in a process of its own, with the streams as a shell redirects them; exit code and errors."""

    def run_command(words: str, redirection: str = "", *, unbuffered: str = "", **streams: Any) -> tuple[int, str]:
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": unbuffered,
            "SCHEDULED_EVENTS_AGENT_CONFIG": str(folder / "policy.yaml"),
        }
        done = subprocess.run(
            ["/bin/sh", "-c", f'exec "$0" -m scheduled_events_agent {words} {redirection}', sys.executable],
            cwd=folder,
            env=environment,
            timeout=TIMEOUT_SECONDS,
            check=False,
            **{"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, **streams},
        )
        return done.returncode, (done.stderr or b"").decode()

    return run_command


@pytest.fixture
def unread_pipe() -> IO[bytes]:
    """A pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "wb")


@pytest.mark.parametrize("words", COMMANDS)
def test_output_that_cannot_be_written_is_one_line_and_a_failure(
    run: Run, unread_pipe: IO[bytes], words: str
) -> None:
    with unread_pipe:
        assert run(words, ">/dev/full") == (1, "scheduled-events-agent: cannot write: No space left on device\n")
        assert run(words, ">&-") == (1, "scheduled-events-agent: cannot write: standard output is closed\n")
        assert run(words, stdout=unread_pipe) == (READER_GONE, "")


@pytest.mark.parametrize("words", ["check --strct", "status --state-dir nowhere", "simulate nowhere.yaml"])
def test_a_closed_error_output_ends_a_command_silently(run: Run, unread_pipe: IO[bytes], words: str) -> None:
    with unread_pipe:
        assert run(words, stderr=unread_pipe) == (READER_GONE, "")


def test_output_without_a_buffer_fails_in_the_same_way(run: Run, unread_pipe: IO[bytes]) -> None:
    with unread_pipe:
        code, errors = run("check", ">/dev/full", unbuffered="1")
        assert (code, errors) == (1, "scheduled-events-agent: cannot write: No space left on device\n")
        assert run("check", stdout=unread_pipe, unbuffered="1") == (READER_GONE, "")


def test_a_closed_output_ends_a_printing_command() -> None:
    command = [sys.executable, "-m", "scheduled_events_agent", "simulate", "--json", "--control", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            _, control, _ = (json.loads(process.stdout.readline()) for _ in range(3))
            process.stdout.close()
            with contextlib.suppress(httpx.HTTPError):  # it may end before it answers
                httpx.post(f"{control['url']}schedule", json={"type": "Reboot"})  # which is printed
            assert process.wait(TIMEOUT_SECONDS) == READER_GONE
            assert process.stderr.read() == ""
        finally:
            process.kill()
