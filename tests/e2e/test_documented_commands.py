"""Every command line that the documentation shows: run here as it stands, or named with where it is run.

What is ours runs for real, beside an agent that works on an event, with an id, a file or a port of this machine in
the place of the one that is written. Everything else must be in ``ELSEWHERE``, or with the reason in ``NOT_RUN``.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from harness import CHECKOUT, PATIENCE, Agent, Simulator

PAGES = sorted(
    path
    for place in ("", "docs/**/", "config/**/", "packaging/", "systemd/", "tests/", "winservice/")
    for path in CHECKOUT.glob(f"{place}*.md")
    if path.stem != "tutorial"  # tests/system/test_tutorial.py runs all of it
)
OURS = "scheduled-events-agent "
CURL = "curl "  # of the simulator
INSTALL = "install -m "

# A command line that begins so -> the file in which the same is run, and a text that stands there for it.
ELSEWHERE = {
    "make demo": (".ci/run", "make demo"),
    "make test": (".ci/run", "make test"),
    "make packages": ("tests/system/test_packages.py", 'build("deb"'),
    "make image": ("tests/system/test_install_other.py", '"packaging/release.py", "image"'),
    "make release": ("tests/system/test_release_files.py", 'release(sources, "build"'),
    "python3 packaging/release.py version": ("tests/system/test_release_files.py", 'release(tidy, "version"'),
    "sha256sum -c": ("tests/system/test_release_files.py", '"sha256sum", "--check"'),
    "git add --all": ("tests/system/sources.py", '"add", "--all"'),
    "make repository": ("tests/system/test_repository.py", '"--dry-run", "--old-file=.venv/.ready"'),
    "gpg --batch --passphrase": ("tests/system/repositories.py", '"--quick-generate-key"'),
    "gpg --armor --export-secret-keys": ("tests/system/repositories.py", '"--export-secret-keys"'),
    **dict.fromkeys(
        ("curl -fsSLo /etc/", "apt update", "apt install scheduled-events-agent"),
        ("tests/system/test_repository.py", "carry_out(machine, FOR_APT"),
    ),
    **dict.fromkeys(
        ("rpm --import", "dnf makecache", "zypper addrepo", "zypper refresh"),
        ("tests/system/test_repository.py", "carry_out(machine, family.install"),
    ),
    "apt install ./": ("tests/system/installed.py", '"dpkg", "--install"'),
    "dnf install": ("tests/system/package_managers.py", '"dnf", "install"'),
    "zypper install": ("tests/system/package_managers.py", '"zypper", "--non-interactive", "install"'),
    "apt install --allow-downgrades": ("tests/system/test_package_life.py", 'go_back(machine, "apt"'),
    "dnf downgrade": ("tests/system/test_package_life.py", "go_back(machine, distribution.manager"),
    "zypper install --oldpackage": ("tests/system/test_package_life.py", "go_back(machine, distribution.manager"),
    "sha256sum ": ("tests/system/test_prometheus.py", "(sha256sum .+)"),
    "systemctl reload scheduled-events-agent": ("tests/system/service.py", 'systemctl("reload")'),
    f"{OURS}completion bash": ("tests/system/test_completion.py", "complete_in_bash"),
    f"{OURS}completion powershell": ("tests/system/test_completion.py", "test_the_script_for_powershell"),
    f"{OURS}service ": ("tests/system/test_windows_service.py", '"service"'),
    "/usr/local/bin/python3.11 -m venv": ("tests/system/test_older_systemd.py", "shown_commands(PAGE"),
    "python3 -m venv /opt/scheduled-events-agent": (
        "tests/system/test_install_other.py",
        "carry_out(machine, PIP",
    ),
    "ln -s /opt/scheduled-events-agent/": ("tests/system/test_install_other.py", "carry_out(machine, FOR_STRICT)"),
    "cp /opt/scheduled-events-agent/": ("tests/system/test_install_other.py", "carry_out(machine, PIP"),
    "systemctl enable --now scheduled-events-agent": (
        "tests/system/test_install_other.py",
        "carry_out(machine, PIP",
    ),
    **dict.fromkeys(
        (
            "systemctl disable --now scheduled-events-agent",
            "timeout 5 scheduled-events-agent status --prepared",
            "rm -r /opt/scheduled-events-agent ",
            "rm /etc/systemd/system/scheduled-events-agent",
        ),
        ("tests/system/test_install_other.py", "REMOVAL"),
    ),
    "systemd-sysusers ": ("tests/system/service.py", "def make_strict"),
    "install -D -m 644 /usr/share/scheduled-events-agent/systemd/": ("tests/system/service.py", "def make_strict"),
    "systemctl daemon-reload": ("tests/system/service.py", "def make_strict"),
    ".venv/bin/python tests/fixtures/interface.py": (
        "tests/unit/test_compatibility.py",
        "interface.newest_record()",
    ),
    **dict.fromkeys(
        (
            "mkdir -p plans",
            "for scenario in ",
            f"{OURS}explain --config policy.yaml --at ",
            "done",
            "git add --intent-to-add plans",
            "git diff --exit-code HEAD -- plans",
        ),
        ("tests/integration/test_cli_policy.py", "def test_the_pipeline_of_the_reference"),
    ),
    ".venv/bin/python tests/simulation": ("Makefile", "$(BIN)/python tests/simulation"),
    ".venv/bin/python -m benchmarks": ("tests/integration/test_benchmarks.py", "benchmarks"),
    "sed -i ": ("tests/unit/test_runbook.py", 're.findall(r"^\\$ (sed .+)$"'),
    "promtool ": ("tests/system/test_prometheus.py", "promtool"),
    "journalctl ": ("tests/system/test_systemd_service.py", '"journalctl", "--quiet"'),
    f"{OURS}check redis.yaml": ("tests/system/test_package_life.py", 'shown_commands("docs/cookbook/README.md"'),
    "cd ": ("tests/system/test_package_life.py", 'shown_commands("docs/cookbook/README.md"'),
    "install -m 0755 common.sh": ("tests/system/test_package_life.py", 'shown_commands("docs/cookbook/README.md"'),
    "cp --no-clobber": ("tests/system/test_package_life.py", 'shown_commands("docs/cookbook/README.md"'),
    "cp --attributes-only": ("tests/system/test_package_life.py", 'shown_commands("docs/cookbook/README.md"'),
    "mv --backup": ("tests/system/test_package_life.py", 'shown_commands("docs/cookbook/README.md"'),
    "env PGDATA=": ("tests/system/database_environment.py", "POSTGRESQL_BIN"),
}
# Command -> why no test runs it.
NOT_RUN = {
    "ln -s /etc/kubernetes/kubelet.conf ": "there is no kubelet here whose kubeconfig it could be",
    "az ": "needs an Azure subscription; the real command line read each of them once, see docs/azure.md",
    "tdnf install": "Azure Linux cannot be had here, see docs/compatibility.md",
    "SUSEConnect ": "needs a SLES and its subscription",
    "gh ": "needs a published release, see docs/verify.md",
    "cosign ": "needs a published release, see docs/verify.md",
    "git push ": "publishes",
    "podman ": "there is no container engine; tests/system/test_install_other.py carries the recipe out",
    "SIGN_COMMAND=": "needs a certificate",
    "sudoedit ": "is for people",
    "journalctl ": "needs systemd's journal; the fields that it is asked for have tests of their own",
    "iptables ": "needs root, and a kernel that filters",
}


class Shown(NamedTuple):
    """A command line on a page."""

    page: str
    line: str


def shown() -> Iterator[Shown]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for line in re.findall(r"^\|.*", text, re.MULTILINE):
            for command in re.findall(r"`sudo ([^`]+)`", line):
                yield Shown(page.relative_to(CHECKOUT).as_posix(), command)
        for language, body in re.findall(r"^[ ]*```(\w*)\n(.*?)^[ ]*```", text, re.MULTILINE | re.DOTALL):
            for line in map(str.strip, re.sub(r"\\\n\s*", "", body).splitlines()):
                is_console = language in ("console", "") and line.startswith("$ ")
                is_ours = line.startswith(OURS) and language != "text"
                is_shell = language in ("sh", "bash") and not body.startswith("#!") and bool(line)
                if is_console or is_ours or (is_shell and not line.startswith("#")):
                    command = re.sub(r"\s+(# |\| ).*", "", line.removeprefix("$ ").replace("sudo ", ""))
                    yield Shown(page.relative_to(CHECKOUT).as_posix(), command.strip())


SHOWN = sorted(set(shown()))


def is_run_here(command: Shown) -> bool:
    return command.line.startswith((OURS, CURL, INSTALL)) and not command.line.startswith((*ELSEWHERE, *NOT_RUN))


# Each once, though several pages may show it.
RUN_HERE = {
    command.line: command for command in SHOWN if is_run_here(command) and command.line.startswith(OURS)
}.values()


def test_every_documented_command_is_run_by_a_test_or_excused() -> None:
    known = (*ELSEWHERE, *NOT_RUN)
    assert [one for one in SHOWN if not is_run_here(one) and not one.line.startswith(known)] == []
    for start in known:
        assert any(command.line.startswith(start) for command in SHOWN), f"no page shows {start!r} any more"


@pytest.mark.parametrize("start", ELSEWHERE)
def test_commands_listed_as_run_elsewhere_are_run_there(start: str) -> None:
    file, proof = ELSEWHERE[start]
    assert proof in (CHECKOUT / file).read_text(encoding="utf-8")


DOCUMENT = str(next((CHECKOUT / "tests/payloads").glob("*.json")))
RECORDING = (
    '{"vm": "vm-1"}\n'
    '{"at": "2026-01-01T00:00:00Z", "document": {"DocumentIncarnation": 1, "Events": []}}\n'
    '{"at": "2026-01-01T00:00:09Z", "document": {"DocumentIncarnation": 2, "Events": []}}\n'
)
# Commands that run until they are stopped; their first words show whether they have begun.
LASTING = re.compile(r"^(run|demo|simulate (?!--list|--check))")


class Scene(NamedTuple):
    """A running agent that holds an event, and the endpoint."""

    agent: Agent
    sim: Simulator
    event: str


# Commands that change the scene; each gets a scene of its own.
CHANGES = re.compile(r"^(run|approve|hold|release|retry|resolve)\b")


def play(agent: Agent, sim: Simulator) -> Scene:
    agent.write_policy(
        agent={"state_dir": str(agent.state_dir), "listen": "127.0.0.1:0"},
        rules=[{"name": "reboots", "prepare": ["drain"], "recover": ["resume"], "approve": "when-prepared"}],
        hooks={name: agent.hook(name, exit_code=3) for name in ("drain", "resume")},
    )
    agent.start()
    event = sim.schedule("Reboot", notice_seconds=3600)
    agent.wait_phase(event, "held")
    return Scene(agent, sim, event)


@pytest.fixture(scope="module")
def lookers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One scene for all commands that only look."""
    with Simulator(vms=("vm-1",), others=("vm-2",), rate_limit=None) as sim:
        agent = Agent(tmp_path_factory.mktemp("agent"), sim.endpoint())
        try:
            yield play(agent, sim)
        finally:
            agent.close()


