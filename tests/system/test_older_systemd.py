"""The deb on older systems: Ubuntu 22.04 (systemd 249) and Debian 11 (247), both with polkit 0.105.

Debian 11 has no Python that the agent supports: there the service fails once, and a page says what to do. Debian
12's stands in for a Python that was built there; its own loader runs it.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("systemd is Linux's", allow_module_level=True)

import apt
from container import CHECKOUT, Container
from service import OFFLINE, POLICY, UNIT, WHEELS, Service, build_deb, make_strict, shown_commands

from scheduled_events_agent.simulator import Simulator

pytest_plugins = ["machines", "installed"]
pytestmark = pytest.mark.timeout(900)  # the first time, they are fetched

NAME = "scheduled-events-agent"
NEWER = "9.8.7"
RULE = {"name": "reboots", "when": {"type": "Reboot"}, "prepare": ["drain"], "recover": ["resume"]}
RUN_AS_ROOT = f"/usr/share/{NAME}/systemd/run-as-root"
OTHER = "/opt/debian-12"
PYTHON = "/usr/local/bin/python3.11"
PYTHON_SCRIPT = f"""#!/bin/sh
for libraries in {OTHER}/lib/*-linux-gnu; do
    for loader in "$libraries"/ld-linux-*.so.*; do
        exec "$loader" --argv0 "$0" --library-path "$libraries:{OTHER}/usr${{libraries#{OTHER}}}" \\
            {OTHER}/usr/bin/python3.11 "$@"
    done
done
"""
PAGE = "docs/install-linux.md"


class Older:
    """A stopped machine with the package, and how others lie on it."""

    def __init__(self, machine: Container, read_only: dict[str, Path]) -> None:
        self._machine = machine
        self._read_only = read_only

    def boot(self) -> Container:
        return Container(self._machine, read_only=self._read_only)


@pytest.fixture(scope="session")
def python() -> Path:
    """Debian 12's Python with venv, and all that it needs."""
    unpacked = CHECKOUT / ".cache" / "python-bookworm"
    apt.unpack(unpacked, "python3.11-venv", suite="bookworm")
    return unpacked


def add_python(machine: Container) -> None:
    """Have it in /usr/local, where one that was built there is."""
    machine.write(PYTHON, PYTHON_SCRIPT, 0o755)
    machine.run("ln", "-s", f"{OTHER}/usr/lib/python3.11", "/usr/local/lib/")
    machine.run("ln", "-s", f"{OTHER}/usr/share/python-wheels", "/usr/share/")  # pip, for new venvs


@pytest.fixture(scope="module", params=["ubuntu_22", "debian_11"])
def older(deb: Path, request: pytest.FixtureRequest) -> Iterator[Older]:
    root: Path = request.getfixturevalue(request.param)
    needs_python = request.param == "debian_11"
    read_only = {OTHER: request.getfixturevalue("python")} if needs_python else {}
    with Container(root, read_only=read_only) as machine:
        if needs_python:
            add_python(machine)
        machine.copy_in(deb, "/root/agent.deb")
        machine.write(POLICY, "{imds: {endpoint: 'http://127.0.0.1:9'}, agent: {listen: off}}\n")  # polls nothing
        machine.run(*install(machine))
        machine.stop()
        yield Older(machine, read_only)


@pytest.fixture
def service(older: Older, sim: Simulator) -> Iterator[Service]:
    with older.boot() as machine:
        service = Service(machine, sim.endpoint())
        service.write_policy()
        service.systemctl("restart")
        yield service
        sys.stdout.write(machine.account())  # pytest shows it on failure only


def install(machine: Container) -> tuple[str, ...]:
    """The stand-in is no package, so dpkg must not mind that Python is missing."""
    has_stand_in = machine.path(PYTHON).exists()
    options = ["--force-depends"] if has_stand_in else []
    return ("dpkg", "--install", "--force-confold", *options, "/root/agent.deb")


@pytest.fixture
def unsupported(debian_11: Path, python: Path, deb: Path, sim: Simulator) -> Iterator[Service]:
    """A Debian 11 without a Python for the agent, which is not installed; the deb is at hand."""
    with Container(debian_11, read_only={OTHER: python}) as machine:
        service = Service(machine, sim.endpoint())
        service.write_policy(rules=[{"name": "users", "when": {"source": "User"}, "approve": "immediately"}])
        machine.copy_in(deb, "/root/agent.deb")
        yield service
        sys.stdout.write(machine.account())


def force_in(machine: Container) -> None:
    machine.run("dpkg", "--install", "--force-confold", "--force-depends", "/root/agent.deb")


def test_without_a_python_apt_refuses_the_package_and_a_forced_one_fails_once(unsupported: Service) -> None:
    machine = unsupported.machine
    refused = machine.run("apt-get", "install", "--yes", "/root/agent.deb", check=False)
    assert refused.returncode != 0
    words = "Depends: python3.13 but it is not installable or"
    assert words in refused.stdout
    assert f'"{words} ..."' in (CHECKOUT / PAGE).read_text(encoding="utf-8")

    force_in(machine)

    state = {name: unsupported.show(name) for name in ("ActiveState", "ExecMainStatus", "NRestarts")}
    assert state == {"ActiveState": "failed", "ExecMainStatus": "78", "NRestarts": "0"}
    said = [entry["MESSAGE"] for entry in machine.journal(UNIT) if entry.get("SYSLOG_IDENTIFIER") == NAME]
    page = f"/usr/share/doc/{NAME}/{Path(PAGE).name}"
    assert len(said) == 1
    assert said[0].endswith(f"; found /usr/bin/python3 (3.9). What to do on this system: {page}")
    assert "\n| Debian 11, " in machine.path(page).read_text(encoding="utf-8")


def test_from_there_the_page_leads_to_a_service_in_a_venv(
    unsupported: Service, sim: Simulator, wheels: Path
) -> None:
    machine = unsupported.machine
    force_in(machine)
    remove = f"dpkg --remove {NAME}"
    assert f"`sudo {remove}`" in (CHECKOUT / PAGE).read_text(encoding="utf-8")
    machine.run(*remove.split())
    add_python(machine)
    machine.copy_in(wheels, WHEELS)
    ((make_venv,),) = shown_commands(PAGE, "### pip into a venv")
    (_, *others), *_ = shown_commands("docs/install-other.md", "## pip")
    assert len(others) == 4
    for command in (make_venv, *others):
        machine.run("sh", "-euc", command, environment=OFFLINE, timeout=600)
    assert machine.run("systemctl", "is-enabled", UNIT).stdout == "enabled\n"
    sim.wait_approved(sim.schedule("Reboot", source="User"))
    done = machine.run(NAME, "doctor", "--json", check=False)
    found = json.loads(done.stdout)["checks"]
    assert [one for one in found if one["state"] == "error"] == []


def test_it_is_installed_drains_approves_and_is_upgraded_in_mid_event(
    service: Service, sim: Simulator, tmp_path: Path
) -> None:
    machine = service.machine
    assert int(machine.run("systemctl", "--version").stdout.split()[1]) in (247, 249)
    hooks = {name: {"shell": f"echo {name} >> /root/notes"} for name in ("drain", "resume")}
    service.write_policy(rules=[{**RULE, "approve": "manual", "lead": "1h"}], hooks=hooks)
    service.systemctl("restart")
    event = sim.schedule("Reboot", notice_seconds=600, lasts_seconds=1)
    machine.wait_for(lambda: service.records() == ["drain"], "it was drained")
    before = service.pid()

    machine.copy_in(build_deb(tmp_path, "--version", NEWER), "/root/agent.deb")
    machine.run(*install(machine))

    assert service.show("ActiveState") == "active"
    assert service.pid() != before
    assert machine.run(NAME, "--version").stdout == f"{NAME} {NEWER}\n"
    machine.run(NAME, "approve", event)
    sim.wait_gone(event)
    machine.wait_for(lambda: service.records() == ["drain", "resume"], "it was resumed")
    done = machine.run(NAME, "doctor", "--json", check=False)
    found = json.loads(done.stdout)["checks"]
    assert [one for one in found if one["state"] == "error"] == []
    assert machine.run("systemctl", "is-failed", UNIT, check=False).stdout == "active\n"


@pytest.mark.parametrize("is_strict", [False, True], ids=["root", "strict"])
def test_hooks_read_their_secrets(service: Service, sim: Simulator, is_strict: bool) -> None:
    machine = service.machine
    machine.write("/root/token", "s3cret")
    (commands, *_) = shown_commands("docs/systemd.md", "## Secrets")
    machine.run("sh", "-euc", "\n".join(["cd /root", *commands]))
    if is_strict:
        make_strict(machine)
    hooks = {"drain": {"shell": 'id -un; cat "$CREDENTIALS_DIRECTORY/token"'}, "resume": {"shell": "true"}}
    service.write_policy(rules=[{**RULE, "approve": "when-prepared"}], hooks=hooks)
    service.systemctl("restart")
    event = sim.schedule("Reboot", notice_seconds=600)
    sim.wait_approved(event)
    lines = [entry["line"] for entry in service.log("hook output", event_id=event, hook="drain")]
    assert lines == [NAME if is_strict else "root", "s3cret"]


def test_polkit_keeps_the_strict_account_from_root_hooks_and_doctor_reports_it(
    service: Service, sim: Simulator
) -> None:
    make_strict(service.machine)
    service.machine.write(f"/etc/{NAME}/hooks/drain", "#!/bin/sh\n", 0o755)
    hooks = {"drain": {"run": [RUN_AS_ROOT, "drain"], "serialize": True}, "resume": {"shell": "true"}}
    service.write_policy(rules=[{**RULE, "approve": "when-prepared"}], hooks=hooks)
    service.systemctl("restart")
    event = sim.schedule("Reboot", notice_seconds=600)
    service.wait_log("hook finished", event_id=event, reason="hook drain: exit code 1 (failed)")
    done = service.machine.run(NAME, "doctor", "--json", check=False)
    (told,) = [one["message"] for one in json.loads(done.stdout)["checks"] if one["check"] == "hooks"]
    assert told.startswith("hooks.drain.run: run-as-root cannot start the hook: polkit 0.105 ")


def test_purged_it_leaves_nothing(service: Service) -> None:
    make_strict(service.machine)
    service.machine.run("dpkg", "--purge", NAME)
    for place in (f"/etc/{NAME}", f"/var/lib/{NAME}", f"/usr/lib/{NAME}"):
        assert not service.machine.path(place).exists()
    assert NAME not in service.machine.path("/etc/passwd").read_text()
    assert (
        service.machine.run("systemctl", "list-units", "--all", "--plain", f"{NAME}*", "--no-legend").stdout == ""
    )
