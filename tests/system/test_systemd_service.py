"""The unit under a real systemd: ready, supervised, reloaded, stopped, ordered and confined as its file says."""

import json
import re
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

if sys.platform == "win32":
    pytest.skip("systemd is Linux's", allow_module_level=True)

import apt
from container import CHECKOUT, Container
from hanging import hanging_thread, outer_pid, wait_killed
from ports import free_port
from service import DROP_INS, UNIT, Service, make_root, make_strict, shown_commands

from scheduled_events_agent.simulator import Simulator
from scheduled_events_agent.telemetry.log_ids import LogId

pytest_plugins = ["machines", "installed"]
pytestmark = pytest.mark.timeout(900)  # the first time, Debian is fetched

RULES = [{"name": "reboots", "when": {"type": "Reboot"}, "prepare": ["drain"], "approve": "when-prepared"}]
# Short times, so that a test need not wait for a minute.
SHORT_WATCHDOG = "[Service]\nWatchdogSec=8s\nTimeoutAbortSec=2s\nRestartSec=500ms\n"
STRICT = "/usr/share/scheduled-events-agent/systemd/strict.conf"
ETC = "/etc/scheduled-events-agent"


def drain_with(shell: str, **settings: object) -> dict[str, object]:
    """A policy that drains for a reboot with this command line."""
    return {"rules": RULES, "hooks": {"drain": {"shell": shell, **settings}}}


# --- the file


def test_systemd_accepts_every_line_of_the_unit_and_of_strict(service: Service) -> None:
    assert service.machine.run("systemd-analyze", "verify", "--man=no", UNIT).stderr == ""
    service.machine.run("install", "-D", "-m", "644", STRICT, f"{DROP_INS}/50-strict.conf")
    assert service.machine.run("systemd-analyze", "verify", "--man=no", UNIT).stderr == ""


def test_the_documented_exposure_is_what_systemd_finds_and_strict_is_at_most_2(service: Service) -> None:
    def score() -> float:
        command = ("systemd-analyze", "security", "--no-pager", UNIT)
        told = service.machine.run(*command, environment={"COLUMNS": "200"}).stdout
        found = re.search(rf"Overall exposure level for {re.escape(UNIT)}: ([0-9.]+)", told)
        assert found, told
        return float(found[1])

    text = (CHECKOUT / "docs/systemd.md").read_text(encoding="utf-8")
    documented = {
        name: float(value)
        for name, value in re.findall(r"^\| (root|strict)\b.*\| ([0-9.]+) \|$", text, re.MULTILINE)
    }
    found = {"root": score()}
    service.machine.run("install", "-D", "-m", "644", STRICT, f"{DROP_INS}/50-strict.conf")
    service.machine.run("systemctl", "daemon-reload")
    found["strict"] = score()
    assert found["strict"] <= 2.0
    assert found == documented


