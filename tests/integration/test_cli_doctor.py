"""doctor as a command, against the simulator, against endpoints that are none, and beside a running agent."""

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ports import free_port

from scheduled_events_agent import __version__, cli, host
from scheduled_events_agent.cli import doctor, doctor_checks, operator, terminal
from scheduled_events_agent.hooks import command
from scheduled_events_agent.host import processes
from scheduled_events_agent.host.conflicts import STOP_ONE, OwnService, ServiceFailure
from scheduled_events_agent.imds.guest_proxy import Caller
from scheduled_events_agent.policy.load import CONFIG_VARIABLE
from scheduled_events_agent.policy.settings import FleetCredential, FleetSettings, Settings
from scheduled_events_agent.simulator import Simulator
from scheduled_events_agent.status import NO_OPTIONS, Status, Vm
from scheduled_events_agent.store import Store

needs_modes = pytest.mark.skipif(sys.platform == "win32", reason="modes and accounts are Linux's")
needs_root = pytest.mark.skipif(
    sys.platform == "win32" or os.geteuid() != 0, reason="only root can ask what others may do"
)


class Check(NamedTuple):
    state: str
    message: str
    hint: str
    command: str = ""


class Report(NamedTuple):
    code: int
    checks: dict[str, list[Check]]

    def one(self, check: str) -> Check:
        (found,) = self.checks[check]
        return found

    def states(self, *checks: str) -> list[str]:
        return [self.one(check).state for check in checks]


