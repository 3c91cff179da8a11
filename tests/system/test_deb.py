"""The life of the deb on a machine: installed, used, upgraded, removed, purged; the operator's decisions kept."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("debs are installed on Debian", allow_module_level=True)

from container import CHECKOUT, Container
from service import (
    DROP_INS,
    POLICY,
    POLKIT_RULE,
    UNIT,
    Service,
    build_deb,
    make_strict,
    shown_commands,
    upgrade_while_a_hook_runs,
)

from scheduled_events_agent import __version__
from scheduled_events_agent.simulator import Simulator

pytest_plugins = ["machines", "installed"]
pytestmark = pytest.mark.timeout(600)

NAME = "scheduled-events-agent"
NEWER = "9.8.7"
PACKAGE = "/root/agent.deb"


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same sources under a higher version."""
    return build_deb(tmp_path_factory.mktemp("newer"), "--version", NEWER)


@pytest.fixture
def upgradable(installed: Container, newer: Path) -> Iterator[Container]:
    """A machine that runs the package, with the newer one at hand; alone, so that the usual port is free."""
    with Container(installed, private_network=True) as machine:
        machine.copy_in(newer, PACKAGE)
        yield machine
        sys.stdout.write(machine.account())  # pytest shows it on failure only


@pytest.fixture
def sim() -> Iterator[Simulator]:
    with Simulator(vms=("vm-1",), rate_limit=None) as simulator:
        yield simulator


def install(machine: Container, package: Path | None = None) -> None:
    """Install, without a network and without a terminal, as configuration management does."""
    if package is not None:
        machine.copy_in(package, PACKAGE)
    machine.run("dpkg", "--install", PACKAGE)


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


@pytest.mark.parametrize("root", ["debian", "debian_13"])
def test_without_a_network_it_is_installed_runs_and_endangers_nothing(
    root: str, deb: Path, request: pytest.FixtureRequest
) -> None:
    with Container(request.getfixturevalue(root), private_network=True) as machine:
        install(machine, deb)
        assert state_of(machine) == ("enabled", "active")
        assert machine.run(NAME, "--version").stdout == f"{NAME} {__version__}\n"
        told = machine.run(NAME, "check").stdout
        assert told.startswith(
            f"{POLICY}: valid\n\nThe first rule that matches takes the event:\n"
            "\nuser-initiated\n  when     Any event from User\n  approve  at once\n"
            "\nshort-freeze\n  when     Freeze lasting less than 9s\n  approve  at once\n"
            "\nAny other event is observed: logged and counted, nothing more.\n"
        )
        (started,) = Service(machine, "").log("policy")
        assert started["file"] == POLICY

        modes = machine.run("stat", "-c", "%a %U:%G %n", f"/etc/{NAME}/credentials", f"/var/lib/{NAME}").stdout
        assert modes == f"750 root:{NAME} /etc/{NAME}/credentials\n700 root:root /var/lib/{NAME}\n"
        account = machine.run("getent", "passwd", NAME).stdout.strip().split(":")
        assert (account[0], account[5:]) == (NAME, [f"/var/lib/{NAME}", "/usr/sbin/nologin"])
        assert machine.path(f"/usr/share/man/man8/{NAME}.8.gz").exists()
        completion = f"source /usr/share/bash-completion/completions/{NAME} && complete -p {NAME}"
        assert NAME in machine.run("bash", "-c", completion).stdout
        assert machine.run("dpkg", "--verify", NAME).stdout == ""
        assert machine.run("dpkg", "--audit").stdout == ""


