"""Small files that users name: a named pipe in the place of one keeps nothing waiting."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scheduled_events_agent import host
from scheduled_events_agent.hooks.output import secrets_of
from scheduled_events_agent.policy import Hook

if sys.platform == "win32":
    pytest.skip("named pipes as Linux has them", allow_module_level=True)

TARGET = "notify: [{name: ops, to: 'https://127.0.0.1:1/', "


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A named pipe into which no process writes."""
    path = tmp_path / "pipe"
    os.mkfifo(path, mode=0o700)
    return path


def check(policy: Path) -> tuple[int, str]:
    """The output of ``check``, run in a process of its own: a thread that hangs could not be ended."""
    command = [sys.executable, "-m", "scheduled_events_agent", "check", "--config", str(policy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 2048)
    assert host.read_small_file(file, 2048) == b"x" * 2048
    with pytest.raises(host.HostError) as caught:
        host.read_small_file(file, 1024)
    assert str(caught.value) == f"{file}: expected at most 1 KiB; it is larger"


@pytest.mark.parametrize("path", ["/dev/null", "PIPE"])
def test_only_a_regular_file_is_read(pipe: Path, path: str) -> None:
    path = path.replace("PIPE", str(pipe))
    with pytest.raises(host.HostError) as caught:
        host.read_small_file(Path(path), 1024)
    assert str(caught.value) == f"{path}: is not a regular file"


def test_secrets_of_hooks_are_removed_from_output_whatever_surrounds_them(
    tmp_path: Path, pipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("s3cret-of-hooks\n")
    (tmp_path / "folder").mkdir()
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert pipe.is_fifo()
    assert secrets_of(Hook(shell="true")) == [b"s3cret-of-hooks"]


def test_check_rejects_a_policy_that_is_a_named_pipe(pipe: Path) -> None:
    assert check(pipe) == (2, f"{pipe}: is not a regular file\nnot valid: 1 error\n")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("notify: [{name: ops, to: {file: 'PIPE'}}]", "notify[0]: to"),
        (TARGET + "headers: {X-Key: {file: 'PIPE'}}}]", "notify[0]: headers.X-Key"),
        (TARGET + "format: 'PIPE'}]", "notify[0]: format"),
        (TARGET + "ca_file: 'PIPE'}]", "notify[0]: ca_file"),
        ("agent: {web_config: 'PIPE'}", "agent.web_config: without it no pages are served"),
        ("hooks: {x: {run: ['PIPE']}}", "hooks.x.run"),
    ],
)
def test_check_warns_of_a_named_pipe(tmp_path: Path, pipe: Path, text: str, where: str) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(text.replace("PIPE", str(pipe)))
    code, told = check(policy)
    assert code == 0
    (line,) = [line for line in told.splitlines() if "is not a regular file" in line]
    assert line.startswith(f"{policy}:1: warning: {where}: {pipe}")


@pytest.mark.parametrize("key", ["cert_file", "key_file", "client_ca_file"])
def test_check_warns_of_a_named_pipe_among_the_files_of_the_pages(tmp_path: Path, pipe: Path, key: str) -> None:
    files = {"cert_file": tmp_path / "cert", "key_file": tmp_path / "key", "client_ca_file": tmp_path / "ca"}
    for file in files.values():
        file.touch()
    files[key] = pipe
    web = tmp_path / "web.yaml"
    keys = ", ".join(f"{name}: '{file}'" for name, file in files.items())
    web.write_text(f"tls_server_config: {{{keys}, client_auth_type: RequireAndVerifyClientCert}}\n")
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"agent: {{web_config: '{web}'}}\n")
    code, told = check(policy)
    assert code == 0
    assert f"tls_server_config.{key}: {pipe}: is not a regular file" in told


def test_check_rejects_a_signature_that_is_a_named_pipe(tmp_path: Path, pipe: Path) -> None:
    policy = tmp_path / "policy.yaml"
    table = "https://acme.table.core.windows.net/vms"
    policy.write_text(
        f"fleet: {{group: g, table: '{table}', max_events: 1, credential: {{sas_file: '{pipe}'}}}}\n"
    )
    code, told = check(policy)
    assert code == 2
    assert f"{policy}:1: fleet.credential.sas_file: {pipe}: is not a regular file\n" in told


def test_a_named_pipe_is_no_scenario_and_is_not_waited_for(pipe: Path) -> None:
    command = [sys.executable, "-m", "scheduled_events_agent", "simulate", "--check", str(pipe)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr == f"scheduled-events-agent: scenario {pipe}: is not a regular file\n"
