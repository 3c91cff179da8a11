"""Hooks that run as root for an agent without privileges, under systemd: input, wait, end, permissions."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

if sys.platform == "win32":
    pytest.skip("systemd is Linux's", allow_module_level=True)

from container import CHECKOUT, Container
from service import UNIT, Service, make_strict, use_shell

from scheduled_events_agent.simulator import Simulator

pytest_plugins = ["machines", "installed"]
pytestmark = pytest.mark.timeout(900)  # the first time, Debian is fetched

USER = "scheduled-events-agent"
HOOKS = "/etc/scheduled-events-agent/hooks"
PLACE = "/run/scheduled-events-agent"
RUN_AS_ROOT = "/usr/share/scheduled-events-agent/systemd/run-as-root"
RULES = [{"name": "reboots", "when": {"type": "Reboot"}, "prepare": ["drain"], "approve": "when-prepared"}]
REFUSED = "Interactive authentication required."


@pytest.fixture
def strict(service: Service, hook_shell: str) -> Service:
    make_strict(service.machine)
    use_shell(service.machine, hook_shell)
    return service


def unit_of(hook: str) -> str:
    return f"scheduled-events-agent-hook@{hook}.service"


def write_hook(strict: Service, name: str, script: str) -> None:
    strict.machine.write(f"{HOOKS}/{name}", f"#!/bin/sh\n{script}\n", 0o755)


def drain(strict: Service, script: str, **settings: Any) -> None:
    """Have this script run as root before a reboot, by the line of the page."""
    write_hook(strict, "drain", script)
    page = (CHECKOUT / "docs/systemd.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```yaml\n(hooks:\n  drain: \{.*\})\n```", page, re.MULTILINE)
    hooks = yaml.safe_load(shown)["hooks"]
    hooks["drain"] |= settings
    strict.write_policy(rules=RULES, hooks=hooks)
    strict.reload()


def is_active(strict: Service, unit: str) -> str:
    return strict.machine.run("systemctl", "is-active", unit, check=False).stdout.strip()


def may_start(strict: Service, unit: str, verb: str = "start") -> bool:
    asked = strict.machine.run("systemctl", verb, "--no-ask-password", unit, user=USER, check=False)
    assert asked.returncode == 0 or REFUSED in asked.stderr, asked.stderr
    return asked.returncode == 0


# --- input


def test_a_prepare_hook_does_as_root_what_the_agent_may_not_and_knows_its_event(
    strict: Service, sim: Simulator
) -> None:
    facts = '"$(id -un) $SCHEDULED_EVENT_ID $SCHEDULED_EVENT_SECONDS_LEFT $SCHEDULED_EVENT_STAGE"'
    drain(strict, f"cat >/root/event.json\necho {facts} >/root/drained\necho it is drained")
    event = sim.schedule("Reboot", notice_seconds=600)
    sim.wait_approved(event)
    user, id_, seconds_left, stage = strict.machine.path("/root/drained").read_text().split()
    assert (user, id_, stage) == ("root", event, "prepare")
    assert 400 < int(seconds_left) <= 600
    assert json.loads(strict.machine.path("/root/event.json").read_text())["EventId"] == event
    # Output that the page says is lost, and where it is.
    assert [entry for entry in strict.log("hook output") if "it is drained" in entry["line"]] == []
    said = strict.machine.run("journalctl", "-u", "scheduled-events-agent-hook@drain", "--output=cat").stdout
    assert "it is drained\n" in said


def test_a_hook_of_root_finds_its_secrets_in_the_shared_or_its_own_credentials(
    strict: Service, sim: Simulator
) -> None:
    machine, secret = strict.machine, "/etc/scheduled-events-agent/credentials/token"
    machine.write(secret, "s3cret\n", 0o600)
    drain(strict, "cat $CREDENTIALS_DIRECTORY/token >>/root/notes; echo $CREDENTIALS_DIRECTORY >>/root/notes")
    sim.wait_approved(sim.schedule("Reboot", notice_seconds=600))
    assert strict.records() == ["s3cret", "/etc/scheduled-events-agent/credentials"]
    machine.write(
        f"/etc/systemd/system/{unit_of('drain')}.d/own.conf", f"[Service]\nLoadCredential=token:{secret}\n"
    )
    machine.run("systemctl", "daemon-reload")
    sim.wait_approved(sim.schedule("Reboot", notice_seconds=600))
    assert strict.records()[2:] == ["s3cret", f"/run/credentials/{unit_of('drain')}"]


def test_hook_input_is_readable_by_the_agents_account_alone(strict: Service, sim: Simulator) -> None:
    drain(strict, f"stat -c '%a %U %n' {PLACE} {PLACE}/hook-drain.* >/root/modes")
    sim.wait_approved(sim.schedule("Reboot", notice_seconds=600))
    assert strict.machine.path("/root/modes").read_text().splitlines() == [
        f"700 {USER} {PLACE}",
        f"600 {USER} {PLACE}/hook-drain.env",
        f"600 {USER} {PLACE}/hook-drain.json",
    ]


def test_a_text_from_azure_arrives_unchanged_and_is_not_executed(strict: Service, sim: Simulator) -> None:
    text = "\"$(touch /root/owned)\" `touch /root/owned` 'it' \\n %n ${HOME} \u00e4\u20ac = # ;"
    drain(strict, 'printf %s "$SCHEDULED_EVENT_DESCRIPTION" >/root/said\nenv >/root/variables')
    forged = "\nLD_PRELOAD=/tmp/x.so\nSCHEDULED_EVENT_FORGED=1\nend"
    sim.wait_approved(sim.schedule("Reboot", notice_seconds=600, description=f"{text}{forged}"))
    assert strict.machine.path("/root/said").read_text() == f"{text}{forged}".replace("\n", " ")
    lines = strict.machine.path("/root/variables").read_text().splitlines()
    variables = dict(line.partition("=")[::2] for line in lines)
    assert not {"LD_PRELOAD", "SCHEDULED_EVENT_FORGED"} & variables.keys()
    account = {"HOME": "/root", "USER": "root", "LOGNAME": "root"}  # as for a hook of an agent that is root
    assert account.items() <= variables.items()
    assert not strict.machine.path("/root/owned").exists()


def test_from_a_file_of_the_account_only_event_variables_are_exported(strict: Service) -> None:
    write_hook(strict, "drain", "tr '\\000' '\\n' </proc/$$/environ >/root/variables")
    strict.machine.write(f"{PLACE}/hook-drain.json", "{}")
    environment = "SCHEDULED_EVENT_ID=A", "SCHEDULED_EVENT_RESOURCES=$(touch /root/owned)=\\x `id`"
    others = (
        *("LD_PRELOAD=/tmp/x.so", "PATH=/tmp", "IFS=x", "SCHEDULED_EVENT_=1", "SCHEDULED_EVENT_a=1"),
        *("SCHEDULED_EVENT_A B=1", "SCHEDULED_EVENT_X[$(touch /root/owned)]=1", "SCHEDULED_EVENT_NONE", "=1", ""),
        *("export SCHEDULED_EVENT_Y=1", " SCHEDULED_EVENT_Z=1", "SCHEDULED_EVENT_`touch /root/owned`=1"),
    )
    strict.machine.write(f"{PLACE}/hook-drain.env", "\n".join([*others, *environment, *others]) + "\n")
    assert may_start(strict, unit_of("drain"))
    variables = strict.machine.path("/root/variables").read_text().splitlines()
    assert {line for line in variables if line.startswith("SCHEDULED_EVENT")} == {*environment}
    assert not [line for line in variables if line.startswith(("LD_PRELOAD", "IFS"))]
    (path,) = (line for line in variables if line.startswith("PATH="))
    assert "/tmp" not in path
    assert "/usr/bin" in path
    assert not strict.machine.path("/root/owned").exists()


def test_where_sh_is_bash_a_number_of_the_account_is_not_executed(service: Service) -> None:
    """Hooks compute with it, and bash evaluates what is no number, commands in it included."""
    make_strict(service.machine)
    use_shell(service.machine, "bash")
    shipped = "/usr/share/scheduled-events-agent/hooks"
    service.machine.run("cp", f"{shipped}/common.sh", f"{shipped}/nginx-prepare", HOOKS)
    write_hook(service, "own", "echo $((SCHEDULED_EVENT_SECONDS_LEFT + SCHEDULED_EVENT_FOO)) >/root/sum")
    hostile = "OPTIND[$(id >/root/owned; echo 0)]"
    environment = {f"SCHEDULED_EVENT_{name}": hostile for name in ("SECONDS_LEFT", "TIMEOUT_SECONDS", "FOO")}
    for hook in ("nginx-prepare", "own"):
        service.machine.run(RUN_AS_ROOT, hook, user=USER, input="{}", environment=environment, check=False)
    assert service.machine.path("/root/sum").read_text() == "0\n"
    assert not service.machine.path("/root/owned").exists()


# --- waited for, and ended


def test_an_exit_code_fails_the_hook(strict: Service, sim: Simulator) -> None:
    drain(strict, "exit 3")
    event = sim.schedule("Reboot", notice_seconds=600)
    finished = strict.wait_log("hook finished", event_id=event, hook="drain")
    assert finished["reason"] == "hook drain: exit code 1 (failed)"
    status = ("systemctl", "show", "--property=ExecMainStatus", "--value", unit_of("drain"))
    assert strict.machine.run(*status).stdout == "3\n"
    assert sim.approvals(event) == ()


@pytest.mark.parametrize("trap", ["", "trap '' TERM"], ids=["ends", "deaf"])
def test_one_that_sleeps_is_stopped_at_its_limit_with_all_its_processes(
    strict: Service, sim: Simulator, trap: str
) -> None:
    script = f"{trap}\nsetsid sleep 1111 &\ntouch /root/begun\nwhile :; do sleep 1112; done"
    drain(strict, script, timeout="3s")
    event = sim.schedule("Reboot", notice_seconds=600)
    finished = strict.wait_log("hook finished", event_id=event, hook="drain")
    assert finished["reason"].startswith("hook drain: killed after ")
    assert finished["reason"].endswith("; its time limit is 3s (timed_out)")
    assert strict.machine.path("/root/begun").exists()
    strict.machine.wait_for(
        lambda: is_active(strict, unit_of("drain")) in ("inactive", "failed"), "the unit had ended", timeout=30
    )
    assert strict.machine.run("pgrep", "-f", "sleep 111", check=False).stdout == ""


SLOW_SYSTEMCTL = """#!/bin/sh
echo "$1" >>/tmp/commands
[ "$1" != start ] || until [ -e /tmp/go ]; do sleep 0.05; done
exec /usr/bin/systemctl "$@"
"""


def test_one_that_is_ended_before_systemd_knows_of_it_is_not_started(strict: Service) -> None:
    machine = strict.machine
    write_hook(strict, "drain", "touch /root/begun")
    machine.write("/usr/local/bin/systemctl", SLOW_SYSTEMCTL, 0o755)

    def commands() -> list[str]:
        path = machine.path("/tmp/commands")
        return path.read_text().splitlines() if path.exists() else []

    with ThreadPoolExecutor(1) as other:
        ended = other.submit(machine.run, RUN_AS_ROOT, "drain", user=USER, check=False)
        machine.wait_for(lambda: commands() == ["start"], "the start was asked for")
        machine.run("pkill", "--exact", "run-as-root")  # it alone, as if systemctl had been started just now
        machine.wait_for(lambda: commands() == ["start", "stop"], "it was stopped")
        machine.write("/tmp/go", "")
        ended.result()
    assert is_active(strict, unit_of("drain")) == "inactive"
    assert not machine.path("/root/begun").exists()


def test_without_space_for_its_variables_it_is_not_started(strict: Service) -> None:
    write_hook(strict, "drain", "touch /root/begun")
    strict.machine.run("mount", "-t", "tmpfs", "-o", f"size=8k,mode=700,uid={USER}", "tmpfs", PLACE)
    variable = {"SCHEDULED_EVENT_DESCRIPTION": "x" * 8192}
    command = (RUN_AS_ROOT, "drain")
    done = strict.machine.run(*command, user=USER, input="{}", environment=variable, check=False)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert not strict.machine.path("/root/begun").exists()


def test_a_start_during_the_run_of_a_killed_agent_waits_for_its_end(strict: Service, sim: Simulator) -> None:
    drain(strict, "echo begins >>/root/notes; until [ -e /root/go ]; do sleep 0.1; done; echo ends >>/root/notes")
    event = sim.schedule("Reboot", notice_seconds=600)
    strict.machine.wait_for(lambda: strict.records() == ["begins"], "the hook ran")
    first = strict.pid()
    strict.machine.run("systemctl", "kill", "--signal=KILL", UNIT)
    strict.machine.wait_for(lambda: strict.pid() not in ("0", first), "the agent was started again")
    strict.wait_status("runs hook drain")
    assert is_active(strict, unit_of("drain")) == "activating"
    strict.machine.write("/root/go", "")
    sim.wait_approved(event)
    assert strict.records()[:2] == ["begins", "ends"]


SERVER = """#!/bin/sh
case $* in
    *"INFO replication") printf 'role:master\\r\\nmaster_replid:a\\r\\nmaster_repl_offset:5\\r\\n%s\\r\\n' \
        'slave0:ip=192.0.2.1,port=6379,state=online,offset=5,lag=0' ;;
    *"INFO server") printf 'run_id:me\\r\\n' ;;
    *GET-MASTER*) printf '127.0.0.1\\n6379\\n' ;;
    *"SENTINEL MASTER"*) printf 'runid\\nme\\n' ;;
    *) echo OK ;;
