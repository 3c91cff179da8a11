"""Hooks that are systemd units, under a real systemd: waited for, ended, judged, told, heard, and permitted."""

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.platform == "win32":
    pytest.skip("systemd is Linux's", allow_module_level=True)

from container import CHECKOUT, PROJECT, Container

from agent.host.systemd_unit import USER, polkit_rule

pytest_plugins = ["machines"]
pytestmark = pytest.mark.timeout(600)

# The same Python as in the machine; see debian().
_LIBRARIES = f"{PROJECT}/.venv/lib/python3.11/site-packages"
_ENVIRONMENT = {"PYTHONPATH": f"{PROJECT}:{_LIBRARIES}", "PYTHONDONTWRITEBYTECODE": "1"}
_RUN_HOOK = f"{PROJECT}/tests/system/run_hook.py"
_PLACE = "/run/scheduled-events-agent/units"
_UNITS = "/etc/systemd/system"

# Without a program to make the files, for that would be asked to end as well.
_TRAP = "trap ': >/run/asked; exit 0' TERM; : >/run/up; while :; do sleep 0.02; done"
_DEAF = "trap '' TERM; while :; do sleep 1; done"
_COUNT = "echo begin >>/run/count; sleep 1; echo end >>/run/count"


class Machine:
    """A booted Debian, and hooks run in it."""

    def __init__(self, container: Container) -> None:
        self.container = container
        self._number = 0

    def unit(self, service: str, unit: str = "", name: str = "") -> str:
        """Write a unit; returns its name, new each time if none is given."""
        self._number += 1
        name = name or f"hook-{self._number}.service"
        text = f"[Unit]\nDescription={name}\n{unit}\n[Service]\n{service}\n"
        self.container.write(f"{_UNITS}/{name}", text)
        self.container.run("systemctl", "daemon-reload")
        for left in ("up", "asked", "count", "go"):
            self.container.path(f"/run/{left}").unlink(missing_ok=True)
        return name

    def shell(self, type_: str, script: str, unit: str = "") -> str:
        """Write a unit that runs a shell script."""
        path = f"/opt/hook-{self._number + 1}"
        self.container.write(path, f"#!/bin/sh\n{script}\n", 0o755)
        return self.unit(f"Type={type_}\nExecStart={path}", unit)

    def hook(self, unit: str, user: str = "", **task: Any) -> Any:
        """Run a hook that is this unit; returns its result and the lines it wrote."""
        options = {key: task.pop(key) for key in ("timeout", "attempts", "env") if key in task}
        done = self.container.run(
            "python3",
            _RUN_HOOK,
            input=json.dumps({"hook": {"unit": unit, **options}, **task}),
            user=user,
            environment=_ENVIRONMENT,
        )
        assert done.stderr == ""
        return json.loads(done.stdout)

    def ending(self, unit: str, **task: Any) -> tuple[str, int | None, str]:
        result = self.hook(unit, **task)
        return result["outcome"], result["exit_code"], result["detail"]

    def state(self, unit: str) -> str:
        return self.container.run("systemctl", "is-active", unit, check=False).stdout.strip()

    def variables(self, path: str) -> dict[str, str]:
        """What a copy of some /proc/PID/environ holds."""
        entries = self.container.path(path).read_bytes().decode().rstrip("\0").split("\0")
        assert len(entries) == len({entry.split("=", 1)[0] for entry in entries})
        return dict(entry.split("=", 1) for entry in entries)

    def remember(self, unit: str) -> None:
        """Have systemd remember how the unit ended, for something else wants it; that starts it once."""
        self.container.run("systemctl", "start", self.unit("ExecStart=/bin/sleep 600", f"Wants={unit}"))
        self.container.wait_for(lambda: self.state(unit) == "inactive", f"{unit} has run")

    def meanwhile(self, unit: str, *command: str, begins: Callable[[], bool] | None = None) -> threading.Thread:
        """Run a command as soon as the unit has made /run/up, or the test holds."""

        def act() -> None:
            test = begins or self.container.path("/run/up").exists
            self.container.wait_for(test, f"{unit} was so far")
            self.container.run(*command)

        thread = threading.Thread(target=act)
        thread.start()
        return thread


