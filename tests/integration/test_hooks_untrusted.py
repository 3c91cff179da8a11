"""Texts of others in the variables of a hook: no shell evaluates them, and what should be a number is one."""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("the hooks in sh are for Linux", allow_module_level=True)

from hook_shells import CHECKOUT, SHIPPED_HOOKS, use_link

from scheduled_events_agent.hooks.run import attempt_environment, hook_environment
from scheduled_events_agent.imds.document import ScheduledEvent

pytestmark = pytest.mark.usefixtures("hook_shell")

# What docs/policy.md lists.
VARIABLES = re.findall(
    r"`([A-Z_]+)`",
    "".join(
        line.partition(":")[0]
        for line in (CHECKOUT / "docs/policy.md")
        .read_text("utf-8")
        .partition("### What a hook gets")[2]
        .partition("### ")[0]
        .splitlines()
        if line.startswith("- `")
    ),
)
IN_SH = sorted(path.name for path in SHIPPED_HOOKS.iterdir() if path.read_bytes().startswith(b"#!/"))
IN_SH.remove("ci-runner-api")  # in Python
# Two of them do several things.
CALLS = [
    *((name,) for name in IN_SH if name not in ("pgbouncer", "service")),
    *itertools.product(["pgbouncer"], ["pause", "during", "resume"], ["true"]),
    *itertools.product(["service"], ["stop", "start"]),
    ("postgresql-prepare", "checkpoint"),
]
# Every program that the hooks ask, of a machine on which all is well; only, no start succeeds.
PROGRAM = """#!/bin/sh
case ${0##*/}:$* in
    systemctl:show*LoadState*) printf 'LoadState=loaded\\nActiveState=%s\\n' "$STATE" ;;
    systemctl:show*MainPID*) echo 0 ;;
    systemctl:start*) exit 1 ;;
    runuser:*) shift 3; exec "$@" ;;
    psql:*'SHOW DATABASES'*) printf 'name|app\\npaused|0\\n' ;;
    pg_controldata:*) echo 'Database cluster state: shut down' ;;
    pg_ctl:*) exit 3 ;;
    rabbitmqctl:*) echo true ;;
    redis-cli:*) printf 'role:slave\\nmaster_link_status:up\\n' ;;
    scontrol:*node*) echo "NodeName=n State=IDLE BootTime=2100-01-01T00:00:00 Reason=$REASON" ;;
esac
"""
PROGRAMS = "systemctl runuser psql pg_isready pg_controldata pg_ctl rabbitmqctl rabbitmq-upgrade rabbitmq-queues"
PROGRAMS += " redis-cli scontrol squeue ray"
PREFIXES = ("CI_RUNNER", "HAPROXY", "NGINX", "PGBOUNCER", "RABBITMQ", "RAY", "REDIS", "SERVICE", "TRAINING")


