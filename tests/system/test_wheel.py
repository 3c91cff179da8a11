"""The wheel in a virtual environment of its own, beside other packages that are called ``agent``."""

import os
import shlex
import subprocess
import venv
from pathlib import Path

import pytest

from scheduled_events_agent.host.windows import service_manager as service

CHECKOUT = Path(__file__).parents[2]
CONFTEST = """\
pytest_plugins = ["scheduled_events_agent.simulator.testing"]
"""
PLUGIN_TEST = """\
from pathlib import Path

from scheduled_events_agent.simulator.testing import ScheduledEvents

import agent

def test_a_reboot_is_approved(scheduled_events: ScheduledEvents) -> None:
    assert agent.NAME == "another one"
    scheduled_events.run(Path(__file__).with_name("policy.yaml"))
    event = scheduled_events.azure.schedule("Reboot", lasts_seconds=2)
    assert scheduled_events.wait_approved(event) == "rule all approves immediately"
"""


class Installed:
    """The wheel in a fresh virtual environment, and a folder with a package ``agent`` on PYTHONPATH."""

    def __init__(self, place: Path) -> None:
        self.place = place
        venv.create(place / "venv", with_pip=True)
        self.programs = place / "venv" / "bin"
        pip = ["-m", "pip", "--quiet", "--disable-pip-version-check"]
        self.python(*pip, "wheel", "--no-deps", "--wheel-dir", str(place), str(CHECKOUT))
        (wheel,) = place.glob("scheduled_events_agent-*.whl")
        self.python(*pip, "install", str(wheel), "pytest")
        (self.libraries,) = (place / "venv").glob("lib/*/site-packages")
        other = place / "project" / "agent"
        other.mkdir(parents=True)
        (other / "__init__.py").write_text('NAME = "another one"\n')

    def python(self, *arguments: str) -> str:
        return self.run("python", *arguments)

    def run(self, program: str, *arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(self.place / "project")}
        done = subprocess.run(
            [self.programs / program, *arguments],
            cwd=self.place,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, f"{arguments} ended with {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_installs_no_module_called_agent(installed: Installed) -> None:
    assert [path.name for path in installed.libraries.iterdir() if path.stem == "agent"] == []
    assert (installed.libraries / "scheduled_events_agent" / "py.typed").is_file()


def test_the_wheel_has_the_runbook_that_the_agent_leads_to(installed: Installed) -> None:
    find = "agent.find_runbook('https://agent.invalid/', agent.Path(agent.__file__).parent)"
    shown = installed.python("-c", f"import scheduled_events_agent as agent; print({find})").strip()
    page = installed.place / "venv/share/scheduled-events-agent/runbook.md"
    assert shown == str(page)
    assert page.read_bytes() == (CHECKOUT / "docs/runbook.md").read_bytes()


def test_the_command_and_the_demo_work_beside_another_agent(installed: Installed) -> None:
    version = installed.run("scheduled-events-agent", "--version")
    assert installed.python("-m", "scheduled_events_agent", "--version") == version
    assert "all as expected" in installed.run("scheduled-events-agent", "demo")


def test_the_command_line_of_the_windows_service_works_beside_another_agent(installed: Installed) -> None:
    for site in (None, str(installed.libraries)):
        line = service._command_line(str(installed.programs / "python"), site, ["check"])
        program, *arguments = shlex.split(line)
        assert installed.run(program, *arguments) == installed.run("scheduled-events-agent", "check")


def test_the_plugin_serves_a_project_with_an_agent_of_its_own(installed: Installed) -> None:
    project = installed.place / "project"
    (project / "policy.yaml").write_text("rules: [{name: all, approve: immediately}]\n")
    (project / "conftest.py").write_text(CONFTEST)
    (project / "test_policy.py").write_text(PLUGIN_TEST)
    assert "1 passed" in installed.python("-m", "pytest", "-q", str(project))