@pytest.fixture(scope="module")
def machine(debian: Path) -> Iterator[Machine]:
    with Container(debian) as container:
        yield Machine(container)


# --- waited for


def test_a_unit_is_waited_for_and_what_it_wrote_is_kept(machine: Machine) -> None:
    unit = machine.shell("oneshot", "echo one; sleep 0.5; echo two; touch /run/up; printf 'no newline'")
    result = machine.hook(unit)
    assert (result["outcome"], result["exit_code"], result["detail"]) == ("succeeded", 0, "exit code 0")
    assert machine.container.path("/run/up").exists()
    assert [line for line in result["lines"] if unit not in line] == ["one", "two", "no newline"]
    assert f"{unit}: Deactivated successfully." in result["lines"]
    assert result["tail"].splitlines() == result["lines"]


@pytest.mark.parametrize("type_", ["simple", "exec", "idle"])
def test_a_unit_of_any_type_is_waited_for_to_its_end_not_only_to_its_start(machine: Machine, type_: str) -> None:
    unit = machine.shell(type_, "sleep 0.7; echo done; touch /run/up")
    assert machine.ending(unit) == ("succeeded", 0, "exit code 0")
    assert machine.container.path("/run/up").exists()


def test_every_run_has_its_own_lines(machine: Machine) -> None:
    unit = machine.shell("oneshot", 'echo "this is $SCHEDULED_EVENT_ID"')
    path = machine.container.path(f"{_UNITS}/{unit}")
    path.write_text(path.read_text() + f"EnvironmentFile={_PLACE}/%n/environment\n")
    machine.container.run("systemctl", "daemon-reload")
    for event in ("A", "B", "C"):
        lines = machine.hook(unit, environment={"SCHEDULED_EVENT_ID": event})["lines"]
        assert [line for line in lines if unit not in line] == [f"this is {event}"]


def test_a_failure_has_the_exit_code_of_the_unit(machine: Machine) -> None:
    unit = machine.shell("oneshot", "echo oh no >&2; exit 3")
    result = machine.hook(unit)
    assert (result["outcome"], result["exit_code"], result["detail"]) == ("failed", 3, "exit code 3")
    assert "oh no" in result["lines"]
    assert f"{unit}: Failed with result 'exit-code'." in result["lines"]


def test_a_unit_is_tried_again_as_often_as_the_hook_says(machine: Machine) -> None:
    unit = machine.shell("oneshot", "test -e /run/up || { touch /run/up; exit 1; }")
    result = machine.hook(unit, attempts=2)
    assert (result["outcome"], result["attempts"]) == ("succeeded", 2)


def test_a_unit_that_systemd_starts_again_counts_as_it_ends_at_last(machine: Machine) -> None:
    unit = machine.shell("oneshot", "test -e /run/up || { touch /run/up; exit 1; }")
    machine.unit(
        f"Type=oneshot\nExecStart=/opt/hook-{unit[5:-8]}\nRestart=on-failure\nRestartSec=100ms", name=unit
    )
    assert machine.ending(unit) == ("succeeded", 0, "exit code 0")


def test_an_exit_code_that_the_unit_takes_for_a_success_is_one(machine: Machine) -> None:
    unit = machine.unit("Type=oneshot\nExecStart=/bin/sh -c 'exit 7'\nSuccessExitStatus=7")
    assert machine.ending(unit) == ("succeeded", 0, "exit code 7, which its unit takes for a success")


# --- never a success too early


