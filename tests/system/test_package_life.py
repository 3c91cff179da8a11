"""The life of the packages on a machine: installed, used, upgraded, removed; the operator's decisions kept.

The distributions that the rpm is for are not to be had where these tests run: what there is, is a mirror of
Debian. So Debian's rpm installs it into a Debian, with --nodeps, because that one's rpm database is empty;
test_packages.py checks what it requires. Everything else is real: the scripts, systemd, the launcher, the service.
"""

import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("packages for Linux are installed on Linux", allow_module_level=True)

from container import CHECKOUT, PROJECT, Container
from package_managers import (
    AZURE_LINUX_3,
    REMOVE,
    RHEL_9,
    SLES_15,
    UNATTENDED,
    Distribution,
    add_repository,
    managed,
)
from service import (
    DROP_INS,
    POLICY,
    POLKIT_RULE,
    UNIT,
    Service,
    build_deb,
    build_rpm,
    make_strict,
    shown_commands,
    upgrade_while_a_hook_runs,
)
from sources import last_release

from scheduled_events_agent import __version__
from scheduled_events_agent.simulator import Simulator

pytest_plugins = ["machines", "installed"]
pytestmark = pytest.mark.timeout(600)

NAME = "scheduled-events-agent"
NEWER = "9.8.7"
(BACK,) = (block for block in shown_commands("docs/operations.md", "## Rolling it out") if len(block) == 3)
WAITING = f"{NAME}-restart.service"


@dataclass(frozen=True)
class Format:
    """A kind of package, and what installs it."""

    build: Callable[..., Path]
    file: str
    newer: str
    """A deb of these sources under a higher version."""
    install_command: tuple[str, ...]
    upgrade_command: tuple[str, ...]
    remove_command: tuple[str, ...]

    def install(self, machine: Container) -> None:
        """Without a network and without a terminal, as configuration management does."""
        self._run(machine, *self.install_command, self.file)

    def upgrade(self, machine: Container) -> str:
        """To the newer version, or back to it; returns what is said on standard error."""
        return self._run(machine, *self.upgrade_command, self.newer)

    def remove(self, machine: Container) -> str:
        """Returns what is said on standard error."""
        return self._run(machine, *self.remove_command, NAME)

    @staticmethod
    def _run(machine: Container, *command: str) -> str:
        done = machine.run(*command, timeout=300)
        assert "scriptlet failed" not in done.stderr, done.stderr
        return done.stderr


_RPM = ("rpm", "--force-debian", "--nodeps")
DEB = Format(
    build=build_deb,
    file="/root/agent.deb",
    newer="/root/newer.deb",
    install_command=("dpkg", "--install"),
    upgrade_command=("dpkg", "--install"),
    remove_command=("dpkg", "--remove"),
)
RPM = Format(
    build=build_rpm,
    file="/root/agent.rpm",
    newer="/root/newer.rpm",
    install_command=(*_RPM, "--install"),
    upgrade_command=(*_RPM, "--upgrade"),
    remove_command=(*_RPM, "--erase"),
)
deb_only = pytest.mark.parametrize("package", [DEB], ids=["deb"], indirect=True)
rpm_only = pytest.mark.parametrize("package", [RPM], ids=["rpm"], indirect=True)


@pytest.fixture(scope="module", params=[DEB, RPM], ids=["deb", "rpm"])
def package(request: pytest.FixtureRequest) -> Format:
    wanted: Format = request.param
    return wanted


