"""doctor beside a real systemd: the service, the account that it runs as, and what that account may start."""

import json
import re
import sys
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("systemd is Linux's", allow_module_level=True)

from service import DROP_INS, POLICY, Service, make_strict

pytest_plugins = ["machines", "installed"]
pytestmark = pytest.mark.timeout(900)  # the first time, Debian is fetched

STATE = "/var/lib/scheduled-events-agent"
STATE_SINCE = r"state since (\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d UTC"
RULES = [{"name": "all", "prepare": ["drain"], "approve": "when-prepared"}]
HOOK = "/etc/scheduled-events-agent/hooks/drain"
PAGE = (Path(__file__).parents[2] / "docs/doctor.md").read_text(encoding="utf-8")
FILES_ARE_SAFE = "no other account can change the policy, the files that it names, or the agent's own code"
ADVICE = "correct it: until then the hook fails, and a failed prepare hook holds its event"


def examine(service: Service) -> tuple[int, dict[str, list[list[str]]]]:
    """Exit code, and of each check its states and findings."""
    done = service.machine.run("scheduled-events-agent", "doctor", "--json", check=False)
    assert done.stderr == ""
    checks: dict[str, list[list[str]]] = {}
    for one in json.loads(done.stdout)["checks"]:
        checks.setdefault(one["check"], []).append([one["state"], one["message"], one["hint"]])
    return done.returncode, checks


def test_the_packaged_service_passes(service: Service) -> None:
    code, checks = examine(service)
    assert [name for name, found in checks.items() if any(state == "error" for state, *_ in found)] == []
    assert code == 0
    assert checks["service"] == [["ok", "installed, enabled, active (running), runs as root", ""]]
    assert checks["agent"][0][1].startswith(f"runs (pid {service.pid()}), ")
    (state,) = checks["state"]
    assert state[0] == "ok"
    assert re.match(f"{STATE} is there, for root alone, and writable; {STATE_SINCE}", state[1])
    assert checks["other-agents"] == [["ok", "no other agent that approves events was found", ""]]
    assert set(checks) == {*re.findall(r"^(?:\||-) `([\w-]+)`", PAGE, re.MULTILINE)}


def test_code_of_a_service_of_root_that_others_can_change_is_a_failure(service: Service) -> None:
    assert examine(service)[1]["permissions"] == [["ok", FILES_ARE_SAFE, ""]]
    module = service.machine.run("find", "/usr/lib/scheduled-events-agent", "-name", "engine").stdout.strip()
    risk = "can be changed by {}, and the agent acts on what it finds there: {}"
    advice = "install the agent where only root or administrators can write: who changes its code is one of them"
    for command, who, way_out in (
        (("chmod", "o+w", module), "every account", f"chmod go-w {module}"),
        (("chown", "12345", module), "its owner, uid 12345", f"chown root {module}"),
    ):
        service.machine.run(*command)
        code, checks = examine(service)
        assert code == 1
        assert checks["permissions"] == [["error", f"{module} {risk.format(who, way_out)}", advice]]
        service.machine.run("sh", "-c", f"chown root {module}; chmod go-w {module}")
    (compiled,) = service.machine.run("find", module, "-name", "engine.*.pyc").stdout.splitlines()
    for file in (compiled, "/usr/bin/python3.11"):
        service.machine.run("chmod", "o+w", file)
        told = f"{file} can be changed by every account, "
        assert examine(service)[1]["permissions"][0][1].startswith(told)
        service.machine.run("chmod", "o-w", file)
    service.machine.run("chmod", "o+w", compiled)
    make_strict(service.machine)
    assert examine(service)[1]["permissions"] == [
        ["ok", "no other account can change the policy or the files that it names", ""]
    ]


def test_a_stopped_service_is_a_failure_and_a_disabled_one_a_warning(service: Service) -> None:
    service.systemctl("disable")
    _, checks = examine(service)
    assert [state for state, *_ in checks["service"]] == ["warning"]
    service.systemctl("stop")
    code, checks = examine(service)
    assert code == 1
    assert checks["service"][0][:2] == ["error", "installed, not enabled, inactive (dead), runs as root"]
    assert checks["agent"][0][:2] == ["warning", f"no agent runs with the state directory {STATE}"]


