"""Files that the agent trusts because it runs them, and data that it keeps private: see docs/security.md."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from problems import as_lines

from scheduled_events_agent import host
from scheduled_events_agent.cli import doctor, main
from scheduled_events_agent.cli.config import load_policy, policy_file
from scheduled_events_agent.daemon.policy_reader import machine_warnings, read_policy
from scheduled_events_agent.fleet.backend import BackendError
from scheduled_events_agent.fleet.credentials import read_sas
from scheduled_events_agent.hooks.preflight import check_machine, find_hook_write_risk
from scheduled_events_agent.hooks.run import HookResult, HookRun
from scheduled_events_agent.host import processes
from scheduled_events_agent.kubernetes.account import AccountError, find_account
from scheduled_events_agent.notifications import SAMPLE, NotificationError, deliver
from scheduled_events_agent.policy import Hook
from scheduled_events_agent.policy.load import ConfigError
from scheduled_events_agent.policy.settings import FleetCredential
from scheduled_events_agent.policy.typed_yaml import Problem

if sys.platform == "win32":
    pytest.skip("owners, modes and links as Linux has them", allow_module_level=True)

CHECKOUT = Path(__file__).resolve().parents[2]
NOBODY = 65534  # an account and a group that are neither ours nor the system's
SOMEBODY = 54321  # one that has no name

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def danger(place: Path, who: str, way_out: str) -> str:
    return f"{place} can be changed by {who}, and the agent acts on what it finds there: {way_out}"


def set_privileged(monkeypatch: pytest.MonkeyPatch, is_root: bool) -> None:
    for module in ("host", "host.small_files"):
        monkeypatch.setattr(f"scheduled_events_agent.{module}.is_privileged", lambda: is_root)


def _open_parents(tmp_path: Path) -> None:
    """Let every account pass through the directories above."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.name.startswith(("pytest-", "popen-", "test_")):
            folder.chmod(0o755)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """a/b/file, which is root's (or ours) alone."""
    path = tmp_path / "a" / "b" / "file"
    path.parent.mkdir(parents=True, mode=0o755)
    path.write_text("#!/bin/sh\necho ran\n", encoding="utf-8")
    path.chmod(0o755)
    return path


# --- who may change a file


def test_files_that_only_root_and_this_account_can_change_are_accepted(file: Path) -> None:
    assert host.find_write_risk(file) is None
    assert host.find_write_risk(Path("/bin/sh")) is None


def test_a_missing_file_is_left_to_other_checks(tmp_path: Path) -> None:
    assert host.find_write_risk(tmp_path / "missing") is None
    (tmp_path / "circle").symlink_to("circle")
    assert host.find_write_risk(tmp_path / "circle") is None


@pytest.mark.parametrize("level", [0, 1, 2], ids=["file", "directory", "directory above"])
@pytest.mark.parametrize(
    ("mode", "group", "who"),
    [(0o777, 0, "every account"), (0o775, NOBODY, f"the group {NOBODY}"), (0o775, 0, None), (0o755, NOBODY, None)],
)
@needs_root
def test_every_parent_directory_is_checked(file: Path, level: int, mode: int, group: int, who: str | None) -> None:
    place = (file, *file.parents)[level]
    os.chown(place, 0, group)
    place.chmod(mode)
    assert host.find_write_risk(file) == (danger(place, who, f"chmod go-w {place}") if who else None)


@pytest.mark.parametrize("level", [0, 1, 2], ids=["file", "directory", "directory above"])
@needs_root
def test_an_owner_can_change_whatever_the_mode_says(file: Path, level: int) -> None:
    place = (file, *file.parents)[level]
    os.chown(place, SOMEBODY, 0)
    place.chmod(0o555)
    assert host.find_write_risk(file) == danger(place, f"its owner, uid {SOMEBODY}", f"chown root {place}")