@pytest.fixture(scope="module")
def bare(debian: Path, package: Format, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """A stopped machine that has two versions of the package, and what installs them; for others to lie on."""
    with Container(debian) as machine:
        if package is RPM:
            machine.write("/etc/apt/apt.conf.d/retries", 'Acquire::Retries "5";\n')
            machine.run("apt-get", "update", "-q", timeout=300)
            machine.run("apt-get", "install", "-qy", "--no-install-recommends", "rpm", timeout=300)
        machine.copy_in(package.build(tmp_path_factory.mktemp("package")), package.file)
        machine.copy_in(package.build(tmp_path_factory.mktemp("newer"), "--version", NEWER), package.newer)
        machine.stop()
        yield machine


@pytest.fixture(scope="module")
def with_agent(bare: Container, package: Format) -> Iterator[Container]:
    """A machine with the older package installed."""
    with Container(bare, private_network=True) as machine:
        package.install(machine)
        machine.stop()
        yield machine


@pytest.fixture
def machine(with_agent: Container) -> Iterator[Container]:
    """One that runs the package, with the newer one at hand; alone, so that the usual port is free."""
    with Container(with_agent, private_network=True) as booted:
        yield booted
        sys.stdout.write(booted.account())  # pytest shows it on failure only


@pytest.fixture
def service(with_agent: Container, sim: Simulator) -> Iterator[Service]:
    """On a machine that does not run yet: with the policy of the package it would ask Azure's endpoint."""
    with Container(with_agent, boots=False) as machine:
        yield Service(machine, sim.endpoint())
        sys.stdout.write(machine.account())


def state_of(machine: Container) -> tuple[str, str]:
    """Whether the service is enabled, and whether it runs."""
    enabled = machine.run("systemctl", "is-enabled", UNIT, check=False).stdout.strip()
    return enabled, machine.run("systemctl", "is-active", UNIT, check=False).stdout.strip()


def files_of(machine: Container) -> dict[str, str]:
    """Every file with its kind and mode, and below /etc with its content, as a sum."""
    where = "find / -xdev ( -path /var/log/journal -o -path /proc -o -path /opt -o -path /root ) -prune -o"
    listed = machine.run(*where.split(), "-printf", "%p\t%y %m %U:%G\n").stdout
    found = dict(line.split("\t") for line in listed.splitlines())
    sums = machine.run("sh", "-c", "find /etc -type f -exec md5sum {} +").stdout
    for line in sums.splitlines():
        value, name = line.split(maxsplit=1)
        found[name] += f" {value}"
    return found


def main_pid(machine: Container) -> str:
    return machine.run("systemctl", "show", "--property=MainPID", "--value", UNIT).stdout


def compiled(machine: Container) -> str:
    """Files with bytecode."""
    return machine.run("find", f"/usr/lib/{NAME}", "-name", "*.pyc").stdout


def check_installed(machine: Container) -> None:
    assert state_of(machine) == ("enabled", "active")
    assert machine.run(NAME, "--version").stdout == f"{NAME} {__version__}\n"
    told = machine.run(NAME, "check").stdout
    assert told.startswith(f"{POLICY}: valid\n")
    assert re.findall(r"^[a-z-]+$", told, re.MULTILINE) == ["user-initiated", "short-freeze"]
    (started,) = Service(machine, "").log("policy")
    assert started["file"] == POLICY

    modes = machine.run("stat", "-c", "%a %U:%G %n", f"/etc/{NAME}/credentials", f"/var/lib/{NAME}").stdout
    assert modes == f"750 root:{NAME} /etc/{NAME}/credentials\n700 root:root /var/lib/{NAME}\n"
    account = machine.run("getent", "passwd", NAME).stdout.strip().split(":")
    assert (account[0], account[5:]) == (NAME, [f"/var/lib/{NAME}", "/usr/sbin/nologin"])
    assert machine.path(f"/usr/share/man/man8/{NAME}.8.gz").exists()
    completion = f"source /usr/share/bash-completion/completions/{NAME} && complete -p {NAME}"
    assert NAME in machine.run("bash", "-c", completion).stdout


def test_without_a_network_it_is_installed_runs_and_endangers_nothing(bare: Container, package: Format) -> None:
    with Container(bare, private_network=True) as machine:
        package.install(machine)
        check_installed(machine)
        assert "cpython-311" in compiled(machine)
        if package is RPM:
            assert machine.run("rpm", "--verify", "--nodeps", NAME).stdout == ""
        else:
            assert machine.run("dpkg", "--verify", NAME).stdout == ""
            assert machine.run("dpkg", "--audit").stdout == ""


def test_on_the_next_debian_it_is_installed_and_runs_as_well(debian_13: Path, deb: Path) -> None:
    with Container(debian_13, private_network=True) as machine:
        machine.copy_in(deb, DEB.file)
        DEB.install(machine)
        check_installed(machine)
        assert machine.run("dpkg", "--verify", NAME).stdout == ""
        assert machine.run("dpkg", "--audit").stdout == ""


def test_the_cookbook_installs_an_example_over_a_policy_and_keeps_it(installed: Container) -> None:
    with Container(installed, private_network=True) as machine:
        (commands,) = shown_commands("docs/cookbook/README.md", "## Install")
        script = "\n".join(command for command in commands if not command.startswith("sudoedit "))
        before = machine.path(POLICY).read_text()
        machine.run("chgrp", "adm", POLICY)
        machine.run("chmod", "640", POLICY)
        told = machine.run("sh", "-ec", script).stdout
        assert told.startswith("redis.yaml: valid\n")
        assert " is not found" not in told
        example = machine.path(f"/usr/share/doc/{NAME}/examples/redis.yaml").read_text()
        assert machine.path(POLICY).read_text() == example
        assert machine.path(f"{POLICY}.~1~").read_text() == before
        assert machine.run("stat", "-c", "%a %U %G", POLICY).stdout == "640 root adm\n"
        hooks = [f"/etc/{NAME}/hooks/{name}" for name in ("common.sh", "redis-prepare", "redis-recover")]
        assert machine.run("stat", "-c", "%a %U %n", *hooks).stdout == "".join(
            f"755 root {hook}\n" for hook in hooks
        )
        service = Service(machine, "")
        machine.wait_for(lambda: service.log("the policy file was read again"), "it was read again")


def test_the_package_drains_approves_and_writes_to_the_journal(installed: Container, sim: Simulator) -> None:
    with Container(installed) as machine:
        service = Service(machine, sim.endpoint())
        rule = {"name": "reboots", "when": {"type": "Reboot"}, "prepare": ["drain"], "recover": ["resume"]}
        hooks = {name: {"shell": f"echo {name} >> /root/notes"} for name in ("drain", "resume")}
        service.write_policy(rules=[{**rule, "approve": "when-prepared"}], hooks=hooks)
        service.systemctl("restart")
        event = sim.schedule("Reboot", notice_seconds=600.0, lasts_seconds=None)
        service.wait_log("started", event_id=event)
        sim.end(event)
        machine.wait_for(lambda: service.records() == ["drain", "resume"], "it was drained and resumed")
        assert sim.event(event).approved_at is not None
        service.wait_log("closed", event_id=event)
        chapters = ("seen", "preparing", "approved", "started", "closed")
        story = [entry["message"] for entry in service.entries() if entry.get("event_id") == event]
        assert [message for message in story if message in chapters] == list(chapters)


def test_an_upgrade_during_an_event_keeps_policy_and_state_and_restarts_the_agent(
    service: Service, package: Format, sim: Simulator
) -> None:
    upgrade_during_an_event(service, package, sim)


def test_an_upgrade_from_the_last_release_keeps_policy_state_and_a_pending_event(
    bare: Container, package: Format, sim: Simulator, tmp_path: Path
) -> None:
    sources = last_release(tmp_path / "sources")
    with Container(bare, boots=False) as machine:
        machine.copy_in(package.build(tmp_path / "package", sources=sources), package.file)
        package.install(machine)
        upgrade_during_an_event(Service(machine, sim.endpoint()), package, sim)


def upgrade_during_an_event(service: Service, package: Format, sim: Simulator) -> None:
    """Upgrade a machine that does not run yet, once it has drained for an event."""
    machine = service.machine
    rule = {"name": "reboots", "when": {"type": "Reboot"}, "prepare": ["drain"], "approve": "manual", "lead": "1h"}
    service.write_policy(rules=[rule], hooks={"drain": {"shell": "echo drain >> /root/notes"}})
    machine.start()
    assert {entry["endpoint"] for entry in service.log("agent started")} == {sim.endpoint()}
    event = sim.schedule("Reboot", notice_seconds=600.0, lasts_seconds=1.0)
    machine.wait_for(lambda: service.records() == ["drain"], "it was drained")
    policy, before = machine.path(POLICY).read_text(), service.pid()

    package.upgrade(machine)

    assert state_of(machine) == ("enabled", "active")
    assert service.pid() != before
    assert machine.run(NAME, "--version").stdout == f"{NAME} {NEWER}\n"
    assert machine.path(POLICY).read_text() == policy
    if package is RPM:
        assert machine.run("rpm", "--query", NAME).stdout == f"{NAME}-{NEWER}-1.x86_64\n"
    assert "cpython-311" in compiled(machine)
    # It knows that it has drained already: the operator approves, and nothing is drained again.
    service.wait_log("restarted", event_id=event)
    machine.run(NAME, "approve", event)
    sim.wait_gone(event)
    assert service.records() == ["drain"]
    # The old version worked on until the new one was in place: the unit was down for a restart, no longer.
    said = [entry for entry in machine.journal(UNIT) if entry.get("_PID") == "1"]
    (stopped, *_) = [entry for entry in said[::-1] if str(entry["MESSAGE"]).startswith("Stopping")]
    (started, *_) = [entry for entry in said[::-1] if str(entry["MESSAGE"]).startswith("Started")]
    in_place = machine.path(f"/usr/lib/{NAME}/scheduled_events_agent/__init__.py").stat().st_ctime
    stopped_at, started_at = (int(entry["__REALTIME_TIMESTAMP"]) / 1e6 for entry in (stopped, started))
    print(f"it was down for {started_at - stopped_at:.2f} s")
    assert in_place < stopped_at < started_at < stopped_at + 60


def test_an_upgrade_while_a_hook_runs_restarts_the_service_when_it_has_ended(
    service: Service, package: Format, sim: Simulator
) -> None:
    service.write_policy()
    service.machine.start()
    upgrade_while_a_hook_runs(service, sim, NEWER, *package.upgrade_command, package.newer)


@deb_only
def test_a_service_stopped_by_an_operator_before_its_restart_stays_stopped(
    service: Service, package: Format, sim: Simulator
) -> None:
    machine = service.machine
    rule = {"name": "all", "prepare": ["drain"], "approve": "when-prepared"}
    drain = {"shell": "while ! test -e /root/go; do sleep 0.1; done", "timeout": "5m"}
    service.write_policy(rules=[rule], hooks={"drain": drain})
    machine.start()
    sim.schedule("Reboot", notice_seconds=600.0)
    service.wait_status("runs hook drain")
    package.upgrade(machine)
    machine.run("systemctl", "stop", "--no-block", UNIT)
    service.wait_status("Stopping")
    machine.write("/root/go", "")
    machine.wait_for(
        lambda: machine.run("systemctl", "is-active", WAITING, check=False).stdout == "inactive\n", "it ended"
    )
    machine.wait_for(lambda: state_of(machine) == ("enabled", "inactive"), "the service was stopped")


@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        (["disable --now"], ("disabled", "inactive")),
        (["disable"], ("disabled", "active")),
        (["stop"], ("enabled", "inactive")),
        (["stop", "mask"], ("masked", "inactive")),
    ],
)
def test_service_settings_of_the_operator_survive_an_upgrade(
    machine: Container, package: Format, commands: list[str], expected: tuple[str, str]
) -> None:
    for command in commands:
        machine.run("systemctl", *command.split(), UNIT)
    before = main_pid(machine)
    package.upgrade(machine)
    assert state_of(machine) == expected
    assert (before != main_pid(machine)) == (expected[1] == "active")  # what runs is the new version


