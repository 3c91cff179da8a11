"""The agent as a service of a container that has a booted systemd: its policy, its log, its unit."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

if sys.platform == "win32":
    raise ImportError("containers are Linux's")

from container import CHECKOUT, PATIENCE, Container

from scheduled_events_agent.simulator import Simulator
from scheduled_events_agent.telemetry.log import JOURNAL_FIELDS

UNIT = "scheduled-events-agent.service"
POLICY = "/etc/scheduled-events-agent/policy.yaml"
DROP_INS = f"/etc/systemd/system/{UNIT}.d"
WHEELS = "/root/wheels"
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": WHEELS}
"""Variables by which pip takes from that folder what it installs, and asks no index."""
POLKIT_RULE = "/etc/polkit-1/rules.d/50-scheduled-events-agent.rules"


def build_deb(directory: Path, *options: str, sources: Path = CHECKOUT) -> Path:
    """Build the package with these options of packaging/build.py, hardly compressed; returns the file."""
    architecture = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True)
    command = [sys.executable, str(sources / "packaging/build.py"), "deb", "--output", str(directory)]
    wanted = ["--architecture", architecture.stdout.strip()]
    environment = {**os.environ, "DPKG_DEB_COMPRESSOR_LEVEL": "0"}  # a third of the time
    subprocess.run([*command, *wanted, *options], env=environment, check=True, timeout=300)
    (package,) = directory.glob("*.deb")
    return package


def build_rpm(directory: Path, *options: str, sources: Path = CHECKOUT) -> Path:
    """Build the package with these options of packaging/build.py; returns the file."""
    command = [sys.executable, str(sources / "packaging/build.py"), "rpm", "--architecture", "x86_64"]
    subprocess.run([*command, "--output", str(directory), *options], check=True, timeout=300)
    (package,) = directory.glob("*.rpm")
    return package


def shown_commands(page: str, heading: str) -> list[list[str]]:
    """The commands for root below a heading of a page, block by block."""
    text = (CHECKOUT / page).read_text(encoding="utf-8")
    section = re.split("^#", text.partition(f"\n{heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    blocks = re.findall(r"^```console\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return [[line.removeprefix("$ ").replace("sudo ", "") for line in block.splitlines()] for block in blocks]


def use_shell(machine: Container, shell: str) -> None:
    """Have this shell be the machine's /bin/sh."""
    machine.run(
        "ln", "-sfn", machine.run("sh", "-c", f"readlink -f $(command -v {shell})").stdout.strip(), "/bin/sh"
    )


def make_strict(machine: Container) -> None:
    """Give the agent the strict set-up, as the page shows it."""
    (commands,) = shown_commands("docs/systemd.md", "### strict")
    assert len(commands) == 4
    machine.run("sh", "-euc", "\n".join(commands))


def make_root(machine: Container) -> None:
    """Take the strict set-up back, as the page says it."""
    machine.run("rm", f"{DROP_INS}/50-strict.conf", POLKIT_RULE)
    (commands,) = shown_commands("docs/systemd.md", "### strict")
    machine.run("sh", "-euc", commands[-1])


