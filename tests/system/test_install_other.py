"""Other ways to install the agent: pip, pipx, cloud-init, an extension of Azure, Ansible, a container image.

Each is done as its page in docs/install-other.md says, on a machine with a real systemd and without a network but
this machine's loopback, where the simulator is; the image is built and run by buildah, in a chroot.
"""

import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import yaml

if sys.platform == "win32":
    pytest.skip("systemd is Linux's", allow_module_level=True)

import apt
from container import CHECKOUT, PATIENCE, Container
from ports import free_port
from repositories import ADDRESS, NAME, Site, add_stand_ins, forget_sources, make_key, open_site, served
from service import (
    DROP_INS,
    OFFLINE,
    POLICY,
    POLKIT_RULE,
    UNIT,
    WHEELS,
    Service,
    build_deb,
    make_strict,
    shown_commands,
    upgrade_while_a_hook_runs,
)
from sources import clone

from scheduled_events_agent import __version__
from scheduled_events_agent.policy.settings import AgentSettings
from scheduled_events_agent.simulator import Simulator

pytest_plugins = ["machines", "installed"]
pytestmark = pytest.mark.timeout(600)

PACKAGING = CHECKOUT / "packaging"
NEWER = "9.8.7"
STRICT = "/usr/share/scheduled-events-agent/systemd/strict.conf"
USER = {"name": "user-initiated", "when": {"source": "User"}, "approve": "immediately"}


# Prints the folder of the wheels that are pinned for this processor.
FETCH = """
import sys
import build
(architecture,) = (name for name, machine in build.ARCHITECTURES.items() if machine == sys.argv[1])
build.CACHE.mkdir(parents=True, exist_ok=True)
print(build.fetch_wheels(architecture)[0].parent)
"""


# --- what is installed, and on what


@pytest.fixture(scope="module")
def supplied(debian: Path, wheels: Path) -> Iterator[Container]:
    """A Debian with what a user of these ways has installed before."""
    with Container(debian, boots=False) as machine:
        apt = {"DEBIAN_FRONTEND": "noninteractive"}
        machine.write("/etc/apt/apt.conf.d/retries", 'Acquire::Retries "5";\n')
        machine.run("apt-get", "update", "-q", timeout=300)
        packages = ("python3-venv", "pipx", "cloud-init", "python3-apt")
        machine.run(
            "apt-get", "install", "-qy", "--no-install-recommends", *packages, timeout=600, environment=apt
        )
        machine.copy_in(wheels, WHEELS)
        # Until its policy is there, a fresh agent goes by the package's, and would ask Azure's endpoint.
        machine.write(
            "/etc/systemd/system/service.d/loopback.conf",
            "[Service]\nIPAddressDeny=any\nIPAddressAllow=localhost\n",
        )
        yield machine


@pytest.fixture
def sim() -> Iterator[Simulator]:
    with Simulator(vms=("vm-1",), rate_limit=None) as simulator:
        yield simulator


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """The address of a repository, which is empty until something is published."""
    with open_site(tmp_path / "site", make_key(tmp_path / "private.asc")) as site:
        yield site


def publish(site: Site, *debs: Path) -> None:
    """Have these packages in the repository, with stand-ins of other kinds."""
    with tempfile.TemporaryDirectory() as folder:
        for deb in debs:
            shutil.copy(deb, folder)
        site.publish(add_stand_ins(Path(folder)))


@pytest.fixture
def service(supplied: Container, sim: Simulator) -> Iterator[Service]:
    """A booted machine without an agent, and the simulator beside it."""
    with Container(supplied) as machine:
        yield Service(machine, sim.endpoint())
        sys.stdout.write(machine.account())  # pytest shows it on failure only


# Commands that the page shows: five, the one that strict needs besides, and those that remove the agent.
PIP, FOR_STRICT, REMOVAL = shown_commands("docs/install-other.md", "## pip")
VENV = "/opt/scheduled-events-agent"
PIPX = "/opt/pipx/venvs/scheduled-events-agent"


def carry_out(machine: Container, commands: list[str], home: str = VENV) -> None:
    """Run commands of the page, each by itself, for an agent that lies there."""
    for command in commands:
        machine.run("sh", "-euc", command.replace(VENV, home), environment=OFFLINE, timeout=600)


def install_by_pipx(machine: Container) -> None:
    # Places that "pipx install --global" of newer versions uses.
    places = {"PIPX_HOME": "/opt/pipx", "PIPX_BIN_DIR": "/usr/local/bin"}
    machine.run("pipx", "install", "scheduled-events-agent", environment=OFFLINE | places, timeout=600)


def is_approved(sim: Simulator) -> bool:
    """Whether an event that a user caused is approved within a few seconds; if not, the wait raises."""
    event = sim.schedule("Reboot", source="User", lasts_seconds=0.2, start_delay_seconds=0.1)
    return sim.wait_approved(event).approved_at is not None


def command_line(service: Service) -> list[str]:
    text = service.machine.path(f"/proc/{service.pid()}/cmdline").read_text()
    return text.split("\0")[:-1]