@deb_only
def test_a_disabled_service_stays_disabled_when_the_package_is_reinstalled(
    machine: Container, package: Format
) -> None:
    machine.run("systemctl", "disable", "--now", UNIT)
    package.remove(machine)
    package.upgrade(machine)
    assert state_of(machine) == ("disabled", "inactive")


@deb_only
def test_removing_the_package_stops_it_and_keeps_operator_files(machine: Container, package: Format) -> None:
    machine.write(f"/etc/{NAME}/hooks/drain", "#!/bin/sh\n", 0o755)
    policy = machine.path(POLICY).read_text()
    package.remove(machine)
    assert state_of(machine) in {("", "inactive"), ("not-found", "inactive")}
    assert machine.path(POLICY).read_text() == policy
    assert machine.path(f"/etc/{NAME}/hooks/drain").exists()
    assert machine.path(f"/var/lib/{NAME}/state.db").exists()
    assert not machine.path(f"/usr/lib/{NAME}").exists()
    wants = machine.run("find", "/etc/systemd/system", "-name", f"*{NAME}*").stdout
    assert wants == ""

    package.upgrade(machine)
    assert state_of(machine) == ("enabled", "active")
    assert machine.path(POLICY).read_text() == policy


def test_removing_it_names_prepared_events_and_recover_hooks_but_an_upgrade_does_not(
    service: Service, package: Format, sim: Simulator
) -> None:
    machine = service.machine
    rule = {"name": "all", "prepare": ["drain"], "recover": ["resume"], "approve": "manual", "lead": "1h"}
    hooks = {name: {"shell": f"echo {name} >> /root/notes"} for name in ("drain", "resume")}
    service.write_policy(rules=[rule], hooks=hooks)
    machine.start()
    event = sim.schedule("Reboot", notice_seconds=600.0)
    service.wait_log("prepared", event_id=event)
    assert "repared" not in package.upgrade(machine)
    service.wait_log("restarted", event_id=event)
    assert (
        f"{NAME}: Prepared and not recovered: Reboot {event[:8]}.\n"
        f"{NAME}: Without the agent these recover hooks will not run: resume.\n"
    ) in package.remove(machine)
    if package is RPM:
        machine.run("mv", f"{POLICY}.rpmsave", POLICY)
    sim.cancel(event)

    # With its state it goes on where it was. Afterwards there is nothing to say.
    machine.run(*package.install_command, package.newer, timeout=300)
    service.wait_log("closed", event_id=event)
    assert service.records() == ["drain", "resume"]
    assert "repared" not in package.remove(machine)


