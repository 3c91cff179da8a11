"""The life of the rpm on a machine: its scripts, and what stays of it.

The distributions it is for are not to be had where these tests run: what there is, is a mirror of Debian. So
Debian's rpm installs it into a Debian, with --nodeps, because that one's rpm database is empty; test_packages.py
checks what it requires. Everything else is real: the scripts, systemd, the launcher, the service.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

if sys.platform == "win32":
    pytest.skip("rpms are for Linux", allow_module_level=True)

from container import CHECKOUT, PROJECT, Container
from service import POLICY, UNIT, Service, upgrade_while_a_hook_runs

from scheduled_events_agent import __version__
from scheduled_events_agent.simulator import Simulator

pytest_plugins = ["machines", "installed"]
pytestmark = pytest.mark.timeout(600)

NAME = "scheduled-events-agent"
NEWER = "9.8.7"


def build_rpm(directory: Path, *options: str) -> Path:
    command = [sys.executable, str(CHECKOUT / "packaging/build.py"), "rpm", "--architecture", "x86_64"]
    subprocess.run([*command, "--output", str(directory), *options], check=True, timeout=300)
    (package,) = directory.glob("*.rpm")
    return package


@pytest.fixture(scope="module")
def bare(debian: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """A stopped machine that has rpm, and two versions of the package at hand; for others to lie on."""
    with Container(debian) as machine:
        machine.write("/etc/apt/apt.conf.d/retries", 'Acquire::Retries "5";\n')
        machine.run("apt-get", "update", "-q", timeout=300)
        machine.run("apt-get", "install", "-qy", "--no-install-recommends", "rpm", timeout=300)
        machine.copy_in(build_rpm(tmp_path_factory.mktemp("rpm")), "/root/agent.rpm")
        machine.copy_in(build_rpm(tmp_path_factory.mktemp("newer"), "--version", NEWER), "/root/newer.rpm")
        machine.stop()
        yield machine


@pytest.fixture(scope="module")
def with_agent(bare: Container) -> Iterator[Container]:
    """The same, with the older one installed."""
    with Container(bare, private_network=True) as machine:
        rpm(machine, "--install", "/root/agent.rpm")
        machine.stop()
        yield machine


@pytest.fixture
def machine(with_agent: Container) -> Iterator[Container]:
    with Container(with_agent, private_network=True) as booted:
        yield booted
        sys.stdout.write(booted.account())  # pytest shows it on failure only


def rpm(machine: Container, *arguments: str) -> None:
    done = machine.run("rpm", "--force-debian", "--nodeps", *arguments, timeout=300)
    assert "scriptlet failed" not in done.stderr, done.stderr


def state_of(machine: Container) -> tuple[str, str]:
    """Whether the service is enabled, and whether it runs."""
    enabled = machine.run("systemctl", "is-enabled", UNIT, check=False).stdout.strip()
    return enabled, machine.run("systemctl", "is-active", UNIT, check=False).stdout.strip()


def test_without_a_network_it_is_installed_and_runs(bare: Container) -> None:
    with Container(bare, private_network=True) as machine:
        rpm(machine, "--install", "/root/agent.rpm")
        assert state_of(machine) == ("enabled", "active")
        assert machine.run(NAME, "--version").stdout == f"{NAME} {__version__}\n"
        assert machine.run(NAME, "check").stdout.startswith(f"{POLICY}: valid\n")
        modes = machine.run("stat", "-c", "%a %U:%G %n", f"/etc/{NAME}/credentials", f"/var/lib/{NAME}").stdout
        assert modes == f"750 root:{NAME} /etc/{NAME}/credentials\n700 root:root /var/lib/{NAME}\n"
        assert machine.run("getent", "passwd", NAME).stdout.startswith(f"{NAME}:")
        assert "cpython-311" in machine.run("find", f"/usr/lib/{NAME}", "-name", "*.pyc").stdout
        assert machine.run("rpm", "--verify", "--nodeps", NAME).stdout == ""


def test_an_upgrade_in_mid_event_keeps_policy_and_state_and_restarts_the_service(with_agent: Container) -> None:
    with Simulator(vms=("vm-1",), rate_limit=None) as sim, Container(with_agent, boots=False) as machine:
        service = Service(machine, sim.endpoint())
        rule = {
            "name": "reboots",
            "when": {"type": "Reboot"},
            "prepare": ["drain"],
            "approve": "manual",
            "lead": "1h",
        }
        service.write_policy(rules=[rule], hooks={"drain": {"shell": "echo drain >> /root/notes"}})
        machine.start()  # not before: with the policy of the package it would ask Azure's endpoint
        assert {entry["endpoint"] for entry in service.log("agent started")} == {sim.endpoint()}
        event = sim.schedule("Reboot", notice_seconds=600.0, lasts_seconds=1.0)
        machine.wait_for(lambda: service.notes() == ["drain"], "it was drained")
        policy, before = machine.path(POLICY).read_text(), service.pid()

        rpm(machine, "--upgrade", "/root/newer.rpm")

        assert state_of(machine) == ("enabled", "active")
        assert service.pid() != before
        assert machine.run(NAME, "--version").stdout == f"{NAME} {NEWER}\n"
        assert machine.path(POLICY).read_text() == policy
        assert machine.run("rpm", "--query", NAME).stdout == f"{NAME}-{NEWER}-1.x86_64\n"
        assert "cpython-311" in machine.run("find", f"/usr/lib/{NAME}", "-name", "*.pyc").stdout
        service.wait_log("restarted", event_id=event)
        machine.run(NAME, "approve", event)
        sim.wait_gone(event)
        assert service.notes() == ["drain"]


def test_an_upgrade_while_a_hook_runs_restarts_the_service_when_it_has_ended(with_agent: Container) -> None:
    with Simulator(vms=("vm-1",), rate_limit=None) as sim, Container(with_agent, boots=False) as machine:
        service = Service(machine, sim.endpoint())
        service.write_policy()
        machine.start()  # not before, as above
        upgrade = ("rpm", "--force-debian", "--nodeps", "--upgrade", "/root/newer.rpm")
        upgrade_while_a_hook_runs(service, sim, NEWER, *upgrade)


@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        (["disable --now"], ("disabled", "inactive")),
        (["disable"], ("disabled", "active")),
        (["stop"], ("enabled", "inactive")),
        (["stop", "mask"], ("masked", "inactive")),
    ],
)
def test_what_the_operator_decided_about_the_service_survives_an_upgrade(
    machine: Container, commands: list[str], expected: tuple[str, str]
) -> None:
    for command in commands:
        machine.run("systemctl", *command.split(), UNIT)
    before = machine.run("systemctl", "show", "--property=MainPID", "--value", UNIT).stdout
    rpm(machine, "--upgrade", "/root/newer.rpm")
    assert state_of(machine) == expected
    after = machine.run("systemctl", "show", "--property=MainPID", "--value", UNIT).stdout
    assert (before != after) == (expected[1] == "active")  # what runs is the new version


def test_an_upgrade_does_not_end_an_agent_whose_policy_file_is_bad(machine: Container) -> None:
    service = Service(machine, "")
    machine.write(POLICY, "rulez: []\n")
    before = service.pid()
    done = machine.run("rpm", "--force-debian", "--nodeps", "--upgrade", "/root/newer.rpm", timeout=300)
    assert (state_of(machine), service.pid()) == (("enabled", "active"), before)
    assert f'{POLICY}:1: unknown key "rulez"; did you mean "rules"?\n' in done.stderr
    assert done.stderr.endswith(
        f"{NAME}: the policy is not valid, so the version before runs on. When it is: systemctl restart {NAME}\n"
    )


def test_a_downgrade_does_not_end_an_agent_whose_state_is_too_new_for_it(machine: Container) -> None:
    service = Service(machine, "")
    service.write_state_of_a_newer_version()
    before = service.pid()
    done = machine.run("rpm", "--force-debian", "--nodeps", "--upgrade", "/root/newer.rpm", timeout=300)
    assert (state_of(machine), service.pid()) == (("enabled", "active"), before)
    assert f"/var/lib/{NAME}/state.db was written by a newer version of the agent (schema 99, " in done.stderr
    assert done.stderr.endswith(
        f"{NAME}: this version cannot read the state, so the version before runs on. "
        f"When it can: systemctl restart {NAME}\n"
    )


def test_erasing_it_stops_it_and_keeps_what_was_changed_and_decided(machine: Container) -> None:
    machine.write(POLICY, "rules: []\n")
    machine.write(f"/etc/{NAME}/hooks/drain", "#!/bin/sh\n", 0o755)
    rpm(machine, "--erase", NAME)
    assert state_of(machine) in {("", "inactive"), ("not-found", "inactive")}
    assert machine.path(f"{POLICY}.rpmsave").read_text() == "rules: []\n"
    assert machine.path(f"/etc/{NAME}/hooks/drain").exists()
    assert machine.path(f"/var/lib/{NAME}/state.db").exists()
    left = machine.run("find", "/usr", "/etc/systemd", "-name", f"*{NAME}*").stdout
    assert left == ""


def test_erasing_it_untouched_leaves_only_the_state(machine: Container) -> None:
    rpm(machine, "--erase", NAME)
    left = machine.run("find", "/usr", "/etc", "/var/lib", "-name", f"*{NAME}*").stdout
    assert left == f"/var/lib/{NAME}\n"


def test_a_preset_of_the_administrators_keeps_it_from_being_enabled(bare: Container) -> None:
    with Container(bare, private_network=True) as machine:
        machine.write("/etc/systemd/system-preset/00-site.preset", f"disable {UNIT}\n")
        rpm(machine, "--install", "/root/agent.rpm")
        assert state_of(machine) == ("disabled", "inactive")


def test_installed_into_an_image_without_systemd_it_runs_from_the_first_boot(
    bare: Container,
) -> None:
    with Container(bare, boots=False, private_network=True) as machine:
        rpm(machine, "--install", "/root/agent.rpm")
        machine.start()
        assert state_of(machine) == ("enabled", "active")


# --- package managers


class Distribution(NamedTuple):
    """What one has of what the package asks for: each package with what its spec says of that."""

    manager: str
    installed: Mapping[str, str]
    offered: Mapping[str, str]


_LIBRARIES = "libc.so.6(GLIBC_2.14)(64bit) libgcc_s.so.1()(64bit)"
_BASE = {"base": f"Provides: /bin/sh coreutils findutils util-linux {_LIBRARIES}"}
RHEL_9 = Distribution(
    "dnf",
    {**_BASE, "systemd": "Version: 252", "python3": "Provides: python(abi) = 3.9"},
    {"python3.11": "Provides: python(abi) = 3.11"},
)
SLES_15 = Distribution(
    "zypper",
    {**_BASE, "systemd": "Version: 254", "python3-base": "Provides: python(abi) = 3.6"},
    {"python311-base": "Provides: python(abi) = 3.11", "python311": "Requires: python311-base"},
)
# Its own manager, tdnf, is not to be had here; it asks the same library (libsolv) as the others.
AZURE_LINUX_3 = Distribution(
    "dnf",
    {**_BASE, "systemd": "Version: 255", "python3": "Provides: python(abi)"},  # any version, that is
    {},
)
INSTALL = {
    "dnf": ("dnf", "install", "--assumeyes"),
    "zypper": ("zypper", "--non-interactive", "install", "--allow-unsigned-rpm"),
}
REMOVE = {"dnf": ("dnf", "remove", "--assumeyes"), "zypper": ("zypper", "--non-interactive", "remove")}


@contextmanager
def managed(bare: Container, distribution: Distribution) -> Iterator[Container]:
    """A machine with the package manager, and empty packages that stand for those of the distribution."""
    with Container(bare) as below:
        wanted = (distribution.manager, "createrepo-c")
        below.run("apt-get", "install", "-qy", "--no-install-recommends", *wanted, timeout=300)
        # Debian's rpm has another database than the managers.
        below.write("/etc/rpm/macros", "%_dbpath /var/lib/rpm\n")
        for folder, packages in (("installed", distribution.installed), ("offered", distribution.offered)):
            for name, facts in packages.items():
                version = "" if facts.startswith("Version:") else "Version: 1\n"
                below.write(
                    f"/root/{name}.spec",
                    f"Name: {name}\n{version}{facts}\nRelease: 1\nSummary: a stand-in\nLicense: MIT\n"
                    "BuildArch: noarch\n%description\nNothing.\n%files\n",
                )
                place = f"_rpmdir /root/{folder}"
                below.run("rpmbuild", "-bb", "--define", place, f"/root/{name}.spec")
            below.run("mkdir", "-p", f"/root/{folder}")
            below.run("createrepo_c", "--quiet", f"/root/{folder}")
        add_repository(below, distribution, "installed")
        below.run(*INSTALL[distribution.manager], *distribution.installed, timeout=300)
        below.stop()
        with Container(below, private_network=True) as machine:
            yield machine


def add_repository(machine: Container, distribution: Distribution, folder: str) -> None:
    if distribution.manager == "dnf":
        source = f"[{folder}]\nname={folder}\nbaseurl=file:///root/{folder}\ngpgcheck=0\n"
        machine.write(f"/etc/yum.repos.d/{folder}.repo", source)
    else:
        machine.run("zypper", "addrepo", "--no-gpgcheck", f"/root/{folder}", folder)


def packages_of(machine: Container) -> set[str]:
    return set(machine.run("rpm", "--query", "--all", "--queryformat", "%{NAME}\\n").stdout.split())


@pytest.mark.parametrize("distribution", [RHEL_9, SLES_15, AZURE_LINUX_3], ids=["rhel", "sles", "azure"])
def test_a_package_manager_installs_it_with_a_new_python_upgrades_and_removes_it(
    bare: Container, distribution: Distribution
) -> None:
    with managed(bare, distribution) as machine:
        before = packages_of(machine)
        assert before == {*distribution.installed}
        # By the script for cloud-init, which picks the manager.
        script = f"{PROJECT}/packaging/cloud-init/install.sh"
        if distribution.offered:
            refused = machine.run("sh", script, "/root/agent.rpm", check=False, timeout=300)
            assert refused.returncode != 0
            assert "python(abi) = 3.11" in refused.stdout + refused.stderr
            assert packages_of(machine) == before
            add_repository(machine, distribution, "offered")
        machine.run("sh", script, "/root/agent.rpm", timeout=300)
        assert packages_of(machine) - before == {NAME, *distribution.offered}
        assert state_of(machine) == ("enabled", "active")
        machine.run("sh", script, "/root/newer.rpm", timeout=300)
        assert machine.run(NAME, "--version").stdout == f"{NAME} {NEWER}\n"
        assert Service(machine, "").log("agent started", version=NEWER)
        machine.run(*REMOVE[distribution.manager], NAME, timeout=300)
        assert NAME not in packages_of(machine)
        assert not machine.path(f"/usr/bin/{NAME}").exists()