class Service:
    """The unit in one container, and the endpoint that it polls."""

    def __init__(self, machine: Container, endpoint: str) -> None:
        self.machine = machine
        self.endpoint = endpoint

    # --- what an operator does

    def write_policy(self, **sections: Any) -> None:
        """Write the policy: ``sections`` over what every test needs."""
        policy: dict[str, Any] = {
            "imds": {"endpoint": self.endpoint, "poll_interval": "250ms", **sections.pop("imds", {})},
            "agent": {"listen": "127.0.0.1:0", **sections.pop("agent", {})},
            **sections,
        }
        self.machine.write(POLICY, yaml.safe_dump(policy, sort_keys=False))

    def write_state_of_a_newer_version(self) -> None:
        """Beside the agent that runs, which does not look at the version again."""
        file = "/var/lib/scheduled-events-agent/state.db"
        program = f"import sqlite3; sqlite3.connect('{file}').execute('PRAGMA user_version = 99')"
        self.machine.run("python3", "-c", program)

    def add_drop_in(self, text: str, name: str = "90-test.conf") -> None:
        self.machine.write(f"{DROP_INS}/{name}", text)
        self.machine.run("systemctl", "daemon-reload")

    def systemctl(self, verb: str, *, check: bool = True, timeout: float = PATIENCE) -> str:
        """Tell systemd to do something with the unit; returns what it printed on standard error."""
        return self.machine.run("systemctl", verb, UNIT, check=check, timeout=timeout).stderr

    def reload(self) -> None:
        """Have the agent read its policy again, and wait until the new one is in force."""
        said = "the policy file was read again"
        before = len(self.log(said))
        self.systemctl("reload")
        self.wait_log(said, count=before + 1)

    # --- what there is to see

    def show(self, name: str) -> str:
        """A property of the unit."""
        return self.machine.run("systemctl", "show", f"--property={name}", "--value", UNIT).stdout.strip()

    def pid(self) -> str:
        """The agent's process id, as the container numbers it."""
        return self.show("MainPID")

    def process_status(self, pid: str = "") -> dict[str, str]:
        """Fields of /proc about the agent, or about another process."""
        text = self.machine.run("cat", f"/proc/{pid or self.pid()}/status").stdout
        return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}

    def entries(self, *, boot: int | None = 0) -> list[dict[str, Any]]:
        """Log lines of the agent: each line's fields by their names in JSON, as texts."""
        return [_fields(entry) for entry in self.machine.journal(UNIT, boot=boot) if "LOG_MESSAGE" in entry]

    def log(self, message: str, *, boot: int | None = 0, **fields: Any) -> list[dict[str, Any]]:
        """The entries with this message and these fields."""
        wanted = {"message": message, **{name: str(value) for name, value in fields.items()}}
        return [entry for entry in self.entries(boot=boot) if wanted.items() <= entry.items()]

    def wait_log(
        self, message: str, *, count: int = 1, timeout: float = PATIENCE, **fields: Any
    ) -> dict[str, Any]:
        """Wait for the ``count``-th such entry of this boot."""
        found = self.machine.wait_for(
            lambda: found if len(found := self.log(message, **fields)) >= count else [],
            f"{count} times {message!r} with {fields} stood in the journal",
            timeout,
        )
        return found[count - 1]

    def wait_status(self, part: str, timeout: float = PATIENCE) -> str:
        """Wait until the status line of the unit has this in it."""
        return self.machine.wait_for(
            lambda: text if part in (text := self.show("StatusText")) else "", f"the status was {part!r}", timeout
        )

    def records(self, file: str = "/root/notes") -> list[str]:
        """Lines that hooks wrote."""
        path: Path = self.machine.path(file)
        return path.read_text().splitlines() if path.exists() else []


def _fields(entry: dict[str, Any]) -> dict[str, Any]:
    names = {name: key for key, name in JOURNAL_FIELDS.items()} | {"LOG_MESSAGE": "message"}
    own = {name: value for name, value in entry.items() if not name.startswith("_") and name != "MESSAGE"}
    return {names.get(name, name.lower()): value for name, value in own.items()}


def upgrade_while_a_hook_runs(
    service: Service, sim: Simulator, newer: str, *command: str, environment: Mapping[str, str] = {}
) -> None:
    """By this command; the newer version goes on where the old one was."""
    machine = service.machine
    rule = {"name": "all", "prepare": ["drain", "flush"], "recover": ["resume"], "approve": "when-prepared"}
    notes = {name: f"echo {name} >> /root/notes" for name in ("drain", "flush", "resume")}
    wait = "while ! test -e /root/go; do sleep 0.1; done; echo drained >> /root/notes"
    hooks = {name: {"shell": line} for name, line in notes.items()}
    hooks["drain"] = {"shell": f"{notes['drain']}; {wait}", "timeout": "5m"}
    service.write_policy(rules=[rule], hooks=hooks)
    service.systemctl("restart")
    event = sim.schedule("Reboot", notice_seconds=600.0, lasts_seconds=1.0)
    machine.wait_for(lambda: service.records() == ["drain"], "the hook ran")
    service.wait_status("runs hook drain")
    before = service.pid()

    done = machine.run(*command, timeout=120, environment=environment)

    waiting = "scheduled-events-agent-restart.service"
    assert (
        "scheduled-events-agent: hooks are running, so the service is restarted when they have ended; until then "
        f"the version before runs on. What becomes of that: journalctl -u {waiting}\n"
    ) in done.stderr
    assert machine.run("scheduled-events-agent", "--version").stdout == f"scheduled-events-agent {newer}\n"
    assert (service.pid(), service.records()) == (before, ["drain"])
    assert machine.run("systemctl", "is-active", waiting).stdout == "active\n"
    machine.write("/root/go", "")
    service.wait_log("agent started", version=newer, timeout=PATIENCE)
    assert service.pid() != before
    sim.wait_gone(event, timeout_seconds=PATIENCE)
    machine.wait_for(lambda: service.records()[-1] == "resume", "it recovered")
    assert service.records() == ["drain", "drained", "flush", "resume"]
    assert len(sim.approvals(event)) == 1