esac
"""


def test_the_redis_hook_with_15_seconds_left_ends_itself_before_the_deadline(
    strict: Service, sim: Simulator
) -> None:
    machine = strict.machine
    machine.write("/usr/local/bin/redis-cli", SERVER, 0o755)  # a Sentinel that promotes no other
    machine.write("/etc/systemd/system/redis-server.service", "[Service]\nExecStart=/bin/sleep infinity\n")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", "redis-server.service")
    shipped = "/usr/share/scheduled-events-agent/hooks"
    machine.run("cp", f"{shipped}/common.sh", f"{shipped}/redis-prepare", HOOKS)
    hook = {"run": [RUN_AS_ROOT, "redis-prepare"], "timeout": "5m", "serialize": True}
    strict.write_policy(rules=RULES, hooks={"drain": hook}, agent={"reserve": "2s"})
    strict.reload()
    event = sim.schedule("Reboot", notice_seconds=15)
    finished = strict.wait_log("hook finished", event_id=event, hook="drain")
    assert finished["reason"] == "hook drain: exit code 1 (failed)"  # and was not cut off
    (seen,) = (one for one in sim.events() if one.id == event)
    assert seen.started_at is None
    said = machine.run("journalctl", "-u", unit_of("redis-prepare"), "--output=cat").stdout
    (limit,) = re.findall(r"there is no other primary within (\d+) s\n", said)
    assert 4 <= int(limit) <= 9  # six seconds less than were left, and not its own 30
    # The mark is where the agent's account can place no link for root to write through.
    assert machine.path("/var/lib/scheduled-events-agent-hooks/redis-server.service.stopped-by-agent").exists()
    modes = machine.run("stat", "-c", "%a %U", "/var/lib/scheduled-events-agent-hooks").stdout
    assert modes == "700 root\n"
    # Sentinel may hand over yet, and what was written here then would be lost.
    assert "there is no other primary yet: redis-server.service was stopped" in said
    assert is_active(strict, "redis-server.service") == "inactive"


def test_strict_distinguishes_a_failed_hook_from_one_that_the_shutdown_ended(
    strict: Service, sim: Simulator
) -> None:
    write_hook(strict, "drain", "true")
    write_hook(strict, "resume", "while [ -e /root/wait ]; do sleep 0.1; done; touch /etc/resumed")
    # While this takes its time to stop, the agent is still up, and so has to see how its hook ends.
    slow = "[Unit]\nAfter=network.target\n[Service]\nExecStart=/bin/sleep 1000\nExecStop=/bin/sleep 10\n"
    strict.machine.write("/etc/systemd/system/slow.service", slow)
    strict.machine.run("systemctl", "daemon-reload")
    strict.machine.run("systemctl", "start", "slow.service")
    strict.machine.write("/root/wait", "")
    hooks = {name: {"run": [RUN_AS_ROOT, name], "serialize": True} for name in ("drain", "resume")}
    strict.write_policy(rules=[{**RULES[0], "recover": ["resume"]}], hooks=hooks)
    strict.reload()
    event = sim.schedule("Reboot", notice_seconds=600, lasts_seconds=None)
    strict.wait_log("started")
    sim.end(event)
    strict.wait_log("hook started", hook="resume")
    strict.machine.wait_for(lambda: is_active(strict, unit_of("resume")) == "activating", "the hook ran")
    strict.machine.run("systemctl", "reboot", "--no-block")
    assert strict.machine.wait_end()
    strict.machine.path("/root/wait").unlink()
    strict.machine.start()
    strict.wait_log("closed", reason="is over: completed")
    assert strict.machine.path("/etc/resumed").exists()
    told = "the machine goes down: this hook counts as not run, and runs again at the next start"
    assert len(strict.log(told, boot=-1, hook="resume")) == 1


# --- permitted


def test_the_account_starts_and_stops_its_hooks_and_nothing_else(strict: Service) -> None:
    machine = strict.machine
    own = "#!/bin/sh\ntouch /root/taken\n"
    # Whatever a name could come to mean, it is there.
    for file in (f"{HOOKS}/..-x", f"{HOOKS}/.hidden", f"{HOOKS}/a/b", f"{HOOKS}/a\\x2fb", f"{HOOKS}/../x"):
        machine.write(file, own, 0o755)
    for name in ("..-x", ".hidden", "a\\x2fb", "-a", "a b"):
        machine.write(f"{PLACE}/hook-{name}.json", "{}")
        machine.write(f"{PLACE}/hook-{name}.env", "")
    for name in ("other", "x-scheduled-events-agent-hook@"):
        machine.write(f"/etc/systemd/system/{name}.service", "[Service]\nExecStart=/bin/touch /root/taken\n")
    machine.run("systemctl", "daemon-reload")
    others = (
        *("other.service", f"x-{unit_of('drain')}", UNIT, unit_of("..-x"), unit_of(".hidden"), unit_of("a\\x2fb")),
        *(unit_of("\\x2e\\x2e\\x2fx"), unit_of("-a"), unit_of("_a"), unit_of("a\\x20b"), unit_of("a:b")),
    )
    assert [unit for unit in others if may_start(strict, unit)] == []
    assert not may_start(strict, UNIT, "stop")
    assert not machine.path("/root/taken").exists()

    write_hook(strict, "hold.it-1_A", "sleep 1000")
    for ending in ("json", "env"):
        machine.write(f"{PLACE}/hook-hold.it-1_A.{ending}", "")
    hold = unit_of("hold.it-1_A")
    machine.run("systemctl", "start", "--no-block", hold, user=USER)
    machine.wait_for(lambda: is_active(strict, hold) == "activating", "it ran")
    assert [verb for verb in ("restart", "try-restart", "reload", "kill") if may_start(strict, hold, verb)] == []
    assert may_start(strict, hold, "stop")
    assert is_active(strict, hold) in ("inactive", "failed")


@pytest.mark.parametrize("root", ["debian", "debian_13"])  # systemd 257 calls it a start, as that of a hook
def test_the_account_makes_no_unit_of_its_own_under_the_name_of_a_hook(
    request: pytest.FixtureRequest, root: str, deb: Path
) -> None:
    with Container(request.getfixturevalue(root), private_network=True) as machine:
        machine.copy_in(deb, "/root/agent.deb")
        machine.run("dpkg", "--install", "/root/agent.deb")
        make_strict(machine)
        command = ("systemd-run", "--no-ask-password", f"--unit={unit_of('gone')}", "touch", "/root/taken")
        refused = machine.run(*command, user=USER, check=False)
        assert refused.returncode == 1
        assert REFUSED in refused.stderr
        assert not machine.path("/root/taken").exists()
        machine.write(f"{HOOKS}/drain", "#!/bin/sh\ntouch /root/drained\n", 0o755)
        machine.run(RUN_AS_ROOT, "drain", user=USER)
        assert machine.path("/root/drained").exists()


@pytest.mark.parametrize("name", ["", "../x", "..", ".hidden", "a/b", "a\\x2fb", "a b", "-a", "a\nb", "."])
def test_run_as_root_rejects_an_invalid_hook_name(tmp_path: Path, name: str) -> None:
    command = [str(CHECKOUT / "systemd/run-as-root"), *([name] if name else [])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, input="{}", check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"run-as-root: expected the name of a program in {HOOKS}; got ")