def test_a_state_that_cannot_be_read_hinders_no_removal(machine: Container, package: Format) -> None:
    machine.run("systemctl", "stop", UNIT)
    state = f"/var/lib/{NAME}/state.db"
    machine.run("sh", "-euc", f"rm {state}* && mkfifo {state}")  # to open it waits for ever
    assert "repared" not in package.remove(machine)
    assert not machine.path(f"/usr/bin/{NAME}").exists()


@deb_only
def test_purging_it_names_prepared_events_and_a_new_installation_runs_again(
    service: Service, package: Format, sim: Simulator
) -> None:
    machine = service.machine
    rule = {"name": "all", "prepare": ["drain"], "recover": ["resume"], "approve": "manual", "lead": "1h"}
    service.write_policy(rules=[rule], hooks={name: {"shell": "true"} for name in ("drain", "resume")})
    machine.start()
    event = sim.schedule("Reboot", notice_seconds=600.0)
    service.wait_log("prepared", event_id=event)
    said = machine.run("dpkg", "--purge", NAME).stderr
    assert f"{NAME}: Without the agent these recover hooks will not run: resume.\n" in said
    package.install(machine)
    assert state_of(machine) == ("enabled", "active")


@deb_only
def test_purging_it_leaves_nothing_behind(bare: Container, package: Format) -> None:
    with Container(bare, private_network=True) as machine:
        before = files_of(machine)
        package.install(machine)
        machine.write(f"/etc/{NAME}/hooks/drain", "#!/bin/sh\n", 0o755)
        machine.write(f"/etc/{NAME}/credentials/token", "secret\n", 0o600)
        machine.write(POLICY, "agent: {listen: off}\n")
        make_strict(machine)
        assert machine.path(f"{DROP_INS}/50-strict.conf").exists()
        assert machine.path(POLKIT_RULE).exists()
        machine.write(f"/var/lib/{NAME}-hooks/nginx.service.stopped-by-agent", "mark\n")
        assert state_of(machine) == ("enabled", "active")
        machine.run("dpkg", "--purge", NAME)
        after = files_of(machine)
        # Files that dpkg, and the tools that make and remove accounts, keep about earlier states; and logs.
        kept = ("/var/lib/dpkg/", "/var/log/", "/etc/passwd-", "/etc/group-", "/etc/shadow-", "/etc/gshadow-")
        differing = {name: (before.get(name), after.get(name)) for name in {*before, *after}}
        assert {
            name: values
            for name, values in differing.items()
            if values[0] != values[1] and not name.startswith(kept)
        } == {}
        assert NAME not in machine.run("dpkg-query", "--show").stdout
        assert machine.run("systemctl", "list-units", "--all", "--plain", f"{NAME}*", "--no-legend").stdout == ""

        package.upgrade(machine)
        assert state_of(machine) == ("enabled", "active")


