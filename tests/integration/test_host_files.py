"""Findings of ``check`` and of each start about unsafe files, and about hooks that this system would not start."""

import re
import sys
from pathlib import Path

import pytest

from scheduled_events_agent import host
from scheduled_events_agent.cli.config import load_policy
from scheduled_events_agent.hooks.preflight import check_machine, problems
from scheduled_events_agent.policy.load import LoadedPolicy


@pytest.fixture(autouse=True)
def _another_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(name, str(tmp_path / "temporary"))


def problems_here(loaded: LoadedPolicy) -> list[str]:
    return [str(problem) for problem in problems(loaded, check_machine(loaded, is_root=host.is_privileged()))]


def _warnings(tmp_path: Path, policy: str) -> list[str]:
    path = tmp_path / "policy.yaml"
    path.write_text(policy, encoding="utf-8")
    return [line.removeprefix(f"{path}:") for line in problems_here(load_policy(path))]


def _policy(tmp_path: Path, hook: str = "") -> str:
    hooks = f"rules: [{{name: all, prepare: [drain], approve: when-prepared}}]\nhooks: {{drain: {hook}}}\n"
    return f"agent: {{state_dir: '{tmp_path / 'state'}'}}\n" + (hooks if hook else "")


def test_a_policy_with_nothing_exposed_has_no_warnings(tmp_path: Path) -> None:
    assert _warnings(tmp_path, _policy(tmp_path)) == []


def test_a_state_directory_on_the_temporary_disk_is_reported(tmp_path: Path) -> None:
    (tmp_path / "DATALOSS_WARNING_README.txt").touch()
    state = tmp_path / "state"
    told = f"{state} is on Azure's temporary disk {tmp_path}, which may be empty after an event"
    assert _warnings(tmp_path, _policy(tmp_path)) == [f"1: warning: agent.state_dir: {told}"]


def test_a_state_directory_that_the_system_clears_is_reported(tmp_path: Path) -> None:
    place = tmp_path / "temporary"
    told = f"{place / 'state'} is in a directory that the system clears: a reboot may lose the state"
    assert f"1: warning: agent.state_dir: {told}" in _warnings(tmp_path, _policy(place))
    assert _warnings(tmp_path, _policy(tmp_path)) == []


@pytest.mark.skipif(sys.platform == "win32", reason="modes are Linux's")
def test_files_that_others_could_change_or_read_are_reported(tmp_path: Path) -> None:
    state, scripts = tmp_path / "state", tmp_path / "scripts"
    state.mkdir(mode=0o755)
    scripts.mkdir()
    script = scripts / "drain.sh"
    script.touch()
    script.chmod(0o777)
    warnings = _warnings(tmp_path, _policy(tmp_path, f"{{run: [/bin/sh, {script}]}}"))
    danger = "and the agent acts on what it finds there"
    label = "" if host.is_privileged() else "warning: "
    assert warnings == [
        (
            f"1: warning: agent.state_dir: {state} should be for the agent's account alone; it is open to others: "
            f"if it is the agent's own, chmod 700 {state}"
        ),
        f"3: {label}hooks.drain.run: {script} can be changed by every account, {danger}: chmod go-w {script}",
    ]
    (tmp_path / "policy.yaml").chmod(0o666)
    path = tmp_path / "policy.yaml"
    assert problems_here(load_policy(path))[0] == (
        f"{path}: {label}{path} can be changed by every account, {danger}: chmod go-w {path}"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="there a path is a name of the other system")
def test_a_name_that_is_too_long_for_a_file_is_reported_in_advance(tmp_path: Path) -> None:
    name = "/" + "x" * 300
    assert _warnings(tmp_path, _policy(tmp_path, f"{{run: [{name}], cwd: {name}}}")) == [
        f"3: warning: hooks.drain.cwd: {name} is not a directory on this machine",
        f"3: warning: hooks.drain.run: {name} does not exist",
    ]
    (warning,) = _warnings(tmp_path, _policy(tmp_path, f"{{run: ['/bin/echo {name}']}}"))
    assert warning.endswith("write [/bin/echo, ...], each argument an item of its own, or use shell")