@needs_root
def test_a_link_is_as_safe_as_its_directory_and_its_target(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "links" / "link"
    link.parent.mkdir()
    link.symlink_to("../a/b/../b/file")
    assert host.find_write_risk(link) is None

    link.parent.chmod(0o777)
    assert host.find_write_risk(link) == danger(link.parent, "every account", f"chmod go-w {link.parent}")
    link.parent.chmod(0o755)

    file.parent.chmod(0o777)
    found = host.find_write_risk(link)
    assert found is not None
    assert re.fullmatch(r"\S+/b can be changed by every account, .*", found)
    file.parent.chmod(0o755)

    os.chown(link, SOMEBODY, SOMEBODY, follow_symlinks=False)
    assert host.find_write_risk(link) == danger(link, f"its owner, uid {SOMEBODY}", f"chown -h root {link}")


@needs_root
def test_a_link_to_a_parent_directory_is_followed_too(file: Path, tmp_path: Path) -> None:
    (tmp_path / "way").symlink_to(file.parent)
    path = tmp_path / "way" / "file"
    assert host.find_write_risk(path) is None
    file.parents[1].chmod(0o777)
    assert host.find_write_risk(path) == danger(file.parents[1], "every account", f"chmod go-w {file.parents[1]}")


@needs_root
def test_in_a_sticky_directory_the_owner_of_the_entry_decides(file: Path) -> None:
    file.parent.chmod(0o1777)  # as /tmp: others can neither remove nor rename what is not theirs
    assert host.find_write_risk(file) is None
    os.chown(file, SOMEBODY, SOMEBODY)
    assert host.find_write_risk(file) == danger(file, f"its owner, uid {SOMEBODY}", f"chown root {file}")


@needs_root
def test_the_account_of_a_hook_and_its_own_group_may_change_its_files(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import grp
    import pwd

    monkeypatch.setattr(pwd, "getpwnam", lambda _: pwd.struct_passwd(("x", "", SOMEBODY, SOMEBODY, "", "/", "")))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: pwd.struct_passwd(("x", "", SOMEBODY, SOMEBODY, "", "/", "")))
    os.chown(file, SOMEBODY, SOMEBODY)
    file.chmod(0o775)
    monkeypatch.setattr(grp, "getgrgid", lambda _: grp.struct_group(("x", "", SOMEBODY, [])))
    assert host.find_write_risk(file, "x") is None
    assert host.find_write_risk(file) == danger(file, f"its owner, uid {SOMEBODY}", f"chown root {file}")

    monkeypatch.setattr(grp, "getgrgid", lambda _: grp.struct_group(("users", "", SOMEBODY, [])))
    assert host.find_write_risk(file, "x") == danger(file, f"the group {SOMEBODY}", f"chmod go-w {file}")


@needs_root
def test_every_owner_of_the_agents_code_is_trusted(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = file.with_name("code.py")
    code.touch()
    os.chown(code, SOMEBODY, SOMEBODY)
    os.chown(file, SOMEBODY, SOMEBODY)
    assert host.find_write_risk(file) is not None
    monkeypatch.setattr("scheduled_events_agent.host.linux.files.__file__", str(code))
    assert host.find_write_risk(file) is None


@needs_root
def test_an_access_list_with_write_access_is_reported(file: Path) -> None:
    # Version 2; owner rwx, uid 65534 rwx, group r-x, mask rwx, others r-x.
    entries = [(1, 7, 2**32 - 1), (2, 7, NOBODY), (4, 5, 2**32 - 1), (16, 7, 2**32 - 1), (32, 5, 2**32 - 1)]
    data = (2).to_bytes(4, "little") + b"".join(
        tag.to_bytes(2, "little") + bits.to_bytes(2, "little") + number.to_bytes(4, "little")
        for tag, bits, number in entries
    )
    try:
        os.setxattr(file, "system.posix_acl_access", data)
    except OSError as error:
        pytest.skip(f"no access lists here: {error.strerror}")
    assert host.find_write_risk(file) == danger(
        file, "accounts in its access list", f"setfacl -b {file} && chmod go-w {file}"
    )


@needs_root
def test_a_read_only_mount_cannot_be_changed(file: Path) -> None:
    file.parent.chmod(0o777)  # as Kubernetes makes the directory of a ConfigMap
    place = file.parent
    code = "from pathlib import Path; from scheduled_events_agent import host; "
    code += f"print(host.find_write_risk(Path({str(file)!r})))"
    script = f'mount --bind "{place}" "{place}" && mount -o remount,ro,bind "{place}" && exec "$0" -c "$1"'
    command = ["unshare", "-m", "sh", "-c", script, sys.executable, code]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no mount can be made here: {done.stderr}")
    assert done.stdout == "None\n"
    assert host.find_write_risk(file) == danger(place, "every account", f"chmod go-w {place}")


@needs_root
def test_the_owner_of_the_agents_own_code_is_trusted_but_not_with_that_code(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(file, SOMEBODY, 0)
    monkeypatch.setattr("scheduled_events_agent.host.linux.files.__file__", str(file))
    assert host.find_write_risk(file) is None
    told = danger(file, f"its owner, uid {SOMEBODY}", f"chown root {file}")
    assert host.find_write_risk(file, is_own_code=True) == told


@needs_root
def test_an_account_without_read_access_can_still_detect_a_temporary_disk(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    os.seteuid(NOBODY)
    try:
        assert processes.temporary_disk(tmp_path / "state") is None
    finally:
        os.seteuid(0)


@needs_root
@pytest.mark.parametrize("first", ["", "#!{place}/interpreter\n"], ids=["program", "interpreter"])
def test_a_hook_whose_directory_the_account_may_not_enter_is_a_warning(tmp_path: Path, first: str) -> None:
    """As any account may run ``check``."""
    closed = tmp_path / "closed"
    closed.mkdir()
    hook = (tmp_path if first else closed) / "drain"
    hook.write_text(first.format(place=closed), encoding="utf-8")
    hook.chmod(0o755)
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        f"rules: [{{name: all, prepare: [drain], approve: when-prepared}}]\nhooks: {{drain: {{run: [{hook}]}}}}\n",
        encoding="utf-8",
    )
    _open_parents(tmp_path)
    closed.chmod(0o700)
    found = _hook_warnings_for_nobody(policy)
    what = f"{hook}: its interpreter {closed}/interpreter" if first else str(hook)
    assert found == [f"{what} is in a directory that this account may not enter"]


def _hook_warnings_for_nobody(policy: Path) -> list[str]:
    loaded = load_policy(policy)
    os.seteuid(NOBODY)
    try:
        return [one.message for one in check_machine(loaded, is_root=False) if one.subject == "hook"]
    finally:
        os.seteuid(0)


@needs_root
def test_a_working_directory_that_the_account_may_not_see_is_a_warning(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "rules: [{name: all, prepare: [drain], approve: when-prepared}]\n"
        f"hooks: {{drain: {{shell: 'true', cwd: {closed}/work}}}}\n",
        encoding="utf-8",
    )
    _open_parents(tmp_path)
    (closed / "work").mkdir(parents=True)
    closed.chmod(0o700)
    found = _hook_warnings_for_nobody(policy)
    assert found == [f"{closed}/work is in a directory that this account may not enter"]


@needs_root
@pytest.mark.parametrize("wrong", ["program", "cwd", "cwd's parent"])
def test_a_hook_that_the_account_may_not_reach_fails_with_a_reason(tmp_path: Path, wrong: str) -> None:
    """As an agent without privileges would start it."""
    closed = tmp_path / "closed"
    (closed / "work").mkdir(parents=True)
    (closed / "drain").symlink_to("/bin/true")
    _open_parents(tmp_path)
    closed.chmod(0o700)
    no_entry = "this account may not enter the directory to run in"
    hook, detail = {
        "program": (Hook(run=(f"{closed}/drain",)), f"not executable: {closed}/drain"),
        "cwd": (Hook(run=("true",), cwd=f"{closed}"), f"{no_entry}: {closed}"),
        "cwd's parent": (Hook(run=("true",), cwd=f"{closed}/work"), f"{no_entry}: {closed}/work"),
    }[wrong]
    os.seteuid(NOBODY)
    try:
        result = HookRun("drain", hook, environment={}).run()
    finally:
        os.seteuid(0)
    assert (result.outcome, result.detail) == ("not_started", detail)


# --- what of a hook is looked at


def open_to_all(path: Path, text: str = "", mode: int = 0o777) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def test_a_program_is_checked_by_path_directory_or_search_path(tmp_path: Path) -> None:
    path = open_to_all(tmp_path / "drain")
    fault = danger(path, "every account", f"chmod go-w {path}")
    assert find_hook_write_risk(Hook(run=(str(path), "now"))) == fault
    assert find_hook_write_risk(Hook(run=("./drain",), cwd=str(tmp_path))) == danger(
        path, "every account", f"chmod go-w {path}"
    )
    assert find_hook_write_risk(Hook(run=("drain",), env={"PATH": f"/usr/bin:{tmp_path}"})) == fault
    assert find_hook_write_risk(Hook(run=("true",))) is None
    assert find_hook_write_risk(Hook(run=("no-such-program",))) is None


def test_the_interpreter_of_a_script_is_checked(tmp_path: Path) -> None:
    interpreter = open_to_all(tmp_path / "python")
    script = tmp_path / "drain"
    script.write_text(f"#! {interpreter} -I\n")
    assert find_hook_write_risk(Hook(run=(str(script),))) == danger(
        interpreter, "every account", f"chmod go-w {interpreter}"
    )


@pytest.mark.parametrize(
    ("run", "name", "mode", "is_code"),
    [
        (("/bin/cat", "{}"), "data", 0o666, False),
        (("/bin/cat", "{}"), "drain.py", 0o666, True),
        (("/usr/bin/env", "A=b", "{}"), "drain", 0o777, True),
        (("/bin/sh", "-e", "{}"), "drain", 0o666, True),
        (("/bin/sh", "/etc/passwd", "{}"), "data", 0o666, False),
        (("/bin/sh", "-e", "{}"), "missing", None, False),
    ],
)
def test_an_argument_counts_if_it_is_a_program_a_script_or_an_interpreters_file(
    tmp_path: Path, run: tuple[str, ...], name: str, mode: int | None, is_code: bool
) -> None:
    path = tmp_path / name
    if mode is not None:
        open_to_all(path, mode=mode)
    fault = danger(path, "every account", f"chmod go-w {path}")
    hook = Hook(run=tuple(word.format(path) for word in run))
    assert find_hook_write_risk(hook) == (fault if is_code else None)


def test_a_shell_line_is_not_parsed() -> None:
    assert find_hook_write_risk(Hook(shell="/tmp/anything")) is None


# --- what is done about it


@pytest.fixture
def exposed(file: Path, tmp_path: Path) -> tuple[Path, list[str]]:
    """A policy that everybody can write, with a hook in such a directory; and what is wrong."""
    file.parent.chmod(0o777)
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "rules: [{name: all, prepare: [drain], recover: [], approve: when-prepared}]\n"
        "agent: {listen: 'off'}\n"
        "hooks:\n"
        f"  drain: {{run: ['{file}']}}\n",
        encoding="utf-8",
    )
    policy.chmod(0o666)
    return policy, [
        f"{policy}: {danger(policy, 'every account', f'chmod go-w {policy}')}",
        f"{policy}:4: hooks.drain.run: {danger(file.parent, 'every account', f'chmod go-w {file.parent}')}",
    ]


@pytest.mark.parametrize("is_observing", [False, True])
def test_root_rejects_the_start_with_a_hint(
    exposed: tuple[Path, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_observing: bool,
) -> None:
    set_privileged(monkeypatch, True)
    policy, problems = exposed
    options = ["--observe"] if is_observing else []
    assert main(["run", "--config", str(policy), "--state-dir", str(tmp_path / "state"), *options]) == 2
    lines = map(json.loads, capsys.readouterr().err.splitlines())
    assert [(line["message"], line["reason"]) for line in lines] == [
        ("the agent cannot run", problem) for problem in problems
    ]
    assert not (tmp_path / "state").exists()


def test_check_reports_errors_to_root_and_warnings_to_others(
    exposed: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, problems = exposed
    set_privileged(monkeypatch, True)
    assert main(["check", "--config", str(policy)]) == 2
    assert capsys.readouterr().out.splitlines() == [*problems, "not valid: 2 errors"]
    assert main(["check", "--json", "--config", str(policy)]) == 2
    told = json.loads(capsys.readouterr().out)
    assert (told["valid"], as_lines(told["errors"], has_hints=False), told["warnings"]) == (False, problems, [])

    set_privileged(monkeypatch, False)
    assert main(["check", "--json", "--config", str(policy)]) == 0
    warnings = as_lines(json.loads(capsys.readouterr().out)["warnings"], has_hints=False)
    assert warnings == [problem.replace(": ", ": warning: ", 1) for problem in problems]


TARGET = "notify: [{name: ops, to: 'https://127.0.0.1:1/', "
EXCHANGE = {
    "notify[0].to.file": "notify: [{name: ops, to: {file: 'FILE'}}]",
    "notify[0].headers.X-Key.file": TARGET + "headers: {X-Key: {file: 'FILE'}}}]",
    "notify[0].format": TARGET + "format: 'FILE'}]",
    "notify[0].ca_file": TARGET + "ca_file: 'FILE'}]",
    "fleet.credential.sas_file": (
        "fleet: {group: g, table: 'https://acme.table.core.windows.net/vms', max_events: 1, "
        "credential: {sas_file: 'FILE'}}"
    ),
    "kubernetes.kubeconfig": "kubernetes: {kubeconfig: 'FILE'}",
}


@pytest.fixture(params=EXCHANGE)
def exchange(request: pytest.FixtureRequest, file: Path, tmp_path: Path) -> tuple[str, Path, str]:
    """The key of a file that is needed for an exchange, the policy that names it, and the fault of the file."""
    file.write_text("sv=1&sig=1&sp=raud", encoding="utf-8")
    file.chmod(0o666)
    policy = tmp_path / "policy.yaml"
    policy.write_text(EXCHANGE[request.param].replace("FILE", str(file)) + "\n", encoding="utf-8")
    return request.param, policy, danger(file, "every account", f"chmod go-w {file}")


def test_a_notify_or_fleet_file_is_an_error_for_root_and_a_warning_for_others(
    exchange: tuple[str, Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key, policy, fault = exchange
    set_privileged(monkeypatch, True)
    assert main(["check", "--json", "--config", str(policy)]) == 2
    assert as_lines(json.loads(capsys.readouterr().out)["errors"], has_hints=False) == [
        f"{policy}:1: {key}: {fault}"
    ]

    set_privileged(monkeypatch, False)
    assert main(["check", "--json", "--config", str(policy)]) == 0
    warnings = as_lines(json.loads(capsys.readouterr().out)["warnings"], has_hints=False)
    assert f"{policy}:1: warning: {key}: {fault}" in warnings


def test_an_agent_starts_with_an_insecure_file_but_does_not_reload(
    exchange: tuple[str, Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, path, fault = exchange
    set_privileged(monkeypatch, True)
    file = policy_file(path)
    settings = read_policy(file, lambda *_: None, is_start=True).settings
    assert settings.notify or settings.fleet
    with pytest.raises(ConfigError) as caught:
        read_policy(file, lambda *_: None)
    assert [*map(str, caught.value.problems)] == [f"{path}:1: {key}: {fault}"]


def test_an_action_that_needs_an_insecure_file_fails_with_the_reason(
    exchange: tuple[str, Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, path, fault = exchange
    set_privileged(monkeypatch, True)
    settings = load_policy(path).settings
    if settings.fleet is not None:
        assert isinstance(settings.fleet.credential, FleetCredential)
        assert settings.fleet.credential.sas_file is not None
        with pytest.raises(BackendError) as failed:
            read_sas(Path(settings.fleet.credential.sas_file))
        assert (failed.value.kind, str(failed.value)) == ("setup", fault)
        return
    if settings.kubernetes is not None and settings.kubernetes.kubeconfig:
        with pytest.raises(AccountError, match=re.escape(fault)):
            find_account(settings.kubernetes.kubeconfig, {})
        return
    with pytest.raises(NotificationError) as caught:
        deliver(settings.notify[0], SAMPLE)
    short = key.removeprefix("notify[0].").removesuffix(".file")
    assert (caught.value.kind, str(caught.value)) == ("setup", f"{short}: {fault}")


def test_doctor_fails_for_an_insecure_file_if_the_agent_is_root(
    exchange: tuple[str, Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path, fault = exchange
    loaded = load_policy(path)
    for is_root, verdict in ((True, "error"), (False, "warning")):
        set_privileged(monkeypatch, is_root)
        findings = [*check_machine(loaded, is_root=is_root)]
        found = doctor._check_permissions(loaded, findings, is_root_service=False)
        assert [(finding.state, finding.message) for finding in found] == [(verdict, fault)]


def test_insecure_endpoint_files_are_a_warning_and_used(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_privileged(monkeypatch, True)
    file.chmod(0o666)
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"agent: {{web_config: '{file}'}}\n", encoding="utf-8")
    assert main(["check", "--json", "--config", str(policy)]) == 0
    told = f"{policy}:1: warning: agent.web_config: {danger(file, 'every account', f'chmod go-w {file}')}"
    assert told in as_lines(json.loads(capsys.readouterr().out)["warnings"], has_hints=False)


def test_doctor_fails_if_one_reference_to_a_file_is_an_error(file: Path) -> None:
    file.parent.chmod(0o777)
    policy = file.parent / "policy.yaml"
    web_config = file.parent / "web.yml"
    web_config.touch()
    policy.write_text(f"agent: {{web_config: '{web_config}'}}\n", encoding="utf-8")
    loaded = load_policy(policy)
    findings = [*check_machine(loaded, is_root=True)]
    fault = danger(file.parent, "every account", f"chmod go-w {file.parent}")
    severities = [finding.severity for finding in findings if finding.message == fault]
    assert severities == ["error", "warning"]  # of the policy, and of the pages
    found = doctor._check_permissions(loaded, findings, is_root_service=False)
    assert [(finding.state, finding.message) for finding in found] == [("error", fault)]


def run_once(hook: Hook) -> HookResult:
    return HookRun("drain", hook, environment={}).run()


def test_a_hook_that_others_can_change_since_the_policy_was_read_is_not_started(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_privileged(monkeypatch, True)
    hook = Hook(run=(str(file),), attempts=2, retry_delay=0.0)
    assert (run_once(hook).outcome, run_once(hook).tail) == ("succeeded", "ran\n")
    file.chmod(0o777)
    result = run_once(hook)
    assert (result.outcome, result.attempts, result.exit_code, result.tail) == ("not_started", 2, None, "")
    assert result.detail == danger(file, "every account", f"chmod go-w {file}")
    file.chmod(0o755)
    assert run_once(hook).outcome == "succeeded"


# --- the state directory


def state_refusal(path: Path) -> str | None:
    """The error that root gets for the state directory; None if it is accepted."""
    try:
        host.create_private_dir(path)
    except host.HostError as error:
        return str(error)
    return None


def refused_state(path: Path, fault: str) -> str:
    way_out = "else name another directory with agent.state_dir"
    return f"{path}: expected a directory for this account alone; {fault}; {way_out}"


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize(("owner", "mode"), [(SOMEBODY, 0o755), (0, 0o777)])
@needs_root
def test_root_rejects_a_state_directory_that_others_could_move_away(
    tmp_path: Path, owner: int, mode: int, is_there: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = tmp_path / "st"
    state = parent / "state"
    parent.mkdir()
    if is_there:
        state.mkdir(mode=0o700)
    os.chown(parent, owner, 0)
    parent.chmod(mode)
    fault = danger(parent, "every account", f"chmod go-w {parent}")
    if owner:
        fault = danger(parent, f"its owner, uid {owner}", f"chown root {parent}")
    assert main(["run", "--state-dir", str(state)]) == 1
    assert json.loads(capsys.readouterr().err.splitlines()[-1])["reason"] == refused_state(state, fault)
    assert state.exists() == is_there
    assert not is_there or list(state.iterdir()) == []


@needs_root
def test_root_rejects_a_link_of_another_account_and_writes_nothing_to_its_target(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)  # as /tmp
    for target in (private, private / "missing"):
        link = shared / f"to-{target.name}"
        link.symlink_to(target)
        os.chown(link, SOMEBODY, SOMEBODY, follow_symlinks=False)
        assert state_refusal(link) is not None
    fault = danger(shared / "to-private", f"its owner, uid {SOMEBODY}", f"chown -h root {shared / 'to-private'}")
    assert state_refusal(shared / "to-private") == refused_state(shared / "to-private", fault)
    assert list(private.iterdir()) == []


def test_a_state_directory_below_a_sticky_one_is_accepted(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)  # as /tmp
    for _ in range(2):
        assert state_refusal(tmp_path / "made" / "state") is None


@needs_root
def test_a_private_mount_hides_where_the_state_directory_really_is(tmp_path: Path) -> None:
    place = tmp_path / "open" / "state"
    place.mkdir(parents=True, mode=0o700)
    place.parent.chmod(0o777)
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    code = "from pathlib import Path; from scheduled_events_agent import host; "
    code += f"print(host.create_private_dir(Path({str(mounted)!r})))"
    script = f'mount --bind "{place}" "{mounted}" && exec "$0" -c "$1"'
    command = ["unshare", "-m", "sh", "-c", script, sys.executable, code]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount can be made here: {done.stderr}")
    assert (done.stdout, done.stderr) == ("None\n", "")
    assert state_refusal(place) is not None


def test_check_warns_of_an_insecure_state_directory_and_other_accounts_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = tmp_path / "st"
    parent.mkdir()
    parent.chmod(0o777)
    state = parent / "state"
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"agent: {{state_dir: '{state}'}}\n", encoding="utf-8")
    fault = danger(parent, "every account", f"chmod go-w {parent}")
    assert main(["check", "--json", "--config", str(policy)]) == 0
    warnings = as_lines(json.loads(capsys.readouterr().out)["warnings"], has_hints=False)
    assert f"{policy}:1: warning: agent.state_dir: {fault}" in warnings
    for is_root, verdict in ((True, "error"), (False, "warning")):
        set_privileged(monkeypatch, is_root)
        found = doctor._check_state(state, None, is_in_use=False)
        assert (found.state, found.message) == (verdict, fault)
    monkeypatch.setattr("scheduled_events_agent.host.linux.files.is_privileged", lambda: False)
    assert state_refusal(state) is None


@needs_root
def test_the_account_that_owns_the_state_directory_may_replace_it(tmp_path: Path) -> None:
    state = tmp_path / "home" / "state"
    state.mkdir(parents=True, mode=0o700)
    for place in (state, state.parent):
        os.chown(place, SOMEBODY, SOMEBODY)
    assert host.find_replacement_risk(state) is None


# --- secrets in a policy that every account can read


@pytest.fixture
def shared_place() -> Iterator[Path]:
    """A directory that every account can pass through, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="security-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def secret_warnings(policy: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["check", "--json", "--config", str(policy)]) == 0
    warnings = [msgspec.convert(warning, Problem) for warning in json.loads(capsys.readouterr().out)["warnings"]]
    return [replace(warning, hint="").text for warning in warnings if "is a secret" in warning.message]


@pytest.mark.parametrize(
    ("text", "where", "way_out"),
    [
        ("notify: [{name: ops, to: 'https://127.0.0.1:1/SECRET'}]", "notify[0].to", "use {file: ...}"),
        (
            "notify: [{name: ops, to: {file: /run/none}, headers: {Authorization: SECRET}}]",
            "notify[0].headers.Authorization",
            "use {file: ...}",
        ),
        (
            "hooks: {x: {run: [/bin/true], env: {COLOUR: red, API_TOKEN: SECRET}}}",
            "hooks.x.env.API_TOKEN",
            "have the hook read it from a file of its own",
        ),
    ],
)
def test_a_secret_in_a_policy_that_every_account_can_read_is_warned_of(
    shared_place: Path, text: str, where: str, way_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = shared_place / "policy.yaml"
    policy.write_text(f"{text}\n", encoding="utf-8")
    policy.chmod(0o644)
    fault = f"{policy} can be read by every account: chmod o-r {policy}"
    told = f"{policy}:1: {where}: is a secret, and {fault}, or {way_out}"
    assert secret_warnings(policy, capsys) == [told]
    loaded = load_policy(policy)
    assert told in [problem.text for problem in machine_warnings(loaded)]  # which an agent that starts logs
    findings = [*check_machine(loaded, is_root=False)]
    found = [*doctor._check_permissions(loaded, findings, is_root_service=False)]
    assert [(finding.state, finding.message) for finding in found] == [("warning", told)]
    of_hooks = doctor._check_hooks(loaded, findings, None, units_error="")
    assert [finding.state for finding in of_hooks] == ["ok"]  # it is said once
    policy.chmod(0o640)
    assert secret_warnings(policy, capsys) == []


def test_all_secrets_of_a_policy_are_one_warning(shared_place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = shared_place / "policy.yaml"
    target = "{name: ops, to: 'https://127.0.0.1:1/SECRET', headers: {X-Key: SECRET}}"
    policy.write_text(f"notify: [{target}]\nhooks: {{x: {{run: [/bin/true], env: {{DB_PASSWORD: a}}}}}}\n")
    policy.chmod(0o644)
    (text,) = secret_warnings(policy, capsys)
    assert text.endswith("or use {file: ...}; so are notify[0].headers.X-Key, hooks.x.env.DB_PASSWORD")


def test_files_without_secrets_may_be_readable_by_all(
    shared_place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = shared_place / "policy.yaml"
    target = "{name: ops, to: {file: /run/none}, headers: {X-Key: {file: /run/none}}}"
    policy.write_text(f"notify: [{target}]\nhooks: {{x: {{run: [/bin/true], env: {{COLOUR: red, TOKEN: ''}}}}}}\n")
    policy.chmod(0o644)
    assert secret_warnings(policy, capsys) == []


# --- secrets in what hooks write

SECRET = "correct-horse-battery-staple"


def output_of(shell: str, **env: str) -> tuple[list[str], str]:
    lines: list[str] = []
    result = HookRun("drain", Hook(shell=shell, env=env), environment={}, on_line=lines.append).run()
    return lines, result.tail


@pytest.mark.parametrize(
    "name",
    ["TOKEN", "GITHUB_TOKEN", "client_secret", "DB_PASSWORD", "STORAGE_ACCOUNT_KEY", "ApiKey", "CONNECTION_STRING",
     "BLOB_SAS"],
)  # fmt: skip
def test_the_value_of_a_variable_that_is_called_a_secret_is_not_repeated(name: str) -> None:
    lines, tail = output_of(f'set -x; : "Bearer ${name}"; echo "x${{{name}}}x"', **{name: SECRET})
    assert lines == ["+ : Bearer ***", "+ echo x***x", "x***x"]
    assert tail == "".join(f"{line}\n" for line in lines)


def test_other_variables_and_very_short_values_are_repeated() -> None:
    lines, _ = output_of("echo $COLOUR $DISASTER $TOKEN", COLOUR="lightgreen", DISASTER="recovery", TOKEN="on")
    assert lines == ["lightgreen recovery on"]


def test_each_line_of_a_long_secret_is_redacted() -> None:
    lines, _ = output_of('echo "$PRIVATE_KEY"', PRIVATE_KEY="-----BEGIN-----\nMIIEvQIBADANBg\nab\n-----END-----")
    assert lines == ["***", "***", "ab", "***"]


def test_a_credential_of_the_service_manager_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hooks_token").write_text(f"{SECRET}\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    lines, tail = output_of('cat "$CREDENTIALS_DIRECTORY/hooks_token"')
    assert (lines, tail) == (["***"], "***\n")


@pytest.mark.parametrize("before", [1980, 1990, 2000, 2010])
def test_a_secret_at_a_line_cut_is_not_shown_in_part(before: int) -> None:
    lines, _ = output_of(f"printf '%{before}s%s%0200d\\n' '' \"$TOKEN\" 0", TOKEN=SECRET)
    (line,) = lines
    assert line.endswith(" (cut)")
    assert set(line.removesuffix(" (cut)")) <= {" ", "*", "0"}


@pytest.mark.parametrize("after", [4060, 4080, 4096])
def test_a_secret_at_the_start_of_the_tail_is_not_shown_in_part(after: int) -> None:
    _, tail = output_of(f"printf '%s%0{after}d' \"$TOKEN\" 0", TOKEN=SECRET)
    assert set(tail) <= {"*", "0"}
    assert 4060 <= len(tail) <= 4096


def test_bidirectional_and_line_break_characters_are_removed() -> None:
    lines, _ = output_of(r"printf 'a\342\200\256b\342\200\250c\033]0;title\007d\rforged\n'")
    assert lines == ["a b c ]0;title d forged"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (f'"{SECRET}', "the quoted text that begins in line 2 is not closed"),
        (f"{SECRET}: {SECRET}", None),
        (f"*{SECRET}", "the alias has no anchor above it: put a text that begins with * in quotes"),
        (f"[{SECRET}]", "hooks.x.env.TOKEN: expected a text; got a list"),
        (f'"{SECRET}\\0"', "hooks.x.env.TOKEN: the character U+0000 cannot be part of it: remove it"),
        (f'"{SECRET}\\q"', "unknown escape in double quotes: write a backslash twice, or use single quotes"),
    ],
)
def test_errors_in_the_syntax_of_a_policy_quote_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str, message: str | None
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"hooks:\n  x: {{run: [/bin/true], env: {{TOKEN: {value}}}}}\n", encoding="utf-8")
    assert main(["check", "--config", str(policy)]) == 2
    told = capsys.readouterr().out
    assert SECRET not in told
    if message is not None:
        assert told.splitlines()[0] == f"{policy}:2: {message}"


# --- containers


def test_the_commands_that_keep_others_from_the_endpoint_do_so(tmp_path: Path) -> None:
    """In three network namespaces: Azure's, the machine's, a container's."""
    needed = ("unshare", "nsenter", "ip", "iptables", "setpriv")
    if os.geteuid() != 0 or (missing := [name for name in needed if shutil.which(name) is None]):
        pytest.skip(f"needs root and {', '.join(needed)}" if os.geteuid() != 0 else f"there is no {missing}")
    text = (CHECKOUT / "docs" / "security.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\$ sudo (iptables .+)$", text, re.MULTILINE)
    assert len(commands) == 2
    server = tmp_path / "server.py"
    server.write_text(
        "import socket\n"
        "listener = socket.create_server(('169.254.169.254', 80))\n"
        "print('listens', flush=True)\n"
        "while True: listener.accept()[0].close()\n"
    )
    script = f"""set -e
        connect() {{ python3='import socket; socket.create_connection(("169.254.169.254", 80), 5)'
            "$@" {_python()} -c "$python3" 2>/dev/null && echo reached || echo not reached; }}
        ip link set lo up
        unshare -n sleep 60 & azure=$!
        unshare -n sleep 60 & container=$!
        trap 'kill $azure $container $server; wait' EXIT
        until [ "$(readlink /proc/$azure/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do :; done
        until [ "$(readlink /proc/$container/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do :; done
        link() {{ # PID, our address, its address
            ip link add h$1 type veth peer name p$1; ip link set p$1 netns $1; ip addr add $2/24 dev h$1
            ip link set h$1 up; nsenter -t $1 -n ip addr add $3/24 dev p$1; nsenter -t $1 -n ip link set p$1 up
            nsenter -t $1 -n ip link set lo up; nsenter -t $1 -n ip route add default via $2; }}
        link $azure 10.9.1.1 10.9.1.2
        link $container 10.9.2.1 10.9.2.2
        nsenter -t $azure -n ip addr add 169.254.169.254/32 dev lo
        ip route add 169.254.169.254 via 10.9.1.2
        echo 1 > /proc/sys/net/ipv4/ip_forward
        mkfifo {tmp_path}/ready
        nsenter -t $azure -n {_python()} {server} > {tmp_path}/ready & server=$!
        read -r line < {tmp_path}/ready
        try() {{ connect env; connect setpriv --reuid 65534 --clear-groups; connect nsenter -t $container -n; }}
        try
        {"; ".join(commands)}
        try
    """
    done = subprocess.run(
        ["unshare", "-n", "bash", "-c", script], capture_output=True, text=True, check=False, cwd="/"
    )
    if done.returncode != 0 and not done.stdout:
        pytest.skip(f"no such networks here: {done.stderr}")
    assert done.stdout.splitlines() == [*["reached"] * 3, "reached", "not reached", "not reached"], done.stderr


def _python() -> str:
    """One that every account can start."""
    return next(
        (path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if Path(path).exists()), "python3"
    )