@pytest.fixture
def scene(command: Shown, request: pytest.FixtureRequest) -> Scene:
    if CHANGES.match(command.line.removeprefix(OURS)):
        return play(request.getfixturevalue("agent"), request.getfixturevalue("sim"))
    scene: Scene = request.getfixturevalue("lookers")
    return scene


def words_of(line: str, event: str, directory: Path, agent: Agent) -> list[str]:
    """The arguments, with what is the reader's own filled in."""
    words = shlex.split(line.removeprefix(OURS))
    policy = CHECKOUT / "config/policy.yaml" if words[0] == "check" else agent.config
    stand_ins = {
        "FILE": DOCUMENT,
        "DOCUMENT": DOCUMENT,
        "0.0.0.0": "127.0.0.1",
        "policy.yaml": str(policy),
        r"$data\windows-web-server.yaml": str(CHECKOUT / "config/examples/windows-web-server.yaml"),
    }
    words = [stand_ins.get(word, word) for word in words]
    if "--record" in words:  # by default, of the real endpoint
        words += ["--from", agent.endpoint]
    elif words[0] == "simulate" and words[1].endswith(".jsonl"):
        (directory / words[1]).write_text(RECORDING, encoding="utf-8")
    # A port may be taken here; a free one is found if none is named.
    words = [word for before, word in zip(["", *words], words, strict=False) if "--port" not in (before, word)]
    return [event[:8].lower() if re.fullmatch(r"[0-9a-f]{6,8}", word) else word for word in words]