def test_a_service_that_is_masked_is_to_be_unmasked_first(service: Service) -> None:
    way_out = "to run it: systemctl unmask scheduled-events-agent && systemctl enable --now scheduled-events-agent"
    service.systemctl("mask")
    _, checks = examine(service)
    told = "installed, masked, active (running), runs as root: after a reboot there will be no agent"
    assert checks["service"] == [["warning", told, way_out]]

    service.systemctl("stop")
    code, checks = examine(service)
    assert code == 1
    assert checks["service"] == [["error", "installed, masked, inactive (dead), runs as root", way_out]]
    assert checks["agent"][0][2] == way_out
    shown = service.machine.run("scheduled-events-agent", "status", check=False).stdout
    assert shown.startswith("ACT  No agent runs: its service is masked. ")
    assert shown.splitlines()[1] == f"     {way_out}"

    service.systemctl("unmask")
    service.systemctl("enable")
    service.systemctl("start")
    assert examine(service)[1]["service"][0][0] == "ok"


def test_a_service_that_fails_at_each_start_is_told_why_and_is_no_other_agent(service: Service) -> None:
    service.add_drop_in("[Service]\nRestartSec=300ms\n")
    service.machine.write("/etc/scheduled-events-agent/policy.yaml", "rulez: []\n")
    service.machine.run("systemctl", "restart", "scheduled-events-agent", check=False)
    reason = '/etc/scheduled-events-agent/policy.yaml:1: unknown key "rulez"'
    waits = "installed, enabled, activating (auto-restart)"
    hints: dict[str, str] = {}
    looks = 0
    while looks < 12 or waits not in hints:  # each look falls into another moment of the loop
        looks += 1
        checks = examine(service)[1]
        assert checks["other-agents"][0][0] == "ok"
        ((_, message, hint),) = checks["service"]
        hints[message.partition(", runs as")[0]] = hint
    waiting = hints[waits]
    assert waiting.startswith("it failed: ")
    assert reason in waiting
    assert waiting.endswith("; correct that, then systemd starts it again")
    # Also status says why, and what comes before a start.
    message, problem, first, *_ = service.machine.run(
        "scheduled-events-agent", "status", check=False
    ).stdout.splitlines()
    assert message.startswith("ACT  No agent runs: the policy file is rejected: line 1. ")
    assert problem.strip().startswith(reason)
    assert first.startswith("     scheduled-events-agent check ")
    # With a good file, the service's own last words count.
    service.machine.write("/etc/scheduled-events-agent/policy.yaml", "{}\n")
    service.add_drop_in("[Service]\nExecStart=\nExecStart=/bin/sh -c 'echo needs Python >&2; exit 78'\n")
    service.machine.run("systemctl", "restart", "scheduled-events-agent", check=False)

    def status_with_reason() -> list[str]:
        told = service.machine.run("scheduled-events-agent", "status", check=False).stdout.splitlines()
        return told if "     needs Python" in told else []

    # The journal may have them a moment later than systemd's state of the unit.
    message, problem, *_ = service.machine.wait_for(status_with_reason, "status gave the last words")
    assert message.startswith("ACT  No agent runs: its service has failed. ")
    assert problem == "     needs Python"


def test_a_unit_that_was_edited_and_not_read_again_is_a_warning(service: Service) -> None:
    service.add_drop_in("[Service]\nNice=1\n")
    service.machine.write(f"{DROP_INS}/90-test.conf", "[Service]\nNice=2\n")
    _, checks = examine(service)
    assert checks["service"] == [
        [
            "warning",
            "installed, enabled, active (running), runs as root; its files have changed since",
            "systemctl daemon-reload, and restart it",
        ]
    ]


def test_hooks_of_an_agent_without_privileges_are_tried_as_its_account(service: Service) -> None:
    machine = service.machine
    machine.write(HOOK, "#!/bin/sh\n", 0o700)
    service.write_policy(rules=RULES, hooks={"drain": {"run": [HOOK]}})
    make_strict(machine)
    code, checks = examine(service)
    assert checks["service"][0][1] == "installed, enabled, active (running), runs as scheduled-events-agent"
    assert checks["hooks"] == [["error", f"hooks.drain.run: scheduled-events-agent cannot execute {HOOK}", ADVICE]]
    (state,) = checks["state"]
    assert state[0] == "ok"
    assert re.match(f"{STATE} is there, for scheduled-events-agent alone, and writable; {STATE_SINCE}", state[1])
    assert code == 1

    run_as_root = ["/usr/share/scheduled-events-agent/systemd/run-as-root", "drain"]
    service.write_policy(rules=RULES, hooks={"drain": {"run": run_as_root, "serialize": True}})
    service.reload()
    code, checks = examine(service)
    assert checks["hooks"] == [["ok", "1 hook: all programs exist and can be started", ""]]
    assert code == 0
    machine.run("chown", "scheduled-events-agent", HOOK)
    checks = examine(service)[1]  # as root, which uses nothing of a policy whose hooks another account can change
    (exposed,) = checks["permissions"]
    assert exposed[0] == "error"
    assert f"{HOOK} can be changed by its owner, uid " in exposed[1]
    assert checks["hooks"] == [["skipped", "waits for the check permissions", ""]]
    machine.run("rm", HOOK)
    code, checks = examine(service)
    lines = machine.path(POLICY).read_text().splitlines()
    line = 1 + lines.index("    run:")
    missing = f"{POLICY}:{line}: hooks.drain.run: {HOOK} does not exist"
    assert (code, checks["hooks"]) == (1, [["error", missing, ADVICE]])