# In what order images of Azure start their network and what prepares them, as the packages of these programs say.
IMAGES = {
    "networkd": {
        "cloud-init-local.service": "DefaultDependencies=no\nWants=network-pre.target\n"
        "Before=network-pre.target sysinit.target",
        "cloud-init.service": "DefaultDependencies=no\nWants=cloud-init-local.service\n"
        "After=cloud-init-local.service systemd-networkd-wait-online.service networking.service\n"
        "Before=network-online.target sysinit.target systemd-user-sessions.service",
        "ufw.service": "DefaultDependencies=no\nWants=network-pre.target\nBefore=network-pre.target",
        "chrony.service": "After=network.target\nBefore=time-sync.target\nWants=time-sync.target",
        "walinuxagent.service": "After=network-online.target cloud-init.service\nWants=network-online.target",
    },
    "NetworkManager": {
        "firewalld.service": "Wants=network-pre.target\nAfter=dbus.service polkit.service\n"
        "Before=network-pre.target",
        "NetworkManager.service": "Wants=network.target\nAfter=network-pre.target dbus.service\n"
        "Before=network.target",
        "NetworkManager-wait-online.service": "Requires=NetworkManager.service\nAfter=NetworkManager.service\n"
        "Before=network-online.target",
        "cloud-init.service": "DefaultDependencies=no\nAfter=NetworkManager-wait-online.service\n"
        "Before=network-online.target systemd-user-sessions.service",
        "waagent.service": "After=network-online.target cloud-init.service\nWants=network-online.target",
    },
}


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("is_strict", [False, True], ids=["root", "strict"])
def test_it_has_a_place_in_the_order_in_which_images_of_azure_boot(
    service: Service, image: str, is_strict: bool
) -> None:
    machine = service.machine

    def add(name: str, order: str) -> None:
        text = f"[Unit]\n{order}\n[Service]\nType=oneshot\nExecStart=/bin/true\n"
        machine.write(f"/etc/systemd/system/{name}", f"{text}[Install]\nWantedBy=multi-user.target\n")
        machine.run("systemctl", "enable", name)

    def cycles() -> list[str]:
        told = machine.run("systemd-analyze", "verify", "--man=no", "multi-user.target", check=False).stderr
        return [line for line in told.splitlines() if "ordering cycle" in line]

    for name, order in IMAGES[image].items():
        add(name, order)
    if image == "networkd":
        machine.run("systemctl", "enable", "systemd-networkd", "systemd-networkd-wait-online")
    if is_strict:
        machine.run("install", "-D", "-m", "644", STRICT, f"{DROP_INS}/50-strict.conf")
    assert cycles() == []
    add("early.service", "DefaultDependencies=no\nAfter=network.target\nBefore=sysinit.target")
    assert cycles() != []  # or nothing would have been found above either


# --- ready, and what is pending


def test_the_unit_is_started_when_it_polls_and_names_pending_events(service: Service, sim: Simulator) -> None:
    service.write_policy(rules=[{"name": "reboots", "approve": "manual"}])
    service.systemctl("restart")
    assert service.show("StatusText") == "Nothing is pending"
    sim.schedule("Reboot", notice_seconds=600)
    service.wait_status("needs an operator's approval")


def test_a_slow_first_answer_does_not_hold_up_the_start(service: Service, sim: Simulator) -> None:
    service.systemctl("stop")
    sim.fault(None, "slow", delay_seconds=600.0)
    began = time.monotonic()
    service.systemctl("start")
    assert time.monotonic() - began < 60  # half of what the agent gives a first answer
    assert service.show("ActiveState") == "active"
    failures = service.log("polling the metadata service fails")
    assert [entry for entry in failures if service.endpoint in entry["reason"]] == []  # it still waits


# --- supervised


def test_an_engine_that_hangs_is_killed_and_started_again(service: Service, sim: Simulator) -> None:
    service.add_drop_in(SHORT_WATCHDOG)
    service.systemctl("restart")
    pid = outer_pid(service.machine, service.pid())
    with hanging_thread(pid, pid):  # the engine is the main thread
        before = len(sim.requests())
        sim.wait_until(lambda: len(sim.requests()) > before + 3, "it polled on: only the engine hangs")
        wait_killed(pid, pid, 120.0)
    see_restart_by_watchdog(service)


def test_a_poller_that_hangs_is_killed_and_started_again(service: Service, sim: Simulator) -> None:
    service.write_policy(imds={"request_timeout": "1s", "first_request_timeout": "1s"})
    service.add_drop_in(SHORT_WATCHDOG)
    service.systemctl("restart")
    service.wait_log("this VM is known")
    pid = outer_pid(service.machine, service.pid())
    thread = poller_of(pid, sim)
    with hanging_thread(pid, thread):
        # It has half a minute more than its time limit, in case that it resolves a name.
        wait_killed(pid, thread, 180.0)
    see_restart_by_watchdog(service)


def test_a_store_that_hangs_is_killed_and_started_again(service: Service, sim: Simulator) -> None:
    apt.need("strace")
    service.write_policy(rules=[{"name": "reboots", "approve": "immediately"}])
    service.add_drop_in(SHORT_WATCHDOG)
    service.systemctl("restart")
    pid = outer_pid(service.machine, service.pid())
    hang = "inject=fdatasync,fsync:delay_enter=300s"  # a disk that does not come back
    strace = subprocess.Popen(
        ["strace", "-f", "-p", str(pid), "-e", hang, "-e", "trace=fdatasync,fsync"], stderr=subprocess.PIPE
    )
    try:
        assert strace.stderr is not None
        assert b"attached" in strace.stderr.readline()
        event = sim.schedule("Reboot", notice_seconds=600)
        said = "Watchdog timeout (limit 8s)!"
        service.machine.wait_for(
            lambda: any(said in str(entry["MESSAGE"]) for entry in service.machine.journal(UNIT)), said
        )
    finally:
        strace.kill()
        strace.communicate()
    see_restart_by_watchdog(service, shows_threads=False)
    sim.wait_approved(event)  # what was decided before the hang is carried through after it