def run(place: Path, call: tuple[str, ...], variables: Mapping[str, str]) -> None:
    """Run a hook to its end, whatever that is, on a machine where it has something to do."""
    programs = place / "programs"
    programs.mkdir()
    for name in PROGRAMS.split():
        (programs / name).write_text(PROGRAM)
        (programs / name).chmod(0o755)
    (place / "PG_VERSION").touch()
    is_recovery = call[0].endswith(("-recover", "-resume")) or call[1:2] == ("start",)
    mark = place / "mark"
    if is_recovery or call[1:2] == ("resume",):
        mark.write_text("A\n\n\n")
    subprocess.run(
        [SHIPPED_HOOKS / call[0], *call[1:]],
        env={
            "PATH": f"{programs}:{os.environ['PATH']}",
            "STATE": "inactive" if is_recovery else "active",
            "REASON": "scheduled-events-agent: Reboot" if is_recovery else "",
            "PGDATA": str(place),
            "POSTGRESQL_UNIT": "postgresql.service",
            "PGBOUNCER": "one",
            "PGBOUNCER_DATABASE": "app",
            "SERVICE_UNIT": "web.service",
            "TRAINING_UNIT": "training.service",
            "TRAINING_CHECKPOINT": f"{place}/step-*/done",
            "TRAINING_WAIT": "0",
            **{f"{prefix}_MARK": str(mark) for prefix in PREFIXES},
            **variables,
        },
        capture_output=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_no_hook_evaluates_a_variable(tmp_path: Path, call: tuple[str, ...]) -> None:
    owned = tmp_path / "owned"
    hostile = f"OPTIND[$(touch {owned}; echo 0)]"
    run(tmp_path, call, {f"SCHEDULED_EVENT_{name}": hostile for name in VARIABLES})
    assert not owned.exists()


def after_run_hook(place: Path, lines: list[str]) -> dict[str, str]:
    """What a hook gets of the lines that the agent's account has written."""
    text = (CHECKOUT / "systemd/run-hook").read_text("utf-8")
    for path in ("/run/scheduled-events-agent", "/etc/scheduled-events-agent/hooks"):
        assert f'"{path}/' in text
        text = text.replace(f'"{path}/', f'"{place}/')
    script = place / "run-hook"
    script.write_text(text)
    script.chmod(0o755)
    (place / "hook-drain.env").write_text("\n".join([*lines, ""]), "utf-8")
    (place / "drain").symlink_to("/usr/bin/env")
    done = subprocess.run(
        [use_link(script), "drain"], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def test_run_hook_exports_the_documented_variables_and_no_other(tmp_path: Path) -> None:
    owned = tmp_path / "owned"
    assert len(VARIABLES) == 14
    given = {name: "1" if "SECONDS" in name else f"$(touch {owned}) `id` \\n" for name in VARIABLES}
    lines = [f"SCHEDULED_EVENT_{name}={value}" for name, value in given.items()]
    others = [
        *(
            "SCHEDULED_EVENT_FOO=1",
            "SCHEDULED_EVENT_ID_=1",
            "SCHEDULED_EVENT_SECONDS=1",
            "SCHEDULED_EVENT_TYPE+=1",
        ),
        *(
            f"SCHEDULED_EVENT_ID[$(touch {owned})]=1",
            "PATH=/tmp",
            "BASH_ENV=/tmp/x",
            "SCHEDULED_EVENT_VM",
            "=1",
            "",
        ),
    ]
    seen = after_run_hook(tmp_path, [*others, *lines, *others])
    assert {name: seen[f"SCHEDULED_EVENT_{name}"] for name in VARIABLES} == given
    shell = {"PWD", "OLDPWD", "SHLVL", "_"}  # of bash
    assert seen.keys() - shell == {"PATH", "CREDENTIALS_DIRECTORY", *(f"SCHEDULED_EVENT_{n}" for n in VARIABLES)}
    assert seen["PATH"] == "/usr/bin:/bin"
    assert not owned.exists()


WHOLE = ["", "0", "7", "300", "9999999999"]
FRACTIONS = ["-1", "6.5", "0.25"]
OTHERS = ["00", "007", "10000000000", "-2", "+1", " 1", "1 ", "0x10", "1e+06", "6.", ".5", "6.5.1", "06.5", "1,5"]
OTHERS += ["OPTIND[$(id)]", "x", "1+1", "\u0663", "\u00b2", "-1.5", "1\r", "-"]


@pytest.fixture(params=["run-hook", "common.sh"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str, str], bool]:
    """Whether a variable with this value reaches the hook."""

    def is_kept(name: str, value: str) -> bool:
        if request.param == "run-hook":
            for old in tmp_path.iterdir():
                old.unlink()
            return after_run_hook(tmp_path, [f"{name}={value}"]).get(name) == value
        script = f'set -eu; . "{SHIPPED_HOOKS}/common.sh"; env'
        environment = {"PATH": os.environ["PATH"], name: value}
        done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=True)
        return f"\n{name}={value}\n" in f"\n{done.stdout}"

    return is_kept


@pytest.mark.parametrize("name", ["SECONDS_LEFT", "TIMEOUT_SECONDS", "DURATION_SECONDS"])
def test_a_variable_to_compute_with_has_one_form(kept: Callable[[str, str], bool], name: str) -> None:
    good = [*WHOLE, *(FRACTIONS if name == "DURATION_SECONDS" else [])]
    values = [*WHOLE, *FRACTIONS, *OTHERS]
    assert [value for value in values if kept(f"SCHEDULED_EVENT_{name}", value)] == good


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((None, "-1"), (0.0, "0"), (-0.0, "0"), (9.0, "9"), (6.5, "6.5"), (0.0001, "0"), (600.0, "600")),
        *((1_000_000.0, "1000000"), (31_536_000.0, "31536000"), (1 / 3, "0.333")),
    ],
)
def test_the_agent_writes_a_duration_in_this_form(
    kept: Callable[[str, str], bool], seconds: float | None, text: str
) -> None:
    event = ScheduledEvent(id="A", type="Freeze", status="Scheduled", duration_seconds=seconds)
    given = hook_environment(event, stage="prepare", rule=None, vm="", outcome="", seconds_left=None)
    assert given["SCHEDULED_EVENT_DURATION_SECONDS"] == text
    assert kept("SCHEDULED_EVENT_DURATION_SECONDS", text)


@pytest.mark.parametrize(("seconds", "text"), [(-5.0, "0"), (0.9, "0"), (299.9, "299"), (1e12, "9999999999")])
def test_the_agent_writes_the_time_left_in_this_form(seconds: float, text: str) -> None:
    event = ScheduledEvent(id="A", type="Freeze", status="Scheduled")
    given = hook_environment(event, stage="prepare", rule=None, vm="", outcome="", seconds_left=seconds)
    assert given["SCHEDULED_EVENT_SECONDS_LEFT"] == text
    assert attempt_environment(seconds) == {"SCHEDULED_EVENT_TIMEOUT_SECONDS": text}
