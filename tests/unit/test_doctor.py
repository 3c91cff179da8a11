"""Checks of doctor: observations in, findings out."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from status_samples import a_workflow, some_facts

from scheduled_events_agent import RUNBOOK, __version__, host
from scheduled_events_agent.cli.config import load_policy
from scheduled_events_agent.cli.doctor import check_running_agent
from scheduled_events_agent.cli.doctor_checks import (
    Finding,
    check_clock,
    check_denied_here,
    check_disk,
    check_document,
    check_guest_proxy,
    check_no_proxy,
    check_notifications,
    check_other_agents,
    check_unreachable,
    check_vm_name,
    failure,
    format_findings,
    ok,
    waiting,
    warning,
)
from scheduled_events_agent.cli.terminal import Terminal
from scheduled_events_agent.host.conflicts import ActingAgent, Approver, ApproverState
from scheduled_events_agent.imds.client import ImdsError, RawResponse
from scheduled_events_agent.imds.guest_proxy import Caller
from scheduled_events_agent.policy.load import BUILT_IN_NAME
from scheduled_events_agent.policy.settings import VmSettings
from scheduled_events_agent.status import (
    ActivePolicy,
    Attention,
    NotifiedTarget,
    TargetFailure,
    Vm,
)
from scheduled_events_agent.status.events import to_status
from scheduled_events_agent.workflow import StageStatus, WaitReason

NOON = datetime(2026, 4, 11, 12, tzinfo=UTC)
FACTS = some_facts(
    at=NOON,
    version=__version__,
    started_at=NOON,
    vm=Vm(names=("vm-1",), vm_id="1"),
    policy=ActivePolicy(file="p.yaml", read_at=NOON),
    rules=(),
    last_poll_at=NOON,
)
STATUS = to_status(FACTS)
SOMETHING_ELSE = "check imds.endpoint, and what else answers there: a proxy, a portal, another service"


def answer(status: int = 200, body: Any = b"", error: ImdsError | None = None, **headers: str) -> RawResponse:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return RawResponse(status=status, headers=fields, body=content, error=error)


def instance(name: str) -> RawResponse:
    return answer(body={"compute": {"name": name, "vmId": "1"}})


def events(*resources: list[str]) -> RawResponse:
    listed = [{"EventId": str(number), "Resources": names} for number, names in enumerate(resources)]
    return answer(body={"DocumentIncarnation": 1, "Events": listed})


# --- the words

NOWHERE = Terminal(width=None, has_colors=False)
WINDOW = Terminal(width=45, has_colors=True)

FINDINGS = [
    ok("endpoint", "answers"),
    warning("clock", "late", "set it"),
    failure("a", "bad\x1b[2Jname", "mend it"),
    *waiting(["name"], "a"),
]


def test_findings_are_an_aligned_list_with_what_to_do_below_each() -> None:
    assert list(format_findings(FINDINGS, NOWHERE)) == [
        "ok       endpoint       answers",
        "warning  clock          late",
        "                        -> set it",
        r"error    a              bad\x1b[2Jname",
        "                        -> mend it",
        "skipped  name           waits for the check a",
        "1 ok, 1 warning, 1 error, 1 skipped",
    ]


def test_only_the_result_is_coloured() -> None:
    lines = list(format_findings(FINDINGS, WINDOW))
    assert lines[:2] == [
        "\x1b[32mok\x1b[0m       endpoint       answers",
        "\x1b[1;33mwarning\x1b[0m  clock          late",
    ]


def test_findings_are_wrapped_to_the_window() -> None:
    finding = warning("clock", "two words and a lot more of them", "set it, or let another program set it")
    assert list(format_findings([finding], WINDOW))[:-1] == [
        "\x1b[1;33mwarning\x1b[0m  clock          two words and a lot",
        "                        more of them",
        "                        -> set it, or let",
        "                           another program",
        "                           set it",
    ]


# --- the metadata service


@pytest.mark.parametrize(
    ("found", "sign"),
    [
        (answer(via="1.1 proxy.example"), "the header via: 1.1 proxy.example"),
        (answer(x_cache="HIT from squid"), "the header x-cache: HIT from squid"),
        (answer(302, location="http://portal.example/"), "a redirect (302) to http://portal.example/"),
        (answer(301), "a redirect (301) to nowhere"),
        (answer(content_type="text/html; charset=utf-8"), "a web page"),
        (answer(body=b"\r\n <!DOCTYPE html>"), "a web page"),
    ],
)
def test_a_proxy_for_imds_is_a_failure(found: RawResponse, sign: str) -> None:
    assert check_no_proxy([instance("vm"), found]) == failure(
        "proxy",
        f"something other than the metadata service has answered, or changed the answer: {sign}",
        "exempt the endpoint from every proxy, also transparent ones",
    )


def test_responses_without_a_sign_of_a_proxy_are_direct() -> None:
    assert check_no_proxy([instance("vm"), answer()]) == ok("proxy", "no sign of a proxy")


OF_ROOT = Caller("root", "/usr/bin/python3.11")
OF_STRICT = Caller("scheduled-events-agent", "/usr/bin/python3.11")
PATHS = ("/metadata/scheduledevents", "/metadata/instance")
RULE = (
    "a rule names this agent as user {}, executable /usr/bin/python3.11, process python3.11, for the paths "
    "/metadata/scheduledevents, /metadata/instance"
)
SHARED = "; that is every Python of root: only the strict set-up has a user of its own"


def test_the_check_proxy_names_the_agent_as_a_rule_of_azures_proxy_needs_it() -> None:
    assert check_guest_proxy(OF_ROOT, PATHS, "it is installed", is_denied=True) == ok(
        "proxy", f"Azure's Guest Proxy Agent is there (it is installed): {RULE.format('root')}{SHARED}"
    )
    assert check_guest_proxy(OF_STRICT, PATHS, "", is_denied=False) == ok(
        "proxy",
        f"no sign of a proxy; if Azure's Guest Proxy Agent comes: {RULE.format('scheduled-events-agent')}",
    )
    assert check_guest_proxy(OF_STRICT, PATHS, "", is_denied=True) == warning(
        "proxy",
        "a proxy denies requests, as Azure's Guest Proxy Agent does: " + RULE.format("scheduled-events-agent"),
        "see docs/metadata-proxy.md",
    )


def test_what_only_this_command_is_denied_is_no_error() -> None:
    found = check_denied_here("root", OF_STRICT)
    assert found.state == "warning"
    assert found.message.endswith("the agent asks as scheduled-events-agent, and its polls succeed")
    assert "run this as scheduled-events-agent, or allow root too" in found.hint


@pytest.mark.parametrize(
    ("kind", "status", "hint"),
    [
        ("denied", 403, "docs/metadata-proxy.md has the rule for each set-up"),
        ("denied", 401, f"run this again; if it stays: {host.guest_proxy_command()}"),
        ("unexpected_status", 421, f"run this again; if it stays: {host.guest_proxy_command()}"),
        ("server_error", 503, f"run this again; if it stays: {host.guest_proxy_command()}"),
        ("refused", None, f"run this again; if it stays: {host.guest_proxy_command()}; in a container, use"),
    ],
)
def test_a_failure_that_azures_proxy_explains_has_its_own_hint(kind: Any, status: int | None, hint: str) -> None:
    error = ImdsError("GET: no", kind=kind, status=status)
    error.is_of_guest_proxy = True
    assert check_unreachable("endpoint", error).hint.startswith(hint)


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("gone", "the service is being updated: run this again in two minutes"),
        (
            "bad_request",
            "remove imds.api_version from the policy; if the Metadata header was lost, find the proxy",
        ),
        ("throttled", "run this again; if it stays, find what else on this VM asks the metadata service so often"),
        ("malformed", SOMETHING_ELSE),
    ],
)
def test_a_request_that_failed_is_reported_with_a_hint(kind: Any, advice: str) -> None:
    found = check_unreachable("endpoint", ImdsError("GET: no", kind=kind))
    assert (found.check, found.state, found.message) == ("endpoint", "error", "GET: no")
    assert found.hint.startswith(advice)


@pytest.mark.parametrize(
    ("found", "finding"),
    [
        (events(), ok("events", "no event is pending, so it is not known yet how Resources name this VM")),
        (events(["vm"], ["other"]), ok("events", "2 events pending, Resources of 1 name this VM")),
        (events(["other", "_VM"]), ok("events", "1 event pending, Resources of 1 name this VM")),
        (events(["b", "a"]), ok("events", "1 event pending, for other VMs only: a, b")),
        (events(list("gfedcba")), ok("events", "1 event pending, for other VMs only: a, b, c, d, e, ...")),
        (events([]), ok("events", "1 event pending, for other VMs only: none is named")),
        (
            events(["vm000001"]),
            warning(
                "events",
                "1 event pending, none for vm, but Resources name vm000001, which is this machine's host name",
                "if that is this VM, add vm000001 to vm.aliases in the policy",
            ),
        ),
        (
            answer(),
            warning(
                "events",
                "the service is still switching scheduled events on for this VM: its answer is empty",
                "run this again in five minutes",
            ),
        ),
        (
            answer(500, b"", ImdsError("GET: 500", kind="server_error")),
            failure(
                "events",
                "GET: 500",
                "run this again in a minute; if it stays, restart the VM or ask Azure's support",
            ),
        ),
    ],
)
def test_events_show_whether_resources_name_this_vm(found: RawResponse, finding: Finding) -> None:
    assert check_document(found, ("vm",), "vm000001") == finding


def test_an_invalid_document_is_a_failure() -> None:
    found = check_document(answer(body=b"{]"), ("vm",), "")
    assert (found.check, found.state, found.hint) == ("events", "error", SOMETHING_ELSE)


@pytest.mark.parametrize(
    ("vm", "said", "finding"),
    [
        (VmSettings(), "vm_0", ok("vm-name", "this VM is vm_0")),
        (
            VmSettings(name="_VM_0", aliases=("x",)),
            "vm_0",
            ok("vm-name", "this VM is _VM_0, also known as x"),
        ),
        (VmSettings(name="vm_0"), "", ok("vm-name", "this VM is vm_0")),
        (
            VmSettings(name="vm_0"),
            "vm_1",
            warning(
                "vm-name",
                "the policy calls this VM vm_0, the service vm_1",
                "remove vm.name from the policy, unless Resources use that name",
            ),
        ),
        (
            VmSettings(name="__vm_0"),
            "vm_0",
            warning(
                "vm-name",
                "the policy calls this VM __vm_0, the service vm_0",
                "remove vm.name from the policy, unless Resources use that name",
            ),
        ),
        (
            VmSettings(),
            "",
            failure(
                "vm-name",
                "the service does not know this VM's name",
                "set vm.name in the policy to the name in Resources: without a name nothing is approved",
            ),
        ),
    ],
)
def test_the_name_is_the_policys_else_the_services(vm: VmSettings, said: str, finding: Finding) -> None:
    assert check_vm_name(vm, said) == finding


def clock(ahead: float, took: float = 0.1, says: str = "Sat, 11 Apr 2026 12:00:00 GMT") -> Finding:
    asked_at = NOON + timedelta(seconds=ahead)
    return check_clock(says, asked_at, asked_at + timedelta(seconds=took))


@pytest.mark.parametrize("ahead", [-2.05, -0.1, 0, 0.9, 2.95])
def test_a_clock_within_two_seconds_is_right_as_the_service_sends_whole_ones(ahead: float) -> None:
    assert clock(ahead) == ok("clock", "within 2 seconds of Azure's")


def test_a_slow_response_does_not_count_as_a_wrong_clock() -> None:
    assert clock(-60, took=61).state == "ok"


ADVICE = "synchronize the clock with chrony or systemd-timesyncd, on Windows with w32tm"


def test_a_wrong_clock_is_reported_with_its_effect_on_hooks() -> None:
    begin = "preparation and maintenance windows begin"
    early = f"ahead of Azure's: {begin} too early, and hooks get less time than there is"
    late = f"behind Azure's: {begin} too late, and hooks may still run when Azure starts an event"
    assert clock(3.5) == warning("clock", f"2 seconds {early}", ADVICE)
    assert clock(-29) == warning("clock", f"29 seconds {late}", ADVICE)
    assert clock(31.5) == failure("clock", f"30 seconds {early}", ADVICE)
    assert clock(-3600) == failure("clock", f"60 minutes {late}", ADVICE)


@pytest.mark.parametrize("says", ["", "yesterday", "Sat, 41 Apr 2026 12:00:00 GMT"])
def test_without_a_date_the_clock_cannot_be_checked(says: str) -> None:
    assert clock(3600, says=says) == warning(
        "clock",
        "the answer has no Date header, so this clock cannot be compared",
        "check the clock by other means: NotBefore is compared with it",
    )


# --- the machine

ELSEWHERE = "name a directory on the system's or a data disk with agent.state_dir"
ROOM = "make room: the agent does nothing that it cannot store first"
FULL = "make room: an agent that cannot write acts on no event"
MIB = 1024**2


@pytest.mark.parametrize(
    ("temporary", "kind", "free", "finding"),
    [
        (None, "ext4", 5000, ok("disk", "/s is on a persistent disk (ext4), 5,000 MiB free")),
        (None, None, 5000, ok("disk", "/s is on a persistent disk, 5,000 MiB free")),
        (
            "/mnt",
            "ext4",
            5000,
            failure("disk", "/s is on Azure's temporary disk /mnt, empty after a redeployment", ELSEWHERE),
        ),
        (None, "tmpfs", 5000, failure("disk", "/s is in memory (tmpfs), and gone after a reboot", ELSEWHERE)),
        (
            None,
            "overlay",
            5000,
            warning(
                "disk",
                "/s is on the overlay of a container, and lost with it",
                "mount a volume there: after a restart the agent must know what it had prepared",
            ),
        ),
        (None, "ext4", 0, failure("disk", "/s is full: 0 MiB free", FULL)),
        (None, "ext4", 100, warning("disk", "/s: 100 MiB free", ROOM)),
        (None, "overlay", 15, warning("disk", "/s: 15 MiB free", ROOM)),
    ],
)
def test_the_states_disk_has_to_survive_a_redeployment_and_have_room(
    temporary: str | None, kind: str | None, free: int, finding: Finding
) -> None:
    assert check_disk("/s", temporary, kind, free * MIB) == finding


def test_a_state_that_the_system_clears_is_a_warning() -> None:
    text = "/tmp/s is in a directory that the system clears, as at a reboot"
    found = check_disk("/tmp/s", None, "ext4", 5000 * MIB, is_cleared=True)
    assert found == warning("disk", text, ELSEWHERE)


@pytest.mark.parametrize(
    ("life", "is_acting", "state", "text"),
    [
        ("active", True, "error", "X approves events too, perhaps before the hooks have run (here)"),
        ("active", False, "warning", "X approves events too (here)"),
        ("maybe", True, "warning", "X runs, and approves events too if its configuration says so (here)"),
        ("installed", True, "warning", "X is installed and does not run; it would approve events too (here)"),
    ],
)
def test_another_agent_is_a_failure_only_if_both_would_act(
    life: ApproverState, is_acting: bool, state: str, text: str
) -> None:
    (found,) = check_other_agents([Approver("X", "here", life, "stop it")], [], is_acting=is_acting)
    assert (found.state, found.message) == (state, text)
    assert found.hint in ("stop it", "remove it; if it is to run again: stop it")


def test_no_other_agent_passes() -> None:
    assert list(check_other_agents([], [], is_acting=True)) == [
        ok("other-agents", "no other agent that approves events was found")
    ]


def test_another_agent_of_this_program_is_a_warning_with_its_pid_and_command() -> None:
    agents = [
        ActingAgent(17, "scheduled-events-agent run"),
        ActingAgent(18, "python -m scheduled_events_agent run"),
    ]
    advice = "stop one of the two, or start it with --observe"
    assert list(check_other_agents([], agents, is_acting=True)) == [
        warning("other-agents", f"another agent acts on this machine, process {one.pid}: {one.command}", advice)
        for one in agents
    ]


# --- notifications


def a_target(**fields: Any) -> NotifiedTarget:
    return NotifiedTarget(**{"name": "ops", "waiting": 0, "oldest_at": None, "failure": None, **fields})


TRY = "correct it, and try it: test ops"


def test_a_target_that_cannot_be_used_fails_or_has_lost_something_is_a_warning() -> None:
    failing = a_target(failure=TargetFailure(since=NOON, reason="it answers 401"))
    lossy = a_target(lost=2, lost_at=NOON - timedelta(days=1), lost_reason="it answers 400")
    unusable = [("ops", "to: /nowhere: cannot be read")]
    assert [*check_notifications(("ops",), unusable, (failing, lossy), "test {}".format, NOON)] == [
        warning("notifications", "ops: to: /nowhere: cannot be read", TRY, command="test ops"),
        warning(
            "notifications",
            "ops: has failed since 12:00:00 UTC: it answers 401",
            TRY,
            command="test ops",
        ),
        warning(
            "notifications",
            "ops: 2 notifications lost since 2026-04-10 12:00:00 UTC: it answers 400",
            TRY,
            command="test ops",
        ),
    ]


def test_healthy_targets_are_one_finding_and_so_are_none() -> None:
    assert [*check_notifications(("ops", "audit"), (), (a_target(),), "test {}".format, NOON)] == [
        ok("notifications", "2 targets: nothing is known to be wrong")
    ]
    none = ok("notifications", "the policy names no service to notify")
    assert [*check_notifications((), (), (), "test {}".format, NOON)] == [none]


# --- the agent


CHANGED = "with the policy as it was read at 12:00:00 UTC; its file has changed since"
REJECTED = "with the policy accepted at 12:00:00 UTC: its file as it is now is rejected"


@pytest.mark.parametrize(
    ("fields", "mode", "doubt"),
    [
        ({}, "act", None),
        ({"mode": "observe"}, "observe", None),
        ({"version": "0.0.9"}, "act", f"{__version__} is installed"),
        (
            {"policy": {"file": BUILT_IN_NAME}},
            "act",
            "with the policy built-in policy, and these checks looked at another",
        ),
        ({"policy": {"hash": "another"}}, "act", CHANGED),
        ({"policy": {"rejected": "it has an error"}}, "act", REJECTED),
        ({"mode": "observe"}, "act", "and only observes: no hook runs and nothing is approved"),
    ],
)
def test_a_healthy_agent_that_differs_from_the_policy_is_a_warning(
    fields: dict[str, Any], mode: str, doubt: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.yaml").write_text(f"agent: {{mode: {mode}}}\n")
    loaded = load_policy(Path("p.yaml"))
    policy = {"file": "p.yaml", "read_at": NOON, "hash": loaded.hash, **fields.get("policy", {})}
    status = msgspec.structs.replace(STATUS, **{**fields, "policy": ActivePolicy(**policy)})
    found = check_running_agent("17", status, loaded)
    runs = f"runs (pid 17), version {fields.get('version', __version__)}"
    assert found.state == ("warning" if doubt else "ok")
    assert found.message == (f"{runs}, {doubt}" if doubt else runs)
    supervisor = host.supervisor_commands()
    needed = {
        f"{__version__} is installed": supervisor.restart,
        CHANGED: supervisor.reload,
        REJECTED: supervisor.reload,
    }
    assert found.command == needed.get(doubt or "", "")
    assert found.command in found.hint


def test_an_agent_that_needs_a_person_is_a_warning_with_the_first_entry() -> None:
    held = Attention(
        kind="prepare_failed", severity="act", since=None, message="The Reboot of vm-1 is held: it failed."
    )
    away = Attention(kind="out_of_service", severity="fix", since=None, message="vm-1 is out of service.")
    for attention in ((held, away), (away,)):
        first = attention[0]
        status = msgspec.structs.replace(STATUS, attention=attention, condition=first.severity)
        found = check_running_agent("17", status, None)
        told = f"runs (pid 17), version {__version__}: {first.message}"
        assert (found.state, found.message) == ("warning", told)
        assert found.hint.endswith(f"; runbook {RUNBOOK}#{first.kind}")


def test_an_unhealthy_agent_is_a_failure_and_a_silent_one_a_warning() -> None:
    ill = msgspec.structs.replace(
        FACTS, faults=("its disk is full",), polls="overdue", poll_failure_summary="timed out"
    )
    found = check_running_agent("17", to_status(ill), None)
    told = ", and is not healthy: Its disk is full. Azure's metadata service has not answered since 12:00:00 UTC: "
    told += "timed out."
    assert (found.state, found.message) == ("error", f"runs (pid 17), version {__version__}{told}")
    assert found.hint.endswith(f"; runbook {RUNBOOK}#unhealthy")
    held = a_workflow(
        phase="held", prepare=StageStatus(state="failed", run=1), wait_reason=WaitReason(kind="prepare_failed")
    )
    beside = to_status(msgspec.structs.replace(ill, workflows=(held,)))
    assert [one.kind for one in beside.attention] == ["prepare_failed", "unhealthy", "unhealthy"]
    assert check_running_agent("17", beside, None).hint == found.hint
    assert check_running_agent("17", "the agent (pid 17) does not answer", None) == warning(
        "agent",
        "the agent (pid 17) does not answer",
        "see the checks state and disk, and its log; if it stays, restart it",
    )