def poller_of(pid: int, sim: Simulator) -> int:
    """The thread whose standstill ends the polls.

    Looked for again and again: threads come and go, and a poller that is stopped amid a request is relieved.
    """
    deadline = time.monotonic() + 240.0
    while time.monotonic() < deadline:
        for thread in sorted(int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()):
            if thread == pid:
                continue
            with suppress(ProcessLookupError), hanging_thread(pid, thread):
                time.sleep(0.5)  # what was on its way has come
                before, until = len(sim.requests()), time.monotonic() + 5.0  # twenty intervals
                while len(sim.requests()) == before and time.monotonic() < until:
                    time.sleep(0.05)
                if len(sim.requests()) == before:
                    return thread
    raise AssertionError(f"none of the threads of process {pid} polls")


def see_restart_by_watchdog(service: Service, *, shows_threads: bool = True) -> None:
    service.machine.wait_for(lambda: service.show("NRestarts") == "1", "it was started again")
    service.wait_status("Nothing is pending" if shows_threads else "Reboot")
    messages = [str(entry["MESSAGE"]) for entry in service.machine.journal(UNIT)]
    assert any(re.search(r"Watchdog timeout \(limit 8s\)", message) for message in messages)
    if shows_threads:  # a thread that is stopped by a debugger, or waits for its disk, may keep it from that
        assert any("most recent call first" in message for message in messages)


def test_after_a_kill_it_is_back_within_seconds_and_goes_on_where_it_was(service: Service, sim: Simulator) -> None:
    service.write_policy(**drain_with("echo drained >> /root/notes; test -e /root/go || sleep 100"))
    service.reload()
    sim.schedule("Reboot", notice_seconds=600)
    service.machine.wait_for(lambda: service.records() == ["drained"], "the hook ran")
    service.machine.write("/root/go", "")
    first = service.pid()
    service.machine.run("kill", "-KILL", first)
    service.machine.wait_for(lambda: service.pid() not in ("0", first), "it was started again")
    service.wait_log("approved")
    said = {str(entry["MESSAGE"]): int(entry["__MONOTONIC_TIMESTAMP"]) for entry in service.machine.journal(UNIT)}
    (died,) = (at for text, at in said.items() if "Main process exited, code=killed, status=9/KILL" in text)
    (restarted,) = (at for text, at in said.items() if "Scheduled restart job" in text)
    assert 4.5e6 < restarted - died < 60e6  # RestartSec=5s
    assert service.records() == ["drained"] * 2  # it was killed in the middle of it
    assert service.show("NRestarts") == "1"
    assert "sleep" not in service.machine.run("ps", "-e", "-o", "comm").stdout  # the hook went with its agent


# --- the journal


def ask_journal(service: Service, *matches: str) -> list[dict[str, Any]]:
    service.machine.run("journalctl", "--sync")
    done = service.machine.run("journalctl", "--quiet", "--output=json", *matches)
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_journal(service: Service, sim: Simulator) -> None:
    event = sim.schedule("Reboot", source="User", notice_seconds=600)
    service.wait_log("approved", event_id=event)
    found = ask_journal(service, f"EVENT_ID={event}")
    assert {"seen", "decided", "approved"} <= {entry["LOG_MESSAGE"] for entry in found}
    for entry in found:
        assert (entry["_SYSTEMD_UNIT"], entry["EVENT_TYPE"], entry["RULE"]) == (UNIT, "Reboot", "user-initiated")
    (approved,) = ask_journal(service, f"--unit={UNIT}", f"MESSAGE_ID={LogId.APPROVED.message_id}")
    assert (approved["EVENT_ID"], approved["PRIORITY"]) == (event, "6")