def run(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a program of this machine; raises, with what it printed, if it fails."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, f"{' '.join(command)}\nended with {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def test_the_wheel_has_all_of_the_agent_its_configuration_and_its_unit(wheels: Path) -> None:
    (wheel,) = wheels.glob("scheduled_events_agent-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        executable = {entry.filename: entry.external_attr >> 16 & 0o111 != 0 for entry in archive.infolist()}
    share = f"{wheel.name.removesuffix('-py3-none-any.whl')}.data/data/share/scheduled-events-agent"
    package = "scheduled_events_agent"
    places = {f"agent/{package}": package, "config": share, "systemd": f"{share}/systemd"}
    sources = {
        f"{place}/{path.relative_to(CHECKOUT / folder).as_posix()}": path
        for folder, place in places.items()
        for path in (CHECKOUT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    sources[f"{share}/runbook.md"] = CHECKOUT / "docs/runbook.md"
    assert {name for name in executable if ".dist-info/" not in name} == {*sources}
    wrong = [name for name, path in sources.items() if os.access(path, os.X_OK) != executable[name]]
    assert wrong == []


# --- pip


@pytest.mark.parametrize("way", ["venv", "pipx"])
def test_an_agent_that_pip_installed_becomes_a_service_by_five_commands(
    service: Service, sim: Simulator, way: str
) -> None:
    machine, home = service.machine, VENV if way == "venv" else PIPX
    service.write_policy(rules=[USER])
    assert len(PIP) == 5
    if way == "pipx":
        install_by_pipx(machine)
    carry_out(machine, PIP if way == "venv" else PIP[2:], home)
    assert machine.run("systemd-analyze", "verify", "--man=no", UNIT).stderr == ""
    program = "/usr/local/bin/scheduled-events-agent"
    assert command_line(service)[1:] == [program, "run", "--stop-timeout", "60s"]
    assert machine.path(program).is_relative_to(machine.path(home))
    assert service.process_status()["Uid"].split() == ["0"] * 4
    assert is_approved(sim)

    pid = service.pid()
    machine.run("kill", "-KILL", pid)
    machine.wait_for(lambda: service.pid() not in (pid, "0"), "systemd had started it again")
    assert is_approved(sim)
    service.systemctl("reload")

    machine.reboot()
    assert is_approved(sim)
    told = "no other account can change the policy, the files that it names, or the agent's own code"
    assert doctor(machine, "permissions") == [("ok", told)]
    machine.run("chown", "-R", "nobody", f"{home}/lib")
    ((state, finding),) = doctor(machine, "permissions")
    assert state == "error"
    uid = machine.run("id", "-u", "nobody").stdout.strip()
    assert f" can be changed by its owner, uid {uid}, and the agent acts on what it finds there: " in finding


def test_the_commands_that_remove_an_agent_of_pip_name_what_is_prepared(service: Service, sim: Simulator) -> None:
    machine = service.machine
    rule = {"name": "all", "prepare": ["drain"], "recover": ["resume"], "approve": "manual", "lead": "1h"}
    service.write_policy(rules=[rule], hooks={name: {"shell": "true"} for name in ("drain", "resume")})
    carry_out(machine, PIP)
    event = sim.schedule("Reboot", notice_seconds=600.0)
    service.wait_log("prepared", event_id=event)
    said = machine.run("sh", "-euc", "\n".join(REMOVAL), timeout=120).stdout
    assert said == (
        f"Prepared and not recovered: Reboot {event[:8]}.\n"
        "Without the agent these recover hooks will not run: resume.\n"
    )
    left = machine.run("ls", "/opt", "/usr/local/bin", "/etc/systemd/system").stdout
    assert NAME not in left


def doctor(machine: Container, check: str) -> list[tuple[str, str]]:
    """Verdicts and findings of a check."""
    done = machine.run("/usr/local/bin/scheduled-events-agent", "doctor", "--json", check=False)
    found = [one for one in json.loads(done.stdout)["checks"] if one["check"] == check]
    return [(one["state"], one["message"]) for one in found]


def test_without_a_policy_the_agent_uses_the_default_one(supplied: Container) -> None:
    # In a network of its own: the default policy asks Azure's endpoint and serves its pages at the usual port.
    with Container(supplied, private_network=True) as machine:
        carry_out(machine, PIP)
        (started,) = Service(machine, "").log("agent started")
        assert (started["rules"], started["listen"]) == ("user-initiated, short-freeze", "127.0.0.1:9769")


def test_the_strict_set_up_of_an_agent_of_pip_has_hooks_that_run_as_root(service: Service, sim: Simulator) -> None:
    machine = service.machine
    run_as_root = "/usr/share/scheduled-events-agent/systemd/run-as-root"
    machine.write("/etc/scheduled-events-agent/hooks/drain", "#!/bin/sh\ntouch /etc/drained\n", 0o755)
    drain = {"name": "drain", "prepare": ["drain"], "approve": "when-prepared"}
    hooks = {"drain": {"run": [run_as_root, "drain"], "serialize": True}}
    service.write_policy(rules=[drain], hooks=hooks)
    carry_out(machine, PIP)
    assert len(FOR_STRICT) == 1
    carry_out(machine, FOR_STRICT)
    make_strict(machine)
    uid = machine.run("id", "-u", "scheduled-events-agent").stdout.strip()
    assert service.process_status()["Uid"].split() == [uid] * 4
    sim.wait_approved(sim.schedule("Reboot", notice_seconds=600))
    assert machine.path("/etc/drained").exists()
    assert machine.path(POLKIT_RULE).read_text() == (CHECKOUT / "systemd/polkit.rules").read_text()


# --- cloud-init, and the script that it shares with the extension


def policy_text(sim: Simulator) -> str:
    imds = {"endpoint": sim.endpoint(), "poll_interval": "250ms"}
    return yaml.safe_dump({"imds": imds, "agent": {"listen": "127.0.0.1:0"}, "rules": [USER]})


def user_data() -> dict[str, Any]:
    text = (PACKAGING / "cloud-init" / "user-data.yaml").read_text(encoding="utf-8")
    assert text.startswith("#cloud-config\n")
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def test_the_scripts_are_clean_and_the_user_data_has_them_as_they_are(supplied: Container, tmp_path: Path) -> None:
    script = PACKAGING / "cloud-init" / "install.sh"
    run([apt.need("shellcheck"), str(script)])
    files = {file["path"]: file["content"] for file in user_data()["write_files"]}
    folder = "/run/scheduled-events-agent-install"
    assert files[f"{folder}/install.sh"] == script.read_text(encoding="utf-8")
    policy = tmp_path / "policy.yaml"
    policy.write_text(files[f"{folder}/policy.yaml"], encoding="utf-8")
    checked = run([sys.executable, "-m", "scheduled_events_agent", "check", "--config", str(policy)], cwd=CHECKOUT)
    assert checked.stderr == ""
    inside = "/root/user-data.yaml"
    with Container(supplied, boots=False) as machine:
        machine.copy_in(PACKAGING / "cloud-init" / "user-data.yaml", inside)
        valid = machine.run("cloud-init", "schema", "--config-file", inside)
    assert valid.stdout == f"Valid cloud-config: {inside}\n"


def start_with_cloud_init(machine: Container, source: str, proof: str, policy: str) -> str:
    """Boot a machine for the first time with the user data, this source and this policy; what cloud-init says."""
    data = user_data()
    data["write_files"][0]["content"] = policy
    arguments = data["runcmd"][0]
    assert arguments[2:4] == [ADDRESS, "-"]
    arguments[2:4] = [source, proof]
    seed = "/var/lib/cloud/seed/nocloud"
    machine.write(f"{seed}/user-data", "#cloud-config\n" + yaml.safe_dump(data))
    machine.write(f"{seed}/meta-data", "instance-id: vm-1\n")
    # This minimal system has no locales, which cloud-init would count as an error.
    machine.write("/etc/cloud/cloud.cfg.d/90-test.cfg", "locale: false\napt: {preserve_sources_list: true}\n")
    machine.start()
    said = machine.run("cloud-init", "status", "--wait", "--long", timeout=120, check=False).stdout
    sys.stdout.write(machine.path("/var/log/cloud-init-output.log").read_text())  # pytest shows it on failure only
    return said


def test_cloud_init_installs_the_package_with_its_policy_at_the_first_boot(
    supplied: Container, sim: Simulator, deb: Path
) -> None:
    with Container(supplied, boots=False) as machine:
        machine.copy_in(deb, "/root/agent.deb")
        proof = run(["sha256sum", str(deb)]).stdout.split()[0]
        assert "status: done" in start_with_cloud_init(machine, "file:///root/agent.deb", proof, policy_text(sim))
        service = Service(machine, sim.endpoint())
        assert machine.path(POLICY).read_text() == policy_text(sim)
        for place in (POLICY, "/run/scheduled-events-agent-install/policy.yaml"):
            assert stat_of(machine, place) == "600 root root"
        assert service.show("UnitFileState") == "enabled"
        assert is_approved(sim)
        machine.reboot()  # the same instance: nothing is installed again
        assert is_approved(sim)


def test_cloud_init_installs_it_from_the_repository(
    supplied: Container, sim: Simulator, deb: Path, site: Site
) -> None:
    publish(site, deb)
    with Container(supplied, boots=False) as machine:
        forget_sources(machine)
        assert "status: done" in start_with_cloud_init(machine, site.address, "-", policy_text(sim))
        listed = machine.path(f"/etc/apt/sources.list.d/{NAME}.sources").read_text()
        assert listed == (site.root / f"{NAME}.sources").read_text()
        assert is_approved(sim)


def test_cloud_init_reports_an_invalid_policy_and_the_agent_continues(supplied: Container, deb: Path) -> None:
    # In a network of its own: the default policy asks Azure's endpoint and serves its pages at the usual port.
    with Container(supplied, boots=False, private_network=True) as machine:
        machine.copy_in(deb, "/root/agent.deb")
        assert "status: error" in start_with_cloud_init(machine, "file:///root/agent.deb", "-", "rulez: []\n")
        assert machine.run("dpkg", "--verify", "scheduled-events-agent").stdout == ""  # nor its policy was changed
        service = Service(machine, "")
        assert service.show("ActiveState") == "active"
        (started,) = service.log("agent started")
        assert (started["rules"], started["listen"]) == ("user-initiated, short-freeze", "127.0.0.1:9769")


def test_the_extension_command_installs_its_downloads(service: Service, sim: Simulator, deb: Path) -> None:
    settings = json.loads((PACKAGING / "cloud-init" / "extension-settings.json").read_text(encoding="utf-8"))
    machine, folder = service.machine, "/var/lib/waagent/custom-script/download/0"
    names = [address.rpartition("/")[2] for address in settings["fileUris"]]
    assert [name.partition("_")[0] for name in names] == ["install.sh", "policy.yaml", "scheduled-events-agent"]
    machine.copy_in(PACKAGING / "cloud-init" / "install.sh", f"{folder}/{names[0]}")
    machine.write(f"{folder}/{names[1]}", policy_text(sim))
    machine.copy_in(deb, f"{folder}/{names[2]}")
    for _ in range(2):
        machine.run("sh", "-c", f"cd {folder} && {settings['commandToExecute']}", timeout=120)
        assert is_approved(sim)
    before = machine.path(POLICY).read_text()

    machine.write(f"{folder}/bad.yaml", "rulez: []\n")
    bad = machine.run("sh", f"{folder}/install.sh", f"{folder}/{names[2]}", "-", f"{folder}/bad.yaml", check=False)
    assert bad.returncode == 2
    assert bad.stdout.endswith('bad.yaml:1: unknown key "rulez"; did you mean "rules"?\nnot valid: 1 error\n')
    assert machine.path(POLICY).read_text() == before

    pid = service.pid()
    machine.write(POLICY, "rulez: []\n")  # of the machine's own: it would not come up with that
    bad = machine.run("sh", f"{folder}/install.sh", f"{folder}/{names[2]}", check=False)
    assert (bad.returncode, service.pid()) == (2, pid)
    machine.write(POLICY, before)

    wrong = machine.run("sh", f"{folder}/install.sh", f"file://{folder}/{names[2]}", "0" * 64, check=False)
    assert wrong.returncode == 1
    assert wrong.stderr.endswith(f"file://{folder}/{names[2]}: its SHA-256 is not {'0' * 64}\n")
    assert is_approved(sim)


def test_the_script_installs_a_wheel_too(service: Service, sim: Simulator, wheels: Path) -> None:
    machine = service.machine
    (wheel,) = wheels.glob("scheduled_events_agent-*.whl")
    machine.copy_in(PACKAGING / "cloud-init" / "install.sh", "/root/install.sh")
    machine.write("/root/policy.yaml", policy_text(sim))
    for _ in range(2):
        command = ("sh", "/root/install.sh", f"file://{WHEELS}/{wheel.name}", "-", "/root/policy.yaml")
        machine.run(*command, environment=OFFLINE, timeout=120)
        assert command_line(service)[1] == "/usr/local/bin/scheduled-events-agent"
        assert machine.path("/usr/share/scheduled-events-agent/systemd/run-hook").exists()
        assert is_approved(sim)


@dataclass(frozen=True)
class Script:
    """install.sh on a machine, run by one of the shells that systems have as sh, with a package of one kind."""

    service: Service
    shell: tuple[str, ...]
    package: str
    newer: str

    def __call__(self, policy: str = "", *, package: str = "") -> str:
        """Run it with this policy's text; returns what is said on standard error."""
        machine = self.service.machine
        words = [*self.shell, "/root/install.sh", package or self.package]
        if policy:
            machine.write("/root/policy.yaml", policy)
            words += ["-", "/root/policy.yaml"]
        return machine.run(*words, environment=OFFLINE, timeout=120).stderr

    def reads(self) -> int:
        """How often the agent has read its policy again."""
        return len(self.service.log("the policy file was read again"))


@pytest.fixture(params=["deb-dash", "whl-bash"])
def script(request: pytest.FixtureRequest, service: Service, deb: Path, wheels: Path, tmp_path: Path) -> Script:
    """The script with what it installs; a newer version lies beside it."""
    kind, shell = request.param.split("-")
    machine = service.machine
    machine.copy_in(PACKAGING / "cloud-init" / "install.sh", "/root/install.sh")
    if kind == "deb":
        packages = [deb, build_deb(tmp_path, "--version", NEWER)]
    else:
        packages = [*wheels.glob("scheduled_events_agent-*.whl"), build_wheel(tmp_path, NEWER)]
    for package in packages:
        machine.copy_in(package, f"/root/{package.name}")
    return Script(
        service, (shell,) if shell == "dash" else (shell, "--posix"), *[f"/root/{one.name}" for one in packages]
    )


def build_wheel(folder: Path, version: str) -> Path:
    """The wheel of these sources under another version."""
    sources = clone(folder / "sources")
    module = sources / "agent/scheduled_events_agent/__init__.py"
    module.write_text(module.read_text().replace(f'"{__version__}"', f'"{version}"'))
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={folder}", str(sources)])
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_script_run_again_does_no_more_than_has_changed(script: Script, sim: Simulator) -> None:
    service, machine = script.service, script.service.machine
    policy = policy_text(sim)
    script(policy)
    assert stat_of(machine, POLICY) == "600 root root"
    assert is_approved(sim)

    pid, reads, written = service.pid(), script.reads(), machine.path(POLICY).stat()
    script(policy)
    assert (service.pid(), script.reads()) == (pid, reads)
    same = machine.path(POLICY).stat()
    assert (same.st_ino, same.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)

    changed = yaml.safe_load(policy) | {"agent": {"listen": "off"}}
    said = script(yaml.safe_dump(changed))
    assert (service.pid(), script.reads()) == (pid, reads + 1)
    assert said.endswith("install.sh: of the policy these keys take effect at the next restart: agent.listen\n")
    changed["agent"] = yaml.safe_load(policy)["agent"] | {"state_dir": "/var/lib/scheduled-events-agent/elsewhere"}
    said = script(yaml.safe_dump(changed))
    assert service.pid() == pid
    assert said.endswith("at the next restart: agent.state_dir\n")
    assert "restart" not in script(policy)
    assert (service.pid(), script.reads()) == (pid, reads + 3)
    assert is_approved(sim)


def test_the_script_restarts_the_agent_for_another_version_when_no_hook_runs(
    script: Script, sim: Simulator
) -> None:
    script(policy_text(sim))
    command = (*script.shell, "/root/install.sh", script.newer)
    upgrade_while_a_hook_runs(script.service, sim, NEWER, *command, environment=OFFLINE)
    pid = script.service.pid()
    script(package=script.newer)
    assert script.service.pid() == pid


def test_the_script_keeps_mode_and_owner_of_an_administrator(script: Script, sim: Simulator) -> None:
    service, machine = script.service, script.service.machine
    rules = [USER | {"name": f"rule-{number}"} for number in range(5)]
    texts = [yaml.safe_dump(yaml.safe_load(policy_text(sim)) | {"rules": [rule]}) for rule in rules]
    # One that was there before the agent.
    machine.write(POLICY, texts[0], 0o640)
    machine.run("chgrp", "adm", POLICY)
    script(texts[1])
    assert (machine.path(POLICY).read_text(), stat_of(machine, POLICY)) == (texts[1], "640 root adm")
    machine.run("chown", "root:root", POLICY)
    machine.run("chmod", "644", POLICY)
    script(texts[2])
    assert (machine.path(POLICY).read_text(), stat_of(machine, POLICY)) == (texts[2], "644 root root")

    # Of the package; and with the strict set-up, back and forth.
    machine.run("cp", "/usr/share/scheduled-events-agent/policy.yaml", POLICY)
    script(texts[3])
    assert stat_of(machine, POLICY) == "600 root root"
    machine.run("install", "-D", "-m", "644", STRICT, f"{DROP_INS}/50-strict.conf")
    machine.run("systemd-sysusers", STRICT.replace("strict", "sysusers"))
    machine.run("systemctl", "daemon-reload")
    script(texts[4])
    assert stat_of(machine, POLICY) == "640 root scheduled-events-agent"
    assert service.process_status()["Uid"].split()[0] != "0"
    script(texts[0])
    assert stat_of(machine, POLICY) == "640 root scheduled-events-agent"
    assert is_approved(sim)
    machine.run("rm", f"{DROP_INS}/50-strict.conf")
    machine.run("systemctl", "daemon-reload")
    script(texts[1])
    assert stat_of(machine, POLICY) == "600 root root"
    assert service.process_status()["Uid"].split()[0] == "0"


def test_the_script_leaves_a_policy_that_is_a_link_one(script: Script, sim: Simulator) -> None:
    machine = script.service.machine
    script(policy_text(sim))
    machine.run("mv", POLICY, "/etc/linked.yaml")
    machine.run("ln", "-s", "/etc/linked.yaml", POLICY)
    changed = yaml.safe_dump(yaml.safe_load(policy_text(sim)) | {"rules": [USER | {"name": "linked"}]})
    script(changed)
    assert machine.run("readlink", POLICY).stdout == "/etc/linked.yaml\n"
    assert (machine.path("/etc/linked.yaml").read_text(), stat_of(machine, "/etc/linked.yaml")) == (
        changed,
        "600 root root",
    )
    assert is_approved(sim)


# --- Ansible


@pytest.fixture(scope="module")
def managed(supplied: Container) -> Iterator[Container]:
    """A machine with Ansible, the role and a place for what it is to install."""
    with Container(supplied, boots=False) as machine:
        machine.run("python3", "-m", "venv", "/opt/ansible")
        machine.run("/opt/ansible/bin/pip", "install", "ansible-core", environment=OFFLINE, timeout=300)
        machine.copy_in(PACKAGING / "ansible", "/root/ansible")
        yield machine


def play(service: Service, says: str = "", **variables: Any) -> dict[str, int]:
    """Run the example's role with these variables; returns how many tasks were ok, changed and so on.

    ``says``: what its output has in it.
    """
    named = {f"scheduled_events_agent_{name}": value for name, value in variables.items()}
    book = [
        {
            "hosts": "localhost",
            "connection": "local",
            "gather_subset": ["min"],
            "roles": [{"role": "scheduled_events_agent", "vars": named}],
        }
    ]
    service.machine.write("/root/ansible/test.yml", yaml.safe_dump(book))
    done = service.machine.run(
        "/opt/ansible/bin/ansible-playbook", "-i", "localhost,", "/root/ansible/test.yml",
        environment={
            "ANSIBLE_NOCOLOR": "1", "ANSIBLE_PIPELINING": "1", "ANSIBLE_PYTHON_INTERPRETER": "/usr/bin/python3",
        },
        check=False, timeout=600,
    )  # fmt: skip
    sys.stdout.write(done.stdout + done.stderr)  # pytest shows it on failure only
    assert says in done.stdout
    recap = done.stdout.rpartition("PLAY RECAP")[2].partition(" : ")[2]
    counts = {name: int(count) for name, _, count in (word.partition("=") for word in recap.split())}
    assert (done.returncode == 0) == (counts["failed"] == 0)
    return counts


def stat_of(machine: Container, path: str) -> str:
    """Mode, owner and group of a file."""
    return machine.run("stat", "-c", "%a %U %G", path).stdout.strip()


def test_the_ansible_role_installs_everything_once_and_ends_no_agent(
    managed: Container, sim: Simulator, deb: Path, tmp_path: Path
) -> None:
    newer = build_deb(tmp_path, "--version", "9.8.7")
    with Container(managed) as machine:
        service = Service(machine, sim.endpoint())
        machine.copy_in(deb, f"/root/{deb.name}")
        machine.write("/root/hooks/drain", "#!/bin/sh\ntouch /etc/drained\n")
        drain = {"name": "drain", "prepare": ["drain"], "approve": "when-prepared"}
        hooks = {"drain": {"run": ["/etc/scheduled-events-agent/hooks/drain"]}}
        settings = yaml.safe_load(policy_text(sim))
        policy = yaml.safe_dump({**settings, "rules": [drain], "hooks": hooks})
        variables: dict[str, Any] = {"package": f"/root/{deb.name}", "policy": policy, "hooks": "/root/hooks"}

        assert play(service, **variables)["changed"] > 0
        assert machine.path(POLICY).read_text() == policy
        assert stat_of(machine, POLICY) == "600 root root"
        sim.wait_approved(sim.schedule("Reboot", notice_seconds=600))
        assert machine.path("/etc/drained").exists()
        pid = service.pid()
        again = play(service, **variables)
        assert (again["changed"], again["failed"]) == (0, 0)

        # Another policy is taken over by a reload; a bad one not at all.
        taken_over = len(service.log("the policy file was read again"))
        changed = play(service, **{**variables, "policy": policy_text(sim)})
        assert (changed["changed"], changed["failed"]) == (2, 0)
        assert service.pid() == pid
        service.wait_log("the policy file was read again", count=taken_over + 1)
        # A mode and an owner of an administrator's stay.
        machine.run("chgrp", "adm", POLICY)
        machine.run("chmod", "640", POLICY)
        other = yaml.safe_dump(yaml.safe_load(policy_text(sim)) | {"agent": {"listen": "off"}})
        late = "These keys of the policy take effect at the next restart: agent.listen"
        assert play(service, late, **{**variables, "policy": other})["changed"] == 2
        assert (machine.path(POLICY).read_text(), stat_of(machine, POLICY)) == (other, "640 root adm")
        assert play(service, **{**variables, "policy": policy_text(sim)})["changed"] == 2
        machine.run("chown", "root:root", POLICY)
        machine.run("chmod", "600", POLICY)
        bad = play(service, **{**variables, "policy": "rulez: []\n"})
        assert (bad["changed"], bad["failed"]) == (0, 1)
        assert machine.path(POLICY).read_text() == policy_text(sim)
        assert service.pid() == pid

        strict = play(service, **{**variables, "policy": policy_text(sim), "strict": True})
        assert (strict["changed"] > 0, strict["failed"]) == (True, 0)
        uid = machine.run("id", "-u", "scheduled-events-agent").stdout.strip()
        assert service.process_status()["Uid"].split() == [uid] * 4
        assert stat_of(machine, POLICY) == "640 root scheduled-events-agent"
        assert is_approved(sim)
        assert machine.path(POLKIT_RULE).exists()
        assert play(service, **{**variables, "policy": policy_text(sim), "strict": True})["changed"] == 0
        root = play(service, **{**variables, "policy": policy_text(sim)})
        assert (root["changed"] > 0, root["failed"]) == (True, 0)
        assert stat_of(machine, POLICY) == "600 root root"
        assert service.process_status()["Uid"].split() == ["0"] * 4
        assert not machine.path(POLKIT_RULE).exists()
        assert play(service, **{**variables, "policy": policy_text(sim), "strict": True})["failed"] == 0

        # Nor does a newer package end it, if the policy file has become a bad one meanwhile.
        machine.copy_in(newer, f"/root/{newer.name}")
        pid = service.pid()
        machine.write(POLICY, "rulez: []\n")
        assert play(service, package=f"/root/{newer.name}", strict=True)["failed"] == 1
        assert service.pid() == pid
        assert is_approved(sim)


def test_the_ansible_role_installs_a_version_from_the_repository(
    managed: Container, sim: Simulator, deb: Path, site: Site, tmp_path: Path
) -> None:
    (book,) = yaml.safe_load((PACKAGING / "ansible" / "playbook.yml").read_text(encoding="utf-8"))
    assert book["roles"][0]["vars"]["scheduled_events_agent_repository"] == ADDRESS
    newer = build_deb(tmp_path, "--version", "9.8.7")
    publish(site, deb)
    with Container(managed) as machine:
        forget_sources(machine)
        machine.copy_in(site.root / f"{NAME}.asc", "/root/key.asc")
        service = Service(machine, sim.endpoint())
        variables = {"repository": site.address, "policy": policy_text(sim)}
        assert play(service, **variables)["failed"] == 1  # without a key
        variables["repository_key"] = "/root/key.asc"
        assert play(service, **variables)["failed"] == 0
        listed = machine.path(f"/etc/apt/sources.list.d/{NAME}.sources").read_text()
        assert listed == (site.root / f"{NAME}.sources").read_text()
        assert is_approved(sim)

        publish(site, deb, newer)
        again = play(service, **variables)
        assert (again["changed"], again["failed"]) == (0, 0)
        for version in ("9.8.7", __version__):
            changed = play(service, **variables, version=version)
            assert (changed["changed"] > 0, changed["failed"]) == (True, 0)
            assert machine.run(NAME, "--version").stdout == f"{NAME} {version}\n"
        assert is_approved(sim)


def test_the_ansible_role_downloads_a_package_from_an_address_with_a_token(
    managed: Container, sim: Simulator, deb: Path
) -> None:
    with Container(managed) as machine, served(deb.parent) as address:
        service = Service(machine, sim.endpoint())
        variables = {"package": f"{address}/{deb.name}?sv=2024&sig=secret", "policy": policy_text(sim)}
        assert play(service, **variables)["changed"] > 0
        assert is_approved(sim)
        again = play(service, **variables)
        assert (again["changed"], again["failed"]) == (0, 0)
        other = play(service, **{**variables, "package": f"{address}/agent.tar.gz"})
        assert (other["changed"], other["failed"]) == (0, 1)


def test_the_ansible_role_is_without_a_complaint_of_its_linter() -> None:
    tools = CHECKOUT / ".cache" / "ansible-lint"
    if not (tools / "ready").exists():
        run([sys.executable, "-m", "venv", "--clear", str(tools)])
        run([str(tools / "bin" / "pip"), "install", "--quiet", "ansible-lint"])
        (tools / "ready").touch()
    paths = f"{tools}/bin:{os.environ['PATH']}"
    command = [str(tools / "bin" / "ansible-lint"), "--offline", "--strict", "--nocolor", "playbook.yml", "roles"]
    done = run(command, cwd=PACKAGING / "ansible", env={**os.environ, "PATH": paths})
    assert "Passed: 0 failure(s), 0 warning(s)" in done.stderr + done.stdout


# --- the image


class Images:
    """buildah, with a store of its own and nothing but chroot to isolate with: no daemon, no namespaces."""

    def __init__(self, store: Path) -> None:
        self._options = ["--root", str(store / "root"), "--runroot", str(store / "run"), "--storage-driver", "vfs"]

    def command(self, what: str, *words: str) -> list[str]:
        return ["buildah", *self._options, what, *words]

    def __call__(self, what: str, *words: str) -> str:
        return run(self.command(what, *words), cwd=CHECKOUT, timeout=500).stdout.strip()


@pytest.fixture(scope="module")
def images(supplied: Container, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    """The image, built by "make image" on a Debian instead of its base, with wheels instead of an index."""
    apt.need("buildah")
    folder = tmp_path_factory.mktemp("images")
    sources = clone(folder / "sources")
    wheels = run([sys.executable, "-c", FETCH, platform.machine()], cwd=sources / "packaging").stdout.strip()
    images = Images(folder)
    base = images("from", "scratch")
    with Container(supplied, boots=False) as machine:
        images("add", "--quiet", base, str(machine.path("/")), "/")
    images("commit", "--quiet", "--rm", base, "localhost/base")
    build = images.command(
        "bud", "--isolation=chroot", f"--volume={wheels}:/wheels:ro",
        "--build-arg=PIP_OPTIONS=--no-index --find-links /wheels",
    )  # fmt: skip
    podman = folder / "bin" / "podman"
    podman.parent.mkdir()
    podman.write_text(f'#!/bin/sh\n[ "$1" = build ] || exit 2\nshift\nexec {shlex.join(build)} "$@"\n')
    podman.chmod(0o755)
    environment = {**os.environ, "PATH": f"{podman.parent}:{os.environ['PATH']}", "BASE": "localhost/base"}
    run([sys.executable, "packaging/release.py", "image"], cwd=sources, env=environment, timeout=500)
    yield images
    shutil.rmtree(folder)


def test_the_image_runs_unprivileged_approves_is_healthy_and_stops_on_request(
    images: Images, sim: Simulator, tmp_path: Path
) -> None:
    config = json.loads(images("inspect", "--type=image", "scheduled-events-agent"))["Docker"]["config"]
    assert config["User"] == "65532:65532"
    source = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    labels = {name.removeprefix("org.opencontainers.image."): value for name, value in config["Labels"].items()}
    filled_in = None if (urlsplit(source).hostname or "").endswith(".invalid") else source
    assert (labels["version"], labels.get("source")) == (__version__, filled_in)
    assert list(config["Volumes"]) == ["/var/lib/scheduled-events-agent"]
    etc = tmp_path / "etc"
    etc.mkdir()
    port = free_port()
    settings = yaml.safe_load(policy_text(sim)) | {"agent": {"listen": f"127.0.0.1:{port}"}}
    (etc / "policy.yaml").write_text(yaml.safe_dump(settings))
    machine = images("from", "scheduled-events-agent")
    volume = f"--volume={etc}:/etc/scheduled-events-agent:ro"
    inside = images.command("run", "--isolation=chroot", volume, machine, "--")
    with subprocess.Popen(
        [*inside, *config["Entrypoint"], *config["Cmd"]],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            assert is_approved(sim)
            command = ["/opt/scheduled-events-agent/bin/python3", *config["Entrypoint"], *config["Cmd"]]
            (agent,) = [process for process in children(running.pid) if command_of(process) == command]
            assert set(agent.uids()) == {65532}
            state = Path(f"/proc/{agent.pid}/root/var/lib/scheduled-events-agent/state.db").stat()
            assert (state.st_uid, state.st_mode & 0o777) == (65532, 0o600)
            kind, *health = config["Healthcheck"]["Test"]
            assert kind == "CMD"
            assert AgentSettings().listen == "127.0.0.1:9769"
            assert "('127.0.0.1', 9769," in health[-1]
            health[-1] = health[-1].replace("9769", str(port))
            assert subprocess.run([*inside, *health], check=False).returncode == 0
            agent.send_signal(signal.SIGTERM)
            assert running.wait(PATIENCE) == 0
            assert subprocess.run([*inside, *health], check=False, stderr=subprocess.DEVNULL).returncode == 1
        finally:
            if running.poll() is None:
                for process in children(running.pid):
                    with suppress(psutil.Error):  # it may be ending just now
                        process.kill()
            _, errors = running.communicate()
            sys.stdout.write(errors)  # pytest shows it on failure only


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def command_of(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):  # it may be ending just now
        return process.cmdline()
    return []


def test_the_image_starts_with_the_default_policy_and_a_state_of_its_own(images: Images) -> None:
    machine = images("from", "scheduled-events-agent")
    inside = images.command("run", "--isolation=chroot", machine, "--")
    checked = run([*inside, "scheduled-events-agent", "check"]).stdout
    assert checked.startswith("/etc/scheduled-events-agent/policy.yaml")
    asked = run([*inside, "stat", "--format=%u:%g %a", "/var/lib/scheduled-events-agent"]).stdout
    assert asked == "65532:65532 700\n"


def test_the_examples_for_the_image_give_hooks_the_time_that_it_gives_them(images: Images) -> None:
    config = json.loads(images("inspect", "--type=image", "scheduled-events-agent"))["Docker"]["config"]
    assert config["Cmd"] == ["run", "--stop-timeout", "60s"]
    folder = PACKAGING / "container"
    compose = yaml.safe_load((folder / "compose.yaml").read_text())["services"]["scheduled-events-agent"]
    quadlet = (folder / "scheduled-events-agent.container").read_text().splitlines()
    assert compose["stop_grace_period"] == "75s"
    assert "PodmanArgs=--stop-timeout=75" in quadlet
    assert compose["network_mode"] == "host"
    assert "Network=host" in quadlet
    state = "/var/lib/scheduled-events-agent"
    assert [place for place in compose["volumes"] if state in place] == [f"state:{state}"]
    assert f"Volume=scheduled-events-agent:{state}" in quadlet
    assert compose["image"] == "scheduled-events-agent"