@pytest.mark.parametrize(
    ("service", "unit", "ending"),
    [
        (
            "Type=oneshot\nExecStart=/bin/true",
            "ConditionPathExists=/nowhere",
            (None, "it was skipped: a condition (Condition...=, Assert...=) of the unit did not hold"),
        ),
        (
            "Type=oneshot\nExecStart=/bin/true",
            "AssertPathExists=/nowhere",
            (None, "it was skipped: a condition (Condition...=, Assert...=) of the unit did not hold"),
        ),
        (
            "Type=oneshot\nExecStart=/bin/true\nExecCondition=/bin/false",
            "",
            (None, "it was skipped: its ExecCondition= did not hold"),
        ),
        ("Type=oneshot\nExecStart=/nowhere", "", (203, "exit code 203")),
        (
            "Type=oneshot\nExecStartPre=/bin/false\nExecStart=/bin/true",
            "",
            (None, "systemd calls it a failure (exit-code)"),
        ),
        ("ExecStart=/bin/sh -c 'kill -TERM $$$$'", "", (-15, "ended by SIGTERM")),
        ("ExecStart=/bin/sh -c 'kill -SEGV $$$$'", "", (-11, "ended by SIGSEGV")),
        (
            "Type=oneshot\nExecStart=/bin/sleep 60\nTimeoutStartSec=300ms",
            "",
            (None, "it took longer than its own file allows (TimeoutStartSec=, RuntimeMaxSec=, TimeoutStopSec=)"),
        ),
        (
            "Type=simple\nExecStart=/bin/sleep 60\nRuntimeMaxSec=300ms",
            "",
            (None, "it took longer than its own file allows (TimeoutStartSec=, RuntimeMaxSec=, TimeoutStopSec=)"),
        ),
        (
            "Type=oneshot\nExecStart=/bin/true",
            "Requires=needed.service\nAfter=needed.service",
            (None, "not started: a unit that it needs failed"),
        ),
    ],
    ids=["condition", "assert", "exec-condition", "no-program", "pre", "term", "segv", "slow", "max", "needs"],
)
def test_what_did_not_run_to_its_end_has_failed(
    machine: Machine, service: str, unit: str, ending: tuple[int | None, str]
) -> None:
    machine.unit("Type=oneshot\nExecStart=/bin/false", name="needed.service")
    assert machine.ending(machine.unit(service, unit)) == ("failed", *ending)


def test_a_condition_that_no_longer_holds_is_not_hidden_by_an_earlier_success(machine: Machine) -> None:
    unit = machine.unit("Type=oneshot\nExecStart=/bin/true", "ConditionPathExists=!/run/up")
    machine.remember(unit)
    assert machine.ending(unit) == ("succeeded", 0, "exit code 0")
    machine.container.path("/run/up").touch()
    result = machine.hook(unit)
    assert (result["outcome"], result["exit_code"]) == ("failed", None)
    (line,) = result["lines"]
    assert "unmet condition check" in line
    assert "ConditionPathExists=!/run/up" in line


def test_started_too_often_is_said_so(machine: Machine) -> None:
    unit = machine.unit("Type=oneshot\nExecStart=/bin/true", "StartLimitBurst=2\nStartLimitIntervalSec=600")
    machine.remember(unit)
    assert machine.ending(unit)[0] == "succeeded"
    assert machine.ending(unit) == (
        "failed",
        None,
        "it was started too often in a short time (StartLimitBurst= of the unit)",
    )


@pytest.mark.parametrize("type_", ["simple", "oneshot"])
def test_a_unit_that_an_operator_stops_has_failed_even_if_it_ends_with_0(machine: Machine, type_: str) -> None:
    unit = machine.shell(type_, _TRAP)
    operator = machine.meanwhile(unit, "systemctl", "stop", unit)
    ending = machine.ending(unit)
    operator.join()
    assert machine.container.path("/run/asked").exists()
    assert ending == ("failed", None, "stopped by another program or an operator before it was done")


@pytest.mark.parametrize("type_", ["simple", "oneshot"])
@pytest.mark.parametrize("what", ["daemon-reload", "daemon-reexec"])
def test_a_unit_is_waited_for_while_systemd_itself_is_replaced(machine: Machine, type_: str, what: str) -> None:
    unit = machine.shell(type_, "touch /run/up; sleep 2; echo done; exit 4")
    operator = machine.meanwhile(unit, "systemctl", what)
    result = machine.hook(unit)
    operator.join()
    assert (result["outcome"], result["exit_code"]) == ("failed", 4)
    assert "done" in result["lines"]


@pytest.mark.parametrize("type_", ["simple", "oneshot"])
def test_a_unit_is_waited_for_while_the_bus_is_away(machine: Machine, type_: str) -> None:
    unit = machine.shell(type_, "touch /run/up; sleep 2; echo done")
    operator = machine.meanwhile(unit, "systemctl", "kill", "--signal=KILL", "dbus.service")
    result = machine.hook(unit)
    operator.join()
    assert result["outcome"] == "succeeded", result
    assert "done" in result["lines"]


# --- refused