@deb_only
def test_purging_it_leaves_the_operators_own_drop_ins(machine: Container) -> None:
    machine.write(f"{DROP_INS}/override.conf", "[Service]\nNice=5\n")
    machine.write(f"{DROP_INS}/50-strict.conf", "[Service]\n")
    machine.run("dpkg", "--purge", NAME)
    assert machine.run("ls", DROP_INS).stdout == "override.conf\n"


@deb_only
def test_purging_it_empties_a_state_directory_that_is_a_file_system_of_its_own(
    machine: Container,
) -> None:
    state = f"/var/lib/{NAME}"
    machine.run("systemctl", "stop", UNIT)
    machine.run("mount", "-t", "tmpfs", "-o", "mode=700", "state", state)
    machine.run("systemctl", "start", UNIT)
    assert machine.run("ls", state).stdout != ""
    machine.run("dpkg", "--purge", NAME)
    assert machine.run("ls", state).stdout == ""
    assert NAME not in machine.run("dpkg-query", "--show").stdout
    assert NAME not in machine.path("/etc/passwd").read_text()


@deb_only
def test_purging_the_package_leaves_a_replacement_by_pip_alone(machine: Container, package: Format) -> None:
    machine.write(f"/etc/{NAME}/credentials/token", "secret\n", 0o600)
    package.remove(machine)
    machine.write(f"/usr/local/bin/{NAME}", "#!/bin/sh\nsystemd-notify --ready\nexec sleep infinity\n", 0o755)
    shipped = (CHECKOUT / "systemd" / UNIT).read_text(encoding="utf-8")
    machine.write(f"/etc/systemd/system/{UNIT}", shipped.replace("NotifyAccess=main", "NotifyAccess=all"))
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "enable", "--now", UNIT)
    machine.run("dpkg", "--purge", NAME)
    assert state_of(machine) == ("enabled", "active")
    assert not machine.path(POLICY).exists()  # dpkg's doing, as docs/install-linux.md says
    assert machine.path(f"/etc/{NAME}/credentials/token").read_text() == "secret\n"
    assert machine.path(f"/var/lib/{NAME}/state.db").exists()
    assert machine.run("getent", "passwd", NAME).stdout.startswith(f"{NAME}:")


