"""What the shipped hooks make of the state of a unit: it runs, starts, stops, or does not run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("the hooks are shell scripts for Linux", allow_module_level=True)

from examples import ServiceManager, Unit
from harness import PATIENCE
from hook_machine import CALLS, PROGRAMS, Outcome, is_recovery, run_hook
from hook_shells import SHIPPED_HOOKS

pytestmark = pytest.mark.usefixtures("hook_shell")

UNITS = {
    "haproxy-prepare": ("HAPROXY", "haproxy.service"),
    "rabbitmq-prepare": ("RABBITMQ", "rabbitmq-server.service"),
    "ray-prepare": ("RAY", "ray.service"),
    "redis-prepare": ("REDIS", "redis-server.service"),
}


def make_programs(directory: Path) -> None:
    """Each program that a hook looks for: this machine may lack it."""
    for name in PROGRAMS:
        program = directory / name
        if not program.exists():
            program.write_text("#!/bin/sh\n")
            program.chmod(0o755)


@pytest.mark.parametrize("then", ["inactive", "activating"])
@pytest.mark.parametrize("hook", UNITS)
def test_a_unit_that_is_stopping_is_waited_for(tmp_path: Path, hook: str, then: str) -> None:
    """As in a run that follows one whose agent was killed in the middle of the stop; or in a restart by others.

    What is stopped in a restart is marked, so that it is started again.
    """
    prefix, unit = UNITS[hook]
    with ServiceManager(tmp_path, {unit: Unit(("true",))}) as manager:
        make_programs(tmp_path)
        manager.passing[unit] = ["deactivating"] * 2
        manager.states[unit] = then
        done = subprocess.run(
            [SHIPPED_HOOKS / hook],
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", f"{prefix}_MARK": str(tmp_path / "mark")},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert manager.passing[unit] == []
    assert (tmp_path / "mark").exists() == (then == "activating")


@pytest.mark.parametrize("hook", UNITS)
def test_a_unit_that_does_not_stop_in_time_fails_the_hook(tmp_path: Path, hook: str) -> None:
    prefix, unit = UNITS[hook]
    with ServiceManager(tmp_path, {unit: Unit(("true",))}) as manager:
        make_programs(tmp_path)
        manager.states[unit] = "deactivating"
        done = subprocess.run(
            [SHIPPED_HOOKS / hook],
            env={
                "PATH": f"{tmp_path}:{os.environ['PATH']}",
                f"{prefix}_MARK": str(tmp_path / "mark"),
                "SCHEDULED_EVENT_SECONDS_LEFT": "11",
            },
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert (done.returncode, done.stderr) == (1, f"{hook}: {unit} is still stopping\n")
        assert "stop" not in [call.arguments[0] for call in manager.calls]


WORDS = {
    **dict.fromkeys(("active", "reloading", "refreshing"), "runs"),
    "activating": "starts",
    "deactivating": "stops",
    **dict.fromkeys(("inactive", "failed", "maintenance"), "does-not-run"),
}
OF_UNITS = [
    call
    for call in CALLS
    if call[0] not in ("pgbouncer", "slurm-prepare", "slurm-recover") and "checkpoint" not in call
]
PREPARE = [call for call in OF_UNITS if not is_recovery(call)]


@pytest.mark.parametrize("word", WORDS)
def test_one_function_answers_what_a_unit_does(tmp_path: Path, word: str) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f"#!/bin/sh\nprintf 'LoadState=loaded\\nActiveState={word}\\n'\n")
    systemctl.chmod(0o755)
    script = f'set -eu; . "{SHIPPED_HOOKS}/common.sh"; unit=web.service; unit_state'
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{WORDS[word]}\n"


@pytest.mark.parametrize("call", OF_UNITS, ids=" ".join)
def test_an_unknown_word_of_systemd_fails_the_hook(tmp_path: Path, call: tuple[str, ...]) -> None:
    """Such a unit does not count as stopped: the event would be approved."""
    done = run_hook(tmp_path, call, state="thawing")
    assert done.code != 0
    assert done.said[-1].endswith('.service runs is not known: systemd says "thawing"')
    assert {tuple(line.split()[:2]) for line in done.calls} <= {("systemctl", "show"), ("systemctl", "is-enabled")}
    assert (tmp_path / "mark").exists() == is_recovery(call)


@pytest.mark.parametrize("call", PREPARE, ids=" ".join)
def test_a_unit_that_is_reloading_runs(tmp_path: Path, call: tuple[str, ...]) -> None:
    def outcome(state: str) -> Outcome:
        place = tmp_path / state
        done = run_hook(place, call, state=state)
        said, calls = ([line.replace(str(place), "") for line in lines] for lines in (done.said, done.calls))
        return Outcome(done.code, said, calls)

    reloading = outcome("reloading")
    assert reloading == outcome("active")
    assert not any("does not run" in line for line in reloading.said)


@pytest.mark.parametrize("word", ["unknown", ""])
def test_an_unknown_word_of_docker_fails_the_hook(tmp_path: Path, word: str) -> None:
    container = {"SERVICE_UNIT": "", "SERVICE_CONTAINER": "web", "STATE": word}
    done = run_hook(tmp_path, ("service", "stop"), variables=container)
    assert (done.code, done.said) == (1, [f'service: whether web runs is not known: docker says "{word}"'])
    assert not any(line.startswith("docker stop") for line in done.calls)


@pytest.mark.parametrize("kind", ["SERVICE_CONTAINER", "SERVICE_COMPOSE"])
def test_what_is_paused_is_stopped_as_what_runs(tmp_path: Path, kind: str) -> None:
    done = run_hook(tmp_path, ("service", "stop"), variables={"SERVICE_UNIT": "", kind: "web", "STATE": "paused"})
    assert any(" stop -t " in line for line in done.calls)