def test_a_unit_of_a_hook_that_systemd_does_not_know_is_a_warning(service: Service) -> None:
    stop = {"run": ["/bin/true"], "env": {"REDIS_UNIT": "redis.service", "KIND": "redis"}}
    start = {"run": ["/bin/true"], "env": {"OTHER_UNIT": "cron@.service", "WEB_UNIT": "systemd-journald"}}
    rules = [{"name": "all", "prepare": ["stop"], "recover": ["start"], "approve": "when-prepared"}]
    service.write_policy(rules=rules, hooks={"stop": stop, "start": start})
    service.reload()
    code, checks = examine(service)
    assert code == 0
    lines = service.machine.run("cat", POLICY).stdout.splitlines()
    advice = "write the name that systemctl list-unit-files has: the hook fails else"

    def warning(key: str, unit: str) -> list[str]:
        line = next(number for number, text in enumerate(lines, start=1) if f"{key.rpartition('.')[2]}: " in text)
        return ["warning", f"{POLICY}:{line}: hooks.{key}: systemd does not know {unit}", advice]

    assert checks["hooks"] == [
        warning("stop.env.REDIS_UNIT", "redis.service"),
        warning("start.env.OTHER_UNIT", "cron@.service"),
        ["ok", "2 hooks: all programs exist and can be started", ""],
    ]


def test_a_secret_that_the_strict_account_cannot_read_is_named(service: Service) -> None:
    secret = "/etc/scheduled-events-agent/credentials/token"
    service.machine.write(secret, "s3cret", 0o600)
    told = [["ok", "hooks can read 1 file in /etc/scheduled-events-agent/credentials", ""]]
    assert examine(service)[1]["secrets"] == told
    make_strict(service.machine)
    assert examine(service)[1]["secrets"][0][:2] == ["warning", f"scheduled-events-agent cannot read {secret}"]
    service.add_drop_in(f"[Service]\nLoadCredential=token:{secret}\n")
    service.systemctl("restart")
    assert examine(service)[1]["secrets"] == [["ok", "systemd has loaded credentials for the service", ""]]
    service.add_drop_in("")
    service.systemctl("restart")
    service.machine.run("chgrp", "scheduled-events-agent", secret)
    service.machine.run("chmod", "640", secret)
    assert examine(service)[1]["secrets"] == told


def test_a_state_directory_in_memory_and_a_pacemaker_that_acts_are_failures(service: Service) -> None:
    machine = service.machine
    service.write_policy(agent={"state_dir": "/run/somewhere"})
    machine.write("/var/lib/pacemaker/cib/cib.xml", '<cib><primitive type="azure-events-az"/></cib>')
    machine.run("cp", "/bin/sleep", "/root/pacemakerd")
    machine.run("systemd-run", "--unit=pacemaker-like", "/root/pacemakerd", "1000")
    _, checks = examine(service)
    assert checks["disk"][0][:2] == ["error", "/run/somewhere is in memory (tmpfs), and gone after a reboot"]
    assert checks["agent"][0][0] == "warning"  # the service runs with another one
    assert checks["agent"][0][1].startswith("the service runs (pid ")
    ((state, finding, _),) = checks["other-agents"]  # the service's own process is no other agent
    assert state == "error"
    assert finding.startswith(
        "Pacemaker's azure-events-az approves events too, perhaps before the hooks have run ("
    )


def test_an_ordinary_account_learns_which_checks_it_may_not_run(service: Service) -> None:
    command = (
        "setpriv",
        "--reuid=nobody",
        "--regid=nogroup",
        "--clear-groups",
        "scheduled-events-agent",
        "doctor",
    )
    done = service.machine.run(*command, check=False)
    assert done.stderr == ""
    print(done.stdout)
    assert done.returncode == 0
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    skipped = {check: finding for state, check, finding in lines if state == "skipped"}
    checks = ("hooks", "secrets", "permissions", "state", "disk", "agent")
    assert skipped == dict.fromkeys(checks, "cannot be checked by nobody: run as root or administrator")
    assert "no other agent that approves events was found" in done.stdout