@deb_only
def test_a_linked_policy_stays_a_link_until_it_is_purged_with_its_target(
    machine: Container, package: Format
) -> None:
    machine.run("mv", POLICY, "/etc/linked.yaml")
    machine.run("ln", "-s", "/etc/linked.yaml", POLICY)
    linked = machine.path("/etc/linked.yaml")
    before = linked.read_text()
    package.upgrade(machine)
    assert (state_of(machine), linked.read_text()) == (("enabled", "active"), before)
    package.remove(machine)
    assert machine.run("readlink", POLICY).stdout == "/etc/linked.yaml\n"
    machine.run("dpkg", "--purge", NAME)
    assert not linked.exists()  # dpkg's doing, as docs/install-linux.md says


@deb_only
def test_removing_and_purging_the_package_ignore_missing_files(machine: Container, package: Format) -> None:
    machine.run("systemctl", "disable", "--now", UNIT)
    machine.run("userdel", NAME)
    machine.run("rm", "-rf", f"/etc/{NAME}", f"/var/lib/{NAME}", f"/usr/lib/{NAME}", "/usr/bin/python3.11")
    package.remove(machine)
    machine.run("dpkg", "--purge", NAME)
    assert NAME not in machine.run("dpkg-query", "--show").stdout


@pytest.mark.parametrize("root", ["debian", "debian_13"])
def test_the_strict_account_starts_its_hooks_but_no_unit_of_its_own_making(
    root: str, deb: Path, request: pytest.FixtureRequest
) -> None:
    with Container(request.getfixturevalue(root), private_network=True) as machine:
        machine.copy_in(deb, DEB.file)
        DEB.install(machine)
        make_strict(machine)
        machine.write(f"/etc/{NAME}/hooks/drain", "#!/bin/sh\ntouch /etc/drained\n", 0o755)
        run_as_root = f"/usr/share/{NAME}/systemd/run-as-root"
        machine.run(run_as_root, "drain", input="{}", user=NAME)
        assert machine.path("/etc/drained").exists()
        # Nothing but the rule is in the way of a unit of root's under such a name.
        asked = machine.run(
            "busctl", "call", "org.freedesktop.systemd1", "/org/freedesktop/systemd1",
            "org.freedesktop.systemd1.Manager", "StartTransientUnit", "ssa(sv)a(sa(sv))",
            f"{NAME}-hook@gone.service", "replace", "2", "Type", "s", "oneshot",
            "ExecStart", "a(sasb)", "1", "/bin/touch", "2", "/bin/touch", "/etc/taken", "false", "0",
            user=NAME, check=False,
        )  # fmt: skip
        assert (asked.returncode, asked.stderr) == (1, "Call failed: Interactive authentication required.\n")
        assert not machine.path("/etc/taken").exists()


def test_an_upgrade_does_not_end_an_agent_whose_policy_file_is_bad(machine: Container, package: Format) -> None:
    service = Service(machine, "")
    policy = machine.path(POLICY).read_text()
    machine.write(POLICY, "rulez: []\n")
    before = service.pid()
    told = package.upgrade(machine)
    assert (state_of(machine), service.pid()) == (("enabled", "active"), before)
    assert f'{POLICY}:1: unknown key "rulez"; did you mean "rules"?\n' in told
    assert told.endswith(
        f"{NAME}: the policy is not valid, so the version before runs on. When it is: systemctl restart {NAME}\n"
    )
    machine.write(POLICY, policy)
    service.systemctl("restart")
    assert service.log("agent started", version=NEWER)


@deb_only
def test_an_upgrade_does_not_end_an_agent_whose_bad_policy_file_a_drop_in_names(
    machine: Container, package: Format
) -> None:
    service = Service(machine, "")
    machine.write("/etc/other.yaml", "rules: []\n")
    service.add_drop_in("[Service]\nEnvironment=SCHEDULED_EVENTS_AGENT_CONFIG=/etc/other.yaml\n")
    service.systemctl("restart")
    machine.write("/etc/other.yaml", "rulez: []\n")
    before = service.pid()
    told = package.upgrade(machine)
    assert (state_of(machine), service.pid()) == (("enabled", "active"), before)
    assert '/etc/other.yaml:1: unknown key "rulez"; did you mean "rules"?\n' in told


@deb_only
@pytest.mark.parametrize("grant", ["", "Group=adm", "SupplementaryGroups=adm"])
def test_an_upgrade_does_not_end_a_strict_agent_that_cannot_read_its_policy(
    machine: Container, package: Format, grant: str
) -> None:
    service = Service(machine, "")
    make_strict(machine)
    service.add_drop_in(f"[Service]\n{grant}\n")
    service.systemctl("restart")
    before = service.pid()
    # Root can read it, so nothing but the account's eyes can tell.
    machine.run("chgrp", "adm", POLICY)
    machine.run("chmod", "640", POLICY)
    told = package.upgrade(machine)
    assert state_of(machine) == ("enabled", "active")
    if grant:
        assert service.log("agent started", version=NEWER)
    else:
        assert service.pid() == before
        assert f"{POLICY}: cannot be read: Permission denied" in told
        assert f"{NAME}: the policy is not valid, so the version before runs on." in told