def test_the_journal_can_be_asked_for_an_event(service: Service, sim: Simulator) -> None:
    check_journal(service, sim)


def test_the_journal_describes_an_event_in_sentences_with_fields(service: Service, sim: Simulator) -> None:
    rule = {"name": "all", "prepare": ["drain"], "recover": ["resume"], "approve": "when-prepared"}
    hooks = {name: {"shell": f"echo {name} at work"} for name in ("drain", "resume")}
    service.write_policy(rules=[rule], hooks=hooks)
    service.reload()
    event = sim.schedule("Reboot", notice_seconds=600, lasts_seconds=None, description="Host maintenance")
    service.wait_log("started", event_id=event)
    sim.end(event)
    service.wait_log("closed", event_id=event)
    matches = (f"--unit={UNIT}", f"EVENT_ID={event}")
    text = service.machine.run("journalctl", "--quiet", "--output=cat", *matches).stdout
    assert max(map(len, text.splitlines())) <= 120
    told = re.sub(
        r"not before (\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d UTC", "not before TIME", text.replace(event[:8], "ID")
    )
    # A poll may meet the short time of "Completed", and the first answer without the event.
    sometimes = ("Reboot ID: status Started -> Completed", "Reboot ID: is not in the document; ")
    lines = [line for line in told.splitlines() if not line.startswith(sometimes)]
    assert lines == (Path(__file__).parent / "journal.txt").read_text().splitlines()

    entries = ask_journal(service, *matches)
    everywhere = {"EVENT_ID": event, "SYSLOG_IDENTIFIER": "scheduled-events-agent", "PRIORITY": "6"}
    assert [entry for entry in entries if not everywhere.items() <= entry.items()] == []
    output = [entry for entry in entries if entry["LOG_MESSAGE"] == "hook output"]
    assert [(entry["HOOK"], entry["STAGE"], entry["LINE"]) for entry in output] == [
        ("drain", "prepare", "drain at work"),
        ("resume", "recover", "resume at work"),
    ]
    steps = [entry for entry in entries if entry not in output]
    assert {(entry["EVENT_TYPE"], entry["RULE"]) for entry in steps} == {("Reboot", "all")}
    (finished, _) = [entry for entry in steps if entry["LOG_MESSAGE"] == "hook finished"]
    assert (finished["PHASE"], finished["HOOK"], finished["STAGE"]) == ("preparing", "drain", "prepare")
    assert finished["REASON"] == "hook drain: exit code 0 (succeeded)"
    (seen,) = [entry for entry in steps if entry["LOG_MESSAGE"] == "seen"]
    assert '"Host maintenance"' in seen["REASON"]
    ids = (LogId.SEEN, LogId.HOOK_SUCCEEDED, LogId.APPROVED, LogId.STARTED, LogId.CLOSED)
    assert {log_id.message_id for log_id in ids} == {entry.get("MESSAGE_ID") for entry in steps} - {None}


def test_why_the_agent_cannot_start_is_an_error_of_its_unit(service: Service) -> None:
    service.write_policy(rules=[{"name": "reboots", "approve": "yes"}])
    service.machine.run("systemctl", "restart", UNIT, check=False)
    service.wait_log("the agent cannot run")
    (*_, entry) = ask_journal(service, f"--unit={UNIT}", f"MESSAGE_ID={LogId.AGENT_FAILED.message_id}")
    assert entry["PRIORITY"] == "3"
    assert "rules[0].approve: expected one of immediately, " in entry["REASON"]
    assert entry["MESSAGE"] == f"the agent cannot run: {entry['REASON']} (kind config)"


# --- reload and stop