@pytest.mark.parametrize("command", RUN_HERE, ids=lambda command: f"{command.page}:{command.line}")
def test_a_documented_command_has_its_documented_effect(command: Shown, scene: Scene, tmp_path: Path) -> None:
    agent, sim, event = scene
    words = words_of(command.line, event, tmp_path, agent)
    if words[0] == "run":
        agent.kill()
    if words[0] == "resolve":
        sim.cancel(event)
        agent.wait_phase(event, "recovery_failed")
    process = subprocess.Popen(
        agent.command(*words),
        cwd=tmp_path if words[0] == "simulate" else CHECKOUT,
        env={
            **os.environ,
            "PYTHONPATH": str(CHECKOUT / "agent"),
            "SCHEDULED_EVENTS_AGENT_CONFIG": str(agent.config),
            "COLUMNS": "100",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        if LASTING.match(" ".join(words)):
            first = process.stdout.readline()
            assert first, "it says nothing"
            assert not re.match("usage:|scheduled-events-agent: |Traceback", first), first + process.stdout.read()
        else:
            output, _ = process.communicate(timeout=PATIENCE)
            assert process.returncode == (3 if "ACT  " in output else 0), output
            assert "Traceback" not in output
    finally:
        end_with_children(process)


def end_with_children(process: "subprocess.Popen[str]") -> None:
    """End it, and the agent that the demo has started: that would hold its output open."""
    if sys.platform != "win32":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        with contextlib.suppress(psutil.Error):  # it has ended
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
    process.communicate(timeout=PATIENCE)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_requests_to_the_simulator_that_are_shown_are_answered(agent: Agent) -> None:
    lines = [command.line for command in SHOWN if is_run_here(command) and command.line.startswith(CURL)]
    assert len(lines) == 3
    simulate = subprocess.Popen(
        agent.command("simulate", "--control", "0", "--json"), cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert simulate.stdout is not None
        endpoint, control = (json.loads(simulate.stdout.readline())["url"].rstrip("/") for _ in range(2))
        for line in sorted(lines, key=lambda line: ("cancel" in line, line)):  # what is canceled has to be there
            here = line.replace("http://127.0.0.1:8169", endpoint).replace("http://127.0.0.1:8170", control)
            done = subprocess.run([*shlex.split(here), "--fail", "-sS"], check=False, capture_output=True)
            assert done.returncode == 0, (here, done.stderr)
    finally:
        simulate.kill()
        simulate.communicate()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no install command")
@pytest.mark.parametrize(
    "command",
    [command for command in SHOWN if is_run_here(command) and command.line.startswith(INSTALL)],
    ids=lambda command: f"{command.page}:{command.line}",
)
def test_documented_install_commands_name_existing_files(command: Shown, tmp_path: Path) -> None:
    (tmp_path / "etc/credentials").mkdir(parents=True)
    for own in ("token", "kubeconfig", "fleet-sas"):  # the reader's
        (tmp_path / own).touch()
    line = command.line.replace(" -g scheduled-events-agent", "")  # there is no such group here
    words = shlex.split(line.replace("/etc/scheduled-events-agent", str(tmp_path / "etc")))
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
