"""The shipped hooks on a machine without a program that they need."""

import re
import sys
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the hooks are shell scripts for Linux", allow_module_level=True)

from hook_machine import CALLS, PROGRAMS, is_recovery, run_hook
from hook_shells import SHIPPED_HOOKS

pytestmark = pytest.mark.usefixtures("hook_shell")

ADDRESS = {"KEEPALIVED_ADDRESS": "192.0.2.1"}
CONTAINER = {"SERVICE_UNIT": "", "SERVICE_CONTAINER": "web"}
# Of each hook: settings, the variable that the error names, and the programs that it leads to.
NEEDS: dict[tuple[str, ...], list[tuple[dict[str, str], str, str]]] = {
    ("ci-runner-prepare",): [
        ({}, "CI_RUNNER_UNIT", "systemctl"),
        ({"CI_RUNNER_STOP": ""}, "CI_RUNNER_", "systemctl"),
    ],
    ("ci-runner-recover",): [({}, "CI_RUNNER_UNIT", "systemctl")],
    ("haproxy-prepare",): [({}, "HAPROXY_UNIT", "systemctl"), (ADDRESS, "KEEPALIVED_ADDRESS", "ip ss python3")],
    ("haproxy-recover",): [({}, "HAPROXY_UNIT", "systemctl"), ({}, "HAPROXY_HEALTH", "python3")],
    ("nginx-prepare",): [({}, "NGINX_UNIT", "systemctl"), ({"NGINX_PID_FILE": "pid"}, "NGINX_UNIT", "systemctl")],
    ("nginx-recover",): [({}, "NGINX_UNIT", "systemctl"), ({"NGINX_PID_FILE": "pid"}, "NGINX_UNIT", "systemctl")],
    ("pgbouncer", "pause", "true"): [({}, "PATH", "psql")],
    ("pgbouncer", "during", "true"): [({}, "PATH", "psql")],
    ("pgbouncer", "resume", "true"): [({}, "PATH", "psql")],
    ("postgresql-prepare",): [
        ({}, "POSTGRESQL_UNIT", "systemctl"),
        ({}, "POSTGRESQL_BIN", "psql pg_isready pg_controldata pg_ctl"),
        ({"POSTGRESQL_FAILOVER": "patroni"}, "POSTGRESQL_FAILOVER", "patronictl"),
        ({"POSTGRESQL_FAILOVER": "repmgr", "POSTGRESQL_STANDBY_HOST": "b"}, "POSTGRESQL_FAILOVER", "ssh"),
        ({"POSTGRESQL_FAILOVER": "pg_auto_failover"}, "POSTGRESQL_FAILOVER", "pg_autoctl"),
    ],
    ("postgresql-prepare", "checkpoint"): [({}, "POSTGRESQL_BIN", "psql")],
    ("postgresql-recover",): [
        ({}, "POSTGRESQL_UNIT", "systemctl"),
        ({}, "POSTGRESQL_BIN", "psql"),
        ({"POSTGRESQL_FAILOVER": "pg_auto_failover"}, "POSTGRESQL_FAILOVER", "pg_autoctl"),
        ({"POSTGRESQL_FAILOVER": "standby", "POSTGRESQL_STANDBY": "host=b"}, "POSTGRESQL_BIN", "pg_controldata"),
    ],
    ("rabbitmq-prepare",): [
        ({}, "RABBITMQ_UNIT", "systemctl"),
        ({}, "PATH", "rabbitmqctl rabbitmq-queues rabbitmq-upgrade"),
    ],
    ("rabbitmq-recover",): [
        ({}, "RABBITMQ_UNIT", "systemctl"),
        ({}, "PATH", "rabbitmqctl rabbitmq-upgrade rabbitmq-diagnostics"),
    ],
    ("ray-prepare",): [({}, "RAY_UNIT", "systemctl"), ({}, "RAY_COMMAND", "ray")],
    ("ray-recover",): [({}, "RAY_UNIT", "systemctl")],
    ("redis-prepare",): [({}, "REDIS_UNIT", "systemctl"), ({}, "PATH", "redis-cli")],
    ("redis-recover",): [({}, "REDIS_UNIT", "systemctl"), ({}, "PATH", "redis-cli")],
    ("service", "stop"): [({}, "SERVICE_UNIT", "systemctl"), (CONTAINER, "SERVICE_ENGINE", "docker")],
    ("service", "start"): [
        ({}, "SERVICE_UNIT", "systemctl"),
        (CONTAINER, "SERVICE_ENGINE", "docker"),
        ({"SERVICE_HEALTH": "tcp:127.0.0.1:80"}, "SERVICE_HEALTH", "python3"),
    ],
    ("slurm-prepare",): [({}, "PATH", "scontrol squeue"), ({}, "SLURM_NODE", "hostname")],
    ("slurm-recover",): [({}, "PATH", "scontrol"), ({}, "SLURM_NODE", "hostname")],
    ("training-checkpoint",): [({}, "TRAINING_UNIT", "systemctl"), ({}, "PATH", "flock")],
    ("training-resume",): [({}, "TRAINING_UNIT", "systemctl")],
}
CASES = [
    pytest.param(call, settings, variable, program, id=f"{' '.join(call)}-{program}-{variable}")
    for call, needs in NEEDS.items()
    for settings, variable, programs in needs
    for program in programs.split()
]


def test_no_hook_is_missing() -> None:
    assert set(NEEDS) == set(CALLS)
    for call, needs in NEEDS.items():
        text = (SHIPPED_HOOKS / call[0]).read_text("utf-8")
        listed = {program for _, _, programs in needs for program in programs.split()}
        lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
        named = {name for name in PROGRAMS if re.search(rf"(?<![\w$./-]){name} (?!is)", lines)}
        assert call[1:] or named - {"runuser"} <= listed, call


@pytest.mark.parametrize(("call", "settings", "variable", "program"), CASES)
def test_a_missing_program_is_named_before_anything_is_done(
    tmp_path: Path, call: tuple[str, ...], settings: dict[str, str], variable: str, program: str
) -> None:
    """A recover hook may have started the service: a program that only looks at it must not keep that down."""
    done = run_hook(tmp_path, call, starts=True, without=[program], variables=settings)
    assert done.code != 0
    assert done.said[-1].startswith(f"{call[0]}: {program} is not found: see {variable}")
    done_before = {" ".join(line.split()[:2]) for line in done.calls}
    done_before -= {"systemctl show", "systemctl is-enabled", "hostname -s"}
    assert done_before <= ({"systemctl start"} if is_recovery(call) else set())


def test_a_folder_of_its_name_is_no_program(tmp_path: Path) -> None:
    place = tmp_path / "machine"
    (tmp_path / "scontrol").mkdir()
    done = run_hook(
        place, ("slurm-prepare",), without=["scontrol"], variables={"PATH": f"{tmp_path}:{place}/programs"}
    )
    assert (done.code, done.said) == (1, ["slurm-prepare: scontrol is not found: see PATH"])


@pytest.mark.parametrize(
    "call", [("pgbouncer", "pause", "/no/such"), ("service", "start", "/no/such")], ids=" ".join
)
def test_a_missing_command_in_an_argument_is_named(tmp_path: Path, call: tuple[str, ...]) -> None:
    done = run_hook(tmp_path, call, starts=True)
    assert (done.code, [line for line in done.calls if line.startswith("psql")]) == (1, [])
    assert f"{call[0]}: /no/such is not found: see the " in done.said[-1]