Examine = Callable[..., Report]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/doctor.md").read_text(encoding="utf-8")
DOCUMENTED = set(re.findall(r"^(?:\||-) `([a-z-]+)`", PAGE, re.MULTILINE))
SPACING_SECONDS = doctor._SPACING_SECONDS
STATES = ("ok", "warning", "error", "skipped")
OF_IMDS = ("endpoint", "proxy", "vm-name", "events", "clock")


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """The command line; returns exit code, output and errors."""
    monkeypatch.setattr(doctor, "_SPACING_SECONDS", 0.01)
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)

    def run_command(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(("doctor", *arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


@pytest.fixture
def examine(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> Examine:
    """The checks of a policy with this endpoint and these sections."""

    def examine_policy(
        endpoint: str, policy: str = "", *arguments: str, listen: str = "off", mode: str = "act"
    ) -> Report:
        settings = f"imds: {{endpoint: '{endpoint}'}}\n"
        settings += f"agent: {{state_dir: '{tmp_path / 'state'}', listen: '{listen}', mode: {mode}}}\n"
        file = tmp_path / "p.yaml"
        if not file.exists() or file.read_text(encoding="utf-8") != settings + policy:  # it may be in force
            file.write_text(settings + policy, encoding="utf-8")
        code, out, err = run("--config", str(file), "--json", *arguments)
        assert err == ""
        report = json.loads(out)
        checks: dict[str, list[Check]] = {}
        for check in report["checks"]:
            checks.setdefault(check.pop("check"), []).append(Check(**check))
        assert "error" not in {found.state for found in checks["policy"]}
        counted = [found.state for several in checks.values() for found in several]
        assert {word: report[word] for word in STATES} == {word: counted.count(word) for word in STATES}
        assert set(checks) == DOCUMENTED
        assert report["version"] == __version__
        assert code == (1 if report["error"] else 0)
        assert all(
            found.hint for several in checks.values() for found in several if found.state in ("warning", "error")
        )
        commands = [(found.command, found.hint) for several in checks.values() for found in several]
        assert all(command in hint for command, hint in commands)
        return Report(code, checks)

    return examine_policy


def skipped(report: Report) -> dict[str, str]:
    return {name: report.one(name).message for name, (one, *_) in report.checks.items() if one.state == "skipped"}


@pytest.fixture
def simulator() -> Iterator[Simulator]:
    with Simulator(vms=("vm-1", "vm-2")) as simulator:
        yield simulator


class Endpoint:
    """Something that answers HTTP, and need not be the metadata service."""

    def __init__(self) -> None:
        self.name = "vm-1"
        self.document: Any = {"DocumentIncarnation": 1, "Events": []}
        self.headers: dict[str, str] = {}
        self.ahead = 0.0
        self.asked: list[tuple[float, str, str]] = []
        """When, method and path."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.asked.append((time.monotonic(), self.command, self.path.partition("?")[0]))
                is_rejected = self.headers.get("Metadata") != "true"
                content = {"compute": {"name": outer.name, "vmId": "1"}}
                content = outer.document if self.path.startswith("/metadata/scheduledevents?") else content
                error = {"error": "Bad request. Required metadata header not specified"}
                body = json.dumps(error if is_rejected else content).encode()
                self.send_response_only(400 if is_rejected else 200)
                date = datetime.now(UTC) + timedelta(seconds=outer.ahead)
                fields = {"Date": format_datetime(date, usegmt=True), "Content-Length": str(len(body))}
                for name, value in {**fields, **outer.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET  # noqa: N815 - the library's name

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


# --- the metadata service


def test_a_healthy_service_passes_all_checks(examine: Examine, endpoint: Endpoint) -> None:
    report = examine(endpoint.url)
    assert report.one("fleet") == Check("ok", "the policy names no fleet", "")
    assert report.one("secrets") == Check("ok", "there is no directory of secrets for hooks", "")
    assert report.states("notifications", *OF_IMDS) == ["ok"] * (1 + len(OF_IMDS))
    assert report.one("endpoint").message.startswith(f"{endpoint.url} answers, in ")
    assert report.one("vm-name").message == "this VM is vm-1"


def test_few_requests_are_made_and_none_approves(
    examine: Examine, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_SPACING_SECONDS", SPACING_SECONDS)
    examine(endpoint.url)
    assert [(method, path) for _, method, path in endpoint.asked] == [
        ("GET", "/metadata/instance"),
        ("GET", "/metadata/scheduledevents"),
    ]
    times = [at for at, *_ in endpoint.asked]
    assert SPACING_SECONDS == 0.5
    assert min(later - earlier for earlier, later in pairwise(times)) > 0.4


def test_the_simulator_passes_and_its_events_name_this_vm(examine: Examine, simulator: Simulator) -> None:
    simulator.schedule("Freeze", vms=("vm-1",))
    simulator.schedule("Reboot", vms=("vm-2",))
    report = examine(simulator.endpoint("vm-1"))
    assert report.states(*OF_IMDS) == ["ok"] * len(OF_IMDS)
    assert report.one("vm-name").message == "this VM is vm-1"
    assert report.one("events").message.startswith("2 events pending")
    assert [record.method for record in simulator.requests()] == ["GET", "GET"]


def test_a_host_name_in_resources_is_reported(examine: Examine, endpoint: Endpoint) -> None:
    endpoint.document = {"Events": [{"EventId": "1", "Resources": [socket.gethostname()]}]}
    found = examine(endpoint.url).one("events")
    assert (found.state, found.hint) == (
        "warning",
        f"if that is this VM, add {socket.gethostname()} to vm.aliases in the policy",
    )


def test_an_unresponsive_endpoint_is_one_failure_and_other_checks_run(
    examine: Examine,
) -> None:
    report = examine("http://127.0.0.1:1")
    found = report.one("endpoint")
    assert (report.code, found.state) == (1, "error")
    assert found.message.startswith("GET http://127.0.0.1:1/metadata/instance?")
    assert "connection refused" in found.message or "no connection within" in found.message  # Windows tries again
    assert found.hint.startswith("run this on the VM itself: ")
    of_imds = ("proxy", "vm-name", "version", "events", "clock")
    assert skipped(report) == dict.fromkeys(of_imds, "waits for the check endpoint")
    assert report.states("policy", "hooks", "permissions", "state") == ["ok"] * 4


@pytest.mark.parametrize(
    ("kind", "sign"),
    [("html", "a web page"), ("redirect", "a redirect (302) to http://127.0.0.1:")],
)
def test_a_response_from_another_server_is_a_failure(
    examine: Examine, simulator: Simulator, kind: Any, sign: str
) -> None:
    simulator.fault("vm-1", kind)
    report = examine(simulator.endpoint("vm-1"))
    assert report.code == 1
    found = report.one("proxy")
    assert found.state == "error"
    assert f": {sign}" in found.message
    assert report.one("endpoint").state == "ok"
    of_imds = ("vm-name", "version", "events", "clock")
    assert skipped(report) == dict.fromkeys(of_imds, "waits for the check proxy")
    assert len(list(simulator.requests())) == 1


def test_a_proxy_that_passes_on_what_the_service_says_is_a_failure_too(
    examine: Examine, endpoint: Endpoint
) -> None:
    endpoint.headers = {"Via": "1.1 squid (squid/5.7)"}
    report = examine(endpoint.url)
    assert report.one("proxy").state == "error"
    assert report.one("proxy").message.endswith("the header via: 1.1 squid (squid/5.7)")
    assert report.one("vm-name") == Check("ok", "this VM is vm-1", "")


def test_a_denial_without_a_sign_of_the_proxy_is_no_clean_bill_for_it(
    examine: Examine, simulator: Simulator
) -> None:
    simulator.fault("vm-1", "denied")
    report = examine(simulator.endpoint("vm-1"))
    assert report.states("endpoint", "proxy") == ["error", "warning"]
    assert "if it is the VM's Guest Proxy Agent, allow user " in report.one("endpoint").message
    assert report.one("proxy").message.startswith("a proxy denies requests, as Azure's Guest Proxy Agent does: ")


@pytest.mark.parametrize(
    ("fleet", "added"),
    [
        (None, []),
        (FleetSettings(table="https://a.example/t"), ["/metadata/identity"]),
        (
            FleetSettings(table="https://a.example/t", credential=FleetCredential(client_id="c")),
            ["/metadata/identity"],
        ),
        (FleetSettings(table="https://a.example/t", credential=FleetCredential(sas_file="/s")), []),
        (FleetSettings(leases="web"), []),
    ],
)
def test_a_rule_for_azures_proxy_needs_the_path_of_the_identity_for_a_table(
    fleet: FleetSettings | None, added: list[str]
) -> None:
    paths = doctor._paths_asked(Settings(fleet=fleet))
    assert paths == ["/metadata/scheduledevents", "/metadata/instance", *added]


@pytest.mark.parametrize("failure", ["", "timed out"])
def test_what_azures_proxy_denies_to_this_user_alone_is_a_warning(
    examine: Examine, simulator: Simulator, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    now = datetime.now(UTC)
    status = Status(
        at=now,
        vm=Vm(names=("vm-1",), vm_id="1"),
        health="ok",
        endpoint=simulator.endpoint("vm-1"),
        last_poll_at=now,
        poll_failure=failure,
        guest_proxy=True,
    )
    monkeypatch.setattr(doctor, "_find_agent", lambda _: doctor._Agent(pid="17", status=status))
    monkeypatch.setattr(doctor, "caller", lambda pid: Caller("agents-user", f"/usr/bin/python-of-{pid}"))
    simulator.fault("vm-1", "denied")
    report = examine(simulator.endpoint("vm-1"))
    assert report.one("endpoint").state == ("error" if failure else "warning")
    assert ("the agent asks as agents-user" in report.one("endpoint").message) == (not failure)
    assert "user agents-user, executable /usr/bin/python-of-17," in report.one("proxy").message


@pytest.mark.parametrize(
    ("ahead", "state"), [(-10.0, "warning"), (10.0, "warning"), (-45.0, "error"), (45.0, "error")]
)
def test_a_wrong_clock_is_reported(examine: Examine, endpoint: Endpoint, ahead: float, state: str) -> None:
    endpoint.ahead = ahead
    report = examine(endpoint.url)
    found = report.one("clock")
    assert found.state == state
    assert ("behind Azure's" if ahead > 0 else "ahead of Azure's") in found.message


@pytest.mark.parametrize(
    ("kind", "state", "text"),
    [
        ("empty", "warning", "its answer is empty"),
        ("garbage", "error", ""),
        ("reset", "error", ""),
    ],
)
def test_an_invalid_document_is_reported(
    examine: Examine, simulator: Simulator, kind: Any, state: str, text: str
) -> None:
    simulator.fault("vm-1", kind, on="poll")
    report = examine(simulator.endpoint("vm-1"))
    assert report.one("events").state == state
    assert text in report.one("events").message
    assert report.one("vm-name").state == "ok"


def test_a_rejected_version_and_throttling_are_reported_with_hints(examine: Examine, simulator: Simulator) -> None:
    simulator.fault("vm-1", "status", on="poll", status=400)
    report = examine(simulator.endpoint("vm-1"))
    assert report.states("vm-name", "events") == ["ok", "error"]
    assert skipped(report) == {"version": "waits for the check events"}
    assert report.one("events").hint.startswith("remove imds.api_version from the policy")
    simulator.fault("vm-1", "status", status=429)
    report = examine(simulator.endpoint("vm-1"))
    assert report.one("endpoint").state == "error"
    assert "five requests a second are the limit" in report.one("endpoint").hint
    of_imds = ("vm-name", "version", "events", "clock")
    assert skipped(report) == dict.fromkeys(of_imds, "waits for the check endpoint")
    assert report.one("proxy").state == "ok"


# --- the policy and what it names


HOOKS = """\
rules: [{{name: all, prepare: [drain], approve: when-prepared}}]
hooks: {{drain: {0}}}
"""


def test_an_invalid_policy_fails_with_every_error_and_other_checks_run(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: Endpoint
) -> None:
    monkeypatch.setattr(
        "scheduled_events_agent.cli.doctor.resolve_endpoint", lambda _: endpoint.url
    )  # not the machine's own
    (tmp_path / "p.yaml").write_text("rules:\n  - {name: a, aprove: never}\nhooks: {x: {}}\n")
    code, out, _ = run("--config", "p.yaml", "--json", "--state-dir", str(tmp_path / "state"))
    checks = json.loads(out)["checks"]
    assert code == 1
    found = [one for one in checks if one["check"] == "policy"]
    assert [one["state"] for one in found] == ["error"] * 2
    places = [one["message"].split(": ")[:2] for one in found]
    assert places == [["p.yaml:2", "rules[0]"], ["p.yaml:3", "hooks.x"]]
    assert {one["check"] for one in checks} == DOCUMENTED
    assert [(one["check"], one["message"]) for one in checks if one["state"] == "skipped"] == [
        (name, "waits for the check policy")
        for name in ("hooks", "secrets", "permissions", "fleet", "kubernetes", "notifications")
    ]


def test_policy_warnings_are_included(examine: Examine, endpoint: Endpoint) -> None:
    report = examine(endpoint.url, "hooks: {idle: {shell: 'exit 0'}}\n")
    found = report.one("policy")
    assert (found.state, found.hint) == ("warning", "check that this is intended")
    assert found.message.endswith("p.yaml:3: hooks.idle: no rule names this hook")


def test_endpoints_that_would_not_be_served_are_a_warning(
    run: Callable[..., tuple[int, str, str]], endpoint: Endpoint, tmp_path: Path
) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(
        f"imds: {{endpoint: '{endpoint.url}'}}\n"
        f"agent: {{state_dir: '{tmp_path / 'state'}', web_config: '{tmp_path / 'web.yml'}'}}\n"
    )
    (told,) = [
        one for one in json.loads(run("--config", str(file), "--json")[1])["checks"] if one["check"] == "policy"
    ]
    text = f"{file}:2: agent.web_config: without it no pages are served: {tmp_path / 'web.yml'}: cannot be read: "
    assert told["state"] == "warning"
    assert told["message"].startswith(text)
    assert told["hint"] == "correct it, or remove the key"


def test_a_policy_that_only_observes_is_a_warning(examine: Examine, endpoint: Endpoint, tmp_path: Path) -> None:
    assert examine(endpoint.url, mode="observe").one("policy") == Check(
        "warning",
        f"{tmp_path / 'p.yaml'}: agent.mode is observe, so no hook runs and nothing is approved",
        "set it to act when explain and the log show what you want",
    )


def test_a_slow_check_is_announced(
    run: Callable[..., tuple[int, str, str]], simulator: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "_SLOW_SECONDS", 0.1)
    simulator.fault("vm-1", "slow", on="poll", delay_seconds=1)
    (tmp_path / "p.yaml").write_text(
        f"imds: {{endpoint: '{simulator.endpoint('vm-1')}'}}\n"
        f"agent: {{state_dir: '{tmp_path / 'state'}', listen: 'off'}}\n"
    )
    code, out, err = run("--config", "p.yaml")
    assert (code, err) == (0, f"{terminal.FIRST_ANSWER_IS_SLOW}\n")
    assert "ok       events" in out


def test_existing_hooks_pass(examine: Examine, endpoint: Endpoint) -> None:
    report = examine(endpoint.url, HOOKS.format(f"{{run: ['{sys.executable}', -c, '']}}"))
    assert report.one("hooks") == Check("ok", "1 hook: all programs exist and can be started", "")


def test_a_hook_that_is_not_there_is_a_failure(examine: Examine, endpoint: Endpoint, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    found = examine(endpoint.url, HOOKS.format(f"{{run: ['{absent}']}}")).one("hooks")
    assert found.state == "error"
    assert found.message.endswith(f"p.yaml:4: hooks.drain.run: {absent} does not exist")


def test_a_hook_for_the_other_system_is_a_failure(examine: Examine, endpoint: Endpoint) -> None:
    program = "/absent/drain" if sys.platform == "win32" else "C:\\absent\\drain.ps1"
    found = examine(endpoint.url, HOOKS.format(f"{{run: ['{program}']}}")).one("hooks")
    assert found.state == "error"
    assert found.message.endswith(f"run: {program} is a path of another system")


@needs_root
def test_a_hook_is_tried_as_the_account_that_will_run_it(examine: Examine, endpoint: Endpoint) -> None:
    with tempfile.TemporaryDirectory() as directory:  # pytest's own is for this account alone
        place = Path(directory)
        place.chmod(0o755)
        hook = place / "drain"
        hook.write_text("#!/bin/sh\n")
        hook.chmod(0o755)
        policy = HOOKS.format(f"{{run: ['{hook}'], user: nobody}}")
        assert examine(endpoint.url, policy).one("hooks").state == "ok"
        hook.chmod(0o700)
        assert examine(endpoint.url, policy).one("hooks") == Check(
            "error",
            f"hooks.drain.run: nobody cannot execute {hook}",
            "correct it: until then the hook fails, and a failed prepare hook holds its event",
        )
        hook.chmod(0o755)
        place.chmod(0o700)
        assert examine(endpoint.url, policy).one("hooks").message == (
            f"hooks.drain.run: nobody cannot pass through {place}"
        )


@needs_root
def test_a_secret_that_the_services_account_cannot_read_is_named(
    examine: Examine, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as directory:  # pytest's own is for this account alone
        place = Path(directory)
        place.chmod(0o755)
        monkeypatch.setenv("CREDENTIALS_DIRECTORY", directory)
        monkeypatch.setattr(processes, "own_service", lambda: service_of("daemon"))
        assert examine(endpoint.url).one("secrets") == Check("ok", f"hooks can read 0 files in {directory}", "")
        for name, mode in (("one", 0o644), ("token", 0o600)):
            (place / name).touch()
            (place / name).chmod(mode)
        report = examine(endpoint.url)
        assert (report.one("secrets").state, report.one("secrets").message) == (
            "warning",
            f"daemon cannot read {place / 'token'}",
        )
        (place / "token").chmod(0o644)
        told = Check("ok", f"hooks can read 2 files in {directory}", "")
        assert examine(endpoint.url).one("secrets") == told
        place.chmod(0o700)
        assert examine(endpoint.url).one("secrets").message == f"daemon cannot read {directory}"
        monkeypatch.setattr(processes, "own_service", lambda: service_of("root"))
        assert examine(endpoint.url).one("secrets") == told
        loaded = service_of("daemon")._replace(has_credentials=True)
        monkeypatch.setattr(processes, "own_service", lambda: loaded)
        assert examine(endpoint.url).one("secrets").message == "systemd has loaded credentials for the service"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no sudo")
def test_the_command_that_tries_a_target_is_as_its_reader_types_it(
    examine: Examine, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SUDO_USER", "kim")
    policy = f"notify: [{{name: ops, to: {{file: {tmp_path / 'missing'}}}}}]\n"
    found = examine(endpoint.url, policy).one("notifications")
    line = f"sudo scheduled-events-agent notify test ops --config {tmp_path / 'p.yaml'}"
    assert found.hint == f"correct it, and try it: {line}"


@needs_root
def test_a_file_of_notifications_that_the_services_account_cannot_read_is_named(
    examine: Examine, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as directory:  # pytest's own is for this account alone
        place = Path(directory)
        place.chmod(0o755)
        url = place / "url"
        url.write_text("https://example.com/hook")
        url.chmod(0o600)
        policy = f"notify: [{{name: ops, to: {{file: {url}}}}}]\n"
        assert examine(endpoint.url, policy).one("notifications").state == "ok"
        monkeypatch.setattr(processes, "own_service", lambda: service_of("daemon"))
        found = examine(endpoint.url, policy).one("notifications")
        assert (found.state, found.message) == ("warning", f"ops: to.file: daemon cannot read {url}")


@needs_root
def test_hooks_that_polkit_does_not_let_the_service_start_are_named(
    examine: Examine, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        program = Path(directory, "run-as-root")
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        policy = HOOKS.format(f"{{run: ['{program}', drain], serialize: true}}")
        monkeypatch.setattr(command, "_PROGRAMS_OF_ROOT", Path(directory))
        monkeypatch.setattr(processes, "own_service", lambda: service_of("daemon"))
        of_root = Path(directory, "drain")
        for error in ("does not exist", f"is not executable: chmod +x {of_root}"):
            found = examine(endpoint.url, policy).one("hooks")
            assert found.message.endswith(f"hooks.drain.run: {of_root} {error}")
            of_root.touch(0o600)
        of_root.chmod(0o700)
        report = examine(endpoint.url, policy)
        assert (report.one("hooks").state, report.one("permissions").state) == ("ok", "ok")
        shutil.chown(of_root, 12345)
        message = examine(endpoint.url, policy).one("permissions").message
        assert f": hooks.drain.run: {of_root} can be changed by its owner, uid 12345, " in message
        shutil.chown(of_root, 0)
        old = service_of("daemon")._replace(units_error="polkit 0.105 does not read polkit.rules")
        monkeypatch.setattr(processes, "own_service", lambda: old)
        assert examine(endpoint.url, policy).one("hooks").message == (
            "hooks.drain.run: run-as-root cannot start the hook: polkit 0.105 does not read polkit.rules"
        )
        assert examine(endpoint.url, HOOKS.format("{shell: 'true'}")).one("hooks").state == "ok"


def test_units_of_hooks_are_skipped_where_systemd_cannot_be_asked(
    examine: Examine, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> set[str]:
        raise host.HostError("found no systemctl", kind="systemctl")

    monkeypatch.setattr(processes, "unknown_units", fail)
    report = examine(endpoint.url, HOOKS.format("{shell: 'exit 0', env: {REDIS_UNIT: redis.service}}"))
    assert report.checks["hooks"] == [
        Check("skipped", "whether the units of hooks exist cannot be checked: found no systemctl", ""),
        Check("ok", "1 hook: all programs exist and can be started", ""),
    ]


@needs_modes
def test_a_policy_that_others_can_change_is_reported(examine: Examine, endpoint: Endpoint, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").touch()
    (tmp_path / "p.yaml").chmod(0o666)
    found = examine(endpoint.url).one("permissions")
    file = tmp_path / "p.yaml"
    is_root = host.is_privileged()
    assert found.state == ("error" if is_root else "warning")
    line = f"{file}: " if is_root else ""
    assert found.message.startswith(f"{line}{file} can be changed by every account")


# --- the state


def test_a_missing_state_directory_is_no_error_and_is_not_created(
    examine: Examine, endpoint: Endpoint, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    assert examine(endpoint.url).one("state") == Check(
        "ok", f"{state} is not there yet: the agent makes it when it first starts", ""
    )
    assert not state.exists()


def test_a_state_directory_is_tested_for_writing_and_left_unchanged(
    examine: Examine, endpoint: Endpoint, tmp_path: Path
) -> None:
    state = tmp_path / "given"
    host.create_private_dir(state)
    report = examine(endpoint.url, "", "--state-dir", str(state))
    assert report.one("state") == Check(
        "ok", f"{state} is there, for {host.account_name()} alone, and writable", ""
    )
    assert list(state.iterdir()) == []

    Store.open(state, datetime(2026, 3, 2, 12, tzinfo=UTC)).close()
    assert examine(endpoint.url, "", "--state-dir", str(state)).one("state").message == (
        f"{state} is there, for {host.account_name()} alone, and writable; state since 2026-03-02 12:00:00 UTC"
    )


@needs_modes
def test_a_state_directory_that_is_open_to_others_is_a_failure(
    examine: Examine, endpoint: Endpoint, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    assert examine(endpoint.url).one("state") == Check(
        "error",
        f"{state}: it is open to others: if it is the agent's own, chmod 700 {state}",
        "run that command: the agent does not start before",
    )


AS_AGENT = "run this as root or administrator, or as the agent's account"


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Be an ordinary account for a while."""
    if sys.platform == "win32":
        raise NotImplementedError
    groups = os.getgroups()
    os.setgroups([])
    os.setresgid(65534, 65534, 0)
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
        os.setgroups(groups)


def service_of(account: str) -> OwnService:
    return OwnService(
        is_enabled=True, state="active", is_running=True, pid=1, account=account, needs_daemon_reload=False
    )


@needs_root
def test_a_state_directory_of_a_wrong_account_is_a_failure(
    examine: Examine, endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    if sys.platform != "win32":  # for the type checker
        os.chown(state, 12345, 12345)
    finding = f"{state}: it belongs to uid 12345: if it is the agent's own, chown -R"
    assert examine(endpoint.url).one("state") == Check("warning", f"{finding} root {state}", AS_AGENT)
    with contextlib.closing(host.acquire_lock(state / "lock")):  # as in a container whose agent is not root
        assert examine(endpoint.url).one("state") == Check(
            "ok", f"{state} is there, for the agent that runs with it", ""
        )
    monkeypatch.setattr(processes, "own_service", lambda: service_of("daemon"))
    assert examine(endpoint.url).one("state") == Check(
        "error", f"{finding} daemon {state}", "run that command: the agent does not start before"
    )


@needs_root
def test_an_ordinary_account_gets_no_failure_for_hidden_information(
    run: Callable[..., tuple[int, str, str]], endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def examine_as_nobody(file: Path, *options: str) -> dict[str, tuple[str, str]]:
        with as_nobody():
            code, out, _ = run("--config", str(file), "--json", *options)
        assert code == 0
        return {one["check"]: (one["state"], one["message"]) for one in json.loads(out)["checks"]}

    monkeypatch.setattr("scheduled_events_agent.cli.doctor.resolve_endpoint", lambda _: endpoint.url)
    with tempfile.TemporaryDirectory() as directory:  # pytest's own is for this account alone
        place = Path(directory)
        place.chmod(0o755)
        closed = place / "closed"
        closed.mkdir(mode=0o700)
        (closed / "drain").write_text("#!/bin/sh\n")
        file = place / "p.yaml"
        file.write_text(f"agent: {{state_dir: '{closed}'}}\n" + HOOKS.format(f"{{run: ['{closed / 'drain'}']}}"))
        monkeypatch.setattr(processes, "own_service", lambda: service_of("root"))
        seen = examine_as_nobody(file)
        told = ("skipped", "cannot be checked by nobody: run as root or administrator")
        of_root = ("hooks", "secrets", "permissions", "state", "disk", "agent")
        assert {name: found for name, found in seen.items() if found[0] == "skipped"} == dict.fromkeys(
            of_root, told
        )
        monkeypatch.setattr(processes, "own_service", lambda: None)
        file.chmod(0o600)
        seen = examine_as_nobody(file, "--state-dir", str(closed))
        assert seen["policy"] == ("warning", f"{file}: cannot be read: Permission denied")
        assert [seen[name] for name in ("state", "disk", "agent")] == [told] * 3
        (closed / "state").mkdir()
        seen = examine_as_nobody(file, "--state-dir", str(closed / "state"))
        assert [seen[name] for name in ("state", "disk", "agent")] == [told] * 3


def test_a_file_in_place_of_the_state_directory_is_a_failure(
    examine: Examine, endpoint: Endpoint, tmp_path: Path
) -> None:
    (tmp_path / "state").touch()
    found = examine(endpoint.url).one("state")
    assert (found.state, found.message) == ("error", f"{tmp_path / 'state'} is not a directory")


def test_a_state_directory_on_the_temporary_disk_is_a_failure(
    examine: Examine, endpoint: Endpoint, tmp_path: Path
) -> None:
    (tmp_path / "DATALOSS_WARNING_README.txt").touch()
    found = examine(endpoint.url).one("disk")
    assert found.state == "error"
    assert found.message.endswith(f"is on Azure's temporary disk {tmp_path}, empty after a redeployment")


# --- the agent


def wait_polled(port: int) -> None:
    """Wait until the agent whose pages are there knows what is pending."""
    deadline = time.monotonic() + 60.0
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
        connection.request("GET", "/status")
        status = json.loads(connection.getresponse().read())
        connection.close()
        if status["condition"] != "unknown":
            return
        assert time.monotonic() < deadline, status["headline"]
        time.sleep(0.05)


def test_a_running_agent_is_seen_with_its_version_and_not_disturbed(
    examine: Examine, endpoint: Endpoint, tmp_path: Path
) -> None:
    listen = f"127.0.0.1:{free_port()}"
    assert examine(endpoint.url, listen=listen).one("agent").state == "warning"
    command = [sys.executable, "-m", "scheduled_events_agent", "run", "--config", str(tmp_path / "p.yaml")]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "agent started" in line:
                break
        wait_polled(int(listen.rpartition(":")[2]))
        report = examine(endpoint.url, listen=listen)
        assert report.one("agent") == Check("ok", f"runs (pid {process.pid}), version {__version__}", "")
        assert process.poll() is None
    finally:
        process.terminate()
        process.communicate()


def test_an_agent_that_differs_from_the_policy_file_is_a_warning(
    run: Callable[..., tuple[int, str, str]], endpoint: Endpoint, tmp_path: Path
) -> None:
    listen = f"127.0.0.1:{free_port()}"
    policy, other_policy = tmp_path / "p.yaml", tmp_path / "other.yaml"
    for file in (policy, other_policy):
        file.write_text(
            f"imds: {{endpoint: '{endpoint.url}'}}\n"
            f"agent: {{state_dir: '{tmp_path / 'state'}', listen: '{listen}'}}\n",
            encoding="utf-8",
        )
    process = subprocess.Popen(
        [sys.executable, "-m", "scheduled_events_agent", "run", "--observe", "--config", policy.name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "agent")},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None

    def look(file: Path) -> Check:
        checks = json.loads(run("--config", str(file), "--json")[1])["checks"]
        (found,) = [check for check in checks if check.pop("check") == "agent"]
        return Check(**found)

    try:
        for line in process.stderr:
            if "agent started" in line:
                break
        wait_polled(int(listen.rpartition(":")[2]))
        runs = f"runs (pid {process.pid}), version {__version__}, "
        assert look(policy) == Check(
            "warning",
            f"{runs}and only observes: no hook runs and nothing is approved",
            "start it without --observe",
        )
        assert look(other_policy) == Check(
            "warning",
            f"{runs}with the policy {policy}, and these checks looked at another",
            "name that one with --config, or restart the agent",
        )
        policy.write_text(f"# {policy.read_text(encoding='utf-8')}", encoding="utf-8")
        changed = look(policy)
        assert changed.state == "warning"
        assert re.match(re.escape(f"{runs}with the policy as it was read at "), changed.message)
        assert changed.message.endswith(" UTC; its file has changed since")
    finally:
        process.terminate()
        process.communicate()


def test_the_endpoint_of_the_running_agent_is_used_despite_a_changed_policy(
    run: Callable[..., tuple[int, str, str]], simulator: Simulator, tmp_path: Path
) -> None:
    policy = tmp_path / "p.yaml"
    endpoint = simulator.endpoint("vm-1")
    agent = f"agent: {{state_dir: '{tmp_path / 'state'}', listen: 'off', mode: observe}}\n"
    policy.write_text(f"imds: {{endpoint: '{endpoint}'}}\nvm: {{name: vm-1, aliases: [web]}}\n{agent}")
    process = subprocess.Popen(
        [sys.executable, "-m", "scheduled_events_agent", "run", "--config", policy.name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "agent")},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "agent started" in line:
                break
        for changed in ("rulez: []\n", "imds: {endpoint: 'http://127.0.0.1:1'}\n"):
            policy.write_text(changed + agent)
            found: dict[str, list[str]] = {}
            for check in json.loads(run("--config", str(policy), "--json")[1])["checks"]:
                found.setdefault(check["check"], []).append(check["message"])
            assert found["endpoint"][0].startswith(f"{endpoint} answers, in ")
            assert found["agent"][0].startswith(f"runs (pid {process.pid})")
            assert found["state"][0].startswith(str(tmp_path / "state"))
            is_rejected = "rulez" in changed
            known = "this VM is vm-1, also known as web" if is_rejected else "this VM is vm-1"
            assert found["vm-name"] == [known]
    finally:
        process.terminate()
        process.communicate()


def test_an_agent_that_does_not_answer_is_a_warning(
    examine: Examine, endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "_ANSWER_WITHIN_SECONDS", 0.2)
    state = tmp_path / "state"
    host.create_private_dir(state)
    Store.open(state, datetime.now(UTC)).close()
    with contextlib.closing(host.acquire_lock(state / "lock")):
        report = examine(endpoint.url)
    assert report.one("agent") == Check(
        "warning",
        f"the agent (pid {os.getpid()}) does not answer",
        "see the checks state and disk, and its log; if it stays, restart it",
    )


def test_a_lock_is_reported_with_its_holder_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert host.lock_owner(path) is None
    lock = host.acquire_lock(path)
    try:
        assert host.lock_owner(path) == str(os.getpid())
    finally:
        lock.close()
    assert host.lock_owner(path) is None
    host.acquire_lock(path).close()


def test_only_another_agent_on_the_machine_is_a_warning(
    examine: Examine, endpoint: Endpoint, tmp_path: Path
) -> None:
    def others(report: Report) -> list[str]:
        """Other agents that this test started: there may be more on the machine."""
        mine = [found for found in report.checks["other-agents"] if str(tmp_path) in found.message]
        assert all((one.state, one.hint) == ("warning", STOP_ONE) for one in mine)
        return [one.message for one in mine]

    assert others(examine(endpoint.url)) == []
    with contextlib.ExitStack() as stack:
        first, _ = stack.enter_context(running_agent("--config", str(tmp_path / "p.yaml")))
        assert others(examine(endpoint.url)) == [], "it is that of the state directory"
        second = ("--config", str(tmp_path / "p.yaml"), "--state-dir", str(tmp_path / "second"))
        stack.enter_context(running_agent(*second[:3], str(tmp_path / "third"), "--observe"))
        assert others(examine(endpoint.url)) == [], "it only observes"
        beside, log = stack.enter_context(running_agent(*second))
        told = f"another agent acts on this machine, process {beside.pid}: "
        command = " ".join([sys.executable, "-m", "scheduled_events_agent", "run", *second])
        assert others(examine(endpoint.url)) == [told + command]
        (finding,) = others(examine(endpoint.url, "", "--state-dir", second[-1]))
        assert finding.startswith(f"another agent acts on this machine, process {first.pid}: ")
        for entry in map(json.loads, log):
            if entry["message"] == "another agent acts on this machine" and entry["pid"] == first.pid:
                break
        assert (entry["level"], entry["hint"]) == ("warning", STOP_ONE)
        assert entry["command"].endswith(" -m scheduled_events_agent run --config " + str(tmp_path / "p.yaml"))


def test_the_process_of_the_own_service_is_no_other_agent(
    examine: Examine, endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that is starting has no lock yet: here its process has another state directory in its place."""

    def others(*options: str) -> list[str]:
        found = [one.message for one in examine(endpoint.url, "", *options).checks["other-agents"]]
        return re.findall(
            r"another agent acts on this machine, process (\d+): .*" + re.escape(str(tmp_path)), "\n".join(found)
        )

    assert examine(endpoint.url).one("agent").message.startswith("no agent runs")
    config = ("--config", str(tmp_path / "p.yaml"))
    with running_agent(*config, "--state-dir", str(tmp_path / "second")) as (service, _):
        assert others() == [str(service.pid)]
        monkeypatch.setattr(processes, "is_of_own_service", lambda pid: pid == service.pid)
        assert others() == []
        with running_agent(*config) as (manual, _):
            assert others() == [str(service.pid)], "another process has the lock"
            assert others("--state-dir", str(tmp_path / "second")) == [str(manual.pid)]

    def ended(pid: int) -> bool:
        raise FileNotFoundError(pid)

    with running_agent(*config) as (service, _):
        monkeypatch.setattr(processes, "is_of_own_service", ended)
        assert others("--state-dir", str(tmp_path / "third")) == []


ERROR = "/etc/p.yaml:3: rules[0]: wrong"
FAILURES = {
    "the log": (
        ServiceFailure("no module named x", is_retried=True),
        "",
        "no module named x",
        "systemd starts it again",
    ),
    "the policy": (ServiceFailure("", is_retried=True), ERROR, ERROR, "systemd starts it again"),
    "not known": (
        ServiceFailure("", is_retried=True),
        "",
        f"{host.supervisor_commands().log} says why",
        "systemd starts it again",
    ),
    "for good": (ServiceFailure("exit", is_retried=False), ERROR, "exit", doctor_checks.START),
}


@pytest.mark.parametrize(("failure", "problem", "reason", "then"), FAILURES.values(), ids=FAILURES)
def test_the_hint_for_a_service_that_fails_names_what_made_it_fail(
    tmp_path: Path, failure: ServiceFailure, problem: str, reason: str, then: str
) -> None:
    service = service_of("root")._replace(is_running=False, state="activating (auto-restart)", failure=failure)
    found = doctor_checks.check_service(service, "", problem)
    assert (found.state, found.hint) == ("error", f"it failed: {reason}; correct that, then {then}")
    assert doctor._check_absent_agent(tmp_path, service, NO_OPTIONS).hint == "see the check service"


def test_a_service_that_is_starting_is_waited_for(tmp_path: Path) -> None:
    service = service_of("root")._replace(is_running=False, state="activating (start)", is_starting=True)
    found = doctor_checks.check_service(service, "")
    assert (found.state, found.hint) == ("warning", "it is starting: run this again in half a minute")
    assert doctor._check_absent_agent(tmp_path, service, NO_OPTIONS).hint == "see the check service"
    stopped = service._replace(state="inactive (dead)", is_starting=False)
    start = host.supervisor_commands().start
    for finding in (
        doctor_checks.check_service(stopped, ""),
        doctor._check_absent_agent(tmp_path, stopped, NO_OPTIONS),
    ):
        assert (finding.hint, finding.command) == (f"start it: {start}", start)
    masked = stopped._replace(is_masked=True)
    unmask = "systemctl unmask scheduled-events-agent && systemctl enable --now scheduled-events-agent"
    for finding in (
        doctor_checks.check_service(masked, ""),
        doctor._check_absent_agent(tmp_path, masked, NO_OPTIONS),
    ):
        assert (finding.hint, finding.command) == (f"to run it: {unmask}", unmask)


def test_a_service_that_does_not_start_with_the_machine_is_to_be_enabled() -> None:
    found = doctor_checks.check_service(service_of("root")._replace(is_enabled=False), "")
    enable = host.supervisor_commands().enable
    assert (found.state, found.hint, found.command) == ("warning", f"enable it: {enable}", enable)
    assert found.message.endswith(": after a reboot there will be no agent")


@contextlib.contextmanager
def running_agent(*options: str) -> Iterator[tuple["subprocess.Popen[str]", Iterator[str]]]:
    """The agent's process, ready, and the lines of its log from the beginning."""
    command = [sys.executable, "-m", "scheduled_events_agent", "run", *options]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    read = []
    try:
        for line in process.stderr:
            read.append(line)
            if "agent started" in line:
                break
        yield process, chain(read, process.stderr)
    finally:
        process.terminate()
        process.communicate()


# --- the command


def test_the_text_is_plain_where_no_terminal_is_and_has_what_the_json_has(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "p.yaml").write_text(
        f"imds: {{endpoint: 'http://127.0.0.1:1'}}\nagent: {{state_dir: '{tmp_path / 'state'}', listen: 'off'}}\n"
    )
    code, out, err = run("--config", "p.yaml")
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert lines[0].startswith("error    endpoint       GET http://127.0.0.1:1/metadata/instance?")
    assert lines[1].startswith("                        -> run this on the VM itself: ")
    assert lines[2:7] == [
        f"skipped  {name:13}  waits for the check endpoint"
        for name in ("proxy", "vm-name", "version", "events", "clock")
    ]
    assert lines[7:11] == [
        "ok       policy         p.yaml: valid",
        "ok       hooks          the policy names no hook",
        "ok       secrets        there is no directory of secrets for hooks",
        "ok       permissions    no other account can change the policy or the files that it names",
    ]
    assert lines[11] == "ok       fleet          the policy names no fleet"
    assert re.fullmatch(r"\d+ ok, \d+ warnings?, 1 error, 5 skipped", lines[-1])
    assert "\x1b" not in out


def test_wrong_usage_ends_with_2(run: Callable[..., tuple[int, str, str]]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("--no-such-option")
    assert caught.value.code == 2


SPOT = "rules: [{name: spot, when: {type: SpotRebalanceRecommendation}}]\n"


@pytest.mark.parametrize("status", [400, 403, 404, 410, 500])
def test_the_working_api_version_is_reported(examine: Examine, status: int) -> None:
    with Simulator(vms=("vm-1",), rate_limit=None) as simulator:
        endpoint = simulator.endpoint()
        assert examine(endpoint).one("version").message == "the document comes in api-version 2020-07-01"
        assert examine(endpoint, SPOT).one("version").message == "the document comes in api-version 2024-07-09"

        simulator.fault(None, "status", status=status, api_version="2024-07-09")
        report = examine(endpoint, SPOT)
    version = report.one("version")
    refused = (
        "SpotRebalanceRecommendation events are not available: api-version 2024-07-09 "
        f"answers {status}; the document comes in 2020-07-01"
    )
    assert (version.state, version.message) == ("warning", refused)
    assert "Microsoft.Compute/SpotPlus" in version.hint
    assert report.states("endpoint", "proxy", "events") == ["ok", "ok", "ok"]