def test_a_reload_with_an_invalid_policy_fails_with_a_reason_and_keeps_the_old_one(
    service: Service, sim: Simulator
) -> None:
    service.write_policy(rules=[{"name": "reboots", "approve": "yes"}])
    done = service.machine.run("systemctl", "reload", UNIT, check=False)
    assert done.returncode == 1
    assert "Job for scheduled-events-agent.service failed." in done.stderr
    assert service.show("ActiveState") == "active"
    assert service.show("NRestarts") == "0"
    service.wait_status("The policy file is rejected: ")
    refusal = service.wait_log("the policy file is rejected; the old policy stays in force")
    assert "rules[0].approve: " in refusal["reason"]
    sim.schedule("Reboot", source="User", notice_seconds=600)
    service.wait_log("approved", rule="user-initiated")

    service.write_policy(rules=[{"name": "other", "approve": "never"}])
    service.reload()
    assert service.log("the policy file was read again", rules="other")
    machine = service.machine
    machine.wait_for(lambda: "rejected" not in service.show("StatusText"), "the refusal was forgotten")


def test_a_stop_lets_a_running_hook_end_and_it_is_not_run_again(service: Service, sim: Simulator) -> None:
    wait = "until [ -e /root/go ]; do sleep 0.1; done"
    service.write_policy(**drain_with(f"echo began >> /root/notes; {wait}; echo ended >> /root/notes"))
    service.reload()
    event = sim.schedule("Reboot", notice_seconds=600)
    service.machine.wait_for(lambda: service.records() == ["began"], "the hook ran")
    service.machine.run("systemctl", "stop", "--no-block", UNIT)
    service.wait_status("Stopping")
    service.machine.write("/root/go", "")
    service.machine.wait_for(lambda: service.show("ActiveState") == "inactive", "it had stopped")
    assert service.records() == ["began", "ended"]
    assert service.log("stopping, once these hooks have ended: drain")
    assert service.show("Result") == "success"
    service.systemctl("start")
    sim.wait_approved(event)
    assert service.records() == ["began", "ended"]


def test_it_is_up_before_ordinary_servers_and_goes_down_after_them(service: Service) -> None:
    unit = "[Unit]\nAfter=network.target\n[Service]\nExecStart=/bin/sleep 1000\n"
    server = f"{unit}[Install]\nWantedBy=multi-user.target\n"
    service.machine.write("/etc/systemd/system/server.service", server)
    service.machine.run("systemctl", "enable", "--now", "server.service")
    service.machine.reboot()
    assert service.show("ActiveState") == "active"

    def when(entry_has: dict[str, str], boot: int) -> int:
        entries = service.machine.journal(boot=boot)
        found = [entry for entry in entries if entry_has.items() <= entry.items()]
        assert found, f"nothing in the journal of boot {boot} has {entry_has}"
        return int(found[-1]["__MONOTONIC_TIMESTAMP"])

    stopped = {"JOB_TYPE": "stop", "JOB_RESULT": "done"}
    assert when({"UNIT": "server.service", **stopped}, -1) < when({"UNIT": UNIT, **stopped}, -1)
    started = {"JOB_TYPE": "start", "JOB_RESULT": "done"}
    assert when({"UNIT": UNIT, **started}, 0) < when({"UNIT": "server.service", **started}, 0)
    messages = [str(entry["MESSAGE"]) for entry in service.machine.journal(boot=None)]
    assert [message for message in messages if "ordering cycle" in message] == []


# --- root: what hooks may do


def test_a_hook_of_root_changes_the_machine_and_not_a_copy_of_it(service: Service, sim: Simulator) -> None:
    service.write_policy(
        **drain_with("mount -t tmpfs drained /mnt && touch /etc/drained /tmp/drained /home/drained")
    )
    service.reload()
    sim.wait_approved(sim.schedule("Reboot", notice_seconds=600))
    assert "drained on /mnt type tmpfs" in service.machine.run("mount").stdout
    for place in ("etc", "tmp", "home"):
        assert service.machine.path(f"/{place}/drained").exists()