@deb_only
def test_an_upgrade_does_not_end_an_agent_whose_account_is_gone(machine: Container, package: Format) -> None:
    service = Service(machine, "")
    before = service.pid()
    service.add_drop_in("[Service]\nUser=nobody-at-all\n")
    told = package.upgrade(machine)
    assert (state_of(machine), service.pid()) == (("enabled", "active"), before)
    assert "the account of the service is not known, so the version before runs on." in told


@deb_only
def test_an_upgrade_restarts_a_strict_agent_with_a_hook_its_account_may_change(
    machine: Container, package: Format
) -> None:
    service = Service(machine, "")
    hook = f"/var/lib/{NAME}/drain"
    rules = "rules: [{name: reboots, when: {type: Reboot}, prepare: [drain], approve: when-prepared}]\n"
    nowhere = "imds: {endpoint: 'http://127.0.0.1:9'}\n"
    machine.write(POLICY, f"{rules}hooks: {{drain: {{run: [{hook}]}}}}\n{nowhere}agent: {{listen: off}}\n")
    make_strict(machine)
    machine.write(hook, "#!/bin/sh\n", 0o755)
    machine.run("chown", NAME, hook)
    refused = machine.run(NAME, "check", check=False)
    assert refused.returncode != 0
    assert f"{hook} can be changed by " in refused.stdout + refused.stderr  # root may not run it
    package.upgrade(machine)
    assert service.log("agent started", version=NEWER)


def test_a_downgrade_does_not_end_an_agent_whose_state_is_too_new_for_it(
    machine: Container, package: Format
) -> None:
    service = Service(machine, "")
    service.write_state_of_a_newer_version()
    before = service.pid()
    told = package.upgrade(machine)
    assert (state_of(machine), service.pid()) == (("enabled", "active"), before)
    assert f"/var/lib/{NAME}/state.db was written by a newer version of the agent (schema 99, " in told
    assert told.endswith(
        f"{NAME}: this version cannot read the state, so the version before runs on. "
        f"When it can: systemctl restart {NAME}\n"
    )


def go_back(machine: Container, manager: str, *options: str) -> None:
    """To this version, from a repository, by the command of the page for this package manager."""
    (command,) = (line for line in BACK if line.startswith(f"{manager} "))
    command = re.sub(r"\d+\.\d+\.\d+", __version__, command.partition("#")[0])
    machine.run(manager, *options, *command.split()[1:], timeout=300)
    assert machine.run(NAME, "--version").stdout == f"{NAME} {__version__}\n"


@deb_only
def test_back_from_a_newer_version_during_an_event_it_goes_on_with_the_event(
    service: Service, package: Format, sim: Simulator
) -> None:
    machine = service.machine
    repository = "/root/repository"
    machine.run("mkdir", repository)
    machine.run("cp", package.file, package.newer, repository)
    entries = []
    for deb in ("agent.deb", "newer.deb"):
        fields = machine.run("dpkg-deb", "--field", f"{repository}/{deb}").stdout
        content = machine.path(f"{repository}/{deb}").read_bytes()
        checksum = hashlib.sha256(content).hexdigest()
        entries.append(f"{fields}Filename: ./{deb}\nSize: {len(content)}\nSHA256: {checksum}\n")
    machine.write(f"{repository}/Packages", "\n".join(entries))
    machine.write("/etc/apt/sources.list", f"deb [trusted=yes] file:{repository} ./\n")
    rule = {"name": "reboots", "when": {"type": "Reboot"}, "prepare": ["drain"], "approve": "manual", "lead": "1h"}
    service.write_policy(rules=[rule], hooks={"drain": {"shell": "echo drain >> /root/notes"}})
    machine.start()
    package.upgrade(machine)
    event = sim.schedule("Reboot", notice_seconds=600.0, lasts_seconds=1.0)
    machine.wait_for(lambda: service.records() == ["drain"], "it was drained")

    machine.run("apt-get", "update", "-q")
    go_back(machine, "apt", "--yes")

    service.wait_log("restarted", event_id=event)
    machine.run(NAME, "approve", event)
    sim.wait_gone(event)
    assert service.records() == ["drain"]


@deb_only
def test_removing_it_in_the_middle_of_an_upgrade_stops_it_and_leaves_no_trace(
    machine: Container, package: Format
) -> None:
    machine.run("dpkg", "--unpack", package.newer)
    package.remove(machine)
    assert state_of(machine)[1] == "inactive"
    assert machine.run("find", "/run", "-maxdepth", "1", "-name", f"{NAME}.upgrading").stdout == ""
    package.upgrade(machine)
    assert state_of(machine) == ("enabled", "active")