def test_what_cannot_be_waited_for_is_refused_with_the_way_out(machine: Machine) -> None:
    machine.container.run("systemctl", "mask", "masked.service")
    stays = machine.unit("Type=oneshot\nExecStart=/bin/true\nRemainAfterExit=yes")
    real = machine.unit("Type=oneshot\nExecStart=/bin/true")
    machine.container.path(f"{_UNITS}/other-name.service").symlink_to(f"{_UNITS}/{real}")
    machine.unit("Type=oneshot", name="broken.service")
    server = "ExecStart=/bin/sleep 1000\n"
    for_ever = machine.unit(f"{server}Restart=always")
    forking = machine.unit(f"{server}Type=forking")
    at_boot = machine.unit(f"{server}[Install]\nWantedBy=multi-user.target")
    machine.container.run("systemctl", "enable", "--now", at_boot)
    lasting = (
        ", so it is a server that runs on; as a hook it would never be done, and be stopped when its time is up: "
        "name a unit of Type=oneshot that starts or stops it"
    )
    reload = "If it is new or changed: systemctl daemon-reload"
    faults = {
        "absent.service": f"absent.service cannot be started: Unit absent.service not found. {reload}",
        "masked.service": f"masked.service cannot be started: Unit masked.service is masked. {reload}",
        stays: f"{stays} has RemainAfterExit=yes, so nothing tells when it is done: set it to no",
        "other-name.service": f"other-name.service is another name of {real}: use that one",
        "broken.service": "broken.service cannot be started: Unit broken.service has a bad unit file setting. "
        + reload,
        for_ever: f"{for_ever} has Restart=always{lasting}",
        forking: f"{forking} has Type=forking{lasting}",
        at_boot: f"{at_boot} is started at boot{lasting}",
    }
    for unit, fault in faults.items():
        assert machine.ending(unit) == ("not_started", None, fault)
    assert machine.state(at_boot) == "active"
    policy = "hooks:\n" + "".join(f"  h{n}: {{unit: {unit}}}\n" for n, unit in enumerate([*faults, real]))
    policy += f"on_clear: [{', '.join(f'h{n}' for n in range(len(faults) + 1))}]\n"
    machine.container.write("/tmp/policy.yaml", policy)
    done = machine.container.run(
        *("python3", "-m", "agent", "check", "--config", "/tmp/policy.yaml", "--json"),
        user="daemon",
        environment=_ENVIRONMENT,
    )
    assert json.loads(done.stdout)["warnings"] == [
        f"/tmp/policy.yaml:{n + 2}: hooks.h{n}.unit: {fault}" for n, fault in enumerate(faults.values())
    ]


# --- ended


def test_a_unit_whose_time_is_up_is_stopped(machine: Machine) -> None:
    unit = machine.shell("oneshot", _TRAP)
    assert machine.ending(unit, timeout=5)[::2] == ("timed_out", "killed after 5s, its time limit")
    assert machine.container.path("/run/asked").exists()
    assert machine.state(unit) == "inactive"


@pytest.mark.parametrize("type_", ["simple", "oneshot"])
def test_a_unit_that_will_not_end_is_killed(machine: Machine, type_: str) -> None:
    unit = machine.shell(type_, _DEAF)
    result = machine.hook(unit, seconds=3.0)
    assert result["outcome"] == "timed_out"
    assert result["detail"].endswith(", no time was left")
    assert result["exit_code"] == -9
    assert 2.5 < result["duration_seconds"] < 60.0
    assert machine.state(unit) == "failed"


def test_a_canceled_unit_is_stopped(machine: Machine) -> None:
    unit = machine.shell("simple", _TRAP)
    outcome, _, detail = machine.ending(unit, cancel_when="/run/up")
    assert outcome == "canceled"
    assert re.match(r"canceled after \d", detail)
    assert machine.container.path("/run/asked").exists()
    assert machine.state(unit) == "inactive"


# --- at the same time