def test_a_hook_of_root_starts_a_oneshot_unit_and_returns_its_result(service: Service, sim: Simulator) -> None:
    machine = service.machine
    drain = "while [ -e /root/wait ]; do sleep 0.1; done; touch /root/drained; test ! -e /root/broken"
    unit = f"[Service]\nType=oneshot\nExecStart=/bin/sh -c '{drain}'\n"
    machine.write("/etc/systemd/system/drain-web.service", unit)
    machine.run("systemctl", "daemon-reload")
    hook = {"run": ["systemctl", "start", "drain-web.service"], "serialize": True}
    service.write_policy(rules=RULES, hooks={"drain": hook})
    service.reload()
    machine.write("/root/wait", "")
    event = sim.schedule("Reboot", notice_seconds=600)
    is_active = ("systemctl", "is-active", "drain-web.service")
    machine.wait_for(lambda: "activating" in machine.run(*is_active, check=False).stdout, "the unit ran")
    service.wait_status("runs hook drain")
    assert sim.approvals(event) == ()
    machine.path("/root/wait").unlink()
    sim.wait_approved(event)
    assert machine.path("/root/drained").exists()

    machine.write("/root/broken", "")
    sim.schedule("Reboot", notice_seconds=600)
    service.wait_log("hook finished", hook="drain", reason="hook drain: exit code 1 (failed)")


def test_root_has_no_capability_that_no_hook_needs(service: Service) -> None:
    status = service.process_status()
    names = ["sys_time", "mac_admin", "mac_override", "sys_rawio", "sys_boot", "sys_pacct", "wake_alarm"]
    bounds = service.machine.run("capsh", f"--decode={status['CapBnd']}").stdout
    names += ["block_suspend", "sys_tty_config", "audit_read"]
    assert [name for name in names if f"cap_{name}" in bounds] == []
    assert "cap_sys_admin" in bounds
    assert "cap_kill" in bounds
    assert status["Seccomp"] == "2"  # a filter
    assert status["NoNewPrivs"] == "0"


def test_a_hook_of_root_opens_sockets_but_none_of_dead_networks(service: Service, sim: Simulator) -> None:
    families = ("AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_BLUETOOTH", "AF_X25", "AF_CAN")
    program = (
        "import socket\n"
        f"for name in {families}:\n"
        "    try: socket.socket(getattr(socket, name, 9), socket.SOCK_RAW if name == 'AF_PACKET' else 2).close()\n"
        "    except OSError as error: told = error.errno\n"
        "    else: told = 0\n"
        "    open('/root/notes', 'a').write(f'{name} {told == 97}\\n')\n"
    )
    service.machine.write("/root/sockets.py", program)
    service.write_policy(**drain_with("python3 /root/sockets.py"))
    service.reload()
    sim.wait_approved(sim.schedule("Reboot", notice_seconds=600))
    # 97: the address family is not supported; of the last three, also where a kernel has them.
    told = dict(line.split() for line in service.records())
    assert [told[family] for family in ("AF_PACKET", "AF_INET6", "AF_NETLINK")] == ["False"] * 3
    assert [told[family] for family in ("AF_BLUETOOTH", "AF_X25", "AF_CAN")] == ["True"] * 3


@pytest.mark.parametrize("is_strict", [False, True], ids=["root", "strict"])
def test_secrets_reach_hooks_as_credentials_and_nothing_else(
    service: Service, sim: Simulator, is_strict: bool
) -> None:
    give_secret(service)
    if is_strict:
        make_strict(service.machine)
    show_secret(service, sim, "s3cret", f"{ETC}/credentials")
    # The next run reads the file as it is then.
    service.machine.write(f"{ETC}/credentials/token", "s3cond", 0o640)
    show_secret(service, sim, "s3cond", f"{ETC}/credentials")


@pytest.mark.parametrize("is_strict", [False, True], ids=["root", "strict"])
def test_credentials_loaded_by_systemd_replace_the_directory(
    service: Service, sim: Simulator, is_strict: bool
) -> None:
    service.machine.write(f"{ETC}/credentials/token", "s3cret", 0o600)
    if is_strict:
        make_strict(service.machine)
    page = (CHECKOUT / "docs/systemd.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^LoadCredential=.*$", page, re.MULTILINE)
    service.add_drop_in(f"[Service]\n{shown}\n")
    show_secret(service, sim, "s3cret", "/run/credentials/scheduled-events-agent.service")


def give_secret(service: Service) -> None:
    """By the line of the page."""
    service.machine.write("/root/token", "s3cret")
    (commands, *_) = shown_commands("docs/systemd.md", "## Secrets")
    service.machine.run("sh", "-euc", "\n".join(["cd /root", *commands]))