def test_the_cookbook_tells_how_to_install_an_example_over_a_policy_which_it_keeps(installed: Container) -> None:
    with Container(installed, private_network=True) as machine:
        (commands,) = shown_commands("docs/cookbook/README.md", "## Install")
        script = "\n".join(command for command in commands if not command.startswith("sudoedit "))
        before = machine.path(POLICY).read_text()
        told = machine.run("sh", "-ec", script).stdout
        assert told.startswith("redis.yaml: valid\n")
        assert " is not found" not in told
        example = machine.path(f"/usr/share/doc/{NAME}/examples/redis.yaml").read_text()
        assert machine.path(POLICY).read_text() == example
        assert machine.path(f"{POLICY}.~1~").read_text() == before
        hooks = [f"/etc/{NAME}/hooks/{name}" for name in ("common.sh", "redis-prepare", "redis-recover")]
        assert machine.run("stat", "-c", "%a %U %n", *hooks).stdout == "".join(
            f"755 root {hook}\n" for hook in hooks
        )
        service = Service(machine, "")
        machine.wait_for(lambda: service.log("the policy file was read again"), "it was read again")


def test_it_drains_approves_and_tells_the_journal(installed: Container, sim: Simulator) -> None:
    with Container(installed) as machine:
        service = Service(machine, sim.endpoint())
        rule = {"name": "reboots", "when": {"type": "Reboot"}, "prepare": ["drain"], "recover": ["resume"]}
        hooks = {name: {"shell": f"echo {name} >> /root/notes"} for name in ("drain", "resume")}
        service.write_policy(rules=[{**rule, "approve": "when-prepared"}], hooks=hooks)
        service.systemctl("restart")
        event = sim.schedule("Reboot", notice_seconds=600.0, lasts_seconds=None)
        service.wait_log("started", event_id=event)
        sim.end(event)
        machine.wait_for(lambda: service.notes() == ["drain", "resume"], "it was drained and resumed")
        assert sim.event(event).approved_at is not None
        service.wait_log("closed", event_id=event)
        chapters = ("seen", "preparing", "approved", "started", "closed")
        story = [entry["message"] for entry in service.entries() if entry.get("event_id") == event]
        assert [message for message in story if message in chapters] == list(chapters)


def test_an_upgrade_keeps_policy_and_state_and_restarts_the_service(
    installed: Container, newer: Path, sim: Simulator
) -> None:
    with Container(installed) as machine:
        machine.copy_in(newer, PACKAGE)
        upgrade_in_mid_event(machine, sim)


def upgrade_in_mid_event(machine: Container, sim: Simulator) -> None:
    service = Service(machine, sim.endpoint())
    rule = {"name": "reboots", "when": {"type": "Reboot"}, "prepare": ["drain"], "approve": "manual", "lead": "1h"}
    service.write_policy(rules=[rule], hooks={"drain": {"shell": "echo drain >> /root/notes"}})
    service.systemctl("restart")
    event = sim.schedule("Reboot", notice_seconds=600.0, lasts_seconds=1.0)
    machine.wait_for(lambda: service.notes() == ["drain"], "it was drained")
    policy, before = machine.path(POLICY).read_text(), service.pid()

    install(machine)

    assert state_of(machine) == ("enabled", "active")
    assert service.pid() != before
    assert machine.run(NAME, "--version").stdout == f"{NAME} {NEWER}\n"
    assert machine.path(POLICY).read_text() == policy
    # It knows that it has drained already: the operator approves, and nothing is drained again.
    service.wait_log("restarted", event_id=event)
    machine.run(NAME, "approve", event)
    sim.wait_gone(event)
    assert service.notes() == ["drain"]
    # The old version worked on until the new one was in place: the unit was down for a restart, no longer.
    said = [entry for entry in machine.journal(UNIT) if entry.get("_PID") == "1"]
    (stopped, *_) = [entry for entry in said[::-1] if str(entry["MESSAGE"]).startswith("Stopping")]
    (started, *_) = [entry for entry in said[::-1] if str(entry["MESSAGE"]).startswith("Started")]
    in_place = machine.path(f"/usr/lib/{NAME}/scheduled_events_agent/__init__.py").stat().st_ctime
    stopped_at, started_at = (int(entry["__REALTIME_TIMESTAMP"]) / 1e6 for entry in (stopped, started))
    print(f"it was down for {started_at - stopped_at:.2f} s")
    assert in_place < stopped_at < started_at < stopped_at + 60