@pytest.mark.parametrize("type_", ["simple", "oneshot"])
def test_a_unit_that_an_operator_started_is_run_again_when_that_run_has_ended(
    machine: Machine, type_: str
) -> None:
    unit = machine.shell(type_, f"touch /run/up; {_COUNT}; exit 5")
    machine.container.run("systemctl", "start", "--no-block", unit)
    machine.container.wait_for(lambda: machine.container.path("/run/up").exists(), "it runs")
    result = machine.hook(unit)
    assert (result["outcome"], result["exit_code"]) == ("failed", 5)
    assert machine.container.path("/run/count").read_text() == "begin\nend\n" * 2
    # It is systemd's own line, for journald may not find out the unit of a process that is gone very soon.
    assert len([line for line in result["lines"] if line.startswith(("Starting hook-", "Started hook-"))]) == 1


@pytest.mark.parametrize("type_", ["simple", "oneshot"])
@pytest.mark.parametrize(("limit", "outcome"), [({"cancel_after": 1}, "canceled"), ({"timeout": 1}, "timed_out")])
def test_a_run_of_an_operator_is_left_alone_when_the_wait_for_it_ends(
    machine: Machine, type_: str, limit: dict[str, Any], outcome: str
) -> None:
    unit = machine.shell(type_, f"touch /run/up; {_COUNT}; sleep 300")
    machine.container.run("systemctl", "start", "--no-block", unit)
    machine.container.wait_for(lambda: machine.container.path("/run/up").exists(), "it runs")
    result = machine.hook(unit, **limit)
    assert result["outcome"] == outcome
    assert result["duration_seconds"] < 150  # it runs on for longer
    assert result["lines"] == [
        "(it ran already and the agent did not start it: the agent waited for it, and did not stop it)"
    ]
    assert machine.state(unit) == {"simple": "active", "oneshot": "activating"}[type_]
    assert machine.container.path("/run/count").read_text().count("begin") == 1
    machine.container.run("systemctl", "stop", unit)


@pytest.mark.parametrize("event", ["E-1", "E-2"], ids=["same", "another"])
def test_a_unit_that_a_killed_agent_left_is_run_again_when_that_run_has_ended(
    machine: Machine, event: str
) -> None:
    script = (
        'echo "$SCHEDULED_EVENT_ID" >> /run/count; touch /run/up; until [ -e /run/go ]; do sleep 0.05; done; '
        "echo end >> /run/count"
    )
    environment = f"EnvironmentFile={_PLACE}/%n/environment"
    unit = machine.unit(f"Type=oneshot\n{environment}\nExecStart=/bin/sh -c '{script}'")
    task = {"hook": {"unit": unit}, "environment": {"SCHEDULED_EVENT_ID": "E-1"}}
    machine.container.write("/tmp/task", json.dumps(task))
    settings = " ".join(f"{name}={value}" for name, value in _ENVIRONMENT.items())
    service = f"ExecStart=/usr/bin/python3 {_RUN_HOOK}\nStandardInput=file:/tmp/task\nEnvironment={settings}"
    agent = machine.unit(service)
    machine.container.run("systemctl", "start", agent)
    machine.container.wait_for(lambda: machine.container.path("/run/up").exists(), "the hook runs")
    machine.container.run("systemctl", "kill", "--signal=KILL", agent)
    told = machine.container.path(f"{_PLACE}/{unit}/environment")
    machine.container.wait_for(lambda: machine.state(agent) == "failed", "the agent is gone")
    assert machine.state(unit) == "activating"
    before = told.stat().st_ino
    next_one = machine.meanwhile(
        unit, "touch", "/run/go", begins=lambda: told.exists() and told.stat().st_ino != before
    )
    ending = machine.ending(unit, environment={"SCHEDULED_EVENT_ID": event})
    next_one.join()
    assert ending == ("succeeded", 0, "exit code 0")
    assert machine.container.path("/run/count").read_text() == f"E-1\nend\n{event}\nend\n"
    assert list(machine.container.path(_PLACE).iterdir()) == []


def test_hooks_of_the_same_unit_run_one_after_the_other(machine: Machine) -> None:
    unit = machine.shell("oneshot", _COUNT)
    results = machine.hook(unit, at_once=2)
    assert [result["outcome"] for result in results] == ["succeeded", "succeeded"]
    assert machine.container.path("/run/count").read_text() == "begin\nend\n" * 2


# --- told