@pytest.mark.skipif(sys.platform != "win32", reason="Linux starts any of these, or says why not by itself")
@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("drain.cmd", ", 'fine', '%PATH%'", "cannot pass argument 2 safely"),
        ("drain.vbs", "", "{file} is no program on Windows"),
    ],
)
def test_a_hook_that_windows_would_not_start_is_reported_in_advance(
    tmp_path: Path, name: str, more: str, expected: str
) -> None:
    file = tmp_path / name
    file.touch()
    (warning,) = _warnings(tmp_path, _policy(tmp_path, f"{{run: ['{file}'{more}]}}"))
    assert warning.startswith(f"3: warning: hooks.drain.run: {expected.format(file=file)}")


NO_FIRST_LINE = "it has no first line #!: name the interpreter in run"
BAD_END = "its first line ends with a carriage return: save it with Unix line ends"
UTF_16 = "it is UTF-16: save it as UTF-8"


def elf(machine: int) -> bytes:
    """The beginning of a program for a kind of processor, as the header of ELF numbers it."""
    return b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\0" + machine.to_bytes(2, "little") + bytes(44)


def own_machine() -> int:
    return int.from_bytes(Path(sys.executable).read_bytes()[18:20], "little")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows goes by the ending of the name")
@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"#!/bin/sh\r\ntrue\r\n", BAD_END),
        (b"#!/bin/sh -e\r\n", BAD_END),
        (b"#!/no/such/interpreter -x\n", "its interpreter /no/such/interpreter does not exist"),
        (b"#!/usr/bin/env python9\n", "its interpreter python9 is not found in PATH"),
        (b"#!/usr/bin/env -S python9 -u\n", "its interpreter python9 is not found in PATH"),
        (b"echo hello\n", NO_FIRST_LINE),
        (b"\xef\xbb\xbf#!/bin/sh\n", NO_FIRST_LINE),
        (b"#!\n", NO_FIRST_LINE),
        (b"", NO_FIRST_LINE),
        (b"#! /bin/sh -e\n", None),
        (b"#!/usr/bin/env sh\n", None),
        (b"#!/usr/bin/env -S sh -e\n", None),
        (b"#!/usr/bin/env -i sh\n", None),
        (b"\x7fELF\x02\x01\x01\0", None),
        (b"#!/bin/sh\recho hello", BAD_END),
        ("#!/bin/sh\necho hello\n".encode("utf-16"), UTF_16),
        ("#!/bin/sh\necho hello\n".encode("utf-16-le"), UTF_16),
        (bytes(4096), "there is nothing in it but NUL bytes: write it again"),
        (elf(243), "it is a program for RISC-V, and this machine has .*"),
        (elf(own_machine()), None),
    ],
)
def test_a_script_that_could_not_start_is_reported_in_advance(
    tmp_path: Path, content: bytes, fault: str | None
) -> None:
    file = tmp_path / "drain"
    file.write_bytes(content)
    file.chmod(0o755)
    warnings = _warnings(tmp_path, _policy(tmp_path, f"{{run: [{file}]}}"))
    assert len(warnings) == (1 if fault else 0)
    for warning in warnings:
        assert re.fullmatch(f"3: warning: hooks.drain.run: {re.escape(str(file))}: {fault}", warning)


@pytest.mark.skipif(sys.platform != "win32", reason="a shell of Linux takes any lines")
def test_a_shell_text_of_several_lines_is_reported_in_advance(tmp_path: Path) -> None:
    (warning,) = _warnings(tmp_path, _policy(tmp_path, '{shell: "one\\ntwo"}'))
    assert warning.startswith("3: warning: hooks.drain.shell: cmd would run only the first")