@deb_only
def test_policy_rc_d_keeps_it_from_starting(bare: Container, package: Format) -> None:
    with Container(bare, private_network=True) as machine:
        machine.write("/usr/sbin/policy-rc.d", "#!/bin/sh\nexit 101\n", 0o755)
        package.install(machine)
        assert state_of(machine) == ("enabled", "inactive")


def test_a_preset_of_the_administrators_keeps_it_from_being_enabled(bare: Container, package: Format) -> None:
    with Container(bare, private_network=True) as machine:
        machine.write("/etc/systemd/system-preset/00-site.preset", f"disable {UNIT}\n")
        package.install(machine)
        assert state_of(machine) == ("disabled", "inactive")


def test_installed_into_an_image_without_systemd_it_runs_from_the_first_boot(
    bare: Container, package: Format
) -> None:
    with Container(bare, boots=False, private_network=True) as machine:
        package.install(machine)
        machine.start()
        assert state_of(machine) == ("enabled", "active")


@deb_only
def test_bytecode_follows_the_python_that_is_installed(machine: Container) -> None:
    assert "cpython-311" in compiled(machine)
    machine.run(f"/usr/lib/{NAME}/bytecode.sh", "remove")
    assert compiled(machine) == ""
    machine.run("dpkg-trigger", "--by-package=python3.11", "/usr/bin/python3.11")
    machine.run("dpkg", "--triggers-only", "--pending")
    assert "cpython-311" in compiled(machine)


# --- the rpm alone


@rpm_only
def test_erasing_it_stops_it_and_keeps_what_was_changed_and_decided(machine: Container, package: Format) -> None:
    machine.write(POLICY, "rules: []\n")
    machine.write(f"/etc/{NAME}/hooks/drain", "#!/bin/sh\n", 0o755)
    package.remove(machine)
    assert state_of(machine) in {("", "inactive"), ("not-found", "inactive")}
    assert machine.path(f"{POLICY}.rpmsave").read_text() == "rules: []\n"
    assert machine.path(f"/etc/{NAME}/hooks/drain").exists()
    assert machine.path(f"/var/lib/{NAME}/state.db").exists()
    left = machine.run("find", "/usr", "/etc/systemd", "-name", f"*{NAME}*").stdout
    assert left == ""


@rpm_only
def test_erasing_it_untouched_leaves_only_the_state(machine: Container, package: Format) -> None:
    package.remove(machine)
    left = machine.run("find", "/usr", "/etc", "/var/lib", "-name", f"*{NAME}*").stdout
    assert left == f"/var/lib/{NAME}\n"


# --- package managers


def packages_of(machine: Container) -> set[str]:
    return set(machine.run("rpm", "--query", "--all", "--queryformat", "%{NAME}\\n").stdout.split())


@rpm_only
@pytest.mark.parametrize("distribution", [RHEL_9, SLES_15, AZURE_LINUX_3], ids=["rhel", "sles", "azure"])
def test_a_package_manager_installs_upgrades_and_removes_it_with_a_new_python(
    bare: Container, distribution: Distribution
) -> None:
    with managed(bare, distribution) as machine:
        before = packages_of(machine)
        assert before == {*distribution.installed}
        # By the script for cloud-init, which picks the manager.
        script = f"{PROJECT}/packaging/cloud-init/install.sh"
        if distribution.offered:
            refused = machine.run("sh", script, RPM.file, check=False, timeout=300)
            assert refused.returncode != 0
            assert "python(abi) = 3.11" in refused.stdout + refused.stderr
            assert packages_of(machine) == before
            add_repository(machine, distribution, "offered")
        machine.run("sh", script, RPM.file, timeout=300)
        assert packages_of(machine) - before == {NAME, *distribution.offered}
        assert state_of(machine) == ("enabled", "active")
        machine.run("sh", script, RPM.newer, timeout=300)
        assert machine.run(NAME, "--version").stdout == f"{NAME} {NEWER}\n"
        assert Service(machine, "").log("agent started", version=NEWER)
        machine.run("sh", "-c", "mkdir /root/ours && cp /root/*.rpm /root/ours && createrepo_c --quiet /root/ours")
        add_repository(machine, distribution, "ours")
        go_back(machine, distribution.manager, *UNATTENDED[distribution.manager])
        assert Service(machine, "").log("agent started")[-1]["version"] == __version__
        machine.run(*REMOVE[distribution.manager], NAME, timeout=300)
        assert NAME not in packages_of(machine)
        assert not machine.path(f"/usr/bin/{NAME}").exists()