_HOSTILE = {
    "QUOTES": "\"double\" 'single' `touch /run/owned` $(touch /run/owned) ${HOME} $HOME %n %% \\",
    "LINES": 'first"\nSCHEDULED_EVENT_OWNED=1\n\n"\nLD_PRELOAD=/tmp/x.so\n# comment\n; comment',
    "BACKSLASHES": "\\ \\\\ \\\" \\' \\n \\x41 \\\n end\\",
    "COMMENT": "# not a comment ; nor this",
    "SPACES": "  kept  \t ",
    "BLANK": "",
    "UNICODE": "\u00e4\u20ac\U0001f600\u2028\u202e\u0085\ufeff",
    "LONG": "x\"'\\" * 2000,
    "TERMINAL": "\x1b[31mred\x07\x7f\r\x01",
    "NOTHING": "\ufffe\uffff\ufdd0\U0001ffff|\ud800",
}
_ARRIVES = _HOSTILE | {"TERMINAL": " [31mred    ", "NOTHING": "\ufffd\ufffd\ufffd\ufffd|\ufffd"}


def test_whatever_azure_writes_arrives_as_it_is_and_as_nothing_else(machine: Machine) -> None:
    plain = machine.unit("Type=oneshot\nExecStart=/bin/cp /proc/self/environ /run/seen")
    machine.container.run("systemctl", "start", plain)
    of_every_unit = machine.variables("/run/seen").keys()
    unit = machine.unit(
        f"Type=oneshot\nEnvironmentFile={_PLACE}/%n/environment\nStandardInput=file:{_PLACE}/%n/event.json\n"
        "ExecStart=/bin/cp /proc/self/environ /run/seen\nExecStart=/bin/cp /dev/stdin /run/seen.json"
    )
    given = {f"SCHEDULED_EVENT_{name}": text for name, text in _HOSTILE.items()}
    event = json.dumps(_HOSTILE)
    result = machine.hook(unit, environment=given, stdin=event, env={"MODE": "fast $X"})
    assert result["outcome"] == "succeeded", result
    seen = machine.variables("/run/seen")
    found = {name: text for name, text in seen.items() if name not in of_every_unit}
    assert found == {"MODE": "fast $X"} | {f"SCHEDULED_EVENT_{name}": text for name, text in _ARRIVES.items()}
    assert machine.container.path("/run/seen.json").read_text() == event
    assert not machine.container.path("/run/owned").exists()


def test_the_example_of_the_reference_works_as_it_stands(machine: Machine) -> None:
    text = (CHECKOUT / "docs" / "policy.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```ini\n# (/\S+/drain-web\.service)\n(.*?)```", text, re.DOTALL)
    machine.container.write(*example)
    machine.container.write("/usr/local/sbin/drain-web", "#!/bin/sh\ncat; echo; echo $SCHEDULED_EVENT_ID\n", 0o755)
    machine.container.run("systemctl", "daemon-reload")
    result = machine.hook("drain-web.service", environment={"SCHEDULED_EVENT_ID": "A"}, stdin="{}")
    own = ("drain-web.service", "Take the web server out of service")
    assert result["outcome"] == "succeeded"
    assert [line for line in result["lines"] if not any(text in line for text in own)] == ["{}", "A"]


def test_what_a_unit_is_told_is_for_the_agent_alone_and_gone_afterwards(machine: Machine) -> None:
    unit = machine.unit(f"Type=oneshot\nExecStart=/bin/sh -c 'stat -c \"%%a %%n\" {_PLACE}/%n {_PLACE}/%n/*'")
    lines = machine.hook(unit, environment={"SCHEDULED_EVENT_ID": "A"})["lines"]
    assert [line for line in lines if line[:1].isdigit()] == [
        f"700 {_PLACE}/{unit}",
        f"600 {_PLACE}/{unit}/environment",
        f"600 {_PLACE}/{unit}/event.json",
    ]
    assert list(machine.container.path(_PLACE).iterdir()) == []


def test_what_a_unit_is_told_can_be_its_credential(machine: Machine) -> None:
    unit = machine.unit(
        f"Type=oneshot\nUser=nobody\nLoadCredential=environment:{_PLACE}/%n/environment\n"
        "ExecStart=/bin/sh -c 'id -un; cat $$CREDENTIALS_DIRECTORY/environment'"
    )
    lines = machine.hook(unit, environment={"SCHEDULED_EVENT_STAGE": "prepare"})["lines"]
    assert [line for line in lines if unit not in line] == ["nobody", 'SCHEDULED_EVENT_STAGE="prepare"']