def show_secret(service: Service, sim: Simulator, secret: str, directory: str) -> None:
    """A hook reads it there; nothing else has it, and no other account."""
    service.write_policy(**drain_with("cat $CREDENTIALS_DIRECTORY/token; env"))
    service.systemctl("restart")
    event = sim.schedule("Reboot", notice_seconds=600)
    sim.wait_approved(event)
    lines = [entry["line"] for entry in service.log("hook output", event_id=event)]
    assert lines[0].startswith(secret)
    assert secret not in "\n".join(lines)[len(secret) :]
    assert next(line for line in lines if "CREDENTIALS_DIRECTORY=" in line).partition("=")[2] == directory
    refused = service.machine.run("cat", f"{directory}/token", user="nobody", check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert secret not in service.machine.run("cat", f"/proc/{service.pid()}/environ").stdout


def test_without_the_directory_of_secrets_it_still_starts(service: Service) -> None:
    service.machine.run("rmdir", f"{ETC}/credentials")
    service.systemctl("restart")
    assert service.show("StatusText") == "Nothing is pending"


# --- strict


@pytest.fixture
def strict(service: Service) -> Service:
    make_strict(service.machine)
    return service


def test_strict_runs_without_privileges(strict: Service) -> None:
    status = strict.process_status()
    uid = strict.machine.run("id", "-u", "scheduled-events-agent").stdout.strip()
    assert status["Uid"].split() == [uid] * 4
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert strict.machine.path("/var/lib/scheduled-events-agent").stat().st_mode & 0o777 == 0o700


# Attempts of a strict agent's hook, and the error that each gets.
REFUSED = {
    "touch /etc/x": "Read-only file system",
    "touch /var/lib/x": "Read-only file system",
    "ls /home/somebody": "Permission denied",
    "unshare --user true": "Operation not permitted",
    "mount -t tmpfs none /mnt": "must be superuser to use mount.",
    "dmesg": "Operation not permitted",
    "chmod u+s tool": "Operation not permitted",
    "python3 -c 'import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)'": (
        "Address family not supported by protocol"
    ),
    "python3 -c 'import mmap; mmap.mmap(-1, 4096, prot=7)'": "Operation not permitted",
    "systemctl stop dbus.service": "Interactive authentication required",
}


def test_strict_reaches_the_journal_with_fields_of_its_own(strict: Service, sim: Simulator) -> None:
    check_journal(strict, sim)


def test_strict_denies_a_hook_unneeded_access(strict: Service, sim: Simulator) -> None:
    tries = "".join(f"echo 'now {number}'\n{command}\n" for number, command in enumerate(REFUSED))
    strict.machine.write("/usr/local/bin/try", f"#!/bin/sh\ntouch tool\n{tries}echo now the end\nrm tool\n", 0o755)
    hook = {"run": ["/usr/local/bin/try"], "cwd": "/var/lib/scheduled-events-agent"}
    strict.write_policy(rules=RULES, hooks={"drain": hook})
    strict.reload()
    sim.wait_approved(sim.schedule("Reboot", notice_seconds=600))
    said = " ".join(entry["line"] for entry in strict.log("hook output"))
    answers = re.split(r"now (?:[0-9]+|the end)", said)[1:-1]
    assert len(answers) == len(REFUSED)
    wrong = [
        f"{command}: {answer}"
        for (command, expected), answer in zip(REFUSED.items(), answers, strict=True)
        if expected not in answer
    ]
    assert wrong == []


def test_strict_reaches_loopback_and_the_endpoint_and_no_other_address(installed: Container) -> None:
    # In a network of its own all addresses are its own; a filter on addresses does not mind.
    with Container(installed, private_network=True) as machine:
        service = Service(machine, "http://127.0.0.1:9")
        for address in ("192.0.2.1", "169.254.169.254"):
            machine.run("ip", "address", "add", f"{address}/32", "dev", "lo")
        ask = (
            "import socket, sys\n"
            "listener = socket.create_server(('', 0))\n"
            "for address in ('127.0.0.1', '169.254.169.254', '192.0.2.1'):\n"
            "    try:\n"
            "        socket.create_connection((address, listener.getsockname()[1]), 3)\n"
            "        print(address, 'reached')\n"
            "    except OSError as error:\n"
            "        print(address, type(error).__name__)\n"
        )
        machine.write("/usr/local/bin/ask.py", ask, 0o755)
        service.write_policy(hooks={"ask": {"run": ["python3", "/usr/local/bin/ask.py"]}}, on_clear=["ask"])
        make_strict(machine)
        simulator = ("scheduled-events-agent", "simulate", "--port", "8765", "--vm", "vm-1")
        machine.run("systemd-run", "--unit=simulator", *simulator)
        service.endpoint = "http://127.0.0.1:8765"
        service.write_policy(hooks={"ask": {"run": ["python3", "/usr/local/bin/ask.py"]}}, on_clear=["ask"])
        service.systemctl("restart")
        service.wait_log("on_clear hook ended")
        lines = [entry["line"] for entry in service.log("hook output")]
        assert lines[:2] == ["127.0.0.1 reached", "169.254.169.254 reached"]
        assert lines[2] in ("192.0.2.1 TimeoutError", "192.0.2.1 PermissionError")


@pytest.mark.parametrize("key", [f"{ETC}/server.key", f"{ETC}/credentials/server.key"])
def test_strict_serves_tls_with_a_key_that_only_its_account_can_read(
    service: Service, tmp_path: Path, key: str
) -> None:
    machine = service.machine
    request = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost")
    names = ("-addext", "subjectAltName=IP:127.0.0.1")
    machine.run(*request, *names, "-keyout", f"{ETC}/credentials/key", "-out", f"{ETC}/server.pem")
    machine.write(f"{ETC}/web.yml", f"tls_server_config: {{cert_file: server.pem, key_file: {key}}}\n")
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        service.write_policy(agent={"listen": address, "web_config": f"{ETC}/web.yml"})
        make_strict(machine)
        install = ("install", "-m", "640", "-g", "scheduled-events-agent")
        service.wait_status(f"{key}: cannot be read: No such file or directory")
        machine.run(*install, f"{ETC}/credentials/key", key)
        # It is up without its pages, too.
        service.wait_status(f"The web server is not listening: cannot listen on {address}: Address already in use")
    service.wait_log("the web server is listening")
    (tmp_path / "server.pem").write_bytes(machine.path(f"{ETC}/server.pem").read_bytes())
    context = ssl.create_default_context(cafile=str(tmp_path / "server.pem"))
    with urllib.request.urlopen(f"https://{address}/healthz", context=context) as answer:
        assert answer.read() == b"ok\n"
    service.reload()  # which checks the file as well, and as the agent sees it
    machine.wait_for(lambda: service.show("StatusText") == "Nothing is pending", "nothing was amiss")


def test_root_commands_reach_a_strict_agent_and_leave_no_root_files(strict: Service, sim: Simulator) -> None:
    machine, state = strict.machine, "/var/lib/scheduled-events-agent"
    strict.write_policy(rules=[{"name": "reboots", "approve": "manual"}])
    strict.systemctl("restart")
    event = sim.schedule("Reboot", notice_seconds=600)
    strict.wait_status("needs an operator's approval")
    strict.systemctl("stop")
    machine.run("sh", "-c", f"rm -f {state}/state.db-*")  # a process that opens the state now creates these again
    told = machine.run("scheduled-events-agent", "status", check=False)
    assert (told.returncode, event[:8] in told.stdout) == (3, True)
    assert event in machine.run("scheduled-events-agent", "history").stdout
    owners = machine.run("sh", "-c", f"stat -c %U {state} {state}/*").stdout.split()
    assert set(owners) == {"scheduled-events-agent"}
    strict.systemctl("start")
    machine.run("scheduled-events-agent", "approve", event)
    sim.wait_approved(event)
    assert machine.run("scheduled-events-agent", "status").returncode == 0


def test_back_from_strict_the_state_is_kept(strict: Service, sim: Simulator) -> None:
    strict.write_policy(rules=[{"name": "reboots", "approve": "manual"}])
    strict.systemctl("restart")
    sim.schedule("Reboot", notice_seconds=600)
    strict.wait_status("needs an operator's approval")
    make_root(strict.machine)
    assert strict.process_status()["Uid"].split() == ["0"] * 4
    assert strict.log("agent started", pending=1)