def test_an_upgrade_while_a_hook_runs_restarts_the_service_when_it_has_ended(
    installed: Container, newer: Path, sim: Simulator
) -> None:
    with Container(installed) as machine:
        machine.copy_in(newer, PACKAGE)
        service = Service(machine, sim.endpoint())
        upgrade_while_a_hook_runs(service, sim, NEWER, "dpkg", "--install", PACKAGE)
        # Once more, and the operator stops the service meanwhile: it stays stopped.
        machine.run("rm", "/root/go")
        sim.schedule("Reboot", notice_seconds=600.0)
        service.wait_status("runs hook drain")
        install(machine)
        machine.run("systemctl", "stop", "--no-block", UNIT)
        service.wait_status("Stopping")
        machine.write("/root/go", "")
        waiting = f"{NAME}-restart.service"
        machine.wait_for(
            lambda: machine.run("systemctl", "is-active", waiting, check=False).stdout == "inactive\n", "it ended"
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
def test_what_the_operator_decided_about_the_service_survives_an_upgrade(
    upgradable: Container, commands: list[str], expected: tuple[str, str]
) -> None:
    for command in commands:
        upgradable.run("systemctl", *command.split(), UNIT)
    before = upgradable.run("systemctl", "show", "--property=MainPID", "--value", UNIT).stdout
    install(upgradable)
    assert state_of(upgradable) == expected
    after = upgradable.run("systemctl", "show", "--property=MainPID", "--value", UNIT).stdout
    assert (before != after) == (expected[1] == "active")  # what runs is the new version


def test_what_was_disabled_stays_so_even_if_the_package_comes_back(upgradable: Container) -> None:
    upgradable.run("systemctl", "disable", "--now", UNIT)
    upgradable.run("dpkg", "--remove", NAME)
    install(upgradable)
    assert state_of(upgradable) == ("disabled", "inactive")


def test_removing_it_stops_it_and_keeps_what_is_the_operators(upgradable: Container) -> None:
    upgradable.write(f"/etc/{NAME}/hooks/drain", "#!/bin/sh\n", 0o755)
    policy = upgradable.path(POLICY).read_text()
    upgradable.run("dpkg", "--remove", NAME)
    assert state_of(upgradable) in {("", "inactive"), ("not-found", "inactive")}
    assert upgradable.path(POLICY).read_text() == policy
    assert upgradable.path(f"/etc/{NAME}/hooks/drain").exists()
    assert upgradable.path(f"/var/lib/{NAME}/state.db").exists()
    assert not upgradable.path(f"/usr/lib/{NAME}").exists()
    wants = upgradable.run("find", "/etc/systemd/system", "-name", f"*{NAME}*").stdout
    assert wants == ""

    install(upgradable)
    assert state_of(upgradable) == ("enabled", "active")
    assert upgradable.path(POLICY).read_text() == policy


def test_purging_it_leaves_nothing_behind(debian: Path, deb: Path) -> None:
    with Container(debian, private_network=True) as machine:
        before = files_of(machine)
        install(machine, deb)
        machine.write(f"/etc/{NAME}/hooks/drain", "#!/bin/sh\n", 0o755)
        machine.write(f"/etc/{NAME}/credentials/token", "secret\n", 0o600)
        machine.write(POLICY, "agent: {listen: off}\n")
        make_strict(machine)
        assert machine.path(f"{DROP_INS}/50-strict.conf").exists()
        assert machine.path(POLKIT_RULE).exists()
        assert state_of(machine) == ("enabled", "active")
        machine.run("dpkg", "--purge", NAME)
        after = files_of(machine)
        # What dpkg, and the tools that make and remove accounts, keep for themselves of what was; and logs.
        kept = ("/var/lib/dpkg/", "/var/log/", "/etc/passwd-", "/etc/group-", "/etc/shadow-", "/etc/gshadow-")
        differing = {name: (before.get(name), after.get(name)) for name in {*before, *after}}
        assert {
            name: values
            for name, values in differing.items()
            if values[0] != values[1] and not name.startswith(kept)
        } == {}
        assert NAME not in machine.run("dpkg-query", "--show").stdout
        assert machine.run("systemctl", "list-units", "--all", "--plain", f"{NAME}*", "--no-legend").stdout == ""

        install(machine)
        assert state_of(machine) == ("enabled", "active")


def test_purging_it_leaves_the_operators_own_drop_ins(upgradable: Container) -> None:
    upgradable.write(f"{DROP_INS}/override.conf", "[Service]\nNice=5\n")
    upgradable.write(f"{DROP_INS}/50-strict.conf", "[Service]\n")
    upgradable.run("dpkg", "--purge", NAME)
    assert upgradable.run("ls", DROP_INS).stdout == "override.conf\n"


def test_purging_it_empties_a_state_directory_that_is_a_file_system_of_its_own(upgradable: Container) -> None:
    state = f"/var/lib/{NAME}"
    upgradable.run("systemctl", "stop", UNIT)
    upgradable.run("mount", "-t", "tmpfs", "-o", "mode=700", "state", state)
    upgradable.run("systemctl", "start", UNIT)
    assert upgradable.run("ls", state).stdout != ""
    upgradable.run("dpkg", "--purge", NAME)
    assert upgradable.run("ls", state).stdout == ""
    assert NAME not in upgradable.run("dpkg-query", "--show").stdout
    assert NAME not in upgradable.path("/etc/passwd").read_text()


def test_purging_it_takes_nothing_from_an_agent_of_pip_that_has_taken_its_place(
    upgradable: Container,
) -> None:
    upgradable.write(f"/etc/{NAME}/credentials/token", "secret\n", 0o600)
    upgradable.run("dpkg", "--remove", NAME)
    upgradable.write(f"/usr/local/bin/{NAME}", "#!/bin/sh\nsystemd-notify --ready\nexec sleep infinity\n", 0o755)
    shipped = (CHECKOUT / "systemd" / UNIT).read_text(encoding="utf-8")
    upgradable.write(f"/etc/systemd/system/{UNIT}", shipped.replace("NotifyAccess=main", "NotifyAccess=all"))
    upgradable.run("systemctl", "daemon-reload")
    upgradable.run("systemctl", "enable", "--now", UNIT)
    upgradable.run("dpkg", "--purge", NAME)
    assert state_of(upgradable) == ("enabled", "active")
    assert not upgradable.path(POLICY).exists()  # dpkg's doing, as docs/install-linux.md says
    assert upgradable.path(f"/etc/{NAME}/credentials/token").read_text() == "secret\n"
    assert upgradable.path(f"/var/lib/{NAME}/state.db").exists()
    assert upgradable.run("getent", "passwd", NAME).stdout.startswith(f"{NAME}:")


def test_a_policy_that_is_a_link_stays_one_until_it_is_purged_with_what_it_leads_to(upgradable: Container) -> None:
    upgradable.run("mv", POLICY, "/etc/linked.yaml")
    upgradable.run("ln", "-s", "/etc/linked.yaml", POLICY)
    linked = upgradable.path("/etc/linked.yaml")
    before = linked.read_text()
    install(upgradable)
    assert (state_of(upgradable), linked.read_text()) == (("enabled", "active"), before)
    upgradable.run("dpkg", "--remove", NAME)
    assert upgradable.run("readlink", POLICY).stdout == "/etc/linked.yaml\n"
    upgradable.run("dpkg", "--purge", NAME)
    assert not linked.exists()  # dpkg's doing, as docs/install-linux.md says


def test_removing_and_purging_it_do_not_mind_what_is_gone_already(upgradable: Container) -> None:
    upgradable.run("systemctl", "disable", "--now", UNIT)
    upgradable.run("userdel", NAME)
    upgradable.run("rm", "-rf", f"/etc/{NAME}", f"/var/lib/{NAME}", f"/usr/lib/{NAME}", "/usr/bin/python3.11")
    upgradable.run("dpkg", "--remove", NAME)
    upgradable.run("dpkg", "--purge", NAME)
    assert NAME not in upgradable.run("dpkg-query", "--show").stdout


@pytest.mark.parametrize("root", ["debian", "debian_13"])
def test_the_strict_account_starts_its_hooks_but_no_unit_of_its_own_making(
    root: str, deb: Path, request: pytest.FixtureRequest
) -> None:
    with Container(request.getfixturevalue(root), private_network=True) as machine:
        install(machine, deb)
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


def test_an_upgrade_does_not_end_an_agent_whose_policy_file_is_bad(upgradable: Container) -> None:
    service = Service(upgradable, "")
    policy = upgradable.path(POLICY).read_text()
    upgradable.write(POLICY, "rulez: []\n")
    before = service.pid()
    done = upgradable.run("dpkg", "--install", PACKAGE)
    assert (state_of(upgradable), service.pid()) == (("enabled", "active"), before)
    assert f'{POLICY}:1: unknown key "rulez"; did you mean "rules"?\n' in done.stderr
    assert done.stderr.endswith(
        f"{NAME}: the policy is not valid, so the version before runs on. When it is: systemctl restart {NAME}\n"
    )
    upgradable.write(POLICY, policy)
    service.systemctl("restart")
    assert service.log("agent started", version=NEWER)


def test_an_upgrade_does_not_end_an_agent_whose_bad_policy_file_a_drop_in_names(upgradable: Container) -> None:
    service = Service(upgradable, "")
    upgradable.write("/etc/other.yaml", "rules: []\n")
    service.add_drop_in("[Service]\nEnvironment=SCHEDULED_EVENTS_AGENT_CONFIG=/etc/other.yaml\n")
    service.systemctl("restart")
    upgradable.write("/etc/other.yaml", "rulez: []\n")
    before = service.pid()
    done = upgradable.run("dpkg", "--install", PACKAGE)
    assert (state_of(upgradable), service.pid()) == (("enabled", "active"), before)
    assert '/etc/other.yaml:1: unknown key "rulez"; did you mean "rules"?\n' in done.stderr


@pytest.mark.parametrize("grant", ["", "Group=adm", "SupplementaryGroups=adm"])
def test_an_upgrade_does_not_end_a_strict_agent_that_cannot_read_its_policy(
    upgradable: Container, grant: str
) -> None:
    service = Service(upgradable, "")
    make_strict(upgradable)
    service.add_drop_in(f"[Service]\n{grant}\n")
    service.systemctl("restart")
    before = service.pid()
    # Root can read it, so nothing but the account's eyes can tell.
    upgradable.run("chgrp", "adm", POLICY)
    upgradable.run("chmod", "640", POLICY)
    done = upgradable.run("dpkg", "--install", PACKAGE)
    assert state_of(upgradable) == ("enabled", "active")
    if grant:
        assert service.log("agent started", version=NEWER)
    else:
        assert service.pid() == before
        assert f"{POLICY}: cannot be read: Permission denied" in done.stderr
        assert f"{NAME}: the policy is not valid, so the version before runs on." in done.stderr


def test_an_upgrade_does_not_end_an_agent_whose_account_is_gone(upgradable: Container) -> None:
    service = Service(upgradable, "")
    before = service.pid()
    service.add_drop_in("[Service]\nUser=nobody-at-all\n")
    done = upgradable.run("dpkg", "--install", PACKAGE)
    assert (state_of(upgradable), service.pid()) == (("enabled", "active"), before)
    assert "the account of the service is not known, so the version before runs on." in done.stderr


def test_an_upgrade_restarts_a_strict_agent_with_a_hook_that_its_account_may_change(upgradable: Container) -> None:
    service = Service(upgradable, "")
    hook = f"/var/lib/{NAME}/drain"
    rules = "rules: [{name: reboots, when: {type: Reboot}, prepare: [drain], approve: when-prepared}]\n"
    nowhere = "imds: {endpoint: 'http://127.0.0.1:9'}\n"
    upgradable.write(POLICY, f"{rules}hooks: {{drain: {{run: [{hook}]}}}}\n{nowhere}agent: {{listen: off}}\n")
    make_strict(upgradable)
    upgradable.write(hook, "#!/bin/sh\n", 0o755)
    upgradable.run("chown", NAME, hook)
    refused = upgradable.run(NAME, "check", check=False)
    assert refused.returncode != 0
    assert f"{hook} can be changed by " in refused.stdout + refused.stderr  # root may not run it
    install(upgradable)
    assert service.log("agent started", version=NEWER)


def test_a_downgrade_does_not_end_an_agent_whose_state_is_too_new_for_it(
    upgradable: Container,
) -> None:
    service = Service(upgradable, "")
    service.write_state_of_a_newer_version()
    before = service.pid()
    done = upgradable.run("dpkg", "--install", PACKAGE)
    assert (state_of(upgradable), service.pid()) == (("enabled", "active"), before)
    assert f"/var/lib/{NAME}/state.db was written by a newer version of the agent (schema 99, " in done.stderr
    assert done.stderr.endswith(
        f"{NAME}: this version cannot read the state, so the version before runs on. "
        f"When it can: systemctl restart {NAME}\n"
    )


def test_removing_it_in_the_middle_of_an_upgrade_stops_it_and_leaves_no_trace(
    upgradable: Container,
) -> None:
    upgradable.run("dpkg", "--unpack", PACKAGE)
    upgradable.run("dpkg", "--remove", NAME)
    assert state_of(upgradable)[1] == "inactive"
    assert upgradable.run("find", "/run", "-maxdepth", "1", "-name", f"{NAME}.upgrading").stdout == ""
    install(upgradable)
    assert state_of(upgradable) == ("enabled", "active")


def test_policy_rc_d_keeps_it_from_starting(debian: Path, deb: Path) -> None:
    with Container(debian, private_network=True) as machine:
        machine.write("/usr/sbin/policy-rc.d", "#!/bin/sh\nexit 101\n", 0o755)
        install(machine, deb)
        assert state_of(machine) == ("enabled", "inactive")


def test_a_preset_of_the_administrators_keeps_it_from_being_enabled(debian: Path, deb: Path) -> None:
    with Container(debian, private_network=True) as machine:
        machine.write("/etc/systemd/system-preset/00-site.preset", f"disable {UNIT}\n")
        install(machine, deb)
        assert state_of(machine) == ("disabled", "inactive")


def test_installed_into_an_image_without_systemd_it_runs_from_the_first_boot(debian: Path, deb: Path) -> None:
    with Container(debian, boots=False, private_network=True) as machine:
        install(machine, deb)
        machine.start()
        assert state_of(machine) == ("enabled", "active")


def test_bytecode_follows_the_python_that_is_installed(upgradable: Container) -> None:
    def compiled() -> str:
        return upgradable.run("find", f"/usr/lib/{NAME}", "-name", "*.pyc").stdout

    assert "cpython-311" in compiled()
    upgradable.run(f"/usr/lib/{NAME}/bytecode.sh", "remove")
    assert compiled() == ""
    upgradable.run("dpkg-trigger", "--by-package=python3.11", "/usr/bin/python3.11")
    upgradable.run("dpkg", "--triggers-only", "--pending")
    assert "cpython-311" in compiled()