# --- permitted

_REFUSED = (
    f"cannot start {{unit}}: {USER} may not (Interactive authentication required.): a polkit rule has to allow it "
    "to start, stop and kill this unit; install-unit --strict writes one for the units of the policy"
)
_UNHEARD = (
    "(its output cannot be read: the journal shows nothing of it to this account; "
    "the group systemd-journal may read it)"
)


class Strict:
    """The strict set-up: its account, its drop-in, its polkit rule; hooks run as a service of it."""

    def __init__(self, machine: Machine, *names: str) -> None:
        self._machine = machine
        container = machine.container
        container.run("systemd-sysusers", f"{PROJECT}/packaging/sysusers.conf")
        rule = polkit_rule((CHECKOUT / "systemd" / "polkit.rules").read_text(), names)
        container.write("/etc/polkit-1/rules.d/50-scheduled-events-agent.rules", rule)
        container.run("systemctl", "restart", "polkit.service")
        settings = " ".join(f"{name}={value}" for name, value in _ENVIRONMENT.items())
        self._unit = machine.unit(
            f"Type=oneshot\nExecStart=/usr/bin/python3 {_RUN_HOOK}\nStandardInput=file:/tmp/task\n"
            f"StandardOutput=truncate:/run/result\nEnvironment={settings}\n"
            "RuntimeDirectory=scheduled-events-agent\nRuntimeDirectoryMode=0700"
        )
        drop_in = (CHECKOUT / "systemd" / "strict.conf").read_text()
        container.write(f"{_UNITS}/{self._unit}.d/50-strict.conf", drop_in)
        container.run("systemctl", "daemon-reload")

    def drop_in(self, text: str) -> None:
        self._machine.container.write(f"{_UNITS}/{self._unit}.d/60-test.conf", f"[Service]\n{text}\n")
        self._machine.container.run("systemctl", "daemon-reload")

    def hook(self, unit: str, **task: Any) -> dict[str, Any]:
        self._machine.container.write("/tmp/task", json.dumps({"hook": {"unit": unit}, **task}))
        self._machine.container.run("systemctl", "start", self._unit)
        result: dict[str, Any] = json.loads(self._machine.container.path("/run/result").read_text())
        return result


def test_an_agent_without_privileges_starts_only_what_its_rule_names(machine: Machine) -> None:
    named = machine.shell("oneshot", 'id -un; cat; test "$SCHEDULED_EVENT_ID" = A')
    path = machine.container.path(f"{_UNITS}/{named}")
    told = f"EnvironmentFile={_PLACE}/%n/environment\nStandardInput=file:{_PLACE}/%n/event.json\n"
    path.write_text(path.read_text() + told)
    deaf = machine.shell("simple", _DEAF)
    trapped = machine.shell("simple", _TRAP)
    other = machine.unit("Type=oneshot\nExecStart=/bin/touch /run/owned")
    strict = Strict(machine, named, deaf, trapped)

    result = strict.hook(named, environment={"SCHEDULED_EVENT_ID": "A"}, stdin='{"EventId": "A"}')
    assert (result["outcome"], result["detail"]) == ("succeeded", "exit code 0")
    assert [line for line in result["lines"] if named not in line] == ["root", '{"EventId": "A"}']

    result = strict.hook(other)
    assert (result["outcome"], result["detail"]) == (
        "not_started",
        _REFUSED.format(unit=other),
    )
    assert not machine.container.path("/run/owned").exists()

    assert strict.hook(trapped, cancel_when="/run/up")["outcome"] == "canceled"
    assert machine.state(trapped) == "inactive"

    result = strict.hook(deaf, seconds=3.0)
    assert (result["outcome"], result["exit_code"]) == ("timed_out", -9)
    assert machine.state(deaf) == "failed"


def test_without_the_journals_group_the_hook_works_and_says_what_is_missing(machine: Machine) -> None:
    unit = machine.shell("oneshot", "echo unheard")
    strict = Strict(machine, unit)
    strict.drop_in("SupplementaryGroups=")
    result = strict.hook(unit)
    assert result["outcome"] == "succeeded"
    assert result["lines"] == [_UNHEARD]
